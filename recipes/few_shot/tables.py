"""Write the tables of long comparisons into pages, next to the accuracies that papers print.

    python -m recipes.few_shot.tables                # recipes/few_shot/README.md and docs/howto/few_shot.md

A table stands between ``<!-- table: RECORD LEARNER ... -->`` and ``<!-- end -->``. RECORD is a file of ``results/``
without its suffix. A learner without a run in it has a row that says so.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..common import Parser, interval
from .compare import Records, grid, tests

__all__ = ["PAGES", "PAPERS", "table", "written"]

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGES = [Path(__file__).parent / "README.md", ROOT / "docs/howto/few_shot.md"]
HEADER = ("", "test accuracy", "seeds", "in its paper", "learning rate, of those tried", "core-minutes")
# Table 2 of arXiv:1909.04630 has all but ProtoNet's, which are of arXiv:1703.05175. Those of the other learners are not
# known or not printed.
PAPERS = {
    "omniglot_cnn4_5way_1shot": {
        "maml": "0.987 ± 0.004", "fomaml": "0.983 ± 0.005", "imaml": "0.992 ± 0.004", "protonet": "0.988",
    },
    "omniglot_cnn4_20way_1shot": {
        "maml": "0.958 ± 0.003", "fomaml": "0.894 ± 0.005", "imaml": "0.945 ± 0.004", "protonet": "0.960",
    },
}  # fmt: skip


def table(path: Path, learners: list[str]) -> str:
    """Return the table of a record, the best learner first."""
    printed = next((found for stem, found in PAPERS.items() if path.stem.startswith(stem)), {})
    rows: list[tuple[float, list[str]]] = []
    records = Records(path)
    for name in learners:
        found, paper = tests(records, name), printed.get(name, "-")
        if not found:
            rows.append((0.0, [f"`{name}`", "no run yet", "-", paper, "-", "-"]))
            continue
        first, mean = found[0], interval([run["test"]["accuracy"] for run in found])
        half = f"± {first['test']['interval']:.3f}" if len(found) == 1 else f"[{mean.low:.3f}, {mean.high:.3f}]"
        rate, minutes = f"{first['lr']:g}, of {grid(records.tried(name))}", f"{first['seconds'] / 60:.0f}"
        rows.append((mean.mean, [f"`{name}`", f"{mean.mean:.3f} {half}", str(len(found)), paper, rate, minutes]))
    rows.sort(key=lambda row: -row[0])
    lines = [HEADER, ("---",) * len(HEADER), *(cells for _, cells in rows)]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def written(page: str, results: Path = RESULTS) -> str:
    """Return a page with its tables made again."""
    return re.sub(
        r"(<!-- table: (\S+) (.*?) -->\n).*?(\n<!-- end -->)",
        lambda found: found[1] + table(results / f"{found[2]}.json", found[3].split()) + found[4],
        page,
        flags=re.S,
    )


def main(given: list[str] | None = None) -> None:
    """Run the program."""
    Parser(__doc__, out=False).parse(given)
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
