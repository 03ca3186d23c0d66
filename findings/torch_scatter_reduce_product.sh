#!/bin/sh
# scatter_reduce(reduce="prod"): the forward-mode derivative is zero, and torch.func.hessian, which uses it, is wrong.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
from torch.func import hessian, jacrev, jvp

print("torch", torch.__version__)
x, v = torch.tensor([2.0, 3.0, 5.0, 7.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
index = torch.tensor([0, 0, 1, 1])


def products(x):
    return torch.ones(2).scatter_reduce(0, index, x, "prod")


def loss(x):
    return products(x).square().sum() / 2


print("products:", products(x).tolist())
print("guess: their derivative along", v.tolist(), "is", (jacrev(products)(x) @ v).tolist())
seen = jvp(products, (x,), (v,))[1]
print("seen:", seen.tolist())
expected, found = jacrev(jacrev(loss))(x), hessian(loss)(x)
print("guess: first row of the Hessian of half the sum of their squares:", expected[0].tolist())
print("seen:", found[0].tolist())
truth = torch.tensor([9.0, 12.0, 0.0, 0.0])
assert not seen.any() and expected[0].equal(truth) and not found[0].allclose(truth), "behaviour has changed"
PYTHON
