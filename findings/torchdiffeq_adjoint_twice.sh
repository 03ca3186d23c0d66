#!/bin/bash
# torchdiffeq: differentiating the gradient of odeint_adjoint once more gives a number that is wrong.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6 scipy==1.17.1 torchdiffeq==0.2.5
"$PY" -W ignore - <<'EOF'
import sys, torch, torchdiffeq

torch.set_default_dtype(torch.float64)
theta = torch.tensor(0.7, requires_grad=True)


class Decay(torch.nn.Module):
    def forward(self, t, y):
        return -theta.square() * y


ends, one = torch.tensor([0.0, 1.0]), torch.ones(1)
found = {}
for name, solve in (("odeint", torchdiffeq.odeint), ("odeint_adjoint", torchdiffeq.odeint_adjoint)):
    options = {"adjoint_params": (theta,)} if name == "odeint_adjoint" else {}
    y = solve(Decay(), one, ends, rtol=1e-9, atol=1e-9, **options)[-1].sum() + theta**2 / 2  # a penalty
    first, = torch.autograd.grad(y, theta, create_graph=True)
    found[name] = torch.autograd.grad(first, theta)[0].item()
print("guess: both give the second derivative of exp(-theta^2) + theta^2 / 2, or the adjoint refuses")
print("seen:", found)
sys.exit(abs(found["odeint_adjoint"] - found["odeint"]) < 0.1)
EOF
