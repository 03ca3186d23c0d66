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

__all__ = ["Blocks", "Matrices", "Measured", "Mix", "Normalised", "Products", "Trackers"]

Names = tuple[str, ...]
Mix = Callable[[str, Tensor, Tensor, Tensor], Tensor]  # name, tracker, new, old
Projected = tuple[Rows, Rows]  # rows in their sets, and as projected_NAME how many projections changed something


class Measured(NamedTuple):
    """What two points and one sample gave: the loss, per-task derivatives, and hypergradients where those are sums."""

    loss: Tensor
    new: Rows
    old: Rows
    sums: Tensor  # (2, d), at the new and the old point


@dataclass(frozen=True)
class Trackers(ABC):
    """A choice of what is tracked.

    Attributes:
        floor: least eigenvalue of H.
        ceilings: radii of the trackers' sets, by name.
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
    def derivatives(self, points: Points, x: Tensor, rows: Rows, at: str = "") -> tuple[Tensor, Tensor, Rows]:
        """Loss, sum of hypergradients if it is one, and what each task has; at the rows or (``"_last"``) the last."""

    @abstractmethod
    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        """Shapes of one row of what is made of each task."""

    @property
    def shrinking(self) -> Names:
        """Trackers of a row that shrink if it is not looked at."""
        return self.names

    def opened(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> Rows:
        """Positions of tasks that are seen for the first time."""
        return {"y": y}

    def measure(self, points: Points, rows: Rows, x: Tensor, x_last: Tensor) -> Measured:
        """Derivatives at (x, rows) and at the last point, on the same samples."""
        loss, total, new = self.derivatives(points, x, rows)
        _, total_last, old = self.derivatives(points, x_last, rows, "_last")
        return Measured(loss, new, old, torch.stack([total, total_last]))

    def track(self, rows: Rows, measured: Measured, mix: Mix) -> Projected:
        """Trackers after the step that ``mix`` makes of each."""
        new, old = measured.new, measured.old
        return self.projected({name: mix(name, rows[name], new[name], old[name]) for name in self.names})

    def projected(self, rows: Rows) -> Projected:
        """Trackers in their sets."""
        return rows, {}

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

    def derivatives(self, points: Points, x: Tensor, rows: Rows, at: str = "") -> tuple[Tensor, Tensor, Rows]:
        loss, found = matrices(points, x, rows[f"y{at}"])
        return loss, x.new_zeros(0), found

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {"u": (d,), "v": (p,), "w": (p,), "V": (d, p), "H": (p, p)}

    def hypergradients(self, rows: Rows) -> Tensor:
        """Values of z, shape (n, d)."""
        return corrected(rows["u"], rows["V"], rows["H"], rows["v"])

    def projected(self, rows: Rows) -> Projected:
        found = {"H": floor(rows["H"], self.floor)}
        for name, most in self.ceilings.items():
            found[name] = (ceiling if name == "V" else ball)(rows[name], most)
        inside = {name: one.value for name, one in found.items()}
        return {**rows, **inside}, {f"projected_{name}": one.active for name, one in found.items()}


class Normalised(Matrices):
    """The same, divided by the scale that the drawing of tasks gives all trackers: that of the constant 1.

    A row that is not looked at keeps u, v, V and H, because its trackers and their scale shrink alike. Only w, along
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

    def opened(self, points: Points, x: Tensor, y: Tensor, rates: Tensor) -> Rows:
        first = products(points, x, y, torch.zeros_like(y))[2]["s"]
        return {"y": y, "r": -rates.to(y) * first}  # the first step from zero

    def derivatives(self, points: Points, x: Tensor, rows: Rows, at: str = "") -> tuple[Tensor, Tensor, Rows]:
        return products(points, x, rows[f"y{at}"], rows[f"r{at}"])

    def shapes(self, d: int, p: int) -> dict[str, tuple[int, ...]]:
        return {"w": (p,), "s": (p,)}
