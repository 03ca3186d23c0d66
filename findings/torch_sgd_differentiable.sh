#!/bin/sh
# SGD(momentum=, differentiable=True): the momentum buffer made in the first step has no graph.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch

print("torch", torch.__version__)


def end(x, differentiable):
    start = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    y = start.clone() if differentiable else start
    optimizer = torch.optim.SGD([y], lr=0.1, momentum=0.9, differentiable=differentiable)
    for _ in range(3):
        y.grad = x * y.clone() if differentiable else (x * y).detach()
        optimizer.step()
    return y.sum()


x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
y = end(x, True)
(seen,) = torch.autograd.grad(y, x)
expected = (end(x + 1e-6, False) - end(x - 1e-6, False)).detach() / 2e-6
print("end after three steps:", y.item(), "without differentiable:", end(x, False).item())
print("guess for its derivative in x, by central differences:", expected.item())
print("seen:", seen.item(), "(without an error)")
assert abs(seen - expected) > 0.1 * abs(expected), "behaviour has changed"
PYTHON
