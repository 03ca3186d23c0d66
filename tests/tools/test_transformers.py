"""Hugging Face's Trainer; needs the extra ``tools``. Importing it takes seconds, so it runs with ``--slow``."""

import pytest
import torch
from torch import nn

from ..problems import Both, same, values
from ..registry import each
from .test_torch import TOOLED, made

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 4


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install .[tools]")


class Model(Both):
    """Its loss is what a Trainer would minimise by itself."""

    def __init__(self, problem):
        super().__init__(problem)
        self.problem = problem
        problem.model = [self]

    def forward(self, row):
        return {"loss": self.problem.upper() + 0 * row.sum()}


def build(row):
    problem, optimizer = made(row, Model)
    (model,) = problem.model
    functions = [lambda k: 0.9**k, lambda k: 1.0]
    return problem, model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, functions)


def after_backward(trainer, problem):
    """The loop's own ``optimizer.step()`` makes the update."""
    return problem.apply(trainer.optimizer.optimizer.backward)


SHAPES = {"backward in training_step": after_backward}


def arguments(transformers, path, **options):
    return transformers.TrainingArguments(
        output_dir=str(path), use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
        **{"max_steps": STEPS, "save_strategy": "no", "max_grad_norm": 0.0, **options},
    )  # fmt: skip


def trained(transformers, row, shape, path, resume=None, **options):
    """Return a Trainer's result and its losses."""
    problem, model, optimizer, schedule = build(row)
    losses = []

    class Trainer(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            losses.append(SHAPES[shape](self, problem))
            return losses[-1]

    trainer = Trainer(
        model=model, args=arguments(transformers, path, **options), train_dataset=[{"row": torch.zeros(1)}] * 64,
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == STEPS
    return [*losses, *values(problem.x, problem.y)]


@pytest.mark.parametrize("shape", SHAPES)
@each(TOOLED)
def test_a_training_step_that_calls_backward(row, shape, transformers, tmp_path):
    problem, _, optimizer, schedule = build(row)
    losses = []
    for _ in range(STEPS):
        losses.append(problem.run(optimizer))
        schedule.step()
    assert same(trained(transformers, row, shape, tmp_path), [*losses, *values(problem.x, problem.y)])


@each(TOOLED)
def test_a_checkpoint_of_the_trainer_is_resumed_bit_for_bit(row, transformers, tmp_path):
    shape = "backward in training_step"
    whole = trained(transformers, row, shape, tmp_path, save_strategy="steps", save_steps=2)
    resumed = trained(transformers, row, shape, tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert len(whole) == len(resumed) + 2
    assert same(whole[2:], resumed)


@each(TOOLED)
def test_gradients_are_clipped_by_the_trainer(row, transformers, tmp_path):
    """``max_grad_norm`` limits the hypergradient: the gradients that ``backward`` leaves are those of x alone."""
    problem, _, optimizer, schedule = build(row)
    for _ in range(STEPS):
        problem.apply(optimizer.backward)
        norm = nn.utils.clip_grad_norm_(problem.x, 0.1)
        assert norm > 0.1
        optimizer.step()
        schedule.step()
    got = trained(transformers, row, "backward in training_step", tmp_path, max_grad_norm=0.1)
    for a, b in zip(got[STEPS:], values(problem.x, problem.y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@each(TOOLED)
def test_a_trainer_of_its_own_trains_x_by_the_loss_alone(row, transformers, tmp_path):
    """Without ``training_step`` the loss that the model returns is all that it knows: y rests."""
    problem, model, optimizer, schedule = build(row)
    before = values(problem.y)
    trainer = transformers.Trainer(
        model=model, args=arguments(transformers, tmp_path), train_dataset=[{"row": torch.zeros(1)}] * 64,
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()
    assert same(before, values(problem.y))
    assert not optimizer.oracle_counts["lower_grad"]


@each(TOOLED)
def test_a_whole_step_inside_is_followed_by_another_update(row, transformers, tmp_path, monkeypatch):
    """The Trainer's own ``step()`` comes after it, and finds the hypergradient that it has left."""
    monkeypatch.setitem(SHAPES, "step", lambda trainer, problem: problem.run(trainer.optimizer.optimizer))
    problem, _, optimizer, schedule = build(row)
    for _ in range(STEPS):
        problem.run(optimizer)
        optimizer.step()
        schedule.step()
    assert same(trained(transformers, row, "step", tmp_path)[STEPS:], values(problem.x, problem.y))
