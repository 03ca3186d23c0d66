"""A method's docstring as its page shows it: formula, an example to copy, cost, and arguments with types in groups."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

from bilevel_optim.optimizer.base import BilevelOptimizer
from bilevel_optim.optimizer.declaration import methods

FIRST = ("upper", "lower", "lr", "lower_lr", "lower_steps")
WIDTH = 68  # of a line of code: more would be scrolled sideways

# What a type is called, where the annotation names one of the library's own.
TYPES = {
    "Params": "tensors or groups",
    "LowerInit": "function",
    "Projection": "function",
    "Clip": "float, or (\"value\", float)",
    "Any": "",
}  # fmt: skip


def parts_of(doc: str) -> tuple[list[str], list[tuple[str, str]], str, str]:
    """A docstring: paragraphs before the arguments, (names, text) of these, the example, and what is left."""
    before, _, rest = doc.partition("\nArgs:\n")
    inside = re.match(r"(?:(?: .*)?\n)*", rest)[0]
    after = rest[len(inside) :]
    example = re.search(r"^Example:\n((?:(?: .*)?\n)+)", after, re.M)
    entries = []
    for names, text in re.findall(r"^    ([\w, \n]+?):((?:.*\n)(?:     .*\n)*)", inside, re.M):
        entries.append((" ".join(names.split()), " ".join(text.split())))
    return re.split(r"\n\n(?! )", before), entries, example[1], after.replace(example[0], "")


def _functions(code: str) -> str:
    """Code whose step is given functions with names instead of two lambdas in its line."""
    for node in ast.walk(ast.parse(code)):
        losses = [a for a in node.args if isinstance(a, ast.Lambda)] if isinstance(node, ast.Call) else []
        if losses and isinstance(node.func, ast.Attribute) and node.func.attr in ("step", "backward"):
            names = ["upper_loss", "lower_loss"] if len(losses) == 2 else ["loss_of_both"]
            defined = "".join(
                f"\ndef {name}({', '.join(a.arg for a in loss.args.args)}):\n"
                f"    return {ast.get_source_segment(code, loss.body)}\n"
                for name, loss in zip(names, losses, strict=True)
            )
            others = [f"{k.arg}={ast.get_source_segment(code, k.value)}" for k in node.keywords]
            call = f"{ast.get_source_segment(code, node.func)}({', '.join(names + others)})"
            code = code.replace(ast.get_source_segment(code, node), call)
            return code.replace("\noptimizer = ", f"\n{defined}\noptimizer = ", 1)
    return code


def _narrow(line: str) -> str:
    """A line of code that is too long: its remark above it, or its arguments in lines of their own."""
    if len(line) <= WIDTH:
        return line
    indent = re.match(" *", line)[0]
    code, _, remark = line.partition("  # ")
    two = re.match(r"^(\w+), (\w+) = (.*\)), (torch\..*)$", code)
    if len(code) > WIDTH and two:
        code = f"{two[1]} = {two[3]}\n{two[2]} = {two[4]}"
    broken = re.match(r"^ *(\w+ = [\w.]+\()(.*)\)$", code)
    if not two and len(code) > WIDTH and broken:
        inside = textwrap.wrap(broken[2], WIDTH - 4 - len(indent), break_long_words=False)
        code = "\n".join([f"{indent}{broken[1]}", *(f"{indent}    {part}" for part in inside), f"{indent})"])
    return f"{indent}# {remark}\n{code}" if remark else code


def example(name: str) -> str:
    """The example of a method as a program: without prompts, with the package's name, and what it prints."""
    _, _, shown, _ = parts_of(inspect.getdoc(methods()[name]) + "\n")
    lines, printed = [], []
    for line in inspect.cleandoc(shown).splitlines():
        if line.startswith((">>> ", "... ")):
            lines.append(line[4:])
        elif line.strip():
            printed.append(line)
    if printed:
        last, _, remark = lines[-1].partition("  # ")
        lines[-1] = f"print({last})  # {' '.join(printed)}" + f": {remark}" * bool(remark)
    code = re.sub(r"(?<=[(,])\n\s*|\n(?=\))", " ", "\n".join(lines)).replace("( ", "(").replace(" )", ")")
    code = code.replace("import torch, bilevel_optim as bo\n", "import torch\n")
    code = re.sub(rf"(?<![\w.]){name}\(", f"bo.{name}(", code).replace(
        "import torch\n", "import torch, bilevel_optim as bo\n\n", 1
    )
    return "\n".join(_narrow(line) for line in _functions(code).splitlines())


def _plain_code(text: str, name: str) -> str:
    """Text whose indented examples have no prompts, and the package's name."""

    def block(found: re.Match[str]) -> str:
        code = re.sub(r"^ +(?:>>>|\.\.\.) ?", "", found[0], flags=re.M)
        code = re.sub(rf"(?<![\w.]){name}\(", f"bo.{name}(", code)
        code = re.sub(r"^import torch$", "import torch, bilevel_optim as bo", code, flags=re.M)
        lines = "\n".join(_narrow(line) for line in code.splitlines())
        return f".. code-block:: python\n\n{textwrap.indent(lines, '    ')}\n"

    return re.sub(r"^ +>>> .*\n(?: +(?:>>>|\.\.\.).*\n)*", block, text + "\n", flags=re.M)


def type_of(annotation: object) -> str:
    """An annotation in words."""
    words = []
    for part in re.split(r" \| (?![^\[]*\])", str(annotation).strip("'")):
        known = TYPES.get(part, "function" if part.startswith("Callable") else part)
        words.append(known.replace("torch.", ""))
    return " or ".join(filter(None, words))


def _entries(found: list[tuple[str, str]], types: dict[str, inspect.Parameter], indent: str = "") -> list[str]:
    lines = []
    for names, text in found:
        kinds = {type_of(types[name].annotation) for name in names.split(", ") if name in types}
        kind = f" : {kinds.pop()}" if len(kinds) == 1 and "" not in kinds else ""
        lines += [f"{indent}{', '.join(f'``{name}``' for name in names.split(', '))}{kind}", f"{indent}    {text}", ""]
    return lines


def arguments(cls: type) -> list[str]:
    """The arguments of a method: those of the problem, its own, and, folded, those that all methods share."""
    types = dict(inspect.signature(cls).parameters)
    _, entries, _, _ = parts_of(inspect.getdoc(cls) + "\n")
    shared = [(names, text) for names, text in entries if re.match(r"(?!.*lower_steps)", names) and _shared(text)]
    first = [entry for entry in entries if entry not in shared and set(entry[0].split(", ")) <= {*FIRST}]
    own = [entry for entry in entries if entry not in shared and entry not in first]
    lines = []
    for title, group in (("Arguments: the problem and its rates", first), (f"Arguments of {cls.__name__}", own)):
        if group:
            lines += [f".. rubric:: {title}", "", *_entries(group, types)]
    if shared:
        described = dict(described_by_the_base())
        lines += [".. dropdown:: Arguments that methods share", "    :class-container: shared-arguments", ""]
        for names, text in shared:
            listed = [(name, described[name]) for name in names.split(", ") if name in described]
            lines += _entries(listed, types, "    ")
            more = re.sub(r"^see `BilevelOptimizer`\.? ?", "", text)
            lines += ["    " + more, ""] * bool(more)
    return lines


def described_by_the_base() -> list[tuple[str, str]]:
    """What the base class says of each argument."""
    doc = inspect.getdoc(BilevelOptimizer)
    inside = re.match(r"(?:(?: .*)?\n)*", doc.partition("\nArgs:\n")[2])[0]
    found = re.findall(r"^    ([\w, ]+?):((?:.*\n)(?:     .*\n)*)", inside, re.M)
    return [(name, " ".join(text.split())) for names, text in found for name in names.split(", ")]


def _shared(text: str) -> bool:
    return text.startswith("see `BilevelOptimizer`")


def signature(_app, what, _name, value, _options, said, returns):
    """A signature with the first arguments; the others are explained below it."""
    if what != "class" or value not in methods().values():
        return said, returns
    known = inspect.signature(value).parameters
    return f"(upper, lower, *, {', '.join(name for name in FIRST[2:] if name in known)}, **options)", returns


def arranged(name: str, facts: list[str]) -> list[str]:
    """The docstring of a method in the order of its page; `facts` is what stands below the cost in words."""
    cls = methods()[name]
    paragraphs, _, _, after = parts_of(inspect.getdoc(cls) + "\n")
    formula = next((k + 1 for k in (1, 2, 3) if ".. math::" in "".join(paragraphs[k : k + 1])), 1)
    costs = [text for text in paragraphs[formula:] if text.startswith("*Cost per step*")]
    rest = [text for text in paragraphs[formula:] if text not in costs]
    lines = "\n\n".join(paragraphs[:formula]).splitlines()
    lines += ["", ".. rubric:: Example", "", ".. code-block:: python", ""]
    lines += ["    " + line for line in example(name).splitlines()]
    lines += ["", ".. rubric:: When, and what it needs", "", *_plain_code("\n\n".join(rest), name).splitlines()]
    lines += ["", ".. rubric:: Cost", "", *"\n\n".join(costs).splitlines(), "", *facts, ""]
    return [*lines, *arguments(cls), *_plain_code(after, name).splitlines(), ""]
