"""Captured steps: a step as a compiled graph, watched."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BilevelWarning, NonFiniteError
from ..oracle.checks import Checks
from ..oracle.evaluation import substituted
from ..oracle.oracle import Oracle
from ..oracle.session import Session
from ..problem.feeding import Draw, Drawn, Fed, FedTasks
from ..problem.objective import Objective
from ..problem.tracing import Untraceable
from ..problem.vector import Vector
from ..solvers.lower import LowerRules
from .graphs import Backend, Graph
from .step import Given, changed
