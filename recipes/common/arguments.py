"""Command line of the programs: types, checks and help texts follow from the defaults of the arguments."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["Parser", "not_negative", "share", "whole"]


T = TypeVar("T")
LARGEST = 2**31 - 1  # of a seed or count: programs go on from their seeds, and NumPy's have 32 bits


def limited(kind: Callable[[str], T], fits: Callable[[T], bool], allowed: str) -> Callable[[str], T]:
    """Return a function that parses the values that fit, and names the allowed ones where it refuses another."""

    def parse(text: str) -> T:
        try:
            if fits(value := kind(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"invalid value: {text} (must be {allowed})")

    return parse


def whole(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Return a function that parses whole numbers between two bounds."""
    return limited(int, lambda value: least <= value <= most, f"a whole number from {least} to {most}")


count, seed_number = whole(1), whole(0)
positive = limited(float, lambda value: 0 < value < math.inf, "a finite number above 0")
not_negative = limited(float, lambda value: 0 <= value < math.inf, "a finite number, at least 0")
share = limited(float, lambda value: 0 <= value <= 1, "a number between 0 and 1")


def device_name(text: str) -> str:
    """Check that torch can use a device."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(f"torch cannot use {text!r} here: {str(error).splitlines()[0]}") from None
    return text


def refusal(folder: Path) -> str | None:
    """Return why results cannot be written to a folder, or None; the folder need not exist, and is not made."""
    path = folder.absolute()
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    try:
        with tempfile.TemporaryDirectory(dir=nearest) as made:
            tried = Path(made, path.relative_to(nearest))
            tried.mkdir(parents=True, exist_ok=True)
            (tried / "tried").write_text("x")
        taken = [p.name for p in sorted(path.glob("*")) if p.suffix in WRITTEN and p.is_dir()]
    except OSError as error:
        return f"nothing can be written to {nearest}: {error.strerror}"
    return f"{taken[0]} in it must be a file, not a folder" if taken else None


WRITTEN = (".csv", ".json", ".jsonl", ".png", ".pt")  # files of results
KINDS: dict[type, Callable[[str], Any]] = {int: count, float: positive}


def _words(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


class Parser(argparse.ArgumentParser):
    """Argument parser of a program, described by the first line of its docstring.

    Args:
        doc: the docstring.
        seed: offer ``--seed``.
        device: offer ``--device``.
        out: offer ``--out``, the output folder.
        compiled: offer ``--compile``.
        threads: default of ``--threads``; 1 where processor seconds are counted, because they add up over threads.
    """

    def __init__(
        self,
        doc: str | None,
        *,
        seed: bool = False,
        device: bool = False,
        out: bool = True,
        compiled: bool = False,
        threads: int | None = None,
    ) -> None:
        super().__init__(description=(doc or "").split("\n")[0])
        self.tables: dict[str, tuple[str, Mapping[str, Mapping[str, Any]]]] = {}
        self.pairs: list[tuple[str, str]] = []
        if seed:
            self.add_seed()
        if device:
            self.add_argument("--device", type=device_name, default="cpu", help="default: cpu")
        if out:
            self.option("out", Path("results"), "output folder")
        if compiled:
            self.add_argument("--compile", action="store_true", help="compile the steps where possible")
        shown = "chosen by torch" if threads is None else threads
        self.add_argument("--threads", type=whole(1, 1024), default=threads, help=f"threads of torch; default: {shown}")

    def option(self, name: str, default: Any, text: str, *, shown: str | None = None, **options: Any) -> None:
        """Add ``--name`` with the type of its default (a list takes several values); numbers must be positive."""
        several = isinstance(default, (list, tuple))
        kind = options.pop("type", type(default[0] if several else default))
        options = {"type": KINDS.get(kind, kind), "nargs": "+" if several else None, **options}
        text = f"{text}{'; ' if text else ''}default: {shown or _words(default)}"
        self.add_argument(f"--{name.replace('_', '-')}", default=default, help=text.replace("%", "%%"), **options)

    def add_seed(self, name: str = "seed", text: str = "") -> None:
        """Add the argument of a seed."""
        self.option(name, 0, text, type=seed_number)

    def exclusive(self, name: str, other: str) -> None:
        """Refuse two arguments together."""
        self.pairs.append((name, other))

    def methods(self, names: Iterable[str], default: Sequence[str] | str, flag: str = "--optimizer") -> None:
        """Add the argument for the methods to run; a default that is a string describes the program's own choice."""
        chosen = None if isinstance(default, str) else list(default)
        self.add_argument(flag, nargs="+", choices=[*names], default=chosen, metavar="NAME",
                          help=f"of {', '.join(map(shlex.quote, names))}; default: {_words(default)}")  # fmt: skip

    def data(self, names: Iterable[str], *, flag: str = "--data", download: bool = True) -> None:
        """Add the arguments for the data set (default: the first) and for its folder."""
        choices = [*names]
        self.add_argument(flag, choices=choices, default=choices[0], help=f"default: {choices[0]}")
        self.add_argument("--data-root", type=Path, help="folder of downloaded data")
        if download:
            self.add_argument("--download", action="store_true", help="fetch missing data into --data-root")

    def settings(self, key: str, table: Mapping[str, Mapping[str, Any]], **texts: str) -> None:
        """Add arguments whose defaults depend on ``key``: the columns of a table with one row per choice of ``key``."""
        for name, text in texts.items():
            defaults = {row: values[name] for row, values in table.items()}
            shown = ", ".join(f"{_words(value)} ({row})" for row, value in defaults.items())
            self.option(name, next(v for v in defaults.values() if v is not None), text, shown=shown)
            self.set_defaults(**{name: None})
            self.tables[name] = key, table

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse, check the output folder, fill in defaults that depend on others, and set the number of threads."""
        args = self.parse_args(arguments)
        for name, other in self.pairs:
            if getattr(args, name) is not None and getattr(args, other) is not None:
                self.error(f"argument --{name}: invalid value: {getattr(args, name)} (not together with --{other})")
        out = getattr(args, "out", None)
        if out is not None and (why := refusal(out)):
            self.error(f"argument --out: invalid value: {out} ({why})")
        for name, (key, table) in self.tables.items():
            if getattr(args, name) is None:
                setattr(args, name, table[getattr(args, key)][name])
        if args.threads is not None:
            torch.set_num_threads(args.threads)
            if importlib.util.find_spec("threadpoolctl"):  # idle threads of SciPy consume processor seconds too
                importlib.import_module("threadpoolctl").threadpool_limits(args.threads)
        return args
