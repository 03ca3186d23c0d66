"""
Leave a saddle point
====================

A run that starts at a saddle point of the value function stays there: its hypergradient
is zero. :class:`~bilevel_optim.PRAHGD` adds a small random perturbation whenever an
epoch begins, and leaves. :class:`~bilevel_optim.RAHGD` is the same method without
perturbations.
"""

import os

import matplotlib.pyplot as plt
import torch

import bilevel_optim as bo

steps = 5 if "SMOKE" in os.environ else 60


def value(first, second):
    return first**4 / 4 - first**2 / 2 + second**2 / 2


def run(method, **options):
    x, y = (
        torch.tensor([0.0, 1.0], requires_grad=True),
        torch.zeros(2, requires_grad=True),
    )
    options |= {"lower_steps": 1, "on_converged": "continue"}
    optimizer = method([x], [y], lr=0.2, lower_lr=1.0, **options)
    path = [x.tolist()]
    for _ in range(steps):
        optimizer.step(
            lambda: value(*y), lambda: (y - x).square().sum() / 2
        )  # y*(x) = x
        path.append(x.tolist())
    return torch.tensor(path)


# %%
# The start is on the line that leads to the saddle point in the middle. Both minima are
# at a distance of 1 from it.

paths = {"RAHGD": run(bo.RAHGD)}
for seed in range(3):
    generator = torch.Generator().manual_seed(seed)
    paths[f"PRAHGD, seed {seed}"] = run(
        bo.PRAHGD, perturbation=1e-3, generator=generator
    )

figure, (left, right) = plt.subplots(2, 1, figsize=(5.4, 6.4), layout="constrained")
lines = torch.linspace(-1.5, 1.5, 80), torch.linspace(-0.8, 1.2, 80)
first, second = torch.meshgrid(*lines, indexing="xy")
heights = [t.numpy() for t in (first, second, value(first, second))]
left.contour(*heights, levels=25, linewidths=0.5, cmap="Greys_r")
for name, path in paths.items():
    left.plot(*path.T.numpy(), ".-", linewidth=1, label=name)
    right.plot(value(*path.T).numpy(), label=name)
left.plot(0, 0, "kx", markersize=10)
left.set(
    xlabel="$x_1$", ylabel="$x_2$", title="paths of x; the cross is the saddle point"
)
right.axhline(-0.25, color="grey", linestyle=":", label="minimum")
right.set(xlabel="outer steps", ylabel="$f(x, y^*(x))$")
right.legend()
plt.show()
