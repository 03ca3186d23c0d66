"""Reasons why a step is not compiled, in terms of the user's code."""

from __future__ import annotations

import contextlib
import re
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

__all__ = ["UNDRAWN", "Refused", "place_of", "reason_of", "require_no_effects"]

_LIBRARIES = tuple(str(Path(own).parent) for own in (Path(__file__).parent, torch.__file__, contextlib.__file__))
CHANGES = "a loss changes Python values as it runs"
UNREPEATED = ", which a graph does not repeat: move the change out of the loss"
UNDRAWN = ", but a graph cannot draw those of an eager step: draw them with the data, or keep the steps eager"


class Refused(Exception):
    """A step cannot be compiled; the message says why."""


def place_of(node: Node) -> str:
    """Return the place in the user's code that an operation of a graph comes from."""
    return _last_place(node.meta.get("stack_trace") or "")


def reason_of(error: BaseException) -> str:
    """Describe what stopped Dynamo or the compiler, in one sentence, with the user's file and line."""
    error = getattr(error, "inner_exception", error)
    text = str(error).strip()
    if isinstance(error, Refused):
        return text
    first = text.splitlines()[0].removeprefix(f"{Refused.__name__}: ") if text else type(error).__name__
    if "side effects" in first:
        first = CHANGES + _changed(text) + UNREPEATED
    elif "Generator" in text and "random numbers" not in first:
        first = "a loss draws random numbers (of a generator)" + UNDRAWN
    elif "UnspecializedPythonVariable" in text or "qualname: Random." in text:
        first = "a loss draws random numbers (of Python's random)" + UNDRAWN
    elif "marked as skipped" in first and (called := re.search(r"(?:function|builtin) `(.+?)`", text)):
        first = (
            f"a loss calls {called[1]}, which Dynamo cannot trace: call it outside the loss, or use a torch function"
        )
    elif "Boolean value of Tensor with more than one value" in text and any(
        "set_export_info" in line for line in traceback.format_tb(error.__traceback__)
    ):
        first = "a loss reads a NumPy array, but a graph has tensors only: convert it once by torch.from_numpy"
    elif "external grad_fn" in first:
        first = "a loss uses a tensor with a graph from outside the loss: compute it in the loss, or detach it"
    elif "requires_grad_()" in first:
        first = (
            "a loss calls requires_grad_(), which a graph cannot follow: call it outside the loss, or use "
            "torch.func.grad"
        )
    elif "data-dependent" in first.lower():
        first = "a value is read on the host, so that operations or sizes depend on it: use torch.where or masks"
    return first.strip().rstrip(".") + _last_place(text)


def _last_place(trace: str) -> str:
    places = re.findall(r'File "(.+)", line (\d+), in (.+)', trace)
    theirs = [place for place in places if not place[0].startswith(_LIBRARIES)]
    return " ({}, line {}, in {})".format(*theirs[-1]) if theirs else ""


def require_no_effects(message: Any, *others: Any, **more: Any) -> None:
    """Raise `Refused` if Dynamo warns that a loss changes Python values; used as ``warnings.showwarning``.

    Dynamo also reports the stack of torch's modes, without a name. A step leaves it as it was.
    """
    text = str(message)
    if "side effects" in text and any("[" in name for _, name in _SOURCE.findall(text)):  # a name of Dynamo's: L['...']
        raise Refused(f"{CHANGES}{_changed(text)}{UNREPEATED}")


_SOURCE = re.compile(r"""(["'])(.*?)\1(?=[,\]])""")


def _changed(text: str) -> str:
    """Return the loss that changes values, and the place in its modules, from Dynamo's names for them."""
    found = re.search(r"L\['losses'\]\['(\w+)'\]([^\"]*)", text)
    if found is None:
        others = [name for _, name in _SOURCE.findall(text) if "[" in name]
        return f" ({others[0]})" if others else ""
    inside = re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", found[2])
    inside = re.sub(r"\._modules\['(.*?)'\]", r".\1", inside).lstrip(".")
    return f" (the {found[1]} loss{inside and f': {inside}'})"
