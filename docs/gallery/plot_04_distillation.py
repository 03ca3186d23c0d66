"""
Distil a data set into ten images
=================================

The upper parameters are ten images, one for each digit. The lower problem trains a
classifier on these ten alone. The upper loss is that of the classifier on 1,000 real
images. So the learned images are what a classifier has to see.
"""

import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import bilevel_optim as bo

torch.manual_seed(0)
steps = 3 if "SMOKE" in os.environ else 200
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
real, test = images[:1000], images[1000:]
real_labels, test_labels = labels[:1000], labels[1000:]
first = torch.stack(
    [real[real_labels == digit][0] for digit in range(10)]
)  # one real image of each digit


def classifier():
    torch.manual_seed(1)
    return torch.nn.Linear(64, 10)


def accuracy(model):
    return float((model(test).argmax(1) == test_labels).double().mean())


# %%
# ``warm_start=False`` trains the classifier from the same start in each step: 20 steps
# on ten images are all. :class:`~bilevel_optim.ITD` differentiates through these 20
# steps.

learned, model = first.clone().requires_grad_(), classifier()
optimizer = bo.ITD(
    [learned], model.parameters(), lr=1, lower_steps=20, warm_start=False
)
adam = torch.optim.Adam([learned], lr=0.02)


def loss_on_real():
    return F.cross_entropy(model(real), real_labels)


def training_loss(on):
    return F.cross_entropy(model(on), torch.arange(10))


curve = []
for _ in range(steps):
    optimizer.backward(loss_on_real, lambda: training_loss(learned))
    curve.append(accuracy(model))  # the first: trained on the ten real images
    adam.step()

# %%
# The classifier sees ten images in both cases.

figure = plt.figure(figsize=(5.4, 7.4), layout="constrained")
top, bottom = figure.subfigures(2, 1, height_ratios=[5, 3])
shown = torch.stack([first, learned.detach()]).reshape(2, 2, 5, 8, 8).transpose(0, 1)
for k, axis in enumerate(top.subplots(4, 5).flatten()):  # a real row, and a learned one
    axis.imshow(shown.reshape(20, 8, 8)[k].numpy(), cmap="gray_r")
    axis.set(xticks=[], yticks=[])
    axis.set_ylabel(("real", "learned")[k // 5 % 2] if k % 5 == 0 else "")
curves = bottom.subplots()
curves.plot(curve)
curves.set(
    xlabel="outer steps",
    ylabel="test accuracy",
    title=f"{curve[0]:.2f} to {curve[-1]:.2f}",
)
plt.show()
