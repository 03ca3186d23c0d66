"""Ways by which x reaches y besides the lower loss: right or refused, for every method, by step, tasks and compiled."""

import warnings
from functools import cache

import pytest
import torch
from torch.nn.utils import parametrize
from torch.optim import SGD

import bilevel_optim as bo
from bilevel_optim.oracle.doors import OPTIONS, STEP

from ..problems import close
from ..registry import each

# ------------------------------------------------------------------------------------------------ hooks

FROZEN = torch.tensor([1.0, 0.0, 1.0])


def problem_with_hooks():
    x = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    y = torch.tensor([0.1, 0.7, -0.4], requires_grad=True)
    return x, y, lambda b=None: (y - 1).square().sum() / 2, lambda b=None: (y - x).square().sum() / 2


@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AID", {}),
        ("ITD", {}),
        ("F2SA", {"nu": 1e-4, "normalize": False}),
        ("PZOBO", {"direction": "orthogonal", "directions": 3}),
        ("HOZOG", {"direction": "orthogonal", "directions": 3, "difference": "central"}),
    ],
)
def test_a_hook_that_freezes_part_of_y_acts_on_every_copy(name, options, tasks):
    """y* = x where it is free, so the hypergradient is x - 1 there and zero elsewhere."""
    x, y, upper, lower = problem_with_hooks()
    start = y.detach().clone()
    y.register_hook(lambda gradient: gradient * FROZEN)
    optimizer = getattr(bo, name)([x], [y], lr=0.1, lower_lr=0.5, lower_steps=40, **options)
    given = {"tasks": bo.TensorTasks(torch.ones(2, 1, 1))} if tasks else {}
    optimizer.backward(upper, lower, **given)
    close(x.grad, (x.detach() - 1) * FROZEN, 1e-4)
    assert y.detach()[1] == start[1]
    told = "vectorize_fallback" in optimizer.diagnostics
    assert told == tasks


@pytest.mark.parametrize("hook", [lambda g: g * FROZEN, lambda g: g.clamp(-0.5, 0.5), lambda g: g / g.norm()])
@each(lambda row: row.declared.losses == 2 and not row.variant and row.declared.tasks != "required")
def test_hooks_on_x_are_called_once_for_the_hypergradient(row, hook):
    found = []
    for hooked in (False, True):
        problem = row.quadratic(n=5)
        for t in problem.x if hooked else ():
            t.register_hook(lambda g: hook(g) if g.shape == FROZEN.shape else g * 2)
        optimizer = row(problem.x, problem.y, short=True)
        problem.apply(optimizer.backward)
        found.append([t.grad.clone() for t in problem.x])
        assert all(bool(t._backward_hooks) == hooked for t in problem.x)
    for plain, changed in zip(*found, strict=True):
        close(changed, hook(plain) if plain.shape == FROZEN.shape else plain * 2, 1e-12)


@pytest.mark.parametrize("name", ["AID", "ITD", "F2SA", "PZOBO", "SOBA"])
def test_a_hook_may_return_one_tensor_of_its_own_each_time(name):
    found = []
    for own in (False, True):
        torch.manual_seed(0)
        x, y = (torch.tensor(values).requires_grad_() for values in ([1.0, 2.0], [0.3, 0.4]))
        kept = torch.zeros(2)
        y.register_hook(lambda g, kept=kept, own=own: kept.copy_(g) if own else g.clone())
        options = {} if name == "SOBA" else {"lower_steps": 2}
        optimizer = getattr(bo, name)([x], [y], lr=0.1, lower_lr=0.3, **options)
        for _ in range(2):
            optimizer.step(
                lambda y=y: (y * torch.tensor([1.0, 2.0])).sum(),
                lambda x=x, y=y: (y - x).square().sum() / 2 + (y[0] - y[1]) ** 2,
            )
        found.append((x.detach(), y.detach(), x.grad))
    for plain, other in zip(*found, strict=True):
        assert torch.equal(plain, other)


def test_a_hook_on_accumulated_gradients_is_refused():
    for which in (0, 1):
        x, y, upper, lower = problem_with_hooks()
        (x, y)[which].register_post_accumulate_grad_hook(lambda p: None)
        optimizer = bo.AID([x], [y], lr=0.1, lower_steps=1)
        with pytest.raises(ValueError, match="would never be called"):
            optimizer.step(upper, lower)


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("tasks", [False, True])
def test_a_hook_on_several_gradients_is_refused(tasks, mode):
    for which in (0, 1):
        x, y, upper, lower = problem_with_hooks()
        calls = []
        hook = torch.autograd.graph.register_multi_grad_hook([(x, y)[which]], calls.append, mode=mode)
        optimizer = bo.AID([x], [y], lr=0.1, lower_steps=1)
        given = {"tasks": bo.TensorTasks(torch.ones(2, 1, 1))} if tasks else {}
        losses = (lambda _: upper(), lambda _: lower()) if tasks else (upper, lower)  # noqa: B023
        with pytest.raises(ValueError, match="gradients of several tensors"):
            optimizer.step(*losses, **given)
        hook.remove()
        optimizer.step(*losses, **given)
        assert not calls


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch 2.11
@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("where", ["module", "all", "later"])
def test_backward_hooks_of_modules_act_on_copies(where, tasks):
    ends = []
    for vectorize in (8, False):
        torch.manual_seed(0)
        net, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)), torch.zeros(())
        x.requires_grad_()
        data = torch.randn(8, 3)

        def loss(b=None, net=net, data=data):
            return (net(data) - 1).square().mean()

        def lower(b=None, net=net, data=data, x=x):
            return (net(data) - x).square().mean() + 0.1 * sum(p.square().sum() for p in net.parameters())

        optimizer = bo.F2SA([x], net.parameters(), lr=0.1, lower_lr=0.1, lower_steps=5, vectorize=vectorize)
        given = {"tasks": bo.TensorTasks(torch.ones(2, 1, 1))} if tasks else {}
        if where == "later":
            optimizer.backward(loss, lower, **given)
        scale = lambda module, grads: (grads[0] * 0.3,)  # noqa: E731
        if where == "all":
            handle = torch.nn.modules.module.register_module_full_backward_pre_hook(scale)
        else:
            handle = net[2].register_full_backward_pre_hook(scale)
        try:
            optimizer.backward(loss, lower, **given)
        finally:
            handle.remove()
        ends.append([t.detach().clone() for t in (x.grad, *net.parameters())])
        if vectorize:
            assert "backward hook" in optimizer.diagnostics["vectorize_fallback"]
    for a, b in zip(*ends, strict=True):
        close(a, b, 1e-10)


# ------------------------------------------------------------------------------------------------ other ways


DOORS = {
    "lower_projection": lambda x: {"lower_projection": lambda v: [t + 0 * x.sum() for t in v]},
    "lower_projection under no_grad": lambda x: {
        "lower_projection": torch.no_grad()(lambda v: [t + 0 * x.sum() for t in v])
    },
    "lower_init": lambda x: {"lower_init": lambda *tasks: STARTS[0](*tasks)},
    "a factory's rate": lambda x: {"lower_optimizer": lambda g: SGD(g, lr=x.square().sum() / 100), "lower_lr": None},
    "a factory's decay": lambda x: {"lower_optimizer": lambda g: SGD(g, weight_decay=x.square().sum() / 100)},
    "its step": lambda x: {"lower_optimizer": lambda g: Reading(g, x)},
}
STARTS = []


class Reading(SGD):
    """A rate read from x in the step."""

    def __init__(self, groups, x):
        super().__init__(groups, lr=0.1)
        self.x = x

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * 0.01 * self.x.square().sum())


def kind_of(door):
    return {"a": OPTIONS, "i": STEP}.get(door[0], door.split()[0])


@pytest.mark.parametrize("how", ["step", "tasks", "compiled"])
@pytest.mark.parametrize("door", DOORS)
@each(lambda row: not row.variant and not row.name.startswith("BOME"))
def test_each_way_is_followed_or_refused(row, door, how):
    declared, refuses = row.declared, (ValueError, TypeError, NotImplementedError)
    if (how == "tasks" and not row.takes_tasks) or (declared.lower_optimizer == "none" and door != "lower_init"):
        pytest.skip("does not take it")
    problem = row.quadratic(n=5, tasks=how == "tasks")
    x = problem.x[0]
    STARTS[:] = [
        lambda *tasks: [(t * x.sum()).expand(*(tasks[0].shape[:1] if tasks else ()), *t.shape) for t in problem.y]
    ]
    told = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = row(problem.x, problem.y, short=True, **DOORS[door](x))
            if how == "compiled":
                optimizer.compile(backend="eager")
            for _ in range(3):
                problem.apply(optimizer.backward)
    except refuses as error:
        told = str(error)
    if door == "lower_init" and declared.tasks == "rows" and how == "tasks":
        assert not told  # each task has a row, from which it starts
    elif kind_of(door) not in row.cls.declared.doors or told:
        assert any(text in told for text in ("upper parameters", "Invalid", "cannot", "lower_init", "differentia")), (
            told
        )
    elif how == "compiled" and not (declared.initial and door == "lower_init"):
        assert "compile_fallback" in optimizer.diagnostics
    if door in ("lower_projection", "a factory's decay") and kind_of(door) in row.cls.declared.doors:
        assert not told


# ------------------------------------------------------------------------------------------------ against differences

ZEROTH = {"direction": "orthogonal", "difference": "central", "smoothing": 1e-4}
FOLLOWS = [
    ("ITD", {}),
    ("ITD", {"checkpoint": True}),
    ("MAML", {}),
    ("PZOBO", ZEROTH),
    ("PZOBO", {**ZEROTH, "vectorize": False}),
    ("HOZOG", ZEROTH),
    ("ESMAML", ZEROTH),
]
WAYS = ["bound", "threshold", "start", "lr", "weight_decay", "momentum", "adam", "all"]


def options_of(way, x):
    """The arguments by which x reaches y, and the same steps by hand: the rate, decay, momentum, projection, start."""
    made = {}
    if way in ("bound", "all"):
        made["lower_projection"] = lambda v: [torch.minimum(v[0], x[:3])]
    if way == "threshold":
        made["lower_projection"] = lambda v: [v[0].sign() * (v[0].abs() - 0.1 * x[:3].exp()).clamp(min=0)]
    if way in ("start", "all"):
        made["lower_init"] = lambda *tasks: [(x[:3] * 2).expand(*(tasks[0].shape[:1] if tasks else ()), 3)]
    rate = {"lr": 0.1} if way not in ("lr", "all") else {"lr": lambda: 0.1 * x[0].exp()}
    if way in ("weight_decay", "all"):
        rate["weight_decay"] = lambda: x[1].square()
    if way in ("momentum", "all"):
        rate["momentum"] = lambda: x[2].sigmoid()
    kind = torch.optim.Adam if way == "adam" else SGD
    if way == "adam":
        rate = {"lr": lambda: 0.1 * x[0].exp(), "weight_decay": lambda: x[1].square()}

    def factory(groups):
        return kind(groups, **{name: value() if callable(value) else value for name, value in rate.items()})

    return {"lower_lr": None, "lower_optimizer": factory, **made}


def estimate_of(name, way, more, tasks, move=None, compiled=False):
    """The hypergradient (with ``move``: the upper loss there) of five lower steps, by a method."""
    x = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    start, y = torch.tensor([0.4, 0.6, -0.7], requires_grad=True), torch.tensor([0.4, 0.6, -0.7], requires_grad=True)
    if move is not None:
        x.data += move
    upper, cls = ([x, start] if name in ("MAML", "ESMAML") else [x]), getattr(bo, name)
    centre = torch.tensor([[[2.0, -1.0, 0.4]], [[0.3, 0.5, -1.0]]])

    def lower(b=centre[0]):
        return ((y - b).square().sum() * torch.tensor(0.5) + 0.3 * (y * x).sum()) + 0.1 * y.pow(4).sum()

    def f(b=None):
        return (y - 0.5).square().sum() / 2 + (x * x).sum()

    options = {**options_of(way, x), **more}
    if "directions" not in options and "direction" in options:
        options["directions"] = sum(t.numel() for t in upper)
    optimizer = cls(upper, [y], lr=0.1, lower_steps=5, **options)
    if compiled:
        optimizer.compile(backend="eager")
    given = {"tasks": bo.TensorTasks(centre, centre)} if tasks else {}
    loss = optimizer.backward(f, lower, **given)
    if compiled:
        y.data.copy_(start.data)
        optimizer.numbers.clear()
        loss = optimizer.backward(f, lower, **given)
    return loss if move is not None else (torch.cat([t.grad for t in upper]), optimizer)


@cache
def differences(base, way, tasks):
    """The hypergradient by differences of the upper loss after the lower steps, which all methods make alike."""
    h, plain = 1e-6, {"check_derivatives": False}
    moves = torch.eye(3) * h
    right = [estimate_of(base, way, plain, tasks, m) - estimate_of(base, way, plain, tasks, -m) for m in moves]
    return torch.stack(right) / (2 * h)


@pytest.mark.few(32)  # of 112, each way and method with or without tasks
@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "more"), FOLLOWS)
def test_what_follows_x_is_in_the_hypergradient(name, more, way, tasks):
    found, _ = estimate_of(name, way, more, tasks)
    right = differences("MAML" if name in ("MAML", "ESMAML") else "ITD", way, tasks)
    close(found[:3], right, 1e-5 if name in ("PZOBO", "HOZOG", "ESMAML") else 1e-7)


# ------------------------------------------------------------------------------------------------ batches


class Moving:
    """Tasks whose lower batches are made of x: y* = 2x, and the hypergradient is 2 (2x - 1)."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return 2

    def sample(self, n, generator):
        return torch.arange(n)

    def lower(self, tasks, n, generator):
        return (2 * self.x).expand(len(tasks), -1)

    def upper(self, tasks, n, generator):
        return torch.ones(len(tasks), 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["AID", "ITD", "F2SA", "PZOBO", "HOZOG"])
@pytest.mark.filterwarnings("ignore:steps run eagerly")
def test_batches_made_of_x_are_differentiated_or_refused(name, compiled):
    x, y = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.zeros(3, requires_grad=True)
    options = {"F2SA": {"nu": 1e-4, "normalize": False}}.get(name, {})
    optimizer = getattr(bo, name)([x], [y], lr=0.0, lower_lr=0.5, lower_steps=60, **options)
    if compiled:
        optimizer.compile(backend="eager")
    losses = lambda b: (y - b).square().sum() / 2, lambda b: (y - b).square().sum() / 2
    for _ in range(3 if compiled else 1):
        if name in ("PZOBO", "HOZOG"):
            with pytest.raises(ValueError, match="a batch of the lower loss depends on upper parameters"):
                optimizer.backward(*losses, tasks=Moving(x))
        else:
            optimizer.backward(*losses, tasks=Moving(x))
            close(x.grad, 2 * (2 * x.detach() - 1), 1e-4)


MADE = {"F2SA": {"nu": 1e-4, "normalize": False}, "SOBA": {}, "HOZOG": ZEROTH, "PZOBO": ZEROTH}
ONCE = pytest.mark.parametrize("name", ["AID", "ITD", "F2SA", "SOBA", "PZOBO", "HOZOG"])


def made_for(name, x, y, **more):
    steps = {"lower_steps": 60, **more} if name != "SOBA" else {}
    directions = {"directions": x.numel()} if MADE.get(name) is ZEROTH else {}
    return getattr(bo, name)([x], [y], lr=0.0, lower_lr=0.3, **directions, **MADE.get(name, {}), **steps)


class Batches:
    """Batches that are made of x each time that they are drawn."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return iter([2 * self.x])


@ONCE
@pytest.mark.parametrize("fresh", [True, False])
def test_batches_of_the_lower_loss_made_of_x_are_refused_in_these_words(name, fresh):
    x, y = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.zeros(3, requires_grad=True)
    lower = bo.Objective(lambda b: (y - b).square().sum() / 2, Batches(x) if fresh else [2 * x])
    with pytest.raises(ValueError, match="a batch of the lower loss depends on upper parameters"):
        made_for(name, x, y).backward(lambda: (y - 1).square().sum() / 2 + 0 * x.sum(), lower)
    assert not y.any()


@ONCE
def test_batches_of_the_upper_loss_made_of_x_are_differentiated_or_refused(name):
    x, y = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.zeros(3, requires_grad=True)

    def upper(b):
        return (y - b).square().sum() / 2

    optimizer, lower = made_for(name, x, y), lambda: (y - 3 * x).square().sum() / 2
    if name == "HOZOG":
        with pytest.raises(ValueError, match="a batch of the upper loss depends on upper parameters"):
            optimizer.backward(bo.Objective(upper, Batches(x)), lower)
    else:
        for _ in range(200 if name == "SOBA" else 1):
            optimizer.backward(bo.Objective(upper, Batches(x)), lower)
        close(x.grad, x.detach(), 1e-4)  # y* = 3x, so f = |x|^2 / 2
    with pytest.raises(ValueError, match="a batch of the upper loss depends on upper parameters"):
        made_for(name, x, y).backward(bo.Objective(upper, [2 * x]), lower)  # which is stale after an update


def test_data_of_tasks_with_a_graph_are_refused():
    x = torch.ones(2, 1, 3, requires_grad=True)
    with pytest.raises(ValueError, match="the upper data have a graph"):
        bo.TensorTasks(torch.ones(2, 1, 3), 2 * x)
    bo.TensorTasks(x)  # each draw takes rows of the live tensor


class Scaled(torch.nn.Module):
    def forward(self, t):
        return t * t.exp()


@ONCE
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_parametrisation_cached_around_a_step_is_refused_and_inside_the_loss_is_right(
    name, vectorize, level, compiled
):
    """PZOBO and HOZOG took the cached value for the one at each perturbed x, or at each y."""
    if compiled and (level == "upper" or not vectorize):
        pytest.skip("one is enough")
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5]))
    parametrize.register_parametrization(module, "w", Scaled(), unsafe=True)
    own = module.parametrizations.w.original
    with torch.no_grad():
        own.copy_(torch.tensor([0.3, 0.2, 0.5]))
    other = torch.tensor([0.3, 0.2, 0.5], requires_grad=True)
    x, y = (own, other) if level == "upper" else (other, own)

    def lower():
        scaled, plain = (y, module.w) if level == "upper" else (module.w, x)
        return (scaled - plain).square().sum() / 2 + y.square().sum() / 2

    def cached():
        with parametrize.cached():
            return lower()

    def upper():
        return (y - 1).square().sum() / 2

    more = {"lower_steps": 5, **({"vectorize": vectorize} if name in ("F2SA", "PZOBO", "HOZOG") else {})}
    optimizer = made_for(name, x, y, **more)
    if compiled:
        optimizer.compile(backend="eager")
    before = y.detach().clone()
    with parametrize.cached():
        module.w.sum()
        with pytest.raises(ValueError, match="the lower loss uses a tensor with a graph"):
            optimizer.backward(upper, lower)
    assert torch.equal(y, before)
    found = []
    for loss in (lower, cached):
        optimizer = made_for(name, x, y, **more)
        with torch.no_grad():
            y.copy_(before)
        for _ in range(9 if name == "SOBA" else 2):
            optimizer.backward(upper, loss)
        found.append(x.grad.clone())
    assert found[0].abs().max() > 1e-3
    close(found[0], found[1], 1e-6)


def test_a_limit_that_is_learned_is_refused():
    x, y = torch.tensor(1.0, requires_grad=True), torch.zeros(3, requires_grad=True)
    for clip in (x, ("value", x)):
        with pytest.raises(ValueError, match="the limit is a constant number"):
            bo.ITD([x], [y], lr=0.1, lower_steps=2, lower_clip=clip)


@pytest.mark.parametrize("option", ["weight_decay", "lr"])
def test_options_that_follow_x_keep_their_derivative_beside_a_measured_rate(option):
    """The steps with the measured rate took them for constants."""
    x = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    y, z = (torch.full((2,), value, dtype=torch.float64, requires_grad=True) for value in (0.4, -0.3))
    begin = y.detach().clone(), z.detach().clone()

    def lower(y, z):
        return ((y - 1).square().sum() + (z - y).square().sum()) / 2

    more = {}
    if option == "weight_decay":
        more["lower_optimizer"] = lambda groups: SGD(groups, weight_decay=x)
    groups = [{"params": [y], **({"lr": x} if option == "lr" else {})}, {"params": [z]}]
    optimizer = bo.ITD([x], groups, lr=0.1, lower_steps=3, **more)
    optimizer.backward(lambda: (y + 2 * z).sum() + 0 * x, lambda: lower(y, z) + 0 * x)
    rate = optimizer.diagnostics["lower_lr"].detach()
    at = x.detach().clone().requires_grad_()
    a, b = (t.clone().requires_grad_() for t in begin)
    rate_of_y, decay = (at, 0.0) if option == "lr" else (rate, at)
    for _ in range(3):
        slopes = torch.autograd.grad(lower(a, b), (a, b), create_graph=True)
        a, b = a - rate_of_y * (slopes[0] + decay * a), b - rate * (slopes[1] + decay * b)
    (expected,) = torch.autograd.grad((a + 2 * b).sum(), at)
    assert expected.abs() > 0.01
    close(x.grad, expected, 1e-10)


@pytest.mark.parametrize("name", ["ITD", "PZOBO"])
@pytest.mark.parametrize(
    ("options", "door"),
    [
        (lambda x: {"lower_lr": 0.1, "lower_init": lambda: [x * 2]}, "lower_init"),
        (
            lambda x: {"lower_optimizer": lambda groups: SGD(groups, lr=x.exp().sum() / 10)},
            "options of lower_optimizer",
        ),
    ],
)
def test_the_check_has_no_reference_for_how_the_lower_problem_is_solved(name, options, door):
    x, y = torch.tensor([0.3, 0.4], requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = getattr(bo, name)([x], [y], lr=0.1, lower_steps=5, warm_start=False, **options(x))
    with pytest.raises(ValueError, match=f"no reference where x reaches y by {door}"):
        bo.check_hypergradient(optimizer, lambda: (y - 0.1).square().sum(), lambda: (y - 1).square().sum())


@ONCE
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:steps run eagerly")
def test_a_graph_from_outside_that_leads_to_no_parameter_is_a_constant(name, compiled):
    """Features of a frozen network that were computed once, without ``torch.no_grad``."""
    found = []
    for detached in (False, True):
        torch.manual_seed(0)
        frozen = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
        features = frozen.tanh()
        if detached:
            features = features.detach()
        x, y = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.zeros(3, requires_grad=True)
        optimizer = made_for(name, x, y, lower_steps=2)
        if compiled and not detached:
            optimizer.compile(backend="eager")
        for _ in range(3):
            optimizer.step(
                lambda y=y, z=features: (z @ y - 1).square().sum() / 2,
                lambda x=x, y=y, z=features: (z @ y - x).square().mean() / 2 + y.square().sum() / 2,
            )
        assert frozen.grad is None
        found.append(torch.cat([x.grad, y.detach()]))
    close(*found, 1e-12)
