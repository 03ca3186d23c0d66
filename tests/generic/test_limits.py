"""Clipping and projection of the lower steps, and lower optimizers that misbehave."""

import functools
import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam

import bilevel_optim as bo
from bilevel_optim.solvers.limits import limits_of

from ..problems import Quadratic, close, values
from ..registry import ARGUMENTS, each

MOVED_ITSELF = ("BOME", "BOME-value")


def takes_limits(row):
    return row.declared.lower_optimizer != "none"


def scalar(start=0.0):
    return torch.tensor([3.0], requires_grad=True), torch.tensor([start], requires_grad=True)


def below_one(y):
    return [t.clamp(max=1.0) for t in y]


# ------------------------------------------------------------------------------------------------ clipping


@each(lambda row: takes_limits(row) and not row.variant)
def test_a_clip_that_is_never_reached_changes_nothing(row):
    ends = []
    for clip in (None, 1e6, ("value", 1e6)):
        problem = row.quadratic(n=5)
        problem.run(row(problem.x, problem.y, short=True, lower_clip=clip), 2)
        ends.append(values(problem.x, problem.y))
    for other in ends[1:]:
        for a, b in zip(ends[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("clip", "expected"), [(0.5, [-0.3, 0.4]), (("value", 2.0), [-2.0, 2.0])])
def test_a_lower_step_along_a_clipped_gradient(clip, expected):
    """The gradient at y = 0 is (3, -4), of norm 5."""
    x = torch.zeros(1, requires_grad=True)
    y = [torch.zeros((), requires_grad=True), torch.zeros(1, requires_grad=True)]

    def lower():
        return 3 * y[0] - 4 * y[1].sum() + x.sum() * y[1].sum()

    optimizer = bo.FirstOrder([x], y, lr=0.1, lower_lr=1.0, lower_steps=1, lower_clip=clip)
    optimizer.backward(lambda: y[1].sum() + x.sum(), lower)
    assert [float(t.detach()) for t in y] == pytest.approx(expected)
    assert optimizer.diagnostics["lower_residual"] == pytest.approx(5.0)  # of the loss, before clipping


def test_every_task_is_clipped_by_its_own_norm():
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    tasks = bo.TensorTasks(torch.tensor([[[30.0, 40.0]], [[0.03, 0.04]]]))

    def lower(batch):
        return (y * batch[0]).sum() + (x * y).sum()

    for vectorize in (True, False):
        optimizer = bo.FirstOrder(
            [x], [y], lr=0.0, lower_lr=1.0, lower_steps=1, lower_clip=1.0, warm_start=True, vectorize=vectorize
        )
        y.data.zero_()
        optimizer.backward(lambda batch: (y * x).sum() + y.sum(), lower, tasks=tasks)
        close(y.detach(), -torch.tensor([0.6 + 0.03, 0.8 + 0.04]) / 2, 1e-12)


@pytest.mark.few(5)
@pytest.mark.parametrize("clip", [0.7, ("value", 0.4)])
@pytest.mark.parametrize("optimizer", [SGD, functools.partial(SGD, momentum=0.9), Adam])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_unrolling_differentiates_the_clipping(clip, optimizer, checkpoint):
    """Against central differences of f at the end of the steps."""
    truth = by_differences(bo.ITD, lower_optimizer=optimizer, lower_clip=clip, lower_lr=0.1, checkpoint=checkpoint)
    plain = by_differences(bo.ITD, lower_optimizer=optimizer, lower_lr=0.1)
    close(truth.estimate, truth.differences, 1e-8, 1e-6)
    assert (truth.differences - plain.differences).norm() > 1e-3 * plain.differences.norm()  # the limit was reached


class by_differences:
    """The hypergradient of a few steps from y = 0, and difference quotients of f there."""

    def __init__(self, cls, steps=6, **options):
        def end(move):
            problem = Quadratic(n=6, m=3)
            with torch.no_grad():
                problem.x[0] += move
            optimizer = cls(problem.x, problem.y, lr=0.0, lower_steps=steps, **{"lower_lr": 0.1, **options})
            problem.apply(optimizer.backward)
            return problem

        self.estimate = end(torch.zeros(3)).x[0].grad
        h = 1e-6
        moves = torch.eye(3) * h
        ends = [[end(sign * move).upper().detach() for sign in (1, -1)] for move in moves]
        self.differences = torch.stack([(plus - minus) / (2 * h) for plus, minus in ends])


@pytest.mark.parametrize("clip", [1.0, ("value", 1.0)])
def test_an_infinite_gradient_is_seen_and_not_clipped(clip):
    x, y = scalar()
    optimizer = bo.F2SA([x], [y], **ARGUMENTS, lower_clip=clip)
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(lambda: (y + x).sum(), lambda: (y * torch.tensor(math.inf) + x).sum())
    assert (float(x.detach()), float(y.detach())) == (3.0, 0.0)


# ------------------------------------------------------------------------------------------------ projection


def repeated(verb, losses, times):
    for _ in range(times):
        verb(*losses)


@each(lambda row: takes_limits(row) and row.name not in MOVED_ITSELF and not row.variant)
def test_a_projection_that_does_nothing_changes_nothing(row):
    ends = []
    for projection in (None, lambda y: [t.clamp(-1e6, 1e6) for t in y]):
        problem = row.quadratic(n=5)
        problem.run(row(problem.x, problem.y, short=True, lower_projection=projection), 2)
        ends.append(values(problem.x, problem.y))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@each(lambda row: row.declared.converges and takes_limits(row) and row.name not in MOVED_ITSELF)
def test_the_hypergradient_of_a_constrained_problem(row):
    """y* = min(x, 1) entry by entry, and f = |y|^2/2 + x: no indirect part where x > 1; implicit methods refuse."""
    x, y = torch.tensor([3.0, 0.2], requires_grad=True), torch.zeros(2, requires_grad=True)

    def lower(batch=None):
        return (y - x).square().sum() / 2

    def upper(batch=None):
        return y.square().sum() / 2 + x.sum()

    losses, start = (upper, lower), [x]
    if row.declared.initial:
        start = [x, torch.zeros(2, requires_grad=True)]
    if row.declared.losses == 1:
        losses = (lambda: x.sum() - lower(),)
    arguments = {"lower_steps": 40, "lower_lr": 0.5}
    optimizer = row(start, [y], lower_projection=below_one, **arguments)
    before = values(start, [y])
    if row.declared.data == "finite_sum":
        losses = tuple(bo.FiniteSum(loss, torch.zeros(1)) for loss in losses)
    if optimizer._stationary:
        with pytest.raises(ValueError, match="lower_projection holds y"):
            repeated(optimizer.backward, losses, 60)
        if row.declared.lower_steps:
            assert all(torch.equal(a, b) for a, b in zip(before, values(start, [y]), strict=True))
        return
    repeated(optimizer.backward, losses, 2)
    if not row.declared.random or row.declared.losses == 1:
        expected = [1 - (3.0 - 1), 1.0] if row.declared.losses == 1 else [1.0, 1.0 + 0.2]
        close(x.grad, torch.tensor(expected), 1e-4)
        close(y.detach(), torch.tensor([1.0, 0.2]), 1e-3)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_unrolling_differentiates_the_projection(checkpoint):
    def ball(y):
        return [t * (0.3 / t.norm().clamp_min(0.3)) for t in y]

    truth = by_differences(bo.ITD, lower_projection=ball, checkpoint=checkpoint)
    close(truth.estimate, truth.differences, 1e-8, 1e-6)
    assert (truth.estimate - by_differences(bo.ITD).estimate).norm() > 0.1


def test_a_projection_that_hides_its_derivative_is_refused_by_unrolling():
    x, y = scalar()
    optimizer = bo.ITD([x], [y], **ARGUMENTS, lower_projection=lambda y: [t.detach().clamp(max=1.0) for t in y])
    with pytest.raises(ValueError, match="cannot be differentiated"):
        optimizer.step(lambda: y.sum(), lambda: (y - x).square().sum())


def test_a_projection_may_write_in_place_and_mix_entries_but_not_copies():
    def simplex(y):
        (t,) = y
        t.clamp_(min=0)
        t /= t.sum()
        return t

    x, y = torch.tensor([1.0, 3.0], requires_grad=True), torch.full((2,), 0.5, requires_grad=True)
    for cls, options in ((bo.F2SA, {"nu": 1e-3}), (bo.PZOBO, {"directions": 2}), (bo.ITD, {})):
        optimizer = cls([x], [y], lr=0.0, lower_lr=0.1, lower_steps=50, lower_projection=simplex, **options)
        optimizer.backward(lambda: (y * torch.tensor([1.0, 2.0])).sum(), lambda: -(x * y.log()).sum())
        assert float(y.detach().sum()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("wrong", [lambda y: None, lambda y: [y[0], y[0]], lambda y: [y[0][:1].float()]])
def test_a_projection_of_another_shape_is_refused(wrong):
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.F2SA([x], [y], **ARGUMENTS, lower_projection=wrong)
    with pytest.raises(ValueError, match="lower_projection takes the list"):
        optimizer.step(lambda: y.sum() + x.sum(), lambda: (y - x).square().sum())


@each(lambda row: row.declared.lower_optimizer == "none" and not row.variant)
def test_methods_that_make_their_lower_steps_themselves_refuse_limits(row):
    problem = row.quadratic()
    for name, value in (("lower_clip", 1.0), ("lower_projection", below_one)):
        with pytest.raises(ValueError, match=f"Invalid {name} value"):
            row(problem.x, problem.y, **{name: value})


def test_bad_limits():
    for clip in (0.0, -1.0, math.inf, math.nan, "norm", ("both", 1.0), ("norm", 0.0), ("value",), True):
        with pytest.raises(ValueError, match="Invalid lower_clip value"):
            limits_of(clip, None, interior=False)
    with pytest.raises(ValueError, match="Invalid lower_projection value: 3"):
        limits_of(None, 3, interior=False)


def test_check_hypergradient_refuses_a_projection_that_holds():
    x, y = scalar()
    optimizer = bo.ITD([x], [y], lr=0.1, lower_lr=0.5, lower_steps=20, lower_projection=below_one)
    with pytest.raises(ValueError, match="lower_projection"):
        bo.check_hypergradient(optimizer, lambda: y.square().sum(), lambda: (y - x).square().sum())


# ------------------------------------------------------------------------------------------------ unknown optimizers


class Clipped(SGD):
    """Clips gradients where nobody sees it."""

    def step(self, closure=None):
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Plain(Adam):
    """A subclass that changes nothing."""


def with_hook(when, hook):
    def make(groups):
        optimizer = SGD(groups)
        getattr(optimizer, f"register_step_{when}_hook")(lambda optimizer, *_: hook(optimizer))
        return optimizer

    return make


def clamp(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.clamp_(-1.0, 1.0)


def clip(optimizer):
    clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)


UNKNOWN = {
    "clips in its step": (Clipped, "norm"),
    "clips in a hook": (with_hook("pre", clip), "norm"),
    "clamps in a hook": (with_hook("post", clamp), "clamp"),
    "subclass": (Plain, ""),
    "looks on": (with_hook("post", lambda optimizer: None), ""),
}


@pytest.mark.parametrize(("factory", "does"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_lower_optimizers_are_checked_once(factory, does):
    x, y = scalar()

    def made(cls, **options):
        return cls([x], [y], **ARGUMENTS, lower_optimizer=factory, **options)

    cases = {bo.ITD: bool(does), bo.AID: does == "clamp", bo.SOBA: does == "clamp", bo.F2SA: does == "norm"}
    for cls, refused in cases.items():
        arguments = {name: value for name, value in ARGUMENTS.items() if name != "lower_steps" or cls is not bo.SOBA}
        if refused:
            with pytest.raises(ValueError, match="Invalid lower_optimizer value"):
                cls([x], [y], **arguments, lower_optimizer=factory)
        else:
            optimizer = cls([x], [y], **arguments, lower_optimizer=factory)
            optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())
    assert made(bo.FirstOrder)  # needs nothing of it


def test_hooks_before_a_step_see_the_gradient():
    x, y = scalar()
    optimizer = bo.AID([x], [y], lr=0.0, lower_lr=0.1, lower_steps=2, lower_optimizer=with_hook("pre", clip))
    optimizer.backward(lambda: y.sum(), lambda: 50 * (y - x).square().sum())
    assert float(y.detach()) == pytest.approx(0.2, abs=1e-6)  # two steps of norm 1


def test_a_hook_that_mixes_tasks_is_refused():
    x, y = scalar()
    optimizer = bo.AID([x], [y], **ARGUMENTS, lower_optimizer=with_hook("pre", clip))
    with pytest.raises(ValueError, match="does not update every entry independently"):
        optimizer.step(lambda t: (y - t).sum(), lambda t: (y - x).sum(), tasks=bo.TensorTasks(torch.ones(2, 1)))


class Asking(SGD):
    def step(self, closure):
        closure()
        return super().step()


class Insisting(SGD):
    def step(self, closure=None):
        assert closure is not None
        closure()
        return super().step()


@pytest.mark.parametrize("kind", [Asking, Insisting])
def test_an_unknown_optimizer_that_asks_for_gradients_gets_none_that_was_made_before(kind):
    x, y = scalar()
    with pytest.raises(ValueError, match="evaluates gradients at points of its own"):
        bo.SOBA([x], [y], lr=0.1, lower_lr=0.1, lower_optimizer=kind)
    optimizer = bo.AID([x], [y], lr=0.0, lower_lr=0.25, lower_steps=1, lower_optimizer=kind)
    optimizer.backward(lambda: y.sum(), lambda: (y - x).square().sum())
    assert float(y.detach()) == 1.5
