"""Time the parts of a meta-step, and ways to evaluate its body.

    python -m recipes.few_shot.profile
    python -m recipes.few_shot.profile --backbone resnet12 --shot 5 --tasks 1 --compiled

The first table has the forward and backward pass of a body on the images of one episode: as torch does it by default,
with channels last (as the learners do), in bfloat16, and with ``--compiled`` compiled. The second has whole meta-steps,
the part of them that is not the body, and the same with the body evaluated again at each lower step instead of once for
each episode. Images are random. Entries take turns; times are the shortest, on a CPU those of the process.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

import bilevel_optim as bo

from ..common import Parser, environment, show
from ..common.seeds import begin, stream
from .backbones import BACKBONES, Body
from .benchmark import add_sizes, random_episodes
from .episodes import Episodes
from .learners import LEARNERS, HeadAdapting, Learner, make
from .training import clock

__all__ = ["main"]


def least(entries: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Return the shortest seconds of each entry, which take turns, after a first call of each."""
    found = dict.fromkeys(entries, math.inf)
    for i in range(rounds + 1):
        for name, call in entries.items():
            begun = clock(device)
            call()
            if i:
                found[name] = min(found[name], clock(device) - begun)
    return found


Calls = dict[str, Callable[[], object]]


def passes(body: Body, images: torch.Tensor, layout: torch.memory_format, **how: Any) -> Calls:
    """Return a forward pass, and one with its backward pass, of the body on the support and on the query."""
    evaluate = torch.compile(body) if how.get("compiled") else body
    parameters = [*body.parameters()]

    def forward() -> torch.Tensor:
        body.layout = layout
        with torch.autocast(images.device.type, torch.bfloat16) if how.get("half") else nullcontext():
            return torch.stack([evaluate(part).float().square().mean() for part in images]).sum()

    def both() -> None:
        torch.autograd.grad(forward(), parameters)

    @torch.no_grad()
    def alone() -> torch.Tensor:
        return forward()

    return {"forward": alone, "forward and backward": both}


def meta_step(learner: Learner, episodes: Episodes) -> Callable[[], object]:
    """Return a meta-step on the same episodes each time."""
    first = learner.generator.get_state()

    def step() -> None:
        learner.generator.set_state(first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            learner.backward(episodes)

    return step


def without_features(learner: Learner) -> None:
    """Evaluate the body in the losses of a head, wherever these are evaluated."""
    assert isinstance(learner, HeadAdapting)
    for name in ("upper_loss", "lower_loss"):
        objective = getattr(learner, name)
        loss, features = objective.loss, objective.features
        setattr(learner, name, bo.Objective(lambda batch, loss=loss, features=features: loss(features(batch))))


def main(given: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Print the tables; return their seconds."""
    parser = Parser(__doc__, device=True, out=False)
    add_sizes(parser)
    parser.option("rounds", 3, "timed calls of each entry")
    parser.add_argument("--compiled", action="store_true", help="time a compiled body too")
    parser.methods(LEARNERS, ["protonet", "ridge", "anil", "first-order", "aid"], "--learners")
    args = parser.parse(given)
    found = {**_bodies(args), **_steps(args)}
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    return found


def _bodies(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    begin(0, "data")
    body = BACKBONES[args.backbone](3, args.size).to(args.device)
    count = args.way * max(args.shot, args.query)
    images = torch.randn(2, count, 3, args.size, args.size, device=args.device)
    plain, last = torch.contiguous_format, torch.channels_last
    ways: dict[str, Calls] = {
        "contiguous": passes(body, images, plain),
        "channels last": passes(body, images, last),
        "channels last, bfloat16": passes(body, images, last, half=True),
        **({"channels last, compiled": passes(body, images, last, compiled=True)} if args.compiled else {}),
    }
    entries = {f"{name}, {part}": call for name, parts in ways.items() for part, call in parts.items()}
    seconds = least(entries, args.rounds, args.device)
    found = {name: {part: seconds[f"{name}, {part}"] for part in parts} for name, parts in ways.items()}
    base = found["contiguous"]["forward and backward"]
    rows = [[name, *parts.values(), parts["forward and backward"] / base] for name, parts in found.items()]
    show(
        f"{args.backbone}, two times {count} images of {args.size}x{args.size}, seconds",
        ["body", "forward", "forward and backward", "to contiguous"],
        rows,
    )
    return found


def _steps(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    episodes = random_episodes(args)
    entries: Calls = {}
    for name in args.learners:
        for once in (True, False):
            learner = make(name, BACKBONES[args.backbone](3, args.size).to(args.device), args.way,
                           tasks=args.tasks, seed=0)  # fmt: skip
            if once:
                entries[name] = meta_step(learner, episodes)
                body = learner.body
            elif isinstance(learner, HeadAdapting):
                without_features(learner)
                entries[f"{name}, each time"] = meta_step(learner, episodes)
    drawn = episodes.sample(args.tasks, stream(0, "episodes"))
    parts = [get(drawn, None, stream(0, "rows")).images for get in (episodes.lower, episodes.upper)]

    def body_alone() -> None:
        body.layout = torch.channels_last
        for support, query in zip(*parts, strict=True):
            loss = body(support).square().mean() + body(query).square().mean()
            torch.autograd.grad(loss, [*body.parameters()])

    seconds = least({"body": body_alone, **entries}, args.rounds, args.device)
    rows = [
        [name, seconds[name], seconds[name] - seconds["body"], seconds[name] / seconds["body"],
         seconds.get(f"{name}, each time")]
        for name in args.learners
    ]  # fmt: skip
    show(
        f"A meta-step of {args.tasks} {args.way}-way {args.shot}-shot episodes; body alone: {seconds['body']:.3g} s",
        ["learner", "seconds", "besides the body", "to the body", "body at each lower step"],
        rows,
    )
    return {"steps": seconds}


if __name__ == "__main__":
    main()
