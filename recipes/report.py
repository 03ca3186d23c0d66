"""What every recipe prints and writes: a table, a JSON file of the numbers, and where they came from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import bilevel_optim

__all__ = ["environment", "save_json", "table"]


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Machine and versions, to be kept beside every number."""
    device = torch.device(device)
    return {
        "bilevel_optim": bilevel_optim.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under a header in aligned columns, numbers to the right."""
    cells = [[*map(str, header)], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def save_json(path: Path, numbers: dict[str, Any]) -> None:
    """Write the numbers of a run, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
