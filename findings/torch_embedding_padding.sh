#!/bin/sh
# nn.Embedding(padding_idx=): the gradient of the padding row is masked, its second derivative is not.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
from torch import nn

print("torch", torch.__version__)
torch.manual_seed(0)
words = torch.tensor([0, 1, 2, 0, 3])
mix, v = torch.randn(3, 2, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
layer = nn.Embedding(5, 3, padding_idx=0).double()
nn.init.normal_(layer.weight)
start = layer.weight.detach().clone()


def gradient(graph=False):
    loss = (layer(words) @ mix).tanh().sum(0).square().sum()
    return torch.autograd.grad(loss, layer.weight, create_graph=graph)[0]


product = torch.autograd.grad((gradient(True) * v).sum(), layer.weight)[0]
sides = []
for step in (1e-5, -1e-5):
    layer.weight.data = start + step * v
    sides.append(gradient())
difference = (sides[0] - sides[1]) / 2e-5
error = ((product - difference).norm() / difference.norm()).item()
print("the gradient of the padding row is", sides[0][0].tolist())
print("guess: a Hessian-vector product is the derivative of this gradient, to 1e-8")
print("seen: it differs from a difference of gradients by", error)
assert sides[0][0].norm() == 0 and error > 0.01, "behaviour has changed"
PYTHON
