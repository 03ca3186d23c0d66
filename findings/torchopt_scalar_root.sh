#!/bin/bash
# TorchOpt's custom_root: if x and y are 0-dimensional, the gradient is 0; with shape (1,) it is right.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6 torchopt==0.7.3
"$PY" -W ignore - <<'EOF'
import sys, torch, torchopt

torch.set_default_dtype(torch.float64)


@torchopt.diff.implicit.custom_root(lambda y, x: 2 * y - x, argnums=1)
def solve(start, x):
    return x.detach() / 2


found = {}
for shape in ((1,), ()):
    x = torch.full(shape, 3.0, requires_grad=True)
    found[shape] = float(torch.autograd.grad(solve(torch.zeros(shape), x).sum(), x)[0])
print("guess: the derivative of x / 2 is 0.5, whether x is a scalar or has one entry")
for shape, value in found.items():
    print(f"seen: shape {shape}: {value}")
sys.exit(not (found[()] == 0 and abs(found[1,] - 0.5) < 1e-9))
EOF
