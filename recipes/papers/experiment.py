"""What an experiment is: a claim of a paper, how it is tried, and the rule by which it holds or fails."""

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
STILL = "direct only"  # the control without the indirect term, which may have nothing to move x by
JOINT = (
    *(("lr", other) for other in ("rate", "nu", "lower_lr", "lower_steps", "theta")),
    ("adam", "rate"),
    ("lower_steps", "linear_steps"),
    ("theta", "radius"),
    ("theta", "restart_radius"),
)
NOT_TUNED = "not tuned"  # what a claim about one arm says if its learning rate is given
RULES = 2  # of runs and verdicts; records that were made under others are not judged


class Trial(NamedTuple):
    """What one run is given.

    Attributes:
        make: of the arm.
        setting: chosen from the arm's grid.
        seed: of data and method.
        budget: what is to be spent.
        scale: the numbers of the scale.
        root: folder of the data sets, if given.
    """

    make: Any
    setting: dict[str, Any]
    seed: int
    budget: float
    scale: Mapping[str, Any]
    root: Path | None


@dataclass(frozen=True)
class Arm:
    """A method, or a control, with what is tuned of it.

    Attributes:
        make: what the experiment's ``run`` makes the method from.
        grid: hyper-parameters to be chosen for the least score.
        note: what differs from the paper, or is to be known.
    """

    make: Any
    grid: Mapping[str, Axis] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Better:
    """One arm has a lower score than others, and owes it to what a control lacks.

    Attributes:
        method: the arm.
        rivals: arms that it must be better than, all of them.
        control: the arm without what the claim is about, and with all else. Its part in the gain over the best rival
            decides whether the gain is due to that: at most half. Default: None, for a claim that is refuted without
            one; it cannot hold.
        without: hyper-parameters of the method that belong to what the claim is about. All others that are searched for
            the method are searched for the control.
        least: smallest difference that counts.
        speed: whether the claim is about a given budget. Otherwise it is about what is reached in the end, and the
            budget has to be enough: what the worse arm gains in its last half is less than half of the difference.
    """

    method: str
    rivals: tuple[str, ...]
    control: str | None = None
    without: tuple[str, ...] = ()
    least: float = 0.0
    speed: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        """All that are judged."""
        return tuple(dict.fromkeys((self.method, *self.rivals, *((self.control,) if self.control else ()))))


@dataclass(frozen=True, kw_only=True)
class Within:
    """The score of one arm, less that of another if there is one, lies in an interval.

    A learning rate that is given, and not searched, decides such a score as much as the method does: without a grid of
    it there is no verdict, unless the claim says that the arms are `NOT_TUNED`.
    """

    arm: str
    low: float
    high: float
    minus: str | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        """All that are judged."""
        return (self.arm, self.minus) if self.minus else (self.arm,)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A claim and how it is tried.

    Attributes:
        id: such as ``"003-saddle"``; the number is that of the paper.
        paper: such as ``"arXiv:2307.00126"``.
        figure: what of the paper.
        claim: in a sentence.
        value: the paper's value, or what its text says.
        run: makes one run; returns its curve, whose points have ``spent``, ``seconds`` and ``score``, less being
            better. The first point is the start; a run that diverged ends with an infinite score.
        arms: by name.
        rule: by which the claim holds.
        score: what the score is, in words.
        unit: what the budget counts.
        scales: for each scale ``budget``, ``seeds`` and what else ``run`` reads. ``search``: False for the middle of
            every grid instead of a search.
        target: the score of a run is the logarithm (base 10) of what was spent when the curve came down to this; of
            the whole budget if it never did. Default: None, the score of the last points.
        late: part of the budget whose points count: the score is their mean. Default: 0, the last point alone.
        whole: the paper's budget, in the same unit. Default: None, where its text has none.
        joint: pairs of hyper-parameters that the search moves together too.
        shares: shares of the budget of the first rounds of the search.
        moves: most runs beside the best setting.
        departures: from the paper, all of them.
        data: name of the folder of the data below ``--data-root``. Default: None, nothing is read.
        like: name of the experiment whose runs these are, judged by another rule. Default: its own.
        equal: pairs of arms that are the same by construction. All others have to differ.
        seconds: whether the paper counts seconds, in this figure or in its headline: then the row is judged at equal
            seconds too.
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
        """Refuse a rule about arms that there are not, and a control that is not tried at its own best setting."""
        if missing := [n for n in (*self.rule.arms, *(n for pair in self.equal for n in pair)) if n not in self.arms]:
            raise ValueError(f"{self.id}: no arm {missing[0]}")
        rule = self.rule
        if isinstance(rule, Better) and rule.control is not None:
            searched, own = ({k for k, a in self.arms[n].grid.items() if len(a.values) > 1}
                             for n in (rule.method, rule.control))  # fmt: skip
            if fixed := searched - own - {*rule.without}:
                raise ValueError(f"{self.id}: {min(fixed)} is searched for {rule.method}, but not for {rule.control}")

    def untuned(self, scale: str) -> dict[str, list[str]]:
        """Of each arm that is judged by itself, the learning rates that are given and not searched.

        What comes down to a target has one, if only in the code.
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
        """Name of the experiment whose records it uses."""
        return self.like or self.id

    def config(self, scale: str) -> dict[str, Any]:
        """All that decides the numbers, as plain data: kept beside the records, which belong to it."""
        grids = {
            name: {key: list(a.values) for key, a in arm.grid.items() if len(a.values) > 1}
            for name, arm in self.arms.items()
        }
        numbers = {**self.scales[scale], "rules": RULES}
        return {"scale": scale, **numbers, "grids": grids, "shares": list(self.shares), "moves": self.moves}

    def part(self, scale: str) -> float | None:
        """The budget as a part of the paper's."""
        return None if self.whole is None else self.scales[scale]["budget"] / self.whole
