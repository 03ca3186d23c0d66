"""Draws the pictures of benchmarks.md from docs/records: python docs/pictures/benchmarks.py."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1]
KINDS = {"eager": "tab:grey", "step": "tab:blue", "run": "tab:green", "jax": "tab:orange"}


def record(name):
    return json.loads((DOCS / "records" / f"{name}.json").read_text(encoding="utf-8"))


def speed():
    rows = record("speed")["rows"]
    figure, axis = plt.subplots(figsize=(5.4, 11), layout="constrained")
    for k, (kind, colour) in enumerate(KINDS.items()):
        known = [(i, row[kind]) for i, row in enumerate(rows.values()) if row[kind]]
        places, values = [i + 0.21 * (k - 1.5) for i, _ in known], [v for _, v in known]
        bars = axis.barh(places, values, 0.2, color=colour, label=kind)
        axis.bar_label(bars, fmt="{:,.0f}", padding=2)
    axis.set(yticks=range(len(rows)), yticklabels=list(rows), xscale="log", xlabel="microseconds for one step")
    axis.invert_yaxis()
    axis.margins(x=0.2, y=0.02)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.06), ncols=4, frameon=False)
    figure.savefig(DOCS / "benchmark_speed.png", dpi=200)


def overhead():
    found = record("overhead")
    figure = plt.figure(figsize=(5.4, 11), layout="constrained")
    left, right = (part.subplots() for part in figure.subfigures(2, 1, height_ratios=[4, 6]))
    names = [name for name in found["time"] if "compiled" not in name]
    colours = ["tab:blue" if "bilevel_optim" in name else "tab:grey" for name in names]
    bars = left.barh(
        [name.replace(": bilevel_optim", ":\nbilevel_optim") for name in names],
        [found["time"][name]["ratio"] for name in names],
        color=colours,
    )
    left.bar_label(bars, fmt="%.2f", padding=3)
    left.set(xlabel="time over hand-written code", xlim=(0, 1.7))
    left.invert_yaxis()
    for name, row in found["memory"].items():
        style = "-" if "bilevel_optim" in name else "--"
        right.plot([int(steps) for steps in row], list(row.values()), style, marker="o", markersize=3, label=name)
    right.set(xlabel="lower steps T", ylabel="peak MiB of the process")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    figure.savefig(DOCS / "benchmark_overhead.png", dpi=200)


if __name__ == "__main__":
    speed()
    overhead()
