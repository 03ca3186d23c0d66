"""One kind of step as a graph: the step's own function, traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..hypergradient.estimate import Write, measured
from ..optimizer.base import BilevelOptimizer
from ..optimizer.step import StepInputs, changed
from ..oracle.buffers import Buffers
from ..oracle.evaluation import substituted
from ..oracle.oracle import Oracle
from ..oracle.session import Session
from ..problem.tracing import Untraceable
from ..problem.vector import Vector
from ..solvers.lower import LowerRules
