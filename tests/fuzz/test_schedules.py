"""Random schedules of calls: a disturbed optimizer ends bit for bit where an undisturbed twin does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import FAMILIES

from .runs import Run, called, difference
from .strategies import cases
from .toys import FAILURES, NON_FINITE

LEVELS = st.sampled_from(("upper", "lower"))


class Schedule(RuleBasedStateMachine):
    """Calls on a run, and on a twin only those of them that count.

    Args:
        family: of the methods.
    """

    def __init__(self, family):
        super().__init__()
        self.family = family

    @initialize(data=st.data())
    def begin(self, data):
        self.case = data.draw(cases(self.family))
        self.row = self.case.registered
        self.random = torch.Generator().manual_seed(5).get_state()
        self.main, self.twin, self.checkpoint = Run(self.case), Run(self.case), None
        # The reference of a check costs as much as the rest of a schedule, with tasks several times as much.
        self.checks = 1 if self.case.kind.data == "none" or self.case.kind.seed < 3 else 0

    # ------------------------------------------------------------------------------------------------ calls

    def on(self, run, act, *arguments, thread=False):
        """The outcome of a call from the present random numbers, and all that is there afterwards."""
        torch.set_rng_state(self.random)
        outcome = called(act, *arguments, thread=thread)
        return outcome, run.contents()

    def agreed(self, main, twin):
        """Both have come to the same, from which the schedule goes on."""
        (outcome, contents), (other, others) = main, twin
        for result in (outcome, other):
            if isinstance(result, BaseException) and not isinstance(result, bo.NonFiniteError):
                raise result
        assert type(outcome) is type(other), (outcome, other)
        if isinstance(outcome, torch.Tensor):
            assert not (found := difference(outcome, other, "result")), found
        assert not (found := difference(contents, others)), found
        self.random = contents["random"]

    def same(self, act, *, thread=False, instead=None):
        """The same on both."""
        main, twin = ([run] if callable(act) else [] for run in (self.main, self.twin))
        self.agreed(self.on(self.main, act, *main, thread=thread), self.on(self.twin, instead or act, *twin))

    def nothing(self, act, *arguments):
        """A call of the main run alone that changes nothing; returns its outcome."""
        torch.set_rng_state(self.random)
        before = self.main.contents()
        outcome, after = self.on(self.main, act, *arguments)
        assert not (found := difference(before, after)), (outcome, found)
        return outcome

    @rule(how=st.sampled_from(("step", "split", "closure", "backward", "propose")), thread=st.booleans())
    def step(self, how, thread):
        plain = "step" if how in ("split", "closure") else how
        self.same(lambda run: run.step(how), thread=thread, instead=lambda run: run.step(plain))

    @rule(
        level=LEVELS,
        k=st.integers(1, 12),
        how=st.sampled_from((*FAILURES, *NON_FINITE)),
        verb=st.sampled_from(("step", "backward")),
    )
    def fail(self, level, k, how, verb):
        """A loss that fails at its k-th evaluation."""
        torch.set_rng_state(self.random)
        before, problem = self.main.contents(), self.main.problem
        problem.fails, problem.fired = [[level, k, how]], 0
        outcome, after = self.on(self.main, self.main.step, verb)
        problem.fails = []
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, (*FAILURES.values(), bo.NonFiniteError)):
                raise outcome
            assert not (found := difference(before, after)), (outcome, found)
            return
        assert not problem.fired or how in NON_FINITE, f"{how} in the {level} loss has passed"
        try:  # read-only calls leave no trace
            self.agreed((outcome, after), self.on(self.twin, self.twin.step, verb))
        except AssertionError as error:
            # A perturbed path is left out, and LBFGS need not use the last gradient that it has asked for.
            paths = self.row.declared.family == "zeroth-order" or self.row.cls is bo.ESMAML
            if not problem.fired or not (paths or self.case.optimizer == "lbfgs"):
                raise AssertionError(f"{how} in the {level} loss has passed") from error
            self.random = after["random"]
            self.twin = self.main.again("load")

    @rule()
    def apply(self):
        """Half of the gradients, in place and not, and the update alone; without any it is refused."""
        if all(p.grad is None for p in self.main.optimizer.parameters("upper")):
            for run in (self.main, self.twin):
                with pytest.raises(RuntimeError, match="no upper parameter has one"):
                    run.optimizer.step()
            return
        for run in (self.main, self.twin):
            for tensor in run.problem.tensors:
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.mul_(0.5) if run is self.main else tensor.grad * 0.5
        self.same(lambda run: run.optimizer.step())

    @rule(level=LEVELS, name=st.sampled_from(("lr", "momentum")), value=st.sampled_from((0.0, 0.05, 0.3)))
    def change(self, level, name, value):
        """An option of a group."""
        if name == "momentum" and (level == "upper" or self.case.optimizer != "momentum"):
            name = "lr"
        for run in (self.main, self.twin):
            group = [g for g in run.optimizer.param_groups if g["level"] == level][-1]
            group[name] = value

    @precondition(lambda self: not self.row.declared.initial)
    @rule(level=LEVELS)
    def add(self, level):
        one_group = self.case.optimizer == "lbfgs" and level == "lower"
        if level not in self.main.problem.added and not one_group:
            self.same(lambda run: run.add_group(level))

    @rule(how=st.sampled_from(("load", "deepcopy", "pickle")))
    def replace(self, how):
        """From here on a copy goes on."""
        torch.set_rng_state(self.random)
        self.main = self.main.again(how)

    @rule()
    def save(self):
        torch.set_rng_state(self.random)
        self.checkpoint = self.main.saved(), list(self.main.problem.added)

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def return_(self):
        """Return to a saved checkpoint, in the live optimizer and in a fresh one."""
        saved, added = self.checkpoint
        if added == self.main.problem.added:
            self.twin = Run(self.case)
            for run in (self.main, self.twin):
                run.load(saved)
                run.optimizer.diagnostics = {}
            self.random = torch.get_rng_state()

    @precondition(lambda self: self.checks and self.case.kind.data in ("none", "tasks") and not self.case.kind.dropout)
    @rule()
    def check(self):
        """Changes nothing, whatever it finds."""
        problem, self.checks = self.main.problem, 0
        rows = self.row.declared.tasks == "rows" and problem.tasks is not None
        if not rows:
            options = {"tasks": problem.tasks} if problem.tasks is not None else {}
            check = partial(bo.check_hypergradient, self.main.optimizer, *problem.losses, repeats=2, **options)
            outcome = self.nothing(check)
            if isinstance(outcome, BaseException) and not isinstance(outcome, (bo.GradcheckError, bo.NonFiniteError)):
                raise outcome


@pytest.mark.parametrize("family", FAMILIES)
def test_schedules(family, budget):
    run_state_machine_as_test(partial(Schedule, family), settings=budget(10))
