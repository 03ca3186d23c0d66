#!/bin/sh
# nn.LayerNorm: third derivatives, which a Hessian-vector product of a gradient penalty needs, are wrong. So is forward
# mode, differentiated once more by either mode. Two gradients, or forward over reverse, are right.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd

print("torch", torch.__version__)
torch.manual_seed(0)
x, v, w, target = torch.randn(4, 3, 5, dtype=torch.float64)
layer = nn.LayerNorm(5, elementwise_affine=False)


def by_hand(x):
    return (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + layer.eps).sqrt()


def penalty(normalise):
    return lambda x: grad(lambda x: (normalise(x) * target).sum())(x).square().sum()


def product(normalise):
    return grad(lambda x: (grad(penalty(normalise))(x) * v).sum())(x)


def along(normalise):
    return lambda t: (normalise(x + t * v + t**2 * w) * target).sum()


gradient = grad(penalty(layer))
difference = (gradient(x + 1e-5 * v) - gradient(x - 1e-5 * v)) / 2e-5
seen, expected = product(layer), product(by_hand)
print("gradient of the penalty, layer less by hand:", (gradient(x) - grad(penalty(by_hand))(x)).norm().item())
print("guess: its Hessian-vector product agrees as well; its norm, by hand:", expected.norm().item())
print("by hand, less the central difference of the layer's gradients:", (expected - difference).norm().item())
print("seen: layer less by hand:", (seen - expected).norm().item())
zero = torch.zeros((), dtype=torch.float64)
twice, truth = (jacfwd(jacfwd(along(f)))(zero).item() for f in (layer, by_hand))
print("guess: two passes of jacfwd along a curve give", truth, "as hessian does:", hessian(along(layer))(zero).item())
print("seen:", twice)
right = (expected - difference).norm() < 1e-5 * expected.norm() and abs(hessian(along(layer))(zero) - truth) < 1e-9
wrong = (seen - expected).norm() > 0.01 * expected.norm() and abs(twice - truth) > 0.01 * abs(truth)
assert right and wrong, "behaviour has changed"
PYTHON
