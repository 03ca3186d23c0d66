"""EpochSGD: stochastic gradient steps in epochs of doubling length, each from the mean of the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.vector import Vector

__all__ = ["epoch_sgd"]


def epoch_sgd(
    oracle: Oracle,
    start: Vector,
    epochs: int,
    rates: float | Callable[[int], Sequence[float]],
    draw: Callable[[], Sample] | None = None,
    *,
    first: int = 1,
) -> list[Vector]:
    r"""Return the means of the epochs of a lower solve; epoch e has :math:`2^e` steps of one length.

    .. math:: z_{j+1} = z_j - \beta_e \nabla_y g(x, z_j; \eta_{e,j}), \qquad z_0 = Y_{e-1}, \qquad
              Y_e = 2^{-e} \sum_{j < 2^e} z_j .

    With :math:`\beta_e = \beta_0 2^{-e}` the error of :math:`Y_e` falls like :math:`2^{-e/2}` for any strongly convex g
    whose gradients have noise of bounded variance. The last step of an epoch is left out, because its result would not
    be used.

    Args:
        oracle: the losses at x; costs :math:`2^{E+1} - 2 - E` lower gradients for E epochs from the first one.
        start: :math:`Y_0`, or the mean that the first of these epochs starts from.
        epochs: E, their number.
        rates: :math:`\beta_0`, about one over the strong convexity of g; or epoch -> :math:`\beta_e`, one per lower
            tensor, for example at most 1/L, without which stiff directions grow in the first epochs.
        draw: returns the lower sample of the next step. Default: the next one of g.
        first: number of the first epoch. Default: 1.

    Returns:
        :math:`Y_e` for each epoch.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> oracle = Oracle([x], [y], lambda: y.sum(), lambda: (y - 1 + x).square().sum() / 2)
        >>> epoch_sgd(oracle, oracle.y, 2, rates=1.0)  # 0, 1/2; and 1/4, 7/16, 37/64, 175/256
        [(tensor([0.2500]),), (tensor([0.4873]),)]

    Source: Hu, Wang, Xie, Krause, Kuhn (2023), arXiv:2310.18535, algorithm 1; the lower solver of `RTMLMC`.
    """
    draw = partial(oracle.g.draw, once=True) if draw is None else draw
    means, z = [], start
    for e in range(first, first + epochs):
        rate = rates(e) if callable(rates) else [rates * 2.0**-e] * len(z)
        total = z
        for _ in range(2**e - 1):
            z = z.descended(oracle.at(lower=z).lower(draw())[1], rate)
            total = total + z
        z = Vector(t / 2**e for t in total)
        means.append(z)
    return means
