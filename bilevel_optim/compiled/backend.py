"""A backend of ``torch.compile`` whose programs can be called again without Dynamo."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch._inductor as inductor
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule

from .rewrites import differentiable_twice, redirected, require_deterministic, require_unwritten
from .small_cpu import is_understood, listed

__all__ = ["Backend", "Call", "Program", "WantsConstants", "backend_of", "record_calls"]

Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]

_WATCHING = threading.local()  # `.calls`: list in which this thread's calls are recorded, or None


class WantsConstants(Exception):
    """A size that is an argument of the graph has to be a constant of it."""


class Program:
    """The innermost compiled function; it takes one list of arguments.

    Args:
        call: the function.
        written: the wrapper that Inductor has generated for a CPU. The first call turns it into a `CallList`.
        graph: its graph, if other programs are to be made from it.
        compiled: makes a program from such a graph and example arguments.
    """

    _boxed_call = True  # tells AOTAutograd to pass the arguments as one list

    def __init__(
        self,
        call: Callable[[list[Any]], Sequence[Any]],
        written: Callable[[list[Any]], Sequence[Any]] | None = None,
        graph: GraphModule | None = None,
        compiled: Callable[[GraphModule, list[Tensor]], Callable[[list[Any]], Sequence[Any]]] | None = None,
    ) -> None:
        self.call, self._written, self.graph, self.compiled = call, written, graph, compiled

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        if self._written is not None:
            self.call, self._written = listed(self._written, arguments) or self.call, None
        calls = getattr(_WATCHING, "calls", None)
        if calls is None:
            return self.call(arguments)
        given = [*arguments]  # the list is emptied by the call
        results = self.call(arguments)
        calls.append(Call(self, given, results))
        return results


class Call(NamedTuple):
    """One call of a program."""

    program: Program
    arguments: list[Any]
    results: Sequence[Any]


@contextmanager
def record_calls() -> Generator[list[Call]]:
    """Record the program calls of this thread inside the block, with their arguments and results."""
    calls: list[Call] = []
    _WATCHING.calls = calls
    try:
        yield calls
    finally:
        _WATCHING.calls = None


def backend_of(
    backend: str | Backend,
    mode: str | None,
    options: dict[str, Any] | None,
    *,
    plain: bool = False,
    repeated: bool = False,
) -> Backend:
    """Return a backend for ``torch.compile`` whose programs can be watched.

    ``plain``: the step has second derivatives, so operations that have none are replaced.
    ``repeated``: programs keep their graphs, from which programs of several steps can be made.
    """
    settings = {**(inductor.list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}

    def compiled(module: GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        if not all(isinstance(t, Tensor) for t in examples):
            raise WantsConstants
        require_deterministic(module)
        require_unwritten(module)
        redirected(module)
        differentiable_twice(module, plain=plain)
        if backend != "inductor":
            return _called(_program(module, examples, _plainly(backend)))

        def inner(part: GraphModule, own: Sequence[Any], **further: Any) -> Any:
            graph = copy.deepcopy(part) if repeated and all(isinstance(t, Tensor) for t in own) else None
            found = compile_fx_inner(part, own, **further)
            small = is_understood() and all(isinstance(t, Tensor) and t.is_cpu for t in own)
            return Program(found, getattr(found, "current_callable", None) if small else None, graph, unrolled)

        def unrolled(graph: GraphModule, own: list[Tensor]) -> Callable[[list[Any]], Sequence[Any]]:
            found: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
                graph, own, inner_compile=inner, config_patches=settings or None
            )
            return lambda arguments: found(*arguments)

        made: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
            module, examples, inner_compile=inner, config_patches=settings or None
        )
        return made

    return compiled


def _plainly(backend: str | Backend) -> Backend:
    """Return the backend, looked up if it is a name. Its functions take their arguments one by one."""
    if backend == "eager":
        return lambda module, examples: module.forward
    return lookup_backend(backend) if isinstance(backend, str) else backend


def _program(module: GraphModule, examples: list[Tensor], backend: Backend) -> Program:
    made = backend(module, examples)
    return Program(
        lambda arguments: made(*arguments), graph=module, compiled=lambda graph, own: _program(graph, own, backend)
    )


def _called(program: Program) -> Callable[..., Any]:
    return lambda *arguments: program([*arguments])
