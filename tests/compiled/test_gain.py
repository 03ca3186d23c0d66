"""Whether compilation pays is told once, from the steps that are made both ways."""

import itertools
import warnings

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.compiled import backend, entry, steps

NOT = "a compiled step takes 9.5 ms, an eager one 10 ms, so the 9 s of compilation do not pay"
WARNING = f"compiled steps are not faster: {NOT}. Leave out compile()"


@pytest.fixture
def step(monkeypatch):
    """A function that makes the optimizer of compiled steps that take so long, and a step of it."""

    def made(compiled):
        # Two readings of the clock around the eager step, and two around the compiled one, which the first time
        # compiles. A slow step in between changes nothing: the least times count.
        both = [(0.01, compiled), (0.05, 0.05), (0.012, compiled * 1.2), (0.02, 0.03)]
        readings = [0.0, 0.02, 0.0, 9.0, *(t for eager, own in both for t in (0.0, eager, 0.0, own))]
        clock = itertools.chain(readings, itertools.repeat(0.0))
        monkeypatch.setattr(steps.time, "perf_counter", lambda: next(clock))
        monkeypatch.setattr(entry, "maker_of", lambda *_: backend.maker_of("eager", None, None))
        x, y = torch.tensor([0.5], requires_grad=True), torch.tensor([0.1], requires_grad=True)
        optimizer = bo.SOBA([x], [y], lr=0.01, lower_lr=0.1)
        optimizer.compile()
        return optimizer, lambda: optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())

    return made


@pytest.mark.parametrize(
    ("compiled", "told"),
    [
        (0.0095, NOT),
        (0.004, "a compiled step takes 4 ms, an eager one 10 ms, so the 9 s of compilation pay after 1,500 steps"),
    ],
)
def test_the_gain_of_compilation_is_told_and_a_loss_warned_of(compiled, told, step):
    optimizer, one = step(compiled)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            one()
            found.append(optimizer.diagnostics.get("compile"))
    assert found[-1] == told
    assert found.count(told) == len(found) - found.index(told) > 10  # from then on, in every step
    assert [str(w.message) for w in caught] == ([WARNING] if told == NOT else [])


def test_the_warning_as_an_error_makes_no_step_eager(step):
    optimizer, one = step(0.0095)

    def many(count):
        for _ in range(count):
            one()

    with pytest.raises(bo.BilevelWarning, match="compiled steps are not faster"):
        many(40)
    many(3)
    assert optimizer.diagnostics["compile"] == NOT
    assert "compile_fallback" not in optimizer.diagnostics
