r"""Constants of theorems, as arguments of methods: arXiv:2307.00126 (`RAHGD`, `RAGDA`) and arXiv:2509.02937 (`F2SA`).

They serve proofs: steps are very small, and numbers of steps and samples very large.

    >>> import torch, bilevel_optim as bo
    >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    >>> constants = Constants.bilevel(ell=1.0, mu=0.5, rho=1.0, M=1.0, nu=1.0)
    >>> optimizer = bo.RAHGD([x], [y], **constants.first_order(eps=1e-2))
    >>> round(optimizer.param_groups[0]["lr"] * 4 * 27, 12), optimizer.lower_steps, optimizer.linear_steps
    (1.0, 28, 15)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import bilevel_optim as bo

__all__ = ["Constants", "f2sa"]


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
        _check(ell, mu, rho=rho, M=M, nu=nu)
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
        _check(ell, mu, rho=rho)
        kappa = ell / mu
        return cls(ell, mu, None, (kappa + 1) * ell, 4 * math.sqrt(2) * kappa**3 * rho)

    def first_order(self, *, eps: float | None = None, restart_period: int | None = None) -> dict[str, Any]:
        r"""Return arguments of the method without perturbations, for an accuracy or for an epoch length.

        ``lr`` = :math:`1/(4 \tilde L)`, :math:`\theta = \min(4 (\tilde\rho\, \epsilon\, \text{lr}^2)^{1/4}, 1)`,
        :math:`B = \sqrt{\epsilon/\tilde\rho}`, :math:`K = 1/\theta` rounded, ``lower_lr`` = :math:`1/\ell`,
        ``lower_momentum`` = :math:`(\sqrt\kappa - 1)/(\sqrt\kappa + 1)`. The numbers of lower and CG steps are
        sufficient ones; tolerances that imply the accuracy :math:`\sigma = \min(\epsilon^2, \epsilon/2)` stop them
        earlier. An epoch may begin with up to 100 times as many lower steps.

        Args:
            eps: target of the gradient norm.
            restart_period: K. In place of ``eps``: :math:`\theta = 1/K` exactly and
                :math:`\epsilon = \tilde L^2/(16 K^4 \tilde\rho)`.
        """
        if (eps is None) == (restart_period is None):
            raise ValueError("pass one of eps and restart_period, because one determines the other")
        lr, L, rho = 1 / (4 * self.smoothness), self.smoothness, self.curvature
        if restart_period is None:
            assert eps is not None
            self._require_accuracy(eps)
            theta = min(4 * (rho * eps * lr**2) ** 0.25, 1.0)
            # Rounding up leaves the bound of the final gradient intact, but spoils the descent if it adds much.
            up = math.ceil(1 / theta - 1e-9)
            restart_period = up if theta * up <= 1.15 else up - 1
        else:
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
        r"""Return arguments of the perturbed method, whose theorem promises second-order stationary points.

        :math:`\theta = (\tilde\rho\, \epsilon\, \text{lr}^2)^{1/4}` (half of that, as printed, contradicts the proof),
        :math:`K = 2\chi/\theta`, :math:`B = \sqrt{\epsilon/\tilde\rho}/(288 \chi^2)`,
        :math:`r = \min(\theta B/(20 K), \tilde L B^2/(4 C))` and
        :math:`\chi = \log(800\, \chi \sqrt{d}/(\zeta \theta^3))`.

        Args:
            size: d, the number of upper variables.
            eps: target of the gradient norm.
            failure: allowed probability :math:`\zeta` of failure.
            gradient_bound: C, a bound on the gradient of f(x, y*(x)). Default: None, leave out its term.
            restart_period: K, in place of the theorem's.
        """
        self._require_accuracy(eps)
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
        limit = self.smoothness**2 / self.curvature
        if not 0 < eps <= limit:
            raise ValueError(f"Invalid eps value: {eps} (the theorem needs at most L^2/rho = {limit:.3g})")


def f2sa(
    *, eps: float, ell: float, mu: float, sigma: float = 0.0, gap: float = 1.0, radius: float = 1.0, order: int = 2
) -> tuple[dict[str, Any], dict[str, int]]:
    r"""Return arguments of `F2SA` for a mean norm of the hypergradient of eps, and the theorem's batch and outer steps.

    With :math:`\kappa = \ell/\mu`, nodes up to r, and the proof's constants where it has them (eq. 10),

    .. math::
        \nu &= \min\{R/\kappa,\ (\epsilon/(\ell \kappa^{2p+1}))^{1/p},\ 1/(2 r \kappa)\}, \qquad
        \text{lr} = \epsilon/(6 \ell \kappa^3),\\
        \text{lower\_lr} &= \min\{\nu^2 \epsilon^2/(\ell \kappa \sigma^2),\ 1/(\ell (1 + r \nu))\}, \qquad
        \text{lower\_steps} = \log(R \ell \kappa/(\nu \epsilon))/(\mu\, \text{lower\_lr}).

    The bounds by 1/(2 r kappa) and 1/ell are not in the text: without them copies at negative nodes may have no
    minimum, and lower steps without noise no bound. The batch is :math:`\sigma^2/(\nu\epsilon)^2`. For kappa = 10,
    eps = 0.1 and noise it takes 1e20 calls with order 1 and 1e17 with order 4.

    Args:
        eps: target of the mean gradient norm.
        ell: Lipschitz constant of f, and of the derivatives of f and g up to the order p + 1.
        mu: strong convexity of g in y.
        sigma: standard deviation of a sample's gradient.
        gap: :math:`\Delta`, how far the upper objective is above its infimum.
        radius: R, the initial distance of y from y*(x).
        order: p.

    Example:
        >>> arguments, needed = f2sa(eps=0.1, ell=2.0, mu=1.0, sigma=1.0)
        >>> round(arguments["nu"], 3), needed["steps"]
        (0.04, 57600)
    """
    _check(ell, mu, eps=eps, gap=gap, radius=radius)
    kappa = ell / mu
    reach = max(map(abs, bo.finite_difference.stencil(order).nodes))
    nu = min(radius / kappa, (eps / (ell * kappa ** (2 * order + 1))) ** (1 / order), 1 / (2 * reach * kappa))
    lr, lower_lr = eps / (6 * ell * kappa**3), 1 / (ell * (1 + reach * nu))
    if sigma:
        lower_lr = min(lower_lr, (nu * eps / sigma) ** 2 / (ell * kappa))
    steps = math.ceil(max(math.log(radius * ell * kappa / (nu * eps)), 1.0) / (mu * lower_lr))
    arguments = {"order": order, "lr": lr, "lower_lr": lower_lr, "lower_steps": steps, "nu": nu}
    needed = {
        "batch": max(math.ceil((sigma / (nu * eps)) ** 2), 1),
        "steps": math.ceil(6 * gap / (eps * lr) - 1e-9),
    }
    return {**arguments, "samples": "independent"}, needed


def _check(ell: float, mu: float, **others: float) -> None:
    """Raise unless all constants are positive, and mu is at most ell."""
    for name, value in {"ell": ell, "mu": mu, **others}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"Invalid {name} value: {value} (it must be a finite number above 0)")
    if mu > ell:
        raise ValueError(f"Invalid mu value: {mu} (it must be at most ell, because no curvature is larger than ell)")
