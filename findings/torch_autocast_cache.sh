#!/bin/sh
# Inside one autocast block the cast of a weight is kept when the weight changes: training steps have no effect.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
import torch

print("torch", torch.__version__)
torch.manual_seed(0)
layer, inputs = torch.nn.Linear(3, 1), torch.randn(8, 3)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
losses = []
with torch.autocast("cpu", torch.bfloat16):
    for _ in range(4):
        optimizer.zero_grad()
        loss = (layer(inputs) - 3).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print("guess: the loss of four steps falls")
print("seen:", losses)
assert len(set(losses)) == 1, "behaviour has changed"
PYTHON
