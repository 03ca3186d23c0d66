"""Any torch optimizer for x, and for y with its own rate, does the same under every verb as on its own."""

from functools import partial

import pytest
import torch
from torch.optim import LBFGS, SGD, Adafactor, Adam, RMSprop
from torch.optim.lr_scheduler import StepLR

import bilevel_optim as bo

from ..problems import Scalar, close, seeded
from ..registry import each

LOSSES = "upper", "lower"
ALLOWED = each(lambda row: not row.declared.upper_update)


def quick(**options):
    """Two scalars; the lower one follows the upper one."""
    x, y = torch.tensor([2.0, -1.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    arguments = {"lr": 0.1, "lower_lr": 0.5, "lower_steps": 2, **options}
    method = arguments.pop("method", bo.AID)
    optimizer = method([x], [y], **{name: value for name, value in arguments.items() if value is not None})
    return optimizer, x, y, (lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)


@ALLOWED
def test_a_step_is_that_of_the_optimizer_after_backward(row):
    one, two = row.cleaning(), row.cleaning()
    a = row(one.x, one.y, short=True, generator=seeded(1), lr=0.05, upper_optimizer=partial(Adam, betas=(0.5, 0.8)))
    b = row(two.x, two.y, short=True, generator=seeded(1))
    if "normalize" in dir(a):
        assert not a.normalize
    adam = Adam(two.x, lr=0.05, betas=(0.5, 0.8))
    for _ in range(3):
        loss = one.run(a)
        assert torch.equal(loss, two.apply(b.backward))
        adam.step()
    for p, q in zip(one.parameters, two.parameters, strict=True):
        close(p.detach(), q.detach(), 1e-14, 1e-12)
    assert a.oracle_counts == b.oracle_counts
    for p, q in zip(one.x, two.x, strict=True):
        close(a.state[p]["upper_optimizer.exp_avg_sq"], adam.state[q]["exp_avg_sq"], 0, 1e-10)
        assert float(a.state[p]["upper_optimizer.step"]) == 3


@each(lambda row: row.declared.upper_update)
def test_methods_whose_update_of_x_is_the_method_refuse(row):
    problem = row.quadratic(n=4, m=2)
    with pytest.raises(
        ValueError, match=f"Invalid upper_optimizer value: .*{row.cls.__name__} has its own update of x: .+; leave"
    ):
        row.cls(problem.x, problem.y, lr=0.1, lower_lr=0.1, upper_optimizer=Adam, **({} if not row.declared.lower_steps
                else {"lower_steps": 1}))  # fmt: skip


@pytest.mark.parametrize("verb", ["step", "backward and step", "closure", "run", "groups", "copied"])
def test_every_verb(verb):
    factory = partial(Adam, amsgrad=True)
    optimizer, x, _y, losses = quick(upper_optimizer=factory)
    other, x_other, _, losses_other = quick()
    adam = Adam([x_other], lr=0.1, amsgrad=True)
    for _ in range(4):
        if verb == "backward and step":
            optimizer.backward(*losses)
            optimizer.step()
        elif verb == "closure":
            optimizer.step(closure=lambda: optimizer.backward(*losses))
        elif verb == "run":
            optimizer.run(*losses, steps=1)
        else:
            optimizer.step(*losses)
        other.backward(*losses_other)
        adam.step()
    assert torch.equal(x, x_other)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"maximize": True},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_steps_of_sgd_are_torchs_bit_for_bit(options, dtype):
    start = torch.linspace(-1, 2, 7, dtype=dtype)
    found = []
    for inside in (True, False):
        x, y = start.clone().requires_grad_(), torch.zeros_like(start).requires_grad_()
        own = {"upper_optimizer": partial(SGD, **options)} if inside else {}
        optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.3, lower_steps=3, **own)
        sgd = SGD([x], lr=0.1, **options)
        losses = (lambda y=y: (y - 1).square().sum() / 2), (lambda x=x, y=y: (start.cos() + 2) @ (y - x).square() / 2)
        for _ in range(6):
            if inside:
                optimizer.step(*losses)
            else:
                optimizer.backward(*losses)
                sgd.step()
        found.append(x.detach())
    assert torch.equal(*found)


def test_rates_and_options_of_groups_are_their_own():
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    y = torch.zeros(2, requires_grad=True)
    groups = [{"params": [a]}, {"params": [b], "lr": 0.5}, {"params": [c], "betas": (0.0, 0.5)}]
    optimizer = bo.AID(groups, [y], lr=0.1, lower_lr=0.5, lower_steps=1, upper_optimizer=Adam)
    twins = [t.detach().clone().requires_grad_() for t in (a, b, c)]
    adam = Adam(
        [{"params": [twins[0]]}, {"params": [twins[1]], "lr": 0.5}, {"params": [twins[2]], "betas": (0.0, 0.5)}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        optimizer.step(lambda: (y - 3).square().sum(), lambda: (y - a * b - c).square().sum())
        for twin, p in zip(twins, (a, b, c), strict=True):
            twin.grad = p.grad.clone()
        adam.step()
        scheduler.step()
        for group in adam.param_groups:
            group["lr"] *= 0.5
    assert all(torch.equal(t, p) for t, p in zip(twins, (a, b, c), strict=True))


SGD_OPTIONS = ({"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.5}, {"maximize": True})


@pytest.mark.usually("at first", "added", "set later", "loaded", "compiled-momentum-nesterov")
@pytest.mark.parametrize("options", SGD_OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("when", ["at first", "added", "set later", "compiled", "loaded"])
def test_options_of_sgd_in_groups_count_without_an_upper_optimizer(options, when):
    """As for the lower groups, and in ``torch.optim.SGD``."""
    a, b = torch.ones(2, requires_grad=True), torch.full((2,), 2.0, requires_grad=True)
    y = torch.zeros(2, requires_grad=True)
    losses = (lambda: (y - 3).square().sum(), lambda: (y - a * b).square().sum())
    steps = {"lower_steps": 1, "linear_steps": 1}  # the Hessian is 2 I
    late = {} if when in ("set later", "compiled") else options
    optimizer = bo.AID([{"params": [a]}, {"params": [b], **late}][: 1 + (when != "added")], [y], lr=0.1, **steps)
    if when == "added":
        optimizer.add_param_group({"params": [b], "level": "upper", **options})
    if when == "loaded":
        state = optimizer.state_dict()
        optimizer = bo.AID([{"params": [a]}, {"params": [b]}], [y], lr=0.1, **steps)
        optimizer.load_state_dict(state)
    if when == "compiled":
        optimizer.compile(backend="eager")
        optimizer.step(*losses)
        optimizer.step(*losses)
    if late != options:
        optimizer.param_groups[1].update(options)
    twins = [t.detach().clone().requires_grad_() for t in (a, b)]
    sgd = SGD([{"params": [twins[0]]}, {"params": [twins[1]], **options}], lr=0.1)
    for _ in range(3):
        optimizer.step(*losses)
        for twin, p in zip(twins, (a, b), strict=True):
            twin.grad = p.grad.clone()
        sgd.step()
    for twin, p in zip(twins, (a, b), strict=True):
        close(p.detach(), twin.detach(), 1e-6)


def test_options_of_sgd_count_in_a_step_of_x_alone():
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_steps=2)
    optimizer.backward(lambda: (y - 3).square().sum(), lambda: (y - x).square().sum())
    expected = x.detach() - 0.1 * (x.grad + 0.5 * x.detach())
    optimizer.param_groups[0]["weight_decay"] = 0.5
    optimizer.step()
    close(x.detach(), expected, 1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_option_of_sgd_that_is_deleted_no_longer_counts(compiled):
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.05, lower_lr=0.1, lower_steps=2)
    if compiled:
        optimizer.compile(backend="eager")
    for decay in (None, None, 0.5, 0.5, None, None, None):
        optimizer.param_groups[0].pop("weight_decay", None)
        optimizer.param_groups[0].update({} if decay is None else {"weight_decay": decay})
        before = x.detach().clone()
        optimizer.step(lambda: (y - 3).square().sum(), lambda: (y - x).square().sum())
        close(x.detach(), before - 0.05 * (x.grad + (decay or 0.0) * before), 1e-6)


def test_options_of_sgd_in_groups_are_refused_where_the_method_makes_the_steps():
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    message = r"Invalid weight_decay value: 0.5 .RAHGD has its own update of x: .*; leave weight_decay out of the upper"
    with pytest.raises(ValueError, match=message):
        bo.RAHGD([{"params": [x], "weight_decay": 0.5}], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    with pytest.raises(ValueError, match=r"momentum value: 0.9 .SVRB has its own update of y; leave momentum out"):
        bo.SVRB([x], [{"params": [y], "momentum": 0.9}], lr=0.1, lower_lr=0.1)
    optimizer = bo.SVRB([x], [{"params": [y], "weight_decay": 0.0}], lr=0.1, lower_lr=0.1)
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match=r"Invalid maximize value: True .SVRB has its own update of x"):
        optimizer.step(lambda: y.square().sum(), lambda: (y - x).square().sum())


@pytest.mark.parametrize("option", [{"weight_decay": 0.5}, {"maximize": True}, {"dampening": 0.5}])
def test_options_that_nesterovs_method_lacks_are_refused_in_lower_groups(option):
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    rates = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 2}
    message = f"Invalid {next(iter(option))} value: .*RAHGD has its own update of y: Nesterov's method"
    with pytest.raises(ValueError, match=message):
        bo.RAHGD([x], [{"params": [y], **option}], **rates)
    optimizer = bo.RAHGD([x], [y], **rates)
    optimizer.param_groups[1].update(option)
    with pytest.raises(ValueError, match=message):
        optimizer.step(lambda: y.square().sum(), lambda: (y - x).square().sum())
    of_sgd = bo.RAHGD([x], [{"params": [y], "nesterov": True, "momentum": 0.5}], lower_optimizer=SGD, **rates)
    assert of_sgd.param_groups[1]["nesterov"]


def _lower_end(group, **options):
    """Return y after a step of RAHGD with these options of the lower group and of the optimizer."""
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.RAHGD([x], [{"params": [y], **group}], lr=0.1, lower_lr=0.1, lower_steps=3, **options)
    optimizer.step(lambda: y.square().sum(), lambda: (y - x).square().sum())
    return y.detach()


def test_a_group_may_have_its_own_momentum_of_nesterovs_method():
    assert torch.equal(_lower_end({"momentum": 0.5}), _lower_end({}, lower_momentum=0.5))


def test_a_tensor_without_a_gradient_stays():
    optimizer, x, _, losses = quick(upper_optimizer=Adam)
    idle = torch.ones(1, requires_grad=True)
    optimizer.add_param_group({"params": [idle], "level": "upper"})
    optimizer.step(*losses)
    optimizer.backward(*losses)
    idle.grad = None
    before, moved = idle.detach().clone(), x.detach().clone()
    optimizer.step()
    assert torch.equal(idle, before)
    assert not torch.equal(x, moved)
    assert float(optimizer.state[x]["upper_optimizer.step"]) == 2
    assert float(optimizer.state[idle]["upper_optimizer.step"]) == 1


@pytest.mark.parametrize("level", LOSSES)
@pytest.mark.parametrize("method", [bo.AID, bo.ITD])
def test_differentiable_updates_are_the_same(method, level):
    """ITD asks for an optimizer with this argument; torch's steps of leaf tensors fail with it."""
    ends = []
    for option in ({}, {"differentiable": True}):
        class_of, rate = partial(Adam, **option), {"lr": 0.1, "lower_lr": 0.1, "method": method}
        optimizer, x, y, losses = quick(**rate, **{f"{level}_optimizer": class_of})
        for _ in range(3):
            optimizer.step(*losses)
        ends.append((x, y))
    assert all(map(torch.equal, *ends))


# ---------------------------------------------------------------------------------------------------- learning rates


def test_the_rate_is_that_of_the_optimizer_where_lr_is_left_out():
    for factory, rate in ((Adam, 1e-3), (lambda g: Adam(g, lr=0.25), 0.25), (partial(RMSprop, lr=0.03), 0.03)):
        optimizer, *_ = quick(lr=None, upper_optimizer=factory)
        assert [group["lr"] for group in optimizer.param_groups] == [rate, 0.5]
        if factory is Adam:  # nobody has set it, and the measured rate is not for it
            continue
        optimizer, *_ = quick(lower_lr=None, lower_optimizer=factory)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, rate]


def test_a_rate_that_the_lower_optimizer_sets_is_the_one_that_it_has():
    """It was replaced by ``lower_lr``, without a word."""
    optimizer, _, y, losses = quick(lower_lr=None, lower_steps=1, lower_optimizer=lambda g: Adam(g, lr=1e-3))
    optimizer.backward(*losses)
    close(y.detach().abs(), torch.full((2,), 1e-3), 0, 1e-4)


SETTING = [lambda g: Adam(g, lr=1e-3), partial(Adam, lr=1e-3), lambda g: SGD(g, lr=0.2, momentum=0.9),
           lambda g: Adam([{**group, "lr": 0.7} for group in g])]  # fmt: skip


@pytest.mark.parametrize("factory", SETTING)
@pytest.mark.parametrize("level", LOSSES)
def test_two_rates_that_differ_are_refused(level, factory):
    name = "lr" if level == "upper" else "lower_lr"
    with pytest.raises(ValueError, match=f"Invalid {name} value: 0.1 .the {level}_optimizer sets lr="):
        quick(**{name: 0.1, f"{level}_optimizer": factory})


@pytest.mark.parametrize("level", LOSSES)
def test_rates_that_agree_or_that_nobody_sets_are_taken(level):
    name = "lr" if level == "upper" else "lower_lr"
    for rate, factory in (
        (1e-3, lambda g: Adam(g, lr=1e-3)),
        (0.1, lambda g: Adam(g, weight_decay=0.0, eps=1e-3)),  # its default happens to be written for another option
        (0.1, partial(SGD, momentum=0.5)),
        (0.1, Adam),
    ):
        optimizer, *_ = quick(**{name: rate, f"{level}_optimizer": factory})
        assert optimizer.param_groups[LOSSES.index(level)]["lr"] == rate


def test_invalid_upper_optimizers_are_refused():
    with pytest.raises(TypeError, match="AID: missing a required argument: 'lr'"):
        quick(lr=None)
    for cls in (bo.GDA, bo.RAHGD, bo.PRAHGD, bo.RAGDA, bo.PRAGDA, bo.iMCN):
        with pytest.raises(TypeError, match=f"{cls.__name__}: missing a required argument: 'lower_lr'"):
            cls([torch.zeros(1, requires_grad=True)], [torch.zeros(1, requires_grad=True)], lr=0.1, lower_steps=1)
    for factory, name in ((LBFGS, "LBFGS"), (partial(bo.AGD, momentum=0.5), "AGD")):
        with pytest.raises(ValueError, match=f"Invalid upper_optimizer value: {name} evaluates gradients at points"):
            quick(upper_optimizer=factory)
    with pytest.raises(ValueError, match=r"Invalid upper_optimizer value: Adam \([\s\S]*pass the class, or a function"):
        quick(upper_optimizer=Adam([torch.zeros(1, requires_grad=True)]))
    for level in ("upper", "lower"):
        name = f"{level}_optimizer"
        with pytest.raises(TypeError, match=rf"{name} must return a torch\.optim\.Optimizer, but returned list"):
            quick(**{name: lambda groups: list(groups)})
        for scheduler in (StepLR, partial(StepLR, step_size=3)):
            with pytest.raises(
                TypeError, match=f"{name} must make an optimizer from parameter groups alone, but raised"
            ):
                quick(**{name: scheduler})


# ---------------------------------------------------------------------------------------------------- captured steps


class Mine(SGD):
    """Moves x by signs."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


def compiled_beside_eager(steps, **options):
    (one, x, y, losses), (two, x2, y2, losses2) = quick(**options), quick(**options)
    one.compile(backend="eager")
    for k in range(steps):
        for optimizer in (one, two):
            optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
        close(one.step(*losses), two.step(*losses2), 1e-6)
    one.run(*losses, steps=6), two.run(*losses2, steps=6)
    close(x.detach(), x2.detach(), 1e-5)
    close(y.detach(), y2.detach(), 1e-5)
    assert [*one.state[x]] == [*two.state[x2]]
    for name, value in two.state[x2].items():
        close(one.state[x][name], value, 1e-5)
    return one


@pytest.mark.usually("Adam-ITD")
@pytest.mark.parametrize("method", [bo.AID, bo.ITD, bo.F2SA])
@pytest.mark.parametrize("factory", [Adam, partial(SGD, momentum=0.9)])
def test_its_update_is_part_of_the_graph(method, factory):
    optimizer = compiled_beside_eager(12, method=method, upper_optimizer=factory)
    assert optimizer.captured_graphs > 0
    assert "compile_fallback" not in optimizer.diagnostics


@pytest.mark.usually("RMSprop")
@pytest.mark.parametrize("factory", [Mine, Adafactor, RMSprop])
def test_an_update_that_cannot_be_compiled_follows_the_graph(factory):
    optimizer = compiled_beside_eager(12, upper_optimizer=factory)
    assert optimizer.captured_graphs > 0
    assert f"the upper_optimizer {factory.__name__} cannot be" in optimizer.diagnostics["compile_fallback"]


def test_tasks():
    tasks = bo.TensorTasks(torch.randn(6, 4, 2, generator=seeded(0)))
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.ITD(
        [x], [y], lower_lr=0.1, lower_steps=3, upper_optimizer=lambda g: Adam(g, lr=0.3), tasks_per_step=3
    )
    losses = [
        optimizer.step(
            lambda batch: (y - batch).square().mean(),
            lambda batch: (y - batch).square().mean() + (y - x).square().sum(),
            tasks=tasks,
        )
        for _ in range(20)
    ]
    assert losses[-1] < losses[0]
    assert float(optimizer.state[x]["upper_optimizer.step"]) == 20


def test_the_scalar_problem_is_solved():
    problem = Scalar()
    optimizer = bo.AID(problem.x, problem.y, lower_lr=problem.lr, lower_steps=5, upper_optimizer=partial(Adam, lr=0.1))
    problem.run(optimizer, 200)
    assert float(problem.x[0].detach()) == pytest.approx(1 / 0.7, abs=1e-3)  # (x/2 - 1)/2 + x/10 = 0
