"""Runs the example of Start on small made-up data, with nothing but the package: python start_example.py start.md."""

import re
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset


def data():
    """Images of 784 pixels, half of the training labels wrong: what the example assumes."""
    means = torch.randn(10, 784)
    labels, val_labels = torch.randint(0, 10, (200,)), torch.randint(0, 10, (100,))
    images, val_images = (0.5 * torch.randn(len(t), 784) + means[t] for t in (labels, val_labels))
    wrong = torch.rand(200) < 0.5
    labels = torch.where(wrong, (labels + torch.randint(1, 10, (200,))) % 10, labels)
    train = TensorDataset(images, labels, torch.arange(200))
    return {
        "train": train,
        "train_loader": DataLoader(train, 50, shuffle=True),
        "val_loader": DataLoader(TensorDataset(val_images, val_labels), 50, shuffle=True),
        "wrong": wrong,
    }


def run(text, namespace, steps=40):
    """The first block of Python of a document, with fewer steps; then the weights and which labels are wrong."""
    example = re.search(r"```python\n(.*?)```", text, re.S)[1]
    assert "for _ in range(1000):" in example
    exec(example.replace("range(1000)", f"range({steps})"), namespace)
    return namespace["weights"].detach().clone(), namespace["wrong"]


if __name__ == "__main__":
    torch.manual_seed(0)
    weights, wrong = run(Path(sys.argv[1]).read_text(encoding="utf-8"), data())
    right, bad = weights[~wrong].mean(), weights[wrong].mean()
    print(f"mean logit of right labels {right:.2f}, of wrong ones {bad:.2f}")
    assert right > bad + 1
