#!/bin/sh
# Gradient of a vmap over weights and words of F.embedding(padding_idx=): it is zero in the first padding row alone.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
import torch.nn.functional as F
from torch.func import vmap

print("torch", torch.__version__)
torch.manual_seed(0)
weights, words = torch.randn(3, 4, 2), torch.tensor([[0, 1], [0, 2], [0, 3]])


def loss(weight, words):
    return F.embedding(words, weight, padding_idx=0).sum()


weights.requires_grad_()
together = torch.autograd.grad(vmap(loss)(weights, words).sum(), weights)[0][:, 0]
alone = torch.autograd.grad(sum(loss(w, i) for w, i in zip(weights, words)), weights)[0][:, 0]
print("gradients of the padding row, one by one:", alone.tolist())
print("guess: the same under vmap")
print("seen: ", together.tolist())
assert not alone.any() and not together[0].any() and together[1:].all(), "behaviour has changed"
PYTHON
