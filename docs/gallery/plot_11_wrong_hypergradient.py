"""
A hypergradient that is wrong on purpose
========================================

Too few lower steps, too few linear steps, or a badly chosen ``nu`` give a wrong
hypergradient, and nothing fails. :func:`~bilevel_optim.check_hypergradient` compares
the estimate with an independent reference. It also makes the estimate at the exact
solution of the lower problem: so it tells whether the lower solve or the estimator is
to blame.
"""

import os

import matplotlib.pyplot as plt
import torch

import bilevel_optim as bo

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
smoke = "SMOKE" in os.environ
size, many = (3, 20) if smoke else (20, 500)
inputs, targets = torch.randn(200, size), torch.randn(200)
held, held_targets = torch.randn(200, size), torch.randn(200)

# %%
# Ridge regression, with a penalty for each weight. ``atol=inf`` makes a report of any
# estimate; by default a wrong one raises ``GradcheckError``.

penalty = torch.full((size,), -1.0, requires_grad=True)
weight = torch.zeros(size, requires_grad=True)


def lower_loss():
    return (inputs @ weight - targets).square().mean() + (
        penalty.exp() * weight.square()
    ).mean()


def upper_loss():
    return (held @ weight - held_targets).square().mean()


def errors(method, **options):
    optimizer = method([penalty], [weight], lr=1.0, lower_lr=0.1, **options)
    report = bo.check_hypergradient(
        optimizer, upper_loss, lower_loss, atol=float("inf")
    )
    return report.relative_error, report.relative_error_at_solution


# %%
# Three knobs, each turned from hasty to careful.

knobs = {
    "lower_steps": (bo.AID, {"linear_steps": 50}, [1, 3, 10, 30, 100, 300]),
    "linear_steps": (bo.AID, {"lower_steps": many}, [1, 2, 4, 8, 16]),
    "nu": (bo.F2SA, {"lower_steps": many}, [0.1, 0.03, 0.01, 1e-3, 1e-5, 1e-7, 1e-9]),
}
figure, axes = plt.subplots(3, 1, figsize=(5.4, 9), layout="constrained", sharey=True)
for axis, (name, (method, others, values)) in zip(axes, knobs.items(), strict=True):
    values = values[:2] if smoke else values
    found = [errors(method, **others, **{name: value}) for value in values]
    found = torch.tensor(found).clamp_min(1e-16)
    axis.loglog(values, found[:, 0].numpy(), "o-", label="as the method runs")
    axis.loglog(values, found[:, 1].numpy(), "s--", label="at the exact y*(x)")
    axis.axhline(1e-2, color="grey", linestyle=":", label="default tolerance")
    axis.set(xlabel=f"{method.__name__}: {name}")
axes[2].invert_xaxis()
axes[1].set_ylabel("relative error of the hypergradient")
axes[0].legend()
plt.show()

# %%
# Above, the two lines differ: more lower steps help. In the middle they are equal: the
# linear system is to blame. Below: a large ``nu`` has the error of the method, a very
# small one that of rounding.
#
# The report of the hasty one:

hasty = bo.AID([penalty], [weight], lr=1.0, lower_lr=0.1, lower_steps=1)
print(bo.check_hypergradient(hasty, upper_loss, lower_loss, atol=float("inf")))
