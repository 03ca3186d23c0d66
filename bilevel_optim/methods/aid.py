"""AID: approximate implicit differentiation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

from ..hypergradient import Estimate, implicit
from ..optimizer.base import BilevelOptimizer, CommonOptions
