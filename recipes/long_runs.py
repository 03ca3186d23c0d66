"""Make the runs of hours, one after the other; those that are recorded are not made again.

    nohup nice -n 19 python -m recipes.long_runs --data-root DIR &
    python -m recipes.long_runs --list

DIR has a folder for each data set: ``omniglot``, ``cifar_fs``, ``mnist`` (see `recipes.few_shot` for their contents).
Every finished run is written to the records of its comparison at once, and a run goes on from its last checkpoint,
at most a minute old: the program may be killed and started again at any time.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import transfer
from .common import Parser
from .few_shot import compare
from .papers import __main__ as papers

__all__ = ["QUEUE", "Job", "main"]

RECORDS = Path(__file__).parent / "few_shot" / "results"
TRANSFER = Path(__file__).parents[1] / "docs" / "records"
# Learning rates are searched with a tenth of the steps; the five best learners get three seeds.
BUDGET = "--schedule cosine --share 0.1 --seeds 3 --best 5 --evaluations 20 --episodes 100 --test-episodes 600"
OMNIGLOT = f"--data omniglot --rotations --steps 20000 {BUDGET} --learners"
# One learning rate for each learner is searched with 200 steps; a step takes a second.
CIFAR = (
    "--data cifar_fs --backbone resnet12 --shot 5 --tasks 1 --augment --steps 2000 --schedule cosine --share 0.1 "
    "--rates 0.0003 --seeds 1 --most 4 --evaluations 10 --episodes 60 --test-episodes 600 "
    "--learners protonet ridge anil first-order aid"
)
LEARNERS = "protonet ridge anil fomaml maml first-order aid pzobo-code pzobo f2sa imaml"  # the fastest first


class Job(NamedTuple):
    """One comparison: the program that makes its runs, arguments, and the folder of its data, if it needs one."""

    run: Callable[[list[str]], object]
    arguments: str
    data: str = ""


QUEUE = {
    "omniglot-5": Job(compare.main, f"{OMNIGLOT} {LEARNERS}", "omniglot"),
    "omniglot-20": Job(compare.main, f"--way 20 {OMNIGLOT} {LEARNERS}", "omniglot"),
    "cifar-fs": Job(compare.main, CIFAR, "cifar_fs"),
    "cifar-fs-pretrained": Job(compare.main, f"--pretrain 3000 {CIFAR}", "cifar_fs"),
    **{
        f"transfer-{labels}": Job(
            transfer.main, f"--data mnist --labels {labels} --steps 1000 --out {shlex.quote(str(TRANSFER))}", "mnist"
        )
        for labels in (10, 30, 100)
    },
    "mnist": Job(papers.main, "run 000-mnist"),
}


def main(given: list[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(__doc__, out=False, threads=1)
    parser.add_argument("--data-root", type=Path, help="folder with one folder per data set")
    parser.option("only", [*QUEUE], "comparisons to make", choices=[*QUEUE], metavar="NAME")
    parser.option("out", RECORDS, "folder of the few-shot records")
    parser.add_argument("--list", action="store_true", help="show the comparisons, and make none")
    args = parser.parse(given)
    if args.list:
        print(*(f"{name}: {job.arguments}" for name, job in QUEUE.items()), sep="\n")
        return
    if args.data_root is None:
        parser.error("the following argument is required: --data-root")
    for name in args.only:
        job = QUEUE[name]
        few_shot = ["--out", str(args.out), "--threads", "1"] if job.run is compare.main else []
        print(f"{name}: {job.arguments}", flush=True)
        job.run([*shlex.split(job.arguments), "--data-root", str(args.data_root / job.data), *few_shot])


if __name__ == "__main__":
    main()
