"""Trackers of each lower problem: all derivatives as matrices, or a solution of its linear system."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...hypergradient.recursive import Points, matrices, products
from ...hypergradient.storm import ball, ceiling, corrected, floor
from .rows import Rows

__all__ = ["Blocks", "Matrices", "Measured", "Mix", "Normalised", "Products", "Trackers"]

Names = tuple[str, ...]
Mix = Callable[[str, Tensor, Tensor, Tensor], Tensor]  # name, tracker, new, old
Projected = tuple[Rows, Rows]  # rows in their sets, and as projected_NAME the number of active projections


class Measured(NamedTuple):
    """Results at two points on one sample: the loss, per-task derivatives, and hypergradients if they are sums."""

    loss: Tensor
    new: Rows
    old: Rows
    sums: Tensor  # (2, d), at the new and the old point


@dataclass(frozen=True)
class Trackers(ABC):
    """Base class of the sets of trackers.

    Attributes:
        floor: least eigenvalue of H.
        ceilings: radii of the trackers' sets, by name.
        weighted: names with their own mixing weight.
        names: names of the trackers.
        moving: (position, velocity) names.
        limits: names that may have a ceiling.
        apart: True if derivatives in x are needed for each task.
    """

    floor: float
    ceilings: Mapping[str, float]

    weighted: ClassVar[Names]
    names: ClassVar[Names]
    moving: ClassVar[tuple[tuple[str, str], ...]] = (("y", "w"),)
    limits: ClassVar[Names] = ()
    apart: ClassVar[bool]

    @abstractmethod
    def derivatives(self, points: Points, x: Tensor, rows: Rows, at: str = "") -> tuple[Tensor, Tensor, Rows]:
        """Return the loss, the hypergradient if it is a sum over tasks, and the derivatives of each task.

        They are evaluated at the rows' positions; with ``at="_last"``, at those of the last step.
        """

    @abstractmethod
    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one task's derivatives, by name."""

    @property
    def shrinking(self) -> Names:
        """Names of the trackers that shrink in unvisited rows."""
        return self.names

    def opened(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> Rows:
        """Return the positions of tasks that are seen for the first time."""
        return {"y": y}

    def measure(self, points: Points, rows: Rows, x: Tensor, x_last: Tensor) -> Measured:
        """Return derivatives at (x, rows) and at the last point, on the same samples."""
        loss, total, new = self.derivatives(points, x, rows)
        _, total_last, old = self.derivatives(points, x_last, rows, "_last")
        return Measured(loss, new, old, torch.stack([total, total_last]))

    def track(self, rows: Rows, measured: Measured, mix: Mix) -> Projected:
        """Return the trackers after a step, where ``mix`` updates each."""
        new, old = measured.new, measured.old
        return self.projected({name: mix(name, rows[name], new[name], old[name]) for name in self.names})

    def projected(self, rows: Rows) -> Projected:
        """Return the trackers projected onto their sets."""
        return rows, {}

    def weights(self, betas: dict[str, float]) -> dict[str, float]:
        """Return the mixing weights of all trackers."""
        return betas

    def resting(self, beta: float) -> float:
        """Return the fraction of z that unvisited rows with mixing weight beta lose."""
        return beta


class Matrices(Trackers):
    r"""Trackers u, v, V, H, w, which give each task its own hypergradient :math:`z = u - V H^{-1} v`."""

    weighted: ClassVar[Names] = ("u", "v", "V", "H", "w")
    names: ClassVar[Names] = weighted
    limits: ClassVar[Names] = ("u", "v", "V")
    apart = True

    def derivatives(self, points: Points, x: Tensor, rows: Rows, at: str = "") -> tuple[Tensor, Tensor, Rows]:
        loss, found = matrices(points, x, rows[f"y{at}"])
        return loss, x.new_zeros(0), found

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {"u": (d,), "v": (p,), "w": (p,), "V": (d, p), "H": (p, p)}

    def hypergradients(self, rows: Rows) -> Tensor:
        """Return z of each row, shape (n, d)."""
        return corrected(rows["u"], rows["V"], rows["H"], rows["v"])

    def projected(self, rows: Rows) -> Projected:
        found = {"H": floor(rows["H"], self.floor)}
        for name, most in self.ceilings.items():
            found[name] = (ceiling if name == "V" else ball)(rows[name], most)
        inside = {name: one.value for name, one in found.items()}
        return {**rows, **inside}, {f"projected_{name}": one.active for name, one in found.items()}


class Normalised(Matrices):
    """`Matrices` divided by the scale that the drawing of tasks gives all trackers: the tracker of the constant 1.

    An unvisited row keeps u, v, V and H, because its trackers and their scale shrink by the same factor. Only w, along
    which y moves, is not divided.
    """

    names = (*Matrices.names, "scale")
    shrinking = ("w", "scale")

    def derivatives(self, points: Points, x: Tensor, rows: Rows, at: str = "") -> tuple[Tensor, Tensor, Rows]:
        loss, total, found = super().derivatives(points, x, rows, at)
        return loss, total, {**found, "scale": x.new_ones(len(rows["y"]))}

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(d, p), "scale": ()}

    def track(self, rows: Rows, measured: Measured, mix: Mix) -> Projected:
        new, old, scale = measured.new, measured.old, rows["scale"]
        mixed = {"w": mix("w", rows["w"], new["w"], old["w"]), "scale": mix("scale", scale, new["scale"], old["scale"])}
        for name in ("u", "v", "V", "H"):
            before, after = (s.view(-1, *[1] * (rows[name].dim() - 1)) for s in (scale, mixed["scale"]))
            mixed[name] = mix(name, rows[name] * before, new[name], old[name]) / after
        return self.projected(mixed)

    def weights(self, betas: dict[str, float]) -> dict[str, float]:
        return {**betas, "scale": betas["u"]}

    def resting(self, beta: float) -> float:
        return 0.0


class Blocks(Matrices):
    """Trackers H (lower Hessian) and w (lower gradient) only; u, v and V come from the current sample."""

    weighted = names = ("H", "w")
    limits = ()


class Products(Trackers):
    r"""Trackers w and s: r follows :math:`H^{-1} \nabla_y f` by steps along :math:`s \approx H r - \nabla_y f`.

    The hypergradient of a task, :math:`\nabla_x f - \nabla^2_{xy} g\, r`, is only ever summed over tasks.
    """

    weighted = names = ("w", "s")
    limits = ("r",)
    moving = (("y", "w"), ("r", "s"))
    apart = False

    def opened(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> Rows:
        first = products(points, x, y, torch.zeros_like(y))[2]["s"]
        r = -rates.to(y) * first  # the first step from zero
        return {"y": y, "r": ball(r, self.ceilings.get("r", math.inf)).value}

    def derivatives(self, points: Points, x: Tensor, rows: Rows, at: str = "") -> tuple[Tensor, Tensor, Rows]:
        return products(points, x, rows[f"y{at}"], rows[f"r{at}"])

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {"w": (p,), "s": (p,)}
