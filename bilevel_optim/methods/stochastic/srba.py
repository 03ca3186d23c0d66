"""SRBA: SARAH's recursion of SOBA's three directions, for finite sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.base import CommonOptions
