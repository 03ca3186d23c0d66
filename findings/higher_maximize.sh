#!/bin/bash
# higher ignores maximize=True of the optimizer that it is given: an inner loop that ascends becomes one that descends.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6 higher==0.2.1
"$PY" -W ignore - <<'EOF'
import sys, torch, higher

torch.set_default_dtype(torch.float64)
target = torch.tensor([1.0, -2.0, 3.0])


class Adversary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.noise = torch.nn.Parameter(torch.zeros(3))

    def forward(self, scale):
        return -(scale * self.noise - target).square().sum()


wrong = True
for name in ("SGD", "Adam", "Adamax"):
    reference, model = Adversary(), Adversary()
    optimizer = getattr(torch.optim, name)(reference.parameters(), lr=0.1, maximize=True)
    for _ in range(20):
        optimizer.zero_grad()
        reference(1.0).backward()
        optimizer.step()
    scale = torch.tensor(1.0, requires_grad=True)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, maximize=True)
    with higher.innerloop_ctx(model, optimizer) as (inner, unrolled):
        for _ in range(20):
            unrolled.step(inner(scale))
        seen = inner.noise.detach()
    print(f"{name}: torch.optim goes to", [round(v, 3) for v in reference.noise.tolist()], "and higher, as a guess, too")
    print("seen:", [round(v, 3) for v in seen.tolist()])
    wrong &= bool((reference.noise.detach() * target > 0).all()) and bool((seen * target < 0).all())
sys.exit(not wrong)
EOF
