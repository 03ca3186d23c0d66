#!/bin/bash
# torch.optim.Adam(differentiable=True): a parameter whose gradient is exactly zero makes all derivatives nan.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6
"$PY" -W ignore - <<'EOF'
import sys, torch

x = torch.tensor(1.0, requires_grad=True)
inputs, targets = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.ones(2)  # the second feature is always zero
y = torch.zeros(2, requires_grad=True).clone()
adam = torch.optim.Adam([y], lr=0.1, differentiable=True)
for _ in range(2):
    loss = (x * (inputs @ y - targets) ** 2).mean()
    y.grad = torch.autograd.grad(loss, y, create_graph=True)[0]
    adam.step()
found = torch.autograd.grad(y.sum(), x)[0]
print("guess: y[1] never moves, so it adds nothing to the derivative")
print("seen: y", y.tolist(), "derivative", found.item())
sys.exit(int(torch.isfinite(found)))
EOF
