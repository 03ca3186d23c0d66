"""SOBA and FSLA: y, the solution of the linear system and x move together."""

from __future__ import annotations

import math
from typing import Unpack

from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.base import BilevelOptimizer, CommonOptions
