"""check_hypergradient distinguishes right from wrong gradients, and changes nothing."""

import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.gradcheck import GradcheckError

import bilevel_optim as bo
from bilevel_optim.checking.differences import slope
from bilevel_optim.checking.reference import DENSE_LIMIT
from bilevel_optim.checking.trials import TimeLimit

from .problems import Cleaning, Cosh, PenaltyQuadratic, Quadratic, Tasks, same, seeded, values


def check(cls, problem, steps=60, repeats=None, rtol=1e-2, reference="auto", **options):
    if not issubclass(cls, bo.RTMLMC):
        options = {"lower_lr": problem.lr, "lower_steps": steps, **options}
    optimizer = cls(problem.x, problem.y, lr=0.1, **options)
    more = {"repeats": repeats} if repeats else {}
    more |= {"tasks": problem.tasks} if problem.tasks else {}
    return bo.check_hypergradient(optimizer, *problem.losses, rtol=rtol, reference=reference, **more)


@pytest.mark.usually("dense")
@pytest.mark.parametrize("reference", ["dense", "differences"])
def test_reports_the_closed_form_errors(reference):
    problem, tolerance = Quadratic(n=12, kappa=3.0), 1e-9 if reference == "dense" else 1e-8
    report = check(bo.AID, problem, linear_steps=20, reference=reference)
    assert report.relative_error < tolerance
    assert report.cosine == pytest.approx(1.0, abs=1e-9)
    assert (report.std, report.repeats, report.reference) == (0.0, 2, reference)
    assert report.norm == pytest.approx(float(problem.hypergradient()[0].norm()), rel=tolerance)
    problem, nu = PenaltyQuadratic(), 0.05
    truth = problem.hypergradient()[0]
    bias = float((problem.predicted((-1, 1), nu) - truth).norm())
    report = check(bo.F2SA, problem, 150, reference=reference, rtol=1.0, nu=nu)
    assert report.bias == pytest.approx(bias, rel=1e-3)
    assert report.relative_error == pytest.approx(bias / float(truth.norm()), rel=1e-3)


SETTINGS, SOLVE = "estimator's own settings", "lower solve is the cause"


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("cls", "problem", "steps", "options", "cause"),
    [
        (bo.AID, Quadratic, 2, {"linear_steps": 40}, SOLVE),
        (bo.ITD, Quadratic, 2, {}, SETTINGS),
        (bo.AID, Quadratic, 100, {"linear_steps": 1}, SETTINGS),
        (bo.AID, Quadratic, 100, {"linear_steps": 40, "damping": 5.0}, SETTINGS),
        (bo.AID, Quadratic, 100, {"linear_solver": "neumann", "linear_steps": 3}, SETTINGS),
        (bo.FirstOrder, Quadratic, 100, {}, SETTINGS),
        (bo.F2SA, Cosh, 60, {"order": 1, "nu": 0.2}, SETTINGS),
        (bo.F2SA, PenaltyQuadratic, 150, {"order": 2, "nu": 0.15}, SETTINGS),
        (bo.AID, Tasks, 2, {"linear_steps": 40}, SOLVE),
        (bo.AID, Tasks, 40, {"linear_solver": "neumann", "linear_steps": 1}, SETTINGS),
        (bo.AID, Tasks, 40, {"linear_steps": 40, "damping": 5.0}, SETTINGS),
    ],
)
def test_a_bad_setting_is_refused_with_its_cause(cls, problem, steps, options, cause):
    with pytest.raises(bo.GradcheckError, match=cause) as error:
        check(cls, problem(), steps, **options)
    assert cls.__name__ in str(error.value)
    assert isinstance(error.value, GradcheckError)


class OnlyOnce(torch.autograd.Function):
    """The identity without a second derivative."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad


class Doubled(torch.autograd.Function):
    """A custom function whose derivative is wrong, as users may write one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.usually("Quadratic")
@pytest.mark.parametrize("problem", [Quadratic, Tasks])
def test_a_wrong_derivative_is_refused(problem):
    """The differences of the objective do not use it."""
    problem = problem(m=3)
    upper = problem.upper
    problem.upper = lambda *batch: upper(*batch) + (Doubled.apply(problem.x[0]) - problem.x[0]).sum()
    with pytest.raises(bo.GradcheckError, match="off by"):
        check(bo.AID, problem, 100, linear_steps=40, reference="differences")


def test_stochastic_estimates_are_judged_by_their_mean():
    problem = Cleaning(form="batches", n=16)
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.5, lower_steps=30)
    drawn = str([o.state_dict() for o in problem.objectives])
    report = bo.check_hypergradient(optimizer, *problem.losses, rtol=1.0, repeats=4)
    assert report.repeats == 4
    assert report.std > 0
    assert report.standard_error == pytest.approx(report.std / 4**0.5)
    assert report.cosine > 0.5
    assert str([o.state_dict() for o in problem.objectives]) == drawn
    report = check(bo.PZOBO, Tasks(m=3), 20, 8, rtol=0.3, directions=8)
    assert report.std > 0
    assert report.repeats == 8
    report = check(bo.AID, Tasks(m=3), 20, 8, rtol=0.3, lower_batch=2, upper_batch=2, linear_steps=20)
    assert report.std > 0
    assert report.cosine > 0.9


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *[(bo.AID, {}), (bo.F2SA, {"order": 2}), (bo.AID, {"tasks_per_step": 2}), (bo.RTMLMC, {"levels": 2})],
        (bo.F2SA, {"order": 2, "tasks_per_step": 2}),
    ],
    ids=str,
)
def test_changes_nothing(cls, options):
    """Neither parameters, gradients, state, counts, nor random numbers; the next step is as it would have been."""

    def made():
        generator, tasks = seeded(1), cls is bo.RTMLMC or "tasks_per_step" in options
        problem = Tasks() if tasks else Cleaning()
        more = {"generator": generator, "lower_init": lambda ids: torch.zeros(len(ids), 5)} if tasks else {}
        more |= {"lower_steps": 20} if cls is not bo.RTMLMC else {}
        optimizer = cls(problem.x, problem.y, lr=0.01, lower_lr=problem.lr, **options, **more)
        problem.run(optimizer)
        return problem, optimizer, generator

    (problem, optimizer, generator), (twin, other, _) = made(), made()

    def everything():
        gradients = [p.grad for p in (*problem.x, *problem.y)]
        state = str([optimizer.state_dict(), optimizer.diagnostics, gradients, generator.get_state()])
        return state, values(problem.x, problem.y, [torch.get_rng_state()])

    before, init = everything(), optimizer.lower_init
    options = {"tasks": problem.tasks, "repeats": 3} if problem.tasks else {}
    bo.check_hypergradient(optimizer, *problem.losses, rtol=10.0, **options)
    after = everything()
    assert before[0] == after[0]
    assert same(before[1], after[1])
    assert optimizer.lower_init is init
    random = torch.get_rng_state()
    problem.run(optimizer)
    torch.set_rng_state(random)
    twin.run(other)
    assert same(values(problem.x, problem.y), values(twin.x, twin.y))
    assert optimizer.oracle_counts == other.oracle_counts


def test_uncheckable_problems_say_so():
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 0.3, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=5)
    with pytest.raises(bo.GradcheckError, match="not strongly convex"):
        bo.check_hypergradient(optimizer, lambda: (y**2).sum(), lambda: (x[0] * y[0] ** 2) + 0 * y[1])
    for name, value in (("repeats", 1), ("reference", "guess")):
        with pytest.raises(ValueError, match=f"Invalid {name} value: {value}"):
            bo.check_hypergradient(optimizer, lambda: (y**2).sum(), lambda: (x * y**2).sum(), **{name: value})
    problem, rows = Tasks(), Tasks(rows=True)
    recursive = bo.SVRB(rows.x, rows.y, lr=0.1, lower_lr=0.1)
    with pytest.raises(
        ValueError,
        match=r"SVRB keeps y of every task, so it cannot be checked with tasks; .* for one problem, without tasks=",
    ):
        bo.check_hypergradient(recursive, *rows.losses, tasks=rows.tasks)
    minimax = bo.GDA(problem.x, problem.y, lr=0.1, lower_lr=0.1)
    with pytest.raises(ValueError, match="GDA has one loss"):
        bo.check_hypergradient(minimax, problem.upper, tasks=problem.tasks)
    with pytest.raises(TypeError, match="tasks must be a sampler"):
        bo.check_hypergradient(optimizer, *problem.losses, tasks=[1, 2])


def test_a_lower_solver_is_called_as_in_a_step():
    problem = Quadratic(6, 3, 5.0)

    def solve():
        problem.y[0].copy_(torch.linalg.solve(problem.A, problem.D @ problem.x[0] + problem.e))

    before = values(problem.y)
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_steps=0, linear_steps=6, lower_solver=solve)
    assert bo.check_hypergradient(optimizer, *problem.losses).relative_error < 1e-10
    assert same(values(problem.y), before)


@pytest.mark.parametrize("reference", ["dense", "differences"])
@pytest.mark.parametrize("decay", [1e-4, 1e-5])
def test_differences_stay_where_the_lower_problem_has_a_solution(decay, reference):
    """More features than examples: a negative weight decay has no solution, and their first steps lead there."""
    features, held = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.tensor([decay], dtype=torch.float64, requires_grad=True)
    y = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    gram = features.T @ features

    def solve():
        y.copy_(torch.linalg.solve(gram + x * torch.eye(6, dtype=x.dtype), features.sum(0)))

    def upper():
        return (held @ y).square().sum()

    def lower():
        return (features @ y - 1).square().sum() / 2 + x.sum() * y.square().sum() / 2

    options = {"linear_solver": "direct", "lower_solver": solve}
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.01, lower_steps=0, **options)
    report = bo.check_hypergradient(optimizer, upper, lower, reference=reference)
    hessian = gram + decay * torch.eye(6, dtype=torch.float64)
    solution = torch.linalg.solve(hessian, features.sum(0))
    truth = -float(solution @ torch.linalg.solve(hessian, 2 * held.T @ held @ solution))
    assert (report.verdict, report.norm) == ("right", pytest.approx(abs(truth), rel=1e-3))


def test_what_only_the_absolute_tolerance_lets_pass_is_said():
    x, y = (torch.full((2,), n, dtype=torch.float64, requires_grad=True) for n in (1.0, 0.0))
    optimizer = bo.FirstOrder([x], [y], lr=0.1, lower_lr=0.5, lower_steps=30)
    losses = lambda: 1e-9 * (y + 1).square().sum(), lambda: (y - x).square().sum()
    report = bo.check_hypergradient(optimizer, *losses)
    assert (report.verdict, report.relative_error) == ("right", 1.0)
    assert report.advice.startswith("only atol = 1e-08 lets it pass")
    with pytest.raises(bo.GradcheckError, match="FirstOrder leaves a part"):
        bo.check_hypergradient(optimizer, *losses, atol=0)


def test_a_step_in_place_of_a_hypergradient_is_said():
    x, y = (torch.full((2,), n, dtype=torch.float64, requires_grad=True) for n in (1.0, 0.0))
    optimizer = bo.iMCN([x], [y], lr=0.2, lower_lr=0.5, lower_steps=40, cubic_steps=50)
    with pytest.raises(bo.GradcheckError, match=r"iMCN sets \.grad to a step") as caught:
        bo.check_hypergradient(optimizer, lambda: (x @ y) + (x.square() - y.square()).sum() / 2)
    assert "settings are the cause" not in str(caught.value)


@pytest.mark.parametrize("reference", ["dense", "implicit"])
@pytest.mark.parametrize("weight", [1e-6, 1e-14, 1e-18])
def test_the_reference_is_exact_where_the_hessian_changes_fast(weight, reference):
    """The lower Hessian is about 12 (y - x)^2 and small, so it is that of the solution only at the solution itself."""
    x, y = torch.tensor([0.5]).double().requires_grad_(), torch.tensor([0.3]).double().requires_grad_()

    def lower():
        return ((y - x) ** 4 + weight / 2 * (y - 2 * x).square()).sum()

    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    report = bo.check_hypergradient(optimizer, lambda: (y - 3).square().sum(), lower, rtol=10.0, reference=reference)
    low, high = 0.0, 0.5  # d = y* - x solves 4 d^3 + weight (d - x) = 0
    for _ in range(200):
        d = (low + high) / 2
        low, high = (d, high) if 4 * d**3 + weight * (d - 0.5) < 0 else (low, d)
    truth = 2 * (d - 2.5) * (12 * d**2 + 2 * weight) / (12 * d**2 + weight)
    assert report.norm == pytest.approx(abs(truth), rel=1e-10)


def test_steps_that_are_infinite_and_losses_that_are_nan_are_told():
    x = torch.tensor([-1e-4], requires_grad=True)
    y = torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_steps=50)
    report = bo.check_hypergradient(
        optimizer, lambda: (y - 1).square().sum(), lambda: ((x / 1e-4).exp() * y - 1).square().sum() + y.pow(4).sum()
    )
    assert report.relative_error_at_solution < 1e-3
    with pytest.raises(bo.GradcheckError, match=r"the lower loss is nan at the present x"):
        bo.check_hypergradient(optimizer, lambda: y.square().sum(), lambda: (y - x.sqrt()).square().sum())


@pytest.mark.few(1)
@pytest.mark.parametrize("reference", ["implicit", "differences"])
def test_large_lower_problems_are_checked_without_a_dense_hessian(reference):
    """More lower variables than one is made for, in float32; by differences with random probes."""
    torch.set_default_dtype(torch.float32)
    X, t, head = torch.randn(20, 26), torch.randint(0, 3, (20,)), torch.randn(20, 3)
    model, x = nn.Linear(26, 20, bias=False), torch.zeros(20, requires_grad=True)
    assert model.weight.numel() > DENSE_LIMIT

    def lower():
        losses = F.cross_entropy(model(X) @ head, t, reduction="none")
        return (x.sigmoid() * losses).mean() + 0.1 * model.weight.square().sum()

    def upper():
        return F.cross_entropy(model(-X) @ head, t)

    good, hasty = (
        bo.AID([x], model.parameters(), lr=0.1, lower_lr=0.15, lower_steps=120, linear_steps=n) for n in (40, 1)
    )
    kind = {} if reference == "implicit" else {"reference": reference, "directions": 3}
    assert bo.check_hypergradient(good, upper, lower, rtol=5e-2, **kind).reference == reference
    with pytest.raises(bo.GradcheckError, match=SETTINGS):
        bo.check_hypergradient(hasty, upper, lower, rtol=5e-2, **kind)


def test_losses_without_second_derivatives_are_checked_by_differences():
    model, x = nn.Linear(30, 20, bias=False), torch.zeros(20, requires_grad=True)

    def lower():
        return (OnlyOnce.apply(model.weight) - x[:, None]).square().sum() / 2

    optimizer = bo.F2SA([x], model.parameters(), lr=0.1, lower_lr=0.5, lower_steps=60, nu=1e-3)
    report = bo.check_hypergradient(optimizer, lambda: (model.weight - 1).square().sum() / 2, lower, directions=2)
    assert (report.reference, report.verdict) == ("differences", "right")


# ---------------------------------------------------------------------------------------------------- tasks


@pytest.mark.few(2)
@pytest.mark.parametrize("reference", ["dense", "differences"])
@pytest.mark.parametrize(
    ("cls", "options", "error"),
    [
        (bo.AID, {"linear_steps": 40}, 1e-9),
        (bo.AID, {"linear_steps": 40, "warm_start": False, "vectorize": False}, 1e-9),
        (bo.ITD, {}, 1e-9),
        (bo.F2SA, {"order": 2, "nu": 1e-2}, 1e-4),
    ],
)
def test_the_mean_over_the_tasks_is_compared(cls, options, error, reference):
    problem = Tasks(m=3)
    report = check(cls, problem, 40, reference=reference, **options)
    assert report.relative_error < error
    assert report.relative_error_at_solution < error
    assert (report.std, report.repeats, report.reference) == (0.0, 2, reference)
    assert report.norm == pytest.approx(float(problem.hypergradient()[0].norm()), rel=1e-8)


def test_method_and_reference_see_the_same_tasks():
    """With two of six tasks per step, another draw for the reference would be far off."""
    problem, generator = Tasks(), seeded(4)
    ids = problem.tasks.sample(2, seeded(4))
    report = check(bo.AID, problem, 40, linear_steps=40, tasks_per_step=2, generator=generator)
    assert report.relative_error < 1e-9
    truth = problem.hypergradients()
    assert report.norm == pytest.approx(float(truth[ids].mean(0).norm()), rel=1e-9)
    assert not torch.allclose(truth[ids].mean(0), truth.mean(0), rtol=0.1)
    assert torch.equal(generator.get_state(), seeded(4).get_state())


def test_the_method_starts_at_its_own_points():
    """Solved in no step from the solutions, and not at all from zero."""
    problem = Tasks()
    solutions = problem.solutions()
    report = check(bo.AID, problem, 0, linear_steps=40, lower_init=lambda ids: solutions[ids])
    assert report.relative_error < 1e-9
    with pytest.raises(bo.GradcheckError, match=SOLVE):
        check(bo.AID, problem, 0, linear_steps=40)


def test_contextual_methods_are_checked():
    options = {"levels": 5, "neumann_steps": 30, "lower_batch": None, "upper_batch": None, "tasks_per_step": 3}
    options |= {"lower_lr": 2.0}
    report = check(bo.RTMLMC, Tasks(m=3), rtol=0.1, repeats=16, **options)
    assert report.relative_error < 0.1
    assert report.std > 0
    with pytest.raises(bo.GradcheckError, match=SETTINGS):
        check(bo.DLSGD, Tasks(m=3), rtol=0.05, repeats=2, **(options | {"neumann_steps": 1}))


@pytest.mark.usually("False")
@pytest.mark.parametrize("features", [False, True])
def test_initialised_methods_are_checked(features):
    """The proximal term of iMAML is there once in the reference, and once in the method."""
    generator = seeded()
    data = torch.randn(3, 4, 5, generator=generator)
    x, y = (torch.randn(5, generator=generator).requires_grad_() for _ in range(2))

    def loss(rows):
        return y.cosh().log().sum() + (rows @ y).square().mean() / 2

    head = bo.Objective(loss, features=lambda rows: rows - 0.5) if features else lambda rows: loss(rows - 0.5)
    optimizer = bo.iMAML([x], [y], lr=0.1, lower_lr=0.15, lower_steps=80, proximal=2.0, linear_steps=20)
    upper = bo.Objective(lambda rows: (y - rows.mean(0)).square().sum())
    assert bo.check_hypergradient(optimizer, upper, head, tasks=bo.TensorTasks(data)).relative_error < 1e-8
    one = bo.check_hypergradient(optimizer, lambda: (y - 1).square().sum(), lambda: loss(data[0]))
    assert one.relative_error < 1e-8


# ---------------------------------------------------------------------------------------------------- the truth


def planted(fault):
    """Return a pair of losses on 4 upper and 3 lower variables, one with a fault, and the name of the faulty one."""
    a, b = torch.randn(3, 4, generator=seeded(1)), torch.randn(3, generator=seeded(2))
    x, y = torch.randn(4, generator=seeded(3)).requires_grad_(), torch.zeros(3, requires_grad=True)

    def upper():
        seen_x, seen_y = x, y
        factor = 1.0
        if fault == "detached x in f":
            seen_x = x.detach()
        elif fault == "detached y in f":
            seen_y = y.detach()
        elif fault == "wrong backward in f":
            seen_y = Doubled.apply(y)
        elif fault == "item in f":
            factor = 1 + x.sum().item() ** 2
        return factor * (seen_y - b).square().sum() / 2 + 0.3 * seen_x.square().sum() + 0.01 * (x.sum() + y.sum())

    def lower():
        seen_x, seen_y, factor = x, y, 1.0
        if fault == "detached x in g":
            seen_x = x.detach()
        elif fault == "wrong backward in g":
            seen_x = Doubled.apply(x)
        elif fault == "wrong backward in y of g":
            seen_y = Doubled.apply(y)
        elif fault == "item in g":
            factor = x[0].item()
        elif fault == "detached y in g":
            seen_y = y.detach()
        bent = (seen_y - a @ seen_x).square().sum() / 2 + 0.1 * seen_y @ (a @ x) * factor
        return bent + 0.05 * (y.square().sum() + y.pow(4).sum()) + 0.01 * (y * x.sum()).sum()

    return upper, lower, x, y


FAULTS = [
    *["detached x in f", "detached y in f", "item in f", "wrong backward in f", "detached x in g", "item in g"],
    *["wrong backward in g", "wrong backward in y of g", "detached y in g"],
]


@pytest.mark.few(10)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("reference", "dtype"), [("auto", torch.float64), ("differences", torch.float64), ("implicit", torch.float32)]
)
def test_wrong_losses_are_found_and_named(fault, reference, dtype):
    """Second derivatives of a loss by autograd are not those of its values; method and reference agree on them."""
    torch.set_default_dtype(dtype)
    upper, lower, x, y = planted(fault)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.3, lower_steps=40, linear_steps=10)
    level = "upper" if fault.endswith("f") else "lower"
    with pytest.raises(bo.GradcheckError, match=f"the {level} loss's .*derivative in"):
        bo.check_hypergradient(optimizer, upper, lower, rtol=3e-2, reference=reference)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reference", ["dense", "implicit", "differences"])
def test_losses_without_a_fault_are_right(dtype, reference):
    torch.set_default_dtype(dtype)
    upper, lower, x, y = planted(None)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.3, lower_steps=100, linear_steps=10)
    report = bo.check_hypergradient(optimizer, upper, lower, reference=reference)
    assert (report.verdict, report.reference) == ("right", reference)
    assert (report.gap < 1e-3) == (reference != "differences")


@pytest.mark.few(4)
@pytest.mark.parametrize("problem", [Quadratic, Cosh, PenaltyQuadratic, Cleaning, Tasks])
@pytest.mark.parametrize("reference", ["dense", "implicit"])
def test_a_difference_of_the_solved_problem_agrees_with_the_reference(problem, reference):
    report = check(bo.AID, problem(), 60, linear_steps=30, reference=reference, rtol=1e3)
    assert report.gap < 1e-6


@pytest.mark.parametrize(
    ("function", "derivative", "verdict"),
    [
        (lambda t: max(t, 0.0), 0.0, "unknown"),  # both sides agree at all distances: only the kink shows
        (lambda t: max(t, 0.0) + t, 1.0, "unknown"),
        (lambda t: 3 * t + t**2, 3.0, "agrees"),
        (lambda t: 3 * t + t**2, 3.1, "differs"),
    ],
)
def test_a_difference_across_a_kink_decides_nothing(function, derivative, verdict):
    unit = torch.finfo(torch.float64).eps
    assert slope(function, 1e-3, unit).compared(derivative, 1.0, unit) == verdict


def test_a_second_derivative_that_is_wrong_at_one_point_is_not_right():
    """torch's second derivative of std() ** 2 is zero at a constant y, where the reference had the same fault."""
    x, y = (torch.zeros(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    target = torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.3, lower_steps=3)
    report = bo.check_hypergradient(
        optimizer, lambda: (y - target).square().sum() / 2, lambda: y.std() ** 2 + (y - x).square().sum() / 2
    )
    assert report.verdict == "inconclusive"
    assert "wrong second derivative at this point" in report.advice


@pytest.mark.slow  # as the rectifiers of faults/test_checking.py and the kinks of test_verdicts.py
def test_kinks_and_noise_are_no_faults():
    """Rectifiers, and dropout whose masks belong to the sample."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1))
    rows, x = torch.randn(20, 4), torch.zeros(4, requires_grad=True)

    def lower():
        penalty = sum(p.square().sum() for p in net.parameters())
        return (net(rows * (1 + x))[:, 0] - rows.sum(1)).square().mean() + penalty

    optimizer = bo.AID([x], net.parameters(), lr=0.1, lower_lr=0.05, lower_steps=20)
    try:
        bo.check_hypergradient(optimizer, lambda: (net(rows)[:, 0] - 1).square().mean(), lower, rtol=1e3, repeats=2)
    except bo.GradcheckError as error:
        assert "derivative in" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("cls", "options", "verdict", "advice"),
    [
        (bo.AID, {"lower_steps": 100, "linear_steps": 20}, "right", "nothing to change"),
        (bo.AID, {"lower_steps": 2, "linear_steps": 20}, "biased", SOLVE),
        (
            bo.AID,
            {"lower_steps": 100, "linear_steps": 1},
            "biased",
            "residual of the linear system is .* use more linear_steps",
        ),
        (bo.F2SA, {"lower_steps": 60, "nu": 0.3}, "biased", r"nu = 0\.3: use another nu"),
        (bo.FirstOrder, {"lower_steps": 100}, "biased", SETTINGS),
        (bo.ITD, {"lower_steps": 2}, "biased", "use more lower_steps"),
    ],
)
def test_a_report_says_in_three_lines_what_is_the_matter(cls, options, verdict, advice):
    problem = Quadratic(n=5, kappa=3.0)
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, **options)
    if verdict == "right":
        report = bo.check_hypergradient(optimizer, *problem.losses)
    else:
        with pytest.raises(bo.GradcheckError) as error:
            bo.check_hypergradient(optimizer, *problem.losses, rtol=1e-3)
        report = error.value.report
    first, second, third = str(report).splitlines()
    assert first.startswith(f"{report.verdict}")
    assert report.verdict == verdict
    assert second.startswith("reference: dense, ")
    assert re.search(advice, third)


def test_noise_that_hides_the_tolerance_is_inconclusive():
    problem = Cleaning(form="batches", n=16)
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.5, lower_steps=30)
    report = bo.check_hypergradient(optimizer, *problem.losses, rtol=1e-3, repeats=2)
    assert (report.verdict, report.repeats) == ("inconclusive", 2)
    assert "more repeats" in str(report).splitlines()[2]


def test_a_budget_leaves_out_what_it_can(monkeypatch):
    """Further repeats; further directions, without which nothing is said to be right."""
    problem = Cleaning(form="batches", n=16)
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.5, lower_steps=30)
    shown = []
    monkeypatch.setattr(TimeLimit, "show", lambda self, text: shown.append(text))

    def check_until(text):
        shown.clear()
        monkeypatch.setattr(TimeLimit, "over", property(lambda self: any(line.startswith(text) for line in shown)))
        options = {"rtol": 1e3, "repeats": 10**6, "reference": "differences", "directions": 2}
        return bo.check_hypergradient(optimizer, *problem.losses, **options)

    report = check_until("estimate 3")
    assert (report.repeats, report.verdict) == (2, "right")
    report = check_until("differences along direction 2")
    assert (report.repeats, report.verdict) == (0, "inconclusive")
    assert "time is up before the reference and two estimates were made" in report.advice
    with pytest.raises(ValueError, match="Invalid max_seconds value: 0"):
        bo.check_hypergradient(optimizer, *problem.losses, max_seconds=0)


def test_random_numbers_of_python_and_numpy_stay():
    """Also where the data draw them."""

    class Drawing:
        def __iter__(self):
            for _ in range(3):
                yield torch.tensor(random.random() + np.random.rand())  # noqa: NPY002

    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.3, lower_steps=30)
    lower = bo.Objective(lambda c: (y - x).square().sum() + (c * y).sum(), Drawing())
    before, arrays = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    bo.check_hypergradient(optimizer, lambda: y.square().sum(), lower, rtol=1e3, repeats=2)
    assert random.getstate() == before
    assert (np.random.get_state()[1] == arrays).all()  # noqa: NPY002


def test_long_work_is_shown_on_a_terminal(monkeypatch, capsys):
    """From five seconds on."""
    clock = TimeLimit()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    clock._start -= 4
    clock.show("early")
    clock._start -= 6
    clock.show("lower solve")
    clock.clear()
    shown = capsys.readouterr().err
    assert "early" not in shown
    assert shown.startswith("\rcheck_hypergradient, 10 s: lower solve")
    assert shown.endswith(" \r")


def test_nothing_is_shown_elsewhere(capsys):
    clock = TimeLimit()
    clock._start -= 10
    clock.show("lower solve")
    clock.clear()
    assert not capsys.readouterr().err


def test_a_sample_of_several_batches_is_checked_as_it_is_drawn():
    """Three batches in one sample are all the data, so the estimate is exact; one at a time it is noise."""
    A, b = torch.randn(15, 4, generator=seeded(0)).double(), torch.randn(15, generator=seeded(1)).double()
    x, y = (torch.full((4,), v, dtype=torch.float64, requires_grad=True) for v in (-1.0, 0.0))
    data = [(A[i : i + 5], b[i : i + 5]) for i in range(0, 15, 5)]

    def lower(batch):
        return (batch[0] @ y - batch[1]).square().mean() + x.exp() @ y.square()

    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.2, lower_steps=40, linear_steps=9)
    one, all_three = (
        bo.check_hypergradient(
            optimizer, lambda: (y - 1).square().sum(), bo.Objective(lower, data, accumulate=k), repeats=4
        )
        for k in (1, 3)
    )
    assert all_three.verdict == "right"
    assert all_three.std < 1e-12 * all_three.norm
    assert one.std > 0.1 * one.norm


class _Weak(torch.autograd.Function):
    """y^2 / 2 with a derivative that is 10 percent too small."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y.square() / 2

    @staticmethod
    def backward(ctx, g):
        return 0.9 * g * ctx.saved_tensors[0]


@pytest.mark.parametrize(("cls", "options"), [(bo.AID, {}), (bo.F2SA, {"nu": 1e-4}), (bo.PZOBO, {})])
@pytest.mark.parametrize("reference", ["auto", "differences"])
def test_a_wrong_lower_gradient_is_found_though_the_lower_solve_starts_where_it_is_right(cls, options, reference):
    """Differences of the solved problem do not show it, because the problem is solved by that gradient."""
    x = torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True)
    y = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    losses = lambda: (y - 1).square().sum() / 2, lambda: 0.2 * _Weak.apply(y).sum() - y @ x
    optimizer = cls([x], [y], lr=0.1, lower_lr=4.0, lower_steps=30, **options)
    with pytest.raises(GradcheckError, match=r"the lower loss's derivative in y is .* \(the likely cause .* _Weak\)"):
        bo.check_hypergradient(optimizer, *losses, reference=reference)


class _WrongSecond(torch.autograd.Function):
    """y^4 / 12 with a wrong second derivative, which is zero at y = 0."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y**4 / 12

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (y**3 / 3).detach()


@pytest.mark.parametrize("start", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_wrong_second_derivative_is_no_fault_of_a_first_order_method(start):
    A, b = torch.randn(20, 3, generator=seeded(0)).double(), torch.randn(20, generator=seeded(1)).double()
    x, y = (torch.full((3,), v, dtype=torch.float64, requires_grad=True) for v in (-1.0, start))
    losses = lambda: (y - 1).square().sum(), lambda: (A @ y - b).square().mean() + x.exp() @ _WrongSecond.apply(y)
    optimizer = bo.F2SA([x], [y], lr=0.1, lower_steps=100, nu=1e-3)
    assert bo.check_hypergradient(optimizer, *losses).verdict == "right"
    with pytest.raises(GradcheckError, match="second derivative"):
        bo.check_hypergradient(bo.AID([x], [y], lr=0.1, lower_steps=100, linear_steps=10), *losses)
