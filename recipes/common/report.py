"""Output of the programs: tables, figures, and JSON files with the numbers and their origin."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import bilevel_optim

__all__ = ["CALLS", "draw", "environment", "figure", "plot", "rows", "save", "save_json", "show", "table"]

# Oracle calls, and the headers of their columns.
CALLS = {"upper_grad": "f grads", "lower_grad": "g grads", "hvp": "HVPs", "jvp": "cross", "loss": "f values"}
Points = Sequence[Mapping[str, Any]]  # a curve
Panels = Sequence[tuple[str, str, dict[str, Any]]]  # x, y, and options of the axis


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return machine and versions, to be stored with every number."""
    device = torch.device(device)
    return {
        "bilevel_optim": bilevel_optim.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows under a header in aligned columns, all but the first aligned to the right."""
    cells = [[*map(str, header)], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table under its title."""
    print(f"\n{title}\n\n{table(header, rows)}\n", flush=True)


def rows(results: Mapping[str, Mapping[str, Any]], *keys: str, calls: int = 0) -> list[list[object]]:
    """Return one row per method: its name, the numbers named by ``keys``, and the first ``calls`` of `CALLS`."""
    found = []
    for name, r in results.items():
        counts = r.get("oracle_calls") or {}
        found.append([name, *map(r.get, keys), *map(counts.get, [*CALLS][:calls])])
    return found


def save_json(path: Path, numbers: Mapping[str, Any]) -> None:
    """Write the numbers of a run, and create the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def save(args: argparse.Namespace, stem: Path, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Write numbers, arguments (of absolute paths the names), machine and versions to ``stem``.json; return all."""
    shown = {k: v.name if isinstance(v, Path) and v.is_absolute() else v for k, v in vars(args).items()}
    arguments = {k: str(v) if isinstance(v, Path) else v for k, v in shown.items()}
    whole = {"arguments": arguments, "environment": environment(getattr(args, "device", "cpu")), **numbers}
    save_json(Path(f"{stem}.json"), whole)
    print(f"Wrote {stem}.json{f' and {stem}.png' if Path(f'{stem}.png').exists() else ''}")
    return whole


@contextmanager
def figure(stem: Path, title: str, size: tuple[float, float], dpi: int = 110) -> Iterator[Any]:
    """Yield a new figure, which is written to ``stem``.png at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas = plt.figure(figsize=size, layout="constrained")
    yield canvas
    canvas.suptitle(title)
    stem.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(f"{stem}.png", dpi=dpi)
    plt.close(canvas)


def draw(axis: Any, curves: Mapping[str, Points], x: str, y: str, **options: Any) -> None:
    """Draw the curves of several methods, y against x, at the points that have y."""
    from matplotlib import colormaps

    colours = colormaps["tab10" if len(curves) <= 10 else "tab20"]
    for i, (name, points) in enumerate(curves.items()):
        known = [p for p in points if y in p]
        style = {"color": colours(i % 20), "linestyle": ("-", "--", ":")[i // 20 % 3]}
        axis.plot([p[x] for p in known], [p[y] for p in known], label=name, **style)
    axis.set(**{"xlabel": x, "ylabel": y, **options})


def plot(stem: Path, title: str, curves: Mapping[str, Points], panels: Panels, rows: int = 1) -> None:
    """Write a figure with several panels of the same curves."""
    columns = len(panels) // rows
    with figure(stem, title, (5.5 * columns, 4.5 * rows)) as canvas:
        axes = canvas.subplots(rows, columns, squeeze=False)
        for axis, (x, y, options) in zip(axes.flat, panels, strict=True):
            draw(axis, curves, x, y, **options)
        axes[0, -1].legend(fontsize="small" if columns > 1 else "medium", ncols=1 + (len(curves) > 9))


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if 1e4 <= abs(cell) < 1e7 else f"{cell:.4g}"
    return str(cell)
