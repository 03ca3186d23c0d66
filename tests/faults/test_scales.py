"""Losses of any scale: float32 is a number system of its own at 1e-30 as at 1e30."""

import pytest
import torch

import bilevel_optim as bo

from ..problems import seeded

METHODS = {
    "AID": (bo.AID, {"linear_steps": 9}),
    "AID with MINRES": (bo.AID, {"linear_steps": 9, "linear_solver": "minres"}),
    "AID with a tolerance": (bo.AID, {"linear_steps": 9, "linear_tol": 1e-2}),
    "ITD": (bo.ITD, {}),
    "RAHGD": (bo.RAHGD, {"linear_steps": 9, "restart_radius": 1.0}),
    "F2SA": (bo.F2SA, {"nu": 1e-2}),
    "BOME": (bo.BOME, {}),
    "SOBA": (bo.SOBA, {}),
    "StocBiO": (bo.StocBiO, {}),
}


def steps_of(name, scale, steps=3):
    """The points that a method comes to on losses of this scale, with rates that undo it."""
    cls, options = METHODS[name]
    a, t = torch.randn(5, 3, generator=seeded(1)).float(), torch.randn(3, generator=seeded(2)).float()
    x, y = (torch.full((3,), value, dtype=torch.float32, requires_grad=True) for value in (0.5, 0.1))
    options = {"lower_steps": 4, **options} if name != "SOBA" else options
    upper_lr = 0.05 if name == "F2SA" else 0.05 / scale  # its steps are of length lr
    optimizer = cls([x], [y], lr=upper_lr, lower_lr=0.3 / scale, **options)

    def upper():
        return (((y - t) * scale) * (y - t)).sum() / 2

    def lower():
        return (((a @ (y - x)) * scale) * (a @ (y - x))).mean() / 2 + ((y * scale) * y).sum() / 20

    for _ in range(steps):
        optimizer.step(upper, lower)
    return torch.cat([x, y]).detach()


@pytest.mark.few(7)
@pytest.mark.parametrize("scale", [2.0**-90, 2.0**90])
@pytest.mark.parametrize("name", METHODS)
def test_steps_do_not_depend_on_the_scale_of_both_losses(name, scale):
    """A power of two, with which every number of a step is the same but for its exponent."""
    torch.testing.assert_close(steps_of(name, scale), steps_of(name, 1.0), rtol=1e-6, atol=1e-7)
    assert not torch.equal(steps_of(name, 1.0)[:3], torch.full((3,), 0.5, dtype=torch.float32))
