"""Run experiments of the papers and judge their claims.

    python -m recipes.papers list
    python -m recipes.papers run 003-saddle
    python -m recipes.papers run 003-cleaning-0.2 --data-root DIR
    python -m recipes.papers run 003-saddle --scale smoke
    python -m recipes.papers report

A run resumes where it stopped. DIR has one folder per data set. ``report`` writes RESULTS.md from the records.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..common import Parser, show
from ..common.records import Records
from .catalogue import EXPERIMENTS
from .page import RESULTS, config_of, keep, write_page
from .runner import complete, execute


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(__doc__, out=False)
    parser.add_argument("action", choices=["list", "run", "report"])
    parser.add_argument("ids", nargs="*", metavar="ID", help="experiments to run, or prefixes of their names")
    parser.add_argument("--scale", choices=["smoke", "cpu", "full"], default="cpu", help="default: cpu")
    parser.add_argument("--data-root", type=Path, help="folder with one folder per data set")
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="NAME",
        help="run only these arms, without a verdict; 'rule': the arms that the verdict needs",
    )
    parser.add_argument("--out", type=Path, help="folder of the records; default for the scale cpu: the page's folder")
    args = parser.parse(arguments)
    if args.action == "list":
        show("Experiments", ("", "data", "claim"), [[e.id, e.data or "-", e.claim] for e in EXPERIMENTS.values()])
    elif args.action == "report":
        print(f"Wrote {write_page(EXPERIMENTS.values())}")
    else:
        chosen = [e for e in EXPERIMENTS.values() if any(e.id.startswith(i) for i in args.ids)]
        if not chosen:
            parser.error(f"no experiment {' '.join(args.ids)}: see list")
        out = args.out or (RESULTS if args.scale == "cpu" else Path("results") / f"papers-{args.scale}")
        for experiment in chosen:
            folder = out / experiment.source
            config_of(experiment, args.scale, folder)
            records = Records(folder / "records.jsonl")
            say = partial(print, flush=True)
            if args.arms:
                chosen_arms = [*experiment.rule.arms] if args.arms == ["rule"] else args.arms
                complete(experiment, args.scale, records, args.data_root, say, chosen_arms)
                continue
            outcome = execute(experiment, args.scale, records, args.data_root, say)
            keep(experiment, outcome, out / experiment.id, args.scale)
            print(f"{experiment.id} {outcome.verdict}")
            if outcome.timed is not None:
                print(f"  at equal seconds {outcome.timed}")
            print(f"  {records.made} new runs")


if __name__ == "__main__":
    main()
