"""Bilevel problems of five sizes on random data, as live closures and as functions, for timing steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from ..common.seeds import begin, stream
from .networks import lenet

__all__ = ["SHAPES", "Shape", "shape"]

BATCHES, SIZE, RIDGE, TASKS, WAYS = 10, 64, 1e-3, 16, 5
Batch = tuple[Tensor, ...]
Tensors = tuple[Tensor, ...]
Loss = Callable[[Sequence[Tensor], Sequence[Tensor], Batch], Tensor]


@dataclass
class Shape:
    """Problem with its live tensors.

    Attributes:
        title: description.
        x, y: live upper and lower tensors.
        f, g: the losses as functions of values of x and y and a batch.
        live_f, live_g: the same as closures over the live tensors.
        batches: batches of the upper and of the lower loss, cycled in order.
        tasks: a sampler, if there are many lower problems.
        steps: number of lower steps, and of products.
    """

    title: str
    x: Tensors
    y: Tensors
    f: Loss
    g: Loss
    live_f: Callable[[Batch], Tensor]
    live_g: Callable[[Batch], Tensor]
    batches: tuple[list[Batch], list[Batch]]
    tasks: bo.TensorTasks | None = None
    steps: int = 10

    @property
    def entries(self) -> int:
        """Return the number of entries of the cross derivative."""
        return sum(t.numel() for t in self.x) * sum(t.numel() for t in self.y)

    def give_rows(self) -> None:
        """Give every task its own row of y, for methods that store it."""
        for t in self.y:
            t.data = t.detach().expand(TASKS, *t.shape).clone()

    def objectives(self) -> tuple[Any, Any]:
        """Return both losses as objectives on batches, or as closures for the sampler."""
        if self.tasks is not None:
            return self.live_f, self.live_g
        return bo.Objective(self.live_f, self.batches[0]), bo.Objective(self.live_g, self.batches[1])

    def terms(self) -> tuple[Any, Any]:
        """Return both losses as finite sums of the batches."""
        whole = (tuple(map(torch.cat, zip(*batches, strict=True))) for batches in self.batches)
        return tuple(  # type: ignore[return-value]
            bo.FiniteSum(loss, data, SIZE) for loss, data in zip((self.live_f, self.live_g), whole, strict=True)
        )

    def saddle(self) -> Any:
        """Return one minimax loss (x descends, y ascends)."""
        return bo.Objective(lambda b: sum(t.square().sum() for t in self.x) / 2 - self.live_g(b), self.batches[1])

    def streams(self) -> tuple[Any, Any]:
        """Return endless upper and lower batches."""
        return cycle(self.batches[0]), cycle(self.batches[1])


def logistic(generator: torch.Generator, dtype: torch.dtype) -> Shape:
    """Return a problem of the size of ijcnn1: 22 weights, with one penalty exp(x_j) each."""
    weights = torch.randn(22, generator=generator, dtype=dtype)

    def batches() -> list[Batch]:
        inputs = torch.randn(BATCHES, SIZE, 22, generator=generator, dtype=dtype)
        return [(rows, (rows @ weights > 0).to(dtype)) for rows in inputs]

    def fit(y: Sequence[Tensor], batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(batch[0] @ y[0], batch[1])

    def f(x: Sequence[Tensor], y: Sequence[Tensor], batch: Batch) -> Tensor:
        return fit(y, batch)

    def g(x: Sequence[Tensor], y: Sequence[Tensor], batch: Batch) -> Tensor:
        return fit(y, batch) + 0.05 * (x[0].exp() * y[0].square()).sum()

    x = (torch.zeros(22, dtype=dtype).requires_grad_(),)
    y = (torch.randn(22, generator=generator, dtype=dtype).mul_(0.1).requires_grad_(),)
    return Shape(
        "logistic regression, 22 weights and penalties, batch 64", x, y, f, g,
        lambda b: f(x, y, b), lambda b: g(x, y, b), (batches(), batches()),
    )  # fmt: skip


def cleaning(
    title: str, net: nn.Module, size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, steps: int = 10
) -> Shape:
    """Return a problem with weights sigmoid(x_i) of the training examples of a classifier."""
    net = net.to(dtype)
    names, y = [name for name, _ in net.named_parameters()], tuple(net.parameters())
    x = (torch.zeros(BATCHES * SIZE, dtype=dtype).requires_grad_(),)

    def batches() -> list[Batch]:
        return [
            (
                torch.randn(SIZE, *size, generator=generator, dtype=dtype),
                torch.randint(0, 10, (SIZE,), generator=generator),
                torch.arange(i * SIZE, (i + 1) * SIZE),
            )
            for i in range(BATCHES)
        ]

    def network(y: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda rows: torch.func.functional_call(net, dict(zip(names, y, strict=True)), (rows,))

    def upper(net: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    def lower(net: Callable[[Tensor], Tensor], x: Sequence[Tensor], y: Sequence[Tensor], batch: Batch) -> Tensor:
        losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
        ridge = torch.stack([t.square().sum() for t in y]).sum()
        return (x[0][batch[2]].sigmoid() * losses).mean() + RIDGE * ridge

    return Shape(
        title, x, y,
        lambda x, y, b: upper(network(y), b), lambda x, y, b: lower(network(y), x, y, b),
        lambda b: upper(net, b), lambda b: lower(net, x, y, b), (batches(), batches()), steps=steps,
    )  # fmt: skip


def tasks(generator: torch.Generator, dtype: torch.dtype) -> Shape:
    """Return 16 tasks of 5 classes; x is a shared body of four convolutions, y one head per task."""
    width, layers = 32, []
    for channels in (1, width, width, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    body = nn.Sequential(*layers, nn.Flatten()).to(dtype)
    y = tuple(t.requires_grad_() for t in (torch.zeros(WAYS, width, dtype=dtype), torch.zeros(WAYS, dtype=dtype)))
    names, x = [name for name, _ in body.named_parameters()], tuple(body.parameters())
    images = torch.randn(TASKS, 2 * 5 * WAYS, 1, 28, 28, generator=generator, dtype=dtype)
    labels = torch.arange(WAYS).repeat(TASKS, 10)

    def fit(body: Callable[[Tensor], Tensor], y: Sequence[Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(F.linear(body(batch[0]), y[0], y[1]), batch[1])

    def network(x: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda rows: torch.func.functional_call(body, dict(zip(names, x, strict=True)), (rows,))

    def ridge(y: Sequence[Tensor]) -> Tensor:
        return 0.05 * torch.stack([t.square().sum() for t in y]).sum()

    half = images.shape[1] // 2
    return Shape(
        "16 tasks, 5 ways and 5 shots, CNN4 body, head of each task", x, y,
        lambda x, y, b: fit(network(x), y, b), lambda x, y, b: fit(network(x), y, b) + ridge(y),
        lambda b: fit(body, y, b), lambda b: fit(body, y, b) + ridge(y), ([], []),
        bo.TensorTasks((images[:, :half], labels[:, :half]), (images[:, half:], labels[:, half:])), steps=5,
    )  # fmt: skip


SHAPES: dict[str, Callable[[torch.Generator, torch.dtype], Shape]] = {
    "logistic": logistic,
    "softmax": lambda g, t: cleaning("softmax regression 64-10, batch 64", nn.Linear(64, 10), (64,), g, t),
    "mlp": lambda g, t: cleaning(
        "MLP 784-256-10, batch 64", nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10)), (784,), g, t
    ),
    "lenet": lambda g, t: cleaning(
        "LeNet, batch 64", nn.Sequential(*lenet(), nn.Linear(84, 10)), (1, 32, 32), g, t, steps=5
    ),
    "tasks": tasks,
}


def shape(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Shape:
    """Return a problem by name, with the same data at every call and on any device."""
    with torch.random.fork_rng():
        begin(0, "start")
        made = SHAPES[name](stream(0, "data"), dtype)
    if device == "cpu":
        return made
    for t in (*made.x, *made.y):
        t.data = t.detach().to(device)  # in place, as the losses read these tensors
    there = [[tuple(t.to(device) for t in batch) for batch in batches] for batches in made.batches]
    made.batches = there[0], there[1]
    made.tasks = None if made.tasks is None else made.tasks.to(device)
    return made
