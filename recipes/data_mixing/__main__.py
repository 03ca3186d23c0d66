r"""Data mixing: learn the shares of text sources on which to train a language model for a target domain.

.. math::
    \min_x\ \mathrm{CE}_{\text{target}}(\theta^*(x)), \qquad
    \theta^*(x) = \arg\min_\theta \sum_k \mathrm{softmax}(x)_k\, \mathrm{CE}_k(\theta)

\theta is a small character transformer. The sources are docstrings and code of Python's standard library, torch's C++
headers, and shuffled words. The target is the prose of Python's help; learning x sees only a validation part of it.
Then models are trained from scratch on each mixture, all with the same number of characters, and judged on another part
of the target. Each seed learns shares and trains a model on them, so that intervals include the variation of learning.

    python -m recipes.data_mixing --seed 1                                           # a quarter of an hour on one core
    python -m recipes.data_mixing --data 20newsgroups --data-root DIR
    python -m recipes.data_mixing --text DIR --target NAME      # one folder of your text files per source
    torchrun --nproc-per-node 2 -m recipes.data_mixing --parallel fsdp --scale 1m    # sharded over two processes

Controls: equal shares; training on (another part of) the target itself; DoReMi (arXiv:2305.10429), which does not see
the target; the method without the indirect term. For two sources the learned share is compared with a grid of shares.

The method for language models: ScaleBiO (arXiv:2406.19976). Learned shares are valid only for this tokenizer, these
texts and this length of training. Settings are tuned for ``--scale tiny`` only, with the seeds of ``--seed 0`` and
knowledge of the grid: trust only figures of other seeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..common import Interval, Parser, draw, figure, interval, progress, save, share, show
from ..common.records import Records
from .learning import METHODS, doremi, learned
from .network import SIZES, Ranks, ranks_of
from .texts import LOADERS, Texts, folders
from .training import excess, mean_curve, trained, valleys

# Arguments that change the results of runs.
COMMON = ("data", "scale", "length", "batch", "lower_lr", "parallel", "device")
LEARNING = (*COMMON, "steps", "warmup", "lower_steps", "lr")
TRAINING = (*COMMON, "train_steps", "judged")


class Runs:
    """Runs of the program; recorded ones are not repeated.

    Args:
        args: arguments of the command line.
        texts: sources and target.
        records: results of earlier runs.
        ranks: the ranks that run together.

    Attributes:
        seeds: seeds of learning, and of training on the learned shares.
        processor: processor seconds of each unit, when it was run.
    """

    def __init__(self, args: Any, texts: Texts, records: Records, ranks: Ranks) -> None:
        self.args, self.texts, self.records, self.ranks = args, texts, records, ranks
        self.seeds = [1000 * (args.seed + 1) + k for k in range(args.seeds)]
        self.processor: dict[str, float] = {}

    def _setting(self, names: Sequence[str]) -> dict[str, Any]:
        own = {"texts": self.texts.digest()} if self.args.text else {}  # own files may have changed since
        return {name: getattr(self.args, name) for name in names} | {"ranks": self.ranks.world} | own

    def _made(self, unit: Mapping[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a unit, with its processor seconds."""

        def timed() -> dict[str, Any]:
            start = time.process_time()
            return {**run(), "processor": time.process_time() - start}

        result = self.records.get(unit, timed)
        self.processor[json.dumps(unit, sort_keys=True)] = result["processor"]
        return result

    def learn(self, name: str, sources: Sequence[str]) -> dict[str, Any]:
        """Learn shares by a method or by DoReMi: return those of each seed, their means, and the mean curve."""
        texts = {source: self.texts.sources[source] for source in sources}

        def run(seed: int) -> dict[str, Any]:
            if name == "doremi":
                return doremi(texts, self.args, seed, self.ranks)
            return learned(name, texts, self.texts.target["validation"], self.args, seed, self.ranks)

        each = []
        for seed in self.seeds:
            unit = {"learn": name, "sources": [*sources], "seed": seed, **self._setting(LEARNING)}
            each.append(self._made(unit, partial(run, seed)))
        return {
            "weights of seeds": [r["weights"] for r in each],
            "learning": mean_curve([r["curve"] for r in each]) if "curve" in each[0] else None,
            "seconds": sum(r["processor"] for r in each) / len(each),
        }

    def judge(self, found: Mapping[str, Any], label: str) -> dict[str, Any]:
        """Train models from scratch on the shares of each seed: return losses, an interval, and the mean curve."""
        texts = {**self.texts.sources, "target": self.texts.target["train"]}
        test, curves = self.texts.target["test"], []

        def run(weights: Mapping[str, float], seed: int) -> dict[str, Any]:
            parts = [texts[source] for source in weights]
            return {"curve": trained(parts, [*weights.values()], test, self.args, seed, self.ranks)}

        quiet, mixtures = True if self.ranks.rank else None, found["weights of seeds"]
        for seed, weights in zip(
            progress(self.seeds, f"train {label}", unit="model", disable=quiet), mixtures, strict=True
        ):
            unit = {"train": dict(weights), "seed": seed, **self._setting(TRAINING)}
            curves.append(self._made(unit, partial(run, weights, seed))["curve"])
        losses = [curve[-1]["held-out loss"] for curve in curves]
        return {
            **found, "weights": {k: interval([w[k] for w in mixtures]) for k in mixtures[0]},
            "loss": interval(losses), "losses": losses, "curve": mean_curve(curves),
        }  # fmt: skip

    def given(self, weights: Mapping[str, float]) -> dict[str, Any]:
        """Return fixed shares in the format of learned ones."""
        return {"weights of seeds": [dict(weights) for _ in self.seeds]}


def several(runs: Runs, methods: Sequence[str]) -> dict[str, Any]:
    """Learn shares of all sources by each method and control, and judge models trained on them."""
    names = [*runs.texts.sources]
    equal = dict.fromkeys(names, 1 / len(names))
    found = {name: runs.learn(name, names) for name in (*methods, "doremi")}
    found |= {"uniform": runs.given(equal), "target only": runs.given({"target": 1.0})}
    return {name: runs.judge(r, name) for name, r in found.items()}


def two(runs: Runs, methods: Sequence[str]) -> dict[str, Any]:
    """Compare learned shares of two sources with a grid."""
    first, second = runs.texts.pair
    shares = sorted(runs.args.grid)
    grid = {s: runs.judge(runs.given({first: s, second: 1 - s}), f"grid {s:g}") for s in shares}
    best = min(shares, key=lambda s: float(grid[s]["loss"].mean))
    optima = valleys({s: r["losses"] for s, r in grid.items()})
    found = {}
    for name in methods:
        judged = runs.judge(runs.learn(name, (first, second)), name)
        learnt = [w[first] for w in judged["weights of seeds"]]
        found[name] = {
            **judged, "distance": excess(learnt, optima), "regret": excess(judged["losses"], grid[best]["losses"]),
        }  # fmt: skip
    return {
        "sources": [first, second], "optimum": interval(optima), "best of grid": best,
        "grid": {f"{s:g}": r for s, r in grid.items()}, "learned": found,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True, device=True)
    parser.data(LOADERS)
    parser.add_argument("--text", type=Path, help="your own folder, with a subfolder of text files for each source")
    parser.option("target", "target", "subfolder of --text with the target domain")
    parser.methods(METHODS, list(METHODS))
    parser.add_argument("--scale", choices=[*SIZES], default="tiny", help="parameters of the model; default: tiny")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp",
                        help="under torchrun: each rank has the model, or a shard (FSDP2); default: ddp")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="reuse the records in --out")
    parser.settings("scale", SIZES, length="characters per window", batch="windows per batch, over all ranks",
                    lower_lr="learning rate of Adam on the model")  # fmt: skip
    parser.option("steps", 120, "steps of the shares")
    parser.option("warmup", 20, "first steps, with fixed shares")
    parser.option("lower_steps", 5, "steps of the model for each step of the shares")
    parser.option("lr", 0.05, "learning rate of Adam on the logits of the shares")
    parser.option("train_steps", 300, "steps of each model trained from scratch")
    parser.option("seeds", 5, "number of seeds; each learns shares and trains a model on them")
    parser.option("judged", 512, "windows of the held-out part, for the final losses")
    parser.option("grid", [0.2, 0.35, 0.5, 0.65, 0.8], "shares of the first of two sources", type=share)
    args = parser.parse(arguments)
    if args.length < 3:  # the model looks at three characters at once
        parser.error(f"argument --length: invalid value: {args.length} (must be a whole number, at least 3)")
    if args.steps <= args.warmup:
        parser.error(f"argument --steps: invalid value: {args.steps} (must be above --warmup, {args.warmup})")
    ranks, start = ranks_of(args.device), time.perf_counter()
    if args.text:
        args.data, texts = args.text.resolve().name, folders(args.text, args.target)
    else:
        texts = LOADERS[args.data](args.data_root, args.download)
    stem = args.out / f"data_mixing_{args.data}_{args.scale}"
    runs = Runs(args, texts, records_of(stem, args, ranks), ranks)
    numbers = {
        "sources": [*runs.texts.sources],
        "mixtures": several(runs, args.optimizer),
        "two sources": two(runs, args.optimizer),
        "ranks": ranks.world,
        "minutes": (time.perf_counter() - start) / 60,
        "minutes of the processor": sum(runs.processor.values()) / 60,
        "runs made": runs.records.made,
    }
    if ranks.rank:
        return numbers
    return report(numbers, stem, args)


def records_of(stem: Path, args: Any, ranks: Ranks) -> Records:
    """Return the records: the first rank writes them; the others read them once at the start."""
    path = Path(f"{stem}.jsonl")
    if not args.resume and not ranks.rank:
        path.unlink(missing_ok=True)
    if ranks.group is not None:
        dist.barrier()
    records = Records(path)
    if ranks.group is not None:
        dist.barrier()
    if ranks.rank:
        records.path = None
    return records


def report(numbers: dict[str, Any], stem: Path, args: Any) -> dict[str, Any]:
    """Print, draw and write the numbers."""
    mixtures, pair, names = numbers["mixtures"], numbers["two sources"], numbers["sources"]
    characters = args.train_steps * args.batch * args.length
    title = f"Data mixing, {args.data}, scale {args.scale}, {characters:,} characters, {args.seeds} seeds"
    order = sorted(mixtures, key=lambda name: float(mixtures[name]["loss"].mean))
    show(
        f"{title}: held-out loss in nats per character",
        ("mixture", "loss", "95 % interval", *names, "seconds to learn"),
        [
            [name, *loss_of(r), *(r["weights"][k].mean if k in r["weights"] else None for k in names), r.get("seconds")]
            for name, r in ((name, mixtures[name]) for name in order)
        ],
    )
    first, optimum = pair["sources"][0], pair["optimum"]
    grid = [[f"grid {s}", float(s), *loss_of(r), *[None] * 4] for s, r in pair["grid"].items()]
    learnt = [
        [name, r["weights"][first].mean, *loss_of(r),
         r["distance"].mean, bounds(r["distance"]), r["regret"].mean, bounds(r["regret"])]
        for name, r in pair["learned"].items()
    ]  # fmt: skip
    show(
        f"Two sources, {' and '.join(pair['sources'])}: best share of {first} by a parabola {optimum}, "
        f"best of the grid {pair['best of grid']:g}",
        ("", f"share of {first}", "loss", "95 % interval", "distance", "its interval", "regret", "its interval"),
        [*grid, *learnt],
    )
    print(f"{numbers['minutes']:.1f} minutes; all units together {numbers['minutes of the processor']:.1f} of a core")
    with figure(stem, title, (4.5 * (len(args.optimizer) + 2), 4.5)) as canvas:
        axes = canvas.subplots(1, len(args.optimizer) + 2, squeeze=False)[0]
        for axis, name in zip(axes, args.optimizer, strict=False):
            curve = mixtures[name]["learning"]
            curves = {k: [{"step": p["step"], "share": p[k]} for p in curve] for k in names}
            draw(axis, curves, "step", "share", title=name, xlabel="steps", ylim=(0, 1))
        axes[0].legend(fontsize="small")
        draw(axes[-2], {name: mixtures[name]["curve"] for name in order}, "characters", "held-out loss")
        axes[-2].legend(fontsize="small")
        truth(axes[-1], pair)
    return save(args, stem, numbers)


def loss_of(result: Mapping[str, Any]) -> tuple[float, str]:
    """Return the mean loss and its interval."""
    return result["loss"].mean, bounds(result["loss"])


def bounds(found: Interval) -> str:
    """Format an interval without its mean."""
    return f"{found.low:.4f} to {found.high:.4f}"


def truth(axis: Any, pair: Mapping[str, Any]) -> None:
    """Draw the losses of the grid with their intervals, and the learned shares."""
    shares, grid = [float(s) for s in pair["grid"]], [r["loss"] for r in pair["grid"].values()]
    axis.errorbar(shares, [r.mean for r in grid], [(r.high - r.low) / 2 for r in grid], label="grid", capsize=3)
    for name, r in pair["learned"].items():
        axis.plot([w[pair["sources"][0]] for w in r["weights of seeds"]], r["losses"], "o", label=name, alpha=0.6)
    axis.set(xlabel=f"share of {pair['sources'][0]}", ylabel="held-out loss", title="two sources")
    axis.legend(fontsize="small")


if __name__ == "__main__":
    main()
