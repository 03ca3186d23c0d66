"""check_hypergradient tells right from wrong, and changes nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.gradcheck import GradcheckError
from torch.utils.data import DataLoader, TensorDataset

import bilevel_optim as bo

from .problems import Cleaning, Cosh, PenaltyQuadratic, Quadratic


def check(cls, problem, steps=200, reference="auto", rtol=1e-2, **options):
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=steps, **options)
    return bo.check_hypergradient(optimizer, problem.upper, problem.lower, rtol=rtol, reference=reference)


@pytest.mark.parametrize("reference", ["dense", "differences"])
def test_reports_the_closed_form_errors(reference):
    tolerance = 1e-9 if reference == "dense" else 1e-8
    report = check(bo.AID, Quadratic(), linear_steps=40, reference=reference)
    assert report.relative_error < tolerance
    assert report.cosine == pytest.approx(1.0, abs=1e-9)
    assert report.std == 0.0
    assert report.repeats == 2
    assert report.reference == reference
    problem = Quadratic()
    assert report.norm == pytest.approx(float(problem.hypergradient()[0].norm()), rel=tolerance)

    problem = PenaltyQuadratic()
    truth, nu = problem.hypergradient()[0], 0.05
    predicted = problem.predicted((-1, 1), nu)
    report = check(bo.F2SA, problem, 400, reference=reference, rtol=1.0, nu=nu)
    assert report.bias == pytest.approx(float((predicted - truth).norm()), rel=1e-3)
    assert report.relative_error == pytest.approx(float((predicted - truth).norm() / truth.norm()), rel=1e-3)


@pytest.mark.parametrize(
    ("cls", "problem", "steps", "options", "cause"),
    [
        (bo.AID, Quadratic, 2, {"linear_steps": 40}, "lower solve is the cause"),
        (bo.ITD, Quadratic, 2, {}, "estimator's own settings"),
        (bo.AID, Quadratic, 200, {"linear_steps": 1}, "estimator's own settings"),
        (bo.AID, Quadratic, 200, {"linear_steps": 40, "damping": 5.0}, "estimator's own settings"),
        (bo.AID, Quadratic, 200, {"linear_solver": "neumann", "linear_steps": 3}, "estimator's own settings"),
        (bo.FirstOrder, Quadratic, 200, {}, "estimator's own settings"),
        (bo.F2SA, Cosh, 200, {"order": 1, "nu": 0.2}, "estimator's own settings"),
        (bo.F2SA, PenaltyQuadratic, 400, {"order": 2, "nu": 0.2}, "estimator's own settings"),
    ],
)
def test_a_bad_setting_is_refused_with_its_cause(cls, problem, steps, options, cause):
    with pytest.raises(bo.GradcheckError, match=cause) as error:
        check(cls, problem(), steps, **options)
    assert cls.__name__ in str(error.value)
    assert isinstance(error.value, GradcheckError)


def test_a_wrong_hypergradient_is_refused():
    """A method with a sign error, as this library's users may write one."""

    class Wrong(bo.AID):
        def _estimate(self, oracle):
            estimate = super()._estimate(oracle)
            direct = torch.autograd.grad(self.upper(), oracle.x)[0]
            estimate.gradient = bo.Vector([2 * direct - estimate.gradient[0]])
            return estimate

    problem = Quadratic()
    Wrong.upper = staticmethod(problem.upper)
    with pytest.raises(bo.GradcheckError, match="cosine"):
        check(Wrong, problem, linear_steps=40)


def test_stochastic_estimates_are_judged_by_their_mean():
    problem = Cleaning()

    def loader(n):
        return DataLoader(TensorDataset(torch.arange(n)), batch_size=15, shuffle=True)

    upper = bo.Objective(lambda batch: problem.upper(batch[0]), loader(30))
    lower = bo.Objective(lambda batch: problem.lower(batch[0]), loader(30))
    optimizer = bo.AID([problem.weights], problem.model.parameters(), lr=0.1, lower_lr=0.5, lower_steps=40)
    drawn = upper.state_dict(), lower.state_dict()
    report = bo.check_hypergradient(optimizer, upper, lower, rtol=0.5, repeats=12)
    assert report.repeats == 12
    assert report.std > 0
    assert report.standard_error == pytest.approx(report.std / 12**0.5)
    assert report.cosine > 0.5
    assert (upper.state_dict(), lower.state_dict()) == drawn


def test_changes_nothing():
    problem = Cleaning()
    for cls, options in ((bo.AID, {}), (bo.F2SA, {"order": 2})):
        optimizer = cls(
            [problem.weights],
            problem.model.parameters(),
            lr=0.1,
            lower_lr=0.3,
            lower_steps=100,
            lower_optimizer=torch.optim.SGD,
            **options,
        )
        optimizer.step(problem.upper, problem.lower)
        everything = (problem.weights, problem.weights.grad, *problem.model.parameters())
        before = [t.detach().clone() for t in everything]
        state, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
        bo.check_hypergradient(optimizer, problem.upper, problem.lower, rtol=10.0)
        after = (problem.weights, problem.weights.grad, *problem.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(p.grad is None for p in problem.model.parameters())
        assert str(state) == str(optimizer.state_dict())
        assert torch.equal(random, torch.get_rng_state())
        expected = copy.deepcopy((problem, optimizer))
        optimizer.step(problem.upper, problem.lower)
        twin, other = expected
        other_upper = bo.Objective(twin.upper)
        assert other_upper.data is None
        assert other.oracle_counts["upper_grad"] > 0


def test_no_reference_is_an_error():
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 0.3, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=5)
    with pytest.raises(bo.GradcheckError, match="not strongly convex"):
        bo.check_hypergradient(optimizer, lambda: (y**2).sum(), lambda: (x[0] * y[0] ** 2) + 0 * y[1])
    with pytest.raises(ValueError, match="Invalid repeats value: 1"):
        bo.check_hypergradient(optimizer, lambda: (y**2).sum(), lambda: (x * y**2).sum(), repeats=1)
    with pytest.raises(ValueError, match="Invalid reference value: guess"):
        bo.check_hypergradient(optimizer, lambda: (y**2).sum(), lambda: (x * y**2).sum(), reference="guess")


def test_large_lower_problems_are_checked_by_differences():
    """More lower variables than a dense Hessian is made for, in float32, with random probes."""
    torch.set_default_dtype(torch.float32)
    X, t = torch.randn(60, 40), torch.randint(0, 3, (60,))
    model = nn.Linear(40, 20, bias=False)
    head = torch.randn(20, 3)
    x = torch.zeros(60, requires_grad=True)

    def lower():
        losses = F.cross_entropy(model(X) @ head, t, reduction="none")
        return (x.sigmoid() * losses).mean() + 0.1 * model.weight.square().sum()

    def upper():
        return F.cross_entropy(model(-X) @ head, t)

    optimizer = bo.AID([x], model.parameters(), lr=0.1, lower_lr=0.1, lower_steps=500, linear_steps=60)
    report = bo.check_hypergradient(optimizer, upper, lower, rtol=5e-2, directions=3)
    assert report.reference == "differences"
    hasty = bo.AID([x], model.parameters(), lr=0.1, lower_lr=0.1, lower_steps=500, linear_steps=1)
    with pytest.raises(bo.GradcheckError, match="estimator's own settings"):
        bo.check_hypergradient(hasty, upper, lower, rtol=5e-2, directions=6)
