"""What a step says about itself: keys, shapes, and the same as plain floats."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bilevel_optim as bo

from ..registry import ARGUMENTS, each


def stepped(row, tasks):
    problem = row.quadratic(tasks=tasks)
    optimizer = row(problem.x, problem.y, short=True)
    loss = problem.run(optimizer, 2)
    return optimizer, loss


class HostReads(TorchDispatchMode):
    """Counts the scalars that are read one by one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@each()
def test_metrics_are_the_last_step_as_floats(row):
    optimizer, loss = stepped(row, tasks=row.takes_tasks)
    with HostReads() as reads:
        metrics = optimizer.metrics()
    assert reads.count == 0  # all of them come together
    assert all(type(value) is float for value in metrics.values())
    assert metrics.pop("loss") == float(loss)
    for name, value in optimizer.diagnostics.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            assert str(metrics.pop(name)) == str(float(value))  # NaN too
        elif isinstance(value, torch.Tensor):
            known = value.double()[~value.isnan()]
            assert math.isclose(metrics.pop(f"{name}/mean"), float(known.mean()), rel_tol=1e-12, abs_tol=1e-300)
            assert metrics.pop(f"{name}/max") == float(known.max())
    assert not metrics
    assert "tasks" not in optimizer.diagnostics  # neither ids nor data are kept alive


def test_there_are_no_metrics_before_a_step_and_no_words_in_them():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = bo.F2SA([x], [y], **ARGUMENTS, vectorize=True)
    assert optimizer.metrics() == {}

    def lower():
        return (y * y.detach().sum().item()).sum() + (y - x).square().sum()  # no item under vmap: a loop

    optimizer.backward(lambda: y.square().sum(), lower)
    assert "vectorize_fallback" in optimizer.diagnostics
    assert {"loss", "spread/max"} <= set(optimizer.metrics())
    assert "vectorize_fallback" not in optimizer.metrics()
