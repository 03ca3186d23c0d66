"""Count the bytes of live tensors, and of those that processes exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["KINDS", "Ledger"]

KINDS = {
    "allreduce": "all-reduced",
    "broadcast": "broadcast",
    "reducescatter": "reduce-scattered",
    "allgather": "all-gathered",
}


def _size(tree: Any) -> int:
    """Return the bytes of all tensors in a tree."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, Tensor))


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts bytes while it is active.

    Args:
        known: tensors that exist already.

    Attributes:
        peak: peak bytes of live tensors: the known ones, and those made since.
        sent: bytes for each kind of collective; where shards form a whole tensor, the bytes of the whole.
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: Any = WeakIdKeyDictionary()
        self.peak, self.sent = 0, dict[str, int]()
        for tensor in known:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # torch calls again with the operations on the shards
        found = func(*args, **(kwargs or {}))
        name = func.__name__.replace("_", "")
        kind = next((k for k in KINDS if "c10d" in func.namespace and k in name), None)
        if kind is not None:
            self.sent[kind] = self.sent.get(kind, 0) + max(map(_size, (args[0], args[1:], found)))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        self.peak = max(self.peak, self.bytes())
        return found

    def _note(self, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self.alive[local.untyped_storage()] = True

    def bytes(self) -> int:
        """Return the bytes of the tensors that are alive now."""
        return sum(storage.nbytes() for storage in self.alive)
