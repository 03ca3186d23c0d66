"""Advance of module buffers, once in each step and only here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..problem.objective import Sample
from ..problem.tasks import select
from ..problem.vector import as_variable
from .lanes import LaneLoss
from .oracle import Oracle
from .substitution import Substitution

__all__ = ["advance_buffers"]


def advance_buffers(oracle: Oracle, y: Sequence[Tensor] | None) -> None:
    """Run one forward pass of g at the last y of a step, on its last lower sample, if modules change buffers.

    No other evaluation changes them. So within a step the losses are functions of x, y and the sample, and copies,
    tasks and look-ahead points count equally for every method. With tasks, the batch is that of the first task, at its
    own row where y has a row for each. Counts as one value of a loss.

    Args:
        oracle: oracle of the step, at its beginning.
        y: the improved y; None: unchanged.
    """
    session = oracle.session
    sample, session.lower_sample = session.lower_sample, None  # a reference cycle would keep the step's graphs
    if sample is None or not session.buffers_skipped:
        return
    oracle.count("loss")
    here, lanes = oracle.at(lower=y), sample.loss
    if isinstance(lanes, LaneLoss):
        features = None if sample.features is None else oracle.g.features
        sample = Sample(lanes.loss, (select(sample.arguments[0], 0),), once=True, features=features)
        if lanes.leaves[-1].dim() == oracle.y[-1].dim():  # y has rows
            rows = [as_variable(t[0]) for t in lanes.leaves]

            def at_first_row(*, graph: bool) -> Any:
                with torch.set_grad_enabled(graph), Substitution(lanes.live, rows, stacked=False):
                    return sample()

            here.without_graph("lower", at_first_row)
            return
    with here.placed():
        here.without_graph("lower", partial(here.call, sample))
