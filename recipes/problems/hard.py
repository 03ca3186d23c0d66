r"""Small bilevel problems on which a confident guess goes wrong, each with the right hypergradient.

A case is two functions of flat tensors, f(x, y) and g(x, y). The right hypergradient comes from dense matrices in
double precision at the solved lower problem:

    y = argmin g,   f_x - C' H^+ f_y,   H = g_yy,  C = g_yx

For a singular H the pseudo-inverse gives the derivative of the limit of gradient descent. If the question is about a
procedure (a fixed number of steps), the right value is a central difference of that procedure in plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.seeds import stream

__all__ = ["CASES", "Case", "Entry", "dense", "solve"]

Loss = Callable[[Tensor, Tensor], Tensor]
DOUBLE = torch.float64


class Case(NamedTuple):
    """A problem with its right answer.

    Attributes:
        f: upper loss of x and y.
        g: lower loss of x and y.
        x: the point.
        y: where the lower solve starts.
        right: the right hypergradient; None if there is none, because g has no minimiser that depends smoothly on x.
        dtype: precision of the parameters and of all data.
        tolerance: relative error up to which an estimate counts as right.
        steps: lower steps of a call, for methods that make several.
        calls: calls at the same x; the last estimate is judged.
        options: options of every method here, such as a lower optimizer.
        solver: returns y for x, as ``lower_solver``; None: the methods' own lower steps.
        methods: variants in place of the usual ones: name -> (class, options).
    """

    f: Loss
    g: Loss
    x: Tensor
    y: Tensor
    right: Tensor | None
    dtype: torch.dtype = DOUBLE
    tolerance: float = 0.01
    steps: int = 50
    calls: int = 2
    options: Mapping[str, Any] = {}
    solver: Callable[[Tensor], Tensor] | None = None
    methods: Mapping[str, tuple[str, Mapping[str, Any]]] = {}


def normal(*shape: int, name: str = "data") -> Tensor:
    """Return random numbers, the same for the same name."""
    return torch.randn(*shape, generator=stream(0, name), dtype=DOUBLE)


def solve(g: Loss, x: Tensor, y: Tensor, newton: int = 20) -> Tensor:
    """Return a minimiser of g, by L-BFGS and then by Newton steps without the directions of zero curvature."""
    z = y.detach().clone().requires_grad_()
    descent = torch.optim.LBFGS(
        [z], max_iter=2000, tolerance_grad=1e-14, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        descent.zero_grad()
        loss = g(x, z)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    descent.step(closure)  # type: ignore[no-untyped-call]
    for _ in range(newton):
        gradient, hessian, _ = derivatives(g, x, z.detach())
        z.data -= torch.linalg.pinv(hessian, rtol=1e-9, hermitian=True) @ gradient
    return z.detach()


def derivatives(g: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return g_y, g_yy and g_yx as dense matrices."""
    slope = torch.func.grad(g, argnums=1)
    return slope(x, y), torch.func.jacrev(slope, argnums=1)(x, y), torch.func.jacrev(slope, argnums=0)(x, y)


def dense(f: Loss, g: Loss, x: Tensor, y: Tensor) -> Tensor:
    """Return the implicit hypergradient at y."""
    _, hessian, cross = derivatives(g, x, y)
    direct, b = torch.func.grad(f, argnums=(0, 1))(x, y)
    right: Tensor = direct - cross.T @ (torch.linalg.pinv(hessian, rtol=1e-12, hermitian=True) @ b)
    return right


def of_procedure(f: Loss, procedure: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-5) -> Tensor:
    """Return central differences of f after a procedure."""
    found = [
        (f(x + e, procedure(x + e)) - f(x - e, procedure(x - e))) / (2 * step)
        for e in step * torch.eye(len(x), dtype=DOUBLE)
    ]
    return torch.stack(found)


def spectrum(size: int, condition: float) -> Tensor:
    """Return a symmetric matrix with log-spaced eigenvalues from 1 / condition to 1."""
    basis = torch.linalg.qr(normal(size, size, name="basis"))[0]
    values = torch.diag(torch.logspace(-math.log10(condition), 0, size, dtype=DOUBLE))
    matrix: Tensor = basis @ values @ basis.T
    return matrix


def at_solution(f: Loss, g: Loss, x: Tensor, y: Tensor, **options: Any) -> Case:
    """Return a case that starts at the solved lower problem, so that only the estimator is judged."""
    y = solve(g, x, y)
    return Case(f, g, x, y, dense(f, g, x, y), **options)


def quadratic(condition: float, size: int = 20, linear: bool = False) -> tuple[Loss, Loss, Tensor, Tensor]:
    """Return losses and start of a quadratic problem with y* = A^-1 x; f is a square, or linear in y."""
    A, target = spectrum(size, condition), normal(size, name="target")

    def f(x: Tensor, y: Tensor) -> Tensor:
        return target.to(y) @ y if linear else (y - target.to(y)).square().sum() / 2

    def g(x: Tensor, y: Tensor) -> Tensor:
        return y @ A.to(y) @ y / 2 - y @ x

    return f, g, A @ normal(size, name="x"), torch.zeros(size, dtype=DOUBLE)


def wide_ridge(penalty: float, **options: Any) -> Case:
    """Ridge with 40 examples and 200 unknowns; x: log weights of the examples."""
    A, b, held, c = (normal(*s, name=n) for s, n in zip(((40, 200), (40,), (30, 200), (30,)), "Abhc", strict=True))

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (held.to(y) @ y - c.to(y)).square().mean() / 2

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() * (A.to(y) @ y - b.to(y)).square()).mean() / 2 + penalty / 2 * y.square().sum()

    x = torch.zeros(40, dtype=DOUBLE)
    # The closed form by the kernel of 40 x 40 has no trouble with the small penalty.
    K = A @ A.T / 40
    solution = A.T / 40 @ torch.linalg.solve(K + penalty * torch.eye(40, dtype=DOUBLE), b)
    slope = held.T @ (held @ solution - c) / 30
    # v = H^-1 f_y with H = A'A / 40 + penalty, by Woodbury.
    v = (slope - A.T / 40 @ torch.linalg.solve(K + penalty * torch.eye(40, dtype=DOUBLE), A @ slope)) / penalty
    right = -(A @ solution - b) * (A @ v) / 40
    return Case(f, g, x, solution, right, **options)


def interpolation(**options: Any) -> Case:
    """Least squares with 20 examples, 60 unknowns and no penalty; x: the targets."""
    A, held, c = normal(20, 60, name="A"), normal(30, 60, name="held"), normal(30, name="c")

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (held.to(y) @ y - c.to(y)).square().mean() / 2

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (A.to(y) @ y - x).square().mean() / 2

    x = normal(20, name="x")
    inverse = torch.linalg.pinv(A)
    y = inverse @ x
    return Case(f, g, x, y, inverse.T @ held.T @ (held @ y - c) / 30, **options)


def matrix(*diagonal: float, **options: Any) -> Case:
    """Two unknowns, g = y'Dy / 2 - x y_1, f = y_1 + y_2."""
    D = torch.tensor(diagonal, dtype=DOUBLE)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return y.sum()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (D.to(y) * y.square()).sum() / 2 - x[0] * y[0]

    right = None if min(diagonal) < 0 else torch.tensor([1 / diagonal[0]], dtype=DOUBLE)
    start = torch.tensor([1.0, 0.1 if right is None else 0.0], dtype=DOUBLE)
    return Case(f, g, torch.ones(1, dtype=DOUBLE), start, right, **options)


def softmax(penalty: float = 0.0, gauge: bool = False, **options: Any) -> Case:
    """Softmax regression on three noisy classes; x: log weights of the examples."""
    inputs, held = normal(30, 4, name="inputs"), normal(30, 4, name="held")
    rule = normal(4, 3, name="rule")
    labels, truth = ((i @ rule + 2 * normal(30, 3, name=n)).argmax(1) for i, n in ((inputs, "l"), (held, "t")))

    def f(x: Tensor, y: Tensor) -> Tensor:
        return y.square().sum() / 2 if gauge else F.cross_entropy(held.to(y) @ y.reshape(4, 3), truth)

    def g(x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(inputs.to(y) @ y.reshape(4, 3), labels, reduction="none")
        return (x.exp() * losses).mean() + penalty / 2 * y.square().sum()

    x, zero = torch.zeros(30, dtype=DOUBLE), torch.zeros(12, dtype=DOUBLE)
    y = solve(g, x, zero)
    start = y + (normal(4, 1, name="gauge").expand(4, 3).reshape(-1) if gauge else 0)
    return Case(f, g, x, start, dense(f, g, x, start), **options)


def ranking() -> Case:
    """Pairwise logistic loss (AUC) of a linear score with a bias that has no effect; x: log weights of the pairs."""
    good, bad = normal(8, 3, name="good") + 0.5, normal(8, 3, name="bad")

    def pairs(y: Tensor) -> Tensor:
        scores = good.to(y) @ y[:3] + y[3], bad.to(y) @ y[:3] + y[3]
        return F.softplus(scores[1][None] - scores[0][:, None])

    def f(x: Tensor, y: Tensor) -> Tensor:
        return pairs(y)[:4].mean()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp()[:, None] * pairs(y)).mean() + 1e-2 * y[:3].square().sum()

    return at_solution(f, g, torch.zeros(8, dtype=DOUBLE), torch.zeros(4, dtype=DOUBLE))


def normalised() -> Case:
    """A hidden layer under batch normalisation, then a fixed readout, with a weight decay; x: log weights."""
    inputs, target, readout = normal(40, 3, name="inputs"), normal(40, name="target"), torch.tensor([1.0, -0.5])

    def residuals(y: Tensor) -> Tensor:
        hidden = inputs.to(y) @ y.reshape(3, 2)
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
        return (torch.tanh(hidden) @ readout.to(y) - target.to(y)).square()

    def f(x: Tensor, y: Tensor) -> Tensor:
        return residuals(y)[20:].mean()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() * residuals(y)[:20]).mean() + 5e-3 * y.square().sum()

    x = torch.zeros(20, dtype=DOUBLE)
    y = solve(g, x, 0.1 * normal(6, name="y"))
    return Case(f, g, x, y, dense(f, g, x, y))


def normalised_network() -> Case:
    """A small CNN with batch normalisation and weight decay, before its training has ended; x: log weights of images.

    The right value is that of the fully trained network: plain gradient descent from the same start, then Newton.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits(n_class=3)
    images = torch.tensor(bunch.images[:120, None] / 16, dtype=DOUBLE)
    labels = torch.tensor(bunch.target[:120])

    def losses(y: Tensor, part: slice) -> Tensor:
        hidden = F.conv2d(images[part].to(y), y[:27].reshape(3, 1, 3, 3))
        hidden = torch.tanh(F.batch_norm(hidden, None, None, training=True))
        return F.cross_entropy(
            F.avg_pool2d(hidden, 2).flatten(1) @ y[27:].reshape(27, 3), labels[part], reduction="none"
        )

    def f(x: Tensor, y: Tensor) -> Tensor:
        return losses(y, slice(60, 120)).mean()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() * losses(y, slice(0, 60))).mean() + 5e-3 * y.square().sum()

    x, start = torch.zeros(60, dtype=DOUBLE), 0.3 * normal(108, name="y")
    y = start.clone().requires_grad_()
    for _ in range(500):
        (slope,) = torch.autograd.grad(g(x, y), y)
        y.data -= 0.1 * slope
    return Case(f, g, x, start, dense(f, g, x, solve(g, x, y, newton=10)).detach())


def five_products() -> Case:
    """A system of condition 1e4 by five products at each of twenty calls, by every method that keeps its v."""
    f, g, x, y = quadratic(1e4, 100)
    few = {"linear_steps": 5}
    minres = {**few, "linear_solver": "minres"}
    methods: dict[str, tuple[str, Mapping[str, Any]]] = {
        "AID, 100 products": ("AID", {"linear_steps": 100}),
        "AID, 5 products": ("AID", few),
        "AID, keep_direction, 5": ("AID", {**few, "keep_direction": True}),
        "AID, minres, 5": ("AID", minres),
        **{f"{name}, 5 products": (name, few) for name in ("BA", "PAID", "AmIGO")},
        "RAHGD, 5 products": ("RAHGD", {**few, "lower_lr": 1.0}),
        **{name: (name, {}) for name in ("SOBA", "FSLA")},
        "F2SA, order 2": ("F2SA", {}),
    }
    return at_solution(f, g, x, y, calls=20, methods=methods)


def loose_solver(tol: float, **methods: tuple[str, Mapping[str, Any]]) -> Case:
    """Logistic regression by scikit-learn's solver with some tolerance; x: log weights of the examples."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.linear_model import LogisticRegression

    bunch = load_breast_cancer()
    columns = torch.tensor(bunch.data, dtype=DOUBLE)
    inputs = (columns - columns.mean(0)) / columns.std(0)
    signs = torch.tensor(2.0 * bunch.target - 1, dtype=DOUBLE)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-signs[100:] * (inputs[100:] @ y)).mean()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return 10 * (x.exp() * F.softplus(-signs[:100] * (inputs[:100] @ y))).sum() + y.square().sum() / 2

    def solver(x: Tensor) -> Tensor:
        model = LogisticRegression(C=10.0, tol=tol, fit_intercept=False, max_iter=10_000)
        model.fit(inputs[:100].numpy(), signs[:100].numpy(), sample_weight=x.exp().numpy())
        return torch.tensor(model.coef_[0], dtype=DOUBLE)

    x, zero = torch.zeros(100, dtype=DOUBLE), torch.zeros(30, dtype=DOUBLE)
    methods = {
        **methods, "AID, 100 products": ("AID", {"linear_steps": 100}),
        "AID, direct": ("AID", {"linear_solver": "direct"}),
    }  # fmt: skip
    right = dense(f, g, x, solve(g, x, zero))
    return Case(f, g, x, zero, right, steps=0, calls=1, solver=solver, methods=methods)


def separable() -> Case:
    """Logistic regression without a penalty on separable data: no minimiser. ITD has the derivative of its steps."""
    inputs = torch.cat([normal(10, 2, name="a") + 4, normal(10, 2, name="b") - 4])
    signs = torch.cat([torch.ones(10), -torch.ones(10)]).to(DOUBLE)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-signs.to(y) * (inputs.to(y).roll(1, 1) @ y)).mean()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() * F.softplus(-signs.to(y) * (inputs.to(y) @ y))).mean()

    return Case(f, g, torch.zeros(20, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE), None)


def constant_feature() -> Case:
    """Least squares with a feature that is always zero, by the adaptive lower optimizers of torch, unrolled."""
    inputs, target = normal(12, 3, name="inputs") * torch.tensor([1.0, 0.0, 1.0]), normal(12, name="target")

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (y - 1).square().sum() / 2

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x[0].exp() * (inputs.to(y) @ y - target.to(y)).square()).mean() + x[1] * y[0]

    def procedure(x: Tensor) -> Tensor:
        y = torch.zeros(3, dtype=DOUBLE, requires_grad=True)
        adam = torch.optim.Adam([y], lr=0.1)
        for _ in range(5):
            adam.zero_grad()
            g(x, y).backward()  # type: ignore[no-untyped-call]
            adam.step()
        return y.detach()

    x = torch.tensor([0.1, 0.2], dtype=DOUBLE)
    return Case(
        f, g, x, torch.zeros(3, dtype=DOUBLE), of_procedure(f, procedure, x), steps=5, calls=1,
        methods={"ITD, Adam": ("ITD", {"lower_optimizer": torch.optim.Adam, "lower_lr": 0.1})},
    )  # fmt: skip


def digits() -> Case:
    """Softmax regression on 100 digits with a small weight decay; x: its logarithm for each class."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = torch.tensor(bunch.data[:200] / 16, dtype=DOUBLE), torch.tensor(bunch.target[:200])

    def f(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(images[100:].to(y) @ y.reshape(64, 10), labels[100:])

    def g(x: Tensor, y: Tensor) -> Tensor:
        weights = y.reshape(64, 10)
        return F.cross_entropy(images[:100].to(y) @ weights, labels[:100]) + (x.exp() * weights.square()).sum()

    x, zero = torch.full((10,), math.log(1e-5), dtype=DOUBLE), torch.zeros(640, dtype=DOUBLE)
    y = solve(g, x, zero, newton=4)
    return Case(f, g, x, y, dense(f, g, x, y), dtype=torch.float32)


def network() -> Case:
    """Two layers in single precision, at a minimum; x: log weights of the examples."""
    inputs, target, held = normal(30, 2, name="inputs"), normal(30, name="target"), normal(20, 2, name="held")
    truth = held.prod(1)

    def predicted(y: Tensor, at: Tensor) -> Tensor:
        return torch.tanh(at.to(y) @ y[:8].reshape(2, 4) + y[8:12]) @ y[12:16]

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (predicted(y, held) - truth.to(y)).square().mean()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() * (predicted(y, inputs) - target.to(y)).square()).mean() + 2e-2 * y.square().sum()

    return at_solution(f, g, torch.zeros(30, dtype=DOUBLE), normal(16, name="y"), dtype=torch.float32)


def squared_hinge() -> Case:
    """A linear classifier whose Hessian jumps where an example reaches its margin; x: log weights of the examples."""
    inputs, held = normal(40, 4, name="inputs"), normal(20, 4, name="held")
    signs = (inputs[:, 0] + normal(40, name="noise")).sign()

    def f(x: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-held.to(y)[:, 0].sign() * (held.to(y) @ y)).mean()

    def g(x: Tensor, y: Tensor) -> Tensor:
        margins = torch.relu(1 - signs.to(y) * (inputs.to(y) @ y))
        return (x.exp() * margins.square()).mean() + 1e-2 * y.square().sum()

    return at_solution(f, g, torch.zeros(40, dtype=DOUBLE), torch.zeros(4, dtype=DOUBLE), dtype=torch.float32)


def saddle() -> Case:
    """A two-layer linear net at zero, a saddle point of g: no method can know which minimum is meant."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (y[0] * y[1] - 2).square() / 2 + y.sum()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (y[0] * y[1] - x[0]).square() / 2

    return Case(f, g, torch.ones(1, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE), None)


def quartic() -> Case:
    """A minimum without curvature, y* = x, which gradient steps approach ever more slowly."""
    target = torch.tensor([2.0, -1.0], dtype=DOUBLE)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (y - target.to(y)).square().sum() / 2

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (y - x).pow(4).sum() / 4

    x = torch.tensor([1.0, 0.5], dtype=DOUBLE)
    return Case(f, g, x, torch.zeros(2, dtype=DOUBLE), x - target)


def saturated() -> Case:
    """A sigmoid before the cross-entropy: in single precision its gradient is exactly 0 at 20, where it should be 1."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return y.square().sum() / 2

    def g(x: Tensor, y: Tensor) -> Tensor:
        probability = torch.sigmoid(y)
        loss = F.binary_cross_entropy(probability, torch.zeros_like(y)) if y.dtype != DOUBLE else F.softplus(y).mean()
        return loss + (y - 20).square().sum() / 2 * 1e-3 - 0.99 * x[0] * y.sum()

    x = torch.ones(1, dtype=DOUBLE)
    return at_solution(f, g, x, torch.full((1,), 5.0, dtype=DOUBLE), dtype=torch.float32)


def long_series() -> Case:
    """More terms of a random series add noise: the variance of the single-term estimate grows with their number."""
    f, g, x, y = quadratic(100.0)
    terms = {f"BSA, {k} terms": ("BSA", {"linear_steps": k}) for k in (10, 100, 1000)}
    return at_solution(f, g, x, y, methods=terms)


def heavy_ball() -> Case:
    """Heavy ball at condition number 1e4: the iterate rises far above its start before it falls."""
    f, g, x, y = quadratic(1e4)
    root = math.sqrt(1e4)
    momentum = ((root - 1) / (root + 1)) ** 2
    rate = (2 / (1 + 1 / root)) ** 2

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=rate, momentum=momentum)

    heavy = {"lower_optimizer": optimizer, "lower_lr": rate}
    right = dense(f, g, x, solve(g, x, y))
    return Case(f, g, x, y, right, steps=1500, calls=1, options=heavy, methods={
        "ITD": ("ITD", {}), "AID, direct": ("AID", {"linear_solver": "direct"}), "F2SA, order 2": ("F2SA", {}),
    })  # fmt: skip


def unsolved(linear: bool = False) -> Case:
    """Ten lower steps at condition number 100: y is far from y*, which matters only if f is not linear."""
    f, g, x, y = quadratic(100.0, linear=linear)
    return Case(f, g, x, y, dense(f, g, x, solve(g, x, y)), steps=10, calls=1)


class Entry(NamedTuple):
    """A case in the table.

    Attributes:
        make: returns the case.
        text: what the page says of it.
    """

    make: Callable[[], Case]
    text: str


FLOAT32: dict[str, Any] = {"dtype": torch.float32}
CASES: dict[str, Entry] = {
    "wide ridge, penalty 1e-5": Entry(
        lambda: wide_ridge(1e-5),
        "Ridge with 40 examples, 200 unknowns and a small penalty; x: log weights of the examples.",
    ),
    "wide ridge, penalty 1e-6, float32": Entry(
        lambda: wide_ridge(1e-6, tolerance=0.05, **FLOAT32), "Condition 4e5 in single precision; within 5 %."
    ),
    "wide ridge, penalty 1e-8, float32": Entry(
        lambda: wide_ridge(1e-8, tolerance=0.05, **FLOAT32), "The penalty is below the rounding error; within 5 %."
    ),
    "interpolation without a penalty, float32": Entry(
        lambda: interpolation(**FLOAT32), "20 examples, 60 unknowns; x: targets. Right: the least solution."
    ),
    "condition 1e6, float32": Entry(
        lambda: at_solution(*quadratic(1e6, 50), tolerance=0.05, **FLOAT32), "A quadratic in 50 unknowns; within 5 %."
    ),
    "condition 1e4, twenty calls": Entry(
        lambda: at_solution(*quadratic(1e4, 100), calls=20),
        "A quadratic in 100 unknowns. A warm start of v at each call restarts conjugate gradients: twenty times ten "
        "products are far from two hundred, unless `keep_direction=True` goes on with the last direction.",
    ),
    "condition 1e4, twenty calls of five products": Entry(
        five_products,
        "The same with fewer products, by all kinds of methods that keep v. Fewer than ten products are taken for a "
        "choice, so no warning; [what to set](../recipes/README.md#warm-starts-of-linear-systems).",
    ),
    "singular, right side not in the range": Entry(
        lambda: matrix(1.0, 0.0), "g = y_1^2 / 2 - x y_1, f = y_1 + y_2: y_2 stays, so the right value is 1."
    ),
    "indefinite: no minimum": Entry(lambda: matrix(1.0, -0.1), "g = y_1^2 / 2 - y_2^2 / 20 - x y_1: no right value."),
    "softmax without a reference class, float32": Entry(
        lambda: softmax(calls=10, **FLOAT32), "H is singular, but f and g do not change in its null space."
    ),
    "softmax, f = |y|^2 / 2": Entry(
        lambda: softmax(gauge=True), "f does change in the null space of H. Right: the limit of gradient descent."
    ),
    "ranking with a bias of no effect": Entry(ranking, "Pairwise logistic loss: the bias cancels, so H is singular."),
    "batch normalisation under a decay": Entry(
        normalised, "The loss does not change with the scale of the weights; only the decay does. At a minimum."
    ),
    "a CNN with batch normalisation, early": Entry(
        normalised_network,
        "A small CNN on digits, after 100 steps. But for the decay, H w = -(gradient) and w'Hw = 0 for the weights w "
        "before a normalisation, so H is indefinite until training has ended. Right: the fully trained network.",
    ),
    "separable data without a penalty": Entry(separable, "Logistic regression without a minimum: no right value."),
    "a feature that is always zero, Adam": Entry(
        constant_feature, "Five steps of Adam, unrolled. Right: differences of these steps."
    ),
    "digits, weight decay 1e-5, float32": Entry(
        digits, "Softmax regression on 100 digits; x: log decay of each class."
    ),
    "ten lower steps at condition 100": Entry(
        lambda: unsolved(), "A single call from y = 0: y is far from the minimiser, and so is the hypergradient."
    ),
    "ten lower steps, f linear in y": Entry(
        lambda: unsolved(linear=True), "The implicit hypergradient of a quadratic g is then exact at any y."
    ),
    "a lower solver of scikit-learn, default tolerance": Entry(
        lambda: loose_solver(1e-4, AID=("AID", {})),
        "LogisticRegression as `lower_solver`; x: log weights of 100 examples. Central differences over it are "
        "off by 6 to 48 % along a random direction, with steps of 0.1 to 1e-6.",
    ),
    "a lower solver of scikit-learn, tolerance 1e-8": Entry(
        lambda: loose_solver(1e-8), "Differences are off by less than 0.03 % with steps of 0.1 to 1e-3."
    ),
    "heavy ball, condition 1e4": Entry(
        heavy_ball,
        "The iterate rises to a multiple of its start before it falls, with the rate and momentum of the theory.",
    ),
    "bfloat16": Entry(
        lambda: at_solution(*quadratic(4.0, 8), dtype=torch.bfloat16, tolerance=0.05),
        "A quadratic in 8 unknowns; within 5 %.",
    ),
    "tanh network, float32": Entry(network, "Two layers, at a minimum; x: log weights of the examples."),
    "squared hinge, float32": Entry(
        squared_hinge, "The Hessian jumps where an example reaches its margin; x: log weights of the examples."
    ),
    "saddle of g": Entry(saddle, "g = (y_1 y_2 - x)^2 / 2 at zero: two minima are equally near, so no right value."),
    "a minimum without curvature": Entry(
        quartic, "g = |y - x|^4 / 4 (entry by entry): gradient steps come to y* = x ever more slowly."
    ),
    "sigmoid, then cross-entropy, float32": Entry(
        saturated, "`binary_cross_entropy(sigmoid(y), 0)`: above y = 17 its gradient is 0 in place of 1."
    ),
    "more terms of a random series": Entry(
        long_series, "Condition 100. The mean is right, but more terms make a single estimate noisier."
    ),
}
