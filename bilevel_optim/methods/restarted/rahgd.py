"""RAHGD and PRAHGD: restarted accelerated hypergradient descent, without and with perturbations."""

from __future__ import annotations

from functools import partial
from typing import Unpack

from ...hypergradient import Estimate, implicit
