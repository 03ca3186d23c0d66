"""Announce what a run will do and how long it takes, before the heavy imports."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["BUDGETS", "DEFAULT", "plan"]

DEFAULT = ("protonet", "first-order", "aid", "anil")  # learners
LONG = {"seconds": 60.0, "evaluations": 5, "episodes": 100, "test_episodes": 600}
# Budgets per learner. Digits are a quick demonstration, within a minute in total.
BUDGETS: dict[str, dict[str, Any]] = {
    "digits": {"seconds": 3.0, "evaluations": 2, "episodes": 40, "test_episodes": 200},
    **dict.fromkeys(("omniglot", "cifar_fs", "fc100", "miniimagenet"), LONG),
}
EVALUATION = 0.007  # seconds per episode of digits with cnn4, on one core
START = 6  # seconds: imports, data, the figure


def plan(arguments: Sequence[str] | None) -> str:
    """Return the announcement; it parses only the arguments that it mentions, without checks."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--backbone", default="cnn4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--learners", nargs="+", default=[*DEFAULT])
    parser.add_argument("--way", type=int, default=5)
    parser.add_argument("--shot", type=int, default=1)
    parser.add_argument("--steps", type=int)
    for name, known in LONG.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(known))
    args, _ = parser.parse_known_args(arguments)
    for name, value in BUDGETS.get(args.data, LONG).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    count = len(args.learners)
    each = f"{args.steps} meta-steps" if args.steps else f"{args.seconds:g} s of meta-steps"
    text = (
        f"Meta-training {', '.join(args.learners)} on {args.way}-way {args.shot}-shot episodes of {args.data} with "
        f"{args.backbone}: {each} each, then {args.test_episodes} test episodes of classes never seen. "
    )
    if args.steps:
        return text + "The progress bar of each shows how long that takes."
    if (args.data, args.backbone, args.device) != ("digits", "cnn4", "cpu"):
        return text + f"That takes {count * args.seconds / 60:.2g} minutes, plus the evaluations."
    episodes = (1 + args.evaluations) * args.episodes + args.test_episodes
    return text + f"That takes about {START + count * (args.seconds + episodes * EVALUATION):.0f} s."
