"""RT-MLMC and DL-SGD: stochastic gradients for contextual bilevel problems, a fresh lower problem at every draw."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Unpack

import torch

from ...hypergradient import Estimate
from ...hypergradient.multilevel import multilevel
from ...hypergradient.multilevel import smoothness as largest_eigenvalue
from ...optimizer.base import BilevelOptimizer, CommonOptions
