r"""Data mixing: learn how much of each source of text a language model should be trained on, for a target domain.

.. math::
    \min_x\ \mathrm{CE}_{\text{target}}(\theta^*(x)), \qquad
    \theta^*(x) = \arg\min_\theta \sum_k \mathrm{softmax}(x)_k\, \mathrm{CE}_k(\theta)

\theta is a small character transformer. The sources are docstrings and code of Python's standard library, torch's C++
headers, and shuffled words; the target is the prose of Python's help, of which only a validation part is seen while x
is learned. Then models are trained from scratch on each mixture, all with the same number of characters, and judged by
another part of the target.

    python -m recipes.data_mixing                                                    # about ten minutes of a core
    python -m recipes.data_mixing --data 20newsgroups --data-root DIR
    torchrun --nproc-per-node 2 -m recipes.data_mixing --parallel fsdp --scale 1m    # sharded over two processes

Controls: equal shares; training on (another part of) the target itself; DoReMi (arXiv:2305.10429), which does not know
the target; the method without the indirect term. For two sources the learned share is beside a grid of shares.

The method for language models: ScaleBiO (arXiv:2406.19976). Weights are those of this tokenizer, these texts and this
length of training: they do not carry over to others. Settings are tuned for ``--scale tiny`` only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..common import Interval, Parser, draw, figure, interval, progress, save, share, show
from ..common.records import Records
from .learning import METHODS, doremi, learned
from .network import SIZES, Ranks, ranks_of
from .texts import LOADERS, Texts
from .training import mean_curve, regret, trained, valley

# The arguments that runs depend on.
COMMON = ("data", "scale", "length", "batch", "lower_lr", "parallel", "device")
LEARNING = (*COMMON, "steps", "warmup", "lower_steps", "lr")
TRAINING = (*COMMON, "train_steps", "judged")


class Runs:
    """The runs of the program, of which those in the records are not made again.

    Args:
        args: of the command line.
        texts: sources and target.
        records: what was run before.
        ranks: that run together.
    """

    def __init__(self, args: Any, texts: Texts, records: Records, ranks: Ranks) -> None:
        self.args, self.texts, self.records, self.ranks = args, texts, records, ranks

    def _setting(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: getattr(self.args, name) for name in names} | {"ranks": self.ranks.world}

    def learn(self, name: str, sources: Sequence[str], seed: int) -> dict[str, Any]:
        """Weights of these sources by a method, or by DoReMi."""
        texts = {source: self.texts.sources[source] for source in sources}

        def run() -> dict[str, Any]:
            if name == "doremi":
                return doremi(texts, self.args, seed, self.ranks)
            return learned(name, texts, self.texts.target["validation"], self.args, seed, self.ranks)

        return self.records.get({"learn": name, "sources": [*sources], "seed": seed, **self._setting(LEARNING)}, run)

    def train(self, weights: Mapping[str, float], label: str) -> list[list[dict[str, float]]]:
        """Curves of models trained from scratch, one for each seed; ``"target"`` is a source too."""
        texts = {**self.texts.sources, "target": self.texts.target["train"]}
        parts, test, curves = [texts[source] for source in weights], self.texts.target["test"], []

        def run(seed: int) -> dict[str, Any]:
            return {"curve": trained(parts, [*weights.values()], test, self.args, seed, self.ranks)}

        quiet = True if self.ranks.rank else None
        for k in progress(range(self.args.seeds), f"train {label}", unit="model", disable=quiet):
            seed = 1000 * (self.args.seed + 1) + k
            unit = {"train": dict(weights), "seed": seed, **self._setting(TRAINING)}
            curves.append(self.records.get(unit, partial(run, seed))["curve"])
        return curves

    def judge(self, weights: Mapping[str, float], label: str) -> dict[str, Any]:
        """The held-out loss of a mixture: of each seed, their mean with a 95 % interval, and the mean curve."""
        curves = self.train(weights, label)
        losses = [curve[-1]["held-out loss"] for curve in curves]
        return {
            "weights": dict(weights), "loss": interval(losses), "losses": losses, "curve": mean_curve(curves),
        }  # fmt: skip


def several(runs: Runs, methods: Sequence[str]) -> dict[str, Any]:
    """All sources: what each method and control finds, and how well a model does that is trained on it."""
    names = [*runs.texts.sources]
    equal = dict.fromkeys(names, 1 / len(names))
    found = {name: runs.learn(name, names, runs.args.seed) for name in (*methods, "doremi")}
    found |= {"uniform": {"weights": equal}, "target only": {"weights": {"target": 1.0}}}
    return {name: {**r, **runs.judge(r["weights"], name)} | {"learning": r.get("curve")} for name, r in found.items()}


def two(runs: Runs, methods: Sequence[str]) -> dict[str, Any]:
    """Two sources: the learned share beside a grid."""
    first, second = runs.texts.pair
    shares = sorted(runs.args.grid)
    grid = {s: runs.judge({first: s, second: 1 - s}, f"grid {s:g}") for s in shares}
    best = min(shares, key=lambda s: float(grid[s]["loss"].mean))
    optimum = valley({s: r["losses"] for s, r in grid.items()}) if len(shares) > 2 else interval([best])
    found = {}
    for name in methods:
        r = runs.learn(name, (first, second), runs.args.seed)
        judged = runs.judge(r["weights"], name)
        found[name] = {
            **judged, "learning": r["curve"], "distance": r["weights"][first] - optimum.mean,
            "regret": regret(judged["losses"], grid[best]["losses"]),
        }  # fmt: skip
    return {
        "sources": [first, second], "optimum": optimum, "best of grid": best,
        "grid": {f"{s:g}": r for s, r in grid.items()}, "learned": found,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns the numbers that it writes."""
    parser = Parser(__doc__, seed=True, device=True)
    parser.data(LOADERS)
    parser.methods(METHODS, list(METHODS))
    parser.add_argument("--scale", choices=[*SIZES], default="tiny", help="parameters of the model; default: tiny")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp",
                        help="under torchrun: each rank has the model, or a shard (FSDP2); default: ddp")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="take over what is in the records in --out")
    parser.settings("scale", SIZES, length="characters of a window", batch="windows in a batch, of all ranks",
                    lower_lr="of Adam on the model")  # fmt: skip
    parser.option("steps", 120, "steps of the shares")
    parser.option("warmup", 20, "of them, first steps in which the shares rest")
    parser.option("lower_steps", 5, "steps of the model for each")
    parser.option("lr", 0.05, "of Adam on the logits of the shares")
    parser.option("train_steps", 300, "steps of each model trained from scratch")
    parser.option("seeds", 5, "models trained from scratch on each mixture")
    parser.option("judged", 512, "windows of the held-out part that they are judged by")
    parser.option("grid", [0.2, 0.35, 0.5, 0.65, 0.8], "shares of the first of two sources", type=share)
    args = parser.parse(arguments)
    ranks, start = ranks_of(args.device), time.perf_counter()
    stem = args.out / f"data_mixing_{args.data}_{args.scale}"
    runs = Runs(args, LOADERS[args.data](args.data_root, args.download), records_of(stem, args, ranks), ranks)
    numbers = {
        "sources": [*runs.texts.sources],
        "mixtures": several(runs, args.optimizer),
        "two sources": two(runs, args.optimizer),
        "ranks": ranks.world,
        "minutes": (time.perf_counter() - start) / 60,
        "runs made": runs.records.made,
    }
    if ranks.rank:
        return numbers
    return report(numbers, stem, args)


def records_of(stem: Path, args: Any, ranks: Ranks) -> Records:
    """The records, which the first rank writes; the others know what was there in the beginning."""
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
            [name, *loss_of(r), *(r["weights"].get(k) for k in names), r.get("seconds")]
            for name, r in ((name, mixtures[name]) for name in order)
        ],
    )
    first, optimum = pair["sources"][0], pair["optimum"]
    grid = [[f"grid {s}", float(s), *loss_of(r), None, None, None] for s, r in pair["grid"].items()]
    learnt = [
        [name, r["weights"][first], *loss_of(r), r["distance"], r["regret"].mean, bounds(r["regret"])]
        for name, r in pair["learned"].items()
    ]
    show(
        f"Two sources, {' and '.join(pair['sources'])}: best share of {first} by a parabola {optimum}, "
        f"best of the grid {pair['best of grid']:g}",
        ("", f"share of {first}", "loss", "95 % interval", "distance", "regret", "its interval"),
        [*grid, *learnt],
    )
    print(f"{numbers['minutes']:.1f} minutes")
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
    """The mean of the losses, and its interval."""
    return result["loss"].mean, bounds(result["loss"])


def bounds(found: Interval) -> str:
    """An interval without its mean."""
    return f"{found.low:.4f} to {found.high:.4f}"


def truth(axis: Any, pair: Mapping[str, Any]) -> None:
    """The losses of the grid with their intervals, and the learned shares."""
    shares, grid = [float(s) for s in pair["grid"]], [r["loss"] for r in pair["grid"].values()]
    axis.errorbar(shares, [r.mean for r in grid], [(r.high - r.low) / 2 for r in grid], label="grid", capsize=3)
    for name, r in pair["learned"].items():
        axis.plot([r["weights"][pair["sources"][0]]], [r["loss"].mean], "o", label=name)
    axis.set(xlabel=f"share of {pair['sources'][0]}", ylabel="held-out loss", title="two sources")
    axis.legend(fontsize="small")


if __name__ == "__main__":
    main()
