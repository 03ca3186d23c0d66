"""Problems with x are reported once: a growing loss, a diverged run, an update made twice."""

import io
import pickle
import warnings
from functools import partial

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.optimizer.progress import UpperTrend, watch_losses

from ..problems import Quadratic, seeded

STEPS = {"AID": {"lower_steps": 5}, "ITD": {"lower_steps": 5}, "F2SA": {"lower_steps": 1, "normalize": False},
         "SOBA": {}, "FSLA": {}, "StocBiO": {"lower_steps": 1}, "FirstOrder": {"lower_steps": 1}}  # fmt: skip


def made(name, lr, **options):
    problem = Quadratic(6, 3, 5.0)
    y = problem.y[0]
    f = lambda: (y - 1).square().sum() + problem.x[0].square().sum()  # noqa: E731
    optimizer = getattr(bo, name)(problem.x, problem.y, lr=lr, **STEPS[name], **options)
    return optimizer, f, problem.lower


def repeated(optimizer, f, g, steps):
    for _ in range(steps):
        optimizer.step(f, g)


@pytest.mark.usually("False", "SOBA-True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["AID", "SOBA"])
def test_a_growing_loss_is_reported_once_and_its_end_explained(name, compiled):
    optimizer, f, g = made(name, 30.0)
    if compiled:
        optimizer.compile(backend="eager")
    with pytest.warns(bo.BilevelWarning, match=r"the upper loss has grown from .* diverges\. Use a smaller lr") as told:
        repeated(optimizer, f, g, 6)
    assert len([one for one in told if "has grown from" in str(one.message)]) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(bo.NonFiniteError, match=r"The run has diverged: the upper loss has grown"):
            repeated(optimizer, f, g, 600)


@pytest.mark.parametrize("name", STEPS)
def test_every_method_reports_a_rate_that_is_too_large(name):
    optimizer, f, g = made(name, 100.0)
    with pytest.warns(bo.BilevelWarning, match="the upper loss has grown"):
        repeated(optimizer, f, g, 20)


@pytest.mark.parametrize("options", [{}, {"upper_optimizer": torch.optim.SGD}], ids=["own", "SGD"])
@pytest.mark.parametrize(
    ("lr", "text"),
    [(10.0, r"x goes past a minimum and back: step 20 .* is too large"), (1e4, "the upper loss has grown")],
)
def test_oscillating_steps_of_fixed_length_are_reported(lr, text, options):
    """Normalised steps that are too long: the upper loss is large, and grows no more."""
    optimizer, f, g = made("F2SA", lr, **options)
    optimizer.normalize = True
    with pytest.warns(bo.BilevelWarning, match=text) as told:
        repeated(optimizer, f, g, 40)
    assert len(told) == 1


@pytest.mark.filterwarnings("error")
def test_short_steps_around_a_minimum_give_no_warning():
    optimizer, f, g = made("F2SA", 0.1)
    optimizer.normalize = True
    repeated(optimizer, f, g, 60)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", STEPS)
def test_a_healthy_run_gives_no_warning(name):
    """Also with losses that are noisy, change their sign or end near zero."""
    optimizer, f, g = made(name, 0.01)
    noise = torch.Generator().manual_seed(0)
    for shift in (0.0, -3.0):
        for _ in range(40):
            factor = 1 + torch.rand((), generator=noise) * 2
            optimizer.step(lambda factor=factor, shift=shift: f() * factor + shift, g)


def told_of_growth(losses, lr):
    """Optimizer steps after which it was said that the upper loss has grown."""
    return worse(losses, lr, said="the upper loss has grown")


def worse(losses, lr=1.0, slope=30.0, said="makes the upper loss worse"):
    """Optimizer steps after which it was said that the run makes the upper loss worse."""
    optimizer, _, g = made("SOBA", lr)
    optimizer.check_derivatives = False  # the values are given, whatever the slope
    (x,), (y,), found = optimizer.parameters("upper"), optimizer.parameters("lower"), []
    for i, loss in enumerate(losses):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.step(lambda loss=loss: slope * (x - x.detach()).sum() + 0 * y.sum() + loss, g)
        found += [i + 1 for one in told if said in str(one.message)]
    return found


def test_a_run_that_makes_the_loss_worse_is_reported_once():
    noise = torch.rand(120, generator=torch.Generator().manual_seed(0)).tolist()
    slow = [10.0 + n + 1.05**i for i, n in enumerate(noise)]
    assert len(worse(slow)) == 1
    assert not worse(slow, lr=1e-6)  # x has not done that
    swings = [1.0, 2.0, 3.0, 1e6, *(1e4 * (1 + n) * 0.97**i for i, n in enumerate(noise[:60]))]
    assert worse(swings) == [60]


def test_a_loss_that_stays_above_the_first_window_is_reported():
    high = 25 * [1.0, 1.5] + 60 * [3.0]
    assert worse(high) == [100]
    assert not worse(high, lr=1e-6)  # x has not done that
    assert not worse(25 * [1.0, 1.5] + 60 * [2.0])


def test_a_first_move_that_is_far_too_long_is_reported():
    jump = [1.0, 1e6, 1e5, *(100 * 0.9**i for i in range(5))]
    assert told_of_growth(jump, lr=1e4) == [3]
    assert not told_of_growth(jump, lr=1.0)  # y has done that


def test_a_loss_that_rises_while_y_is_solved_is_not_reported():
    assert not worse([1 - 5 * 0.98**i for i in range(120)])
    assert not worse([1.0] + 119 * [9.0])
    assert not worse([1e-9, 1e-6, 1e-5] + 117 * [1e-3])


def test_noise_is_not_said_to_make_the_loss_worse():
    generator = torch.Generator().manual_seed(0)
    for kind in range(3):
        draws = torch.randn(100, generator=generator)
        losses = (1 + draws.abs(), draws, (2 * draws).exp())[kind].tolist()
        assert not worse([min(losses), *losses])  # the first one is the best of all


def test_a_control_that_does_not_move_x_is_reported():
    """f depends on x only through y, a dependence that FirstOrder ignores."""
    optimizer, _, g = made("FirstOrder", 0.1)
    y = optimizer.parameters("lower")[0]
    with pytest.warns(bo.BilevelWarning, match=r"x does not move: the upper loss depends on x only through y"):
        repeated(optimizer, lambda: (y - 1).square().sum(), g, 21)


@pytest.mark.parametrize("at_once", [False, True])
def test_weights_whose_derivative_is_zero_at_the_start_are_reported(at_once):
    """The derivative of clamp is zero at its edge: all weights are zero, and stay so."""
    weights, y = (torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    losses = lambda: (y - 1).square().sum(), lambda: (weights.clamp(min=0) * (y - 1).square() + (y - 2).square()).sum()
    for start, told in ((-1e-3, True), (1e-3, False)):
        with torch.no_grad():
            weights.fill_(start)
        optimizer = bo.AID([weights], [y], lr=1e-3, lower_lr=0.1, lower_steps=2)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if at_once:
                optimizer.run(*losses, steps=25)
            else:
                repeated(optimizer, *losses, 25)
        assert ["hypergradient was exactly zero in each of the first 20" in str(w.message) for w in seen] == [
            True
        ] * told


def test_in_a_run_of_many_steps_too():
    optimizer, f, g = made("SOBA", 30.0)
    optimizer.compile(backend="eager")
    with pytest.warns(bo.BilevelWarning, match="the upper loss has grown"):
        optimizer.run(f, g, steps=8)


def test_an_update_made_twice_is_reported():
    optimizer, f, g = made("AID", 0.01)
    adam = torch.optim.Adam(optimizer.parameters("upper"), lr=0.01)
    optimizer.backward(f, g)
    torch.nn.utils.clip_grad_norm_(optimizer.parameters("upper"), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.step()  # along the same .grad once more
        optimizer.backward(f, g)
        adam.step()
        optimizer.backward(f, g)
        adam.step()
    with pytest.warns(bo.BilevelWarning, match=r"x has changed between backward\(\) and step\(\)"):
        optimizer.step()


@pytest.mark.parametrize("way", ["step", "run", "compiled run", "closure"])
def test_a_step_along_the_gradient_of_a_whole_step_is_reported(way):
    optimizer, f, g = made("SOBA", 0.01)
    if way == "compiled run":
        optimizer.compile(backend="eager")
    whole = {
        "step": lambda: optimizer.step(f, g),
        "closure": lambda: optimizer.step(f, g),
        "run": lambda: optimizer.run(f, g, steps=2),
        "compiled run": lambda: optimizer.run(f, g, steps=12),
    }[way]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole()
        optimizer.zero_grad()
        f().backward(inputs=optimizer.parameters("upper"))  # another gradient, perhaps in the same place
        optimizer.step()
        whole()
        optimizer.backward(f, g)
        optimizer.step()
        if way != "closure":
            whole()
    with pytest.warns(bo.BilevelWarning, match="moves x once more along the hypergradient of the last step"):
        optimizer.step(whole if way == "closure" else None)


@pytest.mark.usually("steps", "dtype0-run-Adam")
@pytest.mark.parametrize("upper_optimizer", [None, torch.optim.Adam])
@pytest.mark.parametrize("way", ["steps", "compiled", "run"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rate_that_moves_nothing_is_reported_once(way, upper_optimizer, dtype):
    """In single precision x stays where it is bit for bit."""
    problem = Quadratic(6, 3, 5.0, dtype=dtype)
    y = problem.y[0]
    options = {} if upper_optimizer is None else {"upper_optimizer": upper_optimizer}
    optimizer = bo.AID(problem.x, problem.y, lr=1e-11, lower_steps=1, linear_steps=1, **options)
    f = lambda: (y - 1).square().sum() + (problem.x[0] - 2).square().sum()  # noqa: E731
    if way != "steps":
        optimizer.compile(backend="eager")
    advance = (
        partial(optimizer.run, f, problem.lower) if way == "run" else partial(repeated, optimizer, f, problem.lower)
    )
    with pytest.warns(bo.BilevelWarning, match=r"x hardly moves: step 20 .* lr=1e-11 is too small") as told:
        advance(steps=50)
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.few(2)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", ["lr of zero", "solved", "small", "does not depend on x"])
def test_an_intentionally_still_run_gives_no_warning(case):
    problem = Quadratic(6, 3, 5.0)
    y = problem.y[0]
    target = problem.solution()[0].clone() if case == "solved" else torch.ones(())
    optimizer = bo.AID(problem.x, problem.y, lr={"lr of zero": 0.0, "small": 1e-6}.get(case, 1e-11), lower_steps=50)
    nothing = 0.0 if case == "does not depend on x" else 1.0
    repeated(optimizer, lambda: (nothing * (y - target)).square().sum() + 1, problem.lower, 25)


@pytest.mark.filterwarnings("error")
def test_a_run_that_has_ended_at_a_loss_of_zero_gives_no_warning():
    """Only rounding errors are left, which are large compared with the loss."""
    x, y = (torch.tensor(t, dtype=torch.float32, requires_grad=True) for t in ([2.0], [0.0, 0.0, 0.0]))
    optimizer = bo.AID([x], [y], lr=0.527284, lower_steps=10, linear_steps=10)
    curvature = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float32)
    repeated(optimizer, lambda: (y - 1).square().sum() / 2, lambda: (curvature * (y - x).square()).sum() / 2, 22)


@pytest.mark.parametrize("tolerances", [{}, {"tolerance_grad": 0, "tolerance_change": 0}])
def test_lower_lbfgs_without_effect_is_reported(tolerances):
    """Its tolerances are absolute, and the lower loss is small."""
    x, y = torch.ones(5, requires_grad=True), torch.zeros(5, requires_grad=True)
    below = partial(torch.optim.LBFGS, max_iter=1, line_search_fn="strong_wolfe", **tolerances)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=1.0, lower_steps=1, lower_optimizer=below)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        repeated(
            optimizer, lambda: (y - 2).square().sum() + x.square().sum(), lambda: 1e-6 * (y - x).square().sum(), 22
        )
    found = [str(one.message) for one in told if "LBFGS did not move y in step 20" in str(one.message)]
    assert len(found) == (not tolerances)
    assert bool(y.any()) == bool(tolerances)


def test_a_loss_that_comes_down_ends_a_row_of_growing_ones():
    """Two in a row, each above the one before: 400 and 500 with a smaller one between them are none."""
    early, trend = [1.0, 1.1, 0.9] * 4, UpperTrend()
    assert not any(trend.note_loss(loss) for loss in (*early, 400.0, 350.0, 500.0, 450.0))
    trend = UpperTrend()
    assert [trend.note_loss(loss) for loss in (*early, 400.0, 500.0)][-2:] == [False, True]


@pytest.mark.parametrize("where", [(61, 62), (55, 70)])
@pytest.mark.parametrize("rise", [0.0, 0.5, 4000.0])
@pytest.mark.parametrize("first", [2.0, 0.4])
def test_many_losses_at_once_are_noted_as_one_by_one(first, rise, where):
    later = torch.rand(89, generator=seeded(0), dtype=torch.float64)
    losses = torch.cat([torch.tensor([first], dtype=torch.float64), later])
    losses[where[0]] += rise
    losses[where[1]] += 1.01 * rise
    ends = []
    for size in (1, 7, 32, 90):
        trend, told, count = UpperTrend(), set(), 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for some in losses.split(size):
                count += len(some)
                watch_losses(trend, told, count, some, lambda: None)
        ends.append((trend, told))
    assert ends[1:] == ends[:-1]
    assert bool(ends[0][1]) == (rise > 1 and where == (61, 62))


@pytest.mark.parametrize("slope", [-0.02, 0.0, 0.02])
def test_usual_losses_pass_by_the_long_way_with_the_same_result(slope):
    losses = (1 + torch.rand(200, generator=seeded(0)) + slope * torch.arange(200)).tolist()
    long, short, passed = UpperTrend(), UpperTrend(), 0
    for at in range(0, 200, 25):
        for loss in losses[at : at + 25]:
            long.note_loss(loss)
            long.describe_rise(loss)
        some, done = losses[at : at + 25], 0
        while (end := short.usual(some, done)) < len(some):
            passed += end - done
            short.note_loss(some[end])
            short.describe_rise(some[end])
            done = end + 1
        passed += end - done
        assert short == long
    assert 0 < passed < 200


@pytest.mark.parametrize("method", ["SOBA", "FirstOrder"])
def test_a_lower_parameter_that_is_no_longer_reached_is_reported_once(method):
    x, y = torch.ones(2, requires_grad=True), [torch.zeros(2, requires_grad=True) for _ in range(2)]
    reached = [0, 1]

    def lower():
        return torch.stack([(y[i] - x).square().sum() for i in reached]).sum()

    options = {"lower_lr": 0.1, **STEPS[method]}
    optimizer = getattr(bo, method)([x], y, lr=0.01, **options)
    upper = lambda: (y[0] - 1).square().sum() + x.square().sum() + y[1].sum()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(upper, lower)
    reached.pop()
    with pytest.warns(bo.BilevelWarning, match="no evaluation of the .* depended on lower parameter 1"):
        optimizer.step(upper, lower)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(upper, lower)


def test_a_lower_parameter_that_one_evaluation_of_a_step_reaches_is_not_reported():
    x, y = torch.ones(2, requires_grad=True), [torch.zeros(2, requires_grad=True) for _ in range(2)]
    batches = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])] * 2

    def lower(batch):
        parts = [weight * (t - x).square().sum() for weight, t in zip(batch, y, strict=True) if weight]
        return torch.stack(parts).sum()

    optimizer = bo.FirstOrder([x], y, lr=0.01, lower_lr=0.1, lower_steps=2)
    objective = bo.Objective(lower, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.step(lambda: (y[0] - 1).square().sum() + x.square().sum() + y[1].sum(), objective)


def test_zeros_and_a_gradient_of_ones_own_after_a_whole_step_move_x_without_a_warning(recwarn):
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2)
    for _ in range(2):
        optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())
        optimizer.zero_grad(set_to_none=False)
        x.square().sum().backward()
        optimizer.step()
    assert not recwarn.list
    optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())
    with pytest.warns(bo.BilevelWarning, match="moves x once more"):
        optimizer.step()


@pytest.mark.parametrize("verb", ["step", "run"])
def test_an_optimizer_is_pickled_and_saved_after_a_whole_step(verb):
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2)
    options = {"steps": 2} if verb == "run" else {}
    getattr(optimizer, verb)(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum(), **options)
    again = pickle.loads(pickle.dumps(optimizer))
    torch.testing.assert_close(again.param_groups[0]["params"][0], x)
    torch.save(optimizer, io.BytesIO())


@pytest.mark.parametrize("way", ["copied", "clipped", "assigned"])
def test_what_is_said_of_a_gradient_that_was_changed_after_a_whole_step_is_true(way):
    """One that was written into .grad by copy_ was called the hypergradient of the last step."""
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2)
    optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())
    if way == "copied":
        x.grad.copy_(torch.ones(2))
    elif way == "clipped":
        torch.nn.utils.clip_grad_norm_([x], 0.1)
    else:
        x.grad = torch.ones(2)
    if way == "assigned":
        optimizer.step()
        return
    with pytest.warns(bo.BilevelWarning, match="of the last step, which has been changed in place since") as told:
        optimizer.step()
    assert "along the hypergradient" not in str(told[0].message)
