"""The references of the hard cases are right, and no recorded verdict gets worse."""

import json
from pathlib import Path

import pytest
import torch

from recipes.benchmarks import hard_cases, peers
from recipes.problems.hard import CASES, solve

DOCS = Path(__file__).parents[1] / "docs"
RECORD = json.loads((DOCS / "records/hard_cases.json").read_text())
WORTH = {"right": 0, "false alarm": 1, "warned": 1, "refused": 1, "shown": 2, "silent": 3}
CHEAP = (
    "interpolation without a penalty, float32", "singular, right side not in the range", "softmax, f = |y|^2 / 2",
    "ten lower steps, f linear in y", "bfloat16", "saddle of g", "squared hinge, float32",
)  # fmt: skip
METHODS = ("AID", "AID, minres", "AID, direct", "AID, fixed point", "F2SA, order 2")


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize(
    "name",
    [
        "wide ridge, penalty 1e-5", "ten lower steps at condition 100", "ranking with a bias of no effect",
        "batch normalisation under a decay", "tanh network, float32", "squared hinge, float32",
    ],
)  # fmt: skip
def test_right_values_are_differences_of_solved_problems(name):
    case = CASES[name].make()
    direction = torch.randn(len(case.x), generator=torch.Generator().manual_seed(1))
    start, step = solve(case.g, case.x, case.y), 1e-4
    ends = [case.x + s * step * direction for s in (1, -1)]
    up, down = (float(case.f(x, solve(case.g, x, start))) for x in ends)
    assert (up - down) / (2 * step) == pytest.approx(float(case.right @ direction), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("name", CHEAP)
def test_no_verdict_is_worse_than_the_recorded_one(name):
    case, row = CASES[name].make(), RECORD["results"][name]
    found = {method: hard_cases.judge(case, *hard_cases.METHODS[method]) for method in METHODS}
    worse = {m: (row[m], cell) for m, cell in found.items() if WORTH[cell["verdict"]] > WORTH[row[m]["verdict"]]}
    assert not worse


def test_pages_are_those_of_the_records():
    assert (DOCS / "hard_cases.md").read_text() == hard_cases.page(RECORD)
    numbers = json.loads((DOCS / "records/peers.json").read_text())
    assert (DOCS / "peers.md").read_text() == peers.page(numbers)
    assert RECORD["results"].keys() == CASES.keys()


def test_closed_forms_of_the_comparison_are_differences_of_solutions():
    problem, step = "sparse", 1e-6
    x = peers.POINT[problem]

    def value(x):
        y = peers.SPARSE.sign() * (peers.SPARSE.abs() - x.exp()).clamp_min(0)
        return peers.upper(x, y)

    found = torch.stack([(value(x + e) - value(x - e)) / (2 * step) for e in step * torch.eye(6)])
    torch.testing.assert_close(found, peers.right(problem), rtol=1e-6, atol=1e-8)
    x = peers.POINT["constrained"]
    found = [
        (peers.upper(x, peers.simplex(x + e)) - peers.upper(x, peers.simplex(x - e))) / (2 * step)
        for e in step * torch.eye(6)
    ]
    torch.testing.assert_close(torch.stack(found), peers.right("constrained"), rtol=1e-6, atol=1e-8)
