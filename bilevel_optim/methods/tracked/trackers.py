"""What is tracked of each lower problem: all derivatives as matrices, or a solution of its linear system."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...hypergradient.recursive import Points, matrices, products
from ...hypergradient.storm import ball, ceiling, corrected, floor

__all__ = ["Matrices", "Measured", "Mix", "Products", "Trackers"]

Rows = dict[str, Tensor]
Mix = Callable[[str, Tensor, Tensor, Tensor], Tensor]  # name, tracker, new, old


class Measured(NamedTuple):
    """What two points and one sample gave: the loss, per-task derivatives, and hypergradients where those are sums."""

    loss: Tensor
    new: Rows
    old: Rows
    sums: Tensor  # (2, d), at the new and the old point


class Trackers(ABC):
    """A choice of what is tracked.

    Attributes:
        names: the trackers, each with a mixing weight of its own.
        moving: (position, velocity) names.
        limits: what may have a ceiling.
        apart: whether derivatives in x are wanted for each task.
        active: how many projections changed something in the last step, by name.
    """

    names: tuple[str, ...]
    moving: tuple[tuple[str, str], ...] = (("y", "w"),)
    limits: tuple[str, ...] = ()
    apart: bool

    def __init__(self, ceilings: dict[str, float]) -> None:
        self.ceilings = ceilings
        self.active: dict[str, Tensor] = {}

    @abstractmethod
    def first(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Rows]:
        """Loss, weighted sum of hypergradients and rows of tasks that are seen for the first time."""

    @abstractmethod
    def measure(self, points: Points, rows: Rows, x: Tensor, x_last: Tensor) -> Measured:
        """Derivatives at (x, rows) and at the last point, on the same samples."""

    @abstractmethod
    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what :meth:`measure` finds for each task."""

    @abstractmethod
    def track(self, rows: Rows, measured: Measured, mix: Mix) -> Rows:
        """The trackers after the step."""

    def clipped(self, name: str, vectors: Tensor) -> Tensor:
        """Vectors in their ball, if they have one."""
        radius = self.ceilings.get(name, math.inf)
        if math.isinf(radius):
            return vectors
        value, self.active[name] = ball(vectors, radius)
        return value


class Matrices(Trackers):
    r"""u, v, V, H, w: every first and second derivative that the hypergradient has, :math:`z = u - V H^{-1} v`.

    Args:
        least: eigenvalues of H are kept above it.
        ceilings: radii of u and v, largest spectral norm of V.
    """

    names: tuple[str, ...] = ("u", "v", "V", "H", "w")
    limits: tuple[str, ...] = ("u", "v", "V")
    apart = True

    def __init__(self, least: float, ceilings: dict[str, float]) -> None:
        super().__init__(ceilings)
        self.least = least

    def first(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Rows]:
        with points.at(x, y):
            loss, rows = matrices(points)
        rows = self._projected(rows, self.least)
        return loss, self.hypergradients(rows).sum(0), rows

    def measure(self, points: Points, rows: Rows, x: Tensor, x_last: Tensor) -> Measured:
        with points.at(x, rows["y"]):
            loss, new = matrices(points)
        with points.at(x_last, rows["y_last"]):
            _, old = matrices(points)
        return Measured(loss, new, old, x.new_zeros(2, 0))

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {"u": (d,), "v": (p,), "w": (p,), "V": (d, p), "H": (p, p)}

    def track(self, rows: Rows, measured: Measured, mix: Mix) -> Rows:
        new, old = measured.new, measured.old
        tracked = {name: mix(name, rows[name], new[name], old[name]) for name in self.names}
        least: Tensor | float = self.least
        if "scale" in rows:
            tracked["scale"] = mix(
                "scale", rows["scale"], torch.ones_like(rows["scale"]), torch.ones_like(rows["scale"])
            )
            least = self.least * tracked["scale"]
        return self._projected(tracked, least)

    def hypergradients(self, rows: Rows) -> Tensor:
        """Values of z, shape (n, d)."""
        return corrected(rows["u"], rows["V"], rows["H"], rows["v"])

    def _projected(self, rows: Rows, least: Tensor | float) -> Rows:
        rows = {**rows, "u": self.clipped("u", rows["u"]), "v": self.clipped("v", rows["v"])}
        rows["H"], self.active["H"] = floor(rows["H"], least)
        if math.isfinite(self.ceilings.get("V", math.inf)):
            rows["V"], self.active["V"] = ceiling(rows["V"], self.ceilings["V"])
        return rows


class Products(Trackers):
    r"""w and s, no matrix: r follows :math:`H^{-1} \nabla_y f` by steps along :math:`s \approx H r - \nabla_y f`.

    The hypergradient of a task, :math:`\nabla_x f - \nabla^2_{xy} g\, r`, is only ever summed over tasks.
    """

    names = ("w", "s")
    limits = ("r",)
    moving = (("y", "w"), ("r", "s"))
    apart = False

    def first(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Rows]:
        with points.at(x, y):
            r = -rates.to(y) * products(points, torch.zeros_like(y))[2]["s"]  # the first step from zero
            loss, direction, rows = products(points, r)
        return loss, direction, {**rows, "r": r, "r_last": r.clone()}

    def measure(self, points: Points, rows: Rows, x: Tensor, x_last: Tensor) -> Measured:
        with points.at(x, rows["y"]):
            loss, q, new = products(points, rows["r"])
        with points.at(x_last, rows["y_last"]):
            _, q_last, old = products(points, rows["r_last"])
        return Measured(loss, new, old, torch.stack([q, q_last]))

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {"w": (p,), "s": (p,)}

    def track(self, rows: Rows, measured: Measured, mix: Mix) -> Rows:
        return {name: mix(name, rows[name], measured.new[name], measured.old[name]) for name in self.names}
