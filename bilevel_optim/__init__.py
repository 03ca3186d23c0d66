"""Bilevel optimisation in PyTorch, used like ``torch.optim``.

``min_x f(x, y*(x))`` subject to ``y*(x) = argmin_y g(x, y)``.
"""

import types as _types
from typing import TYPE_CHECKING as _TYPE_CHECKING

from torch import optim as _optim

from . import hypergradient as hypergradient
from ._version import __version__ as __version__
from .checking.check import HypergradientReport as HypergradientReport
from .checking.check import check_hypergradient as check_hypergradient
from .checking.suggest import Suggestion as Suggestion
from .checking.suggest import SuggestionRow as SuggestionRow
from .checking.suggest import suggest as suggest
from .errors import BilevelWarning as BilevelWarning
from .errors import DerivativeError as DerivativeError
from .errors import GradcheckError as GradcheckError
from .errors import NonFiniteError as NonFiniteError
from .errors import RankError as RankError
from .hypergradient import finite_difference as finite_difference
from .hypergradient.layer import solve as solve
from .methods import *  # noqa: F403 (the methods are listed only there)
from .optimizer.base import BilevelOptimizer as BilevelOptimizer
from .optimizer.iterate import UniformIterate as UniformIterate
from .oracle.oracle import Oracle as Oracle
from .problem.finite_sum import FiniteSum as FiniteSum
from .problem.objective import Objective as Objective
from .problem.tasks import TaskSampler as TaskSampler
from .problem.tasks import TensorTasks as TensorTasks
from .problem.vector import Vector as Vector
from .solvers import linear as linear
from .solvers.agd import AGD as AGD
from .solvers.epoch_sgd import epoch_sgd as epoch_sgd

# Type checkers read the imports above. They would take a computed ``__all__`` for an empty list.
globals()["__all__"] = sorted(
    name
    for name, value in globals().items()
    if name in ("__version__", "finite_difference", "hypergradient", "linear")
    or (name[0] != "_" and not isinstance(value, _types.ModuleType))
)


def __dir__() -> list[str]:
    """Return the public names only, for completion."""
    names: list[str] = globals()["__all__"]
    return names


if not _TYPE_CHECKING:  # a type checker would conclude that every name exists

    def __getattr__(name: str) -> object:
        """Raise AttributeError with a suggestion, such as a method's name in another case."""
        meant = [known for known in __dir__() if known.lower() == name.lower()]
        hint = f"; did you mean {meant[0]!r}?" if meant else ""
        if hasattr(_optim, name):
            hint = f": take upper_optimizer=torch.optim.{name} for x, or lower_optimizer=torch.optim.{name} for y"
        raise AttributeError(f"module 'bilevel_optim' has no attribute {name!r}{hint}")
