"""What methods declare of themselves: it is true, and everything that is made from it has them."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.methods.table import rewritten, table
from bilevel_optim.optimizer.declaration import REGISTRY, Method, configurations, counts, methods, register
from recipes import compare
from recipes.common.methods import exact, stochastic

from .problems import Quadratic

ROOT = Path(__file__).parent.parent
PROBLEMS = ("quadratic", "compare", "stochastic")
TERMS = {"BSA": 1, "TTSA": 1, "SUSTAIN": 2}  # evaluations of a term of random length
BARE = {"paper": "none", "family": "control", "when": "never", "cost": "1 upper", "calls": None}


@pytest.fixture
def newcomer():
    """A method that is defined here alone."""

    class Newcomer(bo.FirstOrder):
        declared = Method(
            paper="arXiv:2601.00001",
            family="penalty",
            when="a test wants to see it everywhere",
            cost="T lower, 1 upper",
            calls=lambda o, k: counts(upper=1, lower=o.lower_steps),
            second_order=False,
            variants={"short": {"lower_steps": 1}},
            settings={"quadratic": {}, "quadratic/short": {}, "compare": {}, "stochastic": {"lower_steps": 10}},
        )

    yield Newcomer
    del REGISTRY["Newcomer"]


# ---------------------------------------------------------------------------------------------------- one list


def test_every_public_method_declares_itself_and_has_one_row():
    public = {name: value for name, value in vars(bo.methods).items() if name in bo.methods.__all__}
    optimizers = {name: v for name, v in public.items() if isinstance(v, type) and issubclass(v, bo.BilevelOptimizer)}
    assert optimizers == methods()
    rows = (ROOT / "bilevel_optim/methods/__init__.py").read_text()
    for name, cls in optimizers.items():
        assert "declared" in vars(cls)
        assert rows.count(f" import {name} as {name}\n") == 1
        assert getattr(bo, name) is cls
    assert set(bo.methods.__all__) < set(bo.__all__)
    assert "RestartedAGD" in bo.__all__
    assert not {"types", "table", "aid", "stochastic"} & set(bo.__all__)


def test_every_method_has_its_place_and_its_paper():
    for name, cls in methods().items():
        declared = cls.declared
        assert {key.partition("/")[0] for key in declared.settings} | set(declared.elsewhere) == set(PROBLEMS), name
        assert declared.paper in cls.__doc__
        assert declared.lower_steps == ("lower_steps" in inspect.signature(cls).parameters)
        assert not set(declared.variants) - {key.partition("/")[2] for key in declared.settings}, "a variant unused"


@pytest.mark.parametrize("document", ["README.md", "docs/methods.md"])
def test_documents_say_what_methods_declare(document):
    """If not: python -m bilevel_optim.methods.table README.md docs/methods.md."""
    text = (ROOT / document).read_text()
    assert rewritten(text) == text


def test_tables_have_every_method_once():
    for text in (table(), table(full=True)):
        assert sorted(re.findall(r"^\|.*?`(\w+)` \|", text, re.M)) == sorted(methods())
    for name, cls in methods().items():
        (row,) = (line for line in table(full=True).splitlines() if f"`{name}`" in line)
        assert cls.declared.cost in row
        assert cls.declared.when in row
        assert ("| second derivatives" in row) == cls.declared.second_order
        assert cls.declared.paper.removeprefix("arXiv:") in row


def test_a_document_without_a_place_is_refused():
    with pytest.raises(ValueError, match="no place"):
        rewritten("# A document")


def test_a_method_defined_here_is_found_everywhere(newcomer):
    assert methods()["Newcomer"] is newcomer
    assert configurations("quadratic")["newcomer"] == (newcomer, {})
    assert configurations("quadratic")["newcomer-short"] == (newcomer, {"lower_steps": 1})
    for text in (table(), table(full=True)):
        assert "| `Newcomer` | a test wants to see it everywhere |" in text
    assert "[2601.00001](https://arxiv.org/abs/2601.00001)" in table(full=True)
    before, place, after = (ROOT / "README.md").read_text().partition("<!-- methods: begin -->")
    assert "Newcomer" in rewritten(before + place + after)


def test_recipes_offer_it(newcomer, tmp_path):
    assert exact()["newcomer"].func is newcomer
    assert stochastic()["newcomer"].make.keywords == {"lower_steps": 10}
    arguments = ["--problem", "quadratic", "--methods", "newcomer", "--grid", "0.1", "--budget", "60"]
    results = compare.main([*arguments, "--out", str(tmp_path)])["results"]
    assert results["newcomer"]["oracle_calls"]["lower_grad"] >= 50


def test_recipes_offer_every_method_or_say_why_not():
    for problem, offered in (("compare", exact()), ("stochastic", {n: m.make for n, m in stochastic().items()})):
        missing = set(methods().values()) - {make.func for make in offered.values()}
        assert missing == {cls for cls in methods().values() if problem in cls.declared.elsewhere}
    sampled = stochastic()
    assert {name for name, method in sampled.items() if method.terms} == {"saba", "srba"}
    assert {name for name, method in sampled.items() if method.series} == {"ttsa", "sustain", "mrbo"}
    assert {name.split("-")[0] for name, method in sampled.items() if method.tasks} == {"rsvrb", "bsvrb"}
    assert {name for name, method in sampled.items() if method.floor and not method.tasks} == {
        "svrb",
        "svrb-free",
        "stable",
    }
    assert {name for name, method in sampled.items() if method.matrices} == {"svrb", "stable"}


def test_its_own_attribute_declares_a_class(newcomer):
    class Heir(newcomer):
        """Says nothing of itself."""

    assert "Heir" not in methods()
    assert Heir.declared is newcomer.declared
    with pytest.raises(ValueError, match="another method of the name AID"):
        register(type("AID", (bo.AID,), {}))
    assert methods()["AID"] is bo.AID


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"family": "mine"}, "Invalid family value: mine"),
        ({"tasks": "all"}, "Invalid tasks value: all"),
        ({"losses": 3}, "Invalid losses value: 3"),
        ({"data": "batches"}, "Invalid data value: batches"),
        ({"lower_optimizer": "sgd"}, "Invalid lower_optimizer value: sgd"),
        ({"settings": {"compare/fast": {}}}, "Invalid settings value: compare/fast"),
        ({"settings": {"compare": {}}, "elsewhere": {"compare": "no"}}, "Invalid elsewhere value: compare"),
    ],
)
def test_wrong_words_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Method(**{**BARE, **wrong})


# ---------------------------------------------------------------------------------------------------- oracle calls


def run(cls, arguments, steps):
    """Oracle calls of the steps after the first, and what was declared of them."""
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
        for kind, number in declared.calls(optimizer, k).items():
            expected[kind] += number
        optimizer.step(*losses)
    return {kind: number - first[kind] for kind, number in optimizer.oracle_counts.items()}, expected


def fewer_products(arguments):
    """With few products conjugate gradients do not end early."""
    return {**arguments, **{name: 4 for name in arguments if name == "linear_steps"}}


SOME = [
    *((name, cls, arguments) for name, (cls, arguments) in configurations("quadratic").items()),
    ("aid-cold", bo.AID, {"linear_steps": 4, "warm_start": False}),
    ("aid-fixed-point-cold", bo.AID, {"linear_solver": "fixed_point", "warm_start": False}),
    ("ba-growing", bo.BA, {"growth": 0.9, "linear_steps": 4}),
    ("itd-truncated", bo.ITD, {"truncate": 2}),
    ("f2sa-centred", bo.F2SA, {"order": 3, "stencil": "centred", "nu": 1e-3}),
    ("f2sa-forward", bo.F2SA, {"order": 2, "stencil": "forward", "nu": 1e-3}),
    ("pzobo-directions", bo.PZOBO, {"directions": 3, "difference": "central"}),
    ("es-maml-forward", bo.ESMAML, {"directions": 3, "difference": "forward"}),
    ("rahgd-cold", bo.RAHGD, {"linear_steps": 4, "warm_start": False}),
    ("imaml-cold", bo.iMAML, {"linear_steps": 4, "warm_start": False}),
    ("amigo-cold", bo.AmIGO, {"linear_steps": 4, "warm_start": False}),
    ("fsla-cold", bo.FSLA, {"warm_start": False}),
    ("vrbo-cold", bo.VRBO, {"linear_steps": 4, "warm_start": False}),
    ("gda-once", bo.GDA, {"lower_steps": 1}),
]


@pytest.mark.parametrize(
    ("cls", "arguments"), [pytest.param(c, a, id=n) for n, c, a in SOME if c.declared.calls is not None]
)
def test_steps_make_the_calls_that_are_declared(cls, arguments):
    random = TERMS.get(cls.__name__)
    measured, expected = run(cls, fewer_products(arguments), steps=200 if random else 11)
    assert (measured["jvp"] > 0) == (cls.declared.second_order or "newton_correction" in arguments)
    if random:
        lengths = torch.arange(4.0) * random
        error = abs(measured.pop("hvp") - expected.pop("hvp"))
        assert error < 4 * 200**0.5 * float(lengths.std(correction=0))
    assert measured == expected


def test_only_contexts_declare_no_calls():
    assert [name for name, cls in methods().items() if cls.declared.calls is None] == ["DLSGD", "RTMLMC"]
