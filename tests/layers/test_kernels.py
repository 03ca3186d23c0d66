"""Operators with a Triton program: the torch references, the registration, and the programs without a GPU."""

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bilevel_optim as bo
from bilevel_optim import linear
from bilevel_optim.kernels import cg, registry, seeded
from bilevel_optim.kernels.counter import mixed, mixed_number, units
from bilevel_optim.problem.random import hashed

from ..problems import close

KINDS = ("normal", "sign", "hartley")
FAR = 2**40 + 2**31 - 3  # offsets of entries that 32 bits cannot count
OLD_INTERPRETER = torch.__version__ < (2, 12) and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4)
needs_triton = pytest.mark.skipif(registry.programs() is None, reason="no Triton")


@pytest.fixture(scope="module")
def ask():
    """Ask for a check in a process of its own, and return what it finds."""
    served = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.layers.triton_alone"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip

    def asked(question):
        print(question, file=served.stdin, flush=True)
        found = json.loads(served.stdout.readline())
        assert not isinstance(found, dict) or "error" not in found, found["error"]
        return found

    with served:
        yield asked


@pytest.fixture(scope="module")
def interpreted(ask):
    """What Triton's interpreter finds: differences from the references, and loads."""
    return ask("loads" if OLD_INTERPRETER else "interpreted")


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
    vectors, rr = [torch.randn(2, 5) for _ in range(4)], torch.rand(2)
    return {
        "perturbed": (seeded._PERTURBED, (point, factors, *how(3))),
        "accumulated": (seeded._ACCUMULATED, (point, factors, *how(3))),
        "squares": (seeded._SQUARES, (point, *how(3))),
        "cg_step": (cg._OPERATOR, (*vectors, rr, torch.tensor([True, False]), torch.zeros(2, dtype=torch.float64))),
    }


@pytest.mark.parametrize("name", list(operators()))
def test_registration(name):
    """Schema, fake implementation and autograd registration; a program for CUDA with the same arguments."""
    operator, args = operators()[name]
    torch.library.opcheck(operator, args)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"bilevel_optim::{name}", "CUDA")
    if registry.programs() is not None:
        reference = cg if name == "cg_step" else seeded
        signatures = [inspect.signature(getattr(module, name)) for module in (reference, registry.programs())]
        assert signatures[0].parameters == signatures[1].parameters


def test_vmap():
    for operator, args in (operators()[name] for name in ("perturbed", "accumulated", "cg_step")):
        lanes = [torch.stack([a, 2 * a], 1) if a.is_floating_point() else a for a in args if torch.is_tensor(a)]
        rest = [a for a in args if not torch.is_tensor(a)]
        dims = [1 if a.is_floating_point() else None for a in lanes]
        found = torch.vmap(lambda *ts, operator=operator, rest=rest: operator(*ts, *rest), in_dims=(*dims,))(*lanes)
        for i in range(2):
            own = operator(*(a if d is None else a[:, i] for a, d in zip(lanes, dims, strict=True)), *rest)
            for one, all_ in zip(*((r,) if torch.is_tensor(r) else r for r in (own, found)), strict=True):
                assert torch.equal(all_[i], one)


# ------------------------------------------------------------------------------------------ conjugate gradients


def test_conjugate_gradients_made_of_the_step():
    """Lane by lane the iterates of the solver; the third lane is indefinite."""
    A = torch.randn(3, 6, 6)
    H = A @ A.mT + 0.1 * torch.eye(6) * torch.tensor([1.0, 1.0, -500.0]).view(-1, 1, 1)
    b = torch.randn(3, 6)
    v, r, p, rr, active = torch.zeros(3, 6), b, b, b.square().sum(1), torch.ones(3, dtype=torch.bool)
    for steps in range(1, 5):
        v, r, p, rr, _, negative = cg.cg_step(v, r, p, torch.einsum("nij,nj->ni", H, p), rr, active, 0 * rr)
        active = active & ~negative
        expected = linear.cg(lambda q: bo.Vector([torch.einsum("nij,nj->ni", H, q[0])]), [b], steps=steps, lanes=True)
        close(v[active], expected.solution[0][active], 1e-11)  # of the third lane another iterate is kept
        close(rr[active].sqrt(), expected.residual[active], 1e-11)
        assert torch.equal(~active, expected.indefinite)
    assert not active.all()


@pytest.mark.parametrize("lanes", [True, False])
def test_solver_on_flat_vectors_is_the_solver(lanes):
    """The GPU's path, here with the reference: several tensors, lanes, a start, a tolerance."""
    A, b = torch.randn(3, 9, 9), [torch.randn(3, 4), torch.randn(3, 5)]
    H = A @ A.mT / 9 + torch.eye(9) * torch.tensor([1.0, 1.0, -9.0 if lanes else 1.0]).view(-1, 1, 1)

    def product(v):
        return bo.Vector(torch.einsum("nij,nj->ni", H, torch.cat([*v], 1)).split([4, 5], 1))

    b = bo.Vector(b)
    first = linear.cg(product, b, steps=2, lanes=lanes)
    random = bo.Vector([torch.randn(3, 4), torch.randn(3, 5)])
    for start, turn in ((None, None), (random, None), (first.solution, first.direction)):
        v, r, kept, _ = linear._choose_start(product, b, start, lanes, energy=True)
        assert turn is None or kept.any()
        for steps, tol in ((3, 0.0), (30, 1e-6)):
            found = linear._fused(product, b, v, r, turn, linear._Stop(steps, tol, 0.0, tol), lanes)
            expected = linear.cg(product, b, start, steps=steps, tol=tol, lanes=lanes, direction=turn)
            ours, theirs = ((*s.solution, *s.direction, *s[1:-2]) for s in (found, expected))
            for one, other in zip(ours, theirs, strict=True):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                close(one.double(), other.double(), 1e-9)
            assert bool(found.indefinite.any()) == lanes


# ------------------------------------------------------------------------------------------ programs


@needs_triton
@pytest.mark.skipif(OLD_INTERPRETER, reason="the interpreter of Triton 3.6 does not run with NumPy 2.4")
def test_programs_give_what_the_references_give(interpreted):
    """In Triton's interpreter, which rounds to bfloat16 towards zero, so up to two places differ there."""
    assert len(interpreted["worst"]) == 3 * 4
    for case, places in interpreted["worst"].items():
        assert places <= (2 if case.startswith("bfloat16") else 4), case


@needs_triton
def test_a_step_of_conjugate_gradients_loads_every_entry_a_few_times(interpreted):
    """And what its blocks have found once, not once in every block: twice the entries, twice the loads."""
    fewer, more = interpreted["loads"]
    assert fewer >= 7 * 32 * 16
    assert more == pytest.approx(2 * fewer, rel=0.05)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs here")
def test_broken_triton_counts_as_missing():
    """It imports here, but finds no driver."""
    operator, args = operators()["accumulated"]
    launched = registry.launch_of(seeded._accumulated)
    registry._runs.cache_clear()
    with pytest.warns(bo.BilevelWarning, match="Triton cannot run on cpu"):
        found = launched(*args)
    assert torch.equal(found, operator(*args))
    assert torch.equal(launched(*args), found)  # and says so once


@needs_triton
@pytest.mark.slow  # the same programs are interpreted above
@pytest.mark.parametrize("capability", ["80", "90"])
def test_programs_compile_without_a_gpu(capability, tmp_path, ask):
    found = ask(f"compiled {capability} {tmp_path}")
    assert len(found) == 9
    assert min(found.values()) > 1000


def test_without_triton_everything_works(ask):
    """The import fails, and the operators take the references, whatever the device."""
    assert ask("without") > 0


def test_launch_without_triton_is_the_reference(monkeypatch):
    operator, args = operators()["accumulated"]
    monkeypatch.setattr(registry, "programs", lambda: None)
    registry._runs.cache_clear()
    launched = registry.launch_of(seeded._accumulated)
    assert torch.equal(launched(*args), operator(*args))
