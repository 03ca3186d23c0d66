"""SABA: SOBA with a memory of every term of two finite sums (SAGA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...hypergradient import Estimate
from ...hypergradient.estimate import Write
