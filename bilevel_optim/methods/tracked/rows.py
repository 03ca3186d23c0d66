"""Per-task rows: what a method remembers of each of m tasks, touched only where a step looks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...hypergradient.storm import floor

__all__ = ["Rows"]

REBASE = -16.0  # below that, exp(sum of logarithms) leaves too few digits in the differences of prefix sums
CHUNK = 1 << 22  # entries handled at a time when all rows are gone through


class Rows:
    r"""Tensors with one row per task, of which each step changes a few by data and all others by a known rule.

    When the row is not looked at, every tracker X shrinks, :math:`X \leftarrow (1-\beta) X`, and every position y moves
    along its velocity w, :math:`y \leftarrow (1-\tau)\, y + \tau\, \Pi(y - \text{lr}\, w)` with w already shrunk. Both
    have closed forms in prefix sums over the steps, so a row catches up in one go when it is next looked at, however
    long that took:

    .. math::
        X_t = e^{\Lambda_t - \Lambda_a} X_a, \qquad y_t = y_a - e^{-\Lambda_a} (G_t - G_a)\, w_a,
        \qquad \Lambda_t = \sum_{s<t} \log(1 - \beta_s), \quad G_t = \sum_{s<t} \tau_s \text{lr}_s e^{\Lambda_{s+1}}.

    A row keeps :math:`\Lambda_a` and :math:`G_a` of the time at which it is valid; nothing is kept per step, unless
    there is a radius.

    Args:
        positions: live tensors of the first position, each (m, ...); they stay where they are.
        groups: for each entry of a row of the first position, the index of its learning rate.
        values: everything else by name, each (m, ...). A name and that name with ``_last`` hold a tensor and its value
            at the last step.
        moving: (position, velocity) names.
        decays: the mixing weight that each tracker shrinks by, by name of the tracker, as a name in ``tick``'s betas.
        least: lowest eigenvalue of ``H``, which is kept above it also when the row is not looked at; None: not.
        radius: of the ball :math:`\Pi` projects the first position to.
    """

    def __init__(
        self,
        positions: Sequence[Tensor],
        groups: Tensor,
        values: dict[str, Tensor],
        *,
        moving: Sequence[tuple[str, str]],
        decays: Mapping[str, str],
        least: float | None = None,
        radius: float = math.inf,
        device: torch.device | None = None,
    ) -> None:
        self.device = positions[0].device if device is None else device
        self.positions, self.groups = list(positions), groups.to(self.device)
        self.moving, self.decays, self.least, self.radius = tuple(moving), dict(decays), least, radius
        self.columns = sorted(set(self.decays.values()))
        self.values = {name: t.to(self.device) for name, t in values.items()}
        m, kinds = len(positions[0]), int(groups.max()) + 1 if len(groups) else 1
        double = {"dtype": torch.float64, "device": self.device}
        self.log = torch.zeros(m, len(self.columns), **double)  # type: ignore[call-overload]
        self.drift = torch.zeros(m, len(self.moving), kinds, **double)  # type: ignore[call-overload]
        self.age = torch.zeros(m, dtype=torch.int64, device=self.device)
        self.now = {"log": torch.zeros_like(self.log[0]), "drift": torch.zeros_like(self.drift[0])}
        self.now["last"] = self.now["drift"].clone()
        self.clock = 0
        self.history: list[tuple[float, float, float]] = []  # since the last rebase: beta of w, tau, lr
        self.floored = 0

    def __len__(self) -> int:
        return len(self.age)

    # ------------------------------------------------------------------------------------------------ one step

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """Rows as they are now, on the device of the positions, with the positions' last values as ``NAME_last``."""
        ids = ids.to(self.device)
        rows = {name: t[ids] for name, t in self.values.items()}
        rows["y"] = self._positions(ids)
        fresh = (self.age[ids] == self.clock).unsqueeze(-1)
        log, drift = self.log[ids], self.drift[ids]
        shrunk = torch.exp(self.now["log"] - log)
        for p, (position, velocity) in enumerate(self.moving):
            unit = torch.exp(-log[:, self.columns.index(self.decays[velocity])])
            far, near = (unit.unsqueeze(-1) * (self.now[name][p] - drift[:, p]) for name in ("drift", "last"))
            at, along, before = rows[position], rows[velocity], rows[f"{position}_last"]
            last = at - near[:, self.groups].to(at.dtype) * along
            rows[position] = at - far[:, self.groups].to(at.dtype) * along
            if p == 0 and math.isfinite(self.radius):
                last = self._confined(rows, at, along, far[:, 0], last, ids)
            rows[f"{position}_last"] = torch.where(fresh, before, last)
        for name, beta in self.decays.items():
            factor = shrunk[:, self.columns.index(beta)].to(rows[name].dtype)
            if f"{name}_last" in rows:
                wide = fresh.view(-1, *[1] * (rows[name].dim() - 1))
                rows[f"{name}_last"] = torch.where(wide, rows[f"{name}_last"], rows[name])
            rows[name] = rows[name] * factor.view(-1, *[1] * (rows[name].dim() - 1))
        self.keep_above(rows)
        device = self.positions[0].device
        return {name: t.to(device) for name, t in rows.items()}

    def keep_above(self, rows: dict[str, Tensor]) -> None:
        """Keep the eigenvalues of rows that were not looked at above their floor.

        Once is enough: shrinking and flooring again and again is shrinking by all factors and flooring once.
        """
        if self.least is not None:
            rows["H"], active = floor(rows["H"], self.least)
            self.floored += int(active)

    def tick(self, betas: Mapping[str, float], steps: Sequence[Sequence[float]], tau: float) -> None:
        """One step passes for all rows. ``steps`` are the learning rates of each position, by group."""
        factors = torch.tensor([1 - betas[name] for name in self.columns], dtype=torch.float64, device=self.device)
        self.now["log"] = self.now["log"] + factors.clamp_min(1e-16).log()
        self.now["last"] = self.now["drift"]
        gains = []
        for (_, velocity), rates in zip(self.moving, steps, strict=True):
            level = self.now["log"][self.columns.index(self.decays[velocity])].exp()
            gains.append(torch.tensor([float(r) * tau for r in rates], dtype=torch.float64, device=self.device) * level)
        if gains:
            self.now["drift"] = self.now["drift"] + torch.stack(gains)
        if math.isfinite(self.radius):
            self.history.append((betas[self.decays[self.moving[0][1]]], tau, float(steps[0][0])))
        self.clock += 1

    def scatter(self, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Write rows that are valid now."""
        ids = ids.to(self.device)
        for name, t in self.values.items():
            t.index_copy_(0, ids, rows[name].to(t))
        self.place(ids, rows["y"])
        self.log[ids], self.drift[ids], self.age[ids] = self.now["log"], self.now["drift"], self.clock

    @torch.no_grad()
    def place(self, ids: Tensor, y: Tensor) -> None:
        """Write rows of the live positions."""
        start = 0
        for live in self.positions:
            size = live[0].numel()
            part = y[:, start : start + size].reshape(-1, *live.shape[1:])
            live.index_copy_(0, ids.to(live.device), part.to(live))
            start += size

    # ------------------------------------------------------------------------------------------------ all rows

    def chunks(self, at_least: int = 1) -> Iterator[Tensor]:
        """All row numbers, in parts of bounded size."""
        width = sum(t[0].numel() for t in (*self.values.values(), *self.positions))
        size = max(CHUNK // max(width, 1), at_least)
        for start in range(0, len(self), size):
            yield torch.arange(start, min(start + size, len(self)), device=self.device)

    def catch_up(self) -> None:
        """Bring all rows up to now."""
        for ids in self.chunks():
            late = ids[self.age[ids] != self.clock]
            if len(late):
                self.scatter(late, self.gather(late))

    def rebase(self) -> bool:
        """Start the prefix sums anew if their digits run out; all rows are current then."""
        if float(self.now["log"].min() if len(self.columns) else 0.0) >= REBASE:
            return False
        self.catch_up()
        for t in (self.log, self.drift, *self.now.values()):
            t.zero_()
        self.history.clear()
        return True

    # ------------------------------------------------------------------------------------------------ saving

    def state(self) -> dict[str, Any]:
        """Everything but the live positions, copied."""
        return {
            "values": {name: t.clone() for name, t in self.values.items()},
            "now": {name: t.clone() for name, t in self.now.items()},
            "log": self.log.clone(),
            "drift": self.drift.clone(),
            "age": self.age.clone(),
            "clock": self.clock,
            "history": [list(entry) for entry in self.history],
            "floored": self.floored,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned."""
        for name in ("values", "now"):
            setattr(self, name, {key: t.clone().to(self.device) for key, t in state[name].items()})
        for name in ("log", "drift", "age"):
            setattr(self, name, state[name].clone().to(self.device))
        self.clock, self.floored = state["clock"], state["floored"]
        self.history = [(beta, tau, lr) for beta, tau, lr in state["history"]]

    # ------------------------------------------------------------------------------------------------ parts

    def _positions(self, ids: Tensor) -> Tensor:
        parts = [live.detach()[ids.to(live.device)].reshape(len(ids), -1) for live in self.positions]
        joined = torch.cat(parts, 1)
        return joined.to(self.device, torch.promote_types(joined.dtype, torch.float32))

    def _confined(
        self, rows: dict[str, Tensor], at: Tensor, along: Tensor, far: Tensor, last: Tensor, ids: Tensor
    ) -> Tensor:
        """Positions of the rows that may have touched the sphere, by a recursion in two scalars per step passed."""
        y, w = at.double(), along.double()
        largest = max((lr for *_, lr in self.history), default=0.0)
        touched = torch.linalg.vector_norm(y - (far + largest).unsqueeze(-1) * w, dim=-1) > self.radius
        for i in touched.nonzero().flatten().tolist():
            yy, yw, ww = (float(a @ b) for a, b in ((y[i], y[i]), (y[i], w[i]), (w[i], w[i])))
            a, b, c = 1.0, 0.0, 1.0
            before = (a, b)
            gap = self.clock - int(self.age[ids[i]])
            for beta, tau, lr in self.history[len(self.history) - gap :] if gap else ():
                before = (a, b)
                c *= 1 - beta
                moved = b - lr * c
                length = math.sqrt(max(a * a * yy + 2 * a * moved * yw + moved * moved * ww, 0.0))
                factor = 1.0 if length <= self.radius else self.radius / length
                a, b = (1 - tau) * a + tau * factor * a, (1 - tau) * b + tau * factor * moved
            rows["y"][i] = (a * y[i] + b * w[i]).to(at.dtype)
            last[i] = (before[0] * y[i] + before[1] * w[i]).to(at.dtype)
        return last
