"""Meta-train on N-way K-shot episodes and test on unseen classes.

    python -m recipes.few_shot                                    # scikit-learn's digits, less than a minute
    python -m recipes.few_shot --data omniglot --data-root DIR --download --rotations
    python -m recipes.few_shot --data miniimagenet --data-root DIR --backbone resnet12 --shot 5 --augment --device cuda

``--learners`` selects the meta-learners; `compare` tunes their learning rates, `benchmark` times them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .plan import DEFAULT, plan

if __name__ == "__main__" and not {"-h", "--help"} & {*sys.argv}:
    print(plan(sys.argv[1:]), flush=True)  # before torch is imported, which takes seconds

import torch

from ..common import plot, save, show
from .episodes import Episodes
from .experiment import TEST_SEED, arguments, episodes_of, learner_of, one
from .learners import LEARNERS
from .picture import features, picture
from .training import interval


def _logged(path: Path) -> Any:
    """Return a function that appends the figures of a step to a file, as one line of JSON."""

    def log(step: int, figures: Mapping[str, float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")

    return log


@torch.no_grad()
def nearest(episodes: Episodes, count: int) -> dict[str, float]:
    """Return the accuracy of the nearest support image by pixel distance, the control that learns nothing."""
    found = []
    for support, query in episodes.fixed(count, TEST_SEED):
        near = torch.cdist(query.images.flatten(2), support.images.flatten(2)).argmin(-1)
        found.append((support.labels.gather(1, near) == query.labels).float().mean(1).cpu())
    return interval(torch.cat(found))


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run the program; return the numbers that it writes."""
    parser = arguments(__doc__)
    parser.methods(LEARNERS, DEFAULT, "--learners")
    parser.option("lr", 3e-3, "learning rate of the outer optimizer")
    parser.add_seed()
    parser.add_argument("--picture", action="store_true", help="draw features of unseen classes, before and after")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoints in --out")
    args = parser.parse(given)
    if args.threads is None and args.data == "digits":
        torch.set_num_threads(1)  # a second thread does not pay for 16x16 images, and waits if its core is busy
    episodes = episodes_of(args)
    stem = args.out / f"few_shot_{args.data}_{args.backbone}_{args.way}way_{args.shot}shot"
    results = {}
    for name in args.learners:
        checkpoint = Path(f"{stem}_{name}_seed{args.seed}.pt")
        if not args.resume:
            checkpoint.unlink(missing_ok=True)
        log = _logged(checkpoint.with_suffix(".jsonl"))
        results[name] = one(args, episodes, name, args.lr, args.seed, checkpoint=checkpoint, log=log)
        last = results[name]
        print(
            f"{name}: validation accuracy {last['curve'][0]['accuracy']:.3f} before, {last['validation']:.3f} after "
            f"{last['best_step']} of {last['steps']} meta-steps; test accuracy {last['test']['accuracy']:.3f}",
            flush=True,
        )
        if args.picture:
            learner = learner_of(args, name, args.seed, episodes["train"])
            bodies = {"before": features(learner, episodes["test"])}
            learner.network.load_state_dict(torch.load(checkpoint, weights_only=True)["best"])
            bodies["after"] = features(learner, episodes["test"])
            stem_of = Path(f"{stem}_{name}_features")
            results[name]["separation"] = picture(stem_of, f"{name}: images of unseen classes", bodies)
    budget = f"{args.steps} meta-steps" if args.steps else f"{args.seconds:g} s"
    title = f"{args.data}, {args.way}-way {args.shot}-shot, {args.backbone}, {budget}"
    table = [
        [
            name,
            r["test"]["accuracy"],
            r["test"]["interval"],
            r["curve"][0]["accuracy"],
            r["validation"],
            r["steps"],
            r["seconds"],
        ]
        for name, r in results.items()
    ]
    pixels = nearest(episodes["test"], args.test_episodes)
    table.append(["nearest image", pixels["accuracy"], pixels["interval"], "-", "-", 0, 0])
    columns = ("", "test accuracy", "95 % +-", "validation: before", "best", "meta-steps", "seconds")
    show(f"{title}; chance is {1 / args.way:.2f}", columns, table)
    axis = {"xlabel": "seconds", "ylabel": "validation accuracy"}
    plot(stem, title, {name: r["curve"] for name, r in results.items()}, [("seconds", "accuracy", axis)])
    return save(args, stem, {"results": results, "nearest": pixels})


if __name__ == "__main__":
    main()
