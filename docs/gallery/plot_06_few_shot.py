"""
Learn to adapt: few-shot regression
===================================

Each task is a sine wave of its own amplitude and phase, seen at ten points.
:class:`~bilevel_optim.MAML` learns the initial weights from which a gradient step or a
few fit a new wave. A network trained on all waves at once learns their mean, which fits
none of them.
"""

import os

import matplotlib.pyplot as plt
import torch
from torch import nn

import bilevel_optim as bo

torch.manual_seed(0)
steps = 3 if "SMOKE" in os.environ else 1500

# %%
# A sampler draws tasks, and their lower and upper data. Here the tasks are infinitely
# many: a task *is* its amplitude and phase.


class Waves:
    def sample(self, n, generator):
        return torch.stack([0.1 + 4.9 * torch.rand(n), torch.pi * torch.rand(n)], dim=1)

    def lower(self, tasks, n, generator):
        inputs = 10 * torch.rand(len(tasks), n, 1) - 5
        return inputs, tasks[:, :1, None] * torch.sin(inputs - tasks[:, 1:, None])

    upper = lower


def network():
    return nn.Sequential(
        nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
    )


def loss(batch):
    return (model(batch[0]) - batch[1]).square().mean()


model = network()
start = [p.detach().clone().requires_grad_() for p in model.parameters()]
sizes = {"tasks_per_step": 20, "lower_batch": 10, "upper_batch": 10}
maml = bo.MAML(start, model.parameters(), lr=1, lower_lr=0.01, lower_steps=1, **sizes)
adam = torch.optim.Adam(start, lr=0.002)
curve = []
for _ in range(steps):
    curve.append(float(maml.backward(loss, loss, tasks=Waves())))
    adam.step()

# %%
# The baseline is trained on the same waves, without adapting.

joint = network()
joint_adam = torch.optim.Adam(joint.parameters(), lr=0.002)
for _ in range(steps):
    inputs, targets = Waves().upper(Waves().sample(20, None), 10, None)
    joint_adam.zero_grad()
    (joint(inputs) - targets).square().mean().backward()
    joint_adam.step()

# %%
# A new wave, seen at ten points. ``adapt`` makes the gradient steps from the learned
# start, and leaves the model alone unless ``write=True``.

task, line = torch.tensor([[3.0, 1.0]]), torch.linspace(-5, 5, 200)[:, None]
points = tuple(part[0] for part in Waves().lower(task, 10, None))
figure, (left, right) = plt.subplots(2, 1, figsize=(5.4, 7.4), layout="constrained")
left.plot(torch.tensor(curve).unfold(0, min(50, steps), 1).mean(1).numpy())
left.set(xlabel="outer steps", ylabel="loss after one step, mean of 50", yscale="log")
grid = line.numpy()
right.plot(grid, 3 * torch.sin(line - 1).numpy(), "k", label="the wave")
right.plot(*(part.numpy() for part in points), "ko")
right.plot(grid, joint(line).detach().numpy(), ":", label="trained on all waves")
for count in (0, 1, 5):
    maml.adapt(loss, points, steps=count, write=True)
    right.plot(grid, model(line).detach().numpy(), label=f"MAML, {count} steps")
right.set_ylim(-9, 4)
right.legend(loc="lower left")
plt.show()
