"""The headline of each paper and its outcome, in a few sentences for readers who choose a method.

An outcome is written for the verdicts of some rows. If these change, the page omits it until it is rewritten, so that
the page never claims what the records do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["COSTS", "HEADLINES", "Cost", "Headline", "headlines"]

STALE = "The verdicts have changed since this summary was written: see the rows."


class Headline(NamedTuple):
    """The claim that a paper is known for, and its outcome.

    Attributes:
        paper: such as ``"arXiv:2307.00126"``.
        name: name of its methods.
        claim: the headline.
        outcome: our result; ``{mean[row][arm]}`` is the mean score of an arm, ``{power[row][arm]}`` ten to that power.
        rows: verdicts for which the outcome was written, by row; ``" @ seconds"`` marks a verdict at equal seconds.
        missing: rows that the headline needs and that had not been run.
    """

    paper: str
    name: str
    claim: str
    outcome: str
    rows: Mapping[str, str]
    missing: tuple[str, ...] = ()


class Cost(NamedTuple):
    """Cost of running a row.

    Attributes:
        hours: estimated hours of one core.
        budget: budget with this cost. Default: None, that of the scale cpu.
        note: further remark.
    """

    hours: float
    budget: float | None = None
    note: str = ""


COSTS = {
    "000-mnist": Cost(3, 1000),
    "000-mnist-code": Cost(0, 1000, "the runs of `000-mnist`, judged by another rule"),
    "001-news": Cost(2.5, 44_000),
    **{f"001-theorem-{p}": Cost(0.35) for p in (1, 2, 4)},
    "002-libsvm-w1a": Cost(0.7),
    "002-tasks-a1a-200": Cost(3, 2_000_000),
    "003-cleaning-0.2": Cost(1),
    "003-cleaning-0.4": Cost(1),
    "003-news": Cost(1),
    "004-meta": Cost(1.7, 1500),
    "004-newsvendor-30": Cost(1, 1500),
    "004-newsvendor-shift": Cost(1, 1500),
    "004-time-tasks": Cost(0.1),
}

HEADLINES = (
    Headline(
        "arXiv:2105.02266",
        "SVRB, RSVRB",
        "Variance reduction (STORM) in every estimate makes stochastic bilevel training the fastest per sample, with "
        "one lower problem or many.",
        "**Not shown.** With one lower problem (a1a, 20,000 samples) SVRB is ahead of STABLE, TTSA, StocBiO and BSA, "
        "but plain moving averages instead of STORM are as good ({mean[002-libsvm-a1a][SVRB]:.3f} and "
        "{mean[002-libsvm-a1a][SVRB, average]:.3f} of the loss at the start; STABLE "
        "{mean[002-libsvm-a1a][stable]:.3f}), and at equal seconds StocBiO is ahead. Many lower problems: not run.",
        {"002-libsvm-a1a": "NOT DUE TO METHOD", "002-libsvm-a1a @ seconds": "FAILS"},
        ("002-libsvm-w1a", "002-tasks-a1a-200"),
    ),
    Headline(
        "arXiv:2110.07004",
        "PZOBO",
        "One random direction and no second derivatives are enough to be faster than AID and HOZOG, up to deep "
        "networks.",
        "**Fails on two small problems and on LeNet.** The method as written ends at a loss of "
        "{power[000-linear][PZOBO]:.2g} where AID has {power[000-linear][AID-CG]:.2g} (linear), and at "
        "{power[000-twolayer][PZOBO]:.2g} where AID has {power[000-twolayer][AID-FP]:.1g} (two "
        "layers, 71 % of the paper's budget, its learning rates). The version in the authors' code does beat AID at "
        "equally many gradients, but omitting the indirect term altogether is better still, and at equal seconds "
        "AID is ahead. LeNet on MNIST, 300 of the paper's 1,000 updates: test error {mean[000-mnist][PZOBO]:.1f} % as "
        "written, {mean[000-mnist][PZOBO, code]:.1f} % as in the code, {mean[000-mnist][AID-CG]:.1f} % with AID, and "
        "{mean[000-mnist][direct only]:.1f} % without an indirect term.",
        {
            "000-linear": "FAILS",
            "000-twolayer": "FAILS AT 71 % OF THE BUDGET",
            "000-linear-code": "NOT DUE TO METHOD",
            "000-linear-code @ seconds": "FAILS",
            "000-twolayer-code @ seconds": "FAILS AT 71 % OF THE BUDGET",
            "000-twolayer-code": "NOT DUE TO METHOD AT 71 % OF THE BUDGET",
            "000-mnist": "FAILS AT 30 % OF THE BUDGET",
            "000-mnist-code": "UNDECIDED",
        },
    ),
    Headline(
        "arXiv:2307.00126",
        "RAHGD, PRAHGD, PRAGDA",
        "Restarted momentum on x finds stationary points of badly conditioned problems, and leaves saddle points, with "
        "fewer calls.",
        "**Not shown.** At condition number 100 RAHGD needs about {power[003-kappa-quartic][RAHGD]:.0f} calls on one "
        "problem where AID needs {power[003-kappa-quartic][AID]:.0f}, and {power[003-kappa-quadratic][RAHGD]:.0f} "
        "against {power[003-kappa-quadratic][AID]:.0f} on the other; without momentum on x it needs "
        "{power[003-kappa-quartic][RAHGD, outer GD]:.0f} and {power[003-kappa-quadratic][RAHGD, outer GD]:.0f}. PRAGDA "
        "leaves a saddle in {power[003-saddle-near][PRAGDA]:.0f} calls (iMCN {power[003-saddle-near][iMCN]:.0f}), "
        "without momentum in {power[003-saddle-near][no momentum]:.0f}. With a fifth of the labels wrong RAHGD ends at "
        "a validation loss of {mean[003-cleaning-0.2][RAHGD]:.3f} where AID has {mean[003-cleaning-0.2][AID]:.3f} (two "
        "fifths: {mean[003-cleaning-0.4][RAHGD]:.3f}, {mean[003-cleaning-0.4][AID]:.3f}); plain descent on x has "
        "{mean[003-cleaning-0.2][RAHGD, outer GD]:.3f} ({mean[003-cleaning-0.4][RAHGD, outer GD]:.3f}), so the gain is "
        "due to the momentum of the lower steps. On 20 Newsgroups RAHGD ends at a test loss of "
        "{mean[003-news][RAHGD]:.3f} where AID has {mean[003-news][AID]:.3f}; its settings there lie at the edge of "
        "the search, so that row is undecided.",
        {
            "003-kappa-quartic": "NOT DUE TO METHOD",
            "003-kappa-quadratic": "NOT DUE TO METHOD",
            "003-saddle-near": "NOT DUE TO METHOD",
            "003-cleaning-0.2": "NOT DUE TO METHOD",
            "003-cleaning-0.4": "NOT DUE TO METHOD",
            "003-news": "UNDECIDED",
            "003-news @ seconds": "UNDECIDED",
        },
    ),
    Headline(
        "arXiv:2310.18535",
        "RT-MLMC, DL-SGD",
        "Random levels reach a stationary point with eps^-4 samples instead of eps^-6, and make an estimate about ten "
        "times cheaper.",
        "**Holds in lower steps on one small problem; the rates were not measured.** After equally many lower steps "
        "the norm of the gradient is {mean[004-p1][RT-MLMC]:.2g} with RT-MLMC and {mean[004-p1][DL-SGD]:.2g} with "
        "DL-SGD; at equal seconds DL-SGD is ahead there. An estimate of DL-SGD takes "
        "{power[004-time-newsvendor][2 levels]:.1f} times as long with 2 levels (paper: 2.5) and "
        "{power[004-time-newsvendor][8 levels]:.0f} times with 8 (13.6); with 20 tasks at once "
        "{power[004-time-tasks][6 levels]:.1f} times with 6 levels (0.97) and "
        "{power[004-time-tasks][10 levels]:.0f} times with 10 (5.0). On the newsvendor with 30 demands per context, "
        "with 200 updates, WDRO-SI has a test cost of {mean[004-newsvendor-30][WDRO-SI]:.2f}, as has ERM "
        "({mean[004-newsvendor-30][ERM]:.2f}), and WDRO {mean[004-newsvendor-30][WDRO]:.2f}; the settings of WDRO-SI "
        "lie at the edge of the search. In meta-learning with 150 updates instead of 1,500 the test loss is "
        "{mean[004-meta][RT-MLMC]:.2f} with RT-MLMC, {mean[004-meta][MAML]:.2f} with MAML and one step, and "
        "{mean[004-meta][MAML, several steps]:.2f} with MAML and more, which is too early for a verdict.",
        {
            "004-p1": "HOLDS",
            "004-p1 @ seconds": "FAILS",
            "004-time-newsvendor": "HOLDS",
            "004-time-tasks": "HOLDS",
            "004-law-levels": "HOLDS",
            "004-newsvendor-30": "UNDECIDED",
            "004-newsvendor-shift": "UNDECIDED",
            "004-meta": "UNDECIDED",
        },
    ),
    Headline(
        "arXiv:2509.02937",
        "F2SA-p",
        "Differences of order p reduce the gradient calls from eps^-6 to eps^-(4 + 2/p), so that F2SA-2 beats F2SA at "
        "the same cost.",
        "**Not decided.** A hypergradient of the same small norm takes 10^{mean[001-theorem-1][eps / 10]:.1f} calls "
        "with p = 1, 10^{mean[001-theorem-2][eps / 10]:.1f} with p = 2 and 10^{mean[001-theorem-4][eps / 10]:.1f} with "
        "p = 4. Whether they grow like eps^-6, eps^-5 and eps^-4.5 is open, since some runs did not reach the coarser "
        "accuracy. The error of the hypergradient falls like nu^p, "
        "with measured exponents {mean[001-order-1][F2SA]:.2f}, {mean[001-order-2][F2SA]:.2f}, "
        "{mean[001-order-3][F2SA]:.2f}, {mean[001-order-4][F2SA]:.2f} for p = 1 to 4. "
        "On 20 Newsgroups, with 2,000 gradients instead of 44,000, the test loss is "
        "{mean[001-news][F2SA-2]:.3f} with F2SA-2, {mean[001-news][F2SA-1, normalised]:.3f} with F2SA and steps of the "
        "same kind, {mean[001-news][F2SA-1]:.3f} with F2SA as it was published, and {mean[001-news][StocBiO]:.3f} with "
        "StocBiO; the intervals overlap.",
        {
            **{f"001-order-{p}": "HOLDS" for p in (1, 2, 3, 4)},
            "001-news": "UNDECIDED",
            "001-theorem-1": "UNDECIDED",
            "001-theorem-2": "UNDECIDED",
            "001-theorem-4": "UNDECIDED",
        },
        (),
    ),
)


def headlines(judged: Mapping[str, Mapping[str, Any]], missing: Mapping[str, str]) -> list[str]:
    """Return a table with a row for each paper: headline, outcome, and the rows that show it or were not run."""
    lines = ["| paper | its headline | our result | shown by |", "|---|---|---|---|"]
    for headline in HEADLINES:
        ids = [row for row in headline.rows if " @ " not in row]
        if not {*ids, *headline.missing} & (judged.keys() | missing.keys()):
            continue
        shown = [f"[`{row}`](#{row.replace('.', '')})" for row in (*ids, *headline.missing) if row in judged]
        shown += [f"`{row}` not run" for row in (*ids, *headline.missing) if row in missing]
        text = _outcome(headline, judged)
        lines.append(f"| {headline.paper}, {headline.name} | {headline.claim} | {text} | {', '.join(shown)} |")
    return lines


def _outcome(headline: Headline, judged: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the outcome with its figures, or `STALE` if it was written for other verdicts."""
    words = {row: found["verdict"] for row, found in judged.items()}
    words |= {f"{row} @ seconds": (found["at equal seconds"] or "").split(":")[0] for row, found in judged.items()}
    if any(words.get(row) != word for row, word in headline.rows.items()) or {*headline.missing} & judged.keys():
        return STALE
    mean = {
        row: {arm: float(score.split()[0]) for arm, score in found["scores"].items()} for row, found in judged.items()
    }
    power = {row: {arm: 10 ** min(m, 300.0) for arm, m in arms.items()} for row, arms in mean.items()}
    return headline.outcome.format(mean=mean, power=power)
