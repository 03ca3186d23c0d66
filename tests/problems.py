"""Bilevel problems whose solution is known in closed form or by a dense solve, and a classifier for what has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bilevel_optim as bo
from bilevel_optim.oracle.substitution import Substitution


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def values(*groups: Iterable[Tensor]) -> list[Tensor]:
    """Copies of all tensors of some groups."""
    return [t.detach().clone() for group in groups for t in group]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def assign(tensors, new):
    with torch.no_grad():
        for t, value in zip(tensors, new, strict=True):
            t.copy_(value)


@contextmanager
def substituted(live, values):
    """Evaluate with other tensors in place of the live ones in every torch call, as a compiled step does."""
    variables = [
        bo.Vector(v.detach().requires_grad_(t.requires_grad) for v, t in zip(own or ts, ts, strict=True))
        for ts, own in zip(live, values, strict=True)
    ]
    with Substitution((t for ts in live for t in ts), (v for vs in variables for v in vs), stacked=False):
        yield variables


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def close(a, b, atol, rtol=0.0):
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def z_scores(sample, mean):
    """Return the sample's deviation from a mean, in units of its standard error."""
    return (sample.mean(0) - mean) / (sample.std(0) / len(sample) ** 0.5)


class Problem:
    """Live tensors, losses, and their exact solution."""

    x: list[Tensor]
    y: list[Tensor]
    lr: float  # a step size that makes the lower gradient descent converge fast
    upper: Callable[..., Tensor]
    lower: Callable[..., Tensor]
    tasks: Any = None

    @property
    def losses(self):
        """Arguments of ``step`` and ``backward``."""
        return self.upper, self.lower

    def apply(self, verb):
        """Call ``optimizer.step`` or ``optimizer.backward`` on this problem."""
        return verb(*self.losses) if self.tasks is None else verb(*self.losses, tasks=self.tasks)

    def run(self, optimizer, steps=1):
        """Steps; returns the last loss."""
        for _ in range(steps):
            loss = self.apply(optimizer.step)
        return loss

    def solution(self) -> list[Tensor]:
        """The exact lower solution at the present x."""
        raise NotImplementedError

    def hypergradient(self) -> list[Tensor]:
        """The exact hypergradient at the present x."""
        raise NotImplementedError

    def solve(self) -> None:
        """Write the exact lower solution into y."""
        assign(self.y, self.solution())

    def error(self) -> float:
        """Relative error of the gradient in ``x.grad``."""
        truth = flat(self.hypergradient())
        return float((flat(t.grad for t in self.x) - truth).norm() / truth.norm())


class Both(nn.Module):
    """The parameters of both levels, by names; the problem goes on with these."""

    def __init__(self, problem):
        super().__init__()
        self.upper, self.lower = nn.ParameterList(problem.x), nn.ParameterList(problem.y)
        problem.x[:], problem.y[:] = self.upper, self.lower


class Given(Problem):
    """A problem made of its parts."""

    def __init__(self, x, y, upper, lower, lr=0.1):
        self.x, self.y, self.upper, self.lower, self.lr = x, y, upper, lower, lr


class Quadratic(Problem):
    """g = y'Ay/2 - y'(Dx + e), f = y'Py/2 + q'y + x'Qx/2 + c'x + x'Ry (section 6.3 of the RAHGD specification)."""

    def __init__(self, n=24, m=7, kappa=10.0, dtype=torch.float64, seed=0):
        random = partial(torch.randn, generator=seeded(seed), dtype=torch.float64)
        basis = torch.linalg.qr(random(n, n))[0]
        A = basis @ torch.diag(torch.logspace(0, math.log10(kappa), n, dtype=torch.float64)) @ basis.T
        P, Q = random(n, n) / n**0.5, random(m, m) / m**0.5
        constants = (A, random(n, m) / m**0.5, random(n), P @ P.T, random(n), Q @ Q.T, random(m), random(m, n) / n**0.5)
        self.A, self.D, self.e, self.P, self.q, self.Q, self.c, self.R = (t.to(dtype) for t in constants)
        self.x, self.y = [random(m).to(dtype).requires_grad_()], [torch.zeros(n, dtype=dtype, requires_grad=True)]
        self.lr = 2 / (1 + kappa)

    def upper(self):
        x, y = self.x[0], self.y[0]
        return y @ self.P @ y / 2 + self.q @ y + x @ self.Q @ x / 2 + self.c @ x + x @ self.R @ y

    def lower(self):
        x, y = self.x[0], self.y[0]
        return y @ self.A @ y / 2 - y @ (self.D @ x + self.e)

    def solution(self):
        return [torch.linalg.solve(self.A, self.D @ self.x[0].detach() + self.e)]

    def adjoint(self, y):
        """v*(y) = A^-1 grad_y f."""
        return torch.linalg.solve(self.A, self.P @ y + self.q + self.R.T @ self.x[0].detach())

    def direct(self, y):
        return self.Q @ self.x[0].detach() + self.c + self.R @ y

    def hypergradient(self):
        (y,) = self.solution()
        return [self.direct(y) + self.D.T @ self.adjoint(y)]

    def hessian(self):
        """Hessian of the (quadratic) upper objective x -> f(x, y*(x))."""
        DA = torch.linalg.solve(self.A, self.D)
        return self.Q + self.R @ DA + DA.T @ self.R.T + DA.T @ self.P @ DA

    def minimiser(self):
        """The x at which the hypergradient vanishes."""
        DA, y0 = torch.linalg.solve(self.A, self.D), torch.linalg.solve(self.A, self.e)
        return torch.linalg.solve(self.hessian(), -(self.c + self.R @ y0 + DA.T @ (self.P @ y0 + self.q)))


class Saddle(Quadratic):
    """f = x'Qx/2 + c'x + x'D'y + e'y - y'Ay/2, which y ascends: the quadratic problem with g = -f in y."""

    def __init__(self, n=5, m=3, kappa=4.0, dtype=torch.float64, seed=0):
        super().__init__(n, m, kappa, dtype, seed)
        self.P, self.q, self.R = -self.A, self.e, self.D.T

    losses = property(lambda self: (self.upper,))


class Scalar(Problem):
    """The hand-computed case T1 of the PZOBO specification: A=2, B=1, x=1, c=1, lambda=0.1, alpha=1/4."""

    def __init__(self):
        self.x, self.y = [torch.tensor(1.0, requires_grad=True)], [torch.tensor(0.0, requires_grad=True)]
        self.lr = 0.25

    def upper(self):
        return (self.y[0] - 1) ** 2 / 2 + 0.05 * self.x[0] ** 2

    def lower(self):
        return self.y[0] ** 2 - self.y[0] * self.x[0]


class PenaltyQuadratic(Problem):
    """T1 of the F2SA specification: g = y'Hy/2 - y'Bx, f = (y-c)'Q(y-c)/2, whose penalty error is known exactly."""

    def __init__(self, n=6, m=4, seed=0, r=3.0):
        random = partial(torch.randn, generator=seeded(seed))
        H, Q = random(n, n), random(n, n)
        self.H = H @ H.T / n + 0.5 * torch.eye(n)
        Q = Q @ Q.T / n + 0.1 * torch.eye(n)
        self.Q = Q * (r / torch.linalg.eigvals(torch.linalg.solve(self.H, Q)).real.max())
        self.B, self.c, self.r = random(n, m), random(n), r
        self.x, self.y = [random(m).requires_grad_()], [torch.zeros(n, requires_grad=True)]
        self.lr = 1 / float(torch.linalg.eigvalsh(self.H)[-1])

    def upper(self):
        d = self.y[0] - self.c
        return d @ self.Q @ d / 2

    def lower(self):
        y = self.y[0]
        return y @ self.H @ y / 2 - y @ self.B @ self.x[0]

    def perturbed_solution(self, s):
        """argmin g + s f."""
        return torch.linalg.solve(self.H + s * self.Q, self.B @ self.x[0].detach() + s * self.Q @ self.c)

    def solution(self):
        return [self.perturbed_solution(0.0)]

    def hypergradient(self):
        return [self.B.T @ torch.linalg.solve(self.H, self.Q) @ (self.solution()[0] - self.c)]

    def predicted(self, nodes, nu):
        """B'M (I - E) (y0 - c) with E the product of j nu M (I + j nu M)^-1 over the nodes j != 0."""
        E = identity = torch.eye(len(self.c))
        M = torch.linalg.solve(self.H, self.Q)
        for j in filter(None, nodes):
            E = E @ (j * nu * M) @ torch.linalg.inv(identity + j * nu * M)
        return self.B.T @ M @ (identity - E) @ (self.solution()[0] - self.c)


class Cosh(Problem):
    """T3 of the F2SA specification: g = sum cosh(y) - xy, f = b'y, with y*_s = asinh(x - s b)."""

    def __init__(self, x=0.5, b=1.0, dtype=torch.float64):
        x = torch.as_tensor(x, dtype=dtype).reshape(-1).clone().requires_grad_()
        self.b = torch.as_tensor(b, dtype=dtype).reshape(-1).expand(len(x))
        self.x, self.y, self.lr = [x], [torch.zeros_like(x, requires_grad=True)], 0.5

    def upper(self):
        return (self.b * self.y[0]).sum()

    def lower(self):
        return (self.y[0].cosh() - self.x[0] * self.y[0]).sum()

    def perturbed_solution(self, s):
        return (self.x[0].detach() - s * self.b).asinh()

    def solution(self):
        return [self.perturbed_solution(0.0)]

    def hypergradient(self):
        return [self.b / (1 + self.x[0].detach() ** 2).sqrt()]


class Tasks(Problem):
    """m quadratic lower problems that share x, with rows of noisy data: g_i = y'A_i y/2 - y'(D_i x + e_i) over means.

    Everything about one task is known in closed form; f_i = |y - t_i|^2/2 + |x|^2/2. With ``rows`` each task has a row
    of y, otherwise they share a start.
    """

    def __init__(self, m=6, n=5, p=4, seed=0, rows=False, dtype=torch.float64, tasks=slice(None)):
        random = partial(torch.randn, generator=seeded(seed), dtype=torch.float64)
        root = random(m, 3, n, n)
        A, D, e = 0.2 * root @ root.mT / n + torch.eye(n, dtype=torch.float64), random(m, 3, n, p), random(m, 3, n)
        self.lr = 1 / float(torch.linalg.eigvalsh(A)[..., -1].max())
        self.A, self.D, self.e, self.t = (t[tasks].to(dtype) for t in (A, D, e, random(m, 4, n)))
        self.x = [random(p).to(dtype).requires_grad_()]
        self.y = [torch.zeros(*([len(self.A)] if rows else []), n, dtype=dtype, requires_grad=True)]
        self.tasks = bo.TensorTasks({"A": self.A, "rest": (self.D, self.e)}, self.t)

    def lower(self, batch):
        (D, e), y = batch["rest"], self.y[0]
        return y @ batch["A"].mean(0) @ y / 2 - y @ (D.mean(0) @ self.x[0] + e.mean(0))

    def upper(self, batch):
        return (self.y[0] - batch).square().sum(-1).mean() / 2 + self.x[0].square().sum() / 2

    def solutions(self):
        return torch.linalg.solve(self.A.mean(1), self.D.mean(1) @ self.x[0].detach() + self.e.mean(1))

    def solution(self):
        """Limit of y: the mean of the solutions, or all of them."""
        return [self.solutions() if self.y[0].dim() == 2 else self.solutions().mean(0)]

    def hypergradients(self):
        """One row per task."""
        v = torch.linalg.solve(self.A.mean(1), self.solutions() - self.t.mean(1))
        return (self.D.mean(1).mT @ v.unsqueeze(-1)).squeeze(-1) + self.x[0].detach()

    def hypergradient(self):
        return [self.hypergradients().mean(0)]


class P1(Problem):
    """Quadratic contexts with noise in every oracle (section 6.2 of the RT-MLMC specification); its own sampler.

    g = (1 + 0.1 s)/2 r'Hr + n'y/2 with r = y - Ax - B xi, f = |y - C xi - d|^2/2 + 0.3 n_f'y + rho/2 |x|^2.
    """

    A = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.8]], dtype=torch.float64)
    B = torch.tensor([[0.5, 0.0], [0.3, 0.7]], dtype=torch.float64)
    C = torch.tensor([[0.2, 0.1], [-0.4, 0.3]], dtype=torch.float64)
    d, rho, mu, L = torch.tensor([1.0, -0.5], dtype=torch.float64), 0.1, 0.9, 4.4

    def __init__(self, x=(0.7, -0.2, 0.4)):
        self.x = [torch.tensor(x, dtype=torch.float64, requires_grad=True)]
        self.y = [torch.zeros(2, dtype=torch.float64, requires_grad=True)]
        c, s = math.cos(0.6), math.sin(0.6)
        R = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
        self.H = R @ torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)) @ R.T
        self.tasks = _Contexts(self)

    def sample(self, n, generator):
        return torch.randn(n, 2, generator=generator, dtype=torch.float64)

    def lower_batch(self, tasks, n, generator):
        sign = torch.randint(2, (len(tasks), n), generator=generator) * 2.0 - 1
        noise = torch.randn(len(tasks), n, 2, generator=generator, dtype=torch.float64)
        return tasks.unsqueeze(1).expand(-1, n, -1), sign.double(), noise

    def upper_batch(self, tasks, n, generator):
        noise = torch.randn(len(tasks), n, 2, generator=generator, dtype=torch.float64)
        return tasks.unsqueeze(1).expand(-1, n, -1), noise

    def lower(self, batch):
        xi, sign, noise = batch
        r = self.y[0] - self.A @ self.x[0] - xi @ self.B.T
        return (((1 + 0.1 * sign) / 2) * (r @ self.H * r).sum(-1) + 0.5 * noise @ self.y[0]).mean()

    def upper(self, batch):
        xi, noise = batch
        distance = self.y[0] - xi @ self.C.T - self.d
        return (distance.square().sum(-1) / 2 + 0.3 * noise @ self.y[0]).mean() + self.rho / 2 * self.x[
            0
        ].square().sum()

    def hypergradient(self):
        x = self.x[0].detach()
        return [self.rho * x + self.A.T @ (self.A @ x - self.d)]

    def mean(self, level, steps=12, beta=1.0, cap=1 / 4.4, c=1 / 4.4):
        """Mean of the estimate after ``level`` epochs, with ``steps`` terms of the series (None: exact inverse)."""
        one = R = torch.eye(2, dtype=torch.float64)
        for e in range(1, level + 1):
            step, n = min(beta * 2.0**-e, cap) * self.H, 2**e
            R = torch.linalg.solve(step, one - torch.linalg.matrix_power(one - step, n)) / n @ R  # the mean of powers
        neumann = one if steps is None else one - torch.linalg.matrix_power(one - c * self.H, steps)
        x = self.x[0].detach()
        return self.rho * x + self.A.T @ neumann @ ((one - R) @ self.A @ x - self.d)


class P0(Problem):
    """Scalar contextual problem in which every moment is exact (section 6.1 of the RT-MLMC specification)."""

    mu, a, d, rho, s, sigma, x0, L = 1.0, 2.0, 0.5, 0.1, 0.7, 0.5, 0.4, 1.0

    def __init__(self):
        self.x, self.y = ([torch.tensor([v], dtype=torch.float64, requires_grad=True)] for v in (self.x0, 0.0))
        self.tasks = _Contexts(self)

    def sample(self, n, generator):
        return self.s * torch.randn(n, generator=generator, dtype=torch.float64)

    def lower_batch(self, tasks, n, generator):
        return tasks.unsqueeze(1).expand(-1, n), torch.randn(len(tasks), n, generator=generator, dtype=torch.float64)

    def upper_batch(self, tasks, n, generator):
        return torch.zeros(len(tasks), n, dtype=torch.float64)

    def lower(self, batch):
        (xi, eta), y = batch, self.y[0]
        return (self.mu / 2 * (y - self.a * self.x[0] - xi) ** 2 + self.sigma * eta * y).mean()

    def upper(self, batch):
        return ((self.y[0] - self.d) ** 2 / 2 + self.rho / 2 * self.x[0] ** 2).sum() + 0 * batch.mean()

    def exact(self, levels):
        """E u_l and Var u_l for l = 0..K, and V_k for k = 1..K; the last is checked by the numbers printed there."""
        M, W, V = [1.0], [0.0], []
        for k in range(1, levels + 1):
            b, n = 2.0**-k, 2**k
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


class _Contexts:
    """The sampler of a problem with infinitely many contexts: as any sampler may, it has no length."""

    def __init__(self, problem):
        self.sample, self.lower, self.upper = problem.sample, problem.lower_batch, problem.upper_batch


class Cleaning(Problem):
    """Data cleaning with a small network: x are weights of the training examples and a body, y is a head.

    Every method takes it in one of its forms, as the losses may be split in features and head, and the data in batches
    or in tasks. With one loss, y are the weights, which ascend, and x is the network.

    Args:
        losses: 1 or 2.
        initial: the last of x are where y starts.
        form: ``"whole"`` data, ``"batches"`` of a loader, ``"terms"`` of a finite sum, or ``"tasks"`` of 10 rows each.
        rows: each task has a row of y.
        features: the body is given as ``features=``.
        tied: embeddings and scores share their weights, instead of the network.
        dropout: probability for the body's output.
        part: which part of the data of each kind, of how many.
    """

    lr = 0.5

    def __init__(
        self, losses=2, *, initial=False, form="whole", rows=False, features=False, tied=False, dropout=0.0, n=30,
        dtype=torch.float64, part=None, weighted=True,
    ):  # fmt: skip
        generator = seeded(0)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        (X, Xv), teacher = (random(n, 5), random(n, 5)), random(5, 3)
        t, tv = (X @ teacher).argmax(1), (Xv @ teacher).argmax(1)
        t[: n // 3] = torch.randint(0, 3, (n // 3,), generator=generator)
        index = torch.arange(n)
        self.X, self.Xv, self.t, self.tv = X.to(dtype), Xv.to(dtype), t, tv
        self.index, self.form = index if part is None else index.chunk(part[1])[part[0]], form
        self.dropout, self.weighted = dropout, weighted
        self.fails: list[Any] = []  # (level, evaluations until then, "raise", "nan", or "x" or "y": their slopes)
        self.evaluations = dict.fromkeys(("upper", "lower", "features"), 0)
        self.weights = torch.zeros(n, dtype=dtype, requires_grad=True)
        self.body = nn.Sequential(nn.Embedding(5, 4) if tied else nn.Linear(5, 4)).to(dtype)
        self.head = nn.Linear(4, 3, bias=not tied).to(dtype)
        self.tied = tied
        if tied:
            self.head.weight = nn.Parameter(torch.empty(5, 4, dtype=dtype))
            self.words = torch.arange(n) % 5
            self.t, self.tv = (words % 5 for words in (torch.arange(n) + t, torch.arange(n) + tv))
        for parameter in (*self.body.parameters(), *self.head.parameters()):
            parameter.data = 0.3 * random(*parameter.shape).to(dtype)
        network = [*self.body.parameters(), *self.head.parameters()]
        if losses == 1:
            self.x, self.y = network, [self.weights]
        else:
            if rows:
                for name, parameter in list(self.head.named_parameters()):
                    setattr(self.head, name, nn.Parameter(torch.stack([parameter.detach()] * 3)))
            self.y = list(self.head.parameters())
            start = [p.detach().clone().requires_grad_() for p in self.y] if initial else []
            self.x = [self.weights, *self.body.parameters(), *start]
        self.single = losses == 1
        if form == "tasks":
            rows_of = self.index.view(3, -1)
            self.tasks = bo.TensorTasks(rows_of, rows_of)
        self.objectives = [self._objective(level, features) for level in ("upper", "lower")[: 1 if self.single else 2]]

    losses = property(lambda self: tuple(self.objectives))
    parameters = property(lambda self: [*self.x, *self.y])

    def _objective(self, level, split):
        features, head = partial(self._features, level), partial(self._head, level)
        split = split and (level == "lower" or self.single)

        def whole(*batch):
            return head(features(*batch))

        if self.form == "batches":
            loader = DataLoader(self.index, batch_size=8, shuffle=True, generator=seeded(3))
            return bo.Objective(head if split else whole, loader, features=features if split else None)
        if self.form == "terms":
            return bo.FiniteSum(head if split else whole, self.index, 8, generator=seeded(3 + (level == "lower")),
                                **({"features": features} if split else {}))  # fmt: skip
        return bo.Objective(head, features=features) if split else whole

    def _features(self, level, index=None):
        self.evaluations["features"] += 1
        index = self.index if index is None else index
        if self.tied:
            return self.head(self.head.weight[self.words[index]]), index
        inputs = (self.Xv if level == "upper" and not self.single else self.X)[index]
        return F.dropout(self.body(inputs).tanh(), self.dropout), index

    def _head(self, level, part):
        hidden, index = part
        validation = level == "upper" and not self.single
        scores = hidden if self.tied else self.head(hidden)
        losses = F.cross_entropy(scores, (self.tv if validation else self.t)[index], reduction="none")
        if self.single:
            loss = ((1 + self.weights[index]) * losses).mean() - self.weights.square().mean() + self.penalty()
        elif validation:
            loss = losses.mean()
        else:
            loss = ((self.weights[index].sigmoid() if self.weighted else 1) * losses).mean() + self.penalty()
        return self._failing(level, loss)

    def penalty(self):
        parameters = self.body.parameters() if self.single and not self.tied else ()
        return (0.5 if self.tied else 0.05) * sum(p.square().sum() for p in (*self.head.parameters(), *parameters))

    def _failing(self, level, loss):
        self.evaluations[level] += 1
        for fail in self.fails:
            if fail[0] == level:
                fail[1] -= 1
                if fail[1] == 0:
                    if fail[2] == "raise":
                        raise KeyError("no such sample")
                    if fail[2] in ("x", "y"):  # the value is right
                        return loss + sum((t * 0).abs().sqrt().sum() for t in getattr(self, fail[2]))
                    return loss * float("nan")
        return loss

    def upper(self, index=None):
        return self._head("upper", self._features("upper", index))

    def lower(self, index=None):
        return self._head("lower", self._features("lower", index))
