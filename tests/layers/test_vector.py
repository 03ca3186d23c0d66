import pytest
import torch

from bilevel_optim import Vector
from bilevel_optim.problem.vector import stack


def random(dtype=torch.float64):
    return Vector([torch.randn(3, 2, dtype=dtype), torch.randn((), dtype=dtype), torch.randn(4, dtype=dtype)])


def flat(v):
    return torch.cat([t.reshape(-1) for t in v])


@pytest.mark.parametrize("tensors", [3, 1])
def test_algebra_is_that_of_the_concatenated_vector(tensors):
    a, b = (Vector(random()[:tensors]) for _ in range(2))
    torch.testing.assert_close(flat(a + b), flat(a) + flat(b))
    torch.testing.assert_close(flat(a - b), flat(a) - flat(b))
    torch.testing.assert_close(flat(-a), -flat(a))
    torch.testing.assert_close(flat(2.5 * a), 2.5 * flat(a))
    torch.testing.assert_close(flat(a * torch.tensor(2.5)), 2.5 * flat(a))
    torch.testing.assert_close(a.dot(b), flat(a) @ flat(b))
    torch.testing.assert_close(a.norm(), flat(a).norm())
    torch.testing.assert_close(a.max_abs(), flat(a).abs().max())
    scaled = a * [2.0, 3.0, 4.0][:tensors]
    assert all(torch.equal(s, t * k) for s, t, k in zip(scaled, a, (2, 3, 4), strict=False))
    rates = [2.0, 3.0, 4.0][:tensors]
    torch.testing.assert_close(flat(a.descended(b, rates)), flat(a) - flat(b * rates))
    torch.testing.assert_close(flat(a.descended(b, [0.5] * tensors)), flat(a) - 0.5 * flat(b))
    for alpha in (-1.5, torch.tensor(-1.5)):
        torch.testing.assert_close(flat(a.add(b, alpha)), flat(a) - 1.5 * flat(b))
    assert flat(a.zeros_like()).abs().max() == 0
    assert (a * 2).__class__ is Vector


def test_vectors_of_another_number_of_tensors_are_refused():
    """A vector of one tensor too, whose operations are not those of torch for lists of tensors."""
    a, b = Vector([torch.ones(2)]), Vector([torch.ones(2), torch.ones(3)])
    for operation in (a.__add__, a.__sub__, lambda b: a.add(b, 2.0), lambda b: a.descended(b, [0.1]), a.dot):
        with pytest.raises((RuntimeError, ValueError)):
            operation(b)


def test_rates_that_are_tensors_leave_the_types_as_they_are():
    a, rate = random(torch.float32), torch.tensor(0.1, dtype=torch.float64)
    found, expected = a.descended(a, [rate, rate, 0.1]), a.descended(a, [0.1] * 3)
    assert {t.dtype for t in found} == {torch.float32}
    torch.testing.assert_close(found, expected)


def test_stacked_lanes():
    a, b, c = random(), random(), random()
    stacked = stack([a, b, c])
    assert [t.shape[0] for t in stacked] == [3, 3, 3]
    torch.testing.assert_close(flat(stacked.lane(1)), flat(b))
    torch.testing.assert_close(flat(stacked.combine([0.5, 0.0, -2.0])), 0.5 * flat(a) - 2 * flat(c))
    poisoned = stack([a, b * float("nan"), c])
    assert flat(poisoned.combine([1.0, 0.0, 1.0])).isfinite().all()


def test_reductions_accumulate_in_double():
    ones = Vector([torch.full((2**24 + 8,), 1.0, dtype=torch.float32)])
    assert ones.dot(ones).item() == 2**24 + 8
    half = Vector([torch.full((4096,), 0.1, dtype=torch.bfloat16)])
    assert half.dot(half).dtype == torch.float64


def test_max_abs_tells_non_finite_entries_from_large_ones():
    assert Vector([torch.tensor([1e30], dtype=torch.float32), torch.zeros(0)]).max_abs().isfinite()
    assert not Vector([torch.tensor([1.0]), torch.tensor([float("nan"), 1.0])]).max_abs().isfinite()
    assert not Vector([torch.tensor([-float("inf")])]).max_abs().isfinite()
