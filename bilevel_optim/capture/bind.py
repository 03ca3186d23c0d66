"""Where the arguments of a step's graph are read and its results written; comparison with an eager step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..optimizer.state import SOLVER, TABLE, UPPER_SOLVER
from ..problem.random import kept
from ..problem.tracing import Untraceable
from ..problem.vector import Vector
from .draws import Batches
from .small_cpu import TURNS
from .step_graph import StepGraph
from .trace import LONGEST

__all__ = ["CompiledStep", "Slot", "Unsettled", "difference", "shaken"]


class Unsettled(Untraceable):
    """A step remembers something else than the one before it, as a first one does."""


class CompiledStep:
    """Where the arguments of a graph are read, and where its results are written, in one optimizer.

    Args:
        step: the graph.
        state: of the optimizer.
        x: the live upper parameters.
        y: the live lower parameters.
        key: which functions it evaluates. Default: None.
        batches: of each loss, if they are alike. Default: None.

    Attributes:
        uses: how often the graph has been used.

    Raises:
        Unsettled: if a step does not leave behind what it has found, so that the next one is another.
    """

    def __init__(
        self,
        step: StepGraph,
        state: Any,
        x: Sequence[Tensor],
        y: Sequence[Tensor],
        key: Any = None,
        batches: Mapping[str, Batches] | None = None,
    ) -> None:
        self.key, self.batches = key, batches
        self.step, self.x, self.y, self.uses, self.device = step, list(x), list(y), 0, y[0].device
        self._places = [t.device for t in (*self.x, *self.y)]
        upper, lower = [state[p] for p in x], [state[p] for p in y]
        self.entries = [*upper, *lower]
        self._state = state
        self._several: Any = None  # False if there is none
        self._sizes = (None if step.reads is not None else len(upper[0])), len(lower[0])
        places = {"memory": lower, "upper_memory": upper}
        self.out = out = step.graph.structured([Slot(i) for i in range(step.graph.outputs)])
        self.reads: list[Place] = []
        for level in ("memory", "upper_memory"):
            self.reads += [(entries, name) for name in step.arguments[level] for entries in places[level]]
        self.reads += [(lower[0], TABLE + name) for name in step.arguments["tables"]]
        solvers = (SOLVER, lower, "solver", "solver"), (UPPER_SOLVER, upper, "upper_solver", "x_solver")
        for prefix, of, given, _ in solvers:
            for entries, known in zip(of, step.arguments[given] or (), strict=False):
                self.reads += [(entries, prefix + name) for name, value in known.items() if isinstance(value, Tensor)]
        self.results: list[tuple[Place, int]] = []  # what is remembered, and which output it is
        for level, found in (
            ("memory", out["memory"]),
            ("upper_memory", {**out["upper_memory"], **out.get("x_memory", {})}),
        ):
            for name, slots in found.items():
                if slots is None:
                    raise Unsettled("a step forgets what it remembered")
                self.results += [((entries, name), i) for entries, i in zip(places[level], slots, strict=True)]
        self.results += [((lower[0], TABLE + name), i) for name, i in out["tables"].items()]
        for prefix, of, _, left in solvers:
            for entries, known in zip(of, out.get(left) or (), strict=False):
                entered = {prefix + name: value for name, value in known.items() if isinstance(value, Slot)}
                self.results += [((entries, name), i) for name, i in entered.items()]
        self.numbers: dict[str, int] = out["numbers"]  # tensors among the plain numbers, and which output they are
        self._numbers: dict[str, Tensor] = step.arguments["numbers"]
        self._written: list[tuple[str, int, int]] = []  # buffers that a step writes into: role, number, and output
        for role, found in out["reads"].items():
            self._written += [(role, i, slot) for i, slot in found.items()]
        # All values of a step by name: which argument they are; and what it leaves behind: which output that is.
        names: list[tuple[Any, Any]] = [("x", i) for i in range(len(self.x))] + [("y", i) for i in range(len(self.y))]
        names += [(id(entries), name) for entries, name in self.reads] + [("number", name) for name in self._numbers]
        names += [(role, i) for role, tensors in step.arguments["reads"].items() for i in range(len(tensors))]
        self.place = {name: k for k, name in enumerate(names)}
        moved = out.get("x") or ()
        self.left: dict[tuple[Any, Any], int] = {(id(entries), name): i for (entries, name), i in self.results}
        self.left |= {("number", name): i for name, i in self.numbers.items()}
        self.left |= {(role, i): slot for role, i, slot in self._written}
        self.left |= {("x", k): i for k, i in enumerate(moved)}
        self.left |= {("y", k): i for k, i in enumerate(out["lower"] or ())}
        self.left |= {("y", k): i for k, i in enumerate(out.get("x_lower") or ())}  # y moves along with x
        if not self.left.keys() <= self.place.keys():
            raise Unsettled("what a step remembers has not settled")
        self.next = [(self.place[name], i) for name, i in self.left.items()]

        y_ends = out.get("x_lower") or out["lower"] or ()
        self._moved = [*zip([*self.x, *self.y] if moved else self.y, (*moved, *y_ends), strict=bool(y_ends))]

    def holds(self, state: Any, numbers: Mapping[str, Any]) -> bool:
        """Whether the optimizer's state is still kept where it was, and parameters and plain numbers are alike."""
        x, y, split = self.x[0], self.y[0], len(self.x)
        return (
            state.get(x) is self.entries[0]
            and state.get(y) is self.entries[split]
            and self._sizes[0] in (None, len(self.entries[0]))
            and self._sizes[1] == len(self.entries[split])
            and [t.device for t in (*self.x, *self.y)] == self._places
            and all([_alike(numbers.get(name), known) for name, known in self._numbers.items()])
        )

    def due(self) -> bool:
        """Count a use; whether it is one to be compared with an eager step."""
        compared = not self.unwatched
        self.uses += 1
        return compared

    @property
    def unwatched(self) -> int:
        """How many uses there are before the next one that is compared: 1, 2, 4, 8, ..., and multiples of 4096."""
        n = self.uses
        after = 2 ** n.bit_length() if n < CHECKED_EVERY else CHECKED_EVERY * (n // CHECKED_EVERY + 1)
        return after - n - 1

    @property
    def chains(self) -> bool:
        """Whether steps may follow each other before anything is written."""
        return not self.out["writes"] and not self.out.get("x_writes")

    def arguments(self, numbers: Mapping[str, Any], reads: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        """The values of a step, as they are now, with the optimizer's plain numbers and what the losses read."""
        kept = [entries[name] for entries, name in self.reads]
        others = [t for tensors in reads.values() for t in tensors]
        return [*self.x, *self.y, *kept, *[numbers[name] for name in self._numbers], *others]

    def following(self, arguments: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """The values of the next step."""
        new = list(arguments)
        for k, i in self.next:
            new[k] = outputs[i]
        return new

    def may_follow(self, before: CompiledStep) -> bool:
        """Whether the values of a step are those that one with another graph leaves behind, and nothing else."""
        constants = self._written or before._written or self.step.numbers or before.step.numbers
        return before is self or (self.left.keys() == before.left.keys() and not constants)

    def after(self, before: CompiledStep, outputs: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
        """The values of a step after one with another graph; ``arguments`` are those that it would have without."""
        new = list(arguments)
        for name, i in before.left.items():
            new[self.place[name]] = outputs[i]
        return new

    def run(self, arguments: Sequence[Tensor], rates: Sequence[Tensor], data: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the graph computes."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.run(arguments, rates, data)
        return self.step.graph([*arguments, *rates, *data])

    def each(
        self, arguments: Sequence[Tensor], rates: Sequence[Tensor], data: Sequence[Sequence[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor]]:
        """What the graph computes in calls that follow each other, with these data, which it was found to fit.

        Losses and flags of the steps, each in few tensors, and all results of the last call.
        """
        losses, flags, told = list[Tensor](), list[Tensor](), list[tuple[Tensor, Tensor]]()
        loss, flag = self.out.get("losses", self.out["loss"]), self.out["flags"]
        joined = torch.cat if self.step.times > 1 else torch.stack
        outputs: Sequence[Tensor] = ()
        for k, outputs in enumerate(self.step.graph.each([*arguments, *rates], data, self.next, (loss, flag)), 1):
            told.append((outputs[loss], outputs[flag]))
            if k % TURNS == 0 or k == len(data):
                some_losses, some_flags = zip(*told, strict=True)
                losses.append(joined(some_losses))
                flags.append(joined(some_flags))
                told.clear()
        return losses, flags, outputs

    def several(
        self, times: int, start: Sequence[Tensor], rates: Sequence[Tensor], data: Sequence[Sequence[Tensor]]
    ) -> CompiledStep | None:
        """The graph of so many such steps, if there are as many data; made, and compared, when it is needed.

        Of fewer where that graph would have to be divided.
        """
        times = min(times, LONGEST // self.step.graph.nodes)
        if times > 1 and len(data) >= times and self._several is None:
            self._several = False
            several = [t for one in data[:times] for t in one]
            try:
                with kept(self.device):
                    many = CompiledStep(self.step.repeated(times), self._state, self.x, self.y)
            except Untraceable:
                return None
            one = start
            for each in data[:times]:
                one = self.following(one, self.run(one, rates, each))
            if all(map(torch.equal, one, many.following(start, many.run(start, rates, several)))):
                self._several = many  # bit for bit, so that it does not matter where a run was interrupted
        return self._several or None

    def follow(
        self,
        many: CompiledStep | None,
        arguments: Sequence[Tensor],
        rates: Sequence[Tensor],
        data: Sequence[Sequence[Tensor]],
    ) -> tuple[Tensor, Tensor, tuple[CompiledStep, Sequence[Tensor]]]:
        """Losses and flags of steps with these data that follow each other, and what the last graph gave.

        ``many`` is the graph of several steps, if there is one.
        """
        losses: list[Tensor] = []
        flags: list[Tensor] = []
        times = len(data) + 1 if many is None else many.step.times
        single = len(data) % times
        if many is not None and single < len(data):
            parts = [[*chain.from_iterable(data[i : i + times])] for i in range(0, len(data) - single, times)]
            losses, flags, outputs = many.each(arguments, rates, parts)
            if not single:
                return torch.cat(losses), torch.cat(flags), (many, outputs)
            arguments = many.following(arguments, outputs)
        ends, raised, outputs = self.each(arguments, rates, data[-single:])
        return torch.cat([*losses, *ends]), torch.cat([*flags, *raised]), (self, outputs)

    def estimate(self, outputs: Sequence[Tensor]) -> Estimate:
        """What the graph has estimated, as far as an update of x asks for it."""
        out = self.out
        memory, upper_memory = (
            {name: Vector(outputs[i] for i in slots) for name, slots in out[level].items()}
            for level in ("memory", "upper_memory")
        )
        gradient = Vector(outputs[i] for i in out["gradient"])
        return Estimate(
            outputs[out["loss"]], gradient, memory=memory, upper_memory=upper_memory, numbers=self.numbers_of(outputs)
        )

    def write(self, outputs: Sequence[Tensor], reads: Mapping[str, Sequence[Tensor]]) -> None:
        """Write what a step has computed, also into buffers among what the losses read."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.write(outputs, reads)
        for role, i, slot in self._written:
            reads[role][i].copy_(outputs[slot])
        out, shared = self.out, self.step.graph.shared or ()
        for table, rows, values in self._tables(outputs):
            table[rows] = values
        for (entries, name), i in self.results:
            entries[name] = outputs[i].clone() if i in shared else outputs[i]
        gradient = [outputs[i].clone() if i in shared else outputs[i] for i in out["gradient"]]
        if self._moved:
            torch._foreach_copy_([live for live, _ in self._moved], [outputs[i] for _, i in self._moved])
        for parameter, value in zip(self.x, gradient, strict=True):
            parameter.grad = value

    def numbers_of(self, outputs: Sequence[Tensor]) -> dict[str, Any]:
        """The plain numbers that a step has changed."""
        shared = self.step.graph.shared or ()
        found = {name: outputs[i].clone() if i in shared else outputs[i] for name, i in self.numbers.items()}
        return {**self.step.numbers, **found}

    def _tables(self, outputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Any, Tensor]]:
        for (level, name, i), rows, values in (*self.out["writes"], *self.out.get("x_writes", ())):
            if level == "y":
                place = self.y[i]
            else:
                entries = self.entries[i if level == "upper_memory" else len(self.x) + i]
                place = entries[TABLE + name if level == "tables" else name]
            yield place, outputs[rows] if isinstance(rows, Slot) else rows, outputs[values]


class Slot(int):
    """The number of an output, as against a constant."""


Place = tuple[dict[str, Any], str]
Accepted = tuple[float | None, float | None]


def difference(
    compiled: CompiledStep,
    outputs: Sequence[Tensor],
    estimate: Estimate,
    update: Any,
    divisor: float,
    shaken: Sequence[Tensor] | None = None,
    accepted: Accepted = (None, None),
) -> str | None:
    """What of a captured step differs from the eager one by more than rounding, which the hypergradient divides.

    ``shaken`` is what the graph gives for arguments that are rounded otherwise, if that is known; ``accepted`` the
    relative and the absolute difference that the user accepts in place of rounding.
    """
    out = compiled.out
    pairs: list[tuple[str, Sequence[Tensor], Sequence[Slot], Sequence[Tensor] | None, float]] = [
        ("the loss", [estimate.loss], [out["loss"]], None, 1.0),
        ("the hypergradient", estimate.gradient, out["gradient"], None, divisor),
    ]
    if estimate.lower is not None:
        pairs.append(("y", estimate.lower, out["lower"], compiled.y, 1.0))
    for level, part in (("memory", 1.0), ("upper_memory", divisor)):
        pairs += [(name, vector, out[level][name], None, part) for name, vector in getattr(estimate, level).items()]
    if update is not None:
        pairs.append(("x", update.x, out["x"], compiled.x, divisor))
        if update.lower is not None:
            pairs.append(("y", update.lower, out["x_lower"], compiled.y, divisor))
    for name, right, slots, base, part in pairs:
        others = None if shaken is None else [shaken[i] for i in slots]
        if not _close(right, [outputs[i] for i in slots], base, part, others, accepted):
            return name
    for write, ((_, name, _), _, slot) in zip(estimate.writes, out["writes"], strict=True):
        # What few rows see stands for all, which magnifies rounding.
        part = write.rows.numel() / len(write.table) if isinstance(write.rows, Tensor) else 1.0
        others = None if shaken is None else [shaken[slot]]
        if write.values.is_floating_point() and not _close(
            [write.values], [outputs[slot]], None, part, others, accepted
        ):
            return f"rows of {name}"
    return None


def _alike(value: Any, known: Tensor) -> bool:
    """Whether a value is a tensor of the form of one that is known."""
    return (
        isinstance(value, Tensor)
        and value.shape == known.shape
        and value.dtype == known.dtype
        and value.device == known.device
    )


def shaken(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that differ from these by rounding, each entry up or down; those with gaps in memory are as they are."""
    generator, found = torch.Generator().manual_seed(0), []
    for t in tensors:
        other = t
        if t.is_floating_point():
            signs = torch.randint(2, t.shape, generator=generator, device="cpu").to(t.device, t.dtype) * 2 - 1
            other = t * (1 + torch.finfo(t.dtype).eps * signs)
        found.append(other if other.stride() == t.stride() else t)
    return found


def _close(
    right: Sequence[Tensor],
    found: Sequence[Tensor],
    base: Sequence[Tensor] | None,
    divisor: float = 1.0,
    shaken: Sequence[Tensor] | None = None,
    accepted: Accepted = (None, None),
) -> bool:
    """Whether two vectors, or their distances from a third, are equal up to rounding.

    ``shaken`` is another second one, which differs from it by rounding of what both are made of.
    """
    a, b = Vector(t.detach().double() for t in right), Vector(t.detach().double() for t in found)
    eps = max(torch.finfo(t.dtype).eps for t in right if t.is_floating_point())
    size = a.norm()
    moved = size if base is None else (a - Vector(t.detach().double() for t in base)).norm()
    distance = (a - b).norm()
    if not bool(size.isfinite()):
        return not bool(b.norm().isfinite())
    rtol, atol = accepted
    if rtol is not None or atol is not None:
        return bool(distance <= (atol or 0.0) + (rtol or 0.0) * size)
    least = eps**TOLERANCE
    if shaken is not None and bool(distance <= 100 * (b - Vector(t.detach().double() for t in shaken)).norm()):
        return True
    return bool(distance <= min(least / divisor, max(least, LARGEST)) * moved + 100 * eps * (size + 1e-30))


TOLERANCE = 0.55  # a captured step may differ by this power of the precision: differences magnify rounding
LARGEST = 0.03  # tolerance of what is divided: a loss that reads something else differs by more
CHECKED_EVERY = 4096  # uses of a graph after which it is compared again, at the latest
