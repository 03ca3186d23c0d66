"""
How much of each source of data
===============================

A classifier of digits is trained on four sources: clean images, noisy images, images
with wrong labels, and noise. The upper parameters are the shares of the sources in the
training loss. They minimise the loss on 100 clean images. :class:`~bilevel_optim.SOBA`
takes one small batch for each gradient and each product.
"""

import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import bilevel_optim as bo

torch.manual_seed(0)
steps = 5 if "SMOKE" in os.environ else 1500
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
names = ("clean", "noisy", "wrong labels", "noise")
sources = torch.arange(400) % 4
train, given = images[:400].clone(), labels[:400].clone()
train[sources == 1] += 0.5 * torch.randn(100, 64)
given[sources == 2] = torch.randint(0, 10, (100,))
train[sources == 3] = torch.rand(100, 64)
held, test = slice(400, 500), slice(500, None)
train_loader = DataLoader(TensorDataset(train, given, sources), 32, shuffle=True)
held_loader = DataLoader(TensorDataset(images[held], labels[held]), 32, shuffle=True)

# %%
# ``softmax`` makes shares of the upper parameters.

shares, model = torch.zeros(4, requires_grad=True), torch.nn.Linear(64, 10)


def penalty():
    return 1e-2 * sum(p.square().sum() for p in model.parameters())


def lower_loss(batch):
    image, label, source = batch
    ce = F.cross_entropy(model(image), label, reduction="none")
    return (4 * shares.softmax(0)[source] * ce).mean() + penalty()


def upper_loss(batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy():
    return float((model(images[test]).argmax(1) == labels[test]).double().mean())


def trained(learn):
    torch.manual_seed(1)
    model.reset_parameters()
    shares.data.zero_()
    # A smaller rate below than the curvature allows: it averages the noise of batches.
    optimizer = bo.SOBA([shares], model.parameters(), lr=0.2 * learn, lower_lr=0.1)
    upper, lower = (
        bo.Objective(upper_loss, held_loader),
        bo.Objective(lower_loss, train_loader),
    )
    found = []
    for k in range(steps):
        optimizer.step(upper, lower)
        if k % 10 == 0:
            found.append((k, accuracy(), shares.detach().softmax(0).tolist()))
    return found


equal, learned = trained(False), trained(True)
figure, (left, right) = plt.subplots(2, 1, figsize=(5.4, 6.4), layout="constrained")
moved = torch.tensor([s for *_, s in learned]).T.numpy()
left.stackplot([k for k, *_ in learned], moved, labels=names)
left.set(xlabel="steps", ylabel="share of the training loss", ylim=(0, 1))
left.legend(loc="center right")
for name, found in (("equal shares", equal), ("learned shares", learned)):
    right.plot([k for k, *_ in found], [a for _, a, _ in found], label=name)
right.set(xlabel="steps", ylabel="accuracy on 1,297 test images", ylim=(0.6, 1))
right.legend()
plt.show()
