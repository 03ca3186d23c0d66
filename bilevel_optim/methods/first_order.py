"""FirstOrder: the direct gradient only."""

from __future__ import annotations

from ..hypergradient import Estimate, direct
from ..optimizer.base import BilevelOptimizer
