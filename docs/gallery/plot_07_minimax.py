"""
A minimax game
==============

Minimise over x what y maximises: a quadratic that is badly conditioned in x.
:class:`~bilevel_optim.GDA` makes one step of each, and is slow along one direction.
:class:`~bilevel_optim.RAGDA` makes five ascent steps for each step of x, with momentum
on both. A minimax method takes one loss: x descends it, and y ascends it.
"""

import os

import matplotlib.pyplot as plt
import torch

import bilevel_optim as bo

budget = 50 if "SMOKE" in os.environ else 2000  # gradients
curvature = torch.tensor([1.0, 10.0])
mixing = torch.tensor([[1.0, 0.3], [0.0, 0.3]])


def play(make):
    x, y = (
        torch.tensor([2.0, 1.0], requires_grad=True),
        torch.zeros(2, requires_grad=True),
    )
    optimizer = make([x], [y])

    def loss():
        return (
            0.002 * x.square().sum()
            + x @ mixing @ y
            - (curvature * y.square()).sum() / 2
        )

    path, calls, values = [], [], []
    while sum(optimizer.oracle_counts.values()) < budget:
        path.append(x.tolist())
        optimizer.step(loss)
        calls.append(sum(optimizer.oracle_counts.values()))
        point = x.detach()
        values.append(
            float(
                0.002 * point.square().sum()
                + ((point @ mixing).square() / curvature).sum() / 2
            )
        )
    return torch.tensor(path), calls, values


# %%
# The value of x is the maximum over y, which is known here: it is 0 at the solution.

momentum = {
    "momentum": 0.9,
    "lower_momentum": 0.5,
    "on_converged": "continue",
    "restart_radius": 1e9,
}
players = {
    "GDA, lr 0.03": lambda x, y: bo.GDA(x, y, lr=0.03, lower_lr=0.1),
    "GDA, lr 0.1": lambda x, y: bo.GDA(x, y, lr=0.1, lower_lr=0.1),
    "RAGDA, lr 0.3": lambda x, y: bo.RAGDA(
        x, y, lr=0.3, lower_lr=0.1, lower_steps=5, **momentum
    ),
}
figure, (left, right) = plt.subplots(2, 1, figsize=(5.4, 6.4), layout="constrained")
for name, make in players.items():
    path, calls, values = play(make)
    left.plot(*path.T.numpy(), ".-", markersize=3, linewidth=0.8, label=name)
    right.plot(calls, values, label=name)
left.plot(0, 0, "k*", markersize=12)
left.set(xlabel="$x_1$", ylabel="$x_2$", title="paths of x; the star is the solution")
right.set(xlabel="gradients", ylabel="maximum over y", yscale="log", ylim=(1e-16, 1e2))
right.legend()
plt.show()
