"""F2SA-p: fully first-order stochastic approximation with p-th order finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from ..hypergradient import Estimate, penalty
from ..hypergradient.finite_difference import KINDS, Stencil
from ..hypergradient.finite_difference import stencil as stencil_of
from ..optimizer.base import BilevelOptimizer, CommonOptions
