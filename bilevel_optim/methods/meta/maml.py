"""MAML, first-order MAML, ANIL and implicit MAML: learning where (or near what) the lower problems of tasks start."""

from __future__ import annotations

import math
from typing import Unpack

from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.base import BilevelOptimizer, CommonOptions, Loss
