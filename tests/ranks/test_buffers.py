"""DistributedDataParallel around modules with buffers, which it would exchange in every forward pass."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bilevel_optim as bo

from ..problems import same, values
from .processes import together

METHODS = {"AID": bo.AID, "F2SA": bo.F2SA, "PZOBO": bo.PZOBO}


def made(rank, exchange, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapped = DistributedDataParallel(net)
    wrapped.broadcast_buffers = exchange
    x = torch.zeros(5, requires_grad=True)
    data = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(rank))

    def lower(batch=data[0]):
        return wrapped(batch).square().mean() + sum(p.square().sum() for p in net.parameters()) * x.exp().mean()

    def upper(batch=data[1]):
        return (wrapped(batch) - 1).square().mean()

    return x, net, upper, lower, options | {"lr": 0.1, "lower_lr": 0.05, "lower_steps": 2}


def refused_and_safe(rank):
    """Steps in which rank 1 makes fewer forward passes than rank 0."""
    seen = {}
    for name, method in METHODS.items():
        x, net, upper, lower, options = made(rank, True, process_group=dist.group.WORLD)
        optimizer, before = method([x], net.parameters(), **options), values([*net.state_dict().values()])
        with pytest.raises(ValueError, match=r"forward_sync_buffers=False .* or call its \.module"):
            optimizer.step(upper, lower)
        assert same(values([*net.state_dict().values()]), before)

        tasks = bo.TensorTasks(torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(9)))
        x, net, upper, lower, options = made(rank, False, process_group=dist.group.WORLD, vectorize=False)
        options["generator"] = torch.Generator().manual_seed(0)
        optimizer = method([x], net.parameters(), **options)
        for _ in range(2):  # two tasks on rank 0, one on rank 1
            optimizer.step(upper, lower, tasks=tasks)
        seen[name] = [x.detach().tolist(), int(net[1].num_batches_tracked)]
    return seen


def test_buffers_are_not_exchanged_in_forward_passes(tmp_path):
    """The ranks used to wait for each other until the timeout of the group, which was lost then."""
    results = together(2, tmp_path, refused_and_safe, timeout=20.0)
    assert results[0].keys() == METHODS.keys()
    for name, (x, updates) in results[0].items():
        assert results[1][name][0] == x
        assert updates == results[1][name][1] == 2


def warned_without_a_group(rank):
    """The processes have different data, and nothing averages over them."""
    for method in METHODS.values():
        x, net, upper, lower, options = made(rank, False)
        optimizer = method([x], net.parameters(), **options)
        with pytest.warns(bo.BilevelWarning, match=r"no process_group.* pass process_group="):
            optimizer.step(upper, lower)
        optimizer.step(upper, lower)  # once


def test_a_wrapped_module_without_a_process_group_is_warned_of(tmp_path):
    """Torch's own optimizers need no group there: the wrapper averages their gradients."""
    assert together(2, tmp_path, warned_without_a_group) == dict.fromkeys(range(2))
