"""Oracles against plain torch, for every kind of model and closure that must work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo
from bilevel_optim import Vector
from bilevel_optim.oracle.copies import Copies
from bilevel_optim.oracle.point import in_place
from bilevel_optim.oracle.session import EvaluationOptions, Session
from bilevel_optim.problem.vector import stack

from ..problems import substituted


class Cube(torch.autograd.Function):
    """A custom function that vmap can batch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w):
        return w**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return 3 * w**2 * grad


class OldCube(torch.autograd.Function):
    """A custom function of the old style, which vmap cannot batch."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w**3

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return 3 * w**2 * grad


@dataclass
class Case:
    """A lower loss over lower tensors y, weighted by an upper tensor x of 6 entries."""

    make: Callable[[], tuple[list[torch.Tensor], Callable[[], torch.Tensor]]]
    vmap: bool = True  # whether vmap can do it; otherwise the loop must take over
    second: str | None = None  # why it cannot be differentiated twice, as the error says
    random: bool = False
    rough: bool = False  # its second derivative is incomplete by design
    hidden: bool = False  # torch does not see where it reads its parameters, unless they are the live ones


made: list[nn.Module] = []  # the modules of the case that was built last


def buffer_values():
    return [b.clone() for net in made for b in net.buffers()]


def set_buffers(values):
    for buffer, value in zip([b for net in made for b in net.buffers()], values, strict=True):
        buffer.copy_(value)


def rows(dims=(5,)):
    return torch.randn(6, *dims), torch.randint(0, 3, (6,))


def raw():
    (X, t), w, b = rows(), torch.randn(5, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    return [w, b], lambda: F.cross_entropy(X @ w + b, t, reduction="none")


def indexed():
    (X, t), table = rows(), torch.randn(8, 5, 3, requires_grad=True)
    return [table], lambda: F.cross_entropy(torch.einsum("nd,ndc->nc", X, table[t * 2]), t, reduction="none")


def of(model, dims=(5,), loss=F.cross_entropy, apply=None):
    def make():
        torch.manual_seed(1)
        net, (X, t) = model(), rows(dims)
        made.append(net)
        run = apply or (lambda net, X: net(X))
        return list(net.parameters()), lambda: loss(run(net, X), t, reduction="none")

    return make


def mlp(*between):
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), *between, nn.Linear(4, 3))


def mixed():
    net, (X, t), scale = mlp(), rows(), torch.ones(3, requires_grad=True)
    return [*net.parameters(), scale], lambda: F.cross_entropy(net(X) * scale, t, reduction="none")


def tied():
    table = nn.Embedding(3, 4)
    words, (_, t) = torch.randint(0, 3, (6,)), rows()
    return list(table.parameters()), lambda: F.cross_entropy(table(words) @ table.weight.T, t, reduction="none")


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Attentive(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=dropout, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x)[:, 0])


def custom(function):
    def make():
        (X, t), w = rows(), torch.randn(5, 3, requires_grad=True)
        return [w], lambda: F.cross_entropy(X @ function.apply(w), t, reduction="none")

    return make


def checkpointed(net, X):
    return checkpoint(net, X, use_reentrant=False)


def compiled():
    torch._dynamo.reset()  # otherwise the limit on recompilations ends compilation, silently, after some tests
    net, (X, t) = mlp(), rows()
    fast = torch.compile(net, backend="aot_eager")
    return list(net.parameters()), lambda: F.cross_entropy(fast(X), t, reduction="none")


def parametrized(how):
    return lambda: nn.Sequential(how(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))


def convolution():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))


def sparse():
    (X, t), w = rows(), torch.randn(5, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR is in beta state
        X = (X * (X > 0)).to_sparse_csr()
    return [w], lambda: F.cross_entropy(X @ w, t, reduction="none")


parametrizations = nn.utils.parametrizations
CASES = {
    "raw tensors": Case(raw),
    "indexing": Case(indexed),
    "module": Case(of(mlp)),
    "module and tensor": Case(mixed),
    "tied weights": Case(tied),
    "convolution": Case(of(convolution, (1, 6, 6))),
    "weight_norm": Case(of(parametrized(parametrizations.weight_norm)), vmap=False),
    "orthogonal": Case(of(parametrized(partial(parametrizations.orthogonal, orthogonal_map="matrix_exp")))),
    "spectral_norm": Case(of(lambda: parametrized(parametrizations.spectral_norm)().eval())),
    "spectral_norm in training": Case(of(parametrized(parametrizations.spectral_norm)), vmap=False, rough=True),
    "custom function": Case(custom(Cube), hidden=True),
    "old custom function": Case(custom(OldCube), vmap=False, hidden=True),
    "checkpointing": Case(of(mlp, apply=checkpointed), vmap=False, hidden=True),
    "LSTM": Case(of(lambda: Recurrent(nn.LSTM), (4, 3)), vmap=False),
    "attention": Case(of(Attentive, (4, 4)), vmap=False),
    "attention with dropout": Case(of(lambda: Attentive(0.2), (4, 4)), random=True),
    "batch norm": Case(of(lambda: mlp(nn.BatchNorm1d(4)))),
    "batch norm without momentum": Case(of(lambda: mlp(nn.BatchNorm1d(4, momentum=None)))),
    "dropout": Case(of(lambda: mlp(nn.Dropout(0.5))), random=True),
    "compiled": Case(compiled, second="torch.compile'd module"),
    "sparse data": Case(sparse, vmap=False),
}
every_case = pytest.mark.parametrize("name", CASES)


def built(name):
    made.clear()
    y, losses = CASES[name].make()
    x = torch.linspace(-1, 1, 6).requires_grad_()

    def lower():
        return (x.sigmoid() * losses()).mean() + 0.05 * sum((p**2).sum() for p in y)

    def upper():
        return losses().mean() + 0.1 * (x**2).sum()

    return x, y, upper, lower


def plain_gradient(loss, live, at, wrt, seed=None):
    """By torch alone: write the values into the live tensors, differentiate, restore them."""
    before = [t.detach().clone() for t in live]
    with torch.no_grad():
        for t, value in zip(live, at, strict=True):
            t.copy_(value)
    if seed is not None:
        torch.manual_seed(seed)
    gradients = torch.autograd.grad(loss(), wrt, allow_unused=True)
    with torch.no_grad():
        for t, value in zip(live, before, strict=True):
            t.copy_(value)
    return Vector(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, wrt, strict=True))


def close(a, b, tolerance):
    a, b = Vector(a).detach(), Vector(b).detach()
    assert float((a - b).norm()) <= tolerance * (1e-3 + float(b.norm()))


@pytest.mark.few(7)
@every_case
def test_products_are_differences_of_gradients(name):
    """HVP and cross product against central differences of plain first-order gradients."""
    case, (x, y, upper, lower) = CASES[name], built(name)
    oracle = bo.Oracle([x], y, upper, lower)
    at, v = Vector(y).detach().clone(), Vector(torch.randn_like(t) for t in y)
    epsilon = 1e-5
    buffers = buffer_values()
    plus, minus = (
        (plain_gradient(lower, y, at + v * s, y, 3), plain_gradient(lower, y, at + v * s, [x], 3))
        for s in (epsilon, -epsilon)
    )
    set_buffers(buffers)
    plain, tolerance = plain_gradient(lower, y, at, y, 3), 1e-2 if case.rough else 1e-6
    set_buffers(buffers)
    torch.manual_seed(3)
    sample = oracle.g.draw()
    if case.second is not None:
        with pytest.raises(RuntimeError, match=case.second), oracle.lower_system(sample) as system:
            system.hvp(v)
        return
    with oracle.lower_system(sample) as system:
        close(system.gradient, plain, 1e-12)
        close(system.hvp(v), (plus[0] - minus[0]) * (0.5 / epsilon), tolerance)
        close(system.cross(v), (plus[1] - minus[1]) * (0.5 / epsilon), tolerance)
        cross, hvp = system.both(v)
        close(hvp, system.hvp(v), 1e-12)
        close(cross, system.cross(v), 1e-12)
    difference = bo.Oracle([x], y, upper, lower, session=Session(EvaluationOptions(hvp="finite-difference")))
    torch.manual_seed(3)
    with difference.lower_system(difference.g.draw()) as system:
        close(system.hvp(v), hvp, tolerance)
        close(system.cross(v), cross, tolerance)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch 2.11
@every_case
def test_substituted_equals_in_place(name, request):
    """Values put into the live tensors, or read in their place in every torch call: the same bits."""
    case, (x, y, upper, lower) = CASES[name], built(name)
    if case.hidden:
        reason = "autograd functions and checkpointing read the live tensors out of torch's sight, without an error"
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason))
    w, at = [x.detach() + 0.3], Vector(t.detach() + 0.1 * torch.randn_like(t) for t in y)
    v, live, results, buffers = at.clone() * 0.5, Vector([x, *y]).detach().clone(), [], [buffer_values()]
    for evaluation in (in_place, substituted):
        set_buffers(buffers[0])
        oracle = bo.Oracle([x], y, upper, lower, session=Session(EvaluationOptions(evaluation=evaluation))).at(w, at)
        torch.manual_seed(3)
        xi, zeta = oracle.f.draw(), oracle.g.draw()
        loss, *found = oracle.upper(xi)
        found += [[loss], *oracle.lower_jointly(zeta)[1:], oracle.lower(zeta)[1]]
        if case.second is None:
            with oracle.lower_system(zeta) as system:
                found += [system.gradient, system.hvp(v), system.cross(v), *system.both(v)]
            kept = oracle.kept_system(zeta)
            found += [kept.gradient, kept.hvp(v), kept.cross(v), *kept.both(v)]
        results.append(Vector(t for part in found for t in part))
        buffers.append(buffer_values())
        assert all(map(torch.equal, [x, *y], live))
    assert all(map(torch.equal, *results))
    assert all(map(torch.equal, *buffers[1:]))


@pytest.mark.few(10)
@every_case
@pytest.mark.parametrize("vectorize", [True, 2, False])
def test_stacked_copies_are_plain_gradients(name, vectorize):
    for wrt in ("lower", "upper"):
        check_stacked_copies(name, vectorize, wrt)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 does not read the module under vmap")
def test_a_compiled_module_runs_in_copies():
    """Dynamo reads the forms for stacks too, and what they ask about levels."""
    check_stacked_copies("compiled", True, "lower")


def check_stacked_copies(name, vectorize, wrt):
    """Gradients of a_j f + b_j g at three copies, against plain torch at one after the other."""
    case, (x, y, upper, lower) = CASES[name], built(name)
    oracle = bo.Oracle([x], y, upper, lower, session=Session(EvaluationOptions(vectorize=vectorize)))
    points = [Vector(t.detach() + 0.1 * torch.randn_like(t) for t in y) for _ in range(3)]
    a, b = [0.3, 0.0, -0.2], [1.0, 0.5, -1.0]
    before = Vector(y).detach().clone()
    torch.manual_seed(3)
    xi, zeta = oracle.f.draw(), oracle.g.draw()

    def slopes(points, a):
        copies = Copies(oracle, stack(points))
        terms = ("lower", zeta, b), ("upper", xi, a)
        return copies.lower_slopes(*terms) if wrt == "lower" else copies.upper_slope(*terms)

    (_, f), gradient = slopes(points, a)
    if wrt == "upper" and not case.random:
        close([Copies(oracle, stack(points)).values("upper", xi)], [f], 1e-14)
    fell_back = oracle.session.found.fallback is not None
    assert fell_back == (vectorize is not False and not case.vmap)
    close(y, before, 0.0)
    if case.random and name != "dropout" and vectorize is not False:
        # vmap draws attention's masks in another order than the loop; what counts is that the copies share them.
        _, again = slopes(points, a)
        close(gradient, again, 1e-12)
        (_, f), _ = slopes([points[0]] * 3, [1.0] * 3)
        close(f[:1], f[2:], 1e-14)
        return
    variables = y if wrt == "lower" else [x]
    expected = []
    for point, a_j, b_j in zip(points, a, b, strict=True):
        # One sample of each loss: g is evaluated first, so f's random numbers follow its. Its buffers do not.
        buffers = buffer_values()
        g = plain_gradient(lower, y, point, variables, 3)
        set_buffers(buffers)
        f = plain_gradient(upper, y, point, variables)
        set_buffers(buffers)
        expected.append(f * a_j + g * b_j)
    if wrt == "lower":
        close(gradient, stack(expected), 1e-12)
    else:
        close(gradient, expected[0] + expected[1] + expected[2], 1e-12)


@pytest.mark.few(7)
@pytest.mark.filterwarnings("ignore:the lower loss has kinks")  # attention has a ReLU layer
@every_case
def test_methods_run_on_every_case(name):
    case = CASES[name]
    for cls, options in (
        (bo.AID, {"linear_steps": 3, "linear_solver": "fixed_point"}),
        (bo.AID, {"linear_steps": 3, "linear_solver": "fixed_point", "hvp": "finite-difference"}),
        (bo.ITD, {}),
        (bo.ITD, {"checkpoint": True}),
        (bo.F2SA, {"order": 2}),
    ):
        x, y, upper, lower = built(name)
        optimizer = cls([x], y, lr=0.1, lower_lr=0.02, lower_steps=3, **options)
        if case.second is not None and cls is not bo.F2SA and "hvp" not in options:
            with pytest.raises(RuntimeError, match="differentiated twice"):
                optimizer.step(upper, lower)
            continue
        before = x.detach().clone()
        for _ in range(2):
            loss = optimizer.step(upper, lower)
        assert loss.isfinite()
        assert x.isfinite().all()
        assert not torch.equal(x, before)


@every_case
def test_unrolling_is_the_derivative_of_the_lower_steps(name):
    """ITD against central differences of f(x, y_T(x)) run by a plain torch loop, along one direction."""
    case, (x, y, upper, lower) = CASES[name], built(name)
    if case.second is not None or case.rough:
        pytest.skip("has no exact second derivative")
    start, lr, steps = Vector(y).detach().clone(), 0.05, 3
    buffers = buffer_values()

    def value(shift):
        with torch.no_grad():
            x.add_(shift)
        Vector(y).copy_(start)
        set_buffers(buffers)
        torch.manual_seed(3)
        for _ in range(steps):
            gradients = torch.autograd.grad(lower(), y)
            with torch.no_grad():
                for t, g in zip(y, gradients, strict=True):
                    t.sub_(g, alpha=lr)
        result = upper().item()
        with torch.no_grad():
            x.sub_(shift)
        Vector(y).copy_(start)
        return result

    direction = torch.linspace(1, -1, 6)
    difference = (value(1e-5 * direction) - value(-1e-5 * direction)) / 2e-5
    for options in ({}, {"checkpoint": True}):
        Vector(y).copy_(start)
        set_buffers(buffers)
        optimizer = bo.ITD([x], y, lr=0.0, lower_lr=lr, lower_steps=steps, **options)
        torch.manual_seed(3)
        optimizer.backward(upper, lower)
        assert float(x.grad @ direction) == pytest.approx(difference, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("vectorize", [True, False])
def test_the_lower_loss_alone_must_depend_on_y(vectorize):
    """The gradient of its sum with f does not show whether it does."""
    x, y, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    elsewhere = torch.ones(2, requires_grad=True)

    def lower():
        return (y - x).square().sum()

    def upper():
        return (y + other).square().sum()

    made = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 1, "vectorize": vectorize}
    with pytest.raises(ValueError, match="the lower loss does not depend on lower parameter 1"):
        bo.F2SA([x], [y, other], **made).step(upper, lower)
    optimizer = bo.F2SA([x], [y], **made)
    optimizer.step(upper, lower)
    with pytest.raises(ValueError, match="the upper loss depends on no parameter, upper or lower"):
        optimizer.step(lambda: elsewhere.sum(), lower)


@pytest.mark.parametrize("cls", [bo.F2SA, bo.PZOBO, bo.HOZOG])
def test_steps_with_and_without_tasks_are_evaluated_together(cls):
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    more = {} if cls is bo.F2SA else {"directions": 3}
    optimizer = cls([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2, **more)
    data = torch.arange(24.0).view(4, 3, 2) / 24

    def upper(batch=data[0]):
        return (y - batch).square().mean()

    def lower(batch=data[1]):
        return (y - x * batch).square().mean()

    for tasks in (None, bo.TensorTasks(data), None, bo.TensorTasks(data)):
        optimizer.step(upper, lower, tasks=tasks)
        assert "vectorize_fallback" not in optimizer.diagnostics


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_features_that_read_y_are_refused_with_samples_of_their_own(level, vectorize):
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    losses = {
        "upper": bo.Objective(lambda h: (h - 1).square().sum() + y.sum(), [torch.zeros(2)], features=lambda b: x + b),
        "lower": bo.Objective(lambda h: (y - h).square().sum(), [torch.zeros(2)], features=lambda b: x + b),
    }
    losses[level].features = lambda b: x + y + b
    optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1, samples="independent", vectorize=vectorize)
    with pytest.raises(ValueError, match=f"the features of the {level} objective depend on lower parameter 0"):
        optimizer.step(losses["upper"], losses["lower"])


def test_a_loss_that_calls_backward_leaves_no_gradients_behind():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))

    def lower():
        loss = (y - x).square().sum()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises((ValueError, RuntimeError), match="backward"):
        bo.F2SA([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1).step(lambda: y.sum(), lower)
    assert x.grad is y.grad is None


def test_a_graph_that_has_saved_a_buffer_is_differentiated_before_the_buffer_is_restored():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, t):
            with torch.no_grad():
                self.seen.copy_(0.5 * self.seen + t.mean() + 1)
            return self.seen * t  # saves the buffer

    mean, x, y = Mean(), torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    oracle = bo.Oracle(
        [x], [y], lambda: mean(y).square().sum(), lambda: (mean(y) * x).sum(), session=Session(EvaluationOptions(False))
    )
    copies = Copies(oracle, Vector([torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])]))
    f, g = ("upper", oracle.f.draw(), [0.5, 2.0]), ("lower", oracle.g.draw(), [1.0, 1.0])
    (_, together), (_, of_f), (_, of_g) = copies.lower_slopes(g, f), copies.lower_slopes(f), copies.lower_slopes(g)
    close(together, of_f + of_g, 1e-15)
    close(of_g, [torch.tensor([[3.0] * 3, [1.0] * 3])], 1e-15)
    assert mean.seen == 0


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:FutureWarning", "ignore:.*torch.jit.script.*:DeprecationWarning"
)
def test_parameters_that_cannot_be_redirected_are_noticed():
    """A TorchScript module reads its parameters where no substitution reaches: the loop must take over."""
    (X, t), x = rows(), torch.zeros(6, requires_grad=True)
    net = torch.jit.script(mlp())
    start = Vector(net.parameters()).detach().clone()

    def lower():
        ridge = 0.1 * sum(p.square().sum() for p in net.parameters())
        return (x.sigmoid() * F.cross_entropy(net(X), t, reduction="none")).mean() + ridge

    results = []
    for vectorize in (8, False):
        Vector(net.parameters()).copy_(start)
        optimizer = bo.F2SA([x], net.parameters(), lr=0.1, lower_lr=0.1, lower_steps=3, vectorize=vectorize)
        optimizer.backward(lambda: F.cross_entropy(net(-X), t), lower)
        results.append(x.grad.clone())
        assert ("vectorize_fallback" in optimizer.diagnostics) == bool(vectorize)
    assert torch.equal(*results)


def test_running_statistics_advance_once_in_a_step():
    """At the y that the step ends at, however many evaluations it makes, and wherever."""
    (X, t), net, x = rows(), mlp(nn.BatchNorm1d(4)), torch.zeros(6, requires_grad=True)
    norm = net[2]

    def lower():
        return (x.sigmoid() * F.cross_entropy(net(X), t, reduction="none")).mean()

    def upper():
        return F.cross_entropy(net(2 * X), t)

    def tracked(cls, **options):
        norm.reset_running_stats()
        optimizer = cls([x], net.parameters(), lr=0.1, lower_lr=0.01, lower_steps=4, **options)
        optimizer.step(upper, lower)
        return int(norm.num_batches_tracked)

    for cls, options in (
        (bo.AID, {"linear_solver": "neumann"}),
        (bo.AID, {"linear_solver": "neumann", "hvp": "finite-difference"}),
        (bo.FirstOrder, {}),
        (bo.ITD, {}),
        (bo.ITD, {"checkpoint": True}),
        (bo.F2SA, {}),
        (bo.F2SA, {"vectorize": False}),
    ):
        assert tracked(cls, **options) == 1
        with torch.no_grad():
            hidden = torch.tanh(net[0](X))
        torch.testing.assert_close(norm.running_mean, 0.1 * hidden.mean(0))


def test_a_normalisation_may_begin_to_train_after_the_first_step():
    (X, t), net, x = rows(), mlp(nn.BatchNorm1d(4)), torch.zeros(6, requires_grad=True)
    optimizer = bo.ITD([x], net.parameters(), lr=0.1, lower_lr=0.01, lower_steps=4)

    def step():
        optimizer.step(
            lambda: F.cross_entropy(net(X), t),
            lambda: (x.sigmoid() * F.cross_entropy(net(X), t, reduction="none")).mean(),
        )
        return int(net[2].num_batches_tracked)

    net.eval()
    assert step() == 0
    net.train()
    assert [step(), step()] == [1, 2]


def test_dropout_masks_are_shared_by_the_copies_and_fresh_in_each_step():
    """With one mask for all copies a finite difference in nu stays finite as nu falls."""
    (X, t), net, x = rows((20,)), nn.Sequential(nn.Linear(20, 40), nn.Dropout(0.5), nn.Linear(40, 3)), torch.zeros(6)
    x.requires_grad_()

    def lower():
        return (x.sigmoid() * F.cross_entropy(net(X), t, reduction="none")).mean() + 0.1 * sum(
            p.square().sum() for p in net.parameters()
        )

    def upper():
        return F.cross_entropy(net[2](net[0](X)), t)

    start = Vector(net.parameters()).detach().clone()
    for vectorize in (True, False):
        norms = []
        for nu in (1e-1, 1e-3, 1e-5):
            torch.manual_seed(0)
            Vector(net.parameters()).copy_(start)
            optimizer = bo.F2SA([x], net.parameters(), lr=0.0, lower_lr=0.1, lower_steps=5, nu=nu, vectorize=vectorize)
            optimizer.backward(upper, lower)
            norms.append(float(x.grad.norm()))
        assert norms[1] == pytest.approx(norms[2], rel=1e-5)
        assert norms[0] == pytest.approx(norms[2], rel=0.1)
