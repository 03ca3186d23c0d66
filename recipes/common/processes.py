"""Run measurements in separate processes, to get the peak memory of each."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["alone", "forget_peak", "peak"]


def alone(module: str, *arguments: object) -> dict[str, Any] | str:
    """Run ``python -m module``; return its last line parsed as JSON, or the last line of its error if it fails."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        return result.stderr.strip().splitlines()[-1][:80]
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return figures


def forget_peak(device: str = "cpu") -> float:
    """Reset `peak` and return its value now; on a CPU, resetting works under Linux only.

    The C library may still hold memory that was freed before, unless ``MALLOC_MMAP_THRESHOLD_=65536`` is set.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: str = "cpu") -> float:
    """Return the peak memory in MiB: of this process, or of the accelerator since the last reset."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
