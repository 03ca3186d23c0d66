"""Data of an experiment: a claim of a paper, how to test it, and the rule by which it holds or fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..common.search import Axis

__all__ = ["RULES", "SEARCH_SEEDS", "Arm", "Better", "Experiment", "Point", "Trial", "Within"]

Point = dict[str, Any]
SEARCH_SEEDS = (1000, 1001, 1002)  # settings are chosen with these seeds, and judged with others
RATES = ("lr", "lower_lr")
STILL = "direct only"  # the control without the indirect term, which may have no gradient in x
JOINT = (
    *(("lr", other) for other in ("rate", "nu", "lower_lr", "lower_steps", "theta")),
    ("adam", "rate"),
    ("lower_steps", "linear_steps"),
    ("theta", "radius"),
    ("theta", "restart_radius"),
)
NOT_TUNED = "not tuned"  # words of a claim about one arm whose learning rate is fixed
RULES = 2  # version of the rules for runs and verdicts; records under other rules are not judged


class Trial(NamedTuple):
    """Inputs of one run.

    Attributes:
        make: the arm's ``make``.
        setting: setting from the arm's grid.
        seed: seed of data and method.
        budget: budget to spend.
        scale: the numbers of the scale.
        root: folder of the data sets, or None.
    """

    make: Any
    setting: dict[str, Any]
    seed: int
    budget: float
    scale: Mapping[str, Any]
    root: Path | None


@dataclass(frozen=True)
class Arm:
    """Method or control, with its tuned hyper-parameters.

    Attributes:
        make: object from which the experiment's ``run`` makes the method.
        grid: hyper-parameters to choose for the least score.
        note: a departure from the paper or another remark.
    """

    make: Any
    grid: Mapping[str, Axis] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Better:
    """Rule: one arm has a lower score than others, due to a part that a control lacks.

    Attributes:
        method: the arm.
        rivals: arms that must all be worse.
        control: the arm that lacks only the part that the claim is about. The gain is due to that part if the control
            has at most half of the gain over the best rival. Default: None, for a claim that is refuted without a
            control; it cannot hold.
        without: hyper-parameters of the part that the claim is about. All others that are searched for the method must
            be searched for the control.
        least: smallest difference that counts.
        speed: True if the claim is about a given budget. Otherwise it is about the final score, and the budget must
            suffice: the worse arm gains less than half of the difference in the last half of the budget.
    """

    method: str
    rivals: tuple[str, ...]
    control: str | None = None
    without: tuple[str, ...] = ()
    least: float = 0.0
    speed: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms that are judged."""
        return tuple(dict.fromkeys((self.method, *self.rivals, *((self.control,) if self.control else ()))))


@dataclass(frozen=True, kw_only=True)
class Within:
    """Rule: the score of one arm, optionally minus that of another, lies in an interval.

    A fixed learning rate influences such a score as much as the method does. Without a grid of learning rates there is
    no verdict, unless the claim says that the arms are `NOT_TUNED`.
    """

    arm: str
    low: float
    high: float
    minus: str | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms that are judged."""
        return (self.arm, self.minus) if self.minus else (self.arm,)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Claim and its test.

    Attributes:
        id: name such as ``"003-saddle"``; the number identifies the paper.
        paper: the paper, such as ``"arXiv:2307.00126"``.
        figure: figure, theorem or table of the paper.
        claim: the claim in a sentence.
        value: the paper's value, or the words of its text.
        run: makes one run; returns its curve, whose points have ``spent``, ``seconds`` and ``score`` (less is better).
            The first point is the start; a run that diverged ends with an infinite score.
        arms: arms by name.
        rule: rule by which the claim holds.
        score: description of the score.
        unit: unit of the budget.
        scales: for each scale ``budget``, ``seeds`` and other values that ``run`` reads. ``search``: False takes the
            middle of every grid instead of a search.
        target: if set, the score of a run is the base-10 logarithm of the cost at which the curve first reaches this
            value, or of the whole budget if it never does. Default: None, the score of the last points.
        late: last part of the budget over which the score is averaged. Default: 0, the last point only.
        whole: the paper's budget, in the same unit. Default: None, if its text does not say.
        joint: pairs of hyper-parameters that the search also moves together.
        shares: shares of the budget of the first rounds of the search.
        moves: maximal number of runs of neighbours in the search.
        departures: all departures from the paper.
        data: name of the data folder below ``--data-root``. Default: None, no data are read.
        like: name of the experiment whose runs are judged here by another rule. Default: its own.
        equal: pairs of arms that are equal by construction. All others must differ.
        seconds: True if the paper counts seconds, in this figure or in its headline: the row is then also judged at
            equal seconds.
    """

    id: str
    paper: str
    figure: str
    claim: str
    value: str
    run: Callable[[Trial], list[Point]]
    arms: Mapping[str, Arm]
    rule: Better | Within
    score: str
    unit: str
    scales: Mapping[str, Mapping[str, Any]]
    target: float | None = None
    late: float = 0.0
    whole: float | None = None
    joint: tuple[tuple[str, str], ...] = JOINT
    shares: tuple[float, ...] = (0.1, 0.3)
    moves: int = 20
    departures: tuple[str, ...] = ()
    data: str | None = None
    like: str = ""
    equal: tuple[tuple[str, str], ...] = ()
    seconds: bool = False

    def __post_init__(self) -> None:
        """Raise if the rule names a missing arm, or the control is not searched for its own best setting."""
        if missing := [n for n in (*self.rule.arms, *(n for pair in self.equal for n in pair)) if n not in self.arms]:
            raise ValueError(f"{self.id}: no arm {missing[0]}")
        rule = self.rule
        if isinstance(rule, Better) and rule.control is not None:
            searched, own = ({k for k, a in self.arms[n].grid.items() if len(a.values) > 1}
                             for n in (rule.method, rule.control))  # fmt: skip
            if fixed := searched - own - {*rule.without}:
                raise ValueError(f"{self.id}: {min(fixed)} is searched for {rule.method}, but not for {rule.control}")

    def untuned(self, scale: str) -> dict[str, list[str]]:
        """Return for each arm of a `Within` rule its learning rates that are fixed and not searched.

        An arm that runs to a target has a learning rate, if only in the code.
        """
        if isinstance(self.rule, Better) or NOT_TUNED in self.claim:
            return {}
        searched = self.scales[scale].get("search", True)
        grids = {name: self.arms[name].grid for name in self.rule.arms}
        fixed = {
            name: [key for key in RATES if key in grid and not (searched and len(grid[key].values) > 1)]
            or ["learning rate"] * (self.target is not None and not {*RATES} & grid.keys())
            for name, grid in grids.items()
        }
        return {name: keys for name, keys in fixed.items() if keys}

    @property
    def source(self) -> str:
        """Name of the experiment whose records this one uses."""
        return self.like or self.id

    def config(self, scale: str) -> dict[str, Any]:
        """Return all inputs that determine the numbers, as plain data to store with the records."""
        grids = {
            name: {key: list(a.values) for key, a in arm.grid.items() if len(a.values) > 1}
            for name, arm in self.arms.items()
        }
        numbers = {**self.scales[scale], "rules": RULES}
        return {"scale": scale, **numbers, "grids": grids, "shares": list(self.shares), "moves": self.moves}

    def part(self, scale: str) -> float | None:
        """Return the budget as a fraction of the paper's."""
        return None if self.whole is None else self.scales[scale]["budget"] / self.whole
