"""The runner of the papers' experiments: records, search, verdicts, sabotage, and the page that is made from them."""

import dataclasses
import doctest
import json
import math
from functools import partial

import pytest
import torch

import bilevel_optim as bo
from recipes.common import interval, spend
from recipes.common.methods import growing_penalty
from recipes.common.records import Missing, Records
from recipes.common.search import Axis, axis, search
from recipes.papers import __main__ as program
from recipes.papers import bound, kappa, reweighting, runner, saddle, theorem, theory
from recipes.papers import headlines as summaries
from recipes.papers.catalogue import EXPERIMENTS
from recipes.papers.experiment import SEARCH_SEEDS, Arm, Better, Experiment, Trial, Within
from recipes.papers.judge import Evidence, judge
from recipes.papers.page import RESULTS, current, page, summary
from recipes.papers.runner import _Median, alike, execute, scored, summarised

RULE = Better(method="new", rivals=("old",), control="part")
FAST = dataclasses.replace(RULE, speed=True)
FLAT = dict.fromkeys(("new", "old", "part"), 0.0)


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------------------------- records


def test_records_are_made_once_and_go_on_after_an_interruption(tmp_path):
    path, made = tmp_path / "deep" / "records.jsonl", []

    def run(value):
        made.append(value)
        return {"score": value, "worst": math.inf}

    records = Records(path)
    assert records.get({"a": 1, "b": 2.0}, lambda: run(0.5)) == {"score": 0.5, "worst": math.inf}
    records.get({"a": 2}, lambda: run(0.7))
    with path.open("a") as file:
        file.write('{"unit": {"a": 3}, "res')  # cut off while it was written
    again = Records(path)
    assert again.get({"b": 2.0, "a": 1}, lambda: run(9.0)) == {"score": 0.5, "worst": math.inf}
    again.get({"a": 3}, lambda: run(0.9))
    assert made == [0.5, 0.7, 0.9]
    assert [json.loads(line)["unit"] for line in path.read_text().splitlines()] == [
        {"a": 1, "b": 2.0},
        {"a": 2},
        {"a": 3},
    ]
    assert records.get({"a": 3}, lambda: run(9.0)) == {"score": 0.9, "worst": math.inf}  # made by another process
    with pytest.raises(Missing):
        Records(path, frozen=True).get({"a": 4}, lambda: run(1.0))


# -------------------------------------------------------------------------------------------------------------- search


def test_neighbours_go_on_beyond_the_grid():
    decades = axis(0.1, 1.0, 10.0)
    assert decades.neighbours(1.0) == [10.0, 0.1]
    assert decades.neighbours(10.0) == [100.0, 1.0]
    assert decades.neighbours(100.0) == [1000.0, 10.0]
    assert decades.neighbours(1000.0) == [10000.0, 100.0]
    assert decades.neighbours(0.001) == [0.01, 0.0001]
    assert decades.neighbours(0.1) == [1.0, 0.01]
    assert axis(1, 3, least=1).neighbours(1) == [3]
    assert axis(1, 3, least=1).neighbours(3) == [9, 1]
    assert axis(0.5, 0.9, most=1.0).neighbours(0.9) == [1.0, 0.5]
    assert axis(0.5, 0.9, most=1.0).neighbours(1.0) == [0.9]
    assert axis(7.0).neighbours(7.0) == []
    assert Axis((1.0, 2.0), extends=False).neighbours(2.0) == [1.0]


def test_search_ends_where_no_neighbour_is_better():
    tried = []

    def score(setting, share):
        tried.append((share, setting["lr"], setting["steps"]))
        return (math.log10(setting["lr"]) - 3) ** 2 + (math.log2(setting["steps"]) - 2) ** 2

    found = search({"lr": axis(0.1, 1.0, 10.0), "steps": axis(1, 2, least=1)}, score, shares=(0.1,))
    assert found.setting == {"lr": 1000.0, "steps": 4}
    assert found.edges == ()
    assert sum(share == 0.1 for share, *_ in tried) == 6  # all of the grid, with a part of the budget
    assert len({t for t in tried if t[0] == 1.0}) < 16
    whole = {t[1:] for t in tried if t[0] == 1.0}
    assert {(100.0, 4), (10000.0, 4), (1000.0, 2), (1000.0, 8)} <= whole


def test_a_search_that_runs_out_names_the_edges():
    found = search({"lr": axis(1.0, 2.0)}, lambda setting, share: -setting["lr"], shares=(), moves=3)
    assert found.setting == {"lr": 16.0}
    assert found.edges == ("lr",)


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_intervals():
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), rel=1e-4)
    assert interval([1.0, 2.0, 3.0], 0.99).high == pytest.approx(2 + 9.9248 / 3**0.5, rel=1e-4)
    assert interval([5.0]) == (5.0, -math.inf, math.inf)
    assert str(interval([1.0, math.inf])) == "inf"  # of runs that diverged


SEEDS = [0.0, 0.1, -0.1, 0.05]


def at(level, wobble=0.0):
    return [level + s + wobble * (-1) ** i for i, s in enumerate(SEEDS)]


def judged(rule, levels, gains=FLAT, edges=None, **more):
    """The verdict where the three arms have scores about these levels."""
    return judge(rule, Evidence(dict(zip(("new", "old", "part"), map(at, levels), strict=True)), gains, edges or {},
                                **more))  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "gains", "edges", "rule", "word", "why"),
    [
        ((1.0, 2.0, 1.9), {}, {}, RULE, "HOLDS", "difference 1 [1, 1]"),
        ((1.0, 2.0, 1.1), {}, {}, RULE, "NOT DUE TO METHOD", "control part"),
        ((2.0, 1.0, 1.9), {}, {}, RULE, "FAILS", "difference -1"),
        ((1.0, 2.0, 1.9), {"old": 0.6}, {}, RULE, "UNDECIDED", "budget too small for old"),
        ((1.0, 2.0, 1.9), {"old": 0.6}, {}, FAST, "HOLDS", ""),
        ((2.0, 1.0, 1.9), {"new": 0.6}, {}, RULE, "UNDECIDED", "budget too small for new"),
        ((1.0, 2.0, 1.9), {}, {"old": ("lr",)}, RULE, "UNDECIDED", "lr of old at an edge"),
        ((1.0, 2.0, 1.9), {}, {"new": ("lr",)}, RULE, "HOLDS", ""),  # could only be better still
        ((2.0, 1.0, 1.9), {}, {"new": ("lr",)}, RULE, "UNDECIDED", "lr of new at an edge"),
        ((1.0, 2.0, 1.9), {}, {}, dataclasses.replace(RULE, control=None), "UNDECIDED", "no control"),
    ],
)
def test_judge(scores, gains, edges, rule, word, why):
    found = judged(rule, scores, {**FLAT, **gains}, edges)
    assert (found.word, why in found.reason) == (word, True)


def test_judge_needs_seeds_that_agree():
    scores = {"new": at(1.0), "old": at(1.05, wobble=0.5), "part": at(2.0)}
    assert judge(RULE, Evidence(scores, FLAT, {})).word == "UNDECIDED"
    two = {name: values[:2] for name, values in {"new": at(1.0), "old": at(2.0), "part": at(2.0)}.items()}
    assert judge(RULE, Evidence(two, FLAT, {})) == ("UNDECIDED", "2 seeds, fewer than 3")


def test_judge_of_an_interval():
    rule = Within(arm="new", low=1.5, high=2.5)
    assert [judge(rule, Evidence({"new": at(level)}, FLAT, {})).word for level in (2.0, 3.0, 2.5)] == [
        "HOLDS",
        "FAILS",
        "UNDECIDED",
    ]
    less = Within(arm="new", minus="old", low=1.5, high=2.5)
    assert judge(less, Evidence({"new": at(5.0), "old": at(3.0)}, FLAT, {})).word == "HOLDS"


# ------------------------------------------ the eight rules, each on records with which there was a wrong verdict


def test_gains_beyond_the_budget_do_not_count():
    """Rule 1. The last step of the old arm overshoots by half: whole it is 0, and the new arm's 2 would fail."""
    curve = [{"spent": k, "seconds": k, "steps": k, "score": 10.0 - k} for k in (0.0, 4.0, 7.0)]
    beyond = [*curve, {"spent": 15.0, "seconds": 15.0, "steps": 8, "score": 0.0}]
    assert summarised(toy(None), beyond, 10, keep=False)["score"] == 3.0
    assert summarised(toy(None), curve, 10, keep=False)["score"] == 3.0


def test_the_last_point_of_a_curve_is_within_the_budget():
    spent = [0.0]
    found = spend(lambda: spent.append(spent[-1] + 4), lambda: {"score": 100 - spent[-1]}, budget=10.0,
                  spent=lambda _: spent[-1], evaluations=2, judged=())  # fmt: skip
    assert (found["score"], found["steps"]) == (92, 2)  # measured before the step to 12
    assert [p["score"] for p in found["curve"]] == [100, 96, 92]


def test_a_setting_is_chosen_by_the_median_of_three_seeds():
    """Rule 2. With the first seed alone the fast setting is best; with the others it is bad, or diverges."""

    def lucky(trial):
        fast = trial.make == 1.0 and trial.setting["lr"] > 1
        end = falling(trial)
        if fast and trial.seed != SEARCH_SEEDS[0]:
            return [end[0], {**end[1], "score": 200.0 if trial.seed == SEARCH_SEEDS[1] else 99.9}]
        return end

    records = Records()
    outcome = execute(toy(lucky), "smoke", records)
    assert outcome.found["new"].setting == {"lr": 1.0}
    whole = [json.loads(unit) for unit in records.results]
    tried = {u["seed"] for u in whole if u["arm"] == "new" and u["setting"] == {"lr": 2.0}}
    assert tried == {*SEARCH_SEEDS}

    def once(trial):  # diverges with the last seed alone
        bad = trial.make == 1.0 and trial.setting["lr"] > 1 and trial.seed == SEARCH_SEEDS[2]
        return [*falling(trial), {**falling(trial)[-1], "score": math.inf}] if bad else falling(trial)

    assert execute(toy(once), "smoke", Records()).found["new"].setting == {"lr": 1.0}


def test_rounds_of_a_few_steps_are_blind():
    """Rule 3. Early scores mislead: the best setting of all would not come beyond the first round."""

    def score(setting, share):
        return -setting["lr"] if share == 1 else setting["lr"]

    grid = {"lr": axis(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, extends=False)}
    assert search(grid, score, shares=(0.1,), moves=0).setting == {"lr": 4.0}
    assert search(grid, score, shares=(0.1,), moves=0, blind=lambda *_: True).setting == {"lr": 64.0}

    def misled(trial):  # less is better early, more in the end; five units of budget are a step
        curve = falling(trial)
        early = trial.budget < 10
        return [{**p, "steps": p["spent"] // 2, "score": 100 - p["score"] if early else p["score"]} for p in curve]

    experiment = toy(misled)
    wide = {
        name: Arm(arm.make, {"lr": axis(1.0, 2.0, 4.0, 8.0, extends=False)}) for name, arm in experiment.arms.items()
    }
    outcome = execute(dataclasses.replace(experiment, arms=wide, moves=0), "smoke", Records())
    assert outcome.found["new"].setting == {"lr": 8.0}


def test_the_best_setting_keeps_its_score():
    """Rule 2. Asked again with two seeds, none of them better than the median, it fell behind a worse setting."""
    scores = {1.0: (5.0, 4.0, 1.0), 2.0: (4.5, 4.5, 4.5)}

    def run(setting, seed, share):
        return {"score": scores[setting["lr"]][SEARCH_SEEDS.index(seed)]}

    grid = {"lr": axis(1.0, 2.0, extends=False)}
    assert search(grid, _Median(run).median, shares=()).setting == {"lr": 2.0}
    assert search(grid, _Median(run), shares=()) == ({"lr": 1.0}, 4.0, ("lr",))


def test_the_nearest_of_settings_that_miss_a_target_is_chosen():
    """Rule 3. All have the score of the whole budget: the first was chosen, though others came nearer."""

    def run(trial):
        return [{**p, "score": p["score"] + trial.seed / 7} for p in falling(trial)]

    experiment = toy(run, target=1.0)
    slow = {name: dataclasses.replace(arm, make=arm.make / 10) for name, arm in experiment.arms.items()}
    outcome = execute(dataclasses.replace(experiment, arms=slow), "smoke", Records())
    assert outcome.scores["new"] == [1.0] * 4
    assert outcome.found["new"].setting == {"lr": 8.0}


@pytest.mark.parametrize(
    ("one", "other"),
    [("lr", "rate"), ("lr", "theta"), ("lr", "lower_steps"), ("theta", "radius"), ("theta", "restart_radius")],
)
def test_a_search_moves_two_settings_together(one, other):
    """Rule 3. A valley across the axes: each step along one of them alone is uphill."""

    def score(setting, share):
        u, v = math.log2(setting[one]), math.log2(setting[other])
        return 10 * (u - v) ** 2 + (u + v - 8) ** 2

    grid, joint = {one: axis(1.0, 2.0), other: axis(1.0, 2.0)}, toy(falling).joint
    assert search(grid, score, shares=()).setting != {one: 16.0, other: 16.0}
    assert search(grid, score, shares=(), joint=joint).setting == {one: 16.0, other: 16.0}
    stuck = search(grid, score, shares=(), joint=joint, moves=4)
    assert {*stuck.edges} == {one, other}


def test_a_tie_is_not_a_failure():
    """Rule 4. A difference of 0.01, where 0.1 counts: the method was said to fail."""
    assert judged(dataclasses.replace(RULE, least=0.1), (1.0, 1.01, 1.9)).word == "TIE"
    assert judged(dataclasses.replace(RULE, least=0.1), (1.0, 0.8, 1.9)).word == "FAILS"


def test_one_of_many_rivals_may_be_ahead_by_chance():
    """Rule 4. Ahead of the method at 95 %, alone; one of five is not."""
    ahead = [1.0 + s for s in (-0.03, -0.09, -0.06, -0.05)]
    scores = {"new": [1.0] * 4, "part": [2.0] * 4, "old": ahead}
    others = {f"old {k}": [1.02, 0.98, 1.03, 1.0] for k in range(4)}
    assert judge(FAST, Evidence(scores, FLAT, {})).word == "FAILS"
    many = dataclasses.replace(FAST, rivals=("old", *others))
    assert judge(many, Evidence({**scores, **others}, FLAT, {})).word == "UNDECIDED"


def test_a_verdict_names_its_budget():
    """Rule 5."""
    assert judged(RULE, (2.0, 1.0, 1.9), part=0.1).word == "FAILS AT 10 % OF THE BUDGET"
    assert judged(RULE, (1.0, 2.0, 1.9), part=0.045).word == "HOLDS AT 4.5 % OF THE BUDGET"
    assert judged(RULE, (2.0, 1.0, 1.9), part=1.0).word == "FAILS"
    assert judged(RULE, (2.0, 1.0, 1.9), gains={**FLAT, "new": 0.6}, part=0.1).word == "UNDECIDED"
    experiment = dataclasses.replace(toy(falling), whole=100.0)
    assert execute(experiment, "smoke", Records()).verdict.word == "HOLDS AT 10 % OF THE BUDGET"


def test_a_score_that_has_not_settled_is_not_judged():
    """Rule 6. Within its interval, and on its way out of it."""
    rule = Within(arm="new", minus="old", low=0.1, high=math.inf)
    scores = {"new": at(3.0), "old": at(2.0)}
    assert judge(rule, Evidence(scores, {"new": 0.01, "old": 0.0}, {})).word == "HOLDS"
    falling_still = judge(rule, Evidence(scores, {"new": 0.8, "old": 0.0}, {}))
    assert (falling_still.word, "not settled" in falling_still.reason) == ("UNDECIDED", True)
    assert judge(rule, Evidence(scores, {"new": 0.8, "old": 0.8}, {})).word == "HOLDS"  # the same for both


def test_an_end_of_a_closed_axis_is_an_edge():
    """Rule 6. The most steps of those offered were best, and more were not tried."""

    def score(setting, _):
        return -setting["steps"]

    assert search({"steps": axis(4, 8, 12, extends=False)}, score, shares=()).edges == ("steps",)
    assert search({"steps": axis(4, 8, 12, most=12)}, score, shares=()).edges == ()  # there is nothing beyond
    assert search({"steps": axis(4, 8, 12, extends=False)}, lambda s, _: abs(s["steps"] - 8), shares=()).edges == ()


def test_training_has_to_move_the_start():
    """Rule 7. All arms differ, and all are worse than the start, or as good: nothing was learned."""
    assert judged(RULE, (1.0, 2.0, 1.9), start=at(3.0)).word == "HOLDS"
    found = judged(RULE, (1.0, 2.0, 1.9), start=at(1.0))
    assert (found.word, "did not move" in found.reason) == ("UNDECIDED", True)
    assert judged(RULE, (2.0, 1.0, 1.9), start=at(1.0)).word == "UNDECIDED"
    assert judged(RULE, (2.0, 1.0, 1.9), start=at(2.0)).word == "FAILS"
    rule = Within(arm="new", low=0.5, high=1.5)
    assert judge(rule, Evidence({"new": at(1.0)}, FLAT, {}, at(1.0))).word == "UNDECIDED"
    assert judge(rule, Evidence({"new": at(1.0)}, FLAT, {}, at(9.0))).word == "HOLDS"
    knowing = judged(RULE, (1.0, 2.0, 1.9), start=at(3.0), ignorant=at(4.0))
    assert (knowing.word, "already knows the answer" in knowing.reason) == ("UNDECIDED", True)
    assert judged(RULE, (1.0, 2.0, 1.9), start=at(4.0), ignorant=at(3.0)).word == "HOLDS"


@pytest.mark.parametrize("arm", ["new", "old", "part"])
def test_an_arm_has_moved_if_all_of_the_interval_is_below_the_start(arm):
    """Rule 7. On the mean alone a start that is as good with some seeds would count, and so would a rise."""
    levels = dict(zip(("new", "old", "part"), (1.0, 2.0, 1.9), strict=True))
    ends = {name: at(level) for name, level in levels.items()}
    for lead, wobble, moved in ((0.3, 0.0, True), (0.3, 0.6, False), (-0.3, 0.0, False), (0.0, 0.0, False)):
        start = at(levels[arm] + lead, wobble)
        assert Evidence(ends, FLAT, {}, start).moved(arm) is moved
    falls = {arm: at(0.3)}  # of an arm that is scored by its cost, the curve decides, whatever the start
    assert Evidence(ends, FLAT, {}, at(0.0), falls=falls).moved(arm)
    assert not Evidence(ends, FLAT, {}, at(9.0), falls={arm: at(0.3, 0.6)}).moved(arm)
    assert Evidence(ends, FLAT, {}).moved(arm)  # nothing is trained


@pytest.mark.parametrize(("lead", "wobble", "known"), [(0.3, 0.0, True), (0.3, 0.6, False), (-0.3, 0.0, False)])
def test_a_start_knows_the_answer_if_all_of_the_interval_is_better_than_ignorance(lead, wobble, known):
    found = judged(RULE, (1.0, 2.0, 1.9), start=at(3.0), ignorant=at(3.0 + lead, wobble))
    assert (found.word, "already knows" in found.reason) == (("UNDECIDED", True) if known else ("HOLDS", False))


@pytest.mark.parametrize("arm", ["new", "old"])
def test_a_difference_of_which_one_arm_moves_is_judged(arm):
    """Rule 7. Both at their start prove nothing."""
    rule = Within(arm="new", minus="old", low=-1.5, high=-0.5)
    scores = {"new": at(1.0), "old": at(2.0)}
    start = [max(pair) for pair in zip(*scores.values(), strict=True)]  # only the new arm has moved
    assert judge(rule, Evidence(scores, FLAT, {}, start)).word == "HOLDS"
    still = {name: [0.0] * 4 for name in scores}
    found = judge(rule, Evidence(scores, FLAT, {}, falls=still))
    assert (found.word, "did not move new and old" in found.reason) == ("UNDECIDED", True)
    assert judge(rule, Evidence(scores, FLAT, {}, falls={**still, arm: at(0.3)})).word == "HOLDS"


def test_the_untrained_start_stands_in_the_outcome():
    outcome = execute(toy(falling), "smoke", Records())
    assert outcome.start == [float(f"{100 - seed / 7:.6g}") for seed in range(4)]


def test_a_control_is_tried_at_its_own_best_setting():
    """Rule 8. A control that is not searched, or ends at an edge, could have kept the gain."""
    experiment = toy(falling)
    fixed = {**experiment.arms, "part": Arm(0.5, {"lr": axis(1.0)})}
    with pytest.raises(ValueError, match="lr is searched for new, but not for part"):
        dataclasses.replace(experiment, arms=fixed)
    about = dataclasses.replace(RULE, without=("lr",))
    assert dataclasses.replace(experiment, arms=fixed, rule=about).rule.without == ("lr",)
    found = judged(RULE, (1.0, 2.0, 1.9), edges={"part": ("lr",)})
    assert (found.word, "of the control at an edge" in found.reason) == ("UNDECIDED", True)


def test_a_control_that_is_the_method_decides_nothing():
    """Rule 9. A control whose override did nothing keeps the whole gain: it was said not to be due to the method."""
    assert judged(RULE, (1.0, 2.0, 1.0)).word == "NOT DUE TO METHOD"
    found = judged(RULE, (1.0, 2.0, 1.0), alike=[("new", "part")])
    assert found == ("UNDECIDED", "new and part give the same numbers: they are the same method")
    assert judged(RULE, (1.0, 2.0, 1.9), alike=[("new", "shown")]).word == "HOLDS"  # an arm that is not judged
    experiment = toy(falling)
    experiment = dataclasses.replace(experiment, arms={**experiment.arms, "part": experiment.arms["new"]})
    outcome = execute(experiment, "smoke", Records())
    assert outcome.verdict.word == "UNDECIDED"
    declared = dataclasses.replace(experiment, equal=(("part", "new"), ("old", "part")))
    assert execute(declared, "smoke", Records()).verdict.word == "NOT DUE TO METHOD"
    with pytest.raises(ValueError, match="no arm typo"):
        dataclasses.replace(experiment, equal=(("new", "typo"),))


def test_arms_with_equal_scores_and_other_curves_are_not_the_same():
    """Two that never come down to the target have one score; two that stay at the start say nothing."""
    experiment = toy(falling, target=0.0)
    slow = {name: Arm(speed, {"lr": axis(1.0)}) for name, speed in (("new", 0.1), ("old", 0.2), ("part", 0.3))}
    outcome = execute(dataclasses.replace(experiment, arms=slow), "smoke", Records())
    assert outcome.scores["new"] == outcome.scores["old"] == [1.0] * 4
    assert alike(experiment, outcome.runs) == []
    still = {name: Arm(0.0, {"lr": axis(1.0)}) for name in slow}
    assert alike(experiment, execute(dataclasses.replace(experiment, arms=still), "smoke", Records()).runs) == []


def test_a_variant_that_is_not_overridden_is_refused():
    """The control of SVRB has a name of its own: a class that keeps SVRB's table, by a misspelt one, cannot be made."""
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    reweighting.Average([x], [y], lr=0.1, lower_lr=0.1, variant="average")
    misspelt = type("Misspelt", (bo.SVRB,), {"VARIANTS": reweighting.Average._VARIANTS})
    with pytest.raises(ValueError, match="variant"):
        misspelt([x], [y], lr=0.1, lower_lr=0.1, variant="average")


def test_a_slope_with_runs_that_missed_the_target_is_not_judged():
    """Their cost is at least the budget, perhaps far more: a claim about the slope was said to fail."""
    rule = Within(arm="new", minus="old", low=4.25, high=4.75)
    scores = {"new": at(8.0), "old": at(7.4)}
    assert judge(rule, Evidence(scores, FLAT, {})).word == "FAILS"
    found = judge(rule, Evidence(scores, FLAT, {}, missed={"new": 0, "old": 2}))
    assert (found.word, found.reason.split(" (")[0]) == (
        "UNDECIDED", f"2 of {len(SEEDS)} runs of old did not reach the target",
    )  # fmt: skip


def test_a_score_at_a_rate_that_was_given_is_not_judged():
    """Rule 10. A method by itself, with a learning rate that nobody searched: it was said to hold."""
    rule = Within(arm="new", minus="old", low=-math.inf, high=-0.25)
    scores = {"new": at(1.0), "old": at(2.0)}
    assert judge(rule, Evidence(scores, FLAT, {})).word == "HOLDS"
    found = judge(rule, Evidence(scores, FLAT, {}, untuned={"old": ["lr"]}))
    assert (found.word, found.reason.startswith("lr of old not tuned")) == ("UNDECIDED", True)

    def run(trial):
        return [{"spent": 0.0, "seconds": 0.0, "score": trial.make * trial.setting.get("lr", 1.0) + trial.seed / 70}]

    def words(grid, claim="", **numbers):
        arms = {"new": Arm(1.0, grid), "old": Arm(2.0, grid)}
        experiment = dataclasses.replace(toy(run), rule=rule, arms=arms, claim=claim, equal=())
        scales = {"smoke": {**experiment.scales["smoke"], **numbers}}
        outcome = execute(dataclasses.replace(experiment, scales=scales), "smoke", Records())
        return {outcome.verdict.word}

    given, searched = {"lr": axis(1.0)}, {"lr": axis(1.0, 2.0, least=1.0)}
    assert words(given) == {"UNDECIDED"}
    assert words(searched) == {"HOLDS"}
    assert words(searched, search=False) == {"UNDECIDED"}
    assert words(given, claim="old is above new, both not tuned") == {"HOLDS"}
    assert words({"theta": axis(0.1)}) == words({}) == {"HOLDS"}  # no learning rate
    hidden = dataclasses.replace(toy(run, target=1.5), rule=rule, equal=())
    bare = {name: Arm(speed, {"theta": axis(0.1)}) for name, speed in (("new", 1.0), ("old", 2.0))}
    hidden = dataclasses.replace(hidden, arms=bare)  # comes down to a target at a rate that stands in the code
    assert hidden.untuned("smoke") == {"new": ["learning rate"], "old": ["learning rate"]}
    assert dataclasses.replace(hidden, claim="not tuned").untuned("smoke") == {}
    theorem_2 = EXPERIMENTS["001-theorem-2"]
    assert dataclasses.replace(theorem_2, claim="").untuned("cpu").keys() == {"eps", "eps / 10"}
    assert not any(row.untuned("cpu") for row in EXPERIMENTS.values())


def test_arms_that_do_not_move_prove_nothing():
    """Rule 11. A control that stays at its start, or rivals that end above it: the claim was said to hold."""
    rivals = dataclasses.replace(RULE, rivals=("old", "older"))

    def word(start, old=2.0, older=2.1, part=1.9, control="part"):
        levels = {"new": 1.0, "old": old, "older": older, control: part}
        rule = dataclasses.replace(rivals, control=control)
        scores = {name: at(level, 0.01 * k) for k, (name, level) in enumerate(levels.items())}
        return judge(rule, Evidence(scores, dict.fromkeys(levels, 0.0), {}, at(start)))

    assert word(5.0).word == "HOLDS"
    cases = {"part": {"part": 5.0}, "older": {"older": 6.0}, "old": {"old": 6.0, "older": 7.0}}
    for who, levels in cases.items():
        found = word(5.0, **levels)
        assert (found.word, found.reason.split(" from")[0]) == ("UNDECIDED", f"training did not move {who}")
    assert word(5.0, part=5.0, control="direct only").word == "HOLDS"  # it has nothing to move x by
    assert word(5.0, older=6.0, part=1.1).word == "NOT DUE TO METHOD"  # whatever becomes of the rival further behind
    assert word(5.0, old=6.0, older=7.0, part=1.1).word == "UNDECIDED"
    tie = dataclasses.replace(RULE, least=0.1)
    assert judged(tie, (1.0, 1.0, 1.9), start=at(3.0)).word == "TIE"
    assert judged(tie, (1.0, 1.0, 1.9), start=at(1.0)).word == "UNDECIDED"


def test_arms_that_never_reach_a_target_may_have_moved():
    """Rule 11 by the curves: the score of such an arm is the whole budget, as that of the start is."""
    experiment = toy(falling, target=59.9)
    arms = {name: Arm(speed, {"lr": axis(1.0)}) for name, speed in (("new", 5.0), ("old", 2.0), ("part", 1.0))}
    outcome = execute(dataclasses.replace(experiment, arms=arms), "smoke", Records())
    assert outcome.scores["old"] == outcome.start == [1.0] * 4
    assert outcome.verdict.word == "HOLDS"
    stuck = {**arms, "old": Arm(0.0, {"lr": axis(1.0)})}
    found = execute(dataclasses.replace(experiment, arms=stuck), "smoke", Records()).verdict
    assert (found.word, "did not move old" in found.reason) == ("UNDECIDED", True)


def test_one_trajectory_is_not_several_seeds():
    """Rule 12. No seed changes anything, so that the interval has no width: it was said to hold, to fail or to tie."""

    def word(rule, new, old, part=(1.9, 1.8, 2.0)):
        return judge(rule, Evidence({"new": new, "old": old, "part": part}, FLAT, {})).word

    one, two, spread = (1.0,) * 3, (2.0,) * 3, (1.9, 2.1, 2.0)
    assert word(RULE, one, two) == word(RULE, two, one) == word(dataclasses.replace(RULE, least=3), one, two)
    assert word(RULE, one, two) == word(Within(arm="new", low=0, high=3), one, two) == "UNDECIDED"
    assert word(Within(arm="new", minus="old", low=-3, high=0), one, two) == "UNDECIDED"
    assert word(Within(arm="new", low=2, high=3), one, two) == "FAILS"  # nothing at all, such as the slope of no term
    assert word(RULE, one, spread) == word(RULE, (1.0, 1.1, 0.9), two) == "HOLDS"  # one that never comes to a target
    assert word(RULE, two, (1.0, 1.1, 0.9)) == "FAILS"


def test_seconds_are_judged_where_the_paper_counts_them():
    """Rule 13. A control that takes no time ended every arm at its start: whatever was tried, there was a tie."""

    def run(trial):
        quick = 0.0 if trial.make == 0.5 else 1.0
        return [{**p, "seconds": quick * p["seconds"]} for p in falling(trial)]

    experiment = dataclasses.replace(toy(run), rule=dataclasses.replace(RULE, least=0.1))
    arms = {**experiment.arms, "old": Arm(0.25, experiment.arms["old"].grid)}
    experiment = dataclasses.replace(experiment, arms=arms, equal=())
    assert execute(experiment, "smoke", Records()).timed is None
    outcome = execute(dataclasses.replace(experiment, seconds=True), "smoke", Records())
    assert outcome.verdict.word == "HOLDS"
    assert (outcome.timed.word, "did not move new and old" in outcome.timed.reason) == ("UNDECIDED", True)
    of_time = {name.rsplit("-", 1)[0] for name, e in EXPERIMENTS.items() if e.seconds}
    assert of_time == {"000", "000-linear", "000-mnist", "000-twolayer", "002-libsvm", "002-tasks-a1a", "003", "004"}


def test_early_rounds_go_by_the_median_too():
    """Rule 2, in the rounds with a part of the budget: the first seed likes slow settings, the other two the fast."""

    def lucky(trial):
        early, first = trial.budget < 10, trial.seed == SEARCH_SEEDS[0]
        rate = 1 / trial.setting["lr"] if early and first else trial.setting["lr"]
        return falling(trial._replace(setting={"lr": rate}))

    wide = {n: Arm(a.make, {"lr": axis(1.0, 2.0, 4.0, 8.0, extends=False)}) for n, a in toy(None).arms.items()}
    found = execute(dataclasses.replace(toy(lucky), arms=wide, moves=0), "smoke", Records()).found
    assert found["new"].setting == {"lr": 8.0}


# -------------------------------------------------------------------------------------------------------------- runner


def toy(run, **fields):
    """The score falls by the rate at each unit of budget; the control is half as fast."""
    arms = {
        name: Arm(speed, {"lr": axis(1.0, 2.0, most=8.0)})
        for name, speed in (("new", 1.0), ("old", 0.5), ("part", 0.5))
    }
    return Experiment(
        id="toy", paper="", figure="", claim="", value="", run=run, arms=arms, score="", unit="", shares=(0.5,),
        rule=RULE, scales={"smoke": {"budget": 10, "seeds": 4}}, equal=(("old", "part"),), **fields,
    )  # fmt: skip


def falling(trial, calls=None):
    if calls is not None:
        calls.append((trial.make, trial.setting["lr"], trial.seed, trial.budget))
    rate = trial.make * trial.setting["lr"]
    return [
        {"spent": k, "seconds": k / 10, "score": 100 - rate * k - trial.seed / 7} for k in range(int(trial.budget) + 1)
    ]


def test_an_interrupted_experiment_gives_the_same_records(tmp_path):
    whole, parts = Records(tmp_path / "whole.jsonl"), tmp_path / "parts.jsonl"
    expected = execute(toy(falling), "smoke", whole)
    assert expected.found["new"].setting == {"lr": 8.0}

    def failing(trial):
        if made and len(made) % 5 == 0:
            made.append(None)
            raise KeyboardInterrupt
        made.append(None)
        return falling(trial)

    made, interruptions = [], 0
    while True:
        try:
            found = execute(toy(failing), "smoke", Records(parts))
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions > 3
    assert parts.read_text() == whole.path.read_text()
    assert found == expected
    assert execute(toy(None), "smoke", Records(parts, frozen=True)) == expected


def test_settings_are_chosen_with_other_seeds_than_they_are_judged_with():
    calls = []
    outcome = execute(toy(partial(falling, calls=calls)), "smoke", Records())
    assert {seed for *_, seed, _ in calls} == {*SEARCH_SEEDS, 0, 1, 2, 3}
    assert all(budget == 10 for *_, seed, budget in calls if seed not in SEARCH_SEEDS)
    assert outcome.verdict.word == "HOLDS"
    assert len(outcome.scores["new"]) == 4


def test_a_verdict_needs_the_arms_of_its_rule_alone(tmp_path):
    path = tmp_path / "records.jsonl"
    experiment = toy(falling)
    execute(experiment, "smoke", Records(path))
    more = dataclasses.replace(experiment, arms={**experiment.arms, "shown": Arm(2.0, {"lr": axis(1.0)})})
    found = execute(more, "smoke", Records(path, frozen=True))
    assert (found.verdict.word, "shown" in found.scores) == ("HOLDS", False)
    with pytest.raises(Missing):
        execute(dataclasses.replace(more, rule=dataclasses.replace(RULE, rivals=("old", "shown"))), "smoke",
                Records(path, frozen=True))  # fmt: skip


def test_the_penalty_grows():
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = growing_penalty(bo.F2SA([x], [y], lr=0.0, lower_lr=0.1, lower_steps=1, order=1, nu=0.1))
    for _ in range(127):
        optimizer.step(lambda: y.sum(), lambda: (y - x).square().sum())
    assert optimizer.nu == pytest.approx(0.05)  # 128 = 2^7


def test_scores_of_curves():
    experiment = toy(falling, late=0.5)
    curve = [{"spent": k, "seconds": k / 2, "score": 10.0 - k} for k in range(6)]
    assert scored(experiment, curve, "spent", 4) == 6.5  # of the budget spent beyond 2
    assert scored(experiment, curve, "seconds", 1) == 8
    assert scored(toy(falling), curve, "spent", 3.5) == 7
    target = toy(falling, target=6.0)
    assert scored(target, curve, "spent", 100) == pytest.approx(math.log10(4))
    assert scored(target, curve[:3], "spent", 100) == 2  # never: the whole budget


def test_a_diverged_run_has_the_score_of_its_start():
    def diverging(trial):
        curve = falling(trial)
        return [*curve[:3], {**curve[2], "score": math.inf}] if trial.make == 1.0 and trial.setting["lr"] > 1 else curve

    outcome = execute(toy(diverging), "smoke", Records())
    assert outcome.found["new"].setting == {"lr": 1.0}

    def always(trial):
        return [*falling(trial)[:1], {**falling(trial)[0], "score": math.inf}] if trial.make == 1.0 else falling(trial)

    outcome = execute(toy(always), "smoke", Records())
    assert outcome.scores["new"] == outcome.start == [float(f"{100 - seed / 7:.6g}") for seed in range(4)]
    assert outcome.verdict.word == "FAILS"


# ------------------------------------------------------------------------------------- the experiments, and their pages


def small(experiment, **numbers):
    """At the scale smoke, with fewer arms: those of the rule."""
    scale = {**experiment.scales["smoke"], **numbers}
    arms = {name: experiment.arms[name] for name in experiment.rule.arms}
    return dataclasses.replace(experiment, arms=arms, scales={"smoke": scale})


def words(experiment, *sabotaged):
    """The verdict as it is, and with each of several arms in place of the method."""
    records, method = Records(), experiment.rule.arms[0]
    found = [execute(experiment, "smoke", records).verdict.word]
    others = {unit: result for unit, result in records.results.items() if json.loads(unit)["arm"] != method}
    for arm in sabotaged:
        records.results = dict(others)
        changed = dataclasses.replace(experiment, arms={**experiment.arms, method: arm})
        found.append(execute(changed, "smoke", records).verdict.word)
    return found


class Uphill(bo.RAHGD):
    """A wrong sign."""

    def update(self, x, gradient, given):
        return super().update(x, gradient * -1.0, given)


class Blind(bo.FirstOrder):
    """No indirect term."""

    def __init__(self, *levels, lr, lower_lr, lower_steps, generator=None, check_finite=True, **_):
        super().__init__(
            *levels, lr=lr, lower_lr=lower_lr, lower_steps=lower_steps, generator=generator, check_finite=check_finite
        )


@pytest.mark.slow
def test_sabotage_turns_the_verdict_on_badly_conditioned_problems():
    experiment = EXPERIMENTS["003-kappa-quartic"]
    rule = dataclasses.replace(experiment.rule, rivals=("AID",))  # ITD needs equally many calls with each seed
    chosen = {"lr": axis(1.0), "lower_steps": axis(30), "linear_steps": axis(12), "theta": axis(0.1)}
    arms = {
        name: dataclasses.replace(arm, grid={key: chosen[key] for key in arm.grid})
        for name, arm in experiment.arms.items()
    }
    experiment = small(dataclasses.replace(experiment, rule=rule, arms=arms))
    grid = experiment.arms["RAHGD"].grid

    def uphill(x, y, *, kappa, theta, **options):
        return Uphill(x, y, momentum=1 - theta, on_converged="continue", **options)

    def blind(x, y, *, kappa, theta, linear_steps, **options):
        return Blind(x, y, **options)

    found, *wrong = words(experiment, Arm(uphill, grid), Arm(blind, grid))
    assert found in ("HOLDS", "NOT DUE TO METHOD")
    assert wrong == ["FAILS", "FAILS"]


@pytest.mark.parametrize("searched", [("lr", "lower_lr"), pytest.param(None, marks=pytest.mark.slow)])
def test_sabotage_turns_the_verdict_on_the_saddle(searched):
    """With the rates searched alone, or all settings."""
    experiment = small(saddle.EXPERIMENTS[0], budget=300)
    if searched:
        arms = {
            name: dataclasses.replace(
                arm, grid={key: a if key in searched else axis(a.values[1]) for key, a in arm.grid.items()}
            )
            for name, arm in experiment.arms.items()
        }
        experiment = dataclasses.replace(experiment, arms=arms)
    grid = experiment.arms["PRAGDA"].grid

    def upside_down(x, y, **options):
        optimizer = saddle.pragda(x, y, **options)
        step = optimizer.step
        optimizer.step = lambda loss: step(lambda: -loss())
        return optimizer

    unmoved = Arm(partial(saddle.pragda, theta=1.0), {key: a for key, a in grid.items() if key != "theta"})
    found, wrong, without = words(experiment, Arm(upside_down, grid), unmoved)
    assert (found, wrong) == ("HOLDS", "FAILS")
    assert without != "HOLDS"


def test_sabotage_by_a_leaked_start_turns_the_verdict():
    """If the start is the solution, every method has it at once, and there is no verdict."""
    experiment = small(saddle.EXPERIMENTS[0], budget=500)
    at_minimum = dataclasses.replace(experiment, run=partial(saddle.run, start=(0.0, 0.0, 0.6)))
    assert execute(at_minimum, "smoke", Records()).verdict.word == "UNDECIDED"  # it is HOLDS from the usual start


@pytest.mark.slow
def test_sabotage_of_the_control_is_refused(monkeypatch):
    """A control that is the method says that nothing is due to it, and one that stands still that all is."""
    experiment = small(saddle.EXPERIMENTS[0], budget=500)
    grid = experiment.arms["no momentum"].grid

    def frozen(x, y, **options):
        optimizer = saddle.pragda(x, y, theta=1.0, **options)
        step, place = optimizer.step, x[0].detach().clone()

        def back(loss):
            step(loss)
            with torch.no_grad():
                x[0].copy_(place)

        optimizer.step = back
        return optimizer

    controls = {"same": experiment.arms["PRAGDA"], "still": Arm(frozen, grid)}
    records = {name: Records() for name in controls}  # their runs are judged twice

    def found(name):
        arms = {**experiment.arms, "no momentum": controls[name]}
        return execute(dataclasses.replace(experiment, arms=arms), "smoke", records[name]).verdict

    assert found("same") == ("UNDECIDED", "PRAGDA and no momentum give the same numbers: they are the same method")
    refused = found("still")
    assert (refused.word, "did not move no momentum" in refused.reason) == ("UNDECIDED", True)
    monkeypatch.setattr(runner, "alike", lambda *_: [])
    monkeypatch.setattr(Evidence, "moved", lambda *_: True)
    assert [found("same").word, found("still").word] == ["NOT DUE TO METHOD", "HOLDS"]  # the earlier verdicts


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sabotage_turns_the_verdict_on_the_order_of_the_error(all_of_them):
    def first_order(x, y, **options):
        return bo.F2SA(x, y, order=1, **options)

    def opposite(x, y, **options):
        optimizer = bo.F2SA(x, y, order=2, **options)
        backward = optimizer.backward
        optimizer.backward = lambda upper, lower: backward(lambda: -upper(), lower)
        return optimizer

    def direct(x, y, nu, **options):  # no indirect term
        return bo.FirstOrder(x, y, **options)

    wrong = [first_order, opposite, direct] if all_of_them else [first_order]
    found = words(EXPERIMENTS["001-order-2"], *map(Arm, wrong))
    assert found == ["HOLDS", *["FAILS"] * len(wrong)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["000-linear", "001-news", "002-libsvm-a1a", "004-p1", "004-newsvendor-30"])
def test_experiments_run_and_the_same_seed_gives_the_same_numbers(name):
    numbers = {"seeds": 1, "budget": EXPERIMENTS[name].scales["smoke"]["budget"] / 10, "evaluations": 1}
    experiment = small(EXPERIMENTS[name], **numbers)
    first, second = (execute(experiment, "smoke", Records()) for _ in range(2))
    assert first.scores == second.scores
    assert alike(experiment, first.runs) == []
    assert all(math.isfinite(s) for scores in first.scores.values() for s in scores)
    assert first.verdict.word == "UNDECIDED"
    assert len(first.scores) == len(experiment.rule.arms)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "share"),
    [  # of the budget of the scale smoke: a few steps of most arms
        ("000-mnist", 0.5),
        ("000-news", 0.5),
        ("000-solver", 0.5),
        ("000-esmaml", 0.25),
        ("001-bound-2", 0.25),
        ("001-theorem-2", 1),
        ("002-tasks-a1a-200", 0.5),
        ("003-cleaning-0.2", 1),
        ("003-kappa-quartic", 0.25),
        ("003-saddle-near", 0.25),
        ("004-meta", 0.25),
    ],
)
def test_no_two_arms_are_the_same(name, share):
    """Like the test above, for rows with other arms: one seed, the settings in the middle of their grids."""
    budget = share * EXPERIMENTS[name].scales["smoke"]["budget"]
    experiment = small(EXPERIMENTS[name], seeds=1, budget=budget, evaluations=1)
    assert alike(experiment, execute(experiment, "smoke", Records()).runs) == []


def test_every_experiment_has_what_the_page_says_of_it():
    for experiment in EXPERIMENTS.values():
        assert experiment.departures
        assert {"smoke", "cpu", "full"} == experiment.scales.keys()
        assert experiment.scales["cpu"]["seeds"] >= 3
        json.dumps(experiment.config("cpu"))


def test_the_page_says_what_the_records_say():
    assert (RESULTS.parent / "RESULTS.md").read_text() == page(EXPERIMENTS.values())
    judged = sorted(RESULTS.glob("*/verdict.json"))
    assert judged
    for path in judged:
        experiment = EXPERIMENTS[path.parent.name]
        records = Records(current(experiment, RESULTS), frozen=True)
        found = summary(experiment, execute(experiment, "cpu", records))
        assert json.loads(path.read_text()) == json.loads(json.dumps(found))
        config = json.loads((RESULTS / experiment.source / "config.json").read_text())
        assert config["config"] == json.loads(json.dumps(experiment.config("cpu")))


def test_a_headline_matches_the_current_verdicts():
    """A sentence that was written for other verdicts, at equal seconds too, is left out, not repeated."""
    first = summaries.HEADLINES[0]
    arms = {name: f"{k / 10} [0, 1]" for k, name in enumerate(("SVRB", "SVRB, average", "stable"), 3)}
    row = {"verdict": "NOT DUE TO METHOD", "at equal seconds": "FAILS: why", "scores": arms}
    missing = dict.fromkeys(first.missing, "not run")
    table = summaries.headlines({"002-libsvm-a1a": row}, missing)
    assert len(table) == 3
    assert "0.300 and 0.400 of the loss" in table[2]
    assert "[`002-libsvm-a1a`](#002-libsvm-a1a), `002-libsvm-w1a` not run" in table[2]
    for change in ({"verdict": "HOLDS"}, {"at equal seconds": "TIE: why"}):
        assert summaries.STALE in summaries.headlines({"002-libsvm-a1a": {**row, **change}}, missing)[2]
    assert summaries.STALE in summaries.headlines({}, {"002-libsvm-a1a": "not run", **missing})[2]
    known = summaries.headlines({"002-libsvm-a1a": row, "002-libsvm-w1a": row}, {})[2]
    assert summaries.STALE in known  # a missing row has been run


def test_the_page_begins_with_the_five_headlines_and_ends_with_what_was_not_run():
    text = (RESULTS.parent / "RESULTS.md").read_text()
    assert text.count("| arXiv:") == len({e.paper for e in EXPERIMENTS.values()}) == len(summaries.HEADLINES) == 5
    assert summaries.STALE not in text
    named = {row.split(" @ ")[0] for h in summaries.HEADLINES for row in (*h.rows, *h.missing)}
    assert (named | summaries.COSTS.keys()) <= EXPERIMENTS.keys()
    missing = text.split("## Not run")[1].split("## Row by row")[0]
    for name in EXPERIMENTS:
        (line,) = [s for s in text.splitlines() if s.startswith((f"* `{name}`: ", f"| [`{name}`]("))]
        assert (line in missing) == (" Cost: " in line)
        assert (f"run {name}" in line) == (line in missing)


def test_the_program(tmp_path, capsys, monkeypatch):
    program.main(["list"])
    assert "003-saddle-near" in capsys.readouterr().out
    given = ["run", "001-order-1", "--scale", "smoke", "--out", str(tmp_path)]
    program.main([*given, "--arms", "none"])
    assert capsys.readouterr().out == ""
    program.main(given)
    assert "3 new runs" in capsys.readouterr().out
    folder = tmp_path / "001-order-1"
    assert {p.name for p in folder.iterdir()} == {"config.json", "curves.png", "records.jsonl", "verdict.json"}
    program.main(given)
    assert "0 new runs" in capsys.readouterr().out
    (folder / "config.json").write_text('{"config": {}}')
    with pytest.raises(SystemExit, match="other inputs"):
        program.main(given)
    with pytest.raises(SystemExit):
        program.main(["run", "nothing"])
    written = page([EXPERIMENTS["001-order-1"], EXPERIMENTS["001-order-2"]], tmp_path, "smoke")
    assert "**HOLDS**" in written
    assert "not run" in written
    assert kappa.TARGET < 1


def test_the_hard_instance_hides_its_chain():
    """At zero the first coordinate alone has a slope; unseen ones are seen by chance, without a bias."""
    chain = bound.Chain(4, 0.25, seed=0)
    zero = torch.zeros(4, dtype=torch.float64)
    assert chain.slope(zero).tolist() == pytest.approx([-math.exp(0.5), 0, 0, 0])
    u = torch.tensor([1.2, 0.9, 0.1, 0.0], dtype=torch.float64)
    exact = chain.slope(u)
    assert exact[2] != 0  # the third is next
    assert exact[3] == 0
    torch.manual_seed(0)
    drawn = torch.stack([chain.noisy(u) for _ in range(500)])
    assert torch.equal(drawn[:, :2], exact[:2].expand(500, 2))
    assert set((drawn[:, 2] / exact[2]).tolist()) == {0.0, 4.0}
    assert float(drawn[:, 2].mean() / exact[2]) == pytest.approx(1, abs=0.15)
    basis = chain.basis.T @ chain.basis
    assert torch.allclose(basis, torch.eye(4, dtype=torch.float64))
    assert chain.norm() > bound.STATIONARY


@pytest.mark.parametrize("order", [1, 2, 4])
def test_no_accuracy_comes_without_a_small_nu(order):
    """At the solution, without noise, the error of the hypergradient is of the order of nu^p, and not zero."""
    errors = []
    for nu in (0.1, 0.05):
        problem = theorem.Quadratic(seed=0)
        with torch.no_grad():
            problem.x.copy_(-problem.b / problem.F)
            problem.y.copy_(problem.x)
        assert problem.norm() < 1e-12
        optimizer = bo.F2SA([problem.x], [problem.y], lr=0.1, lower_lr=0.4, lower_steps=60, order=order, nu=nu)
        optimizer.backward(problem.upper, problem.lower)
        errors.append(float(problem.x.grad.norm()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.2)
    assert errors[0] > 0.1**order / 10


@pytest.mark.slow
def test_calls_grow_less_with_a_higher_order():
    exponents = []
    for order in (1, 4):
        experiment = small(EXPERIMENTS[f"001-theorem-{order}"], seeds=2)
        outcome = execute(experiment, "smoke", Records())
        assert not any(r.get("reached") is False for runs in outcome.runs.values() for r in runs)
        coarse, fine = (sum(outcome.scores[name]) / 2 for name in ("eps", "eps / 10"))
        exponents.append((fine - coarse) / math.log10(2))  # the scale smoke has eps / 2
    assert exponents[0] - exponents[1] > 0.75
    assert exponents == pytest.approx([6, 4.5], abs=1)


def test_too_much_noise_is_given_up():
    experiment = EXPERIMENTS["001-theorem-2"]
    scale = experiment.scales["smoke"]
    trial = Trial(experiment.arms["eps"].make, {"nu": 1.0, "batch": 1e-3}, 0, 1e15, scale, None)
    first, last = theorem.run(trial)
    assert first["score"] == pytest.approx(2)  # in units of eps = 0.5
    assert last["score"] > 1
    assert last["steps"] < scale["steps"] / 0.25
    enough = theorem.run(trial._replace(setting={"nu": 1.0, "batch": 2.0}))[-1]
    assert enough["score"] <= 1
    nu, batch = theorem.shape(2, 0.5)
    assert batch == pytest.approx(1 / (nu * 0.5) ** 2)
    # two copies, three lower steps and the difference: gradients of f and of g, each of a batch
    assert enough["spent"] == pytest.approx(enough["steps"] * 2 * (3 + 1) * 2 * 2 * batch)


def test_examples_of_the_theorems_constants():
    assert doctest.testmod(theory).attempted == 7
    assert not doctest.testmod(theory).failed
