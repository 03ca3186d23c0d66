"""
Tune the hyper-parameters of a CNN
==================================

Eight hyper-parameters at once: a weight decay for each of six tensors, a temperature
and the label smoothing. :class:`~bilevel_optim.AID` moves them all while one network
trains. Random search trains a new network for each draw. Both get the same number of
gradients and products. A third of the training labels are wrong.
"""

import os
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import bilevel_optim as bo

torch.manual_seed(0)
smoke = "SMOKE" in os.environ
budget, training = (70, 5) if smoke else (4000, 150)  # gradients and products
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
labels = torch.tensor(digits.target)[order]
train, held, test = slice(0, 200), slice(200, 400), slice(400, None)
wrong = torch.rand(200) < 1 / 3
labels[train] = torch.where(wrong, torch.randint(0, 10, (200,)), labels[train])
momentum = partial(torch.optim.SGD, momentum=0.9)


def network():
    body = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(256, 10))


def lower_loss(model, x):
    tensors = zip(x[:6], model.parameters(), strict=True)
    decay = sum(s.exp() * p.square().sum() for s, p in tensors)
    smoothing = 0.9 * x[7].sigmoid()
    log_p = F.log_softmax(model(images[train]) / x[6].exp(), dim=1)
    loss = F.nll_loss(log_p, labels[train])
    return (1 - smoothing) * loss - smoothing * log_p.mean() + decay / 2


def loss_on(model, part):
    return F.cross_entropy(model(images[part]), labels[part])


def losses(model):
    return [float(loss_on(model, part).detach()) for part in (held, test)]


def trained(x):
    model = network()
    sgd = momentum(model.parameters(), lr=0.05)
    for _ in range(training):
        sgd.zero_grad()
        lower_loss(model, x).backward()
        sgd.step()
    return losses(model)


# %%
# By gradients: the hyper-parameters move after every twenty training steps. A network
# is not convex, so the linear system is solved by MINRES, with damping, and in part:
# eight products. A rate for all of the run has to suit the largest curvature on its
# way, about 60 here: momentum is stable up to 3.8 / ``lower_lr``, which is 190. With
# 0.05 the limit is 76, and the gradient grew in some runs.

start = torch.tensor([-8.0] * 6 + [0.0, -3.0])
x, model = start.clone().requires_grad_(), network()
steps = {"lower_lr": 0.02, "lower_steps": 20, "lower_optimizer": momentum}
system = {"linear_steps": 8, "linear_solver": "minres", "damping": 0.1}
optimizer = bo.AID([x], model.parameters(), lr=1, **steps, **system)
adam, curve = torch.optim.Adam([x], lr=0.05), []
while (calls := sum(optimizer.oracle_counts.values())) < budget:
    optimizer.backward(lambda: loss_on(model, held), lambda: lower_loss(model, x))
    curve.append((calls, *losses(model)))
    adam.step()

# %%
# By random search, with the same budget.

found, best = [], []
for _ in range(budget // training):
    ranges = [(6, -9, -2), (1, -1, 1), (1, -4, 1)]
    draw = [torch.empty(n).uniform_(low, high) for n, low, high in ranges]
    found.append(trained(torch.cat(draw)))
    best.append(min(found))

# %%
# The networks that both end with, beside one that is trained with the settings of the
# start.

figure, (left, right) = plt.subplots(2, 1, figsize=(5.4, 6.4), layout="constrained")
left.plot([c[0] for c in curve], [c[1] for c in curve], label="AID: one network")
places = [training * (k + 1) for k in range(len(found))]
name = f"best of {len(found)} random draws"
left.step(places, [b[0] for b in best], where="post", label=name)
left.set(xlabel="gradients and products", ylabel="held-out loss", ylim=(0, 2))
left.legend()
ends = {"start": trained(start), "random search": best[-1], "AID": curve[-1][1:]}
for k, part in enumerate(("held out", "test")):
    heights = [end[k] for end in ends.values()]
    bars = right.bar([i + 0.4 * k for i in range(3)], heights, 0.4, label=part)
    right.bar_label(bars, fmt="%.2f")
right.set(ylim=(0, 1.5), ylabel="loss of the network at the end")
right.set_xticks([0.2, 1.2, 2.2], ends)
right.legend()
plt.show()
