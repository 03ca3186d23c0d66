"""Steps that are made both compiled and eagerly, and compared."""

from __future__ import annotations

import time

import torch

from ..hypergradient import Estimate
from ..optimizer.method import Method
from ..optimizer.step import Update
from ..optimizer.transaction import TABLE
from ..oracle.hooks import any_hooks
from ..oracle.oracle import Oracle
from ..solvers.agd import AGD
from .compare import Accepted, mismatch, perturbed_by_rounding
from .entry import Entry, Settings
from .program import Given
from .pure import Results
from .reasons import Refused

__all__ = ["DIFFERS", "FUNCTIONAL", "compared", "require_compilable"]

FUNCTIONAL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # updates that Dynamo can trace
DIFFERS = (
    "a compiled step differs from the eager one in {}: a loss, or a method of your own, depends on something that a "
    "graph does not see (data that a loss draws itself, an attribute that the method changes), or is too sensitive to "
    "rounding; draw data by the Objective, or accept a larger difference by compile(rtol=, atol=)"
)


def compared(
    optimizer: Method,
    settings: Settings,
    entry: Entry,
    given: Given,
    right: tuple[Estimate, Update | None],
    oracle: Oracle,
    eager: float,
    graphs: int,
) -> tuple[Results, str | None]:
    """Return results of a compiled step, compiled now if need be, and what differs from the eager one.

    Args:
        optimizer: the optimizer.
        settings: how its steps are compiled.
        entry: steps of this kind.
        given: arguments of the step.
        right: results of the eager step.
        oracle: that of the eager step.
        eager: seconds that it has taken.
        graphs: number of graphs of the optimizer.
    """
    began, before = time.perf_counter(), entry.count
    found = entry.results(given, graphs)
    found.flags.tolist()  # waits for a device
    seconds = time.perf_counter() - began
    if entry.count > before:
        entry.gain.compilation += seconds
    else:
        entry.gain.note(eager, seconds)
    name = optimizer.declared.difference_step
    divisor = min(getattr(optimizer, name), 1.0) if name else 1.0
    accepted = Accepted(settings.rtol, settings.atol, divisor)
    names = {
        id(t): name.removeprefix(TABLE).removeprefix("rows.")
        for entries in optimizer.state.values()
        for name, t in entries.items()
    }
    with torch.no_grad():
        what = mismatch(right, found[:2], oracle.x, oracle.y, accepted, names)
        if what is not None:  # it may be a small difference of large terms, as near a solution
            moved = given.at(x=perturbed_by_rounding(given.state["x"]), y=perturbed_by_rounding(given.state["y"]))
            otherwise = entry.known(moved)
            other = None if otherwise is None else otherwise[:2]
            what = mismatch(right, found[:2], oracle.x, oracle.y, accepted, names, other)
    return found, what


def require_compilable(optimizer: Method, oracle: Oracle) -> None:
    """Raise `Refused` for a step that cannot be compiled, for a reason that the eager step has shown."""
    if oracle.sharded:
        raise Refused("parameters are sharded (DTensor), and such steps are always eager")
    if torch.is_anomaly_enabled():  # it reads values in a trace
        raise Refused("torch's anomaly detection is on: switch it off, and call compile() again")
    if any_hooks((*oracle.live_x, *oracle.live_y)):
        raise Refused("a parameter has a hook, which a graph would not call: remove it, or keep the steps eager")
    if oracle.session.one_by_one:
        raise Refused(oracle.session.one_by_one)
    if oracle.session.doors:
        raise Refused(f"upper parameters are read outside the losses ({', '.join(sorted(oracle.session.doors))})")
    for rule in optimizer._rules.rules:
        if rule.kind not in (*FUNCTIONAL, AGD):
            raise Refused(
                f"the lower_optimizer {type(rule.optimizer).__name__} cannot be compiled: use torch's SGD, Adam or "
                "AdamW, or bo.AGD, without hooks"
            )
