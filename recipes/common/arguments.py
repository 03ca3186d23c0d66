"""The command line of the programs: arguments whose types, checks and help follow from their defaults."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Parser", "share"]


def positive(text: str) -> float:
    """A number above zero."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def count(text: str) -> int:
    """A whole number above zero."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def share(text: str) -> float:
    """A number between 0 and 1."""
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return value


KINDS: dict[type, Callable[[str], Any]] = {int: count, float: positive}


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


class Parser(argparse.ArgumentParser):
    """Arguments of a program, described by the first line of its docstring.

    Args:
        doc: the docstring.
        seed: offer ``--seed``.
        device: offer ``--device``.
        out: offer ``--out``, the folder of what is written.
        compiled: offer ``--compile``.
        threads: the default of ``--threads``; one where seconds of the processor are counted, which are those of all.
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
            self.add_argument("--device", default="cpu", help="default: cpu")
        if out:
            self.option("out", Path("results"), "folder of what is written")
        if compiled:
            self.add_argument("--compile", action="store_true", help="steps run compiled, where they can be")
        shown = "those that it takes" if threads is None else threads
        self.add_argument("--threads", type=count, default=threads, help=f"of torch; default: {shown}")

    def option(self, name: str, default: Any, text: str, *, shown: str | None = None, **options: Any) -> None:
        """``--name``, of the type of its default (several, if that is a list); numbers must be positive."""
        several = isinstance(default, (list, tuple))
        kind = type(default[0] if several else default)
        options = {"type": KINDS.get(kind, kind), "nargs": "+" if several else None, **options}
        text = f"{text}; default: {shown or _words(default)}"
        self.add_argument(f"--{name.replace('_', '-')}", default=default, help=text.replace("%", "%%"), **options)

    def methods(self, names: Iterable[str], default: Sequence[str] | str, flag: str = "--optimizer") -> None:
        """Which methods to run; a text for the default says what the program will choose."""
        chosen = None if isinstance(default, str) else list(default)
        self.add_argument(flag, nargs="+", choices=[*names], default=chosen, metavar="NAME",
                          help=f"of {', '.join(names)}; default: {_words(default)}")  # fmt: skip

    def data(self, names: Iterable[str], *, flag: str = "--data", download: bool = True) -> None:
        """Which data, the first by default, and where they are."""
        choices = [*names]
        self.add_argument(flag, choices=choices, default=choices[0], help=f"default: {choices[0]}")
        self.add_argument("--data-root", type=Path, help="folder of downloaded data")
        if download:
            self.add_argument("--download", action="store_true", help="fetch missing data into --data-root")

    def settings(self, key: str, table: Mapping[str, Mapping[str, Any]], **texts: str) -> None:
        """Arguments whose defaults depend on the argument ``key``: columns of a table with a row for each choice."""
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
            if importlib.util.find_spec("threadpoolctl"):  # threads of scipy's that wait count as seconds too
                importlib.import_module("threadpoolctl").threadpool_limits(args.threads)
        return args
