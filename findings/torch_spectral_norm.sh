#!/bin/sh
# parametrizations.spectral_norm in training mode: the second derivative takes the singular vectors for constants.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
from torch import nn

print("torch", torch.__version__)
torch.manual_seed(0)
layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3, bias=False).double())
for _ in range(500):
    layer.weight
W = layer.parametrizations.weight.original
v = torch.randn(3, 4, dtype=torch.float64)
target = torch.randn(3, 4, dtype=torch.float64)


def product(weight):
    (gradient,) = torch.autograd.grad((weight() * target).sum(), W, create_graph=True)
    return gradient, torch.autograd.grad((gradient * v).sum(), W)[0]


first, seen = product(lambda: layer.weight)
same, expected = product(lambda: W / torch.linalg.matrix_norm(W, 2))
print("gradients of W / sigma(W), after 500 power iterations, differ by", (first - same).norm().item())
print("guess: so do Hessian-vector products, of norm", expected.norm().item())
print("seen: they differ by", (seen - expected).norm().item())
assert (first - same).norm() < 1e-9 and (seen - expected).norm() > 0.01 * expected.norm(), "behaviour has changed"
PYTHON
