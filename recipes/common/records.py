"""Results of runs in a file, one line of JSON each, so that interrupted work resumes where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Missing", "Records"]

Result = dict[str, Any]


class Missing(LookupError):
    """Raised for a missing result where no run is allowed."""


class Records:
    """Results by unit of work; several processes may share the file of one experiment.

    Args:
        path: the file; its complete lines are read first. Default: None, which keeps results in memory only.
        frozen: run nothing, and raise `Missing` for a missing result.
    """

    def __init__(self, path: Path | None = None, *, frozen: bool = False) -> None:
        self.path, self.frozen, self.made = path, frozen, 0
        self.results: dict[str, Result] = {}
        self.read = 0  # bytes read so far
        if path is not None and path.exists() and not frozen:
            whole = path.read_bytes()
            if not whole.endswith(b"\n"):
                path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        self.refresh()

    def refresh(self) -> None:
        """Read the results that other processes have written since."""
        if self.path is None or not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.read += len(line)
                entry = json.loads(line)
                self.results[_key(entry["unit"])] = entry["result"]

    def get(self, unit: Mapping[str, Any], run: Callable[[], Mapping[str, Any]]) -> Result:
        """Return the result of a unit; run it if there is none yet."""
        key = _key(unit)
        if key not in self.results:
            self.refresh()
        if key not in self.results:
            if self.frozen:
                raise Missing(key)
            line = json.dumps({"unit": unit, "result": run()})
            # Parsed from the line, so that a new result equals one that is read from the file.
            self.results[key] = json.loads(line)["result"]
            self.made += 1
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(line + "\n")
        return self.results[key]


def _key(unit: Mapping[str, Any]) -> str:
    return json.dumps(unit, sort_keys=True)
