"""Command line of the programs: types, checks and help texts follow from the defaults of the arguments."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Parser", "share"]


def positive(text: str) -> float:
    """Parse a number above zero."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def count(text: str) -> int:
    """Parse a whole number above zero."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def share(text: str) -> float:
    """Parse a number between 0 and 1."""
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return value


def device_name(text: str) -> str:
    """Check that torch can use a device."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(f"torch cannot use {text!r} here: {str(error).splitlines()[0]}") from None
    return text


def folder(text: str) -> Path:
    """Parse a folder that exists or can be made, before a long run whose results go there."""
    nearest = next(path for path in (Path(text).absolute(), *Path(text).absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {text}: {nearest} is no folder that you may write to")
    return Path(text)


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
        if seed:
            self.add_argument("--seed", type=int, default=0, help="default: 0")
        if device:
            self.add_argument("--device", type=device_name, default="cpu", help="default: cpu")
        if out:
            self.option("out", Path("results"), "output folder", type=folder)
        if compiled:
            self.add_argument("--compile", action="store_true", help="compile the steps where possible")
        shown = "chosen by torch" if threads is None else threads
        self.add_argument("--threads", type=count, default=threads, help=f"threads of torch; default: {shown}")

    def option(self, name: str, default: Any, text: str, *, shown: str | None = None, **options: Any) -> None:
        """Add ``--name`` with the type of its default (a list takes several values); numbers must be positive."""
        several = isinstance(default, (list, tuple))
        kind = type(default[0] if several else default)
        options = {"type": KINDS.get(kind, kind), "nargs": "+" if several else None, **options}
        text = f"{text}; default: {shown or _words(default)}"
        self.add_argument(f"--{name.replace('_', '-')}", default=default, help=text.replace("%", "%%"), **options)

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
        """Parse, fill in the defaults that depend on others, and set the number of threads."""
        args = self.parse_args(arguments)
        for name, (key, table) in self.tables.items():
            if getattr(args, name) is None:
                setattr(args, name, table[getattr(args, key)][name])
        if args.threads is not None:
            torch.set_num_threads(args.threads)
            if importlib.util.find_spec("threadpoolctl"):  # idle threads of SciPy consume processor seconds too
                importlib.import_module("threadpoolctl").threadpool_limits(args.threads)
        return args
