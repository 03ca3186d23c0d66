"""StocBiO and AmIGO: stochastic implicit differentiation with two loops; what the methods with Neumann series share."""

from __future__ import annotations

import math
from functools import partial
from typing import Unpack

from ...hypergradient import Estimate, ImplicitSamples, stochastic_implicit
from ...optimizer.base import BilevelOptimizer, CommonOptions
