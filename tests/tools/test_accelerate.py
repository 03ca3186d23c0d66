"""accelerate's prepared optimizers; needs the extra ``tools``."""

import warnings

import pytest

from ..problems import same, values
from ..registry import each
from .test_torch import STEPS, TOOLED, made, plain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install .[tools]")

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = {
    "closure=": lambda prepared, problem: prepared.step(closure=lambda: problem.apply(prepared.optimizer.backward)),
    "closure": lambda prepared, problem: prepared.step(lambda: problem.apply(prepared.optimizer.backward)),
    "backward, step": lambda prepared, problem: (problem.apply(prepared.optimizer.backward), prepared.step()),
    "losses, unwrapped": lambda prepared, problem: problem.run(prepared.optimizer),
}


@pytest.mark.parametrize("shape", SHAPES)
@each(TOOLED)
def test_prepared_optimizers(row, shape):
    problem, optimizer = made(row)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    for _ in range(STEPS):
        SHAPES[shape](prepared, problem)
        prepared.zero_grad()
    assert same(values(problem.x, problem.y), plain(row)[STEPS:])


@each(TOOLED)
def test_the_wrapper_takes_no_losses(row):
    problem, optimizer = made(row)
    with pytest.raises(TypeError, match="positional arguments"):
        accelerate.Accelerator(cpu=True).prepare(optimizer).step(problem.upper, problem.lower)
