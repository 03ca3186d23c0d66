#!/bin/sh
# std() ** 2 of equal numbers: the second derivative is zero, norm() ** 2 at zero has nan; both are quadratic functions.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch

print("torch", torch.__version__)


def second(function):
    y = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(y), y, create_graph=True)
    return gradient.tolist(), torch.autograd.grad(gradient[0], y)[0].tolist()


print("var:        ", second(lambda y: y.var()))
print("guess: std() ** 2 and norm() ** 2 have finite second derivatives too, [2/3, -1/3, -1/3] and [2, 0, 0]")
std, norm = second(lambda y: y.std() ** 2), second(lambda y: y.norm() ** 2)
print("seen: std ** 2 ", std, "\n      norm ** 2", norm)
assert std == ([0.0] * 3, [0.0] * 3) and norm[0] == [0.0] * 3 and all(t != t for t in norm[1]), "behaviour has changed"
PYTHON
