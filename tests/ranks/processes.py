"""Functions run by several processes of one group."""

import multiprocessing
import os
import traceback
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Processes come from one that has imported everything already, which is started once.
multiprocessing.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "tests.registry"]
)


START = "forkserver"
NUMBERS = count()


def _main(rank, world, address, function, results, arguments, timeout, backend):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    try:
        results[rank] = function(rank, *arguments)
    except BaseException:
        results[f"error on rank {rank}"] = traceback.format_exc()
        os._exit(1)
    if not any(isinstance(found, tuple) for found in results.values()):
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(0)  # a group that has lost a rank cannot be closed


def together(world, tmp_path, function, *given, arguments=(), timeout=200.0, lost=(), backend="gloo"):
    """Call ``function(rank, *arguments)`` on each rank; return its results by rank, without those of lost ranks."""
    with mp.Manager() as manager:
        results = manager.dict()
        address = f"file://{tmp_path}/rendezvous-{next(NUMBERS)}"
        context = mp.start_processes(
            _main,
            (world, address, function, results, (*given, *arguments), timeout, backend),
            nprocs=world,
            join=False,
            start_method=START,
        )
        for process in context.processes:
            process.join(400)
        errors = [text for rank, text in dict(results).items() if isinstance(rank, str)]
        assert not errors, "\n".join(errors)
        codes = [process.exitcode for process in context.processes]
        assert all(code == 0 for rank, code in enumerate(codes) if rank not in lost), codes
        return dict(results)
