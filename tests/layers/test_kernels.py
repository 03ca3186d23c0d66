"""Numbers by counter, and operators on directions that are never stored."""

import math

import pytest
import torch

from bilevel_optim.kernels import seeded
from bilevel_optim.kernels.counter import mixed, mixed_number, units
from bilevel_optim.problem.random import hashed

from ..problems import close

KINDS = ("normal", "sign", "hartley")
FAR = 2**40 + 2**31 - 3  # offsets of entries that 32 bits cannot count


def how(count=3, kind="normal", offset=0, period=997):
    return torch.arange(count) * 10**12 - 7, torch.arange(count) * 31 % period, period, offset, kind


# ------------------------------------------------------------------------------------------ numbers by counter


def test_the_hash_is_the_same_in_torch_and_in_python():
    values = [0, 1, -1, 2**63 - 1, -(2**63), FAR, -123456789]
    assert [v % 2**64 for v in mixed(torch.tensor(values)).tolist()] == [mixed_number(v % 2**64) for v in values]


@pytest.mark.parametrize("offset", [0, 2**31 - 2, FAR])
def test_entries_follow_from_seed_direction_and_index(offset):
    """Entry i of direction j is made of ``hashed(seed, j, i)``, also where i does not fit into 32 bits."""
    seed, index = 12345, torch.arange(offset, offset + 4)
    for j in range(3):
        key = mixed(mixed(torch.tensor(seed)) + j)
        normal, signs = (units(kind, key, key, 1, index, torch.float64).tolist() for kind in ("normal", "sign"))
        for i, found, sign in zip(index.tolist(), normal, signs, strict=True):
            high = hashed(seed, j, i)  # the upper 63 bits
            assert sign == 2 * (high >> 62) - 1
            radius = math.sqrt(-2 * math.log(((high >> 31) + 0.5) / 2**32))
            low = math.acos(min(max(found / radius, -1), 1)) / (2 * math.pi)  # or 1 less that
            parts = [p * 2**31 for p in (low, 1 - low)]
            assert min(abs(p - (high & (2**31 - 1)) - half) for p in parts for half in (0.0, 0.5)) < 64


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_independent_of_mean_0_and_variance_1(kind):
    n, (keys, row, *_) = 200_000, how(2)
    u = units(kind, keys.unsqueeze(1), row.unsqueeze(1), n, torch.arange(n), torch.float32).double()
    assert (u.mean(1).abs() < 5 / n**0.5).all()
    assert ((u.square().mean(1) - 1).abs() < 5 * (2 / n) ** 0.5).all()
    for a, b in ((u[0], u[1]), (u[0, 1:], u[0, :-1]), (u[0, 2:], u[0, :-2])):
        assert abs(a @ b) / n < 5 / n**0.5
    if kind == "normal":
        assert abs(u.pow(4).mean() - 3) < 5 * (96 / u.numel()) ** 0.5
        below = torch.erfc(-u.flatten().sort().values / 2**0.5) / 2
        distance = (below - torch.linspace(0, 1, u.numel())).abs().max()
        assert distance < 2.2 / u.numel() ** 0.5  # Kolmogorov and Smirnov, one in 10^4


# ------------------------------------------------------------------------------------------ seeded operators


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_references_in_blocks_and_whole(kind, dtype, monkeypatch):
    """Against directions that are stored; blocks that do not divide the sizes; strides; an offset."""
    point, factors, rest = torch.randn(7, 10).to(dtype).t()[:, ::2], torch.randn(5), how(5, kind, FAR, 3)
    keys, row, period, offset, _ = rest
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    index = offset + torch.arange(point.numel())
    u = units(kind, keys.unsqueeze(1), row.unsqueeze(1), period, index, precise)
    moved = (point.reshape(-1).to(precise) + factors.to(precise).unsqueeze(1) * u).to(dtype).view(5, *point.shape)
    total = (factors.to(precise) @ u).view(point.shape).double()
    for block in (1 << 16, 16, 90):
        monkeypatch.setattr(seeded, "BLOCK", block)
        assert torch.equal(seeded.perturbed(point, factors, *rest), moved)
        found = seeded.accumulated(point, factors, *rest)
        assert found.dtype == dtype
        close(found.double(), total, 20 * torch.finfo(dtype).eps)
        close(seeded.squares(point, *rest), u.double().square().sum(1), 1e-10)


def test_a_factor_of_zero_gives_the_point_itself():
    point = torch.randn(100_000)
    assert torch.equal(seeded.perturbed(point, torch.zeros(2), *how(2))[1], point)


def operators():
    """Every operator with arguments."""
    point, factors = torch.randn(6, 2), torch.randn(3)
    return {
        "perturbed": (seeded._PERTURBED, (point, factors, *how(3))),
        "accumulated": (seeded._ACCUMULATED, (point, factors, *how(3))),
        "squares": (seeded._SQUARES, (point, *how(3))),
    }


@pytest.mark.parametrize("name", list(operators()))
def test_registration(name):
    """Schema, fake implementation and autograd registration."""
    operator, args = operators()[name]
    torch.library.opcheck(operator, args)


def test_vmap():
    for operator, args in (operators()[name] for name in ("perturbed", "accumulated")):
        lanes = [torch.stack([a, 2 * a], 1) if a.is_floating_point() else a for a in args if torch.is_tensor(a)]
        rest = [a for a in args if not torch.is_tensor(a)]
        dims = [1 if a.is_floating_point() else None for a in lanes]
        found = torch.vmap(lambda *ts, operator=operator, rest=rest: operator(*ts, *rest), in_dims=(*dims,))(*lanes)
        for i in range(2):
            own = operator(*(a if d is None else a[:, i] for a, d in zip(lanes, dims, strict=True)), *rest)
            assert torch.equal(found[i], own)
