"""ITD: iterative differentiation, backpropagation through the lower steps."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch

from ..hypergradient import Estimate, unrolled
from ..optimizer.base import BilevelOptimizer, CommonOptions
