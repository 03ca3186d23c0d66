"""Bilevel optimisation in PyTorch, used like ``torch.optim``.

``min_x f(x, y*(x))`` subject to ``y*(x) = argmin_y g(x, y)``.
"""

from . import hypergradient
from ._version import __version__
from .errors import BilevelWarning, GradcheckError, NonFiniteError
from .hypergradient import finite_difference
from .methods.aid import AID
from .methods.ba import BA
from .methods.f2sa import F2SA
from .methods.first_order import FirstOrder
from .methods.itd import ITD
from .methods.meta.esmaml import ESMAML
from .methods.meta.maml import ANIL, FOMAML, MAML, iMAML
from .methods.paid import PAID
from .methods.stochastic.bsa import BSA, TTSA
from .methods.stochastic.mrbo import MRBO, SUSTAIN
from .methods.stochastic.saba import SABA
from .methods.stochastic.soba import FSLA, SOBA
from .methods.stochastic.stocbio import AmIGO, StocBiO
from .methods.stochastic.vrbo import VRBO
from .methods.tracked.bsvrb import BSVRB
from .methods.tracked.rsvrb import RSVRB, importance_probabilities
from .methods.tracked.stable import STABLE
from .methods.tracked.svrb import SVRB
from .methods.zeroth_order.hozog import HOZOG
from .methods.zeroth_order.pzobo import PZOBO
from .optimizer.base import BilevelOptimizer
from .oracle.oracle import Oracle
from .problem.finite_sum import FiniteSum
from .problem.objective import Objective
from .problem.tasks import TaskSampler, TensorTasks
from .problem.vector import Vector
from .solvers import linear
from .solvers.agd import AGD
