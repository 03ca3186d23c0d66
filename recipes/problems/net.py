"""A net of threads that hangs under its weight, and a Newton solver for its equilibrium."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from ..common import draw, figure
from ..common.seeds import stream

__all__ = ["MOST", "Net", "Search"]

MOST = 0.7  # bound on the absolute logarithm of a rest length
STIFFNESS, SLACK = 100.0, 0.02  # stiffness of a thread; width of the smooth transition to slack


class Net:
    """Square mesh of width 1; nodes have weight 1 and are fixed at the border; threads pull, but do not push.

    The energy is therefore strictly convex in the positions; the equilibrium is unique and smooth in the rest lengths.

    Args:
        side: nodes per side.
        seed: seed of the target, two bowls at random places.
    """

    def __init__(self, side: int, seed: int) -> None:
        at = torch.arange(side * side).view(side, side)
        pairs = torch.cat([torch.stack([at[:, :-1].flatten(), at[:, 1:].flatten()]),
                           torch.stack([at[:-1].flatten(), at[1:].flatten()])], 1)  # fmt: skip
        free = torch.zeros(side, side, dtype=torch.bool)
        free[1:-1, 1:-1] = True
        self.side, self.free = side, free.flatten().nonzero().squeeze(1)
        self.a, self.b = pairs[:, free.flatten()[pairs].any(0)]
        flat = [at.flatten() % side, at.flatten() // side, at.flatten() * 0]
        self.flat = torch.stack(flat, 1).double()
        self.threads, self.solves = len(self.a), 0
        draw = torch.rand(2, 3, generator=stream(seed, "data"), dtype=torch.float64)
        centre = torch.tensor([[0.3, 0.35], [0.7, 0.65]]) + 0.1 * (draw[:, :2] - 0.5)
        self.bowls = [(c * (side - 1), (0.22 + 0.1 * d[2]) * side) for c, d in zip(centre, draw, strict=True)]
        found = minimize_scalar(lambda k: self.error(self.measured(k)), bounds=(0.5, 2.0), method="bounded")
        self.start = self.measured(found.x)

    def measured(self, factor: float) -> Tensor:
        """Return the rule's lengths: ``factor`` times those on the target, without sideways moves of the nodes."""
        ends = self.goal
        apart: Tensor = ends[self.a] - ends[self.b]
        return (factor * apart.square().sum(1).sqrt()).log().clamp(-MOST, MOST)

    def error(self, x: Tensor) -> float:
        """Return the root mean square height above the target, in the equilibrium found from the flat net."""
        return math.sqrt(self.upper(self.newton(x, self.flat[self.free].flatten())[0]))

    def target(self, place: Tensor) -> Tensor:
        """Return the height of the target surface at a place."""
        window = (torch.pi * place / (self.side - 1)).sin().clamp_min(0).prod(-1)
        width = 0.034 * self.side**2
        depth: Tensor = sum((d * (-(place - c).square().sum(-1) / width).exp() for c, d in self.bowls), torch.zeros(()))
        return -window * depth

    @property
    def goal(self) -> Tensor:
        """Return the target at the places of the flat net."""
        return torch.cat([self.flat[:, :2], self.target(self.flat[:, :2])[:, None]], 1)

    def positions(self, y: Tensor) -> Tensor:
        """Return the positions of all nodes from those of the free ones."""
        return self.flat.index_put((self.free,), y.view(-1, 3))

    def _threads(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Return lengths, directions and energies of the threads, and two derivatives of the energies in the length."""
        p = self.positions(y)
        apart = p[self.a] - p[self.b]
        length = apart.norm(dim=1)
        over = length - x.exp()
        root = (over.square() + SLACK**2).sqrt()
        pull = (over + root) / 2  # about max(over, 0)
        slope = pull / root
        energy, force = STIFFNESS / 2 * pull.square(), STIFFNESS * pull * slope
        return length, apart / length[:, None], energy, force, STIFFNESS * (slope**2 + pull * SLACK**2 / 2 / root**3)

    def lower(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the energy; x are logarithms of the rest lengths, y the positions of the free nodes."""
        return self._threads(x, y)[2].sum() + y.view(-1, 3)[:, 2].sum()

    def upper(self, y: Tensor) -> Tensor:
        """Return the mean square height above the target."""
        nodes = y.view(-1, 3)
        return (nodes[:, 2] - self.target(nodes[:, :2])).square().mean()

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient and Hessian of the energy in y."""
        length, way, _, force, stiff = self._threads(x, y)
        n, tension = self.side**2, (force / length)[:, None, None]
        block = stiff[:, None, None] * way[:, :, None] * way[:, None] + tension * (
            torch.eye(3, dtype=y.dtype) - way[:, :, None] * way[:, None]
        )
        whole = y.new_zeros(n, n, 3, 3)
        for i, j, sign in ((self.a, self.a, 1), (self.b, self.b, 1), (self.a, self.b, -1), (self.b, self.a, -1)):
            whole.index_put_((i, j), sign * block, accumulate=True)
        pull = y.new_zeros(n, 3).index_add(0, self.a, force[:, None] * way).index_add(0, self.b, -force[:, None] * way)
        gradient = pull[self.free] + torch.tensor([0.0, 0.0, 1.0], dtype=y.dtype)
        return gradient.flatten(), whole[self.free][:, self.free].transpose(1, 2).reshape(y.numel(), y.numel())

    @torch.no_grad()
    def newton(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Solve for the equilibrium from y; return it with the Cholesky factor of its Hessian."""
        self.solves += 1
        for _ in range(200):
            gradient, hessian = self.derivatives(x, y)
            factor = torch.linalg.cholesky(hessian)
            if gradient.norm() < 1e-9:
                break
            step = torch.cholesky_solve(gradient[:, None], factor).squeeze(1)
            size, before = min(1.0, 2.0 / float(step.abs().max())), self.lower(x, y)
            while size > 1e-6 and self.lower(x, y - size * step) > before - 1e-4 * size * gradient @ step + 1e-11:
                size /= 2
            y = y - size * step
        return y, factor

    @torch.no_grad()
    def adjoint(self, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        """Return the gradient of `upper` at the equilibrium, derived by hand."""
        with torch.enable_grad():
            (outer,) = torch.autograd.grad(self.upper(z := y.clone().requires_grad_()), z)
        v = torch.zeros_like(self.flat)
        v[self.free] = torch.cholesky_solve(outer[:, None], factor).view(-1, 3)
        _, way, _, _, stiff = self._threads(x, y)
        return stiff * ((v[self.a] - v[self.b]) * way).sum(1) * x.exp()

    def draw(self, axis: Any, p: Tensor) -> None:
        """Draw the net with node positions p in three dimensions."""
        for i, j in zip(self.a.tolist(), self.b.tolist(), strict=True):
            axis.plot(*p[[i, j]].T.tolist(), color="C0", linewidth=0.8)
        axis.set(zlim=(-0.3 * self.side, 0.3), box_aspect=(1, 1, 0.4))
        axis.view_init(25, -60)

    def picture(self, stem: Path, title: str, x: list[float], name: str, curves: dict[str, Any]) -> None:
        """Draw the net before, the net with a method's rest lengths x, the target, and the errors of all methods."""
        with figure(stem, title, (10, 8)) as canvas:
            search = Search(self, math.inf)
            before = self.positions(search.y)
            search(torch.tensor(x, dtype=torch.float64))
            views = {"measured on the target": before, name: self.positions(search.y), "target": self.goal}
            for i, (label, positions) in enumerate(views.items()):
                axis = canvas.add_subplot(2, 2, 1 + i, projection="3d")
                self.draw(axis, positions)
                axis.set_title(label)
            axis = canvas.add_subplot(2, 2, 4)
            draw(axis, curves, "seconds", "error", yscale="log")
            axis.legend(fontsize="small")


class Search:
    """Best rest lengths found within the time, and the curve of the error."""

    def __init__(self, net: Net, seconds: float) -> None:
        self.net, self.x = net, net.start
        self.y, self.factor = net.newton(self.x, net.flat[net.free].flatten())
        self.best, self.start, self.seconds = math.inf, time.process_time(), seconds
        self.curve: list[dict[str, float]] = []
        self.keep(self.x, float(net.upper(self.y)))

    def keep(self, x: Any, value: float) -> float:
        """Record a value; stop the search when the time is over."""
        passed = time.process_time() - self.start
        if passed > self.seconds and self.curve:  # the start is always recorded
            raise StopIteration
        if value < self.best:
            self.best, self.x = value, torch.as_tensor(x).detach().clone()
            self.curve.append({"seconds": passed, "error": value**0.5})
        return value

    def __call__(self, x: Any) -> float:
        x = torch.as_tensor(x)
        self.y, self.factor = self.net.newton(x, self.y)
        return self.keep(x, float(self.net.upper(self.y)))
