"""
Fast steps: compile and run
===========================

For small models Python overhead dominates. ``compile()`` compiles a step, ``run()``
makes many compiled steps in one call. The losses stay as they are, and the numbers are
the same up to rounding.
"""

import os
import time
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import softplus

import bilevel_optim as bo

smoke = "SMOKE" in os.environ
backend, repeats, several = ("eager", 1, 4) if smoke else ("inductor", 30, 32)
torch.manual_seed(0)
inputs, targets = torch.randn(64, 22), torch.randn(64).sign()
held, held_targets = torch.randn(64, 22), torch.randn(64).sign()

# %%
# Logistic regression with a penalty for each of 22 weights: one step is a few kilobytes
# of arithmetic.


def problem(method, **options):
    penalty, weight = (torch.zeros(22, requires_grad=True) for _ in range(2))

    def lower_loss():
        margins = targets * (inputs @ weight)
        return softplus(-margins).mean() + (penalty.exp() * weight.square()).mean() / 2

    def upper_loss():
        return softplus(-held_targets * (held @ weight)).mean()

    optimizer = method([penalty], [weight], lr=0.1, lower_lr=0.1, **options)
    return optimizer, upper_loss, lower_loss, penalty


def per_step(action, steps):
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append((time.perf_counter() - began) / steps)
    return 1e6 * sorted(times)[len(times) // 2]


# %%
# Three optimizers of each kind start at the same point. The first calls compile, and
# are not timed.

methods = {"SOBA": (bo.SOBA, {}), "ITD": (bo.ITD, {"lower_steps": 5})}
found, apart = {}, {}
for name, (method, options) in methods.items():
    eager, *losses, first = problem(method, **options)
    stepped, *stepped_losses, second = problem(method, **options)
    many, *many_losses, third = problem(method, **options)
    stepped.compile(backend=backend)
    many.compile(backend=backend)
    for _ in range(several):
        eager.step(*losses)
        stepped.step(*stepped_losses)
    many.run(*many_losses, steps=several)
    apart[name] = max(float((first - x).detach().abs().max()) for x in (second, third))
    found[name] = [
        per_step(partial(eager.step, *losses), 1),
        per_step(partial(stepped.step, *stepped_losses), 1),
        per_step(partial(many.run, *many_losses, steps=several), several),
    ]

# %%
# Medians. Figures of more methods, and beside other libraries: see Benchmarks.

print(f"largest difference of x after {several} steps:", apart)
figure, axis = plt.subplots(figsize=(5.4, 3.4), layout="constrained")
for k, kind in enumerate(("step", "compile, step", "compile, run")):
    places, times = [i - 0.25 * k for i in range(2)], [f[k] for f in found.values()]
    bars = axis.barh(places, times, 0.24, label=kind, color=("grey", "C0", "C2")[k])
    axis.bar_label(bars, fmt="%.0f us", padding=3)
axis.set(xscale="log", xlabel="microseconds for one step")
axis.set_yticks([-0.25, 0.75], found)
axis.margins(x=0.3)
axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3, frameon=False)
plt.show()
