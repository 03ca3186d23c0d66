"""Random directions as functions of a seed (T3, T4, T19 and 7.1 of the PZOBO specification)."""

import pytest
import torch

from bilevel_optim import Vector
from bilevel_optim.hypergradient.directions import KINDS, Directions

from ..problems import close

every_kind = pytest.mark.parametrize("kind", KINDS)


def point():
    return Vector([torch.randn(3, 2), torch.randn(()), torch.randn(5)])


def matrix(x, kind, count, seed=0):
    directions = Directions(x.zeros_like(), kind, count, seed=seed, smoothing=1.0)
    return torch.cat([t.reshape(count, -1) for t in directions.points([(j, 1.0) for j in range(count)])], 1)


@every_kind
def test_directions_do_not_depend_on_how_many_are_made(kind):
    x = point()
    directions, again = (Directions(x, kind, 9, seed=11, smoothing=0.1) for _ in range(2))
    whole = directions.points([(j, 1.0) for j in range(9)])
    for j in reversed(range(9)):
        assert all(torch.equal(a, b) for a, b in zip(again.points([(j, 1.0)]).lane(0), whole.lane(j), strict=True))
    assert not torch.equal(matrix(x, kind, 1, 11), matrix(x, kind, 1, 12))
    assert all(torch.equal(a, b) for a, b in zip(directions.points([(4, 0.0)]).lane(0), x, strict=True))


def test_lengths_and_orthogonality():
    x, p = point(), 12
    assert torch.allclose(matrix(x, "sphere", 4).norm(dim=1), torch.tensor(p**0.5))
    assert matrix(x, "rademacher", 4).abs().unique().tolist() == [1.0]
    for part in matrix(x, "block_sphere", 4).split([6, 1, 5], 1):
        torch.testing.assert_close(part.norm(dim=1), torch.ones(4))
    for seed in range(5):  # two bases, and a part of a third
        for part in matrix(x, "orthogonal", 30, seed).split(p):
            close(part @ part.T, p * torch.eye(len(part)), 1e-11)


@pytest.mark.parametrize("batches", [400, pytest.param(100_000, marks=pytest.mark.slow)])
@every_kind
def test_mean_and_covariance(kind, batches):
    """On a linear response the estimate has mean w, and the predicted variance."""
    p, count, w = 10, 4, torch.linspace(-1, 2, 10)
    x, estimates = Vector([torch.zeros(p)]), []
    for seed in range(batches):
        directions = Directions(x, kind, count, seed=seed, smoothing=1.0)
        (U,) = directions.points([(j, 1.0) for j in range(count)])
        estimates.append(directions.combine((U @ w) / count)[0])
    estimates = torch.stack(estimates)
    assert (estimates.mean(0) - w).norm() < 4 * directions.variance**0.5 * w.norm() / batches**0.5
    predicted = {"gaussian": p + 1, "orthogonal": p - count}.get(kind, p - 1) / count
    assert directions.variance == pytest.approx(predicted)
    squares = (estimates - w).square().sum(1) / w.dot(w)
    assert abs(squares.mean() - predicted) < 4.5 * squares.std() / batches**0.5 + 1e-12
    if batches == 100_000:
        assert float(squares.mean()) == pytest.approx(predicted, rel=0.02)
    if kind == "gaussian":
        products = (estimates - w).unsqueeze(2) * (estimates - w).unsqueeze(1)
        exact = (w.dot(w) * torch.eye(p) + torch.outer(w, w)) / count
        assert ((products.mean(0) - exact).abs() < 5 * products.std(0) / batches**0.5).all()


def test_relative_smoothing_scales_with_each_tensor():
    """D_l is the root mean square of the tensor; unbiased for any D, and 1 for a tensor of zeros."""
    x = Vector([torch.full((4,), 3.0), torch.zeros(2)])
    plain, relative = (Directions(x, "rademacher", 1, seed=0, smoothing=0.5, relative=r) for r in (False, True))
    for j, factor in enumerate((3.0, 1.0)):
        moved = [own.points([(0, 1.0)])[j][0] - x[j] for own in (relative, plain)]
        torch.testing.assert_close(moved[0], factor * moved[1])
        torch.testing.assert_close(relative.combine(torch.ones(1))[j], plain.combine(torch.ones(1))[j] / factor)


@every_kind
def test_predicted_variance_knows_the_metric(kind):
    """Tensors of different sizes make relative smoothing noisy: D^-1 u is long where u D w is large."""
    x = Vector([torch.tensor(0.1), torch.empty(0), torch.full((4,), 2.0)])
    w, estimates = torch.ones(5), []
    for seed in range(400):
        directions = Directions(x, kind, 3, seed=seed, smoothing=1.0, relative=True)
        moved = directions.points([(j, 1.0) for j in range(3)]) - Vector(t.unsqueeze(0) for t in x)
        coefficients = torch.cat([t.reshape(3, -1) for t in moved], 1) @ w / 3
        estimates.append(torch.cat([t.flatten() for t in directions.combine(coefficients)]))
    squares = (torch.stack(estimates) - w).square().sum(1) / w.dot(w)
    assert abs(squares.mean() - directions.variance) < 4.5 * squares.std() / 400**0.5
    assert directions.variance > 10


def test_predicted_variance_ignores_empty_tensors():
    x, empty = point(), torch.empty(0, 2)
    for scale in ("unbiased", "none"):
        plain, padded = (
            Directions(Vector(t), "block_sphere", 2, seed=0, smoothing=1.0, scale=scale) for t in (x, [*x, empty])
        )
        assert padded.variance == pytest.approx(plain.variance)
