"""Make the runs of hours, one after the other; those that are recorded are not made again.

    nohup nice -n 19 python -m recipes.long_runs --data-root DIR &
    python -m recipes.long_runs --list

DIR has a folder for each data set: ``omniglot``, ``cifar_fs``, ``mnist`` (see `recipes.few_shot` for their contents).
Every finished run is written to the records of its comparison at once, and a run goes on from its last checkpoint,
at most a minute old: the program may be killed and started again at any time. `recipes.few_shot.tables` writes the
tables of the few-shot runs.
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
# Learning rates are searched with a tenth of the steps.
BUDGET = "--schedule cosine --share 0.1 --test-episodes 600"
OMNIGLOT = f"--data omniglot --rotations --steps 20000 {BUDGET} --evaluations 20 --episodes 100"
LEARNERS = "--learners protonet ridge anil fomaml maml first-order aid f2sa pzobo pzobo-code"
# An episode of ResNet-12 takes a second in bfloat16, and a quarter of one to evaluate.
CIFAR = (
    "--data cifar_fs --backbone resnet12 --shot 5 --tasks 1 --augment --autocast --steps 1000 "
    f"{BUDGET} --rates 0.0003 --seeds 1 --most 4 --evaluations 5 --episodes 40 "
    "--learners aid protonet anil ridge first-order"
)
# The curves of four learners over hours: with their search five to eight core-hours, by the machine.
CIFAR_LONG = (
    "--data cifar_fs --backbone resnet12 --shot 5 --tasks 1 --augment --autocast --steps 5000 "
    f"{BUDGET} --rates 0.0001 --seeds 1 --most 4 --evaluations 10 --episodes 100 "
    "--learners protonet anil ridge aid"
)
HEADS = f"--data mnist --steps 500 --out {shlex.quote(str(TRANSFER))}"


class Job(NamedTuple):
    """One comparison.

    Attributes:
        run: the program that makes its runs.
        hours: estimated hours of one core for all its runs, from the time of a few meta-steps of each learner.
        arguments: those of the program.
        data: folder of its data, if it needs one.
    """

    run: Callable[[list[str]], object]
    hours: float
    arguments: str
    data: str = ""


# All methods with one seed come before more seeds, and expensive runs come last. Jobs that differ in learners and
# seeds alone share their records.
QUEUE = {
    "omniglot-5": Job(compare.main, 5.3, f"{OMNIGLOT} --seeds 1 {LEARNERS}", "omniglot"),
    "cifar-fs-pretrained": Job(compare.main, 2.7, f"--pretrain 1500 {CIFAR}", "cifar_fs"),
    "cifar-fs": Job(compare.main, 2.3, CIFAR, "cifar_fs"),
    **{
        f"transfer-{labels}": Job(transfer.main, 0.7, f"{HEADS} --labels {labels}", "mnist") for labels in (10, 30, 100)
    },
    "mnist": Job(papers.main, 5, "run 000-mnist"),
    "omniglot-5-seeds": Job(compare.main, 3.1, f"{OMNIGLOT} --seeds 3 --best 5 {LEARNERS}", "omniglot"),
    "omniglot-5-imaml": Job(compare.main, 1.5, f"{OMNIGLOT} --seeds 1 --learners imaml", "omniglot"),
    "omniglot-5-64": Job(compare.main, 1, f"--backbone cnn4-64 {OMNIGLOT} --seeds 1 --learners fomaml", "omniglot"),
    "omniglot-20": Job(
        compare.main, 6.2, f"--way 20 {OMNIGLOT} --seeds 1 --learners protonet ridge anil aid maml", "omniglot"
    ),
    "cifar-fs-long": Job(compare.main, 7, CIFAR_LONG, "cifar_fs"),
}


def main(given: list[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(__doc__, out=False, threads=1)
    parser.add_argument("--data-root", type=Path, help="folder with one folder per data set")
    parser.option("only", [*QUEUE], "comparisons to make", choices=[*QUEUE], metavar="NAME")
    parser.option("out", RECORDS, "folder of the few-shot records")
    parser.add_argument("--list", action="store_true", help="show the comparisons and their core-hours, and make none")
    args = parser.parse(given)
    if args.list:
        print(*(f"{name}, {job.hours:g} h: {job.arguments}" for name, job in QUEUE.items()), sep="\n")
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
