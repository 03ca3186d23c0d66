"""
Find wrong labels
=================

Half of 500 training labels are wrong (noisy labels). One weight for each example is
learned, such that a classifier trained with these weights does well on 200 clean
examples. The weights of wrong labels end near 0. :class:`~bilevel_optim.AID` needs one
linear system for each hypergradient, whatever the number of weights.
"""

import os
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import bilevel_optim as bo

torch.manual_seed(0)
steps = 3 if "SMOKE" in os.environ else 100
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
train, clean, test = images[:500], images[500:700], images[700:]
wrong = torch.rand(500) < 0.5
given = torch.where(
    wrong, (labels[:500] + torch.randint(1, 10, (500,))) % 10, labels[:500]
)

# %%
# The upper parameters are one logit for each example, the lower ones a linear
# classifier. The penalty makes the lower problem strongly convex.

logits = torch.zeros(500, requires_grad=True)
model = torch.nn.Linear(64, 10)


def lower_loss():
    penalty = sum(p.square().sum() for p in model.parameters())
    return (
        logits.sigmoid() * F.cross_entropy(model(train), given, reduction="none")
    ).mean() + 1e-3 * penalty


def upper_loss():
    return F.cross_entropy(model(clean), labels[500:700])


def accuracy():
    return float((model(test).argmax(1) == labels[700:]).double().mean())


# %%
# ``backward`` improves the classifier and sets ``.grad`` of the logits, and Adam moves
# them.

momentum = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
options = {
    "lower_lr": 0.5,
    "lower_steps": 20,
    "linear_steps": 5,
    "lower_optimizer": momentum,
}
optimizer = bo.AID([logits], model.parameters(), lr=0.1, **options)
adam = torch.optim.Adam([logits], lr=0.1)
curve = []
for _ in range(steps):
    optimizer.backward(upper_loss, lower_loss)
    curve.append(accuracy())  # the first: trained with equal weights
    adam.step()

# %%
# The accuracy on 1,097 test images; the learned weights; images with the smallest
# weights, and the labels that they were given.

weights = logits.detach().sigmoid()
figure, axes = plt.subplots(3, 1, figsize=(5.4, 9), layout="constrained")
axes[0].plot(curve)
axes[0].set(
    xlabel="outer steps",
    ylabel="test accuracy",
    title=f"from {curve[0]:.3f} to {curve[-1]:.3f}",
)
for name, part in (("right labels", ~wrong), ("wrong labels", wrong)):
    axes[1].hist(weights[part].numpy(), bins=25, range=(0, 1), alpha=0.6, label=name)
axes[1].set(xlabel="learned weight", ylabel="examples")
axes[1].legend()
axes[2].axis("off")
for k, i in enumerate(weights.argsort()[:12]):
    small = axes[2].inset_axes(((k % 6) / 6, 0.5 - k // 6 / 2, 0.15, 0.36))
    small.imshow(train[i].reshape(8, 8).numpy(), cmap="gray_r")
    small.set(xticks=[], yticks=[])
    small.set_title(f"given {int(given[i])}", fontsize=10, pad=2)
plt.show()
