"""First and second derivatives of torch's operations on the installed torch, against the recorded table."""

import pytest
import torch

from recipes.benchmarks.derivative_cases import CASES
from recipes.benchmarks.derivatives import COLUMNS, PAGE, kind, measured, page, recorded

RECORDS = recorded()
VERSION = torch.__version__.split("+")[0]
ROWS = RECORDS.get(VERSION, RECORDS[[*RECORDS][-1]])  # of a new torch: what has changed since the last one
CHEAP = ("gradient", "product", "cross", "vmap", "library")
COMPILED = ("torch.cond", "scan", "associative_scan", "while_loop", "torch.compile inside, aot_eager")  # slow


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in COMPILED else name for name in CASES if name in ROWS]
)
def test_rows_are_as_recorded(name):
    torch.set_default_dtype(torch.float32)
    cells = measured(CASES[name], CHEAP)
    assert {column: kind(cell) for column, cell in cells.items()} == {c: kind(ROWS[name][c]) for c in CHEAP}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in CASES if name in ROWS])
def test_tasks_and_compiled_steps_are_as_recorded(name):
    torch.set_default_dtype(torch.float32)
    columns = [column for column in COLUMNS if column not in CHEAP and column in ROWS[name]]
    assert {c: kind(cell) for c, cell in measured(CASES[name], columns).items() if c in columns} == {
        c: kind(ROWS[name][c]) for c in columns
    }


def test_the_page_is_made_from_the_records():
    assert PAGE.read_text(encoding="utf-8") == page(RECORDS)


def test_every_row_has_been_measured_on_some_torch():
    assert {name for rows in RECORDS.values() for name in rows} == {*CASES}
