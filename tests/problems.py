"""Bilevel problems whose solution is known in closed form, or by a dense solve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel_optim.problem.vector import Vector
from recipes.benchmarks.contextual import P1

__all__ = ["P0", "P1", "Cleaning", "Cosh", "PenaltyQuadratic", "Problem", "Quadratic", "Scalar", "Tasks"]


@dataclass
class Problem:
    """Live tensors, losses, and what is true of them."""

    x: list[Tensor]
    y: list[Tensor]
    upper: Callable[[], Tensor]
    lower: Callable[[], Tensor]
    lr: float  # a step size that makes the lower gradient descent converge fast

    def solution(self) -> list[Tensor]:
        """The exact lower solution at the present x."""
        raise NotImplementedError

    def hypergradient(self) -> list[Tensor]:
        """The exact hypergradient at the present x."""
        raise NotImplementedError

    def solve(self) -> None:
        """Write the exact lower solution into y."""
        Vector(self.y).copy_(self.solution())

    def error(self) -> float:
        """Relative error of the gradient in ``x.grad``."""
        truth = Vector(self.hypergradient())
        return float((Vector(t.grad for t in self.x) - truth).norm() / truth.norm())


class Quadratic(Problem):
    """g = y'Ay/2 - y'(Dx + e), f = y'Py/2 + q'y + x'Qx/2 + c'x + x'Ry (section 6.3 of the RAHGD specification)."""

    def __init__(self, n=24, m=7, kappa=10.0, dtype=torch.float64, seed=0, convex=True):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        basis = torch.linalg.qr(random(n, n))[0]
        spectrum = torch.logspace(0, torch.tensor(kappa).log10().item(), n, dtype=torch.float64)
        A = basis @ torch.diag(spectrum) @ basis.T
        P, Q = random(n, n) / n**0.5, random(m, m) / m**0.5
        P, Q = P @ P.T, Q @ Q.T if convex else Q + Q.T
        constants = (A, random(n, m) / m**0.5, random(n), P, random(n), Q, random(m), random(m, n) / n**0.5)
        self.A, self.D, self.e, self.P, self.q, self.Q, self.c, self.R = (t.to(dtype) for t in constants)
        x = random(m).to(dtype).requires_grad_()
        y = torch.zeros(n, dtype=dtype, requires_grad=True)
        super().__init__([x], [y], self._upper, self._lower, lr=2 / (1 + kappa))

    def _upper(self):
        x, y = self.x[0], self.y[0]
        return y @ self.P @ y / 2 + self.q @ y + x @ self.Q @ x / 2 + self.c @ x + x @ self.R @ y

    def _lower(self):
        x, y = self.x[0], self.y[0]
        return y @ self.A @ y / 2 - y @ (self.D @ x + self.e)

    def solution(self):
        return [torch.linalg.solve(self.A, self.D @ self.x[0].detach() + self.e)]

    def adjoint(self, y):
        """v*(y) = A^-1 grad_y f."""
        return torch.linalg.solve(self.A, self.P @ y + self.q + self.R.T @ self.x[0].detach())

    def hypergradient(self):
        x, (y,) = self.x[0].detach(), self.solution()
        return [self.Q @ x + self.c + self.R @ y + self.D.T @ self.adjoint(y)]

    def hessian(self):
        """Of the (quadratic) upper objective x -> f(x, y*(x))."""
        DA = torch.linalg.solve(self.A, self.D)
        return self.Q + self.R @ DA + DA.T @ self.R.T + DA.T @ self.P @ DA

    def minimiser(self):
        """The x at which the hypergradient vanishes."""
        DA, y0 = torch.linalg.solve(self.A, self.D), torch.linalg.solve(self.A, self.e)
        return torch.linalg.solve(self.hessian(), -(self.c + self.R @ y0 + DA.T @ (self.P @ y0 + self.q)))


class Scalar(Problem):
    """The hand-computed case T1 of the PZOBO specification: A=2, B=1, x=1, c=1, lambda=0.1, alpha=1/4."""

    def __init__(self):
        x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(0.0, requires_grad=True)
        super().__init__([x], [y], lambda: (y - 1) ** 2 / 2 + 0.05 * x**2, lambda: y**2 - y * x, lr=0.25)


class PenaltyQuadratic(Problem):
    """T1 of the F2SA specification: g = y'Hy/2 - y'Bx, f = (y-c)'Q(y-c)/2, whose penalty error is known exactly."""

    def __init__(self, n=6, m=4, seed=0, r=3.0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        H, Q = random(n, n), random(n, n)
        self.H = H @ H.T / n + 0.5 * torch.eye(n)
        Q = Q @ Q.T / n + 0.1 * torch.eye(n)
        self.Q = Q * (r / torch.linalg.eigvals(torch.linalg.solve(self.H, Q)).real.max())
        self.B, self.c, self.r = random(n, m), random(n), r
        x, y = random(m).requires_grad_(), torch.zeros(n, requires_grad=True)
        super().__init__([x], [y], self._upper, self._lower, lr=1 / float(torch.linalg.eigvalsh(self.H)[-1]))

    def _upper(self):
        d = self.y[0] - self.c
        return d @ self.Q @ d / 2

    def _lower(self):
        x, y = self.x[0], self.y[0]
        return y @ self.H @ y / 2 - y @ self.B @ x

    def perturbed_solution(self, s):
        """argmin g + s f."""
        return torch.linalg.solve(self.H + s * self.Q, self.B @ self.x[0].detach() + s * self.Q @ self.c)

    def solution(self):
        return [self.perturbed_solution(0.0)]

    def hypergradient(self):
        M = torch.linalg.solve(self.H, self.Q)
        return [self.B.T @ M @ (self.solution()[0] - self.c)]

    def predicted(self, nodes, nu):
        """B'M (I - E) (y0 - c) with E the product of j nu M (I + j nu M)^-1 over the nodes j != 0."""
        identity = torch.eye(len(self.c))
        M = torch.linalg.solve(self.H, self.Q)
        E = identity
        for j in nodes:
            if j:
                E = E @ (j * nu * M) @ torch.linalg.inv(identity + j * nu * M)
        return self.B.T @ M @ (identity - E) @ (self.solution()[0] - self.c)


class Cosh(Problem):
    """T3 of the F2SA specification: g = sum cosh(y) - xy, f = b'y, with y*_s = asinh(x - s b)."""

    def __init__(self, x=0.5, b=1.0, dtype=torch.float64):
        x = torch.as_tensor(x, dtype=dtype).reshape(-1).clone().requires_grad_()
        self.b = torch.as_tensor(b, dtype=dtype).reshape(-1).expand(len(x))
        y = torch.zeros_like(x, requires_grad=True)
        super().__init__([x], [y], self._upper, self._lower, lr=0.5)

    def _upper(self):
        return (self.b * self.y[0]).sum()

    def _lower(self):
        return (self.y[0].cosh() - self.x[0] * self.y[0]).sum()

    def perturbed_solution(self, s):
        return (self.x[0].detach() - s * self.b).asinh()

    def solution(self):
        return [self.perturbed_solution(0.0)]

    def hypergradient(self):
        return [self.b / (1 + self.x[0].detach() ** 2).sqrt()]


class Cleaning:
    """Small data cleaning with a softmax classifier: one weight per training example, no closed form."""

    def __init__(self, n=30, d=5, classes=3, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        self.X = torch.randn(n, d, generator=generator, dtype=dtype)
        self.Xv = torch.randn(n, d, generator=generator, dtype=dtype)
        teacher = torch.randn(d, classes, generator=generator, dtype=dtype)
        self.t, self.tv = (self.X @ teacher).argmax(1), (self.Xv @ teacher).argmax(1)
        self.t[: n // 3] = torch.randint(0, classes, (n // 3,), generator=generator)
        self.weights = torch.zeros(n, dtype=dtype, requires_grad=True)
        self.model = torch.nn.Linear(d, classes, dtype=dtype)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(0.1 * torch.randn(p.shape, generator=generator, dtype=dtype))

    def penalty(self):
        return 0.05 * sum(p.square().sum() for p in self.model.parameters())

    def lower(self, index=None):
        index = torch.arange(len(self.t)) if index is None else index
        losses = F.cross_entropy(self.model(self.X[index]), self.t[index], reduction="none")
        return (self.weights[index].sigmoid() * losses).mean() + self.penalty()

    def upper(self, index=None):
        index = torch.arange(len(self.tv)) if index is None else index
        return F.cross_entropy(self.model(self.Xv[index]), self.tv[index])


class Tasks:
    """m quadratic lower problems that share x, with rows of noisy data: g_i = y'A_i y/2 - y'(D_i x + e_i) over means.

    Everything about one task is known in closed form; f_i = |y - t_i|^2/2 + |x|^2/2.
    """

    def __init__(self, m=6, rows=3, n=5, p=4, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        R = random(m, rows, n, n)
        self.A, self.D, self.e = 0.2 * R @ R.mT / n + torch.eye(n), random(m, rows, n, p), random(m, rows, n)
        self.t = random(m, rows + 1, n)
        self.x, self.y = random(p).requires_grad_(), torch.zeros(n, dtype=torch.float64, requires_grad=True)
        self.lr = 1 / float(torch.linalg.eigvalsh(self.A)[..., -1].max())

    def data(self):
        return {"A": self.A, "rest": (self.D, self.e)}, self.t

    def lower(self, batch):
        D, e = batch["rest"]
        y = self.y
        return y @ batch["A"].mean(0) @ y / 2 - y @ (D.mean(0) @ self.x + e.mean(0))

    def upper(self, batch):
        return (self.y - batch).square().sum(-1).mean() / 2 + self.x.square().sum() / 2

    def solutions(self):
        return torch.linalg.solve(self.A.mean(1), self.D.mean(1) @ self.x.detach() + self.e.mean(1))

    def hypergradients(self):
        """One row per task."""
        v = torch.linalg.solve(self.A.mean(1), self.solutions() - self.t.mean(1))
        return (self.D.mean(1).mT @ v.unsqueeze(-1)).squeeze(-1) + self.x.detach()

    def error(self, ids=slice(None)):
        truth = self.hypergradients()[ids].mean(0)
        return float((self.x.grad - truth).norm() / truth.norm())


class P0:
    """Scalar contextual problem in which every moment is exact (section 6.1 of the RT-MLMC specification)."""

    mu, a, d, rho, s, sigma, x0 = 1.0, 2.0, 0.5, 0.1, 0.7, 0.5, 0.4

    def __init__(self):
        self.x, self.y = (torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (self.x0, 0.0))

    def sample(self, n, generator):
        return self.s * torch.randn(n, generator=generator, dtype=torch.float64)

    def lower(self, tasks, n, generator):
        return tasks.unsqueeze(1).expand(-1, n), torch.randn(len(tasks), n, generator=generator, dtype=torch.float64)

    def upper(self, tasks, n, generator):
        return torch.zeros(len(tasks), n, dtype=torch.float64)

    def g(self, batch):
        xi, eta = batch
        return (self.mu / 2 * (self.y - self.a * self.x - xi) ** 2 + self.sigma * eta * self.y).mean()

    def f(self, batch):
        return ((self.y - self.d) ** 2 / 2 + self.rho / 2 * self.x**2).sum() + 0 * batch.mean()

    def exact(self, levels, beta=1.0):
        """E u_l and Var u_l for l = 0..K, and V_k for k = 1..K; the last is checked by the numbers printed there."""
        M, W, V = [1.0], [0.0], []
        for k in range(1, levels + 1):
            b, n = beta * 2.0**-k, 2**k
            r = 1 - self.mu * b
            left = n - 1 - torch.arange(n, dtype=torch.float64)
            A = float((r ** torch.arange(n, dtype=torch.float64)).mean())
            w = b * b * float((((1 - r**left) / (1 - r) / n) ** 2).sum())
            signal = (self.a * self.x0) ** 2 + self.s**2
            V.append(self.a**2 * ((1 - A) ** 2 * (M[-1] ** 2 * signal + W[-1]) + self.sigma**2 * w))
            W.append(A * A * W[-1] + self.sigma**2 * w)
            M.append(M[-1] * A)
        M, W, V = (torch.tensor(v, dtype=torch.float64) for v in (M, W, V))
        mean = self.rho * self.x0 + self.a * ((1 - M) * self.a * self.x0 - self.d)
        return mean, self.a**2 * ((1 - M) ** 2 * self.s**2 + W), V
