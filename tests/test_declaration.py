"""Declarations of the methods, and the lists of all methods."""

import inspect
import re
import runpy
from functools import partial
from pathlib import Path

import pytest

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import REGISTRY, MethodInfo, methods, register
from recipes import compare
from recipes.benchmarks import speed
from recipes.common.methods import ELSEWHERE, EXACT, STOCHASTIC

ROOT = Path(__file__).parent.parent
TABLES = runpy.run_path(str(ROOT / "docs/_ext/method_tables.py"))
rewritten, table = TABLES["rewritten"], TABLES["table"]
BARE = {"paper": "none", "family": "control", "when": "never", "cost": "1 upper"}


@pytest.fixture
def newcomer():
    """A method that only this file defines."""

    class Newcomer(bo.FirstOrder):
        declared = MethodInfo(
            paper="arXiv:2601.00001",
            family="penalty",
            when="a test wants to see it everywhere",
            cost="T lower, 1 upper",
            second_order=False,
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
    assert not {"types", "aid", "stochastic"} & set(bo.__all__)


def test_declarations_of_methods_are_true():
    for cls in methods().values():
        assert cls.declared.paper in cls.__doc__
        assert cls.declared.lower_steps == ("lower_steps" in inspect.signature(cls).parameters)


def test_documents_say_what_methods_declare():
    """If not: python docs/_ext/method_tables.py docs/methods.md."""
    text = (ROOT / "docs/methods.md").read_text()
    assert rewritten(text) == text


def test_tables_have_every_method_once():
    assert sorted(re.findall(r"^\|.*?`(\w+)` \|", table(), re.M)) == sorted(methods())
    for name, cls in methods().items():
        (row,) = (line for line in table().splitlines() if f"`{name}`" in line)
        assert cls.declared.cost in row
        assert cls.declared.when in row
        assert ("| second derivatives" in row) == cls.declared.second_order
        assert cls.declared.paper.removeprefix("arXiv:") in row


def test_a_document_without_a_place_is_refused():
    with pytest.raises(ValueError, match="no place"):
        rewritten("# A document")


def test_a_method_defined_here_is_found_everywhere(newcomer):
    assert methods()["Newcomer"] is newcomer
    assert "| `Newcomer` | a test wants to see it everywhere |" in table()
    assert "[2601.00001](https://arxiv.org/abs/2601.00001)" in table()
    before, place, after = (ROOT / "docs/methods.md").read_text().partition("<!-- methods: begin -->")
    assert "Newcomer" in rewritten(before + place + after)


def test_recipes_offer_it_with_a_row(newcomer, monkeypatch, tmp_path):
    monkeypatch.setitem(EXACT, "newcomer", partial(newcomer))
    arguments = ["--problem", "quadratic", "--methods", "newcomer", "--grid", "0.1", "--budget", "60"]
    results = compare.main([*arguments, "--out", str(tmp_path)])["results"]
    assert results["newcomer"]["oracle_calls"]["lower_grad"] >= 50


def test_recipes_offer_every_method_or_say_why_not():
    sampled = {name: method.make for name, method in STOCHASTIC.items()}
    for problem, offered in (("exact", EXACT), ("stochastic", sampled)):
        classes = {make.func.__name__ for make in offered.values()}
        assert not classes & set(ELSEWHERE[problem])
        assert classes | set(ELSEWHERE[problem]) == set(methods())
    assert {cls for cls, _ in speed.offered().values()} == set(methods().values())


def test_settings_of_recipes_are_those_that_a_method_needs():
    for method in STOCHASTIC.values():
        cls = method.make.func
        assert method.terms == (cls.declared.data == "finite_sum")
        assert method.floor == ("floor" in inspect.signature(cls).parameters)
        assert method.tasks == (cls in (bo.RSVRB, bo.BSVRB))
    assert {name for name, method in STOCHASTIC.items() if method.series} == {"ttsa", "sustain", "mrbo"}
    assert {name for name, method in STOCHASTIC.items() if method.matrices} == {"svrb", "stable"}


def test_its_own_attribute_declares_a_class(newcomer):
    class Heir(newcomer):
        """Method without a declaration of its own."""

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
    ],
)
def test_wrong_words_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        MethodInfo(**{**BARE, **wrong})
