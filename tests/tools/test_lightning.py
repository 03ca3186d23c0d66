"""Lightning's manual optimisation; needs the extra ``tools``."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ..problems import Both, same, values
from ..registry import each
from .test_torch import STEPS, TOOLED, made, plain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install .[tools]")

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = {  # a way to step, and whether Lightning counts it in global_step
    "closure=": (lambda opt, problem: opt.step(closure=lambda: problem.apply(opt.backward)), True),
    "closure": (lambda opt, problem: opt.step(lambda: problem.apply(opt.backward)), True),
    "backward, step": (lambda opt, problem: (problem.apply(opt.backward), opt.step()), True),
    "losses, unwrapped": (lambda opt, problem: problem.run(opt.optimizer), False),
}


def trained(row, take):
    """Return a trainer after some steps made by ``take(wrapped optimizer, problem)``, and its end."""
    problem, optimizer = made(row, Both)

    class Module(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.both = nn.ParameterList([*problem.x, *problem.y])

        def configure_optimizers(self):
            return optimizer

        def training_step(self, batch, index):
            take(self.optimizers(), problem)

    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(torch.zeros(STEPS, 1), num_workers=0))
    return trainer, problem, optimizer


@pytest.mark.parametrize("shape", SHAPES)
@each(TOOLED)
def test_manual_optimisation(row, shape):
    take, counted = SHAPES[shape]
    trainer, problem, optimizer = trained(row, take)
    assert same(values(problem.x, problem.y), plain(row)[STEPS:])
    assert trainer.global_step == (STEPS if counted else 0)
    assert optimizer.state_dict()["state"][0]["step"] == STEPS


@each(TOOLED)
def test_the_wrapper_takes_no_losses(row):
    with pytest.raises(TypeError, match="positional arguments"):
        trained(row, lambda opt, problem: opt.step(problem.upper, problem.lower))
