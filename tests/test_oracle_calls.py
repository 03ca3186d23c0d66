"""Oracle calls of a step as numbers, which ``declared.cost`` puts in words: steps make them."""

import math

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.hypergradient.finite_difference import stencil
from bilevel_optim.optimizer.declaration import methods

from .problems import Quadratic
from .registry import ROWS

TERMS = {"BSA": 1, "TTSA": 1, "SUSTAIN": 2}  # evaluations of a term of random length


def counts(*, upper=0, lower=0, hvp=0, cross=0, loss=0):
    """Oracle calls as `BilevelOptimizer.oracle_counts` names them."""
    return {"upper_grad": upper, "lower_grad": lower, "hvp": hvp, "jvp": cross, "loss": loss}


def implicit(o, k):
    beginning = {"neumann": 0, "fixed_point": o.warm_start - 1}.get(o.linear_solver, o.warm_start)
    products = 12 if o.linear_solver == "direct" else o.linear_steps + beginning + o.check_finite
    return counts(upper=1, lower=o.lower_steps + 1, hvp=products, cross=1)


def unrolled(o, k):
    products = o.lower_steps if o.truncate is None else min(o.lower_steps, o.truncate)
    return counts(upper=1, lower=o.lower_steps * (1 + o.checkpoint), hvp=products, cross=products)


def bome(o, k):
    again = o.lower_steps + 2 if o.barrier == "value" else 1
    return counts(upper=o.joint_steps, lower=o.lower_steps + 2 + (o.joint_steps - 1) * again)


def f2sa(o, k):
    nodes = stencil(o.order, o.stencil).nodes
    steps = o.lower_steps + 1
    return counts(upper=sum(j != 0 for j in nodes) * steps, lower=len(nodes) * steps, loss=0 in nodes)


def paths(o):
    return 1 + o.directions * (1 + (o.difference == "central"))


def es_maml(o, k):
    steps, pairs = o.lower_steps * paths(o), o.lower_directions
    return counts(loss=paths(o) + 2 * pairs * steps) if pairs else counts(lower=steps, loss=paths(o))


def restarted(o, k):
    return counts(upper=1, lower=o.lower_steps + 1, hvp=o.linear_steps + o.warm_start + o.check_finite, cross=1)


def accelerated(o, k):
    newton = o.newton_correction
    return counts(upper=1, lower=o.lower_steps + newton, hvp=newton * (o.linear_steps + o.check_finite), cross=newton)


def cubic(o, k):
    products = (o.cubic_steps + 2) * (o.linear_steps + 2)
    return counts(upper=1, lower=o.lower_steps, hvp=products, cross=products)


def vrbo(o, k):
    if k % o.period == 0 or not o.warm_start:
        n = o.anchor_batches
        lower = 2 * o.lower_steps + (n if o.warm_start else 2 * (n - 1))
        return counts(upper=n, lower=lower, hvp=n * o.linear_steps, cross=n)
    n = 2 * (o.lower_steps + 1)
    return counts(upper=n, lower=n, hvp=n * o.linear_steps, cross=n)


def srba(o, k):
    n = 1 + (k % (o.period or 1) > 0)
    return counts(upper=n, lower=n, hvp=n, cross=n)


def tracked(o, k):
    size = sum(p.numel() for group in o.param_groups if group["level"] == "lower" for p in group["params"])
    products = 2 * size if o._trackers.apart else 2
    return counts(upper=2, lower=2, hvp=products, cross=products)


# Called with an optimizer that has made k >= 1 steps: the calls of its next one, for deterministic losses and one lower
# problem; on average if they are random.
CALLS = {
    **dict.fromkeys(("AID", "PAID", "iMAML"), implicit),
    **dict.fromkeys(("ITD", "MAML", "ANIL"), unrolled),
    **dict.fromkeys(("RAHGD", "PRAHGD"), restarted),
    **dict.fromkeys(("RAGDA", "PRAGDA"), accelerated),
    **dict.fromkeys(("SVRB", "RSVRB", "BSVRB", "STABLE"), tracked),
    **dict.fromkeys(("SOBA", "SABA"), lambda o, k: counts(upper=1, lower=1, hvp=1, cross=1)),
    **dict.fromkeys(("FirstOrder", "FOMAML"), lambda o, k: counts(upper=1, lower=o.lower_steps)),
    "AmIGO": lambda o, k: counts(upper=1, lower=o.lower_steps, hvp=o.linear_steps - 1 + o.warm_start, cross=1),
    "BA": lambda o, k: counts(
        upper=1,
        lower=math.ceil(o._scale * (k + 1) ** o.growth) + 1,
        hvp=o.linear_steps + o.warm_start + o.check_finite,
        cross=1,
    ),
    "BOME": bome,
    "BSA": lambda o, k: counts(
        upper=1, lower=math.ceil(o._scale * (k + 1) ** o.growth), hvp=(o.linear_steps - 1) / 2, cross=1
    ),
    "ESMAML": es_maml,
    "F2SA": f2sa,
    "FSLA": lambda o, k: counts(upper=3, lower=1, hvp=o.warm_start, cross=2),
    "GDA": lambda o, k: counts(upper=1, lower=max(o.lower_steps - o.simultaneous, 0)),
    "HOZOG": lambda o, k: counts(lower=o.lower_steps * paths(o), loss=paths(o)),
    "MRBO": lambda o, k: counts(upper=2, lower=2, hvp=2 * o.linear_steps, cross=2),
    "PZOBO": lambda o, k: counts(upper=1, lower=o.lower_steps * paths(o)),
    "SRBA": srba,
    "SUSTAIN": lambda o, k: counts(upper=2, lower=2, hvp=o.linear_steps - 1, cross=2),
    "StocBiO": lambda o, k: counts(upper=1, lower=o.lower_steps, hvp=o.linear_steps, cross=1),
    "TTSA": lambda o, k: counts(upper=1, lower=o.lower_steps, hvp=(o.linear_steps - 1) / 2, cross=1),
    "VRBO": vrbo,
    "iMCN": cubic,
}


def run(cls, arguments, steps):
    """Oracle calls of the steps after the first, and what `CALLS` has for them."""
    declared, problem = cls.declared, Quadratic(n=12, m=3, kappa=4.0)
    (x,), (y,) = problem.x, problem.y
    upper = [x, y.detach().clone().requires_grad_()] if declared.initial else [x]
    losses = (problem.upper, problem.lower)
    if declared.losses == 1:
        losses = (lambda: problem.upper() - 9 * problem.lower(),)
    arguments = {"lr": 1e-4, "lower_lr": 0.01, "generator": torch.Generator().manual_seed(0), **arguments}
    if declared.lower_steps:
        arguments = {"lower_steps": 3, **arguments}
    optimizer = cls(upper, [y], **arguments)
    optimizer.step(*losses)
    first, expected = optimizer.oracle_counts, dict.fromkeys(optimizer.oracle_counts, 0.0)
    for k in range(1, steps + 1):
        for kind, number in CALLS[cls.__name__](optimizer, k).items():
            expected[kind] += number
        optimizer.step(*losses)
    return {kind: number - first[kind] for kind, number in optimizer.oracle_counts.items()}, expected


def fewer_products(arguments):
    """With few products conjugate gradients do not end early."""
    return {**arguments, **{name: 4 for name in arguments if name == "linear_steps"}}


SOME = [
    *((row.name, row.cls, row.options) for row in ROWS),
    ("AID-cold", bo.AID, {"linear_steps": 4, "warm_start": False}),
    ("AID-unchecked", bo.AID, {"linear_steps": 4, "check_finite": False}),
    ("AID-fixed-point-cold", bo.AID, {"linear_solver": "fixed_point", "warm_start": False}),
    ("BA-growing", bo.BA, {"growth": 0.9, "linear_steps": 4}),
    ("ITD-truncated", bo.ITD, {"truncate": 2}),
    ("F2SA-centred", bo.F2SA, {"order": 3, "stencil": "centred", "nu": 1e-3}),
    ("F2SA-forward", bo.F2SA, {"order": 2, "stencil": "forward", "nu": 1e-3}),
    ("PZOBO-directions", bo.PZOBO, {"directions": 3, "difference": "central"}),
    ("ESMAML-forward", bo.ESMAML, {"directions": 3, "difference": "forward"}),
    ("RAHGD-cold", bo.RAHGD, {"linear_steps": 4, "warm_start": False}),
    ("iMAML-cold", bo.iMAML, {"linear_steps": 4, "warm_start": False}),
    ("AmIGO-cold", bo.AmIGO, {"linear_steps": 4, "warm_start": False}),
    ("FSLA-cold", bo.FSLA, {"warm_start": False}),
    ("VRBO-cold", bo.VRBO, {"linear_steps": 4, "warm_start": False}),
    ("GDA-once", bo.GDA, {"lower_steps": 1}),
]


@pytest.mark.parametrize(("cls", "arguments"), [pytest.param(c, a, id=n) for n, c, a in SOME if c.__name__ in CALLS])
def test_steps_make_these_calls(cls, arguments):
    random = TERMS.get(cls.__name__)
    measured, expected = run(cls, fewer_products(arguments), steps=200 if random else 11)
    assert (measured["jvp"] > 0) == (cls.declared.second_order or "newton_correction" in arguments)
    if random:
        lengths = torch.arange(4.0) * random
        error = abs(measured.pop("hvp") - expected.pop("hvp"))
        assert error < 4 * 200**0.5 * float(lengths.std(correction=0))
    assert measured == expected


def test_every_method_has_its_calls():
    """Contextual methods are exempt, because nothing simple can be said about them."""
    assert set(CALLS) == set(methods()) - {"DLSGD", "RTMLMC"}
