r"""Constants of the theorems of arXiv:2307.00126, as arguments of `RAHGD`, `PRAHGD`, `RAGDA` and `PRAGDA`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...optimizer.options import FROM_ONE, POSITIVE
from ...problem.parameters import is_count, is_number, require

__all__ = ["Constants"]

ABOVE_ZERO = "Invalid {name} value: {value} (it must be a number above 0)"
BOUND = "Invalid {name} value: {value} (it must be a number above 0 or None)"
PROBABILITY = "Invalid {name} value: {value} (it must be a number above 0 and below 1)"
CONVEXITY = "Invalid {name} value: {value} (it must be at most ell, because no curvature is larger than ell)"


@dataclass(frozen=True)
class Constants:
    r"""Smoothness of a problem and of its upper objective :math:`\Phi(x) = f(x, y^*(x))`.

    Attributes:
        ell: Lipschitz constant of the gradients.
        mu: strong convexity of g in y.
        M: Lipschitz constant of f; None if there is no linear system to solve.
        smoothness: :math:`\tilde L`, Lipschitz constant of the gradient of Phi.
        curvature: :math:`\tilde\rho`, Lipschitz constant of its Hessian.
    """

    ell: float
    mu: float
    M: float | None
    smoothness: float
    curvature: float

    @classmethod
    def bilevel(cls, *, ell: float, mu: float, rho: float, M: float, nu: float) -> Constants:
        """Return the constants of a bilevel problem.

        ``rho`` and ``nu`` are the Lipschitz constants of its second and third derivatives.
        """
        _positive(ell=ell, mu=mu, rho=rho, M=M, nu=nu)
        require("mu", mu, mu <= ell, CONVEXITY)
        kappa = ell / mu
        smoothness = (1 + kappa) * (ell + ell * kappa + rho * M * (1 + kappa) / mu)
        q = 1 + kappa
        curvature = (
            (rho + (2 * ell * rho + M * nu) / mu + (2 * M * ell * nu + rho * ell**2) / mu**2 + M * ell**2 * nu / mu**3)
            * q
            + (2 * ell * rho / mu + (4 * M * rho**2 + 2 * ell**2 * rho) / mu**2 + 2 * M * ell * rho**2 / mu**3) * q**2
            + (M * rho**2 / mu**2 + rho * ell / mu) * q**3
        )
        return cls(ell, mu, M, smoothness, curvature)

    @classmethod
    def minimax(cls, *, ell: float, mu: float, rho: float) -> Constants:
        """Return the constants of a minimax problem that is ``mu``-strongly concave in y."""
        _positive(ell=ell, mu=mu, rho=rho)
        require("mu", mu, mu <= ell, CONVEXITY)
        kappa = ell / mu
        return cls(ell, mu, None, (kappa + 1) * ell, 4 * math.sqrt(2) * kappa**3 * rho)

    def first_order(self, size: int, *, eps: float | None = None, restart_period: int | None = None) -> dict[str, Any]:
        """Return arguments of the method without perturbations, for an accuracy or for an epoch length.

        ``size``, the number of upper variables, has no effect.
        """
        if (eps is None) == (restart_period is None):
            raise ValueError(
                f"from_theory takes one of eps and restart_period, because one determines the other, but got "
                f"{'neither' if eps is None else 'both'}; pass one of them"
            )
        lr, L, rho = 1 / (4 * self.smoothness), self.smoothness, self.curvature
        if restart_period is None:
            assert eps is not None
            self._require_accuracy(eps)
            theta = min(4 * (rho * eps * lr**2) ** 0.25, 1.0)
            # Rounding up leaves the bound of the final gradient intact, but spoils the descent if it adds much.
            up = math.ceil(1 / theta - 1e-9)
            restart_period = up if theta * up <= 1.15 else up - 1
        else:
            require("restart_period", restart_period, is_count(restart_period) and restart_period > 0, FROM_ONE)
            theta, eps = 1 / restart_period, L**2 / (16 * restart_period**4 * rho)
        return self._arguments(theta, restart_period, math.sqrt(eps / rho), min(eps**2, eps / 2))

    def second_order(
        self,
        size: int,
        *,
        eps: float,
        failure: float = 0.1,
        gradient_bound: float | None = None,
        restart_period: int | None = None,
    ) -> dict[str, Any]:
        """Return arguments of the perturbed method for ``size`` upper variables and failure probability ``failure``."""
        self._require_accuracy(eps)
        require("failure", failure, is_number(failure) and 0 < failure < 1, PROBABILITY)
        positive = gradient_bound is None or (is_number(gradient_bound) and gradient_bound > 0)
        require("gradient_bound", gradient_bound, positive, BOUND)
        lr, rho = 1 / (4 * self.smoothness), self.curvature
        theta = min((rho * eps * lr**2) ** 0.25, 1.0)
        chi = 1.25
        for _ in range(100):
            chi = max(math.log(800 * chi * math.sqrt(size) / (failure * theta**3)), 1.25)
        period = math.ceil(2 * chi / theta - 1e-9)
        radius = math.sqrt(eps / rho) / (288 * chi**2)
        perturbation = theta * radius / (20 * period)
        if gradient_bound is not None:
            perturbation = min(perturbation, self.smoothness * radius**2 / (4 * gradient_bound))
        sigma = min(rho * radius * failure * perturbation * theta / (2 * math.sqrt(size)), eps**2, eps / 2)
        period = period if restart_period is None else restart_period
        return {**self._arguments(theta, period, radius, sigma), "perturbation": perturbation}

    def _arguments(self, theta: float, period: int, radius: float, sigma: float) -> dict[str, Any]:
        """Return the arguments that follow from the accuracy ``sigma`` of the hypergradient."""
        kappa, L = self.ell / self.mu, self.smoothness
        root = math.sqrt(kappa)
        drift = sigma / (2 * L) + 2 * kappa * radius
        steps = max(math.ceil(2 * root * math.log(2 * L * math.sqrt(kappa + 1) / sigma * drift)), 1)
        arguments = {
            "lr": 1 / (4 * L),
            "momentum": 1 - theta,
            "restart_period": period,
            "restart_radius": radius,
            "lower_lr": 1 / self.ell,
            "lower_momentum": (root - 1) / (root + 1),
            "lower_steps": steps,
            "lower_tol": self.mu * sigma / (2 * L),
            # The sufficient number from a cold start depends on the unknown y*, so the tolerance decides.
            "restart_steps": 100 * steps,
        }
        if self.M is None:
            return arguments
        size = 4 * self.ell * root / sigma * (sigma / (2 * self.ell) + 2 * self.M / self.mu)
        count = max(math.ceil((root + 1) / 2 * math.log(size)), 1)
        return {**arguments, "linear_steps": count, "linear_atol": self.mu * sigma / (2 * self.ell)}

    def _require_accuracy(self, eps: float) -> None:
        require("eps", eps, is_number(eps) and eps > 0, ABOVE_ZERO)
        limit = self.smoothness**2 / self.curvature
        if eps > limit:
            raise ValueError(f"Invalid eps value: {eps} (the theorem needs at most L^2/rho = {limit:.3g})")


def _positive(**values: float) -> None:
    for name, value in values.items():
        require(name, value, is_number(value) and 0 < value < math.inf, POSITIVE)
