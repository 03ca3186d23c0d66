#!/bin/sh
# parametrizations.orthogonal of a matrix that is not square: the diagonal of its parameter holds signs, read by int().
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
from torch import nn

print("torch", torch.__version__)
torch.manual_seed(0)
layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 3, bias=False))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=1e-4)
before = layer.weight.detach().clone()
layer(torch.randn(8, 4)).square().mean().mul(0).backward()  # no gradient: the step is weight decay alone
optimizer.step()
after = layer.weight.detach()
print("singular values before:", torch.linalg.svdvals(before).tolist())
print("guess after one step with weight decay 1e-4: the same, the weight is orthogonal by construction")
print("seen:", torch.linalg.svdvals(after).tolist())
assert torch.linalg.svdvals(after).min() < 0.1, "behaviour has changed"
PYTHON
