"""What is tracked of each lower problem: all derivatives as matrices, or a solution of its linear system."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...hypergradient.recursive import Points, matrices, products
from ...hypergradient.storm import ball, ceiling, corrected, floor
from .rows import Rows

__all__ = ["Blocks", "Matrices", "Measured", "Mix", "Normalised", "Products", "Tracked", "Trackers"]

Names = tuple[str, ...]
Mix = Callable[[str, Tensor, Tensor, Tensor], Tensor]  # name, tracker, new, old


class Measured(NamedTuple):
    """What two points and one sample gave: the loss, per-task derivatives, and hypergradients where those are sums."""

    loss: Tensor
    new: Rows
    old: Rows
    sums: Tensor  # (2, d), at the new and the old point


class Tracked(NamedTuple):
    """Rows in their sets, and how many projections changed something, by name."""

    rows: Rows
    active: dict[str, Tensor]


@dataclass(frozen=True)
class Trackers(ABC):
    """A choice of what is tracked.

    Args:
        floor: least eigenvalue of H.
        ceilings: radii of the trackers' sets, by name.

    Attributes:
        weighted: the names that have a mixing weight of their own.
        names: the trackers.
        moving: (position, velocity) names.
        limits: what may have a ceiling.
        apart: whether derivatives in x are wanted for each task.
    """

    floor: float
    ceilings: Mapping[str, float]

    weighted: ClassVar[Names]
    names: ClassVar[Names]
    moving: ClassVar[tuple[tuple[str, str], ...]] = (("y", "w"),)
    limits: ClassVar[Names] = ()
    apart: ClassVar[bool]

    @abstractmethod
    def first(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Tracked]:
        """Loss, weighted sum of hypergradients and rows of tasks that are seen for the first time."""

    @abstractmethod
    def measure(self, points: Points, rows: Rows, x: Tensor, x_last: Tensor) -> Measured:
        """Derivatives at (x, rows) and at the last point, on the same samples."""

    @abstractmethod
    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        """Shapes of one row of everything that is measured."""

    def track(self, rows: Rows, measured: Measured, mix: Mix) -> Tracked:
        """Trackers after the step that ``mix`` makes of each."""
        return self.projected(
            {name: mix(name, rows[name], measured.new[name], measured.old[name]) for name in self.names}
        )

    def projected(self, rows: Rows) -> Tracked:
        """Trackers in their sets."""
        return Tracked(rows, {})

    def hypergradients(self, rows: Rows) -> Tensor:
        """Values of z, shape (n, d), where the rows have them."""
        raise NotImplementedError

    def weights(self, betas: dict[str, float]) -> dict[str, float]:
        """Mixing weights of all trackers."""
        return betas

    def resting(self, beta: float) -> float:
        """What rows with mixing weight beta lose of z if they are not looked at."""
        return beta


class Matrices(Trackers):
    r"""u, v, V, H, w, from which each task has its own hypergradient :math:`z = u - V H^{-1} v`."""

    weighted: ClassVar[Names] = ("u", "v", "V", "H", "w")
    names: ClassVar[Names] = weighted
    limits: ClassVar[Names] = ("u", "v", "V")
    apart = True

    def first(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Tracked]:
        loss, found = self.derivatives(points, x, y)
        tracked = self.projected({name: found[name] for name in self.names})
        return loss, self.hypergradients({**found, **tracked.rows}).sum(0), tracked

    def measure(self, points: Points, rows: Rows, x: Tensor, x_last: Tensor) -> Measured:
        loss, new = self.derivatives(points, x, rows["y"])
        _, old = self.derivatives(points, x_last, rows["y_last"])
        return Measured(loss, new, old, x.new_zeros(2, 0))

    def derivatives(self, points: Points, x: Tensor, y: Tensor) -> tuple[Tensor, Rows]:
        """Loss, and for each task everything that z is made of."""
        return matrices(points, x, y)

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {"u": (d,), "v": (p,), "w": (p,), "V": (d, p), "H": (p, p)}

    def hypergradients(self, rows: Rows) -> Tensor:
        return corrected(rows["u"], rows["V"], rows["H"], rows["v"])

    def projected(self, rows: Rows) -> Tracked:
        found = {"H": floor(rows["H"], self.least(rows))}
        for name, most in self.ceilings.items():
            found[name] = (ceiling if name == "V" else ball)(rows[name], most)
        return Tracked(
            {**rows, **{name: one.value for name, one in found.items()}},
            {name: one.active for name, one in found.items()},
        )

    def least(self, rows: Rows) -> Tensor | float:
        """Lowest eigenvalue that H may have."""
        return self.floor


class Normalised(Matrices):
    """The same, known up to a factor: the scale that the drawing of tasks has given the trackers is tracked too.

    It follows the constant 1, so that z is free of the factor when divided by it, and does not shrink.
    """

    names = (*Matrices.names, "scale")

    def derivatives(self, points: Points, x: Tensor, y: Tensor) -> tuple[Tensor, Rows]:
        loss, rows = super().derivatives(points, x, y)
        return loss, {**rows, "scale": y.new_ones(len(y))}

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(d, p), "scale": ()}

    def hypergradients(self, rows: Rows) -> Tensor:
        return super().hypergradients(rows) / rows["scale"].unsqueeze(1)

    def least(self, rows: Rows) -> Tensor:
        return self.floor * rows["scale"]

    def weights(self, betas: dict[str, float]) -> dict[str, float]:
        return {**betas, "scale": betas["u"]}

    def resting(self, beta: float) -> float:
        return 0.0


class Blocks(Matrices):
    """H and w alone are tracked; the other factors of the hypergradient are those of the present sample."""

    weighted = names = ("H", "w")
    limits = ()


class Products(Trackers):
    r"""w and s, no matrix: r follows :math:`H^{-1} \nabla_y f` by steps along :math:`s \approx H r - \nabla_y f`.

    The hypergradient of a task, :math:`\nabla_x f - \nabla^2_{xy} g\, r`, is only ever summed over tasks.
    """

    weighted = names = ("w", "s")
    limits = ("r",)
    moving = (("y", "w"), ("r", "s"))
    apart = False

    def first(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Tracked]:
        r = -rates.to(y) * products(points, x, y, torch.zeros_like(y))[2]["s"]  # the first step from zero
        loss, direction, rows = products(points, x, y, r)
        return loss, direction, Tracked({**rows, "r": r, "r_last": r.clone()}, {})

    def measure(self, points: Points, rows: Rows, x: Tensor, x_last: Tensor) -> Measured:
        loss, q, new = products(points, x, rows["y"], rows["r"])
        _, q_last, old = products(points, x_last, rows["y_last"], rows["r_last"])
        return Measured(loss, new, old, torch.stack([q, q_last]))

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {"w": (p,), "s": (p,)}
