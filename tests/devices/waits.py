"""Count a step's waits for the device, for each method, as a table: ``python -m tests.devices.waits docs/gpu.md``."""

import re
import sys
import warnings
from pathlib import Path

import torch

import bilevel_optim as bo

from ..registry import ROWS
from .problems import placed
from .simulated import watch

DOCS = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- waits: begin -->", "<!-- waits: end -->"
WAYS = ("a step", "with `tasks=`")
HEAD = f"| methods | {' | '.join(WAYS)} |\n|---|---|---|"
BEFORE = 2  # steps, after which nothing is looked at for the first time


def counted(row, way, **options):
    """Reads, uploads and transfers of one step; None if the method does not go that way."""
    tasks = way == "with `tasks=`"
    if tasks and (not row.takes_tasks or row.declared.losses == 1):
        return None
    torch.manual_seed(0)
    problem = placed(row.quadratic(n=4, m=2, tasks=tasks))
    if problem.tasks is not None and row.declared.tasks != "required":
        options |= {"lower_batch": 2, "upper_batch": 2}
    optimizer = row(problem.x, problem.y, short=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        problem.run(optimizer, BEFORE)
        with watch() as seen:
            problem.run(optimizer)
    return seen


def entry(row, way):
    """Return the text of the table's cell."""
    seen = counted(row, way)
    return "" if seen is None else " / ".join(map(str, seen.counts))


def table(entries):
    """Return the rows; methods with the same waits share a row."""
    lines = {}
    for name, found in entries.items():
        lines.setdefault(found, []).append(f"`{name}`")
    return "\n".join([HEAD, *(f"| {', '.join(names)} | {' | '.join(found)} |" for found, names in lines.items())])


def in_docs():
    """Return the table in the docs, by name of the row."""
    text = DOCS.read_text().partition(BEGIN)[2].partition(END)[0]
    found = {}
    for line in text.strip().splitlines()[2:]:
        names, *entries = (cell.strip() for cell in line.strip("|").split("|"))
        found |= {name: tuple(entries) for name in re.findall("`([^`]*)`", names)}
    return found


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    path = Path(sys.argv[1])
    before, _, rest = path.read_text().partition(BEGIN)
    found = {}
    for row in ROWS:
        found[row.name] = tuple(entry(row, way) for way in WAYS)
        print(row.name, *found[row.name], flush=True)
    made = table(found)
    path.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")
