"""A step exchanges the volume of its method's formula, and memory falls if parameters are sharded."""

from argparse import Namespace

import pytest
import torch

from recipes.benchmarks import ranks

from .processes import together

SLACK = 2048  # bytes: losses, flags, numbers of tasks


def counted(rank, world, cases=ranks.CASES):
    torch.set_default_dtype(torch.float32)
    args = Namespace(examples=64, width=96, tasks=5000, repeats=1)
    return {case: ranks.measured(case, rank, world, args) for case in cases}


def assert_volumes(results):
    for case, found in results.items():
        for kind in ("reduced", "gathered"):
            needed = found[f"{kind}, needed"]
            assert needed <= found[kind] <= needed + SLACK, (case, kind, found)


def test_rows_of_all_tasks_stay_where_they_are(tmp_path):
    for results in together(2, tmp_path, counted, 2, ("rows-split",)).values():
        assert_volumes(results)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_the_formulas(world, tmp_path):
    results = together(world, tmp_path, counted, world)
    for rank in range(world):
        assert_volumes(results[rank])
        for case, found in results[rank].items():
            whole = results[rank].get(case.removesuffix("-fsdp2"))
            if case in ranks.FULLY:
                assert found["state"] == pytest.approx(whole["state"] / world, rel=0.05), case
                assert found["tensors"] < whole["tensors"], case
        split, every = results[rank]["rows-split"], results[rank]["rows-all"]
        assert split["state"] == pytest.approx(every["state"] / world, rel=0.05)
