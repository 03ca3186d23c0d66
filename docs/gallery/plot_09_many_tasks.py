"""
Two hundred lower problems with a memory
========================================

Each of 200 users has a model of their own: 8 weights, fitted to 12 noisy examples. One
penalty for each of the 8 features is shared, and learned. :class:`~bilevel_optim.RSVRB`
keeps a row of y for each user, and looks at twenty users in a step: the cost of a step
does not grow with their number.
"""

import os

import matplotlib.pyplot as plt
import torch

import bilevel_optim as bo

torch.manual_seed(0)
steps = 5 if "SMOKE" in os.environ else 1000
users, features = 200, 8
relevant = torch.tensor([1.0] * 3 + [0.0] * 5)  # the others are noise for everybody
truth = torch.randn(users, features) * relevant
inputs = torch.randn(users, 24, features)
targets = (inputs @ truth[..., None]).squeeze(-1) + torch.randn(users, 24)
below, above = slice(12), slice(12, None)
tasks = bo.TensorTasks(
    *((inputs[:, part], targets[:, part]) for part in (below, above))
)

# %%
# ``rows`` has a leading dimension of 200. In the losses it stands for the row of the
# one user whose batch they see.

penalty = torch.zeros(features, requires_grad=True)
rows = torch.zeros(users, features, requires_grad=True)


def error(batch):
    return (batch[0] @ rows - batch[1]).square().mean()


def lower_loss(batch):
    return error(batch) + (penalty.exp() * rows.square()).sum() / 10


options = {"averaging": 0.3, "task_batch": 20, "beta": 1.0, "floor": 0.05}
optimizer = bo.RSVRB([penalty], [rows], lr=0.2, lower_lr=0.02, **options)
curve, penalties = [], []
for _ in range(steps):
    curve.append(float(optimizer.step(error, lower_loss, tasks=tasks)))
    penalties.append(penalty.tolist())

# %%
# ``catch_up`` brings all rows to the present, so that they can be evaluated.

optimizer.catch_up()
figure, (left, middle, right) = plt.subplots(
    3, 1, figsize=(5.4, 9), layout="constrained"
)
left.plot(torch.tensor(curve).unfold(0, min(50, steps), 1).mean(1).numpy())
left.set(xlabel="outer steps of twenty users", ylabel="upper loss, mean of 50 steps")
for k, column in enumerate(torch.tensor(penalties).T):
    colour, name = f"C{k // 3 > 0:d}", {0: "matters", 3: "noise"}.get(k)
    middle.plot(column.numpy(), color=colour, label=name)
middle.set(xlabel="outer steps", ylabel="log penalty of a feature")
middle.legend()
for name, part in (("matters", slice(3)), ("noise", slice(3, None))):
    points = [t[:, part].flatten().numpy() for t in (truth, rows.detach())]
    right.plot(*points, ".", label=name)
right.set(xlabel="true weights of all users", ylabel="their rows")
right.legend()
plt.show()
