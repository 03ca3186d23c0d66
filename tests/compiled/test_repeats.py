"""Parts of a step's graph that repeat, folded to calls of one subgraph."""

import operator

import pytest
import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx.experimental.proxy_tensor import make_fx

import bilevel_optim as bo
from bilevel_optim.compiled import backend, entry, repeats
from bilevel_optim.compiled.backend import Program
from bilevel_optim.compiled.repeats import TIMES, fold_repeats
from bilevel_optim.compiled.small_cpu import small_program

A = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(repeats, "LEAST", 0)


def traced(function, *arguments):
    return make_fx(function)(*arguments)


def calls(module):
    return [node.args[1] for node in module.graph.nodes if node.target is invoke_subgraph]


def operations(module):
    kept = [n for n in module.graph.nodes if n.op == "call_function"]
    return len([n for n in kept if n.target not in (invoke_subgraph, operator.getitem)])


def one(y, x, b):
    return y - 0.1 * (torch.sin(A @ (y - x)) + torch.cos(y) * b.exp() + (y * b).tanh().sigmoid())


def descend(x, y, *batches):
    for b in batches:
        y = one(y, x, b)
    return [y, (y * x).sum()]


def views(x, y, *batches):
    """Each part leaves views of its results and of what it was given."""
    kept = []
    for b in batches:
        y = one(y, x, b)
        rows = y.view(1, 5)
        kept += [rows, b.view(5, 1), rows.t()]
    return [sum((k.sum() for k in kept), y.sum()), kept[0] * 2, kept[5] + 1]


def unequal(x, y, *batches):
    """The first and the middle step have a result that the others have not."""
    norms = []
    for k, b in enumerate(batches):
        y = one(y, x, b)
        if k in (0, len(batches) // 2):
            norms.append(y.norm())
    return [y, *norms]


def saved(x, y, *batches):
    """A reverse sweep takes what the steps have left."""
    ys = [y]
    for b in batches:
        ys.append(one(ys[-1], x, b))
    p = torch.ones_like(y)
    for w, b in zip(reversed(ys[:-1]), reversed(batches), strict=True):
        p = p - 0.1 * (A.t() @ (torch.cos(A @ (w - x)) * p) - torch.sin(w) * b.exp() * p).tanh().sigmoid()
    return [ys[-1], p]


def writes(x, y, *batches):
    """Operations that write stay in order, outside the parts."""
    y = y.clone()
    for k, b in enumerate(batches):
        y = one(y, x, b)
        if k == 3:
            y.mul_(2)
    return [y]


def several(x, y, *batches):
    """Operations with several results."""
    for b in batches:
        y = one(y, x, b)
        top, _ = torch.sort(y)
        low, high = torch.split(top, [2, 3])
        y = y + low.sum() * high.exp().mean()
    return [y, low]


def normalised(x, y, *batches):
    """The statistics, three results of one operation, go from all steps to the end."""
    kept, weight = [], torch.ones_like(x)
    for b in batches:
        rows = torch.stack([y, y.sin(), b])
        rows, *statistics = torch.native_batch_norm(rows, weight, x, None, None, True, 0.1, 1e-5)
        y = one(y, x, b) + rows.tanh().mean(0)
        kept += statistics
    return [y, torch.stack(kept).sum()]


def counted(x, y, *batches):
    """Each part writes into a tensor of its own, as the count of batches of a normalisation."""
    counts = []
    for b in batches:
        count = x.clone()
        rows = count.view(1, 5)
        y = one(y, x, b)
        count.add_(1)
        y = y + rows.sum() * 0.01 + count.mul_(2).mean()
        counts += [count, rows]
    return [y, sum(c.sum() for c in counts), counts[0] * 3, counts[3] * 2]


FUNCTIONS = [counted, normalised, descend, views, unequal, saved, writes, several]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_folded_graphs_give_the_same_numbers(function):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(5, generator=generator) for _ in range(2 + 10)]
    module = traced(function, *tensors)
    folded = fold_repeats(module)
    found = calls(folded)
    assert len(found) >= TIMES
    assert len(found) > len({*found})
    assert operations(folded) < operations(module) / 2
    for own, right in zip(folded(*tensors), module(*tensors), strict=True):
        torch.testing.assert_close(own, right, rtol=0, atol=0)


def test_parts_of_descent_hand_on_only_y():
    tensors = [torch.randn(5) for _ in range(2 + 12)]
    folded = fold_repeats(traced(descend, *tensors))
    (name,) = {*calls(folded)}
    part = getattr(folded, name)
    results = next(node for node in part.graph.nodes if node.op == "output").args[0]
    assert len(results) == 1
    assert len([node for node in part.graph.nodes if node.op == "placeholder"]) == 4  # x, y, the batch, and A


def test_parts_that_write_into_others_stay():
    """Also if their results do not say so, as those of a normalisation, which moves its running statistics."""

    def function(x, y, *batches):
        mean, variance = x.clone(), x.exp()
        for b in batches:
            rows = torch.stack([y, y.sin(), b])
            rows, *_ = torch.ops.aten._native_batch_norm_legit(rows, None, None, mean, variance, True, 0.1, 1e-5)
            y = one(y, x, b) + rows.tanh().mean(0)
        return [y, mean, variance]

    tensors = [torch.randn(5, generator=torch.Generator().manual_seed(2)) for _ in range(2 + 10)]
    module = traced(function, *tensors)
    assert any("_legit" in str(node.target) for node in module.graph.nodes)
    folded = fold_repeats(module)
    assert not any("_legit" in str(n.target) for part in folded.children() for n in part.graph.nodes)
    for own, right in zip(folded(*tensors), module(*tensors), strict=True):
        torch.testing.assert_close(own, right, rtol=0, atol=0)


def test_small_graphs_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(repeats, "LEAST", 500)
    module = traced(descend, *[torch.randn(5) for _ in range(2 + 6)])
    assert fold_repeats(module) is module


def test_parts_with_other_numbers_are_other_parts():
    def function(x, y, *batches):
        for k, b in enumerate(batches):
            y = one(y, x, b) * (1.0 + k)
        return [y]

    tensors = [torch.randn(5) for _ in range(2 + 6)]
    assert not calls(fold_repeats(traced(function, *tensors)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (bo.AID, {"lower_steps": 8, "linear_steps": 8}),
        (bo.ITD, {"lower_steps": 9}),
        (bo.F2SA, {"lower_steps": 8}),
        (bo.PZOBO, {"lower_steps": 8, "directions": 2}),
    ],
    ids=["AID", "ITD", "F2SA", "PZOBO"],
)
def test_steps_with_folded_graphs_are_eager_steps(kind, options, monkeypatch):
    folded = []

    def maker(*_):
        def made(module, fakes, arguments):
            found = fold_repeats(module)
            folded.append(len(calls(found)))
            return Program(lambda tensors: found(*tensors))

        return made

    monkeypatch.setattr(entry, "maker_of", maker)
    right, own = trained(kind, options, compiled=False), trained(kind, options, compiled=True)
    assert folded[0] >= (TIMES if kind in (bo.F2SA, bo.PZOBO) else 2 * TIMES)
    torch.testing.assert_close(own, right, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_inductor_compiles_parts_once(monkeypatch):
    """Its code for them is understood too, so that a step on a CPU keeps the memory of its intermediate results."""
    made = []
    monkeypatch.setattr(backend, "small_program", lambda *a: made.append(small_program(*a)) or made[-1])
    right, own = (trained(bo.ITD, {"lower_steps": 5}, compiled=name) for name in (False, "inductor"))
    assert made
    assert all(made)
    torch.testing.assert_close(own, right, rtol=1e-10, atol=1e-12)


def trained(kind, options, compiled):
    x, y = torch.full((4,), 0.5, requires_grad=True), torch.zeros(4, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(6, 4, generator=generator) for _ in range(5)]
    lower = bo.Objective(lambda b: (b @ y - 1).square().mean() + (x.exp() * y.square()).sum(), batches)
    upper = bo.Objective(lambda b: (b @ y).tanh().square().mean() + y.sum(), batches)
    optimizer = kind([x], [y], lr=0.1, lower_lr=0.05, generator=torch.Generator().manual_seed(0), **options)
    if compiled:
        optimizer.compile()
    for _ in range(5):
        optimizer.step(upper, lower)
    return x.detach(), y.detach()
