r"""Finite-difference formulas for a first derivative at 0, in exact arithmetic.

.. math:: \psi'(0) = \frac1\nu \sum_j c_j\, \psi(j\nu) + O(\nu^p)
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

__all__ = ["KINDS", "Stencil", "inner_weights", "stencil"]

KINDS = ("central", "forward", "centred")


class Stencil(NamedTuple):
    """Nodes and weights of a formula.

    Attributes:
        kind: ``"central"``, ``"forward"`` or ``"centred"``.
        nodes: integers j, ascending, without those of zero weight.
        weights: :math:`c_j`, exact.
        interpolation: weights that extrapolate values at the nodes to 0, exact (their error is of the same order).
    """

    kind: str
    nodes: tuple[int, ...]
    weights: tuple[Fraction, ...]
    interpolation: tuple[Fraction, ...]


def stencil(order: int, kind: str = "auto") -> Stencil:
    r"""Return the formula of a given order p.

    * ``"central"`` (even p): nodes :math:`\pm1, \dots, \pm p/2`, antisymmetric weights, smallest constants;
    * ``"forward"`` (any p): nodes 0 to p, for functions that are known on one side only; its weights grow like
      :math:`2^p`;
    * ``"centred"`` (odd p): nodes :math:`-(p-1)/2, \dots, (p+1)/2`, nearly central, constants close to the central
      ones;
    * ``"auto"``: central for even p, forward for odd p.

    Args:
        order: p >= 1.
        kind: one of the above. Default: ``"auto"``.

    Raises:
        ValueError: for an order that the kind does not have.

    Example:
        >>> formula = stencil(2)
        >>> formula.nodes, [str(c) for c in formula.weights]
        ((-1, 1), ['-1/2', '1/2'])
    """
    if not isinstance(order, int) or isinstance(order, bool) or order < 1:
        raise ValueError(f"Invalid order value: {order} (an integer of at least 1)")
    if kind == "auto":
        kind = "forward" if order % 2 else "central"
    if kind == "central" and order % 2 == 0:
        nodes = tuple(j for j in range(-order // 2, order // 2 + 1) if j)
    elif kind == "forward":
        nodes = tuple(range(order + 1))
    elif kind == "centred" and order % 2:
        nodes = tuple(range(-(order - 1) // 2, (order + 1) // 2 + 1))
    else:
        raise ValueError(
            f"Invalid stencil value: {kind} (order {order}; central needs an even order, centred an odd one, forward "
            "takes any)"
        )
    return Stencil(kind, nodes, _derivative_weights(nodes), _interpolation_weights(nodes))


def inner_weights(nodes: Sequence[int]) -> list[float]:
    """Return the weights of the formula, of lower order, without the outermost nodes, which get zeros."""
    inner = [j for j in nodes if abs(j) < max(map(abs, nodes))]
    weights = dict(zip(inner, _derivative_weights(inner), strict=True))
    return [float(weights.get(j, 0)) for j in nodes]


def _derivative_weights(nodes: Sequence[int]) -> tuple[Fraction, ...]:
    """Return derivatives at 0 of the Lagrange polynomials of the nodes and 0 (its weight is zero if it is no node)."""
    full = sorted({0, *nodes})
    weights = {}
    for j in full:
        others = [i for i in full if i != j]
        if j == 0:
            weights[j] = -sum((Fraction(1, i) for i in others), Fraction(0))
        else:
            numerator = prod(-i for i in others if i != 0)
            weights[j] = Fraction(numerator, prod(j - i for i in others))
    assert weights[0] == 0 or 0 in nodes
    assert all(sum(c * j**k for j, c in weights.items()) == (k == 1) for k in range(len(full)))
    return tuple(weights[j] for j in nodes)


def _interpolation_weights(nodes: Sequence[int]) -> tuple[Fraction, ...]:
    """Return the values at 0 of the Lagrange polynomials of the nodes."""
    return tuple(Fraction(prod(-i for i in nodes if i != j), prod(j - i for i in nodes if i != j)) for j in nodes)
