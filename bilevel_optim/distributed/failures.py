"""A rank that fails ends the step on all ranks; they learn of it without extra messages on the success path."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankError

__all__ = ["Exchange", "exchange", "report"]

PATIENCE = timedelta(seconds=0.2)  # after it a waiting rank checks whether another has failed
_epochs: Counter[str] = Counter()  # failures so far by group; equal on all ranks, as each ends the step on all


class Exchange(NamedTuple):
    """A collective operation, described such that a rank without data can take part in it."""

    kind: str  # "sum", or "first" for the values of the first rank
    size: int
    dtype: str
    device: str

    @classmethod
    def of(cls, kind: str, flat: Tensor) -> Exchange:
        return cls(kind, flat.numel(), str(flat.dtype).removeprefix("torch."), flat.device.type)

    def start(self, group: Any, flat: Tensor | None = None) -> Any:
        """Start the operation on a tensor, by default on zeros."""
        if flat is None:
            flat = torch.zeros(self.size, dtype=getattr(torch, self.dtype), device=self.device)
        if self.kind == "sum":
            return dist.all_reduce(flat, group=group, async_op=True)
        return dist.broadcast(flat, group=group, group_src=0, async_op=True)


def exchange(group: Any, kind: str, flat: Tensor) -> Tensor:
    """Write the sum over the ranks (``"sum"``), or the first rank's values (``"first"``), into a flat tensor.

    Raises:
        RankError: if another rank has failed, or is gone.
    """
    operation = Exchange.of(kind, flat)
    work = operation.start(group, flat)
    if not _is_gloo(group) or flat.device.type != "cpu":
        work.wait()  # on the device's stream: the host does not wait
        return flat
    while True:
        if _ended(group, work):
            return flat
        try:
            _look(group, operation, work)
        except dist.DistError as error:
            raise _missing_rank_error(group, error) from error


def _is_gloo(group: Any) -> bool:
    """Return True if a group has no other backend; ``get_backend`` does not name torch's default."""
    return {pair.partition(":")[2] for pair in str(dist.get_backend_config(group)).split(",")} == {"gloo"}


def _ended(group: Any, work: Any) -> bool:
    """Wait a little for the operation; return True if it is complete."""
    try:
        work.wait(PATIENCE)
    except RuntimeError:
        if not work.is_completed():
            return False
        try:
            work.wait()  # it may have completed just after the timeout: only now does it raise its own error
        except RuntimeError as error:
            raise _missing_rank_error(group, error) from error
    return True


def _look(group: Any, pending: Exchange, work: Any) -> None:
    """Raise if a rank has failed, but first let that rank complete the pending exchange."""
    board = _Board(group)
    gone = board.found("gone")
    if gone:  # no exchange can be completed
        raise RankError("; ".join(gone.values()))
    failed = board.found("failed")
    if not failed:
        return
    board.post("waits", "|".join(map(str, pending)))
    with suppress(RuntimeError):  # the step ends anyway
        work.wait(board.limit)
    board.close()
    raise RankError(
        "; ".join(f"rank {rank} failed: {reason}" for rank, reason in failed.items())
        + ". The step has ended and changed nothing here; correct the error there"
    )


def _missing_rank_error(group: Any, error: Exception) -> RankError:
    """Return the error for a missing rank, and report it to the other ranks, which may not notice."""
    reason = (
        f"a rank is gone: {error}. The step cannot be completed; look for a process that ended or lost its connection"
    )
    with suppress(RuntimeError):  # the missing rank may have held the store
        _Board(group).post("gone", reason)
    return RankError(reason)


def report(group: Any, error: BaseException) -> None:
    """Let the other ranks know that this one has failed, and wait until they have stopped too."""
    if isinstance(error, RankError) or not _is_gloo(group):
        return
    try:
        board = _Board(group)
        board.post("failed", f"{type(error).__name__}: {error}")
        others = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
        waiting = board.until(lambda: board.stopped(others))
        if waiting:  # all wait in the same exchange, because all ranks make the same ones
            kind, size, dtype, device = waiting[0].split("|")
            Exchange(kind, int(size), dtype, device).start(group).wait(board.limit)
        board.close()
    except (RuntimeError, TimeoutError) as lost:  # the store or a rank is gone
        error.add_note(f"The other ranks were not told of this error, and may wait until their timeout: {lost}")


class _Board:
    """Notes that the ranks of a group write for each other when a step fails."""

    def __init__(self, group: Any) -> None:
        self.group, self.name = group, str(group.group_name)
        self.store, self.rank = group.get_group_store(), dist.get_rank(group)
        options = group._get_backend(torch.device("cpu")).options
        self.limit: timedelta = getattr(options, "_timeout", timedelta(minutes=30))

    def _key(self, what: str, rank: int) -> str:
        return f"bilevel_optim/{_epochs[self.name]}/{what}/{rank}"

    def post(self, what: str, text: str) -> None:
        self.store.set(self._key(what, self.rank), text)

    def _read(self, what: str, rank: int) -> str | None:
        key = self._key(what, rank)
        return self.store.get(key).decode() if self.store.check([key]) else None

    def found(self, what: str) -> dict[int, str]:
        """Return the notes of the ranks under this heading."""
        found = {rank: self._read(what, rank) for rank in range(dist.get_world_size(self.group))}
        return {rank: reason for rank, reason in found.items() if reason is not None}

    def stopped(self, ranks: list[int]) -> list[str] | None:
        """Return the exchanges in which the ranks that have not failed wait; None while one of them still runs."""
        waits = []
        for rank in ranks:
            waiting = self._read("waits", rank)
            if waiting is not None:
                waits.append(waiting)
            elif self._read("failed", rank) is None:
                return None
        return waits

    def until(self, found: Callable[[], list[str] | None]) -> list[str]:
        """Call ``found`` until it returns a result; raise TimeoutError if that takes too long."""
        end = time.monotonic() + self.limit.total_seconds()
        while (result := found()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"the other ranks did not stop within {self.limit.total_seconds():g} s")
            time.sleep(0.01)
        return result

    def close(self) -> None:
        """End this failure, so that the next one has notes of its own."""
        _epochs[self.name] += 1
