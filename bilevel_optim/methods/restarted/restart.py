r"""Nesterov momentum with restarts for a smooth nonconvex objective: the iteration of x shared by several optimizers.

.. math:: w_k = x_k + (1 - \theta)(x_k - x_{k-1}), \qquad x_{k+1} = w_k - \eta u_k, \qquad u_k \approx \nabla\Phi(w_k),

restarted from :math:`x_{k+1}` without momentum once :math:`(k + 1) \sum_{i \le k} \|x_{i+1} - x_i\|^2 > B^2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...problem.parameters import is_count, is_number, require
from ...problem.vector import Vector

__all__ = ["Restarting", "uniform_ball"]

AUTOMATIC_RADIUS = 5.0  # restart radius in lengths of the first step
LARGEST_PERTURBATION = 0.02  # in restart radii: more than that keeps triggering restarts at a minimum

Group = dict[str, Any]


@dataclass
class Progress:
    """Where a run stands, in plain numbers."""

    step: int = 0  # k, steps made in the present epoch
    restarts: int = 0
    travelled: float = 0.0  # sum of the squared steps of the epoch, in the metric of the learning rates
    shortest: float = math.inf  # smallest squared step in the second half of the epoch
    selected: int = 0  # its index, K0
    rates: list[float] | None = None  # learning rate of each group, as it was when the epoch began
    radius: float | None = None  # the automatic one
    smallest: float = math.inf  # smallest squared gradient, as long as there is no output
    output: float = math.inf  # squared step at which the output was taken
    perturbed: bool = False  # the initial point has had its perturbation
    converged: bool = False
    swapped: bool = False


class Restarting:
    """What an optimizer needs for that iteration, except the gradient; a mixin.

    Between two steps the parameters hold x. ``state[p]`` holds ``previous`` (the last x), ``sum`` (of the look-ahead
    points of the epoch), ``candidate`` (their average up to the shortest step) and ``average`` (the output).
    """

    state: Any
    generator: torch.Generator | None
    momentum: float
    restart_radius: float | None
    restart_period: int
    on_converged: str
    perturbation: float = 0.0
    perturb_initial: bool = True

    def _configure(
        self,
        momentum: float,
        restart_radius: float | None,
        restart_period: int,
        on_converged: str,
    ) -> None:
        """Validate and keep the arguments."""
        require("momentum", momentum, is_number(momentum) and 0 <= momentum < 1)
        positive = restart_radius is None or (is_number(restart_radius) and restart_radius > 0)
        require("restart_radius", restart_radius, positive)
        require("restart_period", restart_period, is_count(restart_period) and restart_period > 0)
        require("on_converged", on_converged, on_converged in ("stop", "continue"))
        self.momentum, self.restart_radius, self.restart_period = momentum, restart_radius, restart_period
        self.on_converged = on_converged
        self._run = Progress()

    def _configure_noise(self, perturbation: float, perturb_initial: bool) -> None:
        """Validate and keep the arguments of a perturbed variant."""
        require("perturbation", perturbation, is_number(perturbation) and 0 <= perturbation < math.inf)
        require("perturb_initial", perturb_initial, isinstance(perturb_initial, bool))
        self.perturbation, self.perturb_initial = perturbation, perturb_initial

    # ------------------------------------------------------------------------------------------------ for users

    @property
    def converged(self) -> bool:
        """Whether an epoch has lasted ``restart_period`` steps without a restart."""
        return self._run.converged

    @property
    def restarts(self) -> int:
        """Restarts so far."""
        return self._run.restarts

    @property
    def epoch_step(self) -> int:
        """Steps made since the last restart."""
        return self._run.step

    def averaged_parameters(self) -> list[Tensor]:
        """The method's output, one tensor for each upper parameter.

        Once ``converged``: the average of the look-ahead points of the last epoch up to its shortest late step. Before
        that, the look-ahead point with the smallest gradient estimate so far (the parameters themselves at first).
        """
        swapped = self._run.swapped
        return [
            (p if swapped else self.state[p].get("average", p)).detach().clone()
            for group in self._all_upper_groups()
            for p in group["params"]
        ]

    @torch.no_grad()
    def swap_averaged(self) -> None:
        """Exchange the parameters' values and `averaged_parameters`; a second call exchanges them back.

        The lower parameters still belong to the last x: ``backward`` improves them at the swapped point (and sets
        ``.grad`` to the hypergradient there). ``step`` raises RuntimeError until they are swapped back.
        """
        for group in self._all_upper_groups():
            for p in group["params"]:
                if "average" in self.state[p]:
                    kept = p.detach().clone()
                    p.copy_(self.state[p]["average"])
                    self.state[p]["average"].copy_(kept)
        self._run.swapped = not self._run.swapped

    # ------------------------------------------------------------------------------------------------ the iteration

    def _all_upper_groups(self) -> list[Group]:
        """The groups of x, frozen parameters included."""
        raise NotImplementedError

    def _ranks(self) -> Any:
        """Process group whose ranks must draw the same perturbation."""
        return None

    @property
    def _progress(self) -> dict[str, Any]:
        return asdict(self._run)

    @_progress.setter
    def _progress(self, values: dict[str, Any]) -> None:
        self._run = Progress(**values)

    def _finished(self) -> bool:
        """Whether ``step`` has nothing left to do."""
        if self._run.swapped:
            raise RuntimeError("the parameters hold the averaged point; call swap_averaged() again before step")
        return self._run.converged and self.on_converged == "stop"

    def _stand_still(self) -> None:
        """Let the next look-ahead point be x itself."""
        for group in self._all_upper_groups():
            for p in group["params"]:
                self.state[p].pop("previous", None)
                self.state[p].pop("perturbation", None)
        self._run.perturbed = True

    def _begin_epoch(self) -> None:
        """Forget the momentum and what belongs to the epoch."""
        run = self._run
        run.step, run.travelled, run.shortest, run.rates = 0, 0.0, math.inf, None
        for group in self._all_upper_groups():
            for p in group["params"]:
                if p in self.state:
                    self.state[p].pop("previous", None)

    @torch.no_grad()
    def _look_ahead(self, groups: Sequence[Group]) -> Vector:
        """The points w where the gradient is to be evaluated."""
        run = self._run
        if run.step == 0 and self.perturb_initial and self.perturbation > 0 and not run.perturbed:
            # x itself must not move before the update, so the perturbation waits in the state.
            run.perturbed = True
            for p, shift in self._perturbations(groups):
                self.state[p]["perturbation"] = shift
        return Vector(point for group in groups for point in self._points(group["params"]))

    def _points(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        points = []
        for p in parameters:
            kept = self.state[p]
            if self._run.swapped:
                points.append(p.detach())
            elif "perturbation" in kept:
                points.append(p + kept["perturbation"])
            elif "previous" in kept:
                points.append(p + self.momentum * (p - kept["previous"]))
            else:
                points.append(p.detach().clone())
        return points

    @torch.no_grad()
    def _advance(self, groups: Sequence[Group]) -> None:
        """One step of x from ``.grad``, which was evaluated at the look-ahead points; then the restart test."""
        run = self._run
        if run.rates is None:
            run.rates = [float(group["lr"]) for group in groups]
        reference, scalars = max(run.rates, default=0.0), []
        for group, rate in zip(groups, run.rates, strict=True):
            moved = [p for p in group["params"] if p.grad is not None]
            if moved:
                scalars.append(self._move(moved, rate, reference))
        if not scalars:
            return
        # The one host synchronisation: all that the restart test and the output need.
        squared, gradient = torch.stack(scalars).sum(0).tolist()
        if run.radius is None and squared > 0:
            run.radius = max(AUTOMATIC_RADIUS * math.sqrt(squared), self.perturbation / LARGEST_PERTURBATION)
        radius = self.restart_radius if self.restart_radius is not None else run.radius
        self._keep_output(groups, squared, gradient)
        run.travelled += squared
        run.step += 1
        if radius is not None and run.step * run.travelled > radius * radius:
            run.restarts += 1
            self._perturb(groups)
            self._begin_epoch()
        elif run.step == self.restart_period:
            self._conclude(groups)

    def _move(self, moved: list[Tensor], rate: float, reference: float) -> Tensor:
        """Move x; returns the squared step in the metric of the rates, and the squared gradient."""
        gradients = Vector(p.grad for p in moved if p.grad is not None)
        points = self._points(moved)
        targets = Vector(torch._foreach_add(points, list(gradients), alpha=-rate))
        for p, w in zip(moved, points, strict=True):
            kept = self.state[p]
            kept["previous"] = p + kept.pop("perturbation") if "perturbation" in kept else p.detach().clone()
            kept["sum"] = w.clone() if self._run.step == 0 or "sum" not in kept else kept["sum"] + w
            kept["last_point"] = w
        step = targets - Vector(self.state[p]["previous"] for p in moved)
        Vector(moved).copy_(targets)
        # With its own rate each group is preconditioned; in the rescaled coordinates the rule is the plain one.
        weight = reference / rate if rate > 0 else 0.0
        return torch.stack([step.dot(step) * weight, gradients.dot(gradients)])

    def _keep_output(self, groups: Sequence[Group], squared: float, gradient: float) -> None:
        """Update the running averages and, as long as there is no output, the best point."""
        run = self._run
        late = run.step >= self.restart_period // 2 and squared < run.shortest
        best = not run.converged and gradient < run.smallest
        for p in (p for group in groups for p in group["params"] if "last_point" in self.state[p]):
            kept = self.state[p]
            point = kept.pop("last_point")
            if late:
                kept["candidate"] = kept["sum"] / (run.step + 1)
            if best:
                kept["average"] = point.clone()
        if late:
            run.shortest, run.selected = squared, run.step
        run.smallest = gradient if best else run.smallest

    def _conclude(self, groups: Sequence[Group]) -> None:
        """An epoch that was never restarted ends the run, or makes room for the next one."""
        run = self._run
        if run.shortest < run.output:
            run.output = run.shortest
            for p in (p for group in groups for p in group["params"] if "candidate" in self.state[p]):
                self.state[p]["average"] = self.state[p].pop("candidate")
        run.converged = True
        if self.on_converged == "continue":
            self._perturb(groups)
            self._begin_epoch()

    def _perturb(self, groups: Sequence[Group]) -> None:
        if self.perturbation > 0:
            for p, shift in self._perturbations(groups):
                p.add_(shift)

    def _perturbations(self, groups: Sequence[Group]) -> list[tuple[Tensor, Tensor]]:
        """A point of the ball for each parameter, in the metric of the groups' learning rates."""
        rates = self._run.rates or [float(group["lr"]) for group in groups]
        reference = max(rates, default=0.0) or 1.0
        parameters = [p for group in groups for p in group["params"]]
        scales = [
            math.sqrt(rate / reference) for group, rate in zip(groups, rates, strict=True) for _ in group["params"]
        ]
        shifts = uniform_ball(parameters, self.perturbation, self.generator, self._ranks())
        return list(zip(parameters, shifts * scales, strict=True))


def uniform_ball(
    like: Sequence[Tensor], radius: float, generator: torch.Generator | None = None, process_group: Any = None
) -> Vector:
    r"""A uniform random point of the ball of given radius in the space of all these tensors together.

    :math:`\xi = r\, U^{1/d}\, n / \|n\|` with n normal, U uniform on (0, 1), d the number of all entries.

    Args:
        like: tensors that give shape, dtype and device.
        radius: r.
        generator: source of the random numbers. Default: torch's default one.
        process_group: ranks that must have the same point; it is drawn by the first of them. Default: None.
    """
    device = like[0].device
    normal = Vector(torch.randn(t.shape, generator=generator, dtype=t.dtype, device=device) for t in like)
    uniform = torch.rand((), generator=generator, dtype=torch.float32, device=device)
    length = radius * uniform.double() ** (1 / max(sum(t.numel() for t in like), 1))
    point = normal * (length / normal.norm())
    if process_group is not None:
        for t in point:
            dist.broadcast(t, group_src=0, group=process_group)
    return point
