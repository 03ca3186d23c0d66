"""The methods, one module each; methods that share private code form a family folder."""

import types

from .aid import AID as AID
from .ba import BA as BA
from .bome import BOME as BOME
from .contextual.rtmlmc import DLSGD as DLSGD
from .contextual.rtmlmc import RTMLMC as RTMLMC
from .f2sa import F2SA as F2SA
from .first_order import FirstOrder as FirstOrder
from .gda import GDA as GDA
from .imcn import iMCN as iMCN
from .itd import ITD as ITD
from .meta.esmaml import ESMAML as ESMAML
from .meta.maml import ANIL as ANIL
from .meta.maml import FOMAML as FOMAML
from .meta.maml import MAML as MAML
from .meta.maml import iMAML as iMAML
from .paid import PAID as PAID
from .restarted.pragda import PRAGDA as PRAGDA
from .restarted.pragda import RAGDA as RAGDA
from .restarted.rahgd import PRAHGD as PRAHGD
from .restarted.rahgd import RAHGD as RAHGD
from .restarted.restarted_agd import RestartedAGD as RestartedAGD
from .stochastic.bsa import BSA as BSA
from .stochastic.bsa import TTSA as TTSA
from .stochastic.mrbo import MRBO as MRBO
from .stochastic.mrbo import SUSTAIN as SUSTAIN
from .stochastic.saba import SABA as SABA
from .stochastic.soba import FSLA as FSLA
from .stochastic.soba import SOBA as SOBA
from .stochastic.srba import SRBA as SRBA
from .stochastic.stocbio import AmIGO as AmIGO
from .stochastic.stocbio import StocBiO as StocBiO
from .stochastic.vrbo import VRBO as VRBO
from .zeroth_order.hozog import HOZOG as HOZOG
from .zeroth_order.pzobo import PZOBO as PZOBO

# The tables of the documents list classes in definition order, and their texts refer to earlier rows.
# isort: off
from .tracked.svrb import SVRB as SVRB
from .tracked.rsvrb import RSVRB as RSVRB
from .tracked.rsvrb import importance_probabilities as importance_probabilities
from .tracked.bsvrb import BSVRB as BSVRB
from .tracked.stable import STABLE as STABLE
# isort: on

# Type checkers read the imports above; they would take a computed ``__all__`` for an empty one.
globals()["__all__"] = sorted(
    name for name, value in globals().items() if name[0] != "_" and not isinstance(value, types.ModuleType)
)
