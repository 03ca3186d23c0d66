"""Faults planted in compiled steps: a test of this size finds each of them."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.compiled import draws, places, reading, runs
from bilevel_optim.compiled.chain import Chain
from bilevel_optim.compiled.key import OptionsKey, Rates
from bilevel_optim.compiled.steps import CompiledSteps

from ..compiled.guards import noticed
from ..problems import seeded
from . import ways
from .test_reads import attacked

ROWS = [*torch.randn(12, 3, generator=seeded(9), dtype=torch.float64)]


def scheduled(row, x, y, holder):
    return (row @ y - holder.w).square() + (y - x).square().sum() / 4


def both(drive, data=None):
    """Return True if a captured optimizer, driven this way, ends where an eager one does."""
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        x, y = (torch.full((3,), value, requires_grad=True) for value in (0.3, 0.1))
        optimizer = bo.SOBA([x], [y], lr=0.05, lower_lr=0.1)
        if captured:
            optimizer.compile(backend="eager")
        holder = SimpleNamespace(w=1.0)
        rows = data(holder) if data else ROWS
        g = bo.Objective(lambda row, x=x, y=y, holder=holder: scheduled(row, x, y, holder), rows)
        f = bo.Objective(lambda y=y: y.square().sum() + y.sum())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            drive(optimizer, f, g)
        assert not captured or optimizer.captured_graphs  # with the fault a graph would be refused, for no good reason
        ends.append(torch.cat([x, y]).detach())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)


def rates(optimizer, f, g):
    for k in range(26):
        optimizer.param_groups[k % 2]["lr"] = 0.02 + 0.01 * k
        optimizer.step(f, g)


def hooks(optimizer, f, g):
    for _ in range(6):
        optimizer.step(f, g)
    y = optimizer.param_groups[1]["params"][0]
    optimizer.register_step_post_hook(lambda *_: y.data.clamp_(-0.05, 0.05))
    optimizer.run(f, g, steps=20)


def failing(optimizer, f, g):
    for _ in range(20):
        optimizer.step(f, g)
    bad = bo.Objective(g.loss, [torch.full((3,), torch.nan)])
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(f, bad)
    optimizer.step(f, g)


class Changing:
    """Changes what the loss reads as a batch is drawn."""

    def __init__(self, holder):
        self.holder = holder

    def __iter__(self):
        for k, row in enumerate(ROWS * 10):
            self.holder.w = 1.0 if k < 30 else 2.0
            yield row


def going_on(optimizer, f, g):
    """After a run that has failed at its 25th batch."""
    rows = [row.clone() for row in ROWS * 4]
    rows[24].fill_(torch.nan)
    own = bo.Objective(g.loss, rows)
    for _ in range(20):
        optimizer.step(f, own)
    with pytest.raises(bo.NonFiniteError):
        optimizer.run(f, own, steps=20)
    rows[24].fill_(0.5)
    optimizer.run(f, own, steps=10)


def run(optimizer, f, g):
    for _ in range(6):
        optimizer.step(f, g)
    optimizer.run(f, g, steps=30)


def steps(optimizer, f, g):
    for _ in range(26):
        optimizer.step(f, g)


def decaying(optimizer, f, g):
    for k in range(26):
        if k == 12:
            optimizer.param_groups[1]["weight_decay"] = 0.5
        optimizer.step(f, g)


def no_guards(patch):
    patch.setattr(reading, "_about_the_user", lambda guards: [False] * len(guards))


def first_state(patch):
    read = places.StatePlaces.read

    def first(self):
        tensors, form = read(self)
        return vars(self).setdefault("first", [t.clone() for t in tensors]), form

    patch.setattr(places.StatePlaces, "read", first)


def options_not_in_the_key(patch):
    patch.setattr(OptionsKey, "now", lambda self: iter(()))


def other_groups(patch):
    now = Rates.on
    patch.setattr(Rates, "on", lambda self, device: now(self, device)[::-1])


def first_rates(patch):
    now = Rates.on
    patch.setattr(Rates, "on", lambda self, device: vars(self).setdefault("rates", now(self, device)))


def no_hooks(patch):
    patch.setattr(runs, "has_hooks", lambda optimizer: False)


def memory_not_written(patch):
    whole = places.Writer.__init__

    def without_entries(writer, results, pure):
        whole(writer, results, pure)
        writer._entries = []

    patch.setattr(places.Writer, "__init__", without_entries)


def buffers_not_written(patch):
    patch.setattr(places, "buffer_writes", lambda *_: [])


def flags_not_read(patch):
    patch.setattr(CompiledSteps, "is_troubled", lambda *_: False)


def places_not_restored(patch):
    patch.setattr(CompiledSteps, "return_to", lambda *_: None)


def data_in_another_order(patch):
    follow = Chain.follow
    patch.setattr(Chain, "follow", lambda self, first, data: follow(self, first, data[::-1]))


def changes_not_seen(patch):
    patch.setattr(draws, "_is_list", lambda _: True)


def seen():
    assert noticed(ways.pair("attribute", "closure")) == "new graph"


def normalised():
    attacked(ways.momentum_of_a_normalisation, "SOBA", 20, "step")


def changing(optimizer, f, g):
    run(optimizer, f, g)


changing.data = Changing
FAULTS = {
    "guards that always hold": (no_guards, seen),
    "the first state": (first_state, steps),
    "options that are not in the key": (options_not_in_the_key, decaying),
    "rates of other groups": (other_groups, rates),
    "the first rates": (first_rates, rates),
    "no hooks": (no_hooks, hooks),
    "memory that is not written": (memory_not_written, steps),
    "buffers that are not written": (buffers_not_written, normalised),
    "flags that are not read": (flags_not_read, failing),
    "places that are not restored": (places_not_restored, going_on),
    "data in another order": (data_in_another_order, run),
    "changes that are not seen": (changes_not_seen, changing),
}
DRIVES = {drive.__name__: drive for _, drive in FAULTS.values()}


def check(drive):
    if drive in (seen, normalised):
        drive()
    else:
        both(drive, getattr(drive, "data", None))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", DRIVES)
def test_without_a_fault_nothing_is_found(name):
    check(DRIVES[name])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_put_in_is_found(name, monkeypatch):
    put_in, drive = FAULTS[name]
    put_in(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError, IndexError, OSError)):
        check(drive)
