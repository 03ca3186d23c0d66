#!/bin/sh
# once_differentiable: its error of the second differentiation is not raised by autograd.grad, which skips the branch.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch

print("torch", torch.__version__)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


y = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
(gradient,) = torch.autograd.grad(Cube.apply(y * 1) ** 2 + y**2, y, create_graph=True)
print("gradient:", gradient.item(), "(6 y^5 + 2 y: right)")
print("guess for its derivative: an error, 'trying to differentiate twice a function that was marked ...'")
try:
    gradient.backward(retain_graph=True)
    raised = False
except RuntimeError as error:
    raised = True
    print("seen with gradient.backward():", str(error)[:60])
(seen,) = torch.autograd.grad(gradient, y)
print("seen with autograd.grad(gradient, y):", seen.item(), "(the 2 of y^2 alone; right is 30 y^4 + 2 = 482)")
assert raised and seen.item() == 2.0, "behaviour has changed"
PYTHON
