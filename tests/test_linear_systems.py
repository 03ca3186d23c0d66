"""No solve of the implicit linear system is wrong in silence, and none that is right is accused."""

import pytest
import torch

from recipes.benchmarks.linear_systems import calls, judged
from recipes.problems.systems import SYSTEMS

QUICK = ("40 rows, 200 unknowns, condition 1e4", "singular, solvable", "network, trained", "convex, penalty 1e-2")


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SYSTEMS])
def test_solves_are_right_or_told(name, dtype):
    system = SYSTEMS[name]().to(dtype)
    right = system.direction()
    cases = [(solver, steps) for solver in ("cg", "minres", "auto") for steps in (10, 50, 200)]
    verdicts = {case: judged(calls(system, right, *case, 3), right.solvable, case[0]) for case in cases}
    verdicts["direct"] = judged(calls(system, right, "direct", 1, 1), right.solvable, "direct")
    assert not {"silent", "false alarm"} & set(verdicts.values()), verdicts
    if name == "40 rows, 200 unknowns, condition 1e4":
        assert verdicts["cg", 10] == verdicts["minres", 10] == "told"
        assert verdicts["cg", 50] == verdicts["minres", 50] == verdicts["direct"] == "right"
