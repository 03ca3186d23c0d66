#!/bin/sh
# F.linear_cross_entropy(options=...): the second derivative is missing; class weights get no gradient, silently.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
import torch.nn.functional as F

print("torch", torch.__version__)
torch.manual_seed(0)
inputs, target = torch.randn(8, 3, dtype=torch.float64), torch.randint(4, (8,))
weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
direction = torch.randn(4, 3, dtype=torch.float64)


def product(options):
    loss = F.linear_cross_entropy(inputs, weight, target, options=options) + weight.square().sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    return gradient, torch.autograd.grad((gradient * direction).sum(), weight)[0]


(plain, expected), (chunked, seen) = product(None), product(torch.nn.LinearCrossEntropyOptions())
print("gradients differ by", (plain - chunked).norm().item())
print("guess: so do Hessian-vector products, of norm", expected.norm().item())
print("seen: they differ by", (expected - seen).norm().item(), "; the product is twice the direction, the ridge's alone")
assert torch.equal(seen, 2 * direction) and (plain - chunked).norm() < 1e-9, "behaviour has changed"
PYTHON
