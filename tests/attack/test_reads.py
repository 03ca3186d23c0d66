"""Captured steps against eager ones when a value read by a loss changes, in every way, by `step` and `run`.

Either all numbers are those of eager steps at every step, or steps are eager and say why. What torch's guards cannot
see, so that a graph continues with the old value, is listed in ``UNSEEN``. Each way is tried with a graph of the loss
alone; whole steps are made for those in ``WHOLE``, and for all others with ``--slow``.
"""

import datetime
import random
import re
import warnings

import pytest
import torch

import bilevel_optim as bo

from ..compiled import test_losses as known
from ..compiled.guards import noticed
from . import ways

METHODS = {
    "SOBA": (bo.SOBA, {}),
    # A step of a length that does not depend on the gradient has any direction where the gradient is zero.
    "F2SA": (bo.F2SA, {"lower_steps": 1, "order": 2, "nu": 0.1, "normalize": False}),
    "AID": (bo.AID, {"lower_steps": 2, "linear_steps": 2}),
    "ITD": (bo.ITD, {"lower_steps": 2}),
}
# Permitted reasons for eager steps; the user can check all of them in the loss.
REASONS = re.compile(
    r"a loss changes Python values as it runs|a loss draws random numbers|a loss writes into a tensor that is not its"
    r"|a value is read on the host|a parameter has a hook|which Dynamo cannot trace|a loss uses a tensor with a graph"
    r"|a backward hook on all modules"
    r"|a loss reads a NumPy array|a loss reads a value that keeps changing|differ|\(.*line \d+.*\)|sparse|tolist|layout"
)
# Changes that torch's guards cannot see: a graph continues with the old value until the next comparison.
UNSEEN = {
    "method of a base class": "a method that an object has from a base class is replaced in that class",
    "bases of a class": "the bases of an object's class are replaced",
    "identity": "objects without attributes are told apart by identity alone",
}
if torch.__version__ < (2, 15):
    UNSEEN["sign of zero"] = "0.0 and -0.0 are equal to the guards of torch before 2.15"
if torch.__version__ < (2, 12):
    UNSEEN["class of a class"] = UNSEEN["class"] = "torch 2.11 does not guard what an attribute of a class is"
    # A loss that changes torch's default type: its graph cannot be made, and the reason is torch's own.
    REASONS = re.compile(f"{REASONS.pattern}|must have the same dtype")
# Seen by a key of the library, which whole steps have.
BY_KEY = ("hook_for_all_modules", "backward_hook_for_all_modules", "hooked_parameter")
# Also momentum_of_a_normalisation, in test_put_in.py.
WHOLE = ("replaced object", "tensor", "cell", "hook_for_all_modules", "backward_hook_for_all_modules")
AT = (5, 20, 200)


class Attacked(known.Twin):
    """A twin that changes before the chosen step, made by `step` or `run`."""

    def __init__(self, make, captured, method):
        known.METHODS.update(METHODS)
        super().__init__(make, captured, method, lr=0.01, lower_lr=0.02)  # no run diverges in 200 steps

    def made(self, at, how):
        """Losses and points, and why steps were eager."""
        left, reasons = [], []
        for steps, change in ((at, None), (8, self.change)):
            if change is not None:
                change()
            if how == "run":
                losses = [*self.optimizer.run(self.upper, self.loss, steps=steps)]
                reasons.append(self.optimizer.diagnostics.get("compile_fallback", ""))
            else:
                losses = []
                for _ in range(steps):
                    losses.append(self.optimizer.step(self.upper, self.loss))
                    reasons.append(self.optimizer.diagnostics.get("compile_fallback", ""))
            left += [torch.stack(losses), *(p.detach().clone() for p in (self.x, *self.lower))]
        getattr(self.loss, "undo", lambda: None)()
        return left, reasons


def grown_rounding(make, method, at, how, right):
    """Return how far eager results are from others that begin with x and y moved by rounding."""
    moved = Attacked(make, False, method)
    with torch.no_grad():
        for p in (moved.x, moved.y):
            p.mul_(1 + torch.finfo(p.dtype).eps)
    return [float((a - b).abs().max()) for a, b in zip(moved.made(at, how)[0], right, strict=True)]


def attacked(make, method, at, how, *, many=False):
    """Assert what is said at the top; return ``"equal"`` or ``"eager"``. Rounding may have grown in ``many`` steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        right, _ = Attacked(make, False, method).made(at, how)
        twin = Attacked(make, True, method)
        found, reasons = twin.made(at, how)
        rounding = grown_rounding(make, method, at, how, right) if many else [0.0] * len(right)
    for mine, theirs, grown in zip(found, right, rounding, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10 + 100 * grown)
    wrong = [reason for reason in reasons if reason and not REASONS.search(reason)]
    assert not wrong
    assert twin.optimizer.captured_graphs or any(reasons)
    return "eager" if any(reasons) else "equal"


HOLDERS, REACHED = [*ways.holders()], [*ways.WAYS]
PAIRS = [(holder, way) for holder in HOLDERS for way in REACHED]
LOSSES = [*ways.NEW, *ways.OLD]
# Each holder, each way and each loss once, and with --slow a sample that is another one every day.
ONCE = [(holder, REACHED[i % len(REACHED)]) for i, holder in enumerate(HOLDERS)]
TODAY = datetime.date.today().toordinal()
SAMPLE = random.Random(TODAY).sample([pair for pair in PAIRS if pair not in ONCE], 6)
TRIED = {*known.ALONE, *(make for make, _ in known.VALUES), *(make for make, _ in known.BY_GUARDS)}  # there
CASES = {
    **{f"{holder}, {way}": ways.pair(holder, way) for holder, way in ONCE},
    **{make.__name__: make for make in LOSSES if make not in TRIED},
    **{name: ways.odd_one(name) for name in ways.odd()},
}
EVERY = [(method, at, how) for method in METHODS for at in AT for how in ("step", "run")]


def test_there_are_many_ways():
    assert len(HOLDERS) + len(REACHED) + len(LOSSES) + len(ways.odd()) > 150
    assert len(PAIRS) > 1000
    assert {way for _, way in ONCE} == set(REACHED)


@pytest.fixture
def _threads():
    """Restore torch's number of threads and one of its defaults."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.few(56)  # of 111, every other one
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", [name for name in CASES if name not in BY_KEY])
def test_a_graph_notices_what_changes(name):
    found = noticed(CASES[name])
    if name.split(", ")[0] in UNSEEN:
        assert found == "stale"
    else:
        assert found in ("new graph", "value") or REASONS.search(found)


@pytest.mark.slow
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_graph_notices_a_number_however_it_is_reached(holder):
    found = {way: noticed(ways.pair(holder, way)) for way in REACHED}
    allowed = ("stale",) if holder in UNSEEN else ("new graph", "value")
    assert not [(way, said) for way, said in found.items() if said not in allowed and not REASONS.search(said)]


def whole(cases):
    """Return parameters for these names, with marks for known failures and for those with ``--slow`` only."""
    found = []
    for name in cases:
        key = name[0] if isinstance(name, tuple) else getattr(name, "__name__", name)
        wrong = pytest.mark.xfail(strict=True, reason=UNSEEN.get(key, ""), raises=AssertionError)
        marks = [wrong] * (key in UNSEEN) + [pytest.mark.slow] * (key not in WHOLE)
        found.append(pytest.param(*(name if isinstance(name, tuple) else [name]), marks=marks))
    return found


def expected(make):
    """``"equal"`` if a graph of the loss alone notices the change, ``"eager"`` if there is none."""
    return "equal" if noticed(make) in ("new graph", "value") else "eager"


@pytest.mark.parametrize(("holder", "way"), whole([*ONCE, *SAMPLE]), ids=str)
def test_a_number_that_changes(holder, way):
    k = HOLDERS.index(holder)
    make = ways.pair(holder, way)
    assert attacked(make, "SOBA", 5, ("step", "run")[k // 2 % 2]) == expected(make)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", whole(ways.odd()))
def test_an_odd_thing_that_changes(name):
    """After many steps, with the next comparison far."""
    assert attacked(ways.odd_one(name), "SOBA", 20, "step") == expected(ways.odd_one(name))


@pytest.mark.parametrize("make", whole(ways.NEW), ids=lambda make: make.__name__)
def test_a_loss_that_changes(make):
    k = ways.NEW.index(make)
    found = attacked(make, "SOBA", 5, ("step", "run")[k % 2])
    assert found == "equal" or make is not ways.hook_for_all_modules


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("method", "at", "how"), EVERY, ids=str)
def test_everything(method, at, how):
    """All losses and all odd things, and each pair in one of these tests, another one every day."""
    mine = PAIRS[(EVERY.index((method, at, how)) + TODAY) % len(EVERY) :: len(EVERY)]
    cases = {f"{holder}, {way}": ways.pair(holder, way) for holder, way in mine}
    cases |= {make.__name__: make for make in LOSSES}
    cases |= {name: ways.odd_one(name) for name in ways.odd() if name not in UNSEEN}
    wrong = {}
    for name, make in cases.items():
        try:
            attacked(make, method, at, how, many=at > min(AT))
        except Exception as error:
            wrong[name] = str(error)[:200]
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
