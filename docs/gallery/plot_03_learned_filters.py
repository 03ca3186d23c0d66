"""
A learned regulariser for images
================================

A noisy photograph is denoised by minimising a fit plus a penalty on its filtered images. The filters and their weights
are learned on patches of one photograph, such that the result is close to the clean patches. The picture is of another
photograph. Total variation, tuned on the same patches, is the baseline.
"""

import os
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image

import bilevel_optim as bo

torch.manual_seed(0)
smoke = "SMOKE" in os.environ
steps, size = (2, 24) if smoke else (200, 96)


def photograph(name, top, left, size):
    grey = torch.tensor(load_sample_image(name).mean(2), dtype=torch.float32) / 255
    return F.avg_pool2d(grey[None, None], 2)[:, :, top : top + size, left : left + size]


clean = torch.cat([photograph("china.jpg", top, left, 32) for top in (20, 60, 100) for left in (20, 120, 220)])
noisy = clean + 0.1 * torch.randn_like(clean)
truth = photograph("flower.jpg", 50, 110, size)
test = truth + 0.1 * torch.randn_like(truth)


def psnr(image, reference):
    return float(-10 * (image - reference).square().mean().log10())


# %%
# The lower problem is the denoised image, the upper parameters are 12 filters of 5 x 5 and their weights. The filters
# have a mean of zero, so that a constant image costs nothing.

waves = torch.stack([torch.cos(torch.pi * k * (torch.arange(5) + 0.5) / 5) for k in range(4)])  # cosines, as a start
filters = (0.2 * torch.einsum("ia,jb->ijab", waves, waves).reshape(16, 1, 5, 5)[1:13]).requires_grad_()
scales = torch.full((12,), -4.0, requires_grad=True)
image = noisy.clone().requires_grad_()


def energy(u, data):
    kernel = filters - filters.mean((2, 3), keepdim=True)
    edges = F.conv2d(F.pad(u, (2, 2, 2, 2), mode="replicate"), kernel)
    smooth = (1 + (edges / 0.08).square()).log().mean((0, 2, 3))
    return (u - data).square().mean() * 50 + (scales.exp() * smooth).sum()


def upper_loss():
    return (image - clean).square().mean() * 1000


size_of_all = image.numel()  # the lower loss is a mean: curvatures are in units of one over this
momentum = partial(torch.optim.SGD, momentum=0.9)
# The filters grow, and the largest curvature with them, from 150 to 4,700 of these units. Momentum stays stable up to
# 3.8 / lower_lr: 19,000.
steps_below = {"lower_lr": 0.0002 * size_of_all, "lower_steps": 20, "lower_optimizer": momentum}
system = {"linear_solver": "minres", "linear_steps": 10, "damping": 10 / size_of_all}
optimizer = bo.AID([filters, scales], [image], lr=1, **steps_below, **system)
adam, curve = torch.optim.Adam([filters, scales], lr=0.02), []
for _ in range(steps):
    optimizer.backward(upper_loss, lambda: energy(image, noisy))
    curve.append(psnr(image.detach(), clean))
    adam.step()

# %%
# Both penalties denoise a photograph that neither has seen. The weight of total variation is the best of a grid on the
# training patches.


def total_variation(u, data, weight):
    rows, columns = u.diff(dim=2, append=u[:, :, -1:]), u.diff(dim=3, append=u[:, :, :, -1:])
    return (u - data).square().mean() * 50 + weight * (rows.square() + columns.square() + 1e-6).sqrt().mean()


def denoised(loss, data):
    u = data.clone().requires_grad_()
    descent = torch.optim.Adam([u], lr=0.01)
    for _ in range(5 if smoke else 150):
        descent.zero_grad()
        loss(u).backward()
        descent.step()
    return u.detach()


grid = [2.0, 4.0, 6.0, 8.0, 12.0, 16.0]
scores = [psnr(denoised(lambda u: total_variation(u, noisy, w), noisy), clean) for w in grid]  # noqa: B023
best = grid[scores.index(max(scores))]
shown = {
    "clean": truth,
    "noisy": test,
    f"total variation ({best})": denoised(lambda u: total_variation(u, test, best), test),
    "learned filters": denoised(lambda u: energy(u, test), test),
}
figure, axes = plt.subplots(1, 5, figsize=(14, 3.4), layout="constrained")
for axis, (name, picture) in zip(axes, shown.items(), strict=False):
    axis.imshow(picture[0, 0].clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[], title=name if name == "clean" else f"{name}\n{psnr(picture, truth):.2f} dB")
learned = (filters - filters.mean((2, 3), keepdim=True)).detach()[scales.argsort(descending=True)]
tiled = F.pad(learned[:, 0], (1, 1, 1, 1), value=float("nan")).reshape(4, 3, 7, 7).permute(0, 2, 1, 3).reshape(28, 21)
axes[4].imshow(tiled.numpy(), cmap="gray")
axes[4].set(xticks=[], yticks=[], title="the filters, by weight")
plt.show()
