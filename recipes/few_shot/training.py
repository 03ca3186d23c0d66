"""Training with an outer optimizer, evaluation on fixed episodes, checkpoints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo

from ..common import progress, synchronize
from ..common.seeds import begin, stream
from .backbones import Body, calibrate
from .episodes import Batch, Episodes
from .learners import Learner

__all__ = ["OUTER", "SCHEDULES", "Training", "clock", "evaluate", "interval", "pretrain", "train"]

OUTER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True),
}
SCHEDULES: dict[str, Callable[[float], float]] = {  # completed share of the training -> factor of the rate
    "constant": lambda share: 1.0,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * min(share, 1.0))),
    "steps": lambda share: 1.0 if share < 0.5 else 0.1 if share < 0.8 else 0.01,
}
OFTEN = 60.0  # seconds between two checkpoints
Log = Callable[[int, Mapping[str, float]], None]


def clock(device: torch.device | str) -> float:
    """Return seconds: processor time of this process on a CPU, wall-clock time for an accelerator."""
    synchronize(device)
    return time.process_time() if torch.device(device).type == "cpu" else time.perf_counter()


def interval(accuracies: Tensor) -> dict[str, float]:
    """Return the mean over episodes, and half the width of its 95 % interval."""
    half = 1.96 * float(accuracies.std()) / len(accuracies) ** 0.5 if len(accuracies) > 1 else math.nan
    return {"accuracy": float(accuracies.mean()), "interval": half, "episodes": len(accuracies)}


@contextmanager
def _evaluating(learner: Learner) -> Any:
    """Context in evaluation mode, which restores what adaptation changes."""
    before = {name: value.clone() for name, value in learner.network.state_dict().items()}
    learner.network.eval()
    try:
        yield
    finally:
        learner.network.train()
        learner.network.load_state_dict(before)


def evaluate(learner: Learner, episodes: Episodes, count: int, seed: int, training: Episodes | None = None) -> Tensor:
    """Return the accuracy of each of ``count`` fixed episodes.

    Args:
        learner: adapts to each of them; left unchanged.
        episodes: episodes of unseen classes.
        count: number of episodes.
        seed: seed of the episodes.
        training: episodes for the statistics of a body with ``running`` normalisation.
    """
    with torch.no_grad(), _evaluating(learner):
        if training is not None and any(norm.statistics == "running" for norm in learner.body.norms):
            calibrate(learner.body, (support.images.flatten(0, 1) for support, _ in training.fixed(20, seed, 2)))
        return torch.cat([_correct(learner, *batches) for batches in episodes.fixed(count, seed)])


def _correct(learner: Learner, support: Batch, query: Batch) -> Tensor:
    """Return the accuracy of each episode; zero if adaptation diverges."""
    try:
        scores = learner.scores(support, query)
    except bo.NonFiniteError:
        return torch.zeros(len(query.labels))
    return (scores.argmax(-1) == query.labels).float().mean(1).cpu()


@dataclass
class Training:
    """Settings of a training run.

    Attributes:
        lr: learning rate of the outer optimizer.
        steps: number of meta-steps; None: as many as ``seconds`` allow.
        seconds: time of meta-steps without evaluation (see `clock`); None: no limit.
        outer: one of `OUTER`.
        schedule: one of `SCHEDULES`, over the ``steps``; with seconds alone the rate is constant.
        clip: largest norm of the gradient; None: no clipping.
        evaluations: number of evaluations on validation classes, evenly spread over the training.
        episodes: validation episodes per evaluation.
    """

    lr: float
    steps: int | None = None
    seconds: float | None = None
    outer: str = "adam"
    schedule: str = "constant"
    clip: float | None = 10.0
    evaluations: int = 5
    episodes: int = 100

    def share(self, step: int, seconds: float) -> float:
        """Return the completed share of the training."""
        return max(step / self.steps if self.steps else 0.0, seconds / self.seconds if self.seconds else 0.0)


def train(
    learner: Learner,
    episodes: Episodes,
    validation: Episodes,
    how: Training,
    *,
    label: str = "",
    checkpoint: Path | None = None,
    log: Log | None = None,
) -> dict[str, Any]:
    """Meta-train; the learner ends with the parameters that were best on the validation classes.

    Args:
        learner: the learner to train.
        episodes: episodes of training classes.
        validation: episodes of validation classes, which select the best checkpoint.
        how: budget, learning rate and so on.
        label: label of the progress bar.
        checkpoint: file to which everything is saved at each evaluation, and after `OFTEN` seconds. If it exists,
            training resumes from it, bitwise equal if the budget is a number of steps.
        log: called at each evaluation with the step and a flat dict of figures, such as
            ``lambda step, figures: [writer.add_scalar(k, v, step) for k, v in figures.items()]``.

    Returns:
        The ``curve`` (step, seconds, loss, validation accuracy and interval), the best accuracy and its step, and the
        flag ``diverged``.
    """
    outer = OUTER[how.outer](learner.upper, lr=how.lr)
    step, seconds, diverged = 0, 0.0, False
    curve: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}

    def measure(loss: float) -> None:
        found = interval(evaluate(learner, validation, how.episodes, 1, episodes))
        point = {"step": step, "seconds": seconds, "loss": loss, **found}
        if not curve or found["accuracy"] > max(p["accuracy"] for p in curve):
            best.update({k: v.clone() for k, v in learner.network.state_dict().items()})
        curve.append(point)
        if log is not None:
            log(step, {**learner.metrics(), **point, "lr": outer.param_groups[0]["lr"]})

    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        learner.load_state_dict(saved["learner"])
        outer.load_state_dict(saved["outer"])
        step, seconds, curve, best = (saved[key] for key in ("step", "seconds", "curve", "best"))
    else:
        measure(math.nan)

    def save() -> float:
        if checkpoint is not None:
            state = {"learner": learner.state_dict(), "outer": outer.state_dict()}
            _save(checkpoint, {**state, "step": step, "seconds": seconds, "curve": curve, "best": best})
        return time.monotonic()

    saved_at = time.monotonic()
    with warnings.catch_warnings(), _bar(label, how, step, seconds) as bar:
        warnings.simplefilter("ignore", bo.BilevelWarning)  # the noise of few directions is part of the comparison
        while how.share(step, seconds) < 1:
            start = clock(learner.device)
            factor = SCHEDULES[how.schedule](step / how.steps if how.steps else 0.0)
            for group in outer.param_groups:
                group["lr"] = how.lr * factor
            try:
                loss = learner.backward(episodes)
            except bo.NonFiniteError:
                diverged = True
                break
            if how.clip is not None:
                torch.nn.utils.clip_grad_norm_(learner.upper, how.clip)
            outer.step()
            before = seconds
            step, seconds = step + 1, seconds + clock(learner.device) - start
            bar.update(1 if how.steps else seconds - before)
            if how.share(step, seconds) * how.evaluations >= len(curve):
                measure(float(loss))
                bar.set_postfix(accuracy=f"{curve[-1]['accuracy']:.3f}")
                if not math.isfinite(curve[-1]["loss"]):
                    diverged = True
                    break
                saved_at = save()
            elif time.monotonic() - saved_at > OFTEN:
                saved_at = save()
    learner.network.load_state_dict(best)
    top = max(curve, key=lambda point: point["accuracy"])
    return {"curve": curve, "steps": step, "seconds": seconds, "diverged": diverged,
            "validation": top["accuracy"], "best_step": top["step"]}  # fmt: skip


def pretrain(
    body: Body, episodes: Episodes, steps: int, *, lr: float = 1e-3, batch: int = 64, seed: int = 0,
    checkpoint: Path | None = None, autocast: bool = False,
) -> None:  # fmt: skip
    """Train a body to classify the training classes, all at once, before it is meta-trained.

    The head is linear and discarded, and the loss is the cross-entropy on random images of random classes. Adam's rate
    falls to zero along a cosine.

    Args:
        body: trained in place.
        episodes: episodes of training classes: their images, with their rotations and augmentation.
        steps: number of updates.
        lr: first learning rate.
        batch: images of an update.
        seed: seed of head and batches.
        checkpoint: file to which everything is saved after `OFTEN` seconds and at the end. Training resumes from it.
        autocast: evaluate the body in bfloat16.
    """
    device, generator = episodes.device, stream(seed, "pretraining")
    with torch.random.fork_rng(devices=[]):
        begin(seed, "pretraining")
        head = torch.nn.Linear(body.width, episodes.classes * episodes.turns).to(device)
    body.layout = torch.channels_last
    adam, step = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=lr), 0
    parts: dict[str, Any] = {"body": body, "head": head, "adam": adam}
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        generator.set_state(saved["generator"])
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    saved_at = time.monotonic()
    with progress(None, "pretraining", total=steps, initial=step) as bar:
        while step < steps:
            images, labels, _ = episodes.classified(batch, generator)
            for group in adam.param_groups:
                group["lr"] = lr * SCHEDULES["cosine"](step / steps)
            adam.zero_grad()
            with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
                features = body(images)
            F.cross_entropy(head(features.to(head.weight)), labels).backward()  # type: ignore[no-untyped-call]
            adam.step()
            step += 1
            bar.update(1)
            if checkpoint is not None and (step == steps or time.monotonic() - saved_at > OFTEN):
                states = {name: part.state_dict() for name, part in parts.items()}
                _save(checkpoint, {**states, "step": step, "generator": generator.get_state()})
                saved_at = time.monotonic()


def _bar(label: str, how: Training, step: int, seconds: float) -> Any:
    """Return a progress bar of the meta-steps, or of the seconds if there is no number of steps."""
    if how.steps:
        return progress(None, label, total=how.steps, initial=step)
    form = "{desc}{percentage:3.0f}%|{bar}| {n:.1f} of {total:.1f} s{postfix}"
    return progress(None, label, total=how.seconds, initial=seconds, bar_format=form)


def _save(path: Path, state: dict[str, Any]) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)
