"""ES-MAML: meta-learning an initial point by evolution strategies."""

from __future__ import annotations

import math
from typing import Unpack

from ...hypergradient import Estimate, full_zeroth_order
from ...optimizer.base import ColdOptions, Loss
