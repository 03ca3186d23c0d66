"""Tables of the methods for the documents, built from the methods' declarations.

    python docs/_ext/method_tables.py docs/methods.md

replaces the text between ``<!-- methods: begin -->`` and ``<!-- methods: end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from bilevel_optim.optimizer.declaration import FAMILIES, REGISTRY, MethodInfo

__all__ = ["rewritten", "table"]

TASKS = {"stacked": "yes", "rows": "yes, remembers each", "required": "needs them", "none": "no"}
DATA = {"any": "any", "finite_sum": "finite sums"}
MARKED = re.compile(r"(<!-- methods: begin -->\n).*?(<!-- methods: end -->)", re.S)


def _needs(method: MethodInfo) -> str:
    needs = ["second derivatives" if method.second_order else "first derivatives"]
    needs += ["finite sums"] * (method.data == "finite_sum") + ["tasks"] * (method.tasks == "required")
    needs += ["one loss"] * (method.losses == 1) + ["x that starts y"] * method.initial
    return ", ".join(needs)


def _paper(method: MethodInfo) -> str:
    return re.sub(r"^arXiv:(\S+)$", r"[\1](https://arxiv.org/abs/\1)", method.paper)


COLUMNS: dict[str, Callable[[MethodInfo], str]] = {
    "when": lambda method: method.when,
    "cost per step": lambda method: method.cost,
    "needs": _needs,
    "tasks": lambda method: TASKS[method.tasks],
    "data": lambda method: DATA[method.data],
    "paper": _paper,
}


def table() -> str:
    """Return the Markdown tables: one for each family, with a row for each method."""
    families: dict[str, list[list[str]]] = {family: [] for family in FAMILIES}
    for name, cls in REGISTRY.items():  # in definition order: a method follows those it builds on
        row = [f"`{name}`", *(column(cls.declared) for column in COLUMNS.values())]
        families[cls.declared.family].append(row)
    found = {family.capitalize(): rows for family, rows in families.items() if rows}
    return "\n".join(f"## {family}\n\n{_markdown(['method', *COLUMNS], rows)}" for family, rows in found.items())


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def rewritten(text: str) -> str:
    """Return the text of a document with its tables rebuilt."""
    new, count = MARKED.subn(lambda found: f"{found[1]}\n{table()}\n{found[2]}", text)
    if not count:
        raise ValueError("the document has no place for the methods: <!-- methods: begin --> ... <!-- methods: end -->")
    return new


if __name__ == "__main__":
    for name in sys.argv[1:]:
        document = Path(name)
        document.write_text(rewritten(document.read_text(encoding="utf-8")), encoding="utf-8")
