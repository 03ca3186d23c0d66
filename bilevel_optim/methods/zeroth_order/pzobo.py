"""PZOBO: partial zeroth-order-like bilevel optimisation."""

from __future__ import annotations

from typing import Unpack

from ...hypergradient import Estimate, partial_zeroth_order
from ...optimizer.base import ColdOptions
