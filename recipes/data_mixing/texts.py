"""Sources and a target as characters: texts shipped with Python and torch, the 20 Newsgroups, or your own files."""

from __future__ import annotations

import ast
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problems.newsgroups import stripped, texts_of
from ..problems.problem import folder

__all__ = ["LOADERS", "VOCABULARY", "Texts", "encoded", "folders", "python", "windows"]

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(CHARACTERS) + 1  # the last number means any other character
CODES = bytes(CHARACTERS.find(chr(i)) % VOCABULARY for i in range(256))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LIMIT = 400_000  # characters of each source
SHORTEST = 2_000  # minimal characters of a source, and of a part of the target


class Texts(NamedTuple):
    """Training sources and target domain.

    Attributes:
        sources: texts by name.
        target: ``train`` (for the control trained on it), ``validation`` (for the upper loss) and ``test``.
        pair: the two sources of the grid of shares.
    """

    sources: dict[str, Tensor]
    target: dict[str, Tensor]
    pair: tuple[str, str]

    def digest(self) -> int:
        """Return a checksum of all texts."""
        return zlib.crc32(b"".join(t.numpy().tobytes() for t in (*self.sources.values(), *self.target.values())))


def encoded(text: str) -> Tensor:
    """Return characters as numbers below `VOCABULARY`."""
    return torch.frombuffer(bytearray(text.encode("ascii", "replace").translate(CODES)), dtype=torch.uint8).long()


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw windows of length + 1 characters at random places."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]


def python() -> Texts:
    """Load docstrings and code of the standard library, torch's C++ headers, shuffled words; target: Python's help."""
    docstrings, code = [], []
    for text, tree in _modules():
        whole = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
        docstrings += [str(ast.get_docstring(node)) for node in whole]
        lines = text.splitlines()
        for first, last in ((node.body[0].lineno, node.body[0].end_lineno or 0) for node in whole):
            lines[first - 1 : last] = [""] * (last - first + 1)
        code.append("\n".join(line for line in lines if line.strip()))
        if min(sum(map(len, docstrings)), sum(map(len, code))) > LIMIT:
            break
    headers = _shuffled(sorted((Path(torch.__file__).parent / "include" / "c10").rglob("*.h")))
    sources = {
        "docstrings": "\n\n".join(docstrings),
        "code": "\n".join(code),
        "headers": "\n".join(path.read_text(errors="ignore") for path in headers),
        "noise": " ".join(_shuffled("\n".join(docstrings).split())),
    }
    return Texts(
        {name: encoded(text[:LIMIT]) for name, text in sources.items()},
        _parts([topics[name] for name in sorted(topics)], (0.5, 0.25, 0.25)),
        ("headers", "code"),
    )


def newsgroups(root: Path | None, download: bool) -> Texts:
    """Load the 20 Newsgroups by first name (comp, rec, ...); target: soc.religion.christian."""
    where, goal = folder(root, "20newsgroups"), "soc.religion.christian"
    posts, groups = texts_of(where, "train", download)
    tests, test_groups = texts_of(where, "test", download)
    own: dict[str, list[str]] = {}
    for text, group in zip(stripped(posts), groups, strict=True):
        own.setdefault(goal if group == goal else group.split(".")[0], []).append(text)
    target = own.pop(goal)
    held = [text for text, group in zip(stripped(tests), test_groups, strict=True) if group == goal]
    own = {name: own[name] for name in sorted(own)}
    return Texts(
        {name: encoded("\n\n".join(_shuffled(texts))[:LIMIT]) for name, texts in own.items()},
        {**_parts(target, (0.5, 0.5)), "test": encoded("\n\n".join(held))},
        ("comp", "talk"),
    )


def folders(root: Path, target: str) -> Texts:
    """Load your text files: one subfolder per source, and one for the target, with some files held out."""
    if not root.is_dir():
        raise SystemExit(f"--text {root} is no folder")
    own = {folder.name: _files(folder) for folder in sorted(root.iterdir()) if folder.is_dir()}
    goal = own.pop(target, [])
    if len(goal) == 1:  # a single file is split at empty lines
        goal = [part for part in goal[0].split("\n\n") if part.strip()]
    sources = {name: encoded("\n\n".join(_shuffled(texts))[:LIMIT]) for name, texts in own.items()}
    short = [name for name, text in sources.items() if len(text) < SHORTEST]
    if len(goal) < 3 or len(sources) < 2 or short:
        raise SystemExit(
            f"{root} needs a subfolder of text files for each of two sources or more, each of {SHORTEST} characters, "
            f"and one named {target} (--target) with the target, in three files or paragraphs; "
            f"found {', '.join(own) or 'no source'}; too short: {', '.join(short) or 'none'}; {len(goal)} of the target"
        )
    found = _parts(goal, (0.5, 0.25, 0.25))
    if short := [name for name, text in found.items() if len(text) < SHORTEST]:
        raise SystemExit(f"{root / target} is too short: no {SHORTEST} characters for {', '.join(short)}")
    first, second, *_ = sources
    return Texts(sources, found, (first, second))


LOADERS: dict[str, Callable[[Path | None, bool], Texts]] = {
    "python": lambda root, download: python(),
    "20newsgroups": newsgroups,
}


def _files(folder: Path) -> list[str]:
    """Read the texts of a folder and its subfolders."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return [path.read_text(encoding="utf-8", errors="replace") for path in shown]


def _shuffled(items: Iterable[str] | Iterable[Path]) -> list[Any]:
    found = [*items]
    random.Random(0).shuffle(found)
    return found


def _parts(texts: Sequence[str], parts: Sequence[float]) -> dict[str, Tensor]:
    """Split the texts, in random order, by shares."""
    texts, found, start = _shuffled(texts), {}, 0.0
    for name, part in zip(("train", "validation", "test"), parts, strict=False):
        found[name] = encoded("\n\n".join(texts[round(start * len(texts)) : round((start + part) * len(texts))]))
        start += part
    return found


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield source and syntax tree of the standard library's modules, in random order."""
    for path in _shuffled(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))):
        if {"site-packages", "test", "tests", "pydoc_data"} & {*path.parts}:
            continue
        try:
            text = path.read_text()
            yield text, ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):  # templates, and files with intended errors
            continue
