"""Common mistakes and hidden traps: the answer to each says what to do."""

import inspect
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import methods

from .problems import seeded

ARGUMENTS = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 3}


def pair(n=2):
    return torch.full((n,), 2.0, requires_grad=True), torch.zeros(n, requires_grad=True)


def made(method=bo.AID, **options):
    x, y = pair()
    optimizer = method([x], [y], **{**ARGUMENTS, **options})
    return optimizer, x, y, (lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)


# ---------------------------------------------------------------------------------------------------- calls


MISSPELT = [
    (bo.AID, {"inner_lr": 0.1, "inner_steps": 3, "lr": 0.1}, "no option 'inner_lr'; did you mean 'lower_lr'?"),
    (bo.AID, {"inner_lr": 0.1, "inner_steps": 3, "lr": 0.1}, "no option 'inner_steps'; did you mean 'lower_steps'?"),
    (bo.AID, {**ARGUMENTS, "cg_steps": 5}, "no option 'cg_steps'; did you mean 'linear_steps'?"),
    (bo.ITD, {"lr": 0.1, "lower_lr": 0.1, "unroll_steps": 5}, "'unroll_steps'; did you mean 'lower_steps'?"),
    (bo.MAML, {"lr": 0.1, "inner_lr": 0.1, "num_inner_iters": 5}, "'num_inner_iters'; did you mean 'lower_steps'?"),
    (bo.AID, {**ARGUMENTS, "outer_lr": 0.1}, "'outer_lr'; did you mean 'lr'?"),
    (bo.AID, {**ARGUMENTS, "outer_optimizer": 0.1}, "'outer_optimizer'; did you mean 'upper_optimizer'?"),
    (bo.AID, {**ARGUMENTS, "dampng": 0.1}, "'dampng'; did you mean 'damping'?"),
    (bo.F2SA, {**ARGUMENTS, "lam": 10}, "'lam'; did you mean 'nu'? (one over"),
    (bo.AID, {**ARGUMENTS, "nu": 0.1}, "no option 'nu', which is an option of F2SA"),
    (bo.RAHGD, {**ARGUMENTS, "levels": 3}, "no option 'levels', which is an option of DLSGD, RTMLMC"),
    (bo.SOBA, ARGUMENTS, "SOBA has no option 'lower_steps': it is a single loop"),
    (bo.AID, {**ARGUMENTS, "momentum": 0.9}, "pass upper_optimizer or lower_optimizer=functools.partial(torch.opt"),
    (bo.AID, {**ARGUMENTS, "frobnicate": 1}, "no option 'frobnicate'; it has upper, lower, lr, lower_lr, lower_steps"),
]


@pytest.mark.parametrize(("method", "options", "answer"), MISSPELT)
def test_options_by_another_name(method, options, answer):
    x, y = pair()
    with pytest.raises(TypeError, match=re.escape(answer)):
        method([x], [y], **options)


def called(verb, *arguments, **named):
    """Call a verb with the losses, or a function with its arguments."""
    return lambda optimizer, losses: getattr(optimizer, verb)(*losses, *arguments, **named)


MISCALLED = [
    (called("step", task=1), "'task': did you mean 'tasks'?"),
    (lambda o, ls: o.step(upper=ls[0], lower_loss=ls[1]), "'lower_loss': did you mean 'lower'?"),
    (lambda o, ls: o.backward(outer_loss=ls[0], inner_loss=ls[1]), "'outer_loss': did you mean 'upper'?"),
    (called("backward", frobnicate=1), "'frobnicate': it has upper, lower, tasks"),
    (called("run", 3), "pass the number of steps by name, run(upper, lower, steps=10)"),
    (called("step", None), "pass these by name: tasks, closure"),
    (lambda o, ls: o.adapt(ls[1], writes=True), "'writes': did you mean 'write'?"),
    (lambda o, ls: o.compile(backends="eager"), "'backends': did you mean 'backend'?"),
    (lambda o, ls: o.propose(*ls, task=1), "'task': did you mean 'tasks'?"),
    (lambda o, ls: bo.check_hypergradient(o, ls[0], lower_loss=ls[1]), "'lower_loss': did you mean 'lower'?"),
    (lambda o, ls: bo.suggest([], [], *ls, max_second=1), "'max_second': did you mean 'max_seconds'?"),
]


@pytest.mark.parametrize(("call", "answer"), MISCALLED)
def test_verbs_by_other_words(call, answer):
    optimizer, *_, losses = made()
    with pytest.raises(TypeError, match=re.escape(answer)):
        call(optimizer, losses)


def test_an_error_of_a_loss_is_not_one_of_the_call():
    optimizer, _, _, (upper, _) = made()

    def lower():
        return torch.dot(wrong=1)

    with pytest.raises(TypeError) as caught:
        optimizer.step(upper, lower)
    assert "did you mean" not in str(caught.value)
    assert "it has" not in str(caught.value)


@pytest.mark.parametrize(("name", "meant"), [("aid", "AID"), ("f2sa", "F2SA"), ("Imaml", "iMAML"), ("Soba", "SOBA")])
def test_methods_in_other_letters(name, meant):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; did you mean '{meant}'\?"):
        getattr(bo, name)
    with pytest.raises(AttributeError, match=r"no attribute 'adam'$"):
        bo.adam  # noqa: B018


def test_completions_are_public():
    assert dir(bo) == sorted(bo.__all__)
    assert not {"kernels", "oracle", "types", "optimizer"} & {*dir(bo)}


def test_options_by_position():
    x, y = pair()
    with pytest.raises(
        TypeError,
        match=r"AID takes the upper and the lower parameters by position, but got 5 values: pass everything else by "
        r"name, such as lr=",
    ):
        bo.AID([x], [y], 0.1, 0.1, 3)


@pytest.mark.parametrize("name", sorted(methods()))
def test_signatures_are_written_out(name):
    """Every working argument is in the signature, under its name."""
    method = methods()[name]
    parameters = inspect.signature(method).parameters
    assert {p.kind for p in parameters.values()} == {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    assert {"upper", "lower", "lr", "check_finite", "generator", "hvp", "lower_batch", "process_group"} < {*parameters}
    assert ("lower_steps" in parameters) == method.declared.lower_steps


def public(method):
    """Names on a method's objects beyond those of torch's optimizers, from its class alone."""
    return {name for name in dir(method) if name[0] != "_"} - {*dir(torch.optim.Optimizer)}


@pytest.mark.parametrize("name", sorted(methods()))
def test_public_attributes_of_an_optimizer_are_documented(name):
    method = methods()[name]
    found = [n for n in public(method) if n not in inspect.signature(method).parameters]
    assert len(found) <= 22
    text = inspect.getdoc(method) + inspect.getdoc(bo.BilevelOptimizer)
    for n in found:
        assert n in text or inspect.getdoc(getattr(method, n)), n


def test_an_object_shows_about_thirty_names():
    optimizer, *_ = made()
    found = {name for name in dir(optimizer) if name[0] != "_"} - {*dir(torch.optim.SGD([torch.zeros(1)]))}
    assert len(found) <= 30
    assert {"adapt", "backward", "compile", "diagnostics", "metrics", "oracle_counts", "run", "lower_steps"} < found
    own = {"estimate", "update", "declared", "numbers", "propose", "parameters", "captured_graphs"}
    verbs = {"adapt", "backward", "compile", "diagnostics", "metrics", "oracle_counts", "run"}
    assert found - own - verbs <= {*inspect.signature(bo.AID).parameters}


@pytest.mark.parametrize("name", sorted(methods()))
def test_docstrings_have_every_argument(name):
    method = methods()[name]
    text = inspect.getdoc(method)
    if "also for the options not listed here" in text:
        return
    declared = method.declared
    refused = {"upper_optimizer"} if declared.upper_update else set()
    if declared.lower_optimizer == "none":
        refused |= {"lower_optimizer", "lower_clip", "lower_projection"}
    learned_start = method._learned_start is not bo.BilevelOptimizer._learned_start
    if learned_start or declared.tasks in ("none", "rows", "required"):
        refused |= {"task_memory"}
    if declared.tasks == "none":
        refused |= {"tasks_per_step", "lower_batch", "upper_batch", "lower_init"}
    arguments = text[text.index("Args:") :]
    assert not {n for n in inspect.signature(method).parameters if not re.search(rf"\b{n}\b", arguments)} - refused


def test_the_text_of_an_optimizer_names_what_it_is_made_of():
    optimizer, *_ = made(upper_optimizer=torch.optim.Adam, lower_optimizer=torch.optim.RMSprop, hvp="finite-difference")
    optimizer.compile(backend="eager")
    text = repr(optimizer)
    for part in (
        "hvp='finite-difference'",
        "compiled: 0 graphs",
        "1 tensor, Adam, lr=0.1",
        "1 tensor, RMSprop, lr=0.1",
    ):
        assert part in text


CHOICES = [
    (bo.AID, "linear_solver", "conjugate_gradient", "'cg', 'minres', 'direct', 'auto', 'neumann', 'fixed_point'"),
    (bo.AID, "hvp", "fd", "'exact', 'finite-difference'"),
    (bo.F2SA, "samples", "same", "'shared', 'independent'"),
    (bo.PZOBO, "scale", "none at all", "'unbiased', 'none', or a positive number"),
]


@pytest.mark.parametrize(("method", "option", "value", "choices"), CHOICES)
def test_wrong_choices_list_the_right_ones(method, option, value, choices):
    with pytest.raises(ValueError, match=re.escape(f"Invalid {option} value: {value} (choose one of {choices}")):
        made(method, **{option: value})


@pytest.mark.parametrize("option", ["lower_optimizer", "upper_optimizer"])
def test_an_optimizer_by_its_name(option):
    with pytest.raises(ValueError, match=rf"Invalid {option} value: adam \(pass the class, or a function that makes"):
        made(**{option: "adam"})


def test_parameters_that_are_none():
    x, y = pair()
    linear, used = nn.Linear(2, 1), iter([y])
    list(used)
    for lower, error, answer in (
        (linear, TypeError, "lower parameters should be tensors, but got the module Linear: pass its .parameters()"),
        (nn.Sequential(linear), TypeError, "got the module Sequential: pass its"),
        ([linear, linear], TypeError, "got the module Linear: pass its"),
        (used, ValueError, "empty lower parameter list: the iterator that was passed is used up"),
        ([], ValueError, "optimizer got an empty lower parameter list"),
        (y, TypeError, r"\(write \[tensor\]\)"),
        (3, TypeError, "lower parameters should be an iterable of tensors"),
        ([{"param": [y]}], ValueError, "the lower group .* has no entry 'params': write {'params'"),
    ):
        with pytest.raises(error, match=answer):
            bo.AID([x], lower, **ARGUMENTS)


def test_the_number_of_steps_by_position():
    optimizer, *_, losses = made()
    with pytest.raises(TypeError, match=r"pass the number of steps by name, run\(upper, lower, steps=10\)"):
        optimizer.run(*losses, 10)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'steps'"):
        optimizer.run(*losses)

    def wrong():
        raise TypeError("of the loss itself")

    with pytest.raises(TypeError, match=r"^of the loss itself$"):
        optimizer.run(wrong, losses[1], steps=1)


def test_a_multiplier_in_the_place_of_its_inverse():
    with pytest.warns(bo.BilevelWarning, match=r"or nu=0\.01 if 100 was meant as the multiplier of a penalty"):
        made(bo.F2SA, nu=100)
    made(bo.F2SA, nu=0.5)


# ---------------------------------------------------------------------------------------------------- steps


def test_a_step_that_would_move_nothing():
    """``zero_grad(); loss.backward(); opt.step()`` returned None, and nothing had moved."""
    optimizer, x, _, losses = made()
    before = x.detach().clone()
    optimizer.zero_grad()
    losses[0]().backward()  # reaches y alone
    for call in (optimizer.step, lambda: optimizer.step(closure=lambda: None)):
        with pytest.raises(RuntimeError, match=r"no upper parameter has one") as error:
            call()
        for line in (
            "    optimizer.step(upper_loss, lower_loss) ",
            "    optimizer.backward(upper_loss, lower_loss); optimizer.step() ",
            "    optimizer.step(lambda: optimizer.backward(upper_loss, lower_loss))",
        ):
            assert line in str(error.value)
    assert torch.equal(x, before)
    optimizer.backward(*losses)
    optimizer.step()
    assert not torch.equal(x, before)


def test_a_step_along_an_external_gradient():
    optimizer, *_, losses = made()
    losses[1]().backward()  # reaches x too
    with pytest.warns(bo.BilevelWarning, match=r"by a \.grad that no call of optimizer\.backward"):
        optimizer.step()
    optimizer.step()  # said once
    other, *_, losses = made()
    other.backward(*losses)
    other.step()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("level", [0, 1])
def test_backward_inside_a_loss(level, retain):
    optimizer, x, y, losses = made()

    def calls_backward():
        loss = losses[level]()
        loss.backward(retain_graph=retain)
        return loss

    wrong = [*losses]
    wrong[level] = calls_backward
    with pytest.raises(ValueError, match=f"the {('upper', 'lower')[level]} loss seems to call backward"):
        optimizer.step(*wrong)
    assert x.grad is y.grad is None
    optimizer.step(*losses)


def test_zero_grad_inside_a_loss():
    optimizer, x, _, (upper, lower) = made()
    x.grad = torch.ones_like(x)

    def clears():
        optimizer.zero_grad()
        return upper()

    with pytest.raises(ValueError, match=r"seems to call backward\(\) or zero_grad\(\)"):
        optimizer.step(clears, lower)


@pytest.mark.parametrize(("option", "value"), [("lr", "0.1"), ("lower_steps", "3")])
def test_a_number_in_a_string_is_shown_as_one(option, value):
    """From a command line without ``type=float``; "Invalid learning rate: 0.1" looked like a valid one."""
    with pytest.raises(ValueError, match=f": '{value}'"):
        made(**{option: value})


@pytest.mark.parametrize("order", [0, -1, 1.5])
def test_the_least_order_is_one(order):
    with pytest.raises(ValueError, match=r"Invalid order value: .* an integer of at least 1\)"):
        made(bo.F2SA, order=order)


def test_a_graph_that_is_made_once():
    optimizer, _, y, losses = made()
    penalty = y.square().sum().exp()
    with pytest.raises(ValueError, match="uses a tensor with a graph that was computed outside it"):
        optimizer.run(lambda: losses[0]() + penalty, losses[1], steps=3)


@pytest.mark.parametrize("method", [bo.AID, bo.F2SA, bo.ITD, bo.SOBA])
def test_a_lower_tensor_that_was_replaced(method):
    """The old and the new tensor used to stay unchanged, without a message."""
    torch.manual_seed(0)
    module, x, data = nn.Linear(3, 1), torch.zeros(3, requires_grad=True), torch.randn(8, 3, generator=seeded(0))
    options = {k: v for k, v in ARGUMENTS.items() if method is not bo.SOBA or k != "lower_steps"}
    optimizer = method([x], module.named_parameters(), **options)
    losses = lambda: module(data).square().mean(), lambda: (module(data + x) - 1).square().mean()
    optimizer.step(*losses)
    module.weight = nn.Parameter(torch.zeros(1, 3))
    with pytest.warns(bo.BilevelWarning, match=r"depended on lower parameter 'weight'.*module\.weight\.copy_"):
        optimizer.step(*losses)
    optimizer.step(*losses)  # said once


@pytest.mark.parametrize("method", [bo.AID, bo.F2SA, bo.SOBA, bo.FSLA])
def test_lower_tensors_that_were_all_replaced(method):
    """The message used to say that the loss depends on no parameter at all, and it does depend on x."""
    model, x = nn.Linear(2, 1), torch.zeros(2, requires_grad=True)
    steps = {"lower_steps": 2} if method.declared.lower_steps else {}
    optimizer = method([x], model.parameters(), lr=0.1, lower_lr=0.1, **steps)

    def lower():
        return (model.weight - x).square().sum() + model.bias.square().sum()

    optimizer.step(lambda: (model.weight - 1).square().sum() + model.bias.sum(), lower)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"depends on no .*parameter, .*load_state_dict\(assign=True"):
        optimizer.step(lambda: (model.weight - 1).square().sum() + model.bias.sum(), lower)


def test_a_lower_tensor_that_some_evaluations_leave_out_is_no_matter():
    x, y = pair()
    other = torch.zeros(2, requires_grad=True)
    optimizer = bo.FirstOrder([x], [y, other], **ARGUMENTS)
    calls = []

    def lower():
        calls.append(0)
        loss = (y - x).square().sum()
        return loss if len(calls) % 3 == 0 else loss + (other - x).square().sum()

    for _ in range(3):
        optimizer.step(lambda: (y + other).square().sum(), lower)


# ---------------------------------------------------------------------------------------------------- lower solves


def test_oscillating_lower_solves_are_reported():
    """With a step of 2 over the curvature, y oscillates for ever."""
    optimizer, *_, losses = made(lower_lr=2.0, lower_steps=4, lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            optimizer.step(*losses)
    with pytest.warns(
        bo.BilevelWarning, match=r"y swings about a solution.*last 10 lower solves.*Use a smaller lower_lr"
    ):
        optimizer.step(*losses)
    optimizer.step(*losses)


def test_steps_that_swing_about_kinks_are_reported():
    """With |y| in the lower loss, entries that should be zero jump from side to side of it, not all in each step."""
    truth = torch.cat([2 * torch.randn(5, generator=seeded(1)), torch.zeros(15)])
    inputs = torch.randn(40, 20, generator=seeded(0))
    targets = inputs @ truth + 0.3 * torch.randn(40, generator=seeded(2))
    x, y = torch.tensor(-1.0, requires_grad=True), torch.zeros(20, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.0, lower_lr=0.05, lower_steps=50, linear_steps=30)

    def upper():
        return (y - truth).square().mean()

    def lasso():
        return (inputs @ y - targets).square().mean() / 2 + x.exp() * y.abs().sum()

    message = r"y swings about a solution: at the end of most of the last.*At a kink \(abs, relu\) no rate helps"
    with pytest.warns(bo.BilevelWarning, match=message):
        optimizer.run(upper, lasso, steps=60)


@pytest.mark.parametrize("method", [bo.AID, bo.ITD, bo.FirstOrder])
def test_slowly_growing_lower_solves_are_reported(method):
    """By a tenth in each: too little for the warning about a single solve."""
    optimizer, *_, losses = made(method, lower_lr=2.03, lower_steps=3, lr=0.0)
    with pytest.warns(bo.BilevelWarning, match=r"y swings|has grown in each of the last"):
        optimizer.run(*losses, steps=12)


def test_growth_without_oscillation_is_reported():
    """On a concave problem, gradients all point outward."""
    x, y = pair()
    optimizer = bo.FirstOrder([x], [y], lr=0.0, lower_lr=0.1, lower_steps=3)
    with pytest.warns(bo.BilevelWarning, match=r"has grown in each of the last (\d+) lower solves, from 2.8 to 45"):
        optimizer.run(lambda: y.sum() * x.sum(), lambda: -(y - x).square().sum() / 2, steps=20)


def test_noise_is_no_growth():
    """Gradients of batches at a solution are larger at the end of a solve as often as at its beginning."""
    x, y = pair(20)
    data = torch.randn(400, 20, generator=seeded(3))
    lower = bo.Objective(lambda batch: (y - x - 10 * batch).square().sum() / 2, data)
    optimizer = bo.FirstOrder([x], [y], lr=0.0, lower_lr=0.05, lower_steps=3)
    for _ in range(600):
        optimizer.step(lambda: y.sum() * x.sum(), lower)


@pytest.mark.usually("8")
@pytest.mark.parametrize("seed", [6, 8, 11])
def test_rounding_errors_at_a_solution_are_no_growth(seed):
    """They may repeat themselves, so that each solve ends with a larger gradient, or swings."""
    inputs, targets = torch.randn(40, 3, generator=seeded(seed)), torch.randn(40, 1, generator=seeded(seed + 100))
    model, x = torch.nn.Linear(3, 1), torch.zeros(1, requires_grad=True)

    def lower():
        penalty = sum(p.square().sum() for p in model.parameters())
        return (model(inputs) - targets).square().mean() + 0.3 * x.exp().sum() * penalty

    def upper():
        return (model(inputs[:20]) - targets[:20]).square().mean() + 0 * x.sum()

    bo.FirstOrder([x], model.parameters(), lr=0.0, lower_steps=150).step(upper, lower)
    for steps in (3, 10):
        optimizer = bo.AID([x], model.parameters(), lr=0.0, lower_steps=steps)
        optimizer.run(upper, lower, steps=50)


@pytest.mark.parametrize("method", [bo.F2SA, bo.ITD, bo.FirstOrder, bo.PZOBO])
def test_the_residual_of_a_projected_problem_vanishes_at_its_solution(method):
    """The gradient, with 2 in every entry, does not vanish there."""
    x, y = pair()
    below_one = {"lower_projection": lambda y: [t.clamp(max=1.0) for t in y]}
    optimizer = method([x], [y], lr=0.0, lower_lr=0.25, lower_steps=30, **below_one)
    shift = torch.tensor([1.0, -2.0])  # the second entry is inside
    optimizer.step(lambda: (y - 3).square().sum() + 0 * x.sum(), lambda: (y - x - shift).square().sum() / 2)
    assert y[0] == 1.0
    assert float(optimizer.diagnostics["lower_residual"].max()) < 2e-2


@pytest.mark.parametrize("simultaneous", [True, False])
def test_the_residual_of_an_ascent_on_a_constraint_vanishes_too(simultaneous):
    x, y = pair()
    optimizer = bo.GDA(
        [x], [y], lr=0.0, lower_lr=0.25, lower_steps=20, simultaneous=simultaneous,
        lower_projection=lambda y: [t.clamp(max=1.0) for t in y],
    )  # fmt: skip
    optimizer.step(lambda: (x * y).sum())
    assert y.tolist() == [1.0, 1.0]
    assert float(optimizer.diagnostics["lower_residual"]) == 0.0


# ---------------------------------------------------------------------------------------------------- warnings


def test_warnings_point_at_the_line_of_the_user():
    x, y = pair()
    optimizer = bo.AID([x], [y], **ARGUMENTS, check_derivatives=False)

    constant, moving = (lambda: y.square().sum()), lambda: (y - float(y[0])).square().sum() + x.sum()
    first = inspect.currentframe().f_lineno + 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(lambda: (y - 1).square().sum() + x.sum(), constant)
        optimizer.compile(backend="eager")
        optimizer.run(moving, constant, steps=3)
        bo.AID([x], [y], lower_optimizer=lambda g: torch.optim.SGD(g, weight_decay=0.1), **ARGUMENTS)
    assert [w.lineno for w in caught] == [first, first - 4, first + 3]  # the second is about a loss, and points at it
    assert {w.filename for w in caught} == {__file__}


def test_small_mistakes_have_their_own_sentences():
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    with pytest.raises(AttributeError, match=r"no attribute 'Adam': take upper_optimizer=torch\.optim\.Adam for x"):
        bo.Adam  # noqa: B018
    with pytest.raises(
        TypeError,
        match=r"AID: missing a required argument: 'lower_steps' \(10 is usual; bo\.suggest compares some for AID",
    ):
        bo.AID([x], [y], lr=0.1)
    with pytest.raises(ValueError, match=r"upper parameter 0 of shape \(2,\) is the result of an operation"):
        bo.AID([x * 2], [y], lr=0.1, lower_steps=1)
    with pytest.raises(
        TypeError,
        match=r"AID takes both losses, upper and lower, but got only one: call step\(upper_loss, lower_loss\)$",
    ):
        bo.AID([x], [y], lr=0.1, lower_steps=1).step(lambda: y.sum())
    with pytest.raises(ValueError, match=r"^Invalid upper_optimizer value: Adam \(pass the class, or a function"):
        bo.AID([x], [y], lr=0.1, lower_steps=1, upper_optimizer=torch.optim.Adam([x]))


@pytest.mark.parametrize("verb", ["step", "backward", "propose", "run", "check", "suggest", "compiled", "update"])
def test_a_call_in_inference_mode_names_it(verb):
    optimizer, x, y, losses = made(upper_optimizer=torch.optim.Adam)
    if verb == "compiled":
        optimizer.compile(backend="eager")
    for _ in range(3):
        optimizer.step(*losses)
    calls = {
        "run": lambda: optimizer.run(*losses, steps=2),
        "check": lambda: bo.check_hypergradient(optimizer, *losses),
        "suggest": lambda: bo.suggest([x], [y], *losses, max_seconds=5),
        "compiled": lambda: optimizer.step(*losses),
        "update": lambda: optimizer.step(),
    }
    before = x.detach().clone(), y.detach().clone()
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"torch\.inference_mode\(\) is on.* leave the"):
        calls.get(verb, lambda: getattr(optimizer, verb)(*losses))()
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    with torch.no_grad():
        optimizer.step(*losses)


@pytest.mark.parametrize(
    "verb", ["step", "backward", "propose", "run", "adapt", "check", "suggest", "compiled", "update"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, in forward mode
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd], ids=["grad", "jacfwd"])
def test_a_call_under_a_transform_names_it(verb, transform):
    """Tensors of the transform stayed in the parameters, and the next step ended the process."""
    optimizer, x, y, losses = made(upper_optimizer=torch.optim.Adam)
    if verb == "compiled":
        optimizer.compile(backend="eager")
    for _ in range(3):
        optimizer.step(*losses)
    calls = {
        "run": lambda: optimizer.run(*losses, steps=2)[0],
        "adapt": lambda: optimizer.adapt(losses[1])[0].sum(),
        "check": lambda: bo.check_hypergradient(optimizer, *losses),
        "suggest": lambda: bo.suggest([x], [y], *losses, max_seconds=5),
        "compiled": lambda: optimizer.step(*losses),
        "update": lambda: optimizer.step(),
    }
    call = calls.get(verb, lambda: getattr(optimizer, verb)(*losses))
    before = x.detach().clone(), y.detach().clone()
    with pytest.raises(RuntimeError, match=r"under torch\.func\.grad, jvp .* call it outside"):
        transform(lambda scale: scale * call())(torch.ones(()))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    optimizer.step(*losses)


def test_parameters_that_cannot_be_differentiated_or_have_no_values():
    with torch.inference_mode():
        x = torch.zeros(2, requires_grad=True)
    y = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"upper parameter 0 of shape \(2,\) was created under torch\.inference_mode"):
        bo.AID([x], [y], lr=0.1, lower_steps=1)
    x, y = (torch.zeros(2, requires_grad=True, device="meta") for _ in range(2))
    with pytest.raises(ValueError, match=r"parameter 0 is on device meta, which stores no values; give the module"):
        bo.AID([x], [y], lr=0.1, lower_steps=1).step(lambda: y.sum(), lambda: (y - x).square().sum())


@pytest.mark.parametrize("method", [bo.AID, bo.F2SA, bo.BOME, bo.FirstOrder])
@pytest.mark.parametrize("level", [0, 1])
def test_reentrant_checkpointing(method, level):
    optimizer, x, y, losses = made(method)
    if method is bo.F2SA:
        optimizer = bo.F2SA([x], [y], nu=0.1, **ARGUMENTS)
    plain = losses[level]
    wrong = [*losses]
    wrong[level] = lambda: plain() + checkpoint(torch.tanh, y, use_reentrant=True).sum()
    with pytest.raises(ValueError, match=r"^a loss uses reentrant checkpointing.* pass use_reentrant=False"):
        optimizer.step(*wrong)
    assert x.tolist() == [2.0, 2.0]
    assert y.tolist() == [0.0, 0.0]
    assert optimizer.state == {}
    wrong[level] = lambda: plain() + checkpoint(torch.tanh, y, use_reentrant=False).sum()
    optimizer.step(*wrong)


def test_checkpointing_with_tasks():
    """What is computed again in backward is outside vmap; one task at a time gives the values without it."""

    def ends(recomputed, **options):
        x, y = pair()
        tasks = bo.TensorTasks((torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=x.dtype),))

        def lower(batch):
            aim = lambda point: (x * point).tanh()  # noqa: E731
            return (y - (checkpoint(aim, *batch, use_reentrant=False) if recomputed else aim(*batch))).square().sum()

        bo.AID([x], [y], **ARGUMENTS, **options).step(lambda _: y.square().sum(), lower, tasks=tasks)
        return [*x.tolist(), *y.tolist()]

    assert ends(True, vectorize=False) == ends(False, vectorize=False)
    if torch.__version__ < (2, 12):  # torch 2.11 computes them under vmap
        assert ends(True) == ends(False)
        return
    with pytest.raises(
        RuntimeError, match=r"activations a second time, in backward.* leave out torch.utils.checkpoint"
    ):
        ends(True)


# ---------------------------------------------------------------------------------------------------- kinds of tensors

OTHER_TENSORS = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"is not a dense tensor \(torch.sparse_coo\)"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), r"is not a dense tensor \(torch.sparse_csr\)"),
    "csc": (lambda: torch.eye(3).to_sparse_csc(), r"is not a dense tensor \(torch.sparse_csc\)"),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr(2), r"is not a dense tensor \(torch.sparse_bsr\)"),
    "mkldnn": (lambda: torch.eye(3, dtype=torch.float32).to_mkldnn(), r"is not a dense tensor \(torch._mkldnn\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"is not a dense tensor \(nested\)"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"is not a dense tensor \(nested\)",
    ),
    "float8": (lambda: torch.eye(3).to(torch.float8_e4m3fn).requires_grad_(), "has the type torch.float8_e4m3fn"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "is not initialised, because its lazy module"),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64, requires_grad=True), "is complex"),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype|nested tensors)")
@pytest.mark.parametrize("kind", OTHER_TENSORS)
@pytest.mark.parametrize("place", ["upper", "lower", "added"])
def test_other_tensors_are_named(kind, place):
    make, message = OTHER_TENSORS[kind]
    x, y = pair()
    optimizer, other = bo.AID([x], [y], **ARGUMENTS), make()
    calls = {
        "upper": lambda: bo.AID([other], [y], **ARGUMENTS),
        "lower": lambda: bo.AID([x], [other], **ARGUMENTS),
        "added": lambda: optimizer.add_param_group({"params": [other], "level": "lower"}),
    }
    with pytest.raises(ValueError, match=f"{'upper' if place == 'upper' else 'lower'} parameter 0 .*{message}"):
        calls[place]()
    assert len(optimizer.param_groups) == 2


def test_frozen_tensors_of_other_types_are_left_alone():
    x, y = pair()
    frozen = torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.uint8)
    optimizer = bo.AID([x], [y, *frozen], **ARGUMENTS)
    optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("method", [bo.AID, bo.F2SA, bo.ITD, bo.PZOBO])
@pytest.mark.parametrize("tasks", [False, True])
def test_complex_losses_are_named(method, level, tasks):
    optimizer, _, y, losses = made(method)
    right = dict(zip(("upper", "lower"), losses, strict=True))
    wrong = {**right, level: lambda: torch.complex(right[level](), y.sum())}
    if tasks:
        wrong = {name: lambda batch, loss=loss: loss() for name, loss in wrong.items()}
    given = {"tasks": bo.TensorTasks(torch.ones(3, 2))} if tasks else {}
    with pytest.raises(ValueError, match=f"the {level} loss is complex, but only real numbers can be minimised"):
        optimizer.step(wrong["upper"], wrong["lower"], **given)


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_an_optimizer_of_sparse_gradients_is_refused(level):
    with pytest.raises(ValueError, match=f"Invalid {level}_optimizer value: SparseAdam"):
        made(**{f"{level}_optimizer": torch.optim.SparseAdam})


@pytest.mark.parametrize("data", [False, True])
def test_a_criterion_is_no_loss(data):
    optimizer, x, y, losses = made()
    wrong = bo.Objective(nn.MSELoss(), [(y, x)]) if data else nn.MSELoss()
    with pytest.raises(TypeError, match="the loss is the module MSELoss, which needs other arguments"):
        optimizer.step(losses[0], wrong)
