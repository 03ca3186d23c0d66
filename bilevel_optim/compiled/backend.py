"""Backends: functions that make a program from a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch._inductor as inductor
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule

from .repeats import fold_repeats
from .small_cpu import SmallProgram, is_understood, small_program

__all__ = ["Backend", "Maker", "Program", "maker_of"]

Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]
Maker = Callable[[GraphModule, list[Tensor], list[Tensor]], "Program"]


class Program:
    """A compiled function from a list of tensors, which it may empty, to a sequence of tensors.

    Args:
        call: the function.
        written: the code that Inductor has generated for a CPU. The first call makes a `SmallProgram` of it.
        constants: tensors that the function takes before the arguments.

    Attributes:
        small: that, if the code was understood; ``call`` is its function then.
    """

    _boxed_call = True  # tells AOTAutograd to pass the arguments as one list

    def __init__(
        self,
        call: Callable[[list[Any]], Sequence[Any]],
        written: Callable[[list[Any]], Sequence[Any]] | None = None,
        constants: Sequence[Tensor] = (),
    ) -> None:
        self._made = call, written
        self.call = partial(_after_constants, call, constants) if constants else call
        self._written, self._constants = written, constants
        self.small: SmallProgram | None = None
        self.met: list[tuple[list[Any], Sequence[Any]]] | None = None  # arguments and results of calls, while wanted

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        if self._written is not None:
            self.small, self._written = small_program(self._written, self._constants, arguments), None
            self.call = self.call if self.small is None else self.small.call
        if self.met is None:
            return self.call(arguments)
        given = [*arguments]  # the list is emptied by the call
        results = self.call(arguments)
        self.met.append((given, results))
        return results

    def after(self, constants: Sequence[Tensor]) -> Program:
        """Return the program that takes only the arguments after these ones."""
        return Program(*self._made, constants)


def _after_constants(call: Callable[[list[Any]], Sequence[Any]], constants: Sequence[Tensor], rest: list[Any]) -> Any:
    return call([*constants, *rest])


def maker_of(backend: str | Backend, mode: str | None, options: dict[str, Any] | None) -> Maker:
    """Return a function that makes a program from a graph, fake arguments and the present arguments."""
    settings = {**(inductor.list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}

    def compiled(module: GraphModule, fakes: list[Tensor], arguments: list[Tensor]) -> Program:
        if backend == "inductor":
            module = fold_repeats(module)
        for part in module.modules():
            for node in part.graph.nodes if isinstance(part, GraphModule) else ():
                node.meta = {}  # it holds tensors without values
        if backend != "inductor":
            if backend == "eager":
                made: Callable[..., Any] = module.forward
            else:
                made = (lookup_backend(backend) if isinstance(backend, str) else backend)(module, fakes)
            return Program(lambda arguments: made(*arguments))
        inner: list[Program] = []

        def compile_inner(part: GraphModule, own: Sequence[Any], **further: Any) -> Any:
            found = compile_fx_inner(part, own, **further)
            small = is_understood() and all(isinstance(t, Tensor) and t.is_cpu for t in own)
            inner.append(Program(found, getattr(found, "current_callable", None) if small else None))
            return inner[-1]

        whole: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
            module, fakes, inner_compile=compile_inner, config_patches=settings or None
        )
        return _innermost(inner, whole, arguments) or Program(lambda arguments: whole(*arguments))

    return compiled


def _innermost(inner: Sequence[Program], whole: Callable[..., Any], arguments: list[Tensor]) -> Program | None:
    """Return the program that Inductor has made if it takes the same arguments and returns the same results.

    It may take constants of the graph too.
    """
    if len(inner) != 1:
        return None
    (program,) = inner
    program.met = []
    results = [whole(*arguments) for _ in range(2)]
    met, program.met = program.met, None
    if len(met) != 2:
        return None
    n = len(met[0][0]) - len(arguments)
    constants = met[0][0][:n]
    for (given, found), own in zip(met, results, strict=True):
        expected = [*constants, *arguments]
        if len(given) != len(expected) or not all(map(is_, given, expected)):
            return None
        if len(found) != len(own) or not all(map(is_, found, own)):
            return None
    return program.after(constants) if constants else program
