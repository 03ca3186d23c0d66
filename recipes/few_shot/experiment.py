"""Training runs from the settings of this package's programs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..common import Parser, whole
from ..common.seeds import begin
from .backbones import BACKBONES, SMALLEST, STATISTICS
from .data import DATA, load
from .data.images import default_cache
from .episodes import Episodes
from .learners import Learner, make
from .plan import BUDGETS
from .training import OUTER, SCHEDULES, Training, evaluate, interval, pretrain, train

__all__ = ["arguments", "episodes_of", "learner_of", "one"]

TEST_SEED = 2


def arguments(doc: str | None) -> Parser:
    """Return a parser with the arguments for data, episodes, body and training."""
    parser = Parser(doc, device=True)
    parser.data(DATA)
    parser.add_argument("--tables", type=Path, help="folder of miniImageNet's split tables; default: --data-root")
    parser.option("cache", default_cache(), "folder of decoded images")
    parser.option("size", None, "height and width of the images", type=whole(SMALLEST), shown="by data set")
    parser.option("way", 5, "classes per episode", type=whole(2))
    parser.option("shot", 1, "support images per class")
    parser.option("query", 5, "query images per class")
    parser.option("tasks", 4, "episodes per meta-step")
    parser.add_argument("--backbone", choices=[*BACKBONES], default="cnn4", help="default: cnn4")
    parser.add_argument("--statistics", choices=STATISTICS, default="batch", help="of normalisation; default: batch")
    parser.add_argument("--augment", action="store_true", help="shift, flip and colour jitter of training images")
    parser.add_argument("--rotations", action="store_true", help="add rotated training classes as new classes")
    parser.add_argument("--autocast", action="store_true", help="evaluate the body in bfloat16")
    parser.add_argument("--outer", choices=[*OUTER], default="adam", help="outer optimizer; default: adam")
    parser.add_argument("--schedule", choices=[*SCHEDULES], default="constant", help="schedule of lr over --steps")
    parser.option("clip", 10.0, "largest norm of the gradient")
    parser.option(
        "pretrain", None, "updates of ordinary training on the training classes first", type=int, shown="none"
    )
    parser.option("steps", None, "meta-steps per run", type=int, shown="as many as --seconds allow")
    parser.settings(
        "data", BUDGETS, seconds="seconds of meta-steps per run, CPU time on a CPU; not with --steps",
        evaluations="validations per run", episodes="episodes per validation", test_episodes="episodes of the test",
    )  # fmt: skip
    parser.exclusive("steps", "seconds")
    return parser


def episodes_of(args: argparse.Namespace) -> dict[str, Episodes]:
    """Return the episodes of the three splits."""
    images = load(args.data, args.data_root, args.cache, size=args.size, download=args.download, tables=args.tables)
    common = {"way": args.way, "shot": args.shot, "query": args.query, "device": args.device,
              "beside": args.statistics == "support"}  # fmt: skip
    training = {"rotations": args.rotations, "augment": args.augment}
    return {s: Episodes(images, s, **common, **(training if s == "train" else {})) for s in images.pixels}


def learner_of(args: argparse.Namespace, name: str, seed: int, episodes: Episodes) -> Learner:
    """Return a new learner with weights of this seed."""
    channels, size = episodes.pixels.shape[-3], episodes.pixels.shape[-1]
    with torch.random.fork_rng(devices=[]):
        begin(seed, "start")
        body = BACKBONES[args.backbone](channels, size, args.statistics).to(args.device)
    return make(name, body, args.way, tasks=args.tasks, seed=seed, autocast=args.autocast)


def one(
    args: argparse.Namespace,
    episodes: dict[str, Episodes],
    name: str,
    lr: float,
    seed: int,
    *,
    test: bool = True,
    checkpoint: Path | None = None,
    log: Any = None,
) -> dict[str, Any]:
    """Train, and test the checkpoint that is best on the validation classes."""
    learner = learner_of(args, name, seed, episodes["train"])
    if args.pretrain and not (checkpoint is not None and checkpoint.exists()):
        # One training serves all learners of a seed.
        stem = f"pretrained_{args.data}_{args.backbone}_{args.pretrain}_{seed}.pt"
        path = None if checkpoint is None else checkpoint.parent / stem
        begun = {"seed": seed, "checkpoint": path, "autocast": args.autocast}
        pretrain(learner.body, episodes["train"], args.pretrain, **begun)
    how = Training(
        lr=lr, steps=args.steps, seconds=None if args.steps else args.seconds, outer=args.outer, clip=args.clip,
        schedule=args.schedule, evaluations=args.evaluations, episodes=args.episodes,
    )  # fmt: skip
    found = train(learner, episodes["train"], episodes["val"], how, label=name, checkpoint=checkpoint, log=log)
    found = {"learner": name, "seed": seed, **asdict(how), **found}
    if test:
        found["test"] = interval(evaluate(learner, episodes["test"], args.test_episodes, TEST_SEED, episodes["train"]))
    return found
