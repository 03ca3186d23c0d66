#!/bin/sh
# torch.cond: the gradient with create_graph=True has no graph, so a second derivative is the rest's alone.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch

print("torch", torch.__version__)
y = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
value = torch.cond(y.sum() > -9, lambda t: t**3, lambda t: t**2, (y,)).sum() + y.square().sum()
(gradient,) = torch.autograd.grad(value, y, create_graph=True)
(second,) = torch.autograd.grad(gradient.sum(), y)
print("gradient:", gradient.tolist(), "(3 y^2 + 2 y: right)")
print("guess for its derivative: 6 y + 2 = [5, -4]")
print("seen:", second.tolist(), "(the 2 alone, without an error)")
assert second.tolist() == [2.0, 2.0], "behaviour has changed"
PYTHON
