#!/bin/sh
# torch.compile: a graph that read an OrderedDict goes on with the old order after move_to_end.
. "$(dirname "$0")/torch.sh"
run <<'PYTHON'
from collections import OrderedDict

import torch

print("torch", torch.__version__)
ordered, plain, one = OrderedDict(first=2.0, second=5.0), dict(first=2.0, second=5.0), torch.ones(())
found = {}
for name, scales in (("OrderedDict", ordered), ("dict", plain)):
    scaled = torch.compile(lambda t, scales=scales: t * next(iter(scales.values())), backend="eager")
    assert scaled(one).item() == 2.0
    if scales is ordered:
        ordered.move_to_end("first")
    else:
        plain["first"] = plain.pop("first")
    assert next(iter(scales.values())) == 5.0
    found[name] = scaled(one).item()
print("guess: both are compiled again, and scale by the first value now, 5")
print("seen:", found, "(the order of an OrderedDict is not compared)")
assert found == {"OrderedDict": 2.0, "dict": 5.0}, "behaviour has changed"
PYTHON
