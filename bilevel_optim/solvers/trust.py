"""Behavioural tests for lower optimizers that the library does not know: subclasses, and optimizers with hooks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from ..problem.vector import Vector, stack
from .lower import Factory, LowerRule
from .unrolling import update_vjp

__all__ = ["acts_elementwise", "can_be_differentiated", "rests_without_gradient"]

SHAPES = ((3, 2), (2,))
SCALES = (1e-2, 1.0, 1e3)  # of values and gradients, so that limits between them take effect


class _Probe:
    """The optimizer's update on small tensors in float64, stacked or not."""

    def __init__(self, factory: Factory, lr: float) -> None:
        self._factory, self._lr = factory, lr
        self._generator = torch.Generator().manual_seed(0)
        self.rule = self.rule_for(self.random(1.0))

    def rule_for(self, like: Vector) -> LowerRule:
        single = [torch.zeros(shape, dtype=torch.float64, device="cpu", requires_grad=True) for shape in SHAPES]
        return LowerRule(self._factory, [{"params": single, "lr": self._lr}], like)

    def random(self, scale: float) -> Vector:
        return Vector(
            scale * torch.randn(s, dtype=torch.float64, device="cpu", generator=self._generator) for s in SHAPES
        )

    def ends(self, rule: LowerRule, y: Vector, gradients: list[Vector]) -> Vector:
        """Return y after a step along each of these gradients."""
        memory = rule.fresh()
        for gradient in gradients:
            y, memory, *_ = rule.step(y, memory, _along(gradient))
        return y


def _along(gradient: Vector) -> Callable[[Vector], tuple[torch.Tensor, Vector]]:
    return lambda _: (gradient[0].new_zeros(()), gradient)


def rests_without_gradient(factory: Factory, lr: float) -> bool:
    """Return True if a step along a zero gradient leaves y unchanged, as implicit differentiation assumes."""
    probe = _Probe(factory, lr)
    for scale in SCALES:
        y = probe.random(scale)
        end = probe.ends(probe.rule, y, [y.zeros_like()])
        if bool((end - y).norm() > 1e-9 * y.norm()):
            return False
    return True


def acts_elementwise(factory: Factory, lr: float) -> bool:
    """Return True if a step of stacked copies equals a step of each, so that it does not mix them."""
    probe = _Probe(factory, lr)
    for scale in SCALES:
        # The copies are of very different sizes, as are their gradients.
        starts = [probe.random(size) for size in SCALES]
        gradients = [[probe.random(scale * size) for size in SCALES] for _ in range(2)]
        together = probe.ends(probe.rule_for(stack(starts)), stack(starts), [stack(g) for g in gradients])
        for i, start in enumerate(starts):
            alone = probe.ends(probe.rule, start, [g[i] for g in gradients])
            if not all(torch.allclose(a, b, rtol=1e-9, atol=0.0) for a, b in zip(together.lane(i), alone, strict=True)):
                return False
    return True


def can_be_differentiated(factory: Factory, lr: float) -> bool:
    """Return True if the derivative of the update in y and the gradient, by autograd, is its difference quotient."""
    probe = _Probe(factory, lr)
    rule = probe.rule
    for size, scale in product(SCALES, SCALES):
        y, gradient, adjoint = probe.random(size), probe.random(scale), probe.random(1.0)
        before, memory, _, *_ = rule.step(y, rule.fresh(), _along(probe.random(scale)))
        along_y, along_g = probe.random(size), probe.random(scale)
        y_bar, _, g_bar, _ = update_vjp(rule, before, memory, gradient, adjoint, [{} for _ in y])
        slope = y_bar.dot(along_y) + g_bar.dot(along_g)

        def value(t: float) -> torch.Tensor:
            there = gradient + along_g * t  # noqa: B023 (called here only)
            return adjoint.dot(rule.step(before + along_y * t, memory, _along(there)).y)  # noqa: B023

        # Two steps of difference, so that a kink between two values is not taken for a mistake.
        differences = [(value(t) - value(-t)) / (2 * t) for t in (1e-5, 1e-6)]
        parts = y_bar.norm() * along_y.norm() + g_bar.norm() * along_g.norm() + differences[1].abs()
        if all(bool((slope - difference).abs() > 1e-4 * parts) for difference in differences):
            return False
    return True
