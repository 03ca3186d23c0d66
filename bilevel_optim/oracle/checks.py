"""Checks of one step, collected on the device and read on the host with one synchronisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import NonFiniteError, root_hint, warn
from ..problem.vector import Vector, any_sharded
from ..tracing import is_tracing

__all__ = ["Checks"]

Message = str | Callable[[], str]  # or a function that makes it when needed

REFUSAL = "refusal"  # the key of alerts that are errors


class Checks:
    """Checks of one step: for finite values, and for reasons to warn.

    ``finite`` and ``alert`` only queue; ``verify`` reads everything at once.

    Attributes:
        roots: operations of a loss, as users call them, that have no finite derivative of some order at zero.
    """

    roots: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all checks, before an estimate is made again."""
        self._finite: list[tuple[str, str, list[Tensor]]] = []
        self._scalars: list[tuple[str, str, Tensor]] = []
        self._sums: list[Tensor] = []  # in a trace, a number for each tensor
        self._alerts: list[tuple[str, Message, Callable[..., Any], tuple[Tensor, ...]]] = []

    def finite(self, oracle: str, tensors: Iterable[Tensor], hint: str = "") -> None:
        """Require that every entry of ``tensors``, results of ``oracle``, is finite."""
        if is_tracing():  # summed here, so that parts of a graph hand on a number, not a vector
            self._sums += [t.detach().sum(dtype=torch.promote_types(torch.float32, t.dtype)) for t in tensors]
            return
        self._finite.append((oracle, hint, [t.detach() if t.requires_grad else t for t in tensors]))

    def scalar(self, oracle: str, value: Tensor, hint: str = "") -> None:
        """Require that a single number is finite, at less cost."""
        self._scalars.append((oracle, hint, value))

    def alert(self, key: str, message: Message, on: Tensor) -> None:
        """Warn with ``message`` if the boolean scalar ``on`` is true, once in an optimizer's life for each ``key``."""
        self.alert_if(key, message, _itself, on)

    def alert_if(self, key: str, message: Message, test: Callable[..., Any], *figures: Tensor) -> None:
        """Warn if ``test`` is true of the scalar tensors ``figures``; see `alert` for ``key`` and ``message``.

        `verify` reads the figures of all checks at once, and the test gets numbers. In a trace it gets the tensors, so
        it must consist of comparisons, ``&`` and ``|``.
        """
        self._alerts.append((key, message, test, figures))

    def refuse(self, message: str, on: Tensor) -> None:
        """Raise ValueError with ``message`` if the boolean scalar ``on`` is true."""
        self.alert(REFUSAL, message, on)

    def flags(self) -> tuple[list[str], Tensor]:
        """Replace `verify` in a graph: return the keys of the alerts, and a tensor of non-finite flag and alerts.

        Nothing is read on the host. If a value is not finite, an eager step finds out which one.
        """
        tensors = [*self._sums, *(t.reshape(()) for *_, t in self._scalars)]
        alerts = [test(*figures).reshape(()) for *_, test, figures in self._alerts]
        like = next(iter((*tensors, *alerts)), torch.empty((), device="cpu"))
        kind = torch.promote_types(torch.float32, like.dtype)
        total = torch.zeros((), dtype=kind, device=like.device)
        for t in tensors:
            total = total + t
        return [key for key, *_ in self._alerts], torch.stack([(total * 0).isnan(), *alerts])

    def verify(
        self,
        step: int,
        warned: set[str],
        shown: Sequence[Tensor] | None = None,
        quiet: Callable[[str], bool] = lambda key: False,
    ) -> set[str]:
        """Raise `NonFiniteError` for the first oracle that failed; warn; return the keys of the alerts that were on.

        ``warned`` receives the key of each warning. ``shown`` are tensors that show whether any vector was not finite;
        by default all vectors are checked. Keys for which ``quiet`` is true give no warning.
        """
        # A norm is cheap, and not finite if an entry is not; `_require_finite` recognises a mere overflow.
        signs = _norms([t for *_, vector in self._finite for t in vector] if shown is None else shown)
        for *_, value in self._scalars:
            signs.append(value)
        if not self._alerts:
            if not all(map(math.isfinite, _read(signs))):
                self._require_finite(step)
            return set()
        numbers = _read([*signs, *[figure for *_, figures in self._alerts for figure in figures]])
        if not all(map(math.isfinite, numbers[: len(signs)])):
            self._require_finite(step)
        on, remaining = set(), iter(numbers[len(signs) :])
        for key, message, test, figures in self._alerts:
            if test(*(next(remaining) for _ in figures)):
                if key == REFUSAL:
                    raise ValueError(_text(message))
                on.add(key)
                if key not in warned and not quiet(key):
                    warned.add(key)
                    warn(_text(message))
        return on

    def _require_finite(self, step: int) -> None:
        """Raise for the first oracle that returned a non-finite entry."""
        for oracle, hint, vector in self._finite:
            if not bool(Vector(vector).max_abs().isfinite()):
                raise NonFiniteError(oracle, step, root_hint(oracle, self.roots, hint))
        for oracle, hint, value in self._scalars:
            if not bool(value.isfinite()):
                raise NonFiniteError(oracle, step, hint)


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    if any_sharded(tensors):
        return [Vector([t]).norm() for t in tensors]
    return Vector(tensors).norms()


def _itself(on: Any) -> Any:
    return on


def _text(message: Message) -> str:
    return message if isinstance(message, str) else message()


def _read(scalars: list[Tensor]) -> list[float]:
    """Read scalars on the host, with one synchronisation."""
    if all([t.is_cpu for t in scalars]):  # cheaper than to stack them
        return [t.item() for t in scalars]
    away = next(t for t in scalars if not t.is_cpu)
    kind = functools.reduce(torch.promote_types, {t.dtype for t in scalars})
    read: list[float] = torch.stack([t.to(away.device, kind) for t in scalars]).tolist()
    return read
