"""What a method declares of itself: the tables, the lists of the recipes and the generic tests are made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "FAMILIES",
    "REGISTRY",
    "UNDECLARED",
    "Method",
    "configurations",
    "counts",
    "lower_size",
    "methods",
    "register",
]

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

Arguments = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Method:
    """What others need to know of a method; a class has it as its attribute ``declared``, right after its docstring.

    Attributes:
        paper: such as ``"arXiv:2010.07962"``.
        family: one of `FAMILIES`.
        when: when to choose it, a clause for the tables.
        cost: oracle calls of a step in words, for the tables. T is ``lower_steps``.
        calls: the same as numbers, called with an optimizer and the number k >= 1 of the steps that it has made: the
            calls of the next one for deterministic losses and one lower problem, on average if they are random. None
            if nothing simple can be said.
        label: how recipes call it. Default: the name of the class in small letters.
        second_order: needs second derivatives of g.
        losses: 2, or 1 for minimax, ``step(loss)``.
        tasks: ``"stacked"``, each task a copy of y; ``"rows"``, y has a row for each task, which is remembered;
            ``"required"``, made for tasks alone; ``"none"``.
        data: ``"any"``, or ``"finite_sum"``: has to know the index of what it draws.
        ends: may end by itself.
        initial: its last upper parameters start the lower ones.
        random: draws random numbers of its own.
        copies: keeps several copies of x or y, so that ``vectorize`` matters without tasks too.
        lower_steps: takes ``lower_steps``; otherwise it is a single loop, whose estimate is good once y has settled.
        lower_optimizer: what ``lower_optimizer`` may be: ``"any"``; ``"elementwise"``, one that treats every entry
            alone; ``"differentiable"``; ``"given gradient"``, one that asks for one gradient per step; ``"none"``.
        converges: its estimate tends to the hypergradient as y and all else settles.
        uncaptured: why ``compile`` does not capture its steps as a whole, if it does not.
        host_update: the host decides from values how x moves, so that ``compile`` captures the estimate alone.
        solves: y tends to y*(x) where x is held.
        variants: other configurations worth testing and listing: arguments by name.
        settings: arguments that suit a standard problem, by its name; ``"problem/variant"`` for a variant, whose own
            arguments need not be repeated. Problems: ``"quadratic"``, closed form, where an estimate can be accurate;
            ``"compare"`` and ``"stochastic"``, the two lists of the recipes (`recipes.common.methods`, which says what
            else it reads there).
        elsewhere: why it is not in the list of a problem, by the name of the problem.
    """

    paper: str
    family: str
    when: str
    cost: str
    calls: Callable[[Any, int], Mapping[str, float]] | None
    label: str = ""
    second_order: bool = True
    losses: int = 2
    tasks: str = "stacked"
    data: str = "any"
    ends: bool = False
    initial: bool = False
    random: bool = False
    copies: bool = False
    lower_steps: bool = True
    lower_optimizer: str = "any"
    converges: bool = True
    solves: bool = True
    uncaptured: str = ""
    host_update: bool = False
    variants: Mapping[str, Arguments] = field(default_factory=dict)
    settings: Mapping[str, Arguments] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a word that nobody reads."""
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
        for key in self.settings:
            problem, _, variant = key.partition("/")
            if variant and variant not in self.variants:
                raise ValueError(f"Invalid settings value: {key} (there is no variant {variant!r})")
            if problem in self.elsewhere:
                raise ValueError(f"Invalid elsewhere value: {problem} (there are settings for it)")

    def configurations(self, problem: str) -> dict[str, dict[str, Any]]:
        """Arguments for a standard problem by variant, the plain method being the variant ``""``."""
        found = {}
        for key, arguments in self.settings.items():
            name, _, variant = key.partition("/")
            if name == problem:
                found[variant] = {**self.variants.get(variant, {}), **arguments}
        return found


# What is supposed of a method that says nothing of itself.
UNDECLARED = Method(paper="", family="control", when="", cost="", calls=None, second_order=False)
REGISTRY: dict[str, type[Any]] = {}  # subclasses of BilevelOptimizer, which this module does not know


def register(cls: type[Any]) -> None:
    """Add a class to the methods; a class with ``declared`` of its own is added when it is defined."""
    known = REGISTRY.setdefault(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"there is another method of the name {cls.__name__}, in {known.__module__}")
    REGISTRY[cls.__name__] = cls


def methods() -> dict[str, type[Any]]:
    """The classes that have declared themselves, by name."""
    return dict(sorted(REGISTRY.items()))


def configurations(problem: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Class and arguments of every method and variant that is made for a standard problem, by its name in the lists."""
    return {
        "-".join(filter(None, (cls.declared.label or name.lower(), variant))): (cls, arguments)
        for name, cls in methods().items()
        for variant, arguments in cls.declared.configurations(problem).items()
    }


def counts(
    *, upper: float = 0, lower: float = 0, hvp: float = 0, cross: float = 0, loss: float = 0
) -> dict[str, float]:
    """Oracle calls as `BilevelOptimizer.oracle_counts` names them."""
    return {"upper_grad": upper, "lower_grad": lower, "hvp": hvp, "jvp": cross, "loss": loss}


def lower_size(optimizer: Any) -> int:
    """The number of lower variables."""
    groups = (group for group in optimizer.param_groups if group["level"] == "lower")
    return sum(p.numel() for group in groups for p in group["params"])
