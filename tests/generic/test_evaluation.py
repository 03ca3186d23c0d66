"""How losses are evaluated makes no difference: vmap or loop, features apart or inline, precision, device, ranks."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import bilevel_optim as bo

from ..problems import P1, Tasks, close, flat, seeded
from ..registry import HALF, ROWS, each

FORMS = pytest.mark.parametrize(
    ("row", "form"),
    [
        pytest.param(row, form, id=f"{row.name}-{form}")
        for row in ROWS
        for form in ("whole", "tasks")
        if row.declared.tasks != ("none" if form == "tasks" else "required")
    ],
)


def outcome(row, form="whole", steps=2, **options):
    """Values and gradients after some steps, and the optimizer."""
    chosen = {name: options.pop(name) for name in ("features", "dropout", "dtype", "rank") if name in options}
    problem = row.cleaning(form, **chosen)
    if form == "tasks":
        options = {"generator": seeded(), "lower_batch": 4, **options}
    torch.manual_seed(0)
    optimizer = row(problem.x, problem.y, short=True, **options)
    problem.run(optimizer, steps)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in problem.x]
    return flat([*problem.parameters, *gradients]), optimizer


def agree(row, a, b):
    close(a, b, row.rounding)


@FORMS
def test_features_apart_are_features_inline(row, form):
    """Objective(features=) gives the same numbers: what it saves is counted for a few methods elsewhere."""
    inline = outcome(row, form, steps=3)[0]
    apart, optimizer = outcome(row, form, steps=3, features=True)
    agree(row, apart, inline)
    assert "vectorize_fallback" not in optimizer.diagnostics


@pytest.mark.parametrize(
    ("row", "form"),
    [pytest.param(row, "batches", id=row.name) for row in ROWS if row.declared.copies]
    + [pytest.param(row, "tasks", id=f"{row.name}-tasks") for row in ROWS if row.takes_tasks],
)
def test_vectorised_equals_looped(row, form):
    together, optimizer = outcome(row, form)
    for chunk in (False, 2):
        other, looped = outcome(row, form, vectorize=chunk)
        agree(row, other, together)
        assert looped.oracle_counts == optimizer.oracle_counts
        assert "vectorize_fallback" not in looped.diagnostics
    assert "vectorize_fallback" not in optimizer.diagnostics


@each(lambda row: row.declared.tasks == "stacked")
def test_tasks_together_are_a_loop_over_tasks(row):
    """Also where nothing has converged: few lower steps, few iterations of the linear solver, adaptive steps."""

    def gradient(ids):
        problem = Tasks(m=3, tasks=ids)
        if row.declared.initial:
            problem.x.append(problem.y[0].detach().clone().requires_grad_())
        problem.tasks.sample = lambda n, generator: torch.arange(n)  # draws nothing, so that methods draw the same
        torch.manual_seed(0)
        options = {"lower_steps": 2, "lower_optimizer": torch.optim.Adam, "lower_lr": 0.05, "warm_start": True}
        optimizer = row(problem.x, problem.y, short=True, **options)
        problem.apply(optimizer.backward)
        return flat(p.grad for p in problem.x), problem.y[0].detach(), optimizer.oracle_counts

    together, alone = gradient(slice(0, 3)), [gradient(slice(i, i + 1)) for i in range(3)]
    for k in (0, 1):
        agree(row, together[k], torch.stack([a[k] for a in alone]).mean(0))
    assert together[2] == {name: 3 * count for name, count in alone[0][2].items()}


@each(lambda row: not row.variant)
def test_dropout_is_shared_by_the_evaluations_of_a_sample(row):
    """It is drawn from torch's generator, so that a seed repeats a step, and does not prevent vmap."""
    form = "tasks" if row.takes_tasks else "whole"
    (first, optimizer), (second, _) = (outcome(row, form, dropout=0.5) for _ in range(2))
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert "vectorize_fallback" not in optimizer.diagnostics


# ---------------------------------------------------------------------------------------------------- precision, device


@each(lambda row: not row.variant and HALF.get(row.name, {}) is not None)
def test_bfloat16_autocast(row):
    """Losses under autocast, parameters and solver vectors in float32; around the loss or around the step."""
    torch.set_default_dtype(torch.float32)
    found = []
    for where in ("none", "loss", "step"):
        problem = row.cleaning(n=60, dtype=torch.float32)
        start = flat(problem.x)
        torch.manual_seed(0)
        optimizer = row(problem.x, problem.y, **HALF.get(row.name, {}))
        cast = torch.autocast("cpu", torch.bfloat16)
        if where == "loss":
            problem.objectives = [cast(loss) for loss in problem.objectives]
        with cast if where == "step" else nullcontext():
            problem.run(optimizer, 3)
        assert {p.dtype for p in problem.parameters} == {torch.float32}
        found.append(flat(problem.x) - start)
    for other in found[1:]:
        assert 0 < (other - found[0]).norm() <= 0.1 * found[0].norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each(lambda row: row.declared.tasks != "required")
def test_cuda_equals_cpu(row):
    results = []
    for device in ("cpu", "cuda"):
        problem = row.cleaning()
        for name in ("X", "Xv", "t", "tv", "index"):
            setattr(problem, name, getattr(problem, name).to(device))
        for parameter in problem.parameters:
            parameter.data = parameter.data.to(device)
        optimizer = row(problem.x, problem.y, short=True, **({"generator": None} if row.declared.random else {}))
        if row.declared.random:  # each device draws its own numbers
            problem.run(optimizer, 3)
            continue
        problem.run(optimizer, 3)
        results.append(flat(problem.parameters).cpu())
    if results:
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------------------------------------------- two processes

DATA = [row for row in ROWS if row.name in ("AID", "AID-differences", "ITD", "F2SA", "PZOBO", "MRBO", "SABA", "RAHGD")]
TASKS = [row for row in ROWS if row.name in ("AID", "F2SA", "PZOBO", "SVRB", "RSVRB", "RSVRB-free", "BSVRB")]
CONTEXTS = [row for row in ROWS if row.name in ("RTMLMC", "DLSGD")]
SHARDED = {
    "F2SA-2": (bo.F2SA, {"order": 2}),
    "F2SA-1, Adam": (bo.F2SA, {"order": 1, "lower_optimizer": torch.optim.Adam, "normalize": False}),
    "AID, differences": (bo.AID, {"hvp": "finite-difference", "linear_solver": "fixed_point"}),
    "FirstOrder": (bo.FirstOrder, {}),
    # Second derivatives: the module keeps its full parameters after a backward pass.
    "AID": (bo.AID, {"damping": 1.0}, True),
    "ITD": (bo.ITD, {"lower_optimizer": partial(torch.optim.SGD, momentum=0.5)}, True),
    "StocBiO": (bo.StocBiO, {}, True),
    "SOBA": (bo.SOBA, {}, True),
}


def on_tasks(row, group=None):
    """The ranks share the tasks of a step, one of them none if there is one only."""
    problem = P1() if row in CONTEXTS else row.quadratic(tasks=True)
    options = {"tasks_per_step": 5} if row in CONTEXTS else {"tasks_per_step": 3}
    if row.declared.tasks == "rows":
        options = {"task_batch": 1} if row.declared.random else {}
    optimizer = row(problem.x, problem.y, short=True, generator=seeded(2), process_group=group, **options)
    losses = [problem.run(optimizer) for _ in range(4)]
    return flat([*problem.x, *problem.y, *losses])


def on_data(row, group=None, rank=None):
    """Each rank has half of the data; directions are those of rank 0, whatever the others draw."""
    return outcome(row, steps=3, rank=rank, process_group=group, generator=seeded(rank or 0))[0]


def sharded(cls, options, kept=False, rank=None):
    """With the module under FSDP2 if there is a rank; half of the data each. Also what the module says afterwards."""
    torch.manual_seed(0)
    X, t, Xv = torch.randn(20, 8), torch.randint(0, 4, (20,)), torch.randn(20, 8)
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.zeros(20, requires_grad=True)
    half = slice(None) if rank is None else slice(10 * rank, 10 * rank + 10)
    if rank is not None:
        fully_shard(net[0])
        fully_shard(net)
        if kept:
            net.set_reshard_after_backward(False)
        options = {**options, "process_group": dist.group.WORLD}

    def lower():
        return (x.sigmoid()[half] * F.cross_entropy(net(X[half]), t[half], reduction="none")).mean()

    def upper():
        return F.cross_entropy(net(Xv[half]), t[half])

    options = options if cls is bo.SOBA else {"lower_steps": 3, **options}
    optimizer = cls([x], net.parameters(), lr=0.5, lower_lr=0.1, **options)
    for _ in range(3):
        optimizer.step(upper, lower)
    with torch.no_grad():
        outputs = net(X)
    if rank is not None:
        net.reshard()
    return flat([x, *(p.full_tensor() if rank is not None else p for p in net.parameters()), outputs])


def everything(group=None, rank=None):
    found = {f"data {row.name}": on_data(row, group, rank) for row in DATA}
    found |= {f"tasks {row.name}": on_tasks(row, group) for row in (*TASKS, *CONTEXTS)}
    return found | {f"sharded {name}": sharded(*row, rank=rank) for name, row in SHARDED.items()}


def run(rank, address, results):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    results[rank] = {name: value.tolist() for name, value in everything(dist.group.WORLD, rank).items()}
    with pytest.raises(RuntimeError, match="set_reshard_after_backward"):
        sharded(bo.AID, {}, rank=rank)
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(run, (f"file://{tmp_path}/rendezvous", results), nprocs=2)
        results = dict(results)
    for name, expected in everything().items():
        tolerance = 1e-7 if "differences" in name or "sharded" in name or "F2SA" in name else 1e-10
        for rank in (0, 1):
            got = torch.tensor(results[rank][name])
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
