"""Results of runs in a file, one line of JSON each, so that what was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Missing", "Records"]

Result = dict[str, Any]


class Missing(LookupError):
    """A result that is not there, and was not to be made."""


class Records:
    """What runs gave, by what was run; several processes may share the file of one experiment.

    Args:
        path: of the file; what is there is taken over, but a last line that was cut off. Default: None, kept in memory
            alone.
        frozen: whether a result that is not there is an error, `Missing`, and nothing is run.
    """

    def __init__(self, path: Path | None = None, *, frozen: bool = False) -> None:
        self.path, self.frozen, self.made = path, frozen, 0
        self.results: dict[str, Result] = {}
        self.read = 0  # bytes of the file
        if path is not None and path.exists() and not frozen:
            whole = path.read_bytes()
            if not whole.endswith(b"\n"):
                path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        self.refresh()

    def refresh(self) -> None:
        """Take over what others have written since."""
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
        """The result of a unit, which is run if it was not yet."""
        key = _key(unit)
        if key not in self.results:
            self.refresh()
        if key not in self.results:
            if self.frozen:
                raise Missing(key)
            line = json.dumps({"unit": unit, "result": run()})
            # A result is what can be read again, so that it is the same whether it was just made or not.
            self.results[key] = json.loads(line)["result"]
            self.made += 1
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(line + "\n")
        return self.results[key]


def _key(unit: Mapping[str, Any]) -> str:
    return json.dumps(unit, sort_keys=True)
