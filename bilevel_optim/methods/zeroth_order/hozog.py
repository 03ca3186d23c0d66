"""HOZOG: zeroth-order gradient of the whole upper objective."""

from __future__ import annotations

from ...hypergradient import Estimate, full_zeroth_order
