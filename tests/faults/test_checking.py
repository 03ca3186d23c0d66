"""Wrong reports of `check_hypergradient`, and side effects of it and of `suggest`."""

import random
import re
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bilevel_optim as bo

from ..problems import Quadratic, seeded
from ..test_verdicts import Wrong


def quadratic(kappa, n=12, m=2):
    problem = Quadratic(n=n, m=m, kappa=kappa)
    return problem, bo.AID(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=20, linear_steps=20)


@pytest.mark.parametrize("cls", [bo.AID, bo.FirstOrder, bo.ITD])
@pytest.mark.parametrize("reference", ["dense", "implicit", "differences"])
def test_a_solve_that_time_has_ended_decides_nothing(cls, reference):
    """It must not count as the solution: differences, and with them all errors, would be 0."""
    problem = Quadratic(n=8, m=3)
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=20)
    report = bo.check_hypergradient(optimizer, *problem.losses, reference=reference, max_seconds=1e-9)
    assert report.verdict == "inconclusive"
    assert "max_seconds" in report.advice
    assert "time is up" in str(report)


@pytest.mark.usually("implicit")
@pytest.mark.parametrize("reference", ["implicit", "differences"])
def test_an_unsolved_lower_problem_is_no_reference(reference):
    problem, optimizer = quadratic(1e13)
    with pytest.raises(bo.GradcheckError, match="there is no reference: the lower problem could not be solved") as told:
        bo.check_hypergradient(optimizer, *problem.losses, reference=reference)
    assert "penalty" in str(told.value)


@pytest.mark.usually("1000.0")
@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e5])
def test_a_badly_conditioned_lower_problem_is_solved_for_differences(kappa):
    """A problem reported as solved is solved: the norm is that of the closed form."""
    problem, optimizer = quadratic(kappa)
    truth = problem.hypergradient()[0]
    try:
        report = bo.check_hypergradient(optimizer, *problem.losses, reference="differences", rtol=1e9)
    except bo.GradcheckError as error:
        assert "could not be solved" in str(error)  # noqa: PT017
        assert kappa > 1e4
    else:
        assert report.norm == pytest.approx(float(truth.norm()), rel=1e-4)


@pytest.mark.few(5)
@pytest.mark.parametrize("distance", [0.0, 1e-9, 1e-6, 1e-4, 1e-3])
@pytest.mark.parametrize("place", ["x in f", "y in f", "x in g", "y in g"])
def test_kinks_near_the_point_are_no_faults(place, distance):
    """Differences across a rectifier's kink are not its derivative."""
    x = torch.full((3,), distance).requires_grad_()
    y = torch.full((3,), 0.5).requires_grad_()

    def upper():
        loss = (y - 1).square().sum() / 2 + x.square().sum() + x.sum()
        if place == "x in f":
            loss = loss + x.relu().sum()
        return loss + (y - 0.5).relu().sum() if place == "y in f" else loss

    def lower():
        bent = x.relu() if place == "x in g" else x
        loss = (y - 0.5 - bent).square().sum() / 2
        return loss + 0.1 * (y - 0.5).relu().square().sum() if place == "y in g" else loss

    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.5, lower_steps=60, linear_steps=20)
    report = bo.check_hypergradient(optimizer, upper, lower)
    assert report.verdict in ("right", "inconclusive")
    if report.verdict == "inconclusive":
        assert "kink" in report.advice


@pytest.mark.usually("2")
@pytest.mark.filterwarnings("ignore:the lower Hessian is not positive definite")  # it need not be
@pytest.mark.parametrize("seed", range(4))
def test_rectifiers_are_no_faults(seed):
    """A network has kinks everywhere."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    rows, x = torch.randn(30, 4), torch.zeros(4, requires_grad=True)

    def lower():
        penalty = sum(p.square().sum() for p in net.parameters())
        return (net(rows * (1 + x))[:, 0] - rows.sum(1)).square().mean() + 0.3 * penalty

    optimizer = bo.AID([x], net.parameters(), lr=0.1, lower_lr=0.05, lower_steps=400, linear_steps=60)
    try:
        bo.check_hypergradient(optimizer, lambda: (net(rows)[:, 0] - 1).square().mean(), lower, rtol=1e3, repeats=2)
    except bo.GradcheckError as error:
        assert "no reference" in str(error)  # noqa: PT017


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [5.0, 1000.0])
def test_the_lower_loss_may_be_undefined_at_some_y(start, dtype):
    """g = x y - log y: a line search that steps to y < 0 must come back from there, to y = 1 / x."""
    x = torch.ones(1, dtype=dtype, requires_grad=True)
    y = torch.full((3,), start, dtype=dtype, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=3, linear_steps=10)
    with pytest.raises(bo.GradcheckError, match=r"\(0 from the exact lower solution(.|\n)*norm 6,"):
        bo.check_hypergradient(optimizer, lambda: (y - 2).square().sum(), lambda: (x * y - y.log()).sum())


class Drawing:
    """Data that draw from Python's and NumPy's random numbers."""

    def __iter__(self):
        for _ in range(3):
            yield torch.tensor(random.random() + np.random.rand())  # noqa: NPY002


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return float(i)


@pytest.mark.few(2)
@pytest.mark.parametrize("drawn", [0, 2])
@pytest.mark.parametrize("tool", ["check", "suggest"])
def test_loaders_with_persistent_workers_stay_where_they_are(tool, drawn):
    """Their only iterator restarts with every `iter`."""
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)

    def made():
        loader = DataLoader(Rows(), 1, shuffle=True, num_workers=1, persistent_workers=True, generator=seeded(3))
        return bo.Objective(lambda c: (y - x).square().sum() + (c * y).sum(), loader)

    lower, twin = made(), made()
    for objective in (lower, twin):
        for _ in range(drawn):
            objective.draw()
    if tool == "check":
        optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.3, lower_steps=30)
        bo.check_hypergradient(optimizer, lambda: y.square().sum(), lower, rtol=1e3, repeats=2)
    else:
        bo.suggest([x], [y], lambda: y.square().sum(), lower, methods=["SOBA"], max_seconds=0.3)
    ahead, expected = ([float(o.draw().batch) for _ in range(8)] for o in (lower, twin))
    assert ahead == expected


def test_suggest_moves_no_random_numbers():
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    lower = bo.Objective(lambda c: (y - x).square().sum() + (c * y).sum(), Drawing())
    before, arrays, torchs = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    bo.suggest([x], [y], lambda: y.square().sum(), lower, methods=["SOBA"], max_seconds=0.3)
    assert random.getstate() == before
    assert (np.random.get_state()[1] == arrays).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torchs)


@pytest.mark.usually("dense-lower", "differences-upper")
@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("reference", ["dense", "differences"])
def test_faults_of_equal_entries_are_found(reference, level, request):
    """A direction of signs is orthogonal to them half of the time."""
    for seed in range(12 if request.config.getoption("--slow") else 4):
        torch.manual_seed(seed)
        x, y = torch.randn(4).requires_grad_(), torch.zeros(4, requires_grad=True)
        extra = {level: lambda x=x, y=y: x.detach().sum() * (1 + (y.sum() if level == "lower" else 0))}
        none = lambda: 0.0  # noqa: E731
        upper, lower = extra.get("upper", none), extra.get("lower", none)
        optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.5, lower_steps=60, linear_steps=20)
        with pytest.raises(bo.GradcheckError, match=f"the {level} loss's"):
            bo.check_hypergradient(
                optimizer,
                lambda x=x, y=y, more=upper: (y - 1).square().sum() / 2 + x.square().sum() + more(),
                lambda x=x, y=y, more=lower: (y - x).square().sum() / 2 + more(),
                reference=reference,
                directions=1,
            )


@pytest.mark.usually("dense")
@pytest.mark.parametrize("reference", ["dense", "differences"])
def test_a_wrong_loss_is_named_rather_than_nu(reference):
    """The derivatives of g in x that a first-order method takes are checked too."""
    x, y = torch.randn(4).requires_grad_(), torch.zeros(4, requires_grad=True)
    optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.5, lower_steps=80)
    with pytest.raises(bo.GradcheckError, match="the lower loss's derivative in x"):
        bo.check_hypergradient(
            optimizer,
            lambda: (y - 1).square().sum() / 2,
            lambda: (y - x.detach()).square().sum() / 2 + 0.1 * (x * y).sum(),
            reference=reference,
        )


def test_nu_is_blamed_only_where_another_one_helps():
    problem = Quadratic(n=5, kappa=3.0)
    kinds = {"lr": 0.1, "lower_lr": problem.lr}
    optimizer = bo.F2SA(problem.x, problem.y, lower_steps=60, nu=0.3, **kinds)
    with pytest.raises(bo.GradcheckError, match=r"nu = 0\.3: use another nu, such as 0\.075") as told:
        bo.check_hypergradient(optimizer, *problem.losses, rtol=1e-3)
    assert optimizer.nu == 0.3
    error = told.value.report.relative_error
    found = float(re.search(r"with which the error is at most (\S+)", told.value.report.advice)[1])
    optimizer.nu = 0.075
    with pytest.raises(bo.GradcheckError) as told:
        bo.check_hypergradient(optimizer, *problem.losses, rtol=1e-3)
    assert told.value.report.relative_error == pytest.approx(found, rel=0.05)
    assert found < 0.3 * error
    hasty = bo.F2SA(problem.x, problem.y, lower_steps=1, nu=1e-3, **kinds)
    with pytest.raises(bo.GradcheckError, match=r"not nu = 0\.001"):
        bo.check_hypergradient(hasty, *problem.losses)


def test_faults_that_a_method_does_not_meet_are_none_of_its_own():
    """PZOBO takes no derivative of g in x, and neither does its reference."""
    x, y = torch.randn(4).requires_grad_(), torch.zeros(4, requires_grad=True)
    optimizer = bo.PZOBO([x], [y], lr=0.1, lower_lr=0.5, lower_steps=27, directions=8)
    report = bo.check_hypergradient(
        optimizer, lambda: (y - 1).square().sum() / 2, lambda: (y - x.detach()).square().sum() / 2 + 0 * x.sum()
    )
    assert (report.reference, report.verdict == "biased") == ("differences", False)


class Slow(torch.autograd.Function):
    """The identity, which takes a tenth of a second."""

    @staticmethod
    def forward(ctx, t):
        time.sleep(0.1)
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("data", [None, range(500)])
def test_the_clock_is_read_within_a_solve_and_names_what_may_be_wrong(data):
    """All evaluations would take minutes."""
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    lower = bo.Objective(lambda *batch: (Slow.apply(y) - x).cosh().sum(), data)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=100)
    seconds = 1 if data is None else 0.3
    report = bo.check_hypergradient(optimizer, lambda: y.square().sum(), lower, max_seconds=seconds)
    assert report.verdict == "inconclusive"
    assert report.repeats == 0
    assert data is not None or "Slow" in report.advice


@pytest.mark.parametrize("name", ["AID", "F2SA"])
def test_the_operation_with_a_wrong_derivative_is_named(name):
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = getattr(bo, name)([x], [y], lr=0.1, lower_lr=0.1, lower_steps=5)
    losses = lambda: (y - 1).square().sum(), lambda: (y - Wrong.apply(x)).square().sum()
    with pytest.raises(bo.GradcheckError, match=r"the likely cause is the operation Wrong\)"):
        bo.check_hypergradient(optimizer, *losses)
    with pytest.raises(bo.DerivativeError, match=r"The likely cause is the operation Wrong\."):
        optimizer.step(*losses)


def test_parameters_in_channels_last_are_checked():
    """torch's LBFGS, which solves the lower problem, refuses gradients that are not contiguous."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(2, 3, 2, bias=False).double().to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    x, images = torch.zeros((), dtype=torch.float64, requires_grad=True), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    optimizer = bo.AID([x], [model.weight], lr=0.1, lower_steps=100, linear_steps=40)
    report = bo.check_hypergradient(
        optimizer,
        lambda: (model(images) - 1).square().mean(),
        lambda: (model(images) + 1).square().mean() + x.exp() * model.weight.square().sum(),
    )
    assert report.bias < 1e-6
