r"""Lower problems whose Hessians are hard for linear solvers, each at a given point (x, y).

The right hypergradient is :math:`\nabla_x f - \nabla^2_{xy} g\, H^+ \nabla_y f`, of the problem as the working type
rounds it, from a dense Hessian in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.seeds import stream

__all__ = ["SYSTEMS", "Direction", "System", "logistic", "ridge"]

DOUBLE = torch.float64
Loss = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]


class Direction(NamedTuple):
    """The right hypergradient, and whether H v = f_y has a solution at all."""

    hypergradient: Tensor
    solvable: bool
    matrix: Tensor
    right_side: Tensor


class System(NamedTuple):
    """Losses of x, y and data, at a point; eigenvalues below ``rtol`` of the largest one count as zero."""

    f: Loss
    g: Loss
    x: Tensor
    y: Tensor
    data: Mapping[str, Tensor]
    rtol: float = 1e-11

    def to(self, dtype: torch.dtype) -> System:
        """Return the problem as ``dtype`` rounds it."""
        data = {k: t.to(dtype) if t.is_floating_point() else t for k, t in self.data.items()}
        return self._replace(x=self.x.to(dtype), y=self.y.to(dtype), data=data)

    def direction(self) -> Direction:
        """Return the right hypergradient of this problem."""
        exact = self.to(DOUBLE)
        x, y = (t.clone().requires_grad_() for t in (exact.x, exact.y))
        matrix = hessian(lambda q: exact.g(exact.x, q, exact.data), exact.y)
        f_x, f_y = torch.autograd.grad(exact.f(x, y, exact.data), [x, y], materialize_grads=True)
        values, basis = torch.linalg.eigh(matrix)
        kept = values.abs() > self.rtol * values.abs().max()
        v = basis @ torch.where(kept, basis.T @ f_y / torch.where(kept, values, 1.0), 0.0)
        (slope,) = torch.autograd.grad(exact.g(x, y, exact.data), y, create_graph=True)
        (cross,) = torch.autograd.grad(slope @ v, x)
        solvable = bool((f_y - matrix @ v).norm() < 1e-6 * f_y.norm())
        return Direction(f_x - cross, solvable, matrix, f_y)


def hessian(g: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Return the second derivatives as a matrix."""
    matrix: Tensor = torch.autograd.functional.hessian(g, y)  # type: ignore[no-untyped-call]
    return matrix


def normal(*shape: int, name: str) -> Tensor:
    """Return random numbers, the same for the same name."""
    return torch.randn(*shape, generator=stream(0, name), dtype=DOUBLE)


def ridge(
    rows: int, size: int, penalty: float, *, x: str = "targets", f: str = "validation", spread: float = 0
) -> System:
    """Ridge regression; x: shifts of the targets, log weights of the examples, or log penalties of the unknowns."""
    scale = 3 / size**0.5 * torch.logspace(-0.5 if spread else 0, -0.5 - spread if spread else 0, size, dtype=DOUBLE)
    A, V, w = normal(rows, size, name="A") * scale, normal(60, size, name="V") * scale, normal(size, name="w")
    t, s = A @ w + 0.5 * normal(rows, name="t"), V @ w + 0.5 * normal(60, name="s")
    matrix = A.T @ A / rows + penalty * torch.eye(size, dtype=DOUBLE)
    y = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-12) @ (A.T @ t / rows)
    uppers: dict[str, Loss] = {
        "validation": lambda x, y, d: 0.5 * (d["V"] @ y - d["s"]).square().mean(),
        "fit": lambda x, y, d: 0.5 * (d["A"] @ y - d["s"][: len(d["t"])]).square().mean(),
        "distance": lambda x, y, d: 0.5 * (y - d["c"]).square().sum(),
    }
    decay: Loss = lambda x, y, d: 0.5 * penalty * y.square().sum()  # noqa: E731
    lowers: dict[str, tuple[Tensor, Loss]] = {
        "targets": (
            torch.zeros(rows, dtype=DOUBLE),
            lambda x, y, d: 0.5 * (d["A"] @ y - d["t"] - x).square().mean() + decay(x, y, d),
        ),
        "weights": (
            torch.zeros(rows, dtype=DOUBLE),
            lambda x, y, d: 0.5 * (x.exp() * (d["A"] @ y - d["t"]).square()).mean() + decay(x, y, d),
        ),
        "penalties": (
            torch.full((size,), penalty, dtype=DOUBLE).log(),
            lambda x, y, d: 0.5 * (d["A"] @ y - d["t"]).square().mean() + 0.5 * (x.exp() * y.square()).sum(),
        ),
    }
    start, lower = lowers[x]
    return System(uppers[f], lower, start, y, {"A": A, "V": V, "t": t, "s": s, "c": normal(size, name="c")})


def newton(g: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Return a minimiser, by steps without the directions of zero curvature."""
    for _ in range(50):
        y = y - torch.linalg.pinv(hessian(g, y), hermitian=True, rtol=1e-10) @ torch.func.grad(g)(y)
    return y


def softmax(penalty: float) -> System:
    """Softmax regression with weights for the examples; a vector added to all classes changes no probability."""
    rows, size, classes = 120, 8, 3
    A, V, W = normal(rows, size, name="A"), normal(rows, size, name="V"), normal(size, classes, name="W")
    t, s = ((data @ W + 2 * normal(rows, classes, name=name)).argmax(1) for data, name in ((A, "t"), (V, "s")))
    data = {"A": A, "V": V, "t": t, "s": s}

    def upper(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(d["V"] @ y.view(size, classes), d["s"])

    def lower(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        each = F.cross_entropy(d["A"] @ y.view(size, classes), d["t"], reduction="none")
        return (x.exp() * each).mean() + 0.5 * penalty * y.square().sum()

    x = torch.zeros(rows, dtype=DOUBLE)
    y = newton(lambda q: lower(x, q, data), torch.zeros(size * classes, dtype=DOUBLE))
    return System(upper, lower, x, y, data)


def logistic(name: str, penalty: float) -> System:
    """Logistic regression on standardised data of scikit-learn, with 300 weighted examples: tumours, or odd digits."""
    from sklearn.datasets import load_breast_cancer, load_digits

    bunch = load_breast_cancer() if name == "breast cancer" else load_digits()
    inputs, signs = torch.tensor(bunch.data, dtype=DOUBLE), 2.0 * torch.tensor(bunch.target % 2, dtype=DOUBLE) - 1
    inputs = ((inputs - inputs.mean(0)) / inputs.std(0))[:, inputs.std(0) > 0.1]
    order = torch.randperm(len(inputs), generator=stream(0, "data"))
    train, rest = order[:300], order[300:600]

    def upper(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return F.softplus(-d["s"] * (d["V"] @ y)).mean()

    def lower(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return (x.exp() * F.softplus(-d["t"] * (d["A"] @ y))).mean() + 0.5 * penalty * y.square().sum()

    data = {"A": inputs[train], "t": signs[train], "V": inputs[rest], "s": signs[rest]}
    x = torch.zeros(300, dtype=DOUBLE)
    y = newton(lambda q: lower(x, q, data), torch.zeros(inputs.shape[1], dtype=DOUBLE))
    return System(upper, lower, x, y, data)


def ranking() -> System:
    """Pairwise logistic loss with a bias, which cancels."""
    rows, size = 60, 6
    A, V = normal(rows, size, name="A"), normal(rows, size, name="V")
    A[:30] += 0.4
    V[:30] += 0.4

    def pairs(scores: Tensor) -> Tensor:
        return F.softplus(scores[None, 30:] - scores[:30, None]).mean()

    def upper(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return pairs(d["V"] @ y[:size] + y[size])

    def lower(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return pairs(d["A"] @ y[:size] + y[size]) + 0.5 * (x.exp() * y[:size].square()).sum()

    x, data = torch.full((size,), -3.0, dtype=DOUBLE), {"A": A, "V": V}
    return System(upper, lower, x, newton(lambda q: lower(x, q, data), torch.zeros(size + 1, dtype=DOUBLE)), data)


def batch_norm() -> System:
    """Least squares of normalised scores: the scale of the weights has no effect."""
    rows, size = 80, 10
    A, V, w = normal(rows, size, name="A"), normal(rows, size, name="V"), normal(size, name="w")
    t, s = A @ w + normal(rows, name="t"), V @ w + normal(rows, name="s")

    def scores(a: Tensor) -> Tensor:
        return 2 * F.batch_norm(a[:, None], None, None, training=True).squeeze(1)

    def upper(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (scores(d["V"] @ y) - d["s"]).square().mean()

    def lower(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (x.exp() * (scores(d["A"] @ y) - d["t"]).square()).mean()

    y = torch.linalg.lstsq(A - A.mean(0), t - t.mean()).solution
    data = {"A": A, "V": V, "t": t, "s": s}
    return System(upper, lower, torch.zeros(rows, dtype=DOUBLE), y / y.norm(), data, rtol=1e-7)


def network(steps: int, penalty: float) -> System:
    """A tanh network after some steps of gradient descent, with a third of the labels wrong."""
    rows, size, width, classes = 60, 6, 8, 3
    A, V, W = normal(rows, size, name="A"), normal(rows, size, name="V"), normal(size, classes, name="W")
    t, s = (A @ W).argmax(1), (V @ W).argmax(1)
    t[:20] = (t[:20] + 1) % classes
    shapes = [(size, width), (width,), (width, classes), (classes,)]
    sizes = [torch.Size(shape).numel() for shape in shapes]

    def scores(a: Tensor, y: Tensor) -> Tensor:
        first, bias, last, shift = (part.view(shape) for part, shape in zip(torch.split(y, sizes), shapes, strict=True))
        return torch.tanh(a @ first + bias) @ last + shift

    def upper(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(scores(d["V"], y), d["s"])

    def lower(x: Tensor, y: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        each = F.cross_entropy(scores(d["A"], y), d["t"], reduction="none")
        return (x.exp() * each).mean() + 0.5 * penalty * y.square().sum()

    x, y, data = torch.zeros(rows, dtype=DOUBLE), 0.4 * normal(sum(sizes), name="y"), {"A": A, "V": V, "t": t, "s": s}
    slope = torch.func.grad(lambda q: lower(x, q, data))
    for _ in range(steps):
        y = y - 0.5 * slope(y)
    return System(upper, lower, x, y, data, rtol=1e-9)


SYSTEMS: dict[str, Callable[[], System]] = {
    "convex, penalty 1": lambda: ridge(200, 40, 1.0, x="weights"),
    "convex, penalty 1e-2": lambda: ridge(200, 40, 1e-2, x="penalties"),
    "convex, eigenvalues over three decades": lambda: ridge(200, 30, 1e-6, x="penalties", spread=1.5),
    "softmax, penalty 1e-6": lambda: softmax(1e-6),
    "40 rows, 200 unknowns, condition 1e2": lambda: ridge(40, 200, 4e-3),
    "40 rows, 200 unknowns, condition 1e4": lambda: ridge(40, 200, 4e-5, x="weights"),
    "40 rows, 200 unknowns, condition 1e6": lambda: ridge(40, 200, 4e-7),
    "40 rows, 200 unknowns, condition 1e8": lambda: ridge(40, 200, 4e-9),
    "singular, solvable": lambda: ridge(20, 60, 0.0, f="fit"),
    "singular, not solvable": lambda: ridge(20, 60, 0.0, f="distance"),
    "softmax without a penalty": lambda: softmax(0.0),
    "ranking with a bias": ranking,
    "batch normalisation": batch_norm,
    "network, start": lambda: network(0, 1e-3),
    "network, trained": lambda: network(300, 1e-2),
}
