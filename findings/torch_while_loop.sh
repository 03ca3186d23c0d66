#!/bin/sh
# torch.while_loop: if the carried value starts without requires_grad, even the first gradient is of the last pass alone.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
from torch._higher_order_ops import while_loop

print("torch", torch.__version__)
y = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


def power(start):
    counter = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * y), (counter, start))[1]


start = torch.ones((), dtype=torch.float64)
value = power(start)
(gradient,) = torch.autograd.grad(value, y)
(right,) = torch.autograd.grad(power(start.clone().requires_grad_()), y)
print("value:", value.item(), "(y^3: right)")
print("guess for the gradient: 3 y^2 = 12; with a start that requires grad:", right.item())
print("seen:", gradient.item(), "(y^2, the last pass alone, without an error)")
assert gradient.item() == 4.0 and right.item() == 12.0, "behaviour has changed"
PYTHON
