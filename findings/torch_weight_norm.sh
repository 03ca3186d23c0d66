#!/bin/sh
# parametrizations.weight_norm: the second derivative takes the norms of the rows for constants.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
from torch import nn

print("torch", torch.__version__)
torch.manual_seed(0)
layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3, bias=False).double())
g, V = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
inputs, v = torch.randn(8, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)


def product(weight):
    (gradient,) = torch.autograd.grad((inputs @ weight().T).tanh().square().mean(), V, create_graph=True)
    return gradient.detach(), torch.autograd.grad((gradient * v).sum(), V)[0]


def difference(step=1e-5):
    found = []
    for sign in (1, -1):
        with torch.no_grad():
            V.add_(sign * step * v)
        found.append(product(lambda: layer.weight)[0])
        with torch.no_grad():
            V.sub_(sign * step * v)
    return (found[0] - found[1]) / (2 * step)


first, seen = product(lambda: layer.weight)
same, expected = product(lambda: V * (g / V.norm(dim=1, keepdim=True)))
print("gradients of the layer and of g V / |V| by hand differ by", (first - same).norm().item())
print("guess: so do Hessian-vector products, of norm", expected.norm().item())
print("by hand, less the central difference of the layer's gradients:", (expected - difference()).norm().item())
print("seen: those of the layer and those by hand differ by", (seen - expected).norm().item())
right = (first - same).norm() < 1e-12 and (expected - difference()).norm() < 1e-6 * expected.norm()
assert right and (seen - expected).norm() > 0.01 * expected.norm(), "behaviour has changed"
PYTHON
