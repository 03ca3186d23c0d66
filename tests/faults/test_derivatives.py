"""The first step finds derivatives of the losses that are not those of their values, and accuses no right ones."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import bilevel_optim as bo
from bilevel_optim.oracle.differentiable import plain_layer_norm
from bilevel_optim.oracle.probe import compare
from bilevel_optim.problem.vector import Vector

from ..problems import seeded
from ..test_verdicts import Wrong, problem

D = torch.float64
STEPS = {"AID": {"lower_steps": 5}, "ITD": {"lower_steps": 5}, "F2SA": {"lower_steps": 5}, "SOBA": {}}


def method(name, x, y, **options):
    return getattr(bo, name)(x, y, lr=0.1, **{"lower_lr": 0.1, **STEPS[name], **options})


def classification(dtype=D, seed=1):
    return torch.randn(40, 5, generator=seeded(seed)).to(dtype), torch.randint(4, (40,), generator=seeded(2))


def ridge_problem(name, loss, y, **options):
    """f = sum |y - 1|^2 and g = loss + exp(x) |y|^2; return the optimizer and its losses."""
    x = torch.full((), -2.0, dtype=y[0].dtype, requires_grad=True)
    optimizer = method(name, [x], y, **options)
    upper = lambda: sum((t - 1).square().sum() for t in y)  # noqa: E731
    return optimizer, upper, lambda: loss() + x.exp() * sum(t.square().sum() for t in y)


def weights(dtype=D):
    return nn.Parameter(torch.randn(4, 5, generator=seeded(3)).to(dtype))


def chunked(y):
    X, target = classification(y.dtype)
    return F.linear_cross_entropy(X, y, target, options=nn.LinearCrossEntropyOptions())


def states(y):
    return torch.zeros(40, dtype=y.dtype), torch.randn(3, 40, generator=seeded(4)).to(y.dtype)


def by_cond(y):
    X, _ = classification(y.dtype)
    branch = lambda y: (X @ y.T).tanh()  # noqa: E731
    return (torch.cond(y.sum() > -1e9, branch, lambda y: 2 * branch(y), (y,)) - 1).square().mean()


def by_scan(y):
    h, z = states(y)
    return (scan(lambda h, z: ((h * y[0, 0] + z * y[1, 1]).tanh(), h.clone()), h, z)[0] - 1).square().mean()


def by_while(y):
    h, _ = states(y)
    start = torch.zeros((), dtype=torch.long)
    body = lambda i, h: (i + 1, (h * y[0, 0] + y[1, 1]).tanh())  # noqa: E731
    return (while_loop(lambda i, h: i < 3, body, (start, h))[1] - 1).square().mean()


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no chunked loss")
@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("name", ["AID", "ITD", "SOBA"])
def test_the_chunked_cross_entropy(name, dtype):
    y = weights(dtype)
    optimizer, *losses = ridge_problem(name, lambda: chunked(y), [y])
    before = y.detach().clone()
    with pytest.raises(bo.DerivativeError, match="second derivative in y") as caught:
        optimizer.step(*losses)
    assert torch.equal(before, y)
    assert optimizer.oracle_counts["hvp"] == 0
    assert "linear_cross_entropy" in caught.value.operation
    for remedy in ("without options=", "hvp='finite-difference'", "F2SA with vectorize=False"):
        assert remedy in str(caught.value)
    optimizer, *losses = ridge_problem(name, lambda: chunked(y), [y], hvp="finite-difference")
    optimizer.step(*losses)
    optimizer, *losses = ridge_problem(name, lambda: chunked(y), [y], check_derivatives=False)
    optimizer.step(*losses)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no chunked loss")
def test_copies_under_vmap_are_compared_with_a_plain_evaluation():
    y = weights()
    optimizer, *losses = ridge_problem("F2SA", lambda: chunked(y), [y], order=4)
    with pytest.raises(bo.DerivativeError, match=r"under torch\.func\.vmap") as caught:
        optimizer.step(*losses)
    assert "vectorize=False" in str(caught.value)
    optimizer, *losses = ridge_problem("F2SA", lambda: chunked(y), [y], vectorize=False, lower_lr="auto")
    optimizer.step(*losses)
    assert "derivatives" not in optimizer.diagnostics


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no chunked loss")
def test_a_backward_that_refuses_a_second_call_is_called_once():
    """The chunked loss is one; its steps are those of the plain loss."""
    ends = []
    for loss in (chunked, lambda y: F.linear_cross_entropy(*classification()[:1], y, classification()[1])):
        y = weights()
        optimizer, *losses = ridge_problem("F2SA", lambda y=y, loss=loss: loss(y), [y], vectorize=False)
        for _ in range(2):
            optimizer.step(*losses)
        ends.append([*(p.detach() for group in optimizer.param_groups for p in group["params"])])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_method_that_takes_only_values_is_not_asked_for_derivatives():
    """ES-MAML adapts by values with `lower_directions`: the loss may have no derivative, or one that is not its own."""
    for directions in (4, 0):
        x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        optimizer = bo.ESMAML([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2, lower_directions=directions)
        losses = lambda y=y: (y - 1).square().sum(), lambda y=y: Wrong.apply(y).square().sum()
        if directions:
            optimizer.step(*losses)
            assert "derivatives" not in optimizer.diagnostics
        else:
            with pytest.raises(bo.DerivativeError, match="gradient in y"):
                optimizer.step(*losses)


@pytest.mark.parametrize(
    ("name", "loss", "derivative"),
    [("AID", by_cond, "second derivative in y"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (  # as by_cond
         ("F2SA", by_while, "gradient in y"), ("AID", by_scan, "second derivative in y")))],
)  # fmt: skip
def test_control_flow(name, loss, derivative):
    y = weights()
    optimizer, *losses = ridge_problem(name, lambda: loss(y), [y])
    with pytest.raises(bo.DerivativeError, match=derivative) as caught:
        optimizer.step(*losses)
    assert caught.value.operation == {"by_cond": "CondAutogradOp", "by_scan": "ScanAutogradOp"}.get(
        loss.__name__, "WhileLoopAutogradOp"
    )
    assert ("F2SA" in str(caught.value)) == (loss is not by_while)


WORDS = torch.tensor([[0, 1, 2, 0], [3, 4, 0, 0], [1, 3, 2, 4]])


def padded(weight, ridge, constant=False):
    """Fit of a classifier of means over words, with padding, and that plus e^x |y|^2, with ``ridge`` of all rows.

    ``constant``: y is all rows but that of padding, which is a constant.
    """
    target, mix = torch.tensor([0, 2, 1]), torch.randn(3, 3, generator=seeded(1))
    x, y = torch.tensor(-2.0, requires_grad=True), weight[int(constant) :].clone().requires_grad_()
    whole = (lambda: torch.cat([weight[:1], y])) if constant else lambda: y

    def fit(words=WORDS):
        means = F.embedding(words, whole(), padding_idx=None if constant else 0).mean(-2)
        return F.cross_entropy((means @ mix).tanh(), target)

    return x, y, fit, lambda words=WORDS: fit(words) + x.exp() * whole()[int(not ridge) :].square().sum()


@pytest.mark.parametrize("name", ["AID", "ITD", "SOBA", "F2SA"])
@pytest.mark.parametrize("start", ["zero", "random"])
@pytest.mark.parametrize("ridge", [False, True])
def test_padding_rows(ridge, start, name):
    """Their gradient is masked: they are constants, unless another term of the lower loss moves them."""
    weight = torch.randn(5, 3, generator=seeded(7))
    weight[0] *= start == "random"
    x, y, fit, lower = padded(weight, ridge)
    optimizer = method(name, [x], [y])
    if ridge and start == "random":
        with pytest.raises(bo.DerivativeError, match="gradient in y") as caught:
            optimizer.step(fit, lower)
        assert "padding row" in caught.value.operation
        assert "right: a padding row of zeros" in str(caught.value)
        return
    optimizer.backward(fit, lower)
    assert "derivatives" not in optimizer.diagnostics
    other, y, fit, lower = padded(weight, ridge, constant=True)
    method(name, [other], [y]).backward(fit, lower)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["AID", "SOBA", "F2SA"])
def test_padding_rows_of_tasks(name):
    """Torch's vmap would hold the row of the first task alone."""
    weight, tasks = torch.randn(5, 3, generator=seeded(7)), bo.TensorTasks(torch.stack([WORDS, WORDS.flip(1)]))
    found = []
    for constant in (False, True):
        x, y, fit, lower = padded(weight, False, constant)
        optimizer = method(name, [x], [y])
        optimizer.backward(fit, lower, tasks=tasks)
        assert optimizer.diagnostics.keys().isdisjoint({"derivatives", "vectorize_fallback"})
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["AID", "F2SA", "differences"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_padding_row_that_the_upper_loss_moves(tied, name):
    """Output weights tied to the embedding: differences over moved rows have another cross derivative."""
    y, mix = nn.Parameter(torch.randn(4, 3, generator=seeded(8), dtype=D)), torch.randn(5, 3, dtype=D)
    y.data[0] = 0
    x, target = torch.tensor([0.5, 0.8, 0.3], dtype=D, requires_grad=True), torch.tensor([0, 1, 2, 0, 1])
    lower = lambda: F.embedding(target, y, padding_idx=0).add(1).mul(x).sin().mean() + y.square().sum()  # noqa: E731
    upper = lambda: F.cross_entropy(mix @ y[int(not tied) :].T, target)  # noqa: E731
    options = {"hvp": "finite-difference"} if name == "differences" else {}
    optimizer = (bo.F2SA if name == "F2SA" else bo.AID)([x], [y], lr=0.1, lower_lr=0.4, lower_steps=30, **options)
    if tied and name != "AID":
        with pytest.raises(bo.DerivativeError, match=r"padding row is moved.*right: exact products"):
            optimizer.backward(upper, lower)
        return
    optimizer.backward(upper, lower)
    rest = y[1:].detach().requires_grad_()
    whole = lambda: torch.cat([torch.zeros(1, 3, dtype=D), rest])  # noqa: E731
    other = x.detach().requires_grad_()
    lower = lambda: F.embedding(target, whole()).add(1).mul(other).sin().mean() + rest.square().sum()  # noqa: E731
    upper = lambda: F.cross_entropy(mix @ whole()[int(not tied) :].T, target)  # noqa: E731
    bo.AID([other], [rest], lr=0.1, lower_lr=0.4, lower_steps=30, linear_steps=20).backward(upper, lower)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-6, atol=1e-9)


class Once(torch.autograd.Function):
    """A cube whose gradient is right, but has no derivative."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_each_tensor_is_judged_by_its_own_derivatives(scale, wrong):
    """The large curvature of another tensor does not hide a wrong second derivative."""
    x, far = torch.full((2,), 0.5, dtype=D, requires_grad=True), torch.zeros(20, dtype=D, requires_grad=True)
    y = torch.tensor([0.3, 0.6], dtype=D, requires_grad=True)
    cube = Once.apply if wrong else lambda y: y**3
    lower = lambda: scale * (far - x.sum()).square().sum() + (y - x).square().sum() + cube(y).sum()  # noqa: E731
    optimizer = bo.AID([x], [far, y], lr=0.1, lower_lr=0.1 / scale, lower_steps=1, linear_solver="direct")
    if wrong:
        with pytest.raises(bo.DerivativeError, match="second derivative in y"):
            optimizer.backward(y.sum, lower)
    else:
        optimizer.backward(y.sum, lower)
        assert "derivatives" not in optimizer.diagnostics


@pytest.mark.parametrize("kind", [torch.float32, D, torch.complex128])
def test_casts_to_a_type_of_more_precision_are_checked(kind):
    x, y = torch.ones(2, dtype=D, requires_grad=True), torch.tensor([0.3, 0.6], dtype=D, requires_grad=True)
    lower = lambda: ((y - x).square().sum() + Once.apply(y).sum()).to(kind).real.double()  # noqa: E731
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    if kind == torch.float32:
        optimizer.backward(y.sum, lower)
        assert "less precision" in optimizer.diagnostics["derivatives"]
    else:
        with pytest.raises(bo.DerivativeError, match="second derivative in y"):
            optimizer.backward(y.sum, lower)


def test_spectral_norm_in_training_mode_only():
    torch.manual_seed(0)
    X, target = classification()
    net = nn.Sequential(spectral_norm(nn.Linear(5, 16)), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer, *losses = ridge_problem("AID", lambda: F.cross_entropy(net(X), target), [*net.parameters()])
    buffers = [b.clone() for b in net.buffers()]
    with pytest.raises(bo.DerivativeError, match="second derivative in y"):
        optimizer.step(*losses)
    assert all(map(torch.equal, buffers, net.buffers()))
    net.eval()
    optimizer.step(*losses)
    net.train()  # another mode is another loss
    with pytest.raises(bo.DerivativeError, match="second derivative in y"):
        optimizer.step(*losses)


FAULTS = {
    "x detached in g": "second derivative in x and y",
    "item in g": "second derivative in x and y",
    "wrong backward in g": "second derivative in x and y",
    "y detached in a penalty": "(second derivative|gradient) in y",
    "item in f": "gradient in x",
    "wrong backward in f": "gradient in x",
}


@pytest.mark.parametrize("name", ["AID", "SOBA", "F2SA"])
@pytest.mark.parametrize("fault", FAULTS)
def test_put_in_faults(fault, name):
    if (fault, name) == ("y detached in a penalty", "F2SA"):
        pytest.skip("one percent of the gradient at this point")
    upper, lower, x, y = problem(fault)
    expected = FAULTS[fault] if name != "F2SA" else "gradient in x"
    with pytest.raises(bo.DerivativeError, match=expected):
        method(name, [x], [y]).step(upper, lower)


@pytest.mark.parametrize("name", ["AID", "F2SA"])
@pytest.mark.parametrize("fault", ["", "kink", "batch norm", "dropout", "noise of its own", "calls counted"])
def test_right_and_noisy_losses_are_not_accused(fault, name):
    upper, lower, x, y = problem(fault)
    optimizer, differs = method(name, [x], [y]), fault in ("noise of its own", "calls counted")
    warned = pytest.warns(bo.BilevelWarning, match="another value each time")
    with warned if differs and name == "F2SA" else nullcontext():
        optimizer.step(upper, lower)
    said = optimizer.diagnostics.get("derivatives", "")
    assert ("another value each time" in said) == differs


@pytest.mark.parametrize("source", ["generator", "python", "numpy", "torch"])
@pytest.mark.parametrize("name", ["F2SA", "PZOBO", "HOZOG", "SOBA"])
def test_noise_that_cannot_be_repeated_is_told(name, source):
    """Noise divided by the step of a difference is many times the hypergradient."""
    own, numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)
    draw = {
        "generator": lambda: torch.randn((), generator=own),
        "python": lambda: random.gauss(0, 1),
        "numpy": numbers.standard_normal,
        "torch": lambda: torch.randn(()),
    }[source]
    x, y = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    options = {"hvp": "finite-difference"} if name == "SOBA" else {"lower_steps": 3}
    optimizer = getattr(bo, name)([x], [y], lr=0.1, lower_lr=0.1, **options)

    def lower():
        return (y - x.exp() + 0.3 * float(draw())).square().sum()

    with nullcontext() if source == "torch" else pytest.warns(bo.BilevelWarning, match="another value each time"):
        optimizer.step(lambda: (y - 2).square().sum(), lower)


def network(kind):
    X, target = classification(torch.float32)
    layers = {
        "relu": [nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)],
        "pooled": [
            nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 8, 2), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(16, 4),
        ],
        "tanh": [nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4)],
        "norm": [nn.Linear(5, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 4)],
        "weight norm": [weight_norm(nn.Linear(5, 32)), nn.Tanh(), nn.Linear(32, 4)],
    }[kind]  # fmt: skip
    return nn.Sequential(*layers).float(), X, target


@pytest.mark.few(13)
@pytest.mark.parametrize("name", ["ITD", "F2SA"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["relu", "pooled", "tanh", "norm", "weight norm"])
def test_networks_in_float32_are_not_accused(kind, seed, name):
    torch.manual_seed(seed)
    net, X, target = network(kind)
    optimizer, *losses = ridge_problem(name, lambda: F.cross_entropy(net(X), target), [*net.parameters()])
    optimizer.step(*losses)
    if kind in ("tanh", "weight norm"):
        assert "derivatives" not in optimizer.diagnostics
    assert all(isinstance(number, float) for number in optimizer.metrics().values())


def test_low_precision_is_left_open():
    net, X, target = network("tanh")

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(net(X), target)

    optimizer, upper, lower = ridge_problem("AID", loss, [*net.parameters()])
    optimizer.step(upper, lower)
    with torch.autocast("cpu", torch.bfloat16):
        optimizer, upper, lower = ridge_problem("AID", loss, [*net.parameters()])
        optimizer.step(upper, lower)
    assert "the precision is too low" in optimizer.diagnostics["derivatives"]


def test_nothing_else_changes():
    """Random states, counts, batches, buffers and results are those of a step without the check."""
    ends = []
    for check in (True, False):
        torch.manual_seed(0)
        net, X, target = network("norm")
        data = bo.Objective(
            lambda i, net=net, X=X, target=target: F.cross_entropy(net(X[i]), target[i]), [slice(0, 20), slice(20, 40)]
        )
        x = torch.full((), -2.0, dtype=torch.float32, requires_grad=True)
        y = [*net.parameters()]
        lower = data.mapped(lambda loss, x=x, y=y: loss + x.exp() * sum(t.square().sum() for t in y))
        optimizer = bo.ITD([x], y, lr=0.1, lower_lr=0.1, lower_steps=3, check_derivatives=check)
        for _ in range(2):
            optimizer.step(lambda y=y: sum((t - 1).square().sum() for t in y), lower)
        position = data.state_dict()["position"]
        ends.append((optimizer.oracle_counts, position, torch.rand(1), x.detach(), *net.state_dict().values()))
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


DRAWS = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_numbers_go_on_as_without_the_check(kind):
    """Those that the losses draw, also from Python and NumPy."""
    ends, draw = [], DRAWS[kind]
    for check in (True, False):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        optimizer = method("AID", [x], [y], check_derivatives=check)
        optimizer.step(lambda y=y: (y - 1).square().sum() + draw(), lambda x=x, y=y: (y - x).square().sum() + draw())
        ends.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
    assert ends[0] == ends[1]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA])
def test_what_is_right_where_y_begins_is_compared_again(cls, compiled):
    """At y = 0 the wrong part of a derivative is zero; the second check comes after ten steps."""

    class Energy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return y.square().sum() / 2

        @staticmethod
        def backward(ctx, gradient):
            return 0.9 * gradient * ctx.saved_tensors[0]

        @staticmethod
        def vmap(info, dims, y):
            return y.movedim(dims[0], 0).square().sum(1) / 2, 0

    x, y = torch.tensor([2.0, -1.0, 3.0], requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = cls([x], [y], lr=0.0, lower_lr=1.0, lower_steps=2)
    losses = lambda: (y - 1).square().sum() / 2, lambda: 0.2 * Energy.apply(y) - y @ x
    if compiled:
        optimizer.compile(backend="eager")
    with pytest.raises(bo.DerivativeError, match="the operation Energy"):
        list(map(optimizer.step, *zip(*[losses] * 20, strict=True)))
    assert optimizer._run_state.steps == (16 if compiled else 10)


def test_each_of_several_losses_is_checked_twice(monkeypatch):
    checks = []
    monkeypatch.setattr("bilevel_optim.optimizer.method.check_derivatives", lambda *a: checks.append(a) or "")
    upper, lower, x, y = problem("")
    other, optimizer = (lambda: 2 * lower()), method("AID", [x], [y])
    for step in range(16):
        optimizer.step(upper, other if step % 2 else lower)
        assert len(checks) == min(step + 1, 2) + max(min(step - 9, 2), 0)


def test_only_new_losses_are_checked(monkeypatch):
    checks = []
    monkeypatch.setattr("bilevel_optim.optimizer.method.check_derivatives", lambda *a: checks.append(a) or "")
    upper, lower, x, y = problem("")
    optimizer = method("AID", [x], [y])
    for _ in range(3):
        optimizer.step(lambda: upper(), lambda: lower())  # functions made at each step, of the same code
    assert len(checks) == 1
    optimizer.step(upper, lower)
    optimizer.step(upper, lower)
    assert len(checks) == 2
    more = torch.zeros(2, requires_grad=True)
    optimizer.add_param_group({"params": [more], "level": "lower", "lr": 0.1})
    optimizer.step(lambda: upper(), lambda: lower() + more.square().sum())
    assert len(checks) == 3


def test_compare_leaves_open_what_two_differences_do_not_agree_on():
    claimed, one = Vector([torch.ones(3)]), torch.ones(3)
    call = {"size": 0.0, "noise": 0.0, "tolerance": 1e-3}
    assert compare(claimed, lambda factor: Vector([one]), **call).outcome == "right"
    assert compare(claimed, lambda factor: Vector([2 * one]), **call).outcome == "wrong"
    assert compare(claimed, lambda factor: Vector([(2 + 0.1 * factor) * one]), **call).outcome == "unknown"
    assert compare(claimed, lambda factor: Vector([2 * one]), **{**call, "noise": 0.02}).outcome == "unknown"
    assert compare(claimed, lambda factor: Vector([one * torch.nan]), **call).outcome == "unknown"


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no chunked loss")
def test_tasks_under_vmap_are_compared_with_single_ones():
    y = weights()
    x = torch.zeros(4, 5, requires_grad=True)
    X, target = torch.randn(3, 40, 5, generator=seeded(5)), torch.randint(4, (3, 40), generator=seeded(6))
    tasks = bo.TensorTasks((X, target), (X, target))

    def lower(batch):
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(batch[0], y, batch[1], options=options) + (y - x).square().sum()

    def upper(batch):
        return F.cross_entropy(batch[0] @ y.T, batch[1])

    optimizer = method("F2SA", [x], [y], vectorize=False, lower_lr="auto")
    optimizer.step(upper, lower, tasks=tasks)
    optimizer = method("F2SA", [x], [y], lower_lr="auto")
    with pytest.raises(bo.DerivativeError, match=r"lower loss's .* off by"):
        optimizer.step(upper, lower, tasks=tasks)
    optimizer = method("AID", [x], [y])
    optimizer.step(upper, lambda batch: upper(batch) + (y - x).square().sum(), tasks=tasks)
    assert "derivatives" not in optimizer.diagnostics


def test_a_loss_whose_values_differ_under_vmap():
    """Random numbers may; other values may not."""

    def lower(noise, x, y):
        inside = torch._C._functorch.maybe_current_level() is not None
        loss = (y - x).square().sum()
        return loss + torch.rand(3) @ y if noise else 2 * loss if inside else loss

    for noise in (0, 1):
        x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        losses = lambda y=y: (y - 1).square().sum(), lambda n=noise, x=x, y=y: lower(n, x, y)
        optimizer = method("F2SA", [x], [y], order=4)
        if noise:
            optimizer.step(*losses)
        else:
            with pytest.raises(bo.DerivativeError, match=r"under torch\.func\.vmap, compared with a plain one"):
                optimizer.step(*losses)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("features", [False, True])
def test_parts_and_features_are_checked_too(accumulate, features):
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    for fault in (False, True):
        part = lambda c, fault=fault: (Wrong.apply(x) if fault else x) * c  # noqa: E731
        loss = lambda z: (y - z).square().sum()  # noqa: E731
        options = {"features": part} if features else {}
        whole = loss if features else lambda c, part=part, loss=loss: loss(part(c))
        lower = bo.Objective(whole, [1.0, 2.0], accumulate=accumulate, **options)
        for name in ("AID", "ITD", "F2SA"):
            optimizer = method(name, [x], [y])
            if fault:
                with pytest.raises(bo.DerivativeError, match=r"lower loss's .* in x"):
                    optimizer.step(lambda: (y - 1).square().sum(), lower)
            else:
                optimizer.step(lambda: (y - 1).square().sum(), lower)
                assert "derivatives" not in optimizer.diagnostics


def test_other_options_than_true_and_false_are_refused():
    with pytest.raises(ValueError, match="Invalid check_derivatives value: 1"):
        bo.SOBA([torch.zeros(1, requires_grad=True)], [torch.zeros(1, requires_grad=True)], lr=1, check_derivatives=1)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("", ""),
        ("lower y", "lower loss's gradient in y"),
        ("lower xy", "lower loss's second derivative in x and y"),
        ("upper x", "upper loss's gradient in x"),
        ("upper y", "upper loss's gradient in y"),
    ],
)
def test_small_derivatives_do_not_hide_behind_large_ones(fault, text):
    """Those of one tensor of each level are 1e4 times those of the other, in which a part is detached."""
    large, small = [torch.randn(n, generator=seeded(n), dtype=torch.float64) for n in (5, 3)]
    x = [large.clone().requires_grad_(), small.clone().requires_grad_()]
    y = [large.flip(0).requires_grad_(), small.flip(0).requires_grad_()]

    def held(level, t):
        return t.detach() if level == fault else t

    def g():
        big = ((y[0] - x[0]).square() / 2 + y[0] ** 4 / 10).sum()
        rest = y[1].square() / 2 + held("lower y", y[1]) * y[1] ** 3 - held("lower xy", x[1]) * x[1] * y[1]
        return 1e4 * big + rest.sum()

    def f():
        big = ((y[0] - 1).square() + x[0].square()).sum()
        return 1e4 * big + (held("upper y", y[1]) * y[1] ** 2 + held("upper x", x[1]) * x[1]).sum()

    optimizer = bo.AID(x, y, lr=1e-6, lower_lr=1e-6, lower_steps=1)
    if fault:
        with pytest.raises(bo.DerivativeError, match=text):
            optimizer.step(f, g)
    else:
        optimizer.step(f, g)
        assert "derivatives" not in optimizer.diagnostics


@pytest.mark.parametrize(("large", "small"), [(1e6, 1e-6), (1e8, 1e-4)])
def test_losses_that_cancel_large_numbers_are_not_called_wrong(large, small):
    """Their values are known to few digits only, and so are differences."""
    x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 0.1))

    def f():
        return large + small * ((y - 1).square().sum() + x.sin().sum()) - large

    optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1)
    for _ in range(2):
        optimizer.step(f, lambda: (y - x).square().sum() / 2)


@pytest.mark.parametrize("name", ["AID", "SOBA"])
def test_a_detached_cross_derivative_is_found_if_x_and_y_have_one_shape(name):
    """Its error is a rotation, which no direction shows that is the same in x and in y."""
    x, y = (torch.randn(2, generator=seeded(k), dtype=D).requires_grad_() for k in (1, 2))
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=D)
    with pytest.raises(bo.DerivativeError, match="second derivative in x and y"):
        method(name, [x], [y]).step(
            lambda: (y - 1).square().sum(), lambda: y.square().sum() / 2 - y @ (x + turn @ x.detach())
        )


class NormByHand(nn.LayerNorm):
    """A layer norm in plain operations."""

    def forward(self, z):
        variance, mean = torch.var_mean(z, -1, correction=0, keepdim=True)
        return (z - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize(
    ("name", "compiled", "by"),
    [
        ("ITD", False, torch.autograd),
        ("AID", False, torch.func),
        ("SOBA", True, torch.autograd),
        ("SOBA", True, torch.func),
    ],
    ids=["itd", "aid", "compiled-autograd", "compiled-func"],
)
def test_a_gradient_penalty_may_go_through_a_layer_norm(name, compiled, by):
    """A product of its Hessian needs third derivatives of the layer, which are wrong in torch."""
    ends = []
    for norm in (nn.LayerNorm, NormByHand):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), norm(4, eps=0.1), nn.Softplus(), nn.Linear(4, 1)).double()
        x, rows = torch.linspace(0.5, 1, 4, dtype=D).requires_grad_(), torch.randn(2, 6, 4, dtype=D)

        def penalty(net=net, x=x, rows=rows):
            if by is torch.func:
                return torch.func.grad(lambda z: net(z).sum())(rows[0] * x).square().mean()
            z = rows[0] * x
            z = z if z.requires_grad else z.requires_grad_()
            return torch.autograd.grad(net(z).sum(), z, create_graph=True)[0].square().mean()

        def lower(net=net, rows=rows, penalty=penalty):
            decay = sum(p.square().sum() for p in net.parameters()) / 2
            return (net(rows[0]) - rows[0].sum(1, keepdim=True)).square().mean() + 10 * penalty() + decay

        optimizer = method(name, [x], net.parameters(), lower_lr=0.02)
        if compiled:
            optimizer.compile(backend="eager")
        for _ in range(2 + compiled):
            optimizer.step(lambda net=net, rows=rows: (net(rows[1]) - 1).square().mean(), lower)
        assert "compile_fallback" not in optimizer.diagnostics
        ends.append(torch.cat([x.detach(), x.grad, *(p.detach().flatten() for p in net.parameters())]))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_plain_layer_norm_is_torchs(dtype):
    values = torch.randn(2, 3, 4, 5, generator=seeded(0)).to(dtype)
    weight, bias = (torch.randn(4, 5, generator=seeded(k)).to(dtype) for k in (1, 2))
    for options in ((), (weight,), (weight, bias, 0.1)):
        torch.testing.assert_close(
            plain_layer_norm(values, (4, 5), *options), F.layer_norm(values, (4, 5), *options), rtol=None, atol=None
        )
