#!/bin/sh
# scan: the gradient is right, its derivative is a wrong number.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
from torch._higher_order_ops import scan

print("torch", torch.__version__)
y = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
data = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)


def by_scan(y):
    return scan(lambda h, z: ((h * y + z).tanh(), h.clone()), torch.zeros((), dtype=torch.float64), data)[0]


def by_loop(y):
    h = torch.zeros((), dtype=torch.float64)
    for z in data:
        h = (h * y + z).tanh()
    return h


def derivatives(function):
    (first,) = torch.autograd.grad(function(y), y, create_graph=True)
    return first.item(), torch.autograd.grad(first, y)[0].item()


(first, second), (same, seen) = derivatives(by_loop), derivatives(by_scan)
print("first derivative:", first, "by scan", same, "(right)")
print("guess for the second:", second)
print("seen:", seen, "(without an error)")
assert abs(first - same) < 1e-12 and abs(seen - second) > 0.1 * abs(second), "behaviour has changed"
PYTHON
