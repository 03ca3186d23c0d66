"""Several ranks give what one process gives: data, tasks and parameters shared in any way, for every method."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo

from ..problems import Tasks, flat, seeded
from ..registry import ROWS
from ..selection import main_rows
from .processes import together

# The differences of these methods are long, so that no rounding error is divided by a small number.
LONG = {
    "F2SA": {"nu": 1.0},
    **{name: {"smoothing": 1.0, "smoothing_mode": "absolute"} for name in ("PZOBO", "HOZOG", "ESMAML")},
}
SHARDED = {
    "F2SA-2": (bo.F2SA, {"order": 2}),
    "F2SA-1, Adam": (bo.F2SA, {"order": 1, "lower_optimizer": torch.optim.Adam, "normalize": False}),
    "AID, differences": (bo.AID, {"hvp": "finite-difference", "linear_solver": "fixed_point"}),
    "F2SA, Adam, from the start": (bo.F2SA, {"lower_optimizer": torch.optim.Adam, "warm_start": False}),
    "FirstOrder": (bo.FirstOrder, {}),
    "F2SA-3, measured rate": (bo.F2SA, {"order": 3, "lower_lr": "auto"}),
    "AID, measured rate": (bo.AID, {"damping": 1.0, "lower_lr": "auto"}, True),
    # Second derivatives: the module keeps its full parameters after a backward pass.
    "AID": (bo.AID, {"damping": 1.0}, True),
    "AID, Adam, from the start": (
        bo.AID,
        {"damping": 1.0, "lower_optimizer": torch.optim.Adam, "warm_start": False},
        True,
    ),
    "ITD": (bo.ITD, {"lower_optimizer": partial(torch.optim.SGD, momentum=0.5)}, True),
    "StocBiO": (bo.StocBiO, {}, True),
    "SOBA": (bo.SOBA, {}, True),
}
FEW = ("F2SA-2", "AID, measured rate", "AID", "AID, Adam, from the start", "ITD")


def ended(row, problem, steps, seed=2, **options):
    """Parameters and losses after some steps."""
    torch.manual_seed(0)
    options = {"generator": seeded(seed), **LONG.get(row.cls.__name__, {}), **options}
    optimizer = row(problem.x, problem.y, short=True, **options)
    losses = [problem.run(optimizer) for _ in range(steps)]
    return flat([*problem.x, *problem.y, *losses])


def on_data(row, dtype, rank=None, world=1, **options):
    """Each rank has its part of the data; directions are those of the first rank, whatever the others draw."""
    part = None if rank is None else (rank, world)
    return ended(row, row.cleaning(n=24, dtype=dtype, part=part), steps=2, seed=rank or 0, **options)


def on_tasks(row, dtype, rank=None, world=1, **options):
    """The ranks share the tasks of a step unevenly; those of methods with rows may have none."""
    if row.declared.tasks == "required":
        return ended(row, row.cleaning(dtype=dtype), steps=2, tasks_per_step=5, **options)
    few = {"task_batch": 1 + world % 2} if "RSVRB" in row.name else {"tasks_per_step": 5}
    return ended(row, row.quadratic(tasks=True, dtype=dtype), steps=2, **few, **options)


def on_rows(row, dtype, rank=None, world=1, rows=7, **options):
    """Each rank has the rows of its tasks only; they look at those that the first rank draws."""
    problem = Tasks(m=rows, rows=True, dtype=dtype)
    if rank is not None:
        problem.y = [split(t.detach(), world).requires_grad_() for t in problem.y]
    optimizer = row(problem.x, problem.y, short=True, generator=seeded(2 + (rank or 0)), **options)
    losses = [problem.run(optimizer) for _ in range(4)]
    optimizer.catch_up()
    if rank is not None:
        sizes = [len(t.to_local()) for name, t in optimizer.state[problem.y[0]].items() if name.startswith("rows.")]
        assert set(sizes) == {len(torch.arange(rows).chunk(world)[rank])}
        problem.y = [t.full_tensor() for t in problem.y]
    return flat([*problem.x, *problem.y, *losses])


def split(t, world):
    return distribute_tensor(t, init_device_mesh("cpu", (world,)), [Shard(0)])


def cases(dtype, every):
    """Names, and functions of the rank and its options; of the main methods alone in turn with data and with tasks."""
    main = main_rows(ROWS)
    for row in ROWS:
        if every or row.name in main:
            kinds = [row.declared.tasks != "required", row.takes_tasks]
            if all(kinds) and not every:
                kinds[main.index(row.name) % 2] = False
            if kinds[0]:
                yield f"{row.name}, data", partial(on_data, row, dtype)
            if kinds[1]:
                yield f"{row.name}, tasks", partial(on_tasks, row, dtype)
            if row.declared.tasks == "rows":
                few = {"task_batch": 2} if row.declared.random else {}
                yield f"{row.name}, rows", partial(on_rows, row, dtype, **few)
            if row.name == "AID":
                yield "AID, data, measured rate", partial(on_data, row, dtype, lower_lr="auto")
                yield "AID, data, Adam on x", partial(on_data, row, dtype, upper_optimizer=torch.optim.Adam)
            if row.name == "PZOBO":
                yield "PZOBO, own directions", partial(on_tasks, row, dtype, share_directions_across_tasks=False)


def sharded_cases(every):
    return {name: row for name, row in SHARDED.items() if every or name in FEW}


def sharded(cls, options, kept=False, rank=None, world=1, recomputed=False, **policy):
    """With the module under FSDP2 if there is a rank; a part of the data each. Also what the module says afterwards."""
    torch.manual_seed(0)
    X, t, Xv = torch.randn(20, 8), torch.randint(0, 4, (20,)), torch.randn(20, 8)
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.zeros(20, requires_grad=True)
    part = slice(None)
    if recomputed:
        net[0].forward = partial(checkpoint, net[0].forward, use_reentrant=recomputed == "reentrant")
    if rank is not None:
        part = torch.arange(20).chunk(world)[rank]
        fully_shard(net[0], **policy)
        fully_shard(net, **policy)
        if kept:
            net.set_reshard_after_backward(False)
        options = {**options, "process_group": dist.group.WORLD}

    def lower():
        return (x.sigmoid()[part] * F.cross_entropy(net(X[part]).double(), t[part], reduction="none")).mean()

    def upper():
        return F.cross_entropy(net(Xv[part]).double(), t[part])

    options = options if cls is bo.SOBA else {"lower_steps": 2, **options}
    options = {"linear_steps": 3, **options} if cls is bo.AID else options
    optimizer = cls([x], net.parameters(), **{"lr": 0.5, "lower_lr": 0.1, **options})
    for _ in range(2):
        optimizer.step(upper, lower)
    with torch.no_grad():
        outputs = net(X)
    if rank is not None:
        net.reshard()
    return flat([x, *(p.full_tensor() if rank is not None else p for p in net.parameters()), outputs])


def mixed_precision(exact, *case, **options):
    """x goes the same way, to the precision of the parameters that the module computes with."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    mixed, exact = (end[:20] for end in (sharded(*case, **options, mp_policy=policy), exact))
    assert 0 < (mixed - exact).norm() < 0.02 * exact.norm()


def refusals(rank, world):
    """Return the errors of impossible calls, the same on all ranks."""
    with pytest.raises(RuntimeError, match="set_reshard_after_backward"):
        sharded(bo.AID, {}, rank=rank, world=world)
    for method in (bo.F2SA, bo.FirstOrder):  # torch loses the gradients of the first block
        with pytest.raises(ValueError, match="use_reentrant=False"), pytest.warns(UserWarning, match="requires_grad"):
            sharded(method, {}, rank=rank, world=world, recomputed="reentrant")
    with pytest.raises(ValueError, match="sharded lower parameters"):
        sharded(bo.PZOBO, {"over_ranks": "directions"}, rank=rank, world=world)
    problem = Tasks(m=world + 1)
    optimizer = bo.AID(
        problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=1, tasks_per_step=world - 1,
        process_group=dist.group.WORLD,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"{world - 1} tasks cannot be shared by {world} ranks"):
        problem.run(optimizer)

    rows = partial(on_rows, next(row for row in ROWS if row.name == "RSVRB"), torch.float64, rank, world)
    with pytest.raises(ValueError, match="need all rows on every rank, but the lower parameters are split"):
        rows(probabilities="adaptive", process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="because each needs at least one and Shard"):
        rows(rows=world - 1, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="but the optimizer runs on"):
        rows()


def reductions(world):
    """Norms and sums of sharded vectors are those of whole ones."""
    for sizes in ([(5, 3), (7,)], [(5, 3)]):
        whole = bo.Vector(torch.randn(*size, generator=seeded(k)) for k, size in enumerate(sizes))
        parts = bo.Vector(split(t, world) for t in whole)
        for of in (bo.Vector.norm, bo.Vector.sum, bo.Vector.max_abs, lambda v: v.dot(v)):
            torch.testing.assert_close(of(parts), of(whole), rtol=1e-12, atol=0)


def sampled(rank, world):
    """The ranks draw their own data, and read few rows."""
    row = next(row for row in ROWS if row.name == "RSVRB-faithful")
    options = {"rank": rank, "world": world, "lower_batch": 2, "process_group": dist.group.WORLD}
    return [
        on_tasks(row, torch.float64, **options).tolist(),
        on_rows(row, torch.float64, task_batch=3, **options).tolist(),
    ]


def measured_on_tasks(rank, world):
    """Return the curvature that each rank keeps: of the stiffest task, which one rank has drawn."""
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(3, requires_grad=True)
    tasks = bo.TensorTasks(torch.tensor([100.0, 1.0]).reshape(2, 1, 1))
    optimizer = bo.AID(
        [x], [y], lr=0.1, lower_steps=2, generator=torch.Generator().manual_seed(0), process_group=dist.group.WORLD
    )
    kept = []
    for _ in range(4):
        optimizer.step(
            lambda rows: (y - 1).square().sum(), lambda rows: rows.mean() * (y - x).square().sum(), tasks=tasks
        )
        kept.append(optimizer.state[y]["curvature"].tolist())
    return kept


def test_the_curvature_of_tasks_is_kept_equally_on_all_ranks(tmp_path):
    """Else a state that one rank has saved would not continue the run of the others."""
    found = together(2, tmp_path, measured_on_tasks, 2)
    assert found[0] == found[1]
    for curvature in found[0]:
        assert torch.tensor(curvature).norm().item() == pytest.approx(200.0, rel=0.02)


def all_cases(rank, world, dtype, every):
    options = {"rank": rank, "world": world}
    group = dist.group.WORLD
    found = {name: run(**options, process_group=group).tolist() for name, run in cases(dtype, every)}
    if dtype == torch.float64:
        found |= {f"{name}, sharded": sharded(*row, **options).tolist() for name, row in sharded_cases(every).items()}
        found["sampled"] = sampled(rank, world)
        found["AID, sharded, recomputed"] = sharded(*SHARDED["AID"], **options, recomputed=True).tolist()
        mixed_precision(torch.tensor(found["AID, sharded"]), *SHARDED["AID"], **options)
        refusals(rank, world)
        reductions(world)
    return found


@pytest.mark.parametrize(
    ("world", "dtype", "every"),
    [
        (2, torch.float64, False),
        *(pytest.param(w, d, True, marks=pytest.mark.slow) for w in (2, 4) for d in (torch.float64, torch.float32)),
    ],
)
def test_every_method_on_several_ranks_is_that_on_one(world, dtype, every, tmp_path):
    results = together(world, tmp_path, all_cases, world, dtype, every)
    expected = {name: run(world=world) for name, run in cases(dtype, every)}
    if dtype == torch.float64:
        expected["AID, sharded, recomputed"] = sharded(*SHARDED["AID"])
        expected |= {f"{name}, sharded": sharded(*row) for name, row in sharded_cases(every).items()}
        assert all(results[rank]["sampled"] == results[0]["sampled"] for rank in range(world))
    for name, values in expected.items():
        tolerance = 1e-7 if "differences" in name or "sharded" in name else 1e-10
        if dtype == torch.float32:  # differences of gradients are off by eps ** (2 / 3), rounded otherwise on one rank
            tolerance = 2.5e-5 if "differences" in name else 1e-6
        for rank in range(world):
            got = torch.tensor(results[rank][name], dtype=values.dtype)
            torch.testing.assert_close(got, values, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
