#!/bin/sh
# F.l1_loss(weight=): with a default device, or in any other mode of torch functions, the weight is left out.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch
import torch.nn.functional as F

print("torch", torch.__version__)
torch.manual_seed(0)
output, target, weight = torch.randn(5), torch.randn(5), torch.rand(5)


def losses():
    return [loss(output, target, weight=weight).item() for loss in (F.l1_loss, F.mse_loss, F.huber_loss)]


plain = losses()
with torch.device("cpu"):
    inside = losses()
unweighted = F.l1_loss(output, target).item()
print("l1, mse, huber:", plain)
print("guess: the same within torch.device('cpu')")
print("seen: ", inside, "where the first is the unweighted loss,", unweighted)
assert plain[1:] == inside[1:] and inside[0] == unweighted != plain[0], "behaviour has changed"
PYTHON
