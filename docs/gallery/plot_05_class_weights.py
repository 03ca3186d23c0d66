"""
Classes of very different sizes
===============================

Digit 0 has 120 training examples, digit 9 has four. The upper parameters are one weight
for each class and one shift of each logit. They minimise the loss on a small balanced
set. The picture shows which digits gain.
"""

import os
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import bilevel_optim as bo

torch.manual_seed(0)
steps = 3 if "SMOKE" in os.environ else 60
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
sizes = [round(120 * (4 / 120) ** (digit / 9)) for digit in range(10)]
rows = [torch.nonzero(labels == digit).flatten() for digit in range(10)]
rows = [row[torch.randperm(len(row))] for row in rows]
train = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
held = torch.cat([row[120:130] for row in rows])
test = torch.cat([row[130:] for row in rows])
momentum = partial(torch.optim.SGD, momentum=0.9)

# %%
# The lower loss reads the upper parameters; the upper loss is balanced, and reads the
# model alone.

weight, shift = torch.zeros(10, requires_grad=True), torch.zeros(10, requires_grad=True)
model = torch.nn.Linear(64, 10)


def lower_loss():
    ce = F.cross_entropy(model(images[train]) + shift, labels[train], reduction="none")
    penalty = sum(p.square().sum() for p in model.parameters())
    return (10 * weight.softmax(0)[labels[train]] * ce).mean() + 1e-3 * penalty


def upper_loss():
    return F.cross_entropy(model(images[held]), labels[held])


def recalls():
    right = model(images[test]).argmax(1) == labels[test]
    return [float(right[labels[test] == digit].double().mean()) for digit in range(10)]


below = {"lower_lr": 0.3, "lower_steps": 20, "lower_optimizer": momentum}
optimizer = bo.AID([weight, shift], model.parameters(), lr=1, linear_steps=10, **below)
for _ in range(steps):
    optimizer.backward(
        upper_loss, lower_loss
    )  # without a step of x: trained with equal weights
before = recalls()

# %%
# Now x moves too.

adam = torch.optim.Adam([weight, shift], lr=0.05)
for _ in range(steps):
    optimizer.backward(upper_loss, lower_loss)
    adam.step()
after = recalls()

figure, (left, right) = plt.subplots(2, 1, figsize=(5.4, 6.4), layout="constrained")
places = torch.arange(10).numpy()
for k, (name, values) in enumerate({"equal": before, "learned": after}.items()):
    name = f"{name} weights: mean {sum(values) / 10:.3f}"
    left.bar(places + 0.4 * k, values, 0.4, label=name)
left.set_xticks(places + 0.2, [f"{d}\n{n}" for d, n in enumerate(sizes)])
left.set_ylim(0, 1.35)
left.set(
    xlabel="digit, and the number of its training examples",
    ylabel="recall on test images",
)
left.legend(loc="upper right")
right.plot(10 * weight.detach().softmax(0).numpy(), "o-", label="weight, 1 on average")
right.plot(shift.detach().numpy(), "s-", label="shift of the logit")
right.set(xticks=places, xlabel="digit")
right.legend()
plt.show()
