"""Directions shared by the ranks: each follows its part of the paths, and the result is that of one process."""

import pytest
import torch
import torch.distributed as dist

import bilevel_optim as bo

from ..problems import Quadratic, flat, seeded
from .processes import together

CASES = {
    "PZOBO": (bo.PZOBO, {"directions": 5}),
    "PZOBO, orthogonal, central": (bo.PZOBO, {"directions": 3, "direction": "orthogonal", "difference": "central"}),
    "PZOBO, sphere, one direction": (bo.PZOBO, {"directions": 1, "direction": "sphere"}),
    "HOZOG": (bo.HOZOG, {"directions": 4, "smoothing_mode": "relative"}),
    "ESMAML": (bo.ESMAML, {"directions": 3}),
}


def ended(name, **options):
    cls, arguments = CASES[name]
    problem = Quadratic(n=4, m=3)
    if cls is bo.ESMAML:
        problem.x.append(problem.y[0].detach().clone().requires_grad_())
    torch.manual_seed(0)
    optimizer = cls(
        problem.x, problem.y, lr=0.05, lower_lr=0.1, lower_steps=3, generator=seeded(2), **arguments, **options
    )
    losses = [problem.run(optimizer) for _ in range(3)]
    numbers = [optimizer.diagnostics[key] for key in ("coefficients", "dropped_directions", "difference_error")]
    return flat([*problem.x, *problem.y, *losses, *(n.double() for n in numbers)]), optimizer.oracle_counts


def on_ranks(rank):
    found = {
        name: [found.tolist() if isinstance(found, torch.Tensor) else found for found in ended(
            name, over_ranks="directions", process_group=dist.group.WORLD)]
        for name in CASES
    }  # fmt: skip
    problem = Quadratic(n=4, m=3)
    optimizer = bo.PZOBO(
        problem.x, problem.y, lr=0.05, lower_lr=0.1, lower_steps=3, over_ranks="directions",
        process_group=dist.group.WORLD, warm_start=True,
    )  # fmt: skip
    problem.run(optimizer)
    with torch.no_grad():
        problem.y[0].add_(rank)  # as if the ranks had other data
    with pytest.raises(ValueError, match="must have the same data"):
        problem.run(optimizer)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shared_directions_are_those_of_one_process(world, tmp_path):
    results = together(world, tmp_path, on_ranks)
    for name in CASES:
        expected, counts = ended(name)
        paths = 0
        for rank in range(world):
            got, own = results[rank][name]
            torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-7, atol=1e-9, msg=name)
            paths += own["lower_grad"]
        # Each rank follows the base path, and its part of the others.
        assert paths == counts["lower_grad"] + (world - 1) * 3 * 3
