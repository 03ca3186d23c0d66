"""The table of tools: every test that it names exists, and runs with the methods and in the way that the row says."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from .test_torch import TOOLED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tools.md").read_text().splitlines()
HEAD, _, *ROWS = [[cell.strip() for cell in line[1:-1].split("|")] for line in PAGE if line.startswith("|")]


def cases(module, function):
    """Return the cases that a test loops over, and pytest's names of its parameters."""
    found = [set(cell) for cell in getattr(module, "CELLS", ())]
    names = {name for cell in found for name in cell}
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            ids = mark.kwargs.get("ids")
            for value in mark.args[1]:
                name = getattr(value, "id", None) or (ids(value) if callable(ids) else str(value))
                names |= {name, *name.split("-")}
    return found, names


def test_the_table_has_the_methods():
    assert tuple(HEAD[2:8]) == TOOLED
    assert {cell for row in ROWS for cell in row[2:8]} == {"yes", "no"}
    for row in ROWS:
        assert len(row) == len(HEAD)
        assert row[8] or "no" not in row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1].strip("`"))
def test_a_row_is_tested(row):
    path, name, case = re.fullmatch(r"`(.+\.py)::(\w+)(?:\[(.+)\])?`", row[-1]).groups()
    try:
        module = import_module(path.removesuffix(".py").replace("/", "."))
    except pytest.skip.Exception as missing:
        pytest.skip(str(missing))
    cells, names = cases(module, getattr(module, name))
    for method, works in zip(HEAD[2:8], row[2:8], strict=True):
        if cells:
            kinds = {case} if case in names else set(case.split(", ", 1))
            tested = any({*kinds, method} <= cell for cell in cells)
            refused = method in getattr(module, "REFUSED", ())
            assert tested if works == "yes" else refused or not tested, (method, works)
        else:
            assert method in names, method
            assert case is None or case in names, case
