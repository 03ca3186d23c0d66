"""Time and peak memory of one meta-step of every learner, compared with loops of the same method.

    python -m recipes.few_shot.benchmark
    python -m recipes.few_shot.benchmark --learners maml fomaml anil --loops hand hand-last learn2learn torchopt
    python -m recipes.few_shot.benchmark --backbone resnet12 --size 84 --shot 5 --tasks 1 --repeats 1 --device cuda

Images are random, and each entry runs in its own process; entries take turns. Times are the shortest of all
repetitions; on a CPU they are CPU times of the process, so that other processes count little. The loops take the tasks
one by one, as a training script would: ``hand`` is written in plain torch, ``hand-last`` is the same with
channels-last convolutions, as the learners have them, and the others use the library of that name. The norm of the
meta-gradient shows that all compute the same (PZOBO's direction is random).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import bilevel_optim as bo

from ..common import Parser, alone, environment, peak, show, whole
from ..common.seeds import begin
from .backbones import BACKBONES, SMALLEST
from .data import Images
from .episodes import Batch, Episodes
from .learners import LEARNERS, Adapting, HeadAdapting, Learner, make
from .training import clock

Pair = tuple[list[Tensor], Tensor]  # gradients of the body (and the start), and the loss
Values = list[Tensor]
TINY = 1e-30  # avoids 0 / 0 once conjugate gradients have converged
KEYS = ("seconds", "mebibytes", "norm")


def _loss(features: Tensor, labels: Tensor, head: Values, ridge: float = 0.0) -> Tensor:
    loss = F.cross_entropy(F.linear(features, *head), labels)
    return loss + ridge / 2 * sum(t.square().sum() for t in head) if ridge else loss


def _steps(learner: HeadAdapting, features: Tensor, labels: Tensor, *, graph: bool) -> tuple[Values, Values]:
    """Return the head before and after the lower steps."""
    group, steps = learner.optimizer.param_groups[-1], learner.optimizer.lower_steps
    momentum = learner.momentum
    begun = [p.detach().clone().requires_grad_() for p in learner.start]
    head, speed = begun, [torch.zeros_like(p) for p in begun]
    for _ in range(steps):
        slopes = torch.autograd.grad(_loss(features, labels, head, learner.ridge), head, create_graph=graph)
        speed = [momentum * m + s for m, s in zip(speed, slopes, strict=True)]
        head = [h - group["lr"] * m for h, m in zip(head, speed, strict=True)]
        if not graph:
            head = [h.detach().requires_grad_() for h in head]
    return begun, head


def hand_first_order(learner: HeadAdapting, support: Batch, query: Batch) -> Pair:
    """Run head steps on fixed features, then take the gradient of the query loss in the body."""
    with torch.no_grad():
        features = learner.body(support.images)
    _, head = _steps(learner, features, support.labels, graph=False)
    loss = _loss(learner.body(query.images), query.labels, head)
    return [*torch.autograd.grad(loss, [*learner.body.parameters()])], loss


def hand_anil(learner: HeadAdapting, support: Batch, query: Batch) -> Pair:
    """Backpropagate through the head steps, into body and start."""
    begun, head = _steps(learner, learner.body(support.images), support.labels, graph=True)
    loss = _loss(learner.body(query.images), query.labels, head)
    start = begun if "start" in learner.network else []
    return [*torch.autograd.grad(loss, [*learner.body.parameters(), *start])], loss


def hand_aid(learner: HeadAdapting, support: Batch, query: Batch) -> Pair:
    """Run head steps, then conjugate gradients and a product with the cross derivative."""
    body = [*learner.body.parameters()]
    with torch.no_grad():
        features = learner.body(support.images)
    _, head = _steps(learner, features, support.labels, graph=False)
    loss = _loss(learner.body(query.images), query.labels, head)
    found = torch.autograd.grad(loss, [*body, *head])
    direct, b = found[: len(body)], found[len(body) :]
    slopes = torch.autograd.grad(
        _loss(learner.body(support.images), support.labels, head, learner.ridge), head, create_graph=True
    )
    v = [torch.zeros_like(t) for t in b]
    r, p = [*b], [*b]
    square = sum((t * t).sum() for t in r)
    for _ in range(10):
        q = torch.autograd.grad(slopes, head, p, retain_graph=True)
        alpha = square / (sum((s * t).sum() for s, t in zip(p, q, strict=True)) + TINY)
        v = [a + alpha * s for a, s in zip(v, p, strict=True)]
        r = [a - alpha * s for a, s in zip(r, q, strict=True)]
        square, before = sum((t * t).sum() for t in r), square
        p = [a + square / (before + TINY) * s for a, s in zip(r, p, strict=True)]
    cross = torch.autograd.grad(slopes, body, v)
    return [d - c for d, c in zip(direct, cross, strict=True)], loss


def hand_pzobo(learner: HeadAdapting, support: Batch, query: Batch) -> Pair:
    """Run head steps on the body and on a perturbed one; one direction."""
    body, mu = [*learner.body.parameters()], 0.1
    directions = [torch.randn_like(p) for p in body]
    ends = []
    with torch.no_grad():
        features = [learner.body(support.images)]
        names = [name for name, _ in learner.body.named_parameters()]
        moved = {n: p + mu * u for n, p, u in zip(names, body, directions, strict=True)}
        features.append(functional_call(learner.body, moved, (support.images,)))
    for part in features:
        ends.append(_steps(learner, part, support.labels, graph=False)[1])
    loss = _loss(learner.body(query.images), query.labels, ends[0])
    found = torch.autograd.grad(loss, [*body, *ends[0]])
    parts = [((a - b) * g).sum() / mu for a, b, g in zip(ends[1], ends[0], found[len(body) :], strict=True)]
    change = torch.stack(parts).sum().detach()
    return [d + change * u for d, u in zip(found, directions, strict=False)], loss


def hand_maml(learner: Adapting, support: Batch, query: Batch, *, graph: bool = True) -> Pair:
    """Adapt all parameters; backpropagate through the steps, or (without graph) only at their end."""
    rate, steps = learner.optimizer.param_groups[-1]["lr"], learner.optimizer.lower_steps
    start = [p.detach().clone().requires_grad_() for p in learner.start]
    names = [name for name, _ in learner.body.named_parameters()]

    def loss(values: Values, batch: Batch) -> Tensor:
        body = dict(zip(names, values, strict=False))
        return _loss(functional_call(learner.body, body, (batch.images,)), batch.labels, values[len(names) :])

    values = start
    for _ in range(steps):
        slopes = torch.autograd.grad(loss(values, support), values, create_graph=graph)
        values = [v - rate * s for v, s in zip(values, slopes, strict=True)]
    value = loss(values, query)
    return [*torch.autograd.grad(value, start)], value


HAND: dict[str, Callable[..., Pair]] = {
    "first-order": hand_first_order,
    "anil": hand_anil,
    "itd": hand_anil,
    "aid": hand_aid,
    "pzobo": hand_pzobo,
    "maml": hand_maml,
    "fomaml": partial(hand_maml, graph=False),
}


def _adapted(
    adapt: Callable[[nn.Module, float], tuple[Callable[[Tensor], None], nn.Module]],
    learner: Adapting | HeadAdapting,
    support: Batch,
    query: Batch,
) -> Pair:
    """Adapt the whole network, or the head of fixed features, in the loop of another library."""
    head, group = learner.network["head"], learner.optimizer.param_groups[-1]
    features: nn.Module = learner.body if isinstance(learner, HeadAdapting) else nn.Identity()
    network = head if isinstance(learner, HeadAdapting) else nn.Sequential(learner.body, head)
    start = [*learner.body.parameters(), *head.parameters()]
    known = features(support.images)
    step, task = adapt(network, group["lr"])
    for _ in range(learner.optimizer.lower_steps):
        step(F.cross_entropy(task(known), support.labels))
    loss = F.cross_entropy(task(features(query.images)), query.labels)
    return [*torch.autograd.grad(loss, start)], loss


def with_learn2learn(learner: Adapting | HeadAdapting, support: Batch, query: Batch, *, first: bool = False) -> Pair:
    """Adapt a clone of the network, as learn2learn's MAML and ANIL do."""
    import learn2learn

    def adapt(network: nn.Module, lr: float) -> tuple[Callable[[Tensor], None], nn.Module]:
        task = learn2learn.algorithms.MAML(network, lr=lr, first_order=first).clone()
        return task.adapt, task

    return _adapted(adapt, learner, support, query)


def with_torchopt(learner: Adapting | HeadAdapting, support: Batch, query: Batch) -> Pair:
    """Step the network itself by a differentiable optimizer of TorchOpt, then restore it."""
    import torchopt

    begun = []

    def adapt(network: nn.Module, lr: float) -> tuple[Callable[[Tensor], None], nn.Module]:
        begun.append((network, torchopt.extract_state_dict(network, by="reference")))
        return torchopt.MetaSGD(network, lr=lr).step, network

    found = _adapted(adapt, learner, support, query)
    torchopt.recover_state_dict(*begun[0])
    return found


LOOPS: dict[str, dict[str, Callable[..., Pair]]] = {
    "hand": HAND,
    "hand-last": HAND,
    "learn2learn": {
        "maml": with_learn2learn, "fomaml": partial(with_learn2learn, first=True), "anil": with_learn2learn
    },
    "torchopt": {"maml": with_torchopt, "anil": with_torchopt},
}  # fmt: skip


def by_loop(loop: Callable[..., Pair], learner: Learner, episodes: Episodes) -> None:
    """Run a meta-step as a loop over tasks, which sets ``.grad`` of the meta-learned parameters."""
    drawn = episodes.sample(learner.tasks, learner.generator)
    support, query = (get(drawn, None, learner.generator) for get in (episodes.lower, episodes.upper))
    total: list[Tensor] = []
    for i in range(learner.tasks):
        gradients, _ = loop(learner, *(Batch(b.images[i], b.labels[i]) for b in (support, query)))
        total = [t + g / learner.tasks for t, g in zip(total, gradients, strict=True)] if total else [
            g / learner.tasks for g in gradients
        ]  # fmt: skip
    for tensor, gradient in zip(learner.upper, total, strict=True):
        tensor.grad = gradient.detach()


def add_sizes(parser: Parser) -> None:
    """Add the options of the body and of `random_episodes`."""
    parser.add_argument("--backbone", choices=[*BACKBONES], default="cnn4", help="default: cnn4")
    parser.option("size", 32, "height and width of the images", type=whole(SMALLEST))
    parser.option("way", 5, "classes per episode", type=whole(2))
    parser.option("shot", 1, "support images per class")
    parser.option("query", 5, "query images per class")
    parser.option("tasks", 4, "episodes per meta-step")


def random_episodes(args: argparse.Namespace) -> Episodes:
    """Return episodes of noise images."""
    pixels = torch.randint(0, 256, (2 * args.way, args.shot + args.query, 3, args.size, args.size), dtype=torch.uint8)
    images = Images("noise", {"train": pixels}, (0.5,) * 3, (0.25,) * 3)
    return Episodes(images, "train", way=args.way, shot=args.shot, query=args.query, device=args.device)


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Measure seconds of a meta-step, peak memory, and the norm of the first meta-gradient after the warm-up."""
    begin(0, "data")
    episodes = random_episodes(args)
    body = BACKBONES[args.backbone](3, args.size).to(args.device)
    before = peak(args.device)
    learner = make(args.alone, body, args.way, tasks=args.tasks, seed=0)
    if args.loop and args.loop != "hand-last":
        body.layout = torch.contiguous_format

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            if args.loop:
                by_loop(LOOPS[args.loop][args.alone], learner, episodes)
            else:
                learner.backward(episodes)

    times, norm, first = [], 0.0, learner.generator.get_state()
    for i in range(args.repeats + 1):
        learner.generator.set_state(first)
        begun = clock(args.device)
        step()
        times.append(clock(args.device) - begun)
        if i == 0:
            norm = float(torch.stack([p.grad.norm() for p in learner.upper if p.grad is not None]).norm())
    return {"seconds": min(times[1:]), "mebibytes": peak(args.device) - before, "norm": norm}


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Print the table; return its figures."""
    parser = Parser(__doc__, device=True, out=False)
    add_sizes(parser)
    parser.option("repeats", 5, "timed meta-steps of a process")
    parser.option("rounds", 1, "processes of each entry, in turns")
    parser.methods(LEARNERS, [*LEARNERS], "--learners")
    parser.option("loops", ["hand"], "loops to compare with", choices=[*LOOPS])
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--loop", default="", help=argparse.SUPPRESS)
    args = parser.parse(given)
    if args.alone:
        figures = measured(args)
        print(json.dumps(figures))
        return dict(figures)
    common = [item for key in ("backbone", "size", "way", "shot", "query", "tasks", "repeats", "device")
              for item in (f"--{key}", getattr(args, key))]  # fmt: skip
    common += ["--threads", args.threads or torch.get_num_threads()]
    rows: list[list[object]] = []
    results: dict[str, Any] = {}
    for name in args.learners:
        found: dict[str, Any] = {}
        for entry in ["library", *(loop for loop in args.loops if name in LOOPS[loop])] * args.rounds:
            loop = ["--loop", entry] if entry != "library" else []
            one = alone("recipes.few_shot.benchmark", "--alone", name, *common, *loop)
            if isinstance(one, str) or one["seconds"] <= found.get(entry, one)["seconds"]:
                found[entry] = one
        results[name] = found
        for entry, one in found.items():
            whole = isinstance(one, dict) and isinstance(found["library"], dict)
            ratio = found["library"]["seconds"] / one["seconds"] if whole and entry != "library" else None
            rows.append([name, entry, *([one[k] for k in KEYS] if isinstance(one, dict) else [one, None, None]), ratio])
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    title = (
        f"One meta-step of {args.tasks} episodes, {args.way}-way {args.shot}-shot, {args.query} query images of a "
        f"class, {args.backbone}, {args.size}x{args.size}"
    )
    show(title, ("", "loop", "seconds", "MiB", "norm", "library to loop"), rows)
    return {"results": results}


if __name__ == "__main__":
    main()
