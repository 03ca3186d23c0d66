"""Messages of the package: its errors, warnings, and reasons for eager steps, read from the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "bilevel_optim"
# Calls that take a text for the user, and which argument it is.
SAYING = {"warn": 0, "alert": 1, "alert_if": 1, "refuse": 0, "__init__": 0}
# In ``compiled/`` reasons for eager steps are assigned to one of these names, or returned by one of these functions.
REASONS = ("reason", "_reason", "first", "why_eager", "why_update_is_eager")
# Exceptions that never leave the package with a text.
SILENT = ("AssertionError", "StopIteration", "AttributeError", "NotImplementedError")
HOLE = "…"


class Source:
    """The modules of the package, with the constants and functions that make texts."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
        self.constants: dict[tuple[Path, str], ast.expr] = {}
        self.functions: dict[str, list[tuple[Path, ast.FunctionDef]]] = {}
        for path, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.constants[path, node.targets[0].id] = node.value
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self.functions.setdefault(node.name, []).append((path, node))

    def constant(self, path: Path, name: str) -> tuple[Path, ast.expr] | None:
        if (path, name) in self.constants:
            return path, self.constants[path, name]
        found = [(p, value) for (p, n), value in self.constants.items() if n == name]
        return found[0] if len(found) == 1 else None

    def texts(self, node: ast.expr, path: Path, scope: ast.AST | None, depth: int = 0) -> list[str]:
        """Return the possible texts of an expression, with a hole for every part known only at run time."""
        again = [path, scope, depth + 1]
        if depth > 9:
            return [HOLE]
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            found = [""]
            for part in node.values:
                if isinstance(part, ast.Constant):
                    ends = [str(part.value)]
                else:
                    inner = part.value
                    known = isinstance(inner, ast.IfExp) or _named(inner) or _own(inner) == "text"
                    ends = self.texts(inner, *again) if known else [HOLE]
                found = [a + b for a in found for b in ends][:8]
            return found
        if isinstance(node, ast.IfExp):
            return self.texts(node.body, *again) + self.texts(node.orelse, *again)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [a + b for a in self.texts(node.left, *again) for b in self.texts(node.right, *again)][:8]
        if isinstance(node, ast.BoolOp):
            return [text for part in node.values for text in self.texts(part, *again)]
        if isinstance(node, ast.Lambda):
            return self.texts(node.body, *again)
        if isinstance(node, ast.Name):
            local = [
                s.value
                for s in (ast.walk(scope) if scope else ())
                if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and s.targets[0].id == node.id
            ]
            if local:
                return [text for value in local for text in self.texts(value, *again)]
            known = self.constant(path, node.id)
            return self.texts(known[1], known[0], None, depth + 1) if known else [HOLE]
        if name := _own(node):
            return [
                text
                for found in ast.walk(self.trees[path])
                if isinstance(found, ast.Assign) and _own(found.targets[0]) == name
                for text in self.texts(found.value, *again)
            ] or [HOLE]
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "format" and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                return [re.sub(r"\{\w*\}", HOLE, text) for text in self.texts(node.func.value, *again)]
            if name == "join" and isinstance(node.args[0], (ast.GeneratorExp, ast.ListComp)):
                return self.texts(node.args[0].elt, *again)
            if name in ("str", "repr", "join", "format"):
                return [HOLE]
            if name == "partial":  # a message that is made when it is needed
                name = getattr(node.args[0], "id", getattr(node.args[0], "attr", ""))
            made = [
                text
                for where, function in self.functions.get(name, ())
                for node in ast.walk(function)
                if isinstance(node, ast.Return) and node.value is not None
                for text in self.texts(node.value, where, function, depth + 1)
            ]
            return made or [HOLE]
        return [HOLE]

    def messages(self) -> dict[str, str]:
        """The first words of all that the package says, and where it is said."""
        found: dict[str, str] = {}
        for path, tree in self.trees.items():
            for scope, node in _with_scope(tree):
                for text in self._said(node, path, scope):
                    words = first_words(text)
                    if words:
                        found.setdefault(words, f"{path.relative_to(PACKAGE.parent)}:{node.lineno}")
        return found

    def _said(self, node: ast.AST, path: Path, scope: ast.AST | None) -> list[str]:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
            return [] if name in SILENT else self.texts(node.exc.args[0], path, scope)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "require" and len(node.args) >= 3:
                wording = [*node.args[3:4], *(k.value for k in node.keywords if k.arg == "wording")]
                return self.texts(wording[0], path, scope) if wording else ["Invalid {name} value: {value}"]
            if name == "__init__" and path.name != "errors.py":
                return []  # errors that make their own texts are there
            if name in SAYING and len(node.args) > SAYING[name]:
                return self.texts(node.args[SAYING[name]], path, scope)
        if path.parent.name == "compiled" and isinstance(node, ast.Assign):
            names = [getattr(target, "id", getattr(target, "attr", "")) for target in node.targets]
            return self.texts(node.value, path, scope) if {*names} & {*REASONS} else []
        if path.parent.name == "compiled" and isinstance(node, ast.Return) and getattr(scope, "name", "") in REASONS:
            return self.texts(node.value, path, scope) if node.value is not None else []
        return []


def _own(node: ast.expr) -> str:
    """The name of an attribute of self."""
    mine = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if mine else ""


def _named(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.isupper()


def _with_scope(tree: ast.AST, scope: ast.AST | None = None):  # type: ignore[no-untyped-def]
    for node in ast.iter_child_nodes(tree):
        yield scope, node
        yield from _with_scope(node, node if isinstance(node, ast.FunctionDef) else scope)


def first_words(text: str) -> str:
    """The first ten words of a text, with one hole for each unknown part; empty if hardly anything is known."""
    text = re.sub(r"\{\w+\}", HOLE, text)
    words = re.sub(rf"{HOLE}+", HOLE, text).split()[:10]
    return " ".join(words) if sum(HOLE not in word for word in words) >= 2 or words[:1] == ["Invalid"] else ""


def entries(page: str) -> list[str]:
    """The terms of the page: what stands in backquotes on a line, before one that begins with a colon."""
    terms = re.findall(r"^((?:`[^`\n]+`(?:, )?)+)\n: ", page, re.M)
    return [term for line in terms for term in re.findall(r"`([^`]+)`", line)]


def matches(entry: str, words: str) -> bool:
    """Return True if a message begins like an entry; a hole in either matches anything."""
    pattern = re.escape(entry).replace(re.escape(HOLE), ".*?")
    return re.match(pattern, words) is not None or words.startswith(entry)
