#!/bin/sh
# torchvision's resize of a bool tensor: every pixel with a trace of ink becomes True.
. "$(dirname "$0")/torch.sh"
"$folder/bin/python" -m pip install --quiet torchvision==0.29.1
run <<'PYTHON'
import torch
import torchvision
from torchvision.transforms.v2 import functional as V

print("torch", torch.__version__, "torchvision", torchvision.__version__)
ink = torch.zeros(1, 105, 105, dtype=torch.bool)
ink[:, 50:53, 10:95] = True  # a stroke of three pixels
small = V.resize(ink, [28, 28])
grey = V.resize(ink.to(torch.uint8) * 255, [28, 28])
share, expected = small.float().mean() / ink.float().mean(), grey.float().mean() / 255 / ink.float().mean()
print(f"guess: about as much ink as before, as for a uint8 image of 0 and 255 ({expected:.2f} times)")
print(f"seen: {share:.2f} times as much")
assert small.dtype == torch.bool and share > 3 and 0.9 < expected < 1.1, "behaviour has changed"
PYTHON
