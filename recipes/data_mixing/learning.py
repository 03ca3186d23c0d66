r"""Shares of the sources, learned by a bilevel method or by DoReMi."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bilevel_optim as bo

from ..common import progress
from ..common.seeds import stream
from .network import Ranks, mean_over, network, shared
from .texts import windows

__all__ = ["METHODS", "Batches", "Setting", "doremi", "learned", "losses"]


class Setting(NamedTuple):
    """Method with its settings.

    Attributes:
        make: called with x, y and learning rates.
        single: True if a step has one lower step, which needs more steps.
        kept: True for second derivatives, which need full parameters in a backward pass (FSDP2).
    """

    make: partial[Any]
    single: bool = False
    kept: bool = False


# Damping, because the lower Hessian has negative eigenvalues, along which the linear solve would diverge.
LINEAR: dict[str, Any] = {"linear_solver": "fixed_point", "linear_steps": 4, "linear_lr": 0.1, "damping": 0.03}
METHODS: dict[str, Setting] = {
    # Large nu: the copies of y also differ by training noise, which the estimate divides by nu.
    "f2sa": Setting(partial(bo.F2SA, order=1, nu=1.0, normalize=False, vectorize=False)),
    "aid": Setting(
        partial(
            bo.AID, linear_solver="fixed_point", linear_steps=4, linear_lr=0.3, damping=0.03, hvp="finite-difference"
        )
    ),
    "soba": Setting(partial(bo.SOBA, linear_lr=0.1), single=True, kept=True),
    "first-order": Setting(partial(bo.FirstOrder)),
}


class Batches:
    """Endless batches with equally many windows of each text; all ranks draw the same, and each takes its part.

    Args:
        texts: texts from which windows are drawn.
        each: windows per text in a batch, over all ranks.
        length: length of a window, minus one.
        seed: seed of the draws.
        ranks: ranks that share a batch.
        name: name of the random stream.
    """

    def __init__(
        self, texts: Sequence[Tensor], each: int, length: int, seed: int, ranks: Ranks, name: str = "batches"
    ) -> None:
        self.texts, self.each, self.length, self.seed, self.ranks, self.name = texts, each, length, seed, ranks, name

    def __iter__(self) -> Iterator[Tensor]:
        generator = stream(self.seed, self.name)
        while True:
            yield shared(
                torch.stack([windows(text, self.each, self.length, generator) for text in self.texts]), self.ranks
            )


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the losses of the windows of each text, of shape (texts, windows)."""
    found: Tensor = model(batch.flatten(0, 1)).view(batch.shape[:2])
    return found


def problem(
    texts: Mapping[str, Tensor], target: Tensor, model: nn.Module, args: Any, seed: int, ranks: Ranks
) -> tuple[Tensor, bo.Objective, bo.Objective]:
    """Return logits of equal shares, and the two losses: of the target, and of the weighted texts."""
    x = torch.zeros(len(texts), requires_grad=True, device=ranks.device)
    each = max(args.batch // len(texts), 1)

    def lower(batch: Tensor) -> Tensor:
        return x.softmax(0) @ losses(model, batch).mean(1)

    def upper(batch: Tensor) -> Tensor:
        return losses(model, batch).mean()

    data = Batches([*texts.values()], each, args.length, seed, ranks)
    held = Batches([target], each * len(texts), args.length, seed, ranks, "held batches")
    return x, bo.Objective(upper, held), bo.Objective(lower, data)


def named(texts: Mapping[str, Tensor], shares: Tensor) -> dict[str, float]:
    """Return the shares by text name."""
    return dict(zip(texts, shares.tolist(), strict=True))


def learned(
    name: str, texts: Mapping[str, Tensor], target: Tensor, args: Any, seed: int, ranks: Ranks
) -> dict[str, Any]:
    """Learn the shares of the texts by a method; return their mean over the second half of the steps, and the curve.

    First the model is trained on equal shares for ``args.warmup`` steps, because gradients at a new model reflect
    little more than character frequencies. Then its learning rate falls to zero, as in the training that judges
    mixtures: noise in the model's training is noise in the shares.
    """
    setting = METHODS[name]
    model = network(args, seed, ranks, keep=setting.kept)
    x, upper, lower = problem(texts, target, model, args, seed, ranks)
    common = {
        "lr": args.lr, "lower_lr": args.lower_lr, "lower_optimizer": torch.optim.Adam, "process_group": ranks.group,
    }  # fmt: skip
    inner = {} if setting.single else {"lower_steps": args.lower_steps}
    times = args.lower_steps if setting.single else 1
    warm = bo.FirstOrder([x], model.parameters(), lower_steps=args.lower_steps, **common)
    optimizer = setting.make([x], model.parameters(), **common, **inner)
    adam, last = torch.optim.Adam([x], lr=args.lr / times), (args.steps - args.warmup) * times // 2
    total, curve, start = torch.zeros_like(x), list[dict[str, float]](), time.perf_counter()

    def note(step: float, loss: Tensor) -> None:
        curve.append({"step": step, "loss": float(loss), **named(texts, x.detach().softmax(0))})

    for k in range(args.warmup):
        loss = warm.backward(upper, lower)
        note(k + 1, loss)
    steps = (args.steps - args.warmup) * times
    for k in (bar := progress(range(steps), f"learn {name}", disable=True if ranks.rank else None)):
        for group in optimizer.param_groups:
            if group["level"] == "lower":
                group["lr"] = args.lower_lr * (1 - k / steps)
        loss = optimizer.backward(upper, lower)
        adam.step()
        total += x.detach().softmax(0) * (k >= last)
        if (k + 1) % max(steps // 50, 1) == 0 or k == steps - 1:
            note(args.warmup + (k + 1) / times, loss)
            bar.set_postfix(loss=f"{curve[-1]['loss']:.3f}")
    return {
        "weights": named(texts, total / (steps - last)),
        "seconds": time.perf_counter() - start,
        "oracle_calls": optimizer.oracle_counts,
        "curve": curve,
    }


def doremi(texts: Mapping[str, Tensor], args: Any, seed: int, ranks: Ranks) -> dict[str, Any]:
    """Learn shares by group DRO on the excess loss over a reference model; return their mean (arXiv:2305.10429).

    Step size 1 and smoothing 1e-3 are the paper's; the excess is clipped per window, not per character.
    """
    count = len(texts)
    equal = torch.full((count,), 1 / count, device=ranks.device)
    weights, total, start = equal, torch.zeros_like(equal), time.perf_counter()
    reference, proxy = (network(args, seed, ranks, replicate=True) for _ in range(2))
    data = iter(Batches([*texts.values()], max(args.batch // count, 1), args.length, seed, ranks))
    steps = args.steps * args.lower_steps
    for model in (reference, proxy):
        adam = torch.optim.Adam(model.parameters(), lr=args.lower_lr)
        for _ in progress(range(steps), "learn doremi", disable=True if ranks.rank else None):
            batch = next(data)
            found = losses(model, batch)
            if model is proxy:
                with torch.no_grad():
                    excess = mean_over(ranks, (found - losses(reference, batch)).clamp_min(0).mean(1))
                weights = weights * excess.exp()
                weights = 0.999 * weights / weights.sum() + 1e-3 * equal
                total += weights
            adam.zero_grad()
            loss: Tensor = (weights if model is proxy else equal) @ found.mean(1)
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    return {"weights": named(texts, total / steps), "seconds": time.perf_counter() - start}
