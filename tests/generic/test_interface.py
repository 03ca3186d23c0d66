"""Every method is a ``torch.optim.Optimizer``: groups, schedulers, kinds of parameters, refused arguments."""

import inspect

import pytest
import torch
from torch import nn

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import REGISTRY, methods

from ..problems import Quadratic, close, flat, same, seeded, values
from ..registry import ALIKE, ARGUMENTS, ERRORS, REPRESENTATIVES, ROWS, SETTINGS, each, rows


def test_every_public_method_has_a_row():
    public = {value for value in vars(bo).values() if inspect.isclass(value) and issubclass(value, bo.BilevelOptimizer)}
    assert {row.cls for row in ROWS} == public - {bo.BilevelOptimizer} == set(methods().values())


def test_a_method_that_is_defined_here_has_rows_too(monkeypatch):
    try:

        class Newcomer(bo.AID):
            declared = bo.AID.declared

        monkeypatch.setitem(SETTINGS, "Newcomer", SETTINGS["AID"])
        found = {row.name: row for row in rows() if row.cls is Newcomer}
        assert found.keys() == {row.name.replace("AID", "Newcomer") for row in ROWS if row.cls is bo.AID}
        test_step_is_backward_then_step(found["Newcomer"])
    finally:
        del REGISTRY["Newcomer"]


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name, bad in ERRORS.items() for argument in bad])
def test_bad_arguments_are_refused(name, argument):
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    own = {k: v for k, v in ARGUMENTS.items() if getattr(bo, name).declared.lower_steps or k != "lower_steps"}
    for value in ERRORS[name][argument]:
        shown = getattr(value, "__name__", "AGD" if callable(value) else value)
        with pytest.raises(ValueError, match=f"^Invalid {argument} value: ") as error:
            getattr(bo, name)([x], [y], **{**own, argument: value})
        assert str(shown) in str(error.value)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("AID", {"lr": -0.1}, r"Invalid learning rate: -0\.1"),
        ("AID", {"lr": float("nan")}, "Invalid learning rate: nan"),
        ("F2SA", {"order": 2, "stencil": "centred"}, "Invalid stencil value: centred"),
        ("F2SA", {"order": 3, "stencil": "central"}, "Invalid stencil value: central"),
        ("RAHGD", {"lower_momentum": 0.5, "lower_optimizer": torch.optim.Adam}, "Invalid lower_momentum value: 0.5"),
        ("RAGDA", {"lower_momentum": 0.5, "lower_optimizer": torch.optim.Adam}, "Invalid lower_momentum value: 0.5"),
        ("RTMLMC", {"lower_optimizer": torch.optim.Adam}, "the lower solver is EpochSGD"),
        ("SVRB", {"lower_optimizer": torch.optim.Adam}, "the lower steps are part of the recursion"),
        ("RSVRB", {"beta": {"u": 0.1, "V": 0.2}, "variant": "exact_mean"}, "needs equal weights"),
        ("RSVRB", {"variant": "matrix_free", "ceilings": {"V": 1.0}}, "Invalid ceilings value"),
    ],
)
def test_bad_combinations_are_refused(name, arguments, message):
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    own = {} if name in ("RTMLMC", "SVRB", "RSVRB") else {"lower_steps": 3}
    with pytest.raises(ValueError, match=message):
        getattr(bo, name)([x], [y], **{"lr": 0.1, "lower_lr": 0.1, **own, **arguments})


@each(lambda row: not row.variant)
def test_made_like_an_optimizer(row):
    x, y, z = (torch.zeros(2, requires_grad=True) for _ in range(3))
    optimizer = row([{"params": [x], "lr": 0.5}, {"params": [z]}], iter([y]))
    assert [(g["level"], g["lr"]) for g in optimizer.param_groups] == [("upper", 0.5), ("upper", 0.1), ("lower", 0.1)]
    text = repr(optimizer)
    assert text.startswith(row.cls.__name__)
    own = "" if row.declared.upper_update else "SGD, "
    assert f"(1) upper: 2 numbers in 1 tensor, {own}lr=0.1" in text
    x.grad = torch.ones(2)
    optimizer.zero_grad()
    assert x.grad is None
    assert isinstance(optimizer, torch.optim.Optimizer)
    with pytest.raises(TypeError, match="lower_momentums"):
        row([x], [y], lower_momentums=0.9)


@each(lambda row: not row.variant)
def test_step_is_backward_then_step(row):
    one, two = row.cleaning(), row.cleaning()
    a, b = (row(p.x, p.y, short=True, generator=seeded(1)) for p in (one, two))
    for _ in range(2):
        loss, before = one.run(a), values(two.x)
        assert torch.equal(loss, two.apply(b.backward))
        assert same(before, values(two.x))
        assert b.step() is None
    assert same(values(one.parameters), values(two.parameters))
    assert not same(before, values(two.x))
    assert a.oracle_counts == b.oracle_counts
    assert set(a.oracle_counts) == {"upper_grad", "lower_grad", "hvp", "jvp", "loss"}
    assert set(a.diagnostics) >= {"hypergradient_norm", "lower_residual"}


# The others have steps of many sizes, or one for all contexts.
@each(lambda row: row.declared.solves and not (row.declared.initial or row.declared.tasks == "required" or row.variant))
def test_schedulers_move_both_levels(row):
    problem = row.quadratic(n=5)
    options = {"warm_start": True, **ALIKE.get(row.name, {})}
    optimizer = row(problem.x, problem.y, lr=1.0, lower_lr=0.1, lower_steps=1, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 0.0, lambda k: 10.0**-k])
    x, moves = values(problem.x), []
    for _ in range(3):
        y, (slope,) = values(problem.y)[0], torch.autograd.grad(problem.lower(), problem.y)
        problem.run(optimizer)
        moves.append(-float((problem.y[0].detach() - y) @ slope / slope.square().sum()))
        scheduler.step()
    assert moves == pytest.approx([0.1, 0.01, 0.001], rel=2e-2)
    # Perturbations are no part of the update.
    close(problem.x[0].detach(), x[0], 1e-2 if row.name == "iMCN" else 1e-11)


@each(lambda row: not (row.declared.initial or row.variant))
def test_added_groups_take_part(row):
    problem = row.cleaning()
    rate, bias = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer)
    optimizer.add_param_group({"params": [rate], "level": "upper"})
    optimizer.add_param_group({"params": [bias], "level": "lower", "lr": 0.2})
    upper, *lower = problem.objectives
    before = values(problem.y)
    if lower:
        problem.objectives = [
            lambda *batch: upper(*batch) + (bias**2).sum(),
            lambda *batch: lower[0](*batch) + ((bias - rate - 1) ** 2).sum(),
        ]
    else:
        problem.objectives = [lambda: upper() - ((bias - rate - 1) ** 2).sum() + bias.sum() + rate.square().sum()]
    problem.run(optimizer, 1 if row.declared.lower_steps else 3)  # where all moves together, x learns of it later
    assert bias.detach().abs().min() > 0 or row.declared.tasks == "required"  # where y stays
    assert (rate.detach().abs().min() > 0) == (row.name not in ("FirstOrder",))
    assert not same(before, values(problem.y)) or row.declared.tasks == "required"
    with pytest.raises(ValueError, match="Invalid level value: None"):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


@each(lambda row: row.declared.tasks != "required" and row.declared.losses == 2 and not row.declared.initial)
def test_parameters_may_be_frozen_for_some_steps(row):
    """A frozen tensor stays, the others move, and it moves again afterwards, in each level."""
    x, y = ([torch.full((n,), start, requires_grad=True) for n in (3, 2)] for start in (0.5, 0.0))
    optimizer = row(x, y, short=True)

    def upper():
        return sum((p - 1).square().sum() for p in y) + 0.1 * sum(p.square().sum() for p in x)

    def lower():
        return sum((q - p).square().sum() for p, q in zip(x, y, strict=True)) / 2

    optimizer.step(upper, lower)
    for level in (x, y):
        level[1].requires_grad_(False)
        before = values(x + y)
        for _ in range(3):
            optimizer.step(upper, lower)
        moved = [not torch.equal(p, q) for p, q in zip(before, x + y, strict=True)]
        assert moved == [p.requires_grad for p in x + y]
        level[1].requires_grad_(True)
        for _ in range(3):
            optimizer.step(upper, lower)
        assert not torch.equal(before[1 if level is x else 3], level[1])


@each(lambda row: not row.variant)
def test_named_frozen_and_tied_parameters(row):
    problem = row.cleaning(tied=True)
    frozen, before = torch.zeros(2), values(problem.x)
    upper, lower = (
        [(f"{z}{i}", p) for i, p in enumerate(ps)] for z, ps in (("x", [frozen, *problem.x]), ("y", problem.y))
    )
    optimizer = row(upper, lower, short=True)
    assert optimizer.param_groups[1]["param_names"] == [f"y{i}" for i in range(len(problem.y))]
    problem.run(optimizer)
    assert frozen.grad is None
    # With one loss x are the tied weights, with two the weights of the examples that they are fitted to.
    moved = problem.head.weight if problem.single else problem.weights
    at = [p is moved for p in problem.x].index(True)
    assert torch.equal(before[at], moved) == (row.name == "FirstOrder" or row.cls is bo.FOMAML)
    assert flat(problem.parameters).isfinite().all()


# ---------------------------------------------------------------------------------------------------- the base class


@pytest.mark.parametrize("runs", [120, pytest.param(400, marks=pytest.mark.slow)])
def test_a_uniform_iterate_has_been_each_one_equally_often(runs):
    """x counts the steps; of 4 iterates each is kept in a quarter of the runs, also of those that were resumed."""
    generator, kept = torch.Generator().manual_seed(0), [0, 0, 0, 0]
    for _ in range(runs):
        x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        optimizer = bo.FirstOrder([x], [y], lr=1.0, lower_lr=1.0, lower_steps=1, check_derivatives=False)
        output = bo.UniformIterate(optimizer, generator)
        for k in range(3):
            optimizer.step(lambda x=x, y=y: -x.sum() + 0 * y.sum(), lambda y=y: y.square().sum())
            if k == 1:
                state = output.state_dict()
                output.values = []
                output.load_state_dict(state)
        assert float(x.detach()) == 3
        kept[int(output.values[0])] += 1
    assert sum((n - runs / 4) ** 2 / (runs / 4) for n in kept) < 11.3  # chi-square with 3 degrees of freedom, 99 %


@each(REPRESENTATIVES)
def test_hooks_and_any_torch_optimizer_for_x(row):
    problem, calls = row.cleaning(), []
    optimizer = row(problem.x, problem.y)
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))
    problem.run(optimizer)
    first = optimizer.oracle_counts
    problem.run(optimizer)
    assert calls == ["pre", "post"] * 2
    assert all(optimizer.oracle_counts[k] >= 2 * n for k, n in first.items())
    before = values(problem.x)
    adam = torch.optim.Adam(problem.x, lr=0.01, eps=1e-15)
    problem.apply(optimizer.backward)
    gradient = values(p.grad for p in problem.x)
    torch.nn.utils.clip_grad_norm_(problem.x, 1e-3)
    adam.step()
    for p, start, g in zip(problem.x, before, gradient, strict=True):
        close(p.detach() - start, -0.01 * g.sign(), 1e-9, 1e-2)


@each((*REPRESENTATIVES, "PZOBO", "ITD", "SVRB", "GDA"))
def test_losses_are_checked_at_the_first_step(row):
    problem = row.cleaning()
    before = values(problem.parameters)
    upper, lower = problem.upper, problem.lower
    single, bias = problem.single, problem.head.bias
    what = "minimax" if single else "lower"
    cases = [
        (upper, lambda: lower() * torch.ones(2), "lower loss must return a scalar.*shape"),
        (lambda: torch.ones(3) * upper(), lower, "loss must return a scalar"),
        (lambda: upper().item(), lower, "loss must return a scalar.*float"),
        (lambda: upper().detach(), lower, "loss depends on no parameter"),
        (upper, lambda: lower().detach(), "lower loss depends on no parameter"),
        (upper, lambda: (problem.weights.sigmoid() * problem.head.weight.square().sum()).sum(),
         "lower loss does not depend on lower parameter 1"),
        (lambda: bias.square().sum(), lambda: problem.penalty(), "neither loss depends? on any upper parameter"),
        (bo.Objective(upper, []), lower, "contain no batch: the list is empty"),
    ]  # fmt: skip
    if single:
        cases = [(u, None, m) for u, g, m in cases if g is lower]
        cases += [(lambda: problem.penalty(), None, "does not depend on lower parameter 0")]
        cases += [(lambda: -problem.weights.square().sum(), None, "depends? on any upper parameter")]
    for f, g, message in cases:
        with pytest.raises(ValueError, match=message):
            row(problem.x, problem.y).step(*((f,) if single else (f, g)))
        assert same(before, values(problem.parameters))
    optimizer = row(problem.x, problem.y)
    with pytest.raises(TypeError, match=f"{what} loss must be a callable"):
        optimizer.step(*((3.0,) if single else (upper, 3.0)))
    with pytest.raises(TypeError, match="one loss" if single else "both losses"):
        optimizer.step(*((upper, upper) if single else (upper,)))


def test_parameters_are_checked_and_named():
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    model, weights = nn.Linear(2, 2), torch.zeros(30, requires_grad=True)
    optimizer = bo.AID([weights], model.named_parameters(), **ARGUMENTS)
    with pytest.raises(ValueError, match="lower parameter 'bias'"):
        optimizer.step(lambda: model.bias.sum(), lambda: (weights.sum() * model.weight**2).sum())
    with pytest.raises(ValueError, match=r"lower parameter 1 of shape \(30,\) is also among the upper parameters"):
        bo.AID([weights], [model.bias, weights], **ARGUMENTS)
    with pytest.raises(ValueError, match="lower parameter 'again'"):
        bo.AID([("w", weights)], [("again", weights)], **ARGUMENTS)
    with pytest.raises(ValueError, match="empty lower parameter list"):
        bo.AID([weights], [], **ARGUMENTS)
    with pytest.raises(TypeError, match="upper parameters should be an iterable"):
        bo.AID(weights, model.parameters(), **ARGUMENTS)
    optimizer = bo.AID([("alpha", torch.zeros(2, device="meta", requires_grad=True))], [y], **ARGUMENTS)
    with pytest.raises(ValueError, match="parameter 'alpha' is on meta"):
        optimizer.step(lambda: (y**2).sum(), lambda: (y**2).sum())
    with pytest.raises(TypeError, match="abstract"):
        bo.BilevelOptimizer([x], [y], **ARGUMENTS)
    with pytest.warns(bo.BilevelWarning, match="put the penalty into the lower loss"):
        bo.AID([x], [y], **ARGUMENTS, lower_optimizer=torch.optim.AdamW)


def test_state_dict_of_something_else_is_refused():
    problem = Quadratic(n=5, m=3)
    optimizer = bo.AID(problem.x, problem.y, **ARGUMENTS)
    with pytest.raises(ValueError, match="no 'bilevel' entry"):
        optimizer.load_state_dict(torch.optim.SGD(problem.x, lr=0.1).state_dict())
    with pytest.raises(ValueError, match="that of ITD, but this optimizer is AID"):
        optimizer.load_state_dict(bo.ITD(problem.x, problem.y, **ARGUMENTS).state_dict())
