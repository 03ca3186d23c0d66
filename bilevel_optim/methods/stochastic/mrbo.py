"""MRBO and SUSTAIN: single loops whose two gradients are recursive estimates (STORM)."""

from __future__ import annotations

from typing import NamedTuple, Unpack

from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.base import CommonOptions
