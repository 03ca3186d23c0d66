"""BOME: first-order descent along the value function's barrier."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..optimizer.base import BilevelOptimizer, CommonOptions
