"""Tools of torch for its optimizers work with these: schedulers, hooks, scaling, averages, compilation."""

from importlib import import_module

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import bilevel_optim as bo

from ..problems import same, values
from ..registry import each

TOOLED = ("AID", "F2SA", "SOBA", "RAHGD", "RSVRB", "MAML")
STEPS = 3
CALLS = {
    "losses": lambda problem, optimizer: problem.run(optimizer),
    "closure": lambda problem, optimizer: optimizer.step(closure=lambda: problem.apply(optimizer.backward)),
    "backward, step": lambda problem, optimizer: (problem.apply(optimizer.backward), optimizer.step())[0],
}


def made(row, module=None, **options):
    """A problem, whose tensors may become the parameters of a module, and an optimizer."""
    problem = row.quadratic()
    if module is not None:
        module(problem)
    return problem, row(problem.x, problem.y, short=True, **options)


def ended(row, advance, **options):
    """Losses and parameters after some steps, each made by ``advance(problem, optimizer)``."""
    problem, optimizer = made(row, **options)
    losses = [advance(problem, optimizer) for _ in range(STEPS)]
    return [*losses, *values(problem.x, problem.y)]


def plain(row, **options):
    return ended(row, lambda problem, optimizer: problem.run(optimizer), **options)


@each(TOOLED)
@pytest.mark.parametrize("how", ["keyword", "positional"])
def test_a_closure_that_calls_backward_is_a_step(row, how):
    def advance(problem, optimizer):
        closure = lambda: problem.apply(optimizer.backward)  # noqa: E731
        return optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)

    assert same(ended(row, advance), plain(row))
    problem, optimizer = made(row)
    with pytest.raises(TypeError, match="a closure or losses"):
        optimizer.step(*problem.losses, closure=lambda: None)
    with pytest.raises(TypeError, match="takes both losses"):  # a loss alone is no closure
        optimizer.step(problem.losses[0])
    problem.apply(optimizer.backward)
    assert optimizer.step(closure=lambda: None) is None  # as Lightning gives one where the user gave none


@pytest.mark.few(2)
@each(TOOLED)
def test_a_compiled_step_is_a_step(row):
    problem, optimizer = made(row)
    step = torch.compile(optimizer.step)
    optimizer.step = step
    ended = [problem.run(optimizer) for _ in range(STEPS)]
    assert same([*ended, *values(problem.x, problem.y)], plain(row))

    problem, optimizer = made(row)

    @torch.compile
    def train():
        loss = problem.apply(optimizer.backward)
        optimizer.step()
        return loss

    ended = [train() for _ in range(STEPS)]
    assert same([*ended, *values(problem.x, problem.y)], plain(row))

    problem, optimizer = made(row)
    step = torch.compile(optimizer.step)
    ended = [step(closure=lambda: problem.apply(optimizer.backward)) for _ in range(STEPS)]
    assert same([*ended, *values(problem.x, problem.y)], plain(row))


@each(TOOLED)
def test_scaled_losses(row):
    """The scaled upper loss gives scaled gradients, which the scaler divides; it skips what overflowed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    problem, optimizer = made(row)
    upper = problem.upper
    problem.upper = lambda *batch: scaler.scale(upper(*batch))
    for _ in range(STEPS):
        problem.apply(optimizer.backward)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    # To a penalty method a scaled upper loss is one with that penalty.
    penalty = {"nu": row.options["nu"] * 2.0**10} if "nu" in row.options else {}
    expected = plain(row, **penalty)[STEPS:]
    for got, want in zip(values(problem.x, problem.y), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    before = values(problem.x)
    problem.apply(optimizer.backward)
    problem.x[0].grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert same(before, values(problem.x))
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: problem.apply(optimizer.backward))


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda k: 0.9**k, lambda k: 1.0]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01),
}


def test_no_scheduler_of_torch_is_left_out():
    offered = {
        name for name in lr_scheduler.__all__ if isinstance(getattr(lr_scheduler, name), type) and name != "LRScheduler"
    }
    assert offered <= SCHEDULERS.keys()


@pytest.mark.few(20)
@pytest.mark.parametrize("name", SCHEDULERS)
@each(TOOLED)
def test_schedulers(row, name):
    """Each sets the rates that it sets for torch's SGD, and a step uses them as if they had been set by hand."""
    (problem, optimizer), (again, by_hand) = made(row), made(row)
    twin = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 0.1}, {"params": [torch.zeros(1)], "lr": 0.1}])
    schedulers = [SCHEDULERS[name](o) for o in (optimizer, twin)]
    seen = []
    for call in (*CALLS.values(), CALLS["losses"]):
        seen.append([group["lr"] for group in twin.param_groups])
        for group, rate in zip(by_hand.param_groups, seen[-1], strict=True):
            group["lr"] = rate
        losses = [call(problem, optimizer), again.run(by_hand)]
        assert same([*losses[:1], *values(problem.x, problem.y)], [*losses[1:], *values(again.x, again.y)])
        twin.step()
        for scheduler in schedulers:
            scheduler.step(*([float(losses[0])] if name == "ReduceLROnPlateau" else []))
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in twin.param_groups]
    assert len({*map(tuple, seen)}) > 1 or name in ("ReduceLROnPlateau", "ConstantLR")


MOMENTUM = {
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
}


@pytest.mark.parametrize("name", MOMENTUM)
@each(TOOLED)
def test_schedulers_of_momentum_need_some(row, name):
    with pytest.raises(ValueError, match="momentum"):
        MOMENTUM[name](made(row)[1])


@each(TOOLED)
def test_averaged_weights(row):
    """``swa_utils`` averages what the steps leave, of both levels."""
    problem, optimizer = made(row)
    model = torch.nn.ParameterList([*problem.x, *problem.y])
    averaged, seen = swa_utils.AveragedModel(model), []
    for call in CALLS.values():
        call(problem, optimizer)
        averaged.update_parameters(model)
        seen.append(values(problem.x, problem.y))
    for average, *each_step in zip(averaged.module.parameters(), *seen, strict=True):
        torch.testing.assert_close(average.detach(), torch.stack(each_step).mean(0))


def test_averaged_weights_and_batch_norm():
    """``swa_utils`` averages what the steps leave, buffers included, and recomputes running statistics."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    data = torch.randn(32, 4)
    decay = torch.zeros(1, requires_grad=True)
    optimizer = bo.SOBA([decay], model.parameters(), lr=0.1, lower_lr=0.1)
    averaged, seen = swa_utils.AveragedModel(model, use_buffers=True), []
    for _ in range(STEPS):
        optimizer.step(
            lambda: (model(data) - 1).square().mean(),
            lambda: model(data).square().mean() + decay.exp().sum() * sum(p.square().sum() for p in model.parameters()),
        )
        averaged.update_parameters(model)
        seen.append(values(model.parameters()))
    for average, *each_step in zip(averaged.module.parameters(), *seen, strict=True):
        torch.testing.assert_close(average.detach(), torch.stack(each_step).mean(0))
    swa_utils.update_bn([data], averaged)
    assert torch.allclose(averaged.module[1].running_mean, averaged.module[0](data).mean(0))


@each(TOOLED)
def test_step_hooks_see_every_way_to_step(row):
    problem, optimizer = made(row)
    calls = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))
    problem.run(optimizer)
    optimizer.step(closure=lambda: problem.apply(optimizer.backward))
    problem.apply(optimizer.backward)
    optimizer.step()
    assert calls == ["pre", "post"] * 3


# A step's ranges in a profile, besides torch's own "Optimizer.step#...".
RANGES = {
    "AID": {"draw", "lower solve", "linear solve", "cross product"},
    "F2SA": {"draw", "lower solve"},
    "SOBA": {"draw", "cross product"},
}


@each(tuple(RANGES))
def test_a_profile_names_the_parts_of_a_step(row):
    problem = row.cleaning("batches")
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer)
    with torch.profiler.profile() as profile:
        problem.run(optimizer)
    names = {event.key for event in profile.key_averages()}
    assert {name.removeprefix("bilevel_optim.") for name in names if "bilevel_optim." in name} == RANGES[row.name]
    assert f"Optimizer.step#{row.cls.__name__}.step" in names


@each(TOOLED)
def test_the_representation_shows_levels_and_arguments(row):
    _, optimizer = made(row)
    text = repr(optimizer)
    assert text.startswith(f"{row.cls.__name__}(")
    for i, group in enumerate(optimizer.param_groups):
        assert f"({i}) {group['level']}: {sum(p.numel() for p in group['params'])} numbers" in text
    assert "bilevel" not in text


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_one_hook_alone_is_called(when, everywhere):
    """No other is there that would let torch's own wrapper in."""
    x, y = (torch.zeros(1, requires_grad=True) for _ in range(2))
    optimizer, calls = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1), []
    if everywhere:
        register = getattr(import_module("torch.optim.optimizer"), f"register_optimizer_step_{when}_hook")
    else:
        register = getattr(optimizer, f"register_step_{when}_hook")
    handle = register(lambda *_: calls.append(when))
    try:
        optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())
    finally:
        handle.remove()
    assert calls == [when]
