"""Runs the example of Start, with nothing but the package: python start_example.py start.md."""

import re
import sys
from pathlib import Path

import torch


def _block(text, number):
    return re.findall(r"```python\n(.*?)```", text, re.S)[number]


def data(text):
    """The names of the first block of Python of a document: loaders, and which training labels are wrong."""
    namespace = {}
    exec(_block(text, 0), namespace)
    return namespace


def run(text):
    """The first two blocks, as they are; their names."""
    namespace = data(text)
    exec(_block(text, 1), namespace)
    return namespace


if __name__ == "__main__":
    torch.manual_seed(0)
    found = run(Path(sys.argv[1]).read_text(encoding="utf-8"))
    weights, wrong = found["weights"].detach(), found["wrong"]
    right, bad = weights[~wrong].mean(), weights[wrong].mean()
    print(f"mean logit of right labels {right:.2f}, of wrong ones {bad:.2f}")
    assert right > bad + 1
