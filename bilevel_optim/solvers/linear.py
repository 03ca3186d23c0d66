r"""Linear solvers for :math:`H v = b` with H known only through products, as in the implicit hypergradient.

H is symmetric (a Hessian). All of them return a `LinearSolution` with the residual and the iterations made; none
prints, raises or divides zero by zero, however many iterations it is given. With ``lanes=True`` the tensors are stacked
and H is block diagonal, one block for each lane: each is solved as if it were alone, with figures of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.cg import Algebra, cg_step, iteration
from ..problem.tracing import end_region, traced
