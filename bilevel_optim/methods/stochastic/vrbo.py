"""VRBO: a double loop with recursive differences between anchors (SPIDER)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.base import CommonOptions
