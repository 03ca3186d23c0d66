"""Bilevel optimisation in PyTorch, used like ``torch.optim``.

``min_x f(x, y*(x))`` subject to ``y*(x) = argmin_y g(x, y)``.
"""

from . import finite_difference, hypergradient, linear
from ._version import __version__
from .aid import AID
from .check import HypergradientReport, check_hypergradient
from .errors import BilevelWarning, GradcheckError, NonFiniteError
from .f2sa import F2SA
from .first_order import FirstOrder
from .itd import ITD
from .lower import AGD
from .maml import ANIL, FOMAML, MAML, iMAML
from .objective import Objective
from .optimizer import BilevelOptimizer
from .oracle import Oracle
from .rtmlmc import DLSGD, RTMLMC
from .tasks import TaskSampler, TensorTasks
from .vector import Vector

__all__ = [
    "AGD",
    "AID",
    "ANIL",
    "DLSGD",
    "F2SA",
    "FOMAML",
    "ITD",
    "MAML",
    "RTMLMC",
    "BilevelOptimizer",
    "BilevelWarning",
    "FirstOrder",
    "GradcheckError",
    "HypergradientReport",
    "NonFiniteError",
    "Objective",
    "Oracle",
    "TaskSampler",
    "TensorTasks",
    "Vector",
    "__version__",
    "check_hypergradient",
    "finite_difference",
    "hypergradient",
    "iMAML",
    "linear",
]
