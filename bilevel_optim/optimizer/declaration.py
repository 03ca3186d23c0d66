"""A method's description of itself, from which tables are made, and which generic tests and recipes read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "REGISTRY", "UNDECLARED", "MethodInfo", "methods", "register"]

FAMILIES = (
    "implicit",
    "unrolled",
    "penalty",
    "zeroth-order",
    "stochastic",
    "tracked",
    "restarted",
    "minimax",
    "meta",
    "contextual",
    "control",
)
TASKS = ("stacked", "rows", "required", "none")
DATA = ("any", "finite_sum")
LOWER_OPTIMIZERS = ("any", "elementwise", "differentiable", "given gradient", "none")


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """Description of a method; a class has it as its attribute ``declared``, right after its docstring.

    Attributes:
        paper: reference, such as ``"arXiv:2010.07962"``.
        family: one of `FAMILIES`.
        when: when to choose it, a clause for the tables.
        cost: oracle calls of a step in words, for the tables. T is ``lower_steps``.
        second_order: needs second derivatives of g.
        losses: 2, or 1 for minimax, ``step(loss)``.
        tasks: ``"stacked"``, each task is a copy of y; ``"rows"``, y has a stored row for each task; ``"required"``,
            made for tasks only; ``"none"``.
        kept_by_tasks: entries of y's state that ``task_memory`` keeps for each task, besides y.
        data: ``"any"``, or ``"finite_sum"``: needs the index of each draw.
        initial: its last upper parameters are the start of the lower ones.
        random: draws random numbers of its own.
        copies: keeps several copies of x or y, so that ``vectorize`` matters without tasks too.
        lower_steps: takes ``lower_steps``; otherwise it is a single loop, whose estimate is good once y has settled.
        lower_optimizer: accepted kind of ``lower_optimizer``: ``"any"``; ``"elementwise"``, one that treats every entry
            separately; ``"differentiable"``; ``"given gradient"``, one that asks for one gradient per step; ``"none"``.
        upper_update: its update of x, if it defines one that ``upper_optimizer`` cannot replace.
        converges: its estimate tends to the hypergradient as y and its other state settle.
        uncaptured: why ``compile`` does not compile its steps as a whole, if it does not.
        host_update: the host determines from values how x moves, so that ``compile`` compiles only the estimate.
        solves: y tends to y*(x) if x is fixed.
        responds: the estimate relies on y's response to x in the lower loss (never with ``initial``).
        doors: ways besides the losses by which the estimate lets x reach y, see "How x reaches y" in CONTRIBUTING.md.
        difference_step: name of the option that is the step of finite differences, if there is one.
        fixed_length: name of the option with which each step moves x by the length lr, if there is one.
    """

    paper: str
    family: str
    when: str
    cost: str
    second_order: bool = True
    losses: int = 2
    tasks: str = "stacked"
    kept_by_tasks: tuple[str, ...] = ()
    data: str = "any"
    initial: bool = False
    random: bool = False
    copies: bool = False
    lower_steps: bool = True
    lower_optimizer: str = "any"
    upper_update: str = ""
    converges: bool = True
    solves: bool = True
    uncaptured: str = ""
    host_update: bool = False
    responds: bool = True
    doors: frozenset[str] = frozenset()
    difference_step: str = ""
    fixed_length: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown word."""
        allowed = {
            "family": FAMILIES,
            "losses": (1, 2),
            "tasks": TASKS,
            "data": DATA,
            "lower_optimizer": LOWER_OPTIMIZERS,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"Invalid {name} value: {getattr(self, name)} (one of {values})")


# Assumptions about a method that declares nothing.
UNDECLARED = MethodInfo(paper="", family="control", when="", cost="", second_order=False)
REGISTRY: dict[str, type[Any]] = {}  # subclasses of BilevelOptimizer, which this module does not know


def register(cls: type[Any]) -> None:
    """Add a class to the methods; called when a class with its own ``declared`` is defined."""
    known = REGISTRY.setdefault(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"there is another method of the name {cls.__name__}, in {known.__module__}; methods are found by their "
            "names, so rename one of the two"
        )
    REGISTRY[cls.__name__] = cls


def methods() -> dict[str, type[Any]]:
    """Return the registered classes by name."""
    return dict(sorted(REGISTRY.items()))
