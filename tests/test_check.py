"""check_hypergradient tells right from wrong, and changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.gradcheck import GradcheckError

import bilevel_optim as bo

from .problems import Cleaning, Cosh, PenaltyQuadratic, Quadratic, Tasks, same, seeded, values


def check(cls, problem, steps=60, repeats=None, rtol=1e-2, reference="auto", **options):
    if not issubclass(cls, bo.RTMLMC):
        options = {"lower_lr": problem.lr, "lower_steps": steps, **options}
    optimizer = cls(problem.x, problem.y, lr=0.1, **options)
    more = {"repeats": repeats} if repeats else {}
    more |= {"tasks": problem.tasks} if problem.tasks else {}
    return bo.check_hypergradient(optimizer, *problem.losses, rtol=rtol, reference=reference, **more)


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
        (bo.F2SA, PenaltyQuadratic, 150, {"order": 2, "nu": 0.2}, SETTINGS),
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


class Doubled(torch.autograd.Function):
    """A custom function whose derivative is wrong, as users may write one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize("problem", [Quadratic, Tasks])
def test_a_wrong_derivative_is_refused(problem):
    """The differences of the objective do not use it."""
    problem = problem()
    upper = problem.upper
    problem.upper = lambda *batch: upper(*batch) + (Doubled.apply(problem.x[0]) - problem.x[0]).sum()
    with pytest.raises(bo.GradcheckError, match="off by"):
        check(bo.AID, problem, 100, linear_steps=40, reference="differences")


def test_stochastic_estimates_are_judged_by_their_mean():
    problem = Cleaning(form="batches")
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.5, lower_steps=30)
    drawn = str([o.state_dict() for o in problem.objectives])
    report = bo.check_hypergradient(optimizer, *problem.losses, rtol=1.0, repeats=8)
    assert report.repeats == 8
    assert report.std > 0
    assert report.standard_error == pytest.approx(report.std / 8**0.5)
    assert report.cosine > 0.5
    assert str([o.state_dict() for o in problem.objectives]) == drawn
    report = check(bo.PZOBO, Tasks(m=3), 20, 8, rtol=0.3, directions=8)
    assert report.std > 0
    assert report.repeats == 8
    report = check(bo.AID, Tasks(m=3), 20, 12, rtol=0.3, lower_batch=2, upper_batch=2, linear_steps=20)
    assert report.std > 0
    assert report.cosine > 0.9


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


def test_what_cannot_be_checked_says_so():
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 0.3, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=5)
    with pytest.raises(bo.GradcheckError, match="not strongly convex"):
        bo.check_hypergradient(optimizer, lambda: (y**2).sum(), lambda: (x[0] * y[0] ** 2) + 0 * y[1])
    for name, value in (("repeats", 1), ("reference", "guess")):
        with pytest.raises(ValueError, match=f"Invalid {name} value: {value}"):
            bo.check_hypergradient(optimizer, lambda: (y**2).sum(), lambda: (x * y**2).sum(), **{name: value})
    problem, rows = Tasks(), Tasks(rows=True)
    recursive = bo.SVRB(rows.x, rows.y, lr=0.1, lower_lr=0.1)
    with pytest.raises(ValueError, match="SVRB keeps y of every task: it is checked on one problem, without tasks"):
        bo.check_hypergradient(recursive, *rows.losses, tasks=rows.tasks)
    minimax = bo.GDA(problem.x, problem.y, lr=0.1, lower_lr=0.1)
    with pytest.raises(ValueError, match="GDA has one loss"):
        bo.check_hypergradient(minimax, problem.upper, tasks=problem.tasks)
    with pytest.raises(TypeError, match="tasks must be a sampler"):
        bo.check_hypergradient(optimizer, *problem.losses, tasks=[1, 2])


def test_large_lower_problems_are_checked_by_differences():
    """More lower variables than a dense Hessian is made for, in float32, with random probes."""
    torch.set_default_dtype(torch.float32)
    X, t, head = torch.randn(60, 40), torch.randint(0, 3, (60,)), torch.randn(20, 3)
    model, x = nn.Linear(40, 20, bias=False), torch.zeros(60, requires_grad=True)

    def lower():
        losses = F.cross_entropy(model(X) @ head, t, reduction="none")
        return (x.sigmoid() * losses).mean() + 0.1 * model.weight.square().sum()

    def upper():
        return F.cross_entropy(model(-X) @ head, t)

    good, hasty = (
        bo.AID([x], model.parameters(), lr=0.1, lower_lr=0.15, lower_steps=200, linear_steps=n) for n in (40, 1)
    )
    assert bo.check_hypergradient(good, upper, lower, rtol=5e-2, directions=2).reference == "differences"
    with pytest.raises(bo.GradcheckError, match=SETTINGS):
        bo.check_hypergradient(hasty, upper, lower, rtol=5e-2, directions=3)


# ---------------------------------------------------------------------------------------------------- tasks


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
    """Two of six tasks per step: another draw for the reference would be far off."""
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
