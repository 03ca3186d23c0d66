"""Closed forms and error laws of the linear solvers (section 6.2 of the RAHGD specification)."""

from functools import cache, partial

import pytest
import torch

from bilevel_optim import Vector, linear
from bilevel_optim.solvers.linear import cg, direct, fixed_point, minres, neumann, neumann_term

from ..problems import close


def spd(spectrum, seed=0, dtype=torch.float64):
    spectrum = torch.as_tensor(spectrum, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), generator=generator, dtype=torch.float64))[0]
    return (Q @ torch.diag(spectrum) @ Q.T).to(dtype)


class Product:
    """v -> Hv on a vector of two tensors, counting its calls."""

    def __init__(self, H):
        self.H, self.calls = H, 0

    def __call__(self, v):
        self.calls += 1
        return split(self.H @ torch.cat(v))


def split(v):
    return Vector([v[: len(v) // 3], v[len(v) // 3 :]])


def relative(solution, H, b):
    exact = torch.linalg.solve(H.double(), b.double())
    return float((torch.cat(solution).double() - exact).norm() / exact.norm())


def test_cg_iterates_in_closed_form():
    H, b = Product(torch.diag(torch.tensor([1.0, 2.0]))), Vector([torch.ones(1), torch.ones(1)])
    one, two = (torch.cat(cg(H, b, steps=k).solution) for k in (1, 2))
    close(one, torch.tensor([2 / 3, 2 / 3]), 0, 1e-15)
    close(two, torch.tensor([1.0, 0.5]), 0, 1e-15)


@pytest.mark.parametrize(("solver", "sign"), [(cg, 1.0), (minres, 1.0), (minres, -1.0)])
def test_krylov_solvers_are_exact_after_as_many_steps_as_distinct_eigenvalues(solver, sign):
    H, b = spd([1.0, sign * 2.0, 5.0, sign * 10.0] * 10), torch.randn(40)
    errors = [relative(solver(Product(H), split(b), steps=k).solution, H, b) for k in (3, 4)]
    assert errors[0] > 1e-2
    assert errors[1] < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("steps", [24, 200, 2000])
@pytest.mark.parametrize("solver", [cg, minres])
def test_krylov_solvers_stay_accurate_when_given_far_too_many_iterations(solver, dtype, tolerance, steps):
    H, b = spd(torch.linspace(1, 10, 24), dtype=dtype), torch.randn(24).to(dtype)
    product = Product(H)
    result = solver(product, split(b), steps=steps)
    assert relative(result.solution, H, b) < tolerance
    assert product.calls <= 30
    assert not result.indefinite


@pytest.mark.parametrize("H", [torch.eye(3) * 2, torch.diag(torch.tensor([1.0, 2.0, 2.0]))], ids=["2I", "two"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("solver", [cg, minres])
def test_krylov_solvers_survive_exact_convergence(solver, H, warm):
    """The cases in which an unguarded fixed number of iterations divides 0 by 0."""
    H, b = H.double(), torch.ones(3)
    start = split(torch.linalg.solve(H, b)) if warm else None
    result = solver(Product(H), split(b), start, steps=50)
    assert relative(result.solution, H, b) < 1e-15
    assert result.iterations <= (0 if warm else 2)
    zero = solver(Product(H), split(torch.zeros(3)), steps=5)
    assert torch.cat(zero.solution).abs().max() == 0


def test_cg_follows_its_bound():
    kappa = 100.0
    H, b = spd(torch.logspace(0, 2, 30)), torch.randn(30)
    exact = torch.linalg.solve(H, b)
    rate = (kappa**0.5 - 1) / (kappa**0.5 + 1)
    for steps in (5, 10, 20):
        error = (torch.cat(cg(Product(H), split(b), steps=steps).solution) - exact).norm()
        assert error <= 2 * kappa**0.5 * rate**steps * exact.norm()


@pytest.mark.parametrize("solver", [cg, minres])
def test_tolerance_warm_start_and_damping_of_krylov_solvers(solver):
    H, b = spd(torch.linspace(1, 100, 24)), torch.randn(24)
    loose = solver(Product(H), split(b), steps=100, tol=1e-3)
    assert loose.residual <= 1e-3 * b.norm()
    assert 1 < loose.iterations < 24
    assert (b - H @ torch.cat(loose.solution)).norm() == pytest.approx(float(loose.residual), rel=1e-6)
    near = split(torch.linalg.solve(H, b) * (1 + 1e-6))
    assert solver(Product(H), split(b), near, steps=100, tol=1e-3).iterations == 0
    assert solver(Product(H), split(b), steps=100, atol=0.1).residual <= 0.1
    damped = solver(Product(H), split(b), steps=100, damping=5.0)
    assert relative(damped.solution, H + 5 * torch.eye(24), b) < 1e-12
    far = solver(Product(H), split(b), split(torch.randn(24)), steps=100)
    assert relative(far.solution, H, b) < 1e-12


SPECTRUM = torch.tensor([3.0, 2.0, 1.0, 0.5, -0.2], dtype=torch.float64)
STOPPED = {  # right-hand side, which iterate of CG has the smallest residual, and after which one curvature is negative
    "curvature": ([4.0, -4.0, -2.0, 2.0, 3.0], 1, 2),
    "curvature later": ([-2.0, -4.0, -4.0, 1.0, -1.0], 2, 3),
    "growth": ([2.0, -3.0, -3.0, 0.0, -4.0], 1, 2),
    "growth later": ([3.0, -4.0, -1.0, -1.0, -1.0], 1, 3),
}


def krylov(H, b, k):
    """Iterate k of CG in closed form: the stationary point of v'Hv/2 - b'v in the Krylov space of dimension k."""
    basis = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(H, i) @ b for i in range(k)], 1))[0]
    return basis @ torch.linalg.solve(basis.T @ H @ basis, basis.T @ b)


@cache
def solve_by(solver, lanes, compiled, **options):
    """Return a function that solves a system; each is compiled once."""

    def solve(H, b, start):
        return solver(lambda v: Vector([v[0] @ H]), [b], None if start is None else [start], lanes=lanes, **options)

    if not compiled:
        return solve
    many = torch._dynamo.config.patch(recompile_limit=100)  # all of them have the same code
    return many(torch.compile(solve, backend="eager", fullgraph=True, dynamic=False))


def solved(solver, H, b, start=None, *, way="alone", **options):
    """Solve one system: alone, as a lane next to an easy one, compiled, or in a compiled lane."""
    solve = partial(solve_by(solver, "lane" in way, "compiled" in way, **options), H)
    if "lane" not in way:
        return solve(b, start)
    easy = torch.eye(len(b))[0]
    result = solve(torch.stack([easy, b]), None if start is None else torch.stack([easy / 4, start]))
    assert relative([result.solution[0][0]], H, easy) < 1e-14
    return type(result)(Vector([result.solution[0][1]]), *(t[1] if torch.is_tensor(t) else t for t in result[1:]))


def tensors(result):
    """Return all tensors of a solution."""
    return [*result.solution, *(t for t in result[1:] if torch.is_tensor(t))]


WAYS = ["alone", "lane", "compiled", "compiled lane"]


@pytest.mark.few(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("system", STOPPED)
def test_cg_keeps_the_iterate_of_smallest_residual_where_it_must_stop(system, way):
    H, (b, best, stop) = torch.diag(SPECTRUM), STOPPED[system]
    b = torch.tensor(b)
    iterates = [krylov(H, b, k) for k in range(1, 5)]
    residuals = [float((b - H @ v).norm()) for v in iterates]
    assert min(residuals[:stop]) == residuals[best - 1]
    assert ("growth" in system) == (max(residuals[:stop]) > 10 * residuals[best - 1])
    result = solved(cg, H, b, steps=4, way=way)
    close(result.solution[0], iterates[best - 1], 1e-13)
    assert float(result.residual) == pytest.approx(residuals[best - 1], rel=1e-13)
    assert bool(result.diverged) == ("growth" in system)
    assert result.indefinite
    assert result.iterations == stop
    if "growth" in system:  # the negative curvature has not been met
        early = solved(cg, H, b, steps=stop, way=way)
        close(early.solution[0], iterates[best - 1], 1e-13)
        assert early.diverged
        assert not early.indefinite
    assert float(solved(cg, H, b, steps=1, way=way).residual) == pytest.approx(residuals[0], rel=1e-13)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("b", "flag"),
    [
        ([0.0, 0.0, 0.0, 0.0, 2.0], "indefinite"),
        ([1.0, 0.0, 0.0, 0.0, -5.0], "indefinite"),
        ([1.0, 0.0, 0.0, 0.0, 15**0.5 - 1e-9], "diverged"),  # b'Hb > 0, and CG's step is of length 1e9
    ],
)
def test_cg_whose_first_direction_is_bad_makes_one_step_of_a_safe_length(b, flag, way):
    """Zero would leave the hypergradient without its cross term."""
    H, b = torch.diag(SPECTRUM), torch.tensor(b)
    for steps in (1, 3):
        result = solved(cg, H, b, steps=steps, way=way)
        expected = b * b.norm() / (H @ b).norm()
        close(result.solution[0], expected, 1e-13)
        assert float(result.residual) == pytest.approx(float((b - H @ expected).norm()), rel=1e-13)
        assert result.residual <= 2 * b.norm()
        assert result.iterations == 1
        assert getattr(result, flag) or (steps == 3 and result.indefinite)


def test_cg_of_a_hessian_that_is_zero_stays_where_it_is():
    result = cg(lambda v: v * 0.0, [torch.ones(3)], steps=5)
    assert result.indefinite
    assert torch.cat(result.solution).abs().max() == 0


def test_cg_of_a_definite_system_keeps_its_last_iterate_though_residuals_grow():
    """The error falls all the same; the first step lifts the residual more than tenfold."""
    h = torch.logspace(-4, 0, 30)
    b, exact = h**-0.5, h**-1.5
    results = [cg(lambda v: Vector([h * v[0]]), [b], steps=k) for k in range(5, 61, 5)]
    errors = [float((r.solution[0] - exact).norm() / exact.norm()) for r in results]
    assert cg(lambda v: Vector([h * v[0]]), [b], steps=1).diverged
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9
    assert not any(r.indefinite or r.diverged for r in results)


@pytest.mark.few(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("solver", [cg, minres])
@pytest.mark.parametrize("spectrum", [SPECTRUM, SPECTRUM.abs()], ids=["indefinite", "definite"])
def test_a_start_worse_than_zero_is_dropped(solver, spectrum, way):
    H, b = torch.diag(spectrum), torch.tensor(STOPPED["curvature later"][0])
    for bad in (torch.full((5,), 1e6), -b / spectrum):
        cold, warm = (solved(solver, H, b, start, steps=2, way=way) for start in (torch.zeros(5), bad))
        for one, other in zip(tensors(cold), tensors(warm), strict=True):
            assert torch.equal(one, other)
    good = solved(solver, H, b, b / spectrum * 0.9, steps=2, way=way)
    assert good.residual < 0.11 * b.norm()
    assert solved(solver, H, b, torch.full((5,), torch.nan), steps=2, way=way).solution[0].isnan().any()  # is seen


KINDS = ["numbers", "tensors", "lanes"]  # one system is solved with Python numbers, in a trace with tensors of them


def go_on(H, b, before, steps, kind, monkeypatch):
    """Solve H v = b from (v, direction), with ``lanes`` next to a system of zeros."""
    monkeypatch.setattr(linear, "is_tracing", lambda: kind == "tensors")
    if kind != "lanes":
        start, direction = ([t] if t is not None else None for t in before)
        return cg(lambda v: Vector([H @ v[0]]), [b], start, direction=direction, steps=steps)
    start, direction = ([torch.stack([t, 0 * t])] if t is not None else None for t in before)
    b = torch.stack([b, 0 * b])
    found = cg(lambda v: Vector([v[0] @ H]), [b], start, direction=direction, steps=steps, lanes=True)
    assert not any(t[0][1].any() for t in (found.solution, found.direction))
    first = (Vector([t[0][0]]) if isinstance(t, Vector) else t[0] if torch.is_tensor(t) else t for t in found)
    return type(found)(*first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("calls", "steps"), [(12, 1), (6, 2), (4, 3), (3, 4)])
def test_solves_with_a_kept_direction_are_one_long_solve(calls, steps, kind, monkeypatch):
    """Residuals rise above b on the way, so that residuals alone would have made each solve start from zero."""
    H = spd(torch.logspace(-3, 0, 40))
    b, v, direction, highest = H.inverse() @ torch.randn(40), None, None, 0.0
    for _ in range(calls):
        found = go_on(H, b, (v, direction), steps, kind, monkeypatch)
        v, direction, highest = found.solution[0], found.direction[0], max(highest, float(found.relative))
    whole = go_on(H, b, (None, None), calls * steps, kind, monkeypatch)
    close(v, whole.solution[0], 1e-9, 1e-9)
    close(found.residual, whole.residual, 1e-9, 1e-12)
    assert highest > 1
    restarted = None
    for _ in range(calls):
        restarted = go_on(H, b, (restarted, None), steps, kind, monkeypatch).solution[0]
    assert relative([v], H, b) < 0.9 * relative([restarted], H, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_kept_direction_of_another_system_does_no_harm(seed, kind, monkeypatch):
    """q falls, the residual has no part along the first direction, and the condition is a lower bound."""
    generator = torch.Generator().manual_seed(seed)
    base, v, direction, used = torch.randn(40, generator=generator).double(), None, None, 0
    for k in range(12):
        H = spd(torch.logspace(-3, 0.1 * k, 40), seed + k // 6)  # another basis in the middle
        b = base + 0.05 * torch.randn(40, generator=generator)
        found = go_on(H, b, (v, direction), 6, kind, monkeypatch)
        assert found.condition <= torch.linalg.cond(H) * (1 + 1e-9)
        assert not found.indefinite
        if v is not None:
            new = found.solution[0]
            q = [w @ H @ w / 2 - b @ w for w in (new, v, 0 * v)]
            assert q[0] < min(q[1:])
            r, rest = b - H @ v, b - H @ new
            first = r + direction
            if (q[1] < 0 or r.norm() < b.norm()) and first @ r > 0.1 * r @ r and direction.any():
                assert (rest @ first).abs() < 1e-8 * rest.norm() * first.norm()
                used += 1
        v, direction = found.solution[0], found.direction[0]
    assert used > 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_along_a_kept_direction_is_the_best_one(kind, monkeypatch):
    H, b, v = torch.diag(torch.tensor([1.0, 4.0, 9.0, 2.0])), torch.ones(4), torch.tensor([0.5, 0.1, 0.1, 0.3])
    r = b - H @ v
    for turn, used in (([0.3, 0.2, -0.1, 0.0], True), ([-5.0, -5.0, 0.0, 0.0], False)):
        p = r + torch.tensor(turn) if used else r
        found = go_on(H, b, (v, torch.tensor(turn)), 1, kind, monkeypatch)
        close(found.solution[0], v + (p @ r) / (p @ H @ p) * p, 1e-12, 1e-12)
        found = go_on(H, b, (v, torch.tensor(turn)), 4, kind, monkeypatch)
        assert relative(found.solution, H, b) < (0.2 if used else 1e-12)  # four directions, one of them given


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_direction_of_negative_curvature_ends_the_solve_and_is_dropped(kind, monkeypatch):
    H, b, v = torch.diag(torch.tensor([1.0, -4.0, 2.0])), torch.ones(3), torch.tensor([0.5, -0.2, 0.3])
    found = go_on(H, b, (v, torch.tensor([0.0, 3.0, 0.0])), 5, kind, monkeypatch)
    assert found.indefinite
    assert not found.direction[0].any()
    assert found.residual <= 2 * (b - H @ v).norm()
    close(found.residual, (b - H @ found.solution[0]).norm(), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_condition_is_a_lower_bound_also_with_a_long_kept_direction(kind, monkeypatch):
    H, b = torch.diag(torch.tensor([1.0, 2.0, 1.5])), torch.tensor([1.0, 0.0, 0.0])
    v = torch.tensor([0.99, 0.0, 0.0])
    for steps in (1, 2, 3):
        found = go_on(H, b, (v, torch.tensor([0.0, 1.0, 0.3])), steps, kind, monkeypatch)
        assert 1 <= found.condition <= 2 + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_a_solve_that_diverges_keeps_no_direction(kind, monkeypatch):
    H, b = torch.tensor(SYSTEMS["not symmetric"]).double(), torch.tensor([1.0, 2.0, -1.0]).double()
    found = go_on(H.mT if kind == "lanes" else H, b, (None, None), 9, kind, monkeypatch)
    assert found.diverged
    assert not found.direction[0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_cg_keeps_a_start_of_larger_residual_that_is_nearer_in_the_norm_of_the_hessian(kind, monkeypatch):
    H, b = torch.diag(torch.tensor([1e-2, 1.0])), torch.tensor([0.1, 0.0])  # the solution is (10, 0)
    for start, kept in (([9.0, 0.2], True), ([9.0, 0.9], True), ([9.0, 1.1], False), ([-1.0, 0.11], False)):
        v = torch.tensor(start)
        assert (b - H @ v).norm() > b.norm()
        found = go_on(H, b, (v, None), 0, kind, monkeypatch)
        assert torch.equal(found.solution[0], v if kept else 0 * v)
    found = go_on(torch.diag(torch.tensor([-0.1, 1.0])), b, (torch.tensor([2.0, 0.0]), None), 0, kind, monkeypatch)
    assert not found.solution[0].any()  # v'Hv < 0: such starts would grow from solve to solve


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("solve", [cg, minres])
def test_a_solve_that_the_number_of_iterations_ends_is_unfinished(solve, lanes):
    """Unless the residual times the condition is small, or the rest of it has no counterpart."""
    H = torch.logspace(0, -2, 40, dtype=torch.float64)
    b = torch.ones(2, 40, dtype=torch.float64) if lanes else torch.ones(40, dtype=torch.float64)

    def unfinished(diagonal, steps):
        found = solve(lambda v: Vector([diagonal * v[0]]), [b], steps=steps, lanes=lanes)
        return found.unfinished.all().item()

    assert unfinished(H, 10)
    assert not unfinished(H, 60)
    assert not unfinished(1 + H, 10)
    if solve is minres:
        assert not unfinished((H > 0.1) * (1 + H), 10)  # half of b is in the kernel


def test_minres_iterates_in_closed_form():
    """b - a H b is least at a = b'Hb / b'HHb = -1/5."""
    H, b = Product(torch.diag(torch.tensor([1.0, -2.0]))), split(torch.ones(3)[:2])
    one, two = (torch.cat(minres(H, b, steps=k).solution) for k in (1, 2))
    close(one, torch.tensor([-0.2, -0.2]), 0, 1e-15)
    close(two, torch.tensor([1.0, -0.5]), 0, 1e-15)


def test_minres_has_the_least_residual_of_its_krylov_space():
    H, b = spd(torch.linspace(-3, 5, 12)), torch.randn(12)
    powers = torch.stack([torch.linalg.matrix_power(H / 5, k) @ b for k in range(9)], 1)
    for steps in (1, 2, 5, 8):
        least = torch.linalg.lstsq(H @ powers[:, :steps], b[:, None]).solution
        truth = (b - H @ powers[:, :steps] @ least[:, 0]).norm()
        result = minres(Product(H), split(b), steps=steps)
        assert float(result.residual) == pytest.approx(float(truth), rel=1e-9)
        assert float((b - H @ torch.cat(result.solution)).norm()) == pytest.approx(float(truth), rel=1e-9)


def test_minres_solves_where_cg_must_stop():
    """24 eigenvalues, 8 of them negative."""
    spectrum = torch.logspace(0, 1, 24) * torch.tensor([-1.0, 1.0, 1.0] * 8)
    H, b = spd(spectrum), torch.randn(24)
    stopped, solved = (solver(Product(H), split(b), steps=60) for solver in (cg, minres))
    assert stopped.indefinite
    assert relative(stopped.solution, H, b) > 0.5
    assert not solved.indefinite
    assert relative(solved.solution, H, b) < 1e-13
    assert solved.residual < 1e-13 * b.norm()


def test_minres_goes_through_a_step_that_gains_nothing():
    """b'Hb = 0: the first residual is as large as b, and the second is zero."""
    H, b = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), torch.tensor([1.0, 0.0, 0.0])
    assert minres(Product(H), split(b), steps=1).residual == 1
    result = minres(Product(H), split(b), steps=9)
    close(torch.cat(result.solution), torch.tensor([0.0, 1.0, 0.0]), 0, 1e-15)
    assert result.iterations == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_minres_stops_at_the_least_squares_of_a_singular_system(dtype):
    spectrum = torch.linspace(-3, 5, 40)
    spectrum[:15] = 0
    H, b = spd(spectrum, dtype=dtype), torch.randn(40).to(dtype)
    A, c = H.double(), b.double()
    least = (c - A @ torch.linalg.pinv(A, rtol=1e-5, hermitian=True) @ c).norm()
    result = minres(Product(H), split(b), steps=200)
    rounding = 100 * torch.finfo(dtype).eps  # of the recursion, over 14 to 25 iterations
    assert float(result.residual) == pytest.approx(float(least), rel=rounding)
    assert float((c - A @ torch.cat(result.solution).double()).norm()) == pytest.approx(float(least), rel=rounding)
    inside = H @ b
    assert minres(Product(H), split(inside), steps=200).residual < 1e-3 * torch.finfo(dtype).eps ** 0.5 * inside.norm()


@pytest.mark.parametrize("terms", [1, 2, 5, 50])
def test_neumann_is_its_series(terms):
    H, b, lr = spd(torch.linspace(0.5, 4, 12)), torch.randn(12), 0.3
    expected = lr * sum(torch.linalg.matrix_power(torch.eye(12) - lr * H, i) @ b for i in range(terms))
    for solver, steps in ((neumann, terms - 1), (fixed_point, terms)):
        product = Product(H)
        result = solver(product, split(b), steps=steps, lr=lr)
        close(torch.cat(result.solution), expected, 1e-12, 1e-12)
        assert product.calls == terms - 1


@pytest.mark.parametrize("solver", [neumann, fixed_point])
def test_error_law_of_the_series(solver):
    """The error contracts by exactly 1 - lr mu per step in the slowest direction."""
    H, lr = spd(torch.linspace(0.5, 4, 12)), 0.25
    slow = torch.linalg.eigh(H)[1][:, 0]
    errors = [
        1 - 0.5 * float(slow @ torch.cat(solver(Product(H), split(slow), steps=k, lr=lr).solution)) for k in (10, 30)
    ]
    terms = 1 if solver is neumann else 0
    assert errors[0] == pytest.approx((1 - lr * 0.5) ** (10 + terms), rel=1e-10)
    assert errors[1] / errors[0] == pytest.approx((1 - lr * 0.5) ** 20, rel=1e-10)


def test_series_take_one_rate_per_tensor_tolerance_damping_and_warm_start():
    H, b = spd(torch.linspace(1, 3, 12)), torch.randn(12)
    for solver in (neumann, fixed_point):
        result = solver(Product(H), split(b), steps=400, lr=[0.2, 0.3])
        assert relative(result.solution, H, b) < 1e-12
        assert solver(Product(H), split(b), steps=400, lr=0.3, tol=1e-3).iterations < 30
        damped = solver(Product(H), split(b), steps=400, lr=0.3, damping=1.0)
        assert relative(damped.solution, H + torch.eye(12), b) < 1e-12
    exact = split(torch.linalg.solve(H, b))
    assert relative(fixed_point(Product(H), split(b), exact, steps=1, lr=0.3).solution, H, b) < 1e-14
    for series in (neumann, partial(neumann_term, terms=2)):
        with pytest.raises(ValueError, match="starts from zero"):
            series(Product(H), split(b), exact, steps=1, lr=0.3)


@pytest.mark.parametrize(
    ("solve", "spectra", "iterations"),
    [
        (partial(cg, steps=4, tol=1e-6), [torch.ones(6), torch.logspace(0, 3, 6), -torch.ones(6)], [1, 4, 1]),
        (
            partial(minres, steps=4, tol=1e-6),
            [torch.ones(6), torch.logspace(0, 3, 6), torch.tensor([-1.0, 2.0] * 3)],
            None,
        ),
        (partial(neumann, steps=60, lr=0.9, tol=1e-3), [torch.full((6,), s) for s in (1.0, 0.2, 0.7)], None),
        (partial(fixed_point, steps=60, lr=0.9, tol=1e-3), [torch.full((6,), s) for s in (1.0, 0.2, 0.7)], None),
    ],
    ids=["cg", "minres", "neumann", "fixed_point"],
)
def test_each_lane_stops_at_its_own_tolerance(solve, spectra, iterations):
    """Easy, hard and indefinite systems side by side."""
    H, b = torch.stack(spectra), torch.randn(3, 6)
    result = solve(lambda v: Vector([H * v[0]]), [b], lanes=True)
    for i in range(3):
        one = solve(lambda v, i=i: Vector([H[i] * v[0]]), [b[i]])
        close(result.solution[0][i], one.solution[0], 1e-12, 1e-12)
        assert result.iterations[i] == one.iterations
        torch.testing.assert_close(result.residual[i], one.residual)
        if iterations:
            assert result.indefinite[i] == one.indefinite == (i == 2)
    assert len(set(result.iterations.tolist())) == (2 if iterations else 3)
    assert iterations is None or result.iterations.tolist() == iterations


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lanes_of_matrices_are_solved_directly(dtype):
    """Definite and indefinite ones, each as by itself, with the damping on its diagonal."""
    H = torch.stack([spd(torch.logspace(0, 2, 6)), spd(torch.tensor([-1.0, 2.0] * 3), seed=1)])
    b = torch.randn(2, 6).to(dtype)
    result = direct(H, [b[:, :2], b[:, 2:].reshape(2, 2, 2)], damping=0.5, lanes=True)
    found = torch.cat([result.solution[0], result.solution[1].reshape(2, 4)], 1)
    exact = torch.linalg.solve(H + 0.5 * torch.eye(6), b.double())
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    close(found.double(), exact, tolerance, tolerance)
    assert result.iterations.tolist() == [1, 1]
    one = direct(H[1], split(b[1]), damping=0.5)
    close(torch.cat(one.solution).double(), exact[1], tolerance, tolerance)
    assert one.relative.shape == ()


SYSTEMS = {
    "definite": [[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 3.0]],
    "indefinite": [[2.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 1.0]],
    "not symmetric": [[1.0, 1000.0, 0.0], [-1000.0, 1.0, 0.0], [0.0, 0.0, 1.0]],  # so that the residual grows
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("start", [None, [1.0, -1.0, 0.5]])
@pytest.mark.parametrize("options", [{"steps": 2}, {"steps": 9, "tol": 1e-3}, {"steps": 9, "damping": 0.5}], ids=str)
def test_a_lane_of_several_systems_is_solved_like_a_single_one(system, start, options, monkeypatch):
    """One is solved with Python numbers, several with tensors of them, as is one in a trace."""
    matrix, b = torch.tensor(SYSTEMS[system]).double(), torch.tensor([1.0, 2.0, -1.0]).double()
    first = None if start is None else torch.tensor(start).double()
    one = cg(lambda v: Vector([matrix @ v[0]]), [b], None if first is None else [first], **options)
    some = cg(
        lambda v: Vector([v[0] @ matrix.mT]), [b[None]], None if first is None else [first[None]], lanes=True, **options
    )
    monkeypatch.setattr(linear, "is_tracing", lambda: True)
    masked = cg(lambda v: Vector([matrix @ v[0]]), [b], None if first is None else [first], **options)
    for other in (some, masked):
        torch.testing.assert_close(one.solution[0], other.solution[0].reshape(3), rtol=1e-10, atol=1e-12)
        for name in ("residual", "relative", "iterations", "indefinite", "diverged"):
            a, b = getattr(one, name), getattr(other, name)
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.double(), b.reshape(()).double(), rtol=1e-9, atol=1e-12, msg=name)
    assert bool(one.diverged) == (system == "not symmetric")


def test_an_infinite_product_shows_in_the_solution():
    """Here the step would be zero: the curvature is infinite."""
    solution = cg(lambda v: v * float("inf"), [torch.ones(2)], steps=3).solution
    assert solution[0].isnan().all()


@pytest.mark.parametrize("solve", [neumann, fixed_point])
def test_traced_series_end_where_others_stop(solve, monkeypatch):
    """In a trace all iterations are made: those beyond the tolerance change nothing."""
    H, b = torch.tensor([[0.5, 1.0], [0.9, 0.8]]), torch.tensor([[1.0, 2.0], [-1.0, 1.0]])
    calls = []

    def product(v):
        calls.append(v)
        return Vector([H * v[0]])

    expected = solve(product, [b], steps=40, lr=0.9, tol=1e-3, lanes=True)
    assert len(calls) < 39
    monkeypatch.setattr(linear, "is_tracing", lambda: True)
    found = solve(product, [b], steps=40, lr=0.9, tol=1e-3, lanes=True)
    for a, c in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(a, c)


SCALES = [
    *[(torch.float32, scale, 1e-4) for scale in (1e-30, 1e30)],
    (torch.bfloat16, 1e-30, 0.1),
    *[(torch.float16, scale, 3e-3) for scale in (1e-4, 1e3)],
]


@pytest.mark.parametrize("solver", [cg, minres])
@pytest.mark.parametrize("way", ["alone", "lanes", "two tensors", "traced"])
@pytest.mark.parametrize("scaled", ["b", "both"])
@pytest.mark.parametrize(("dtype", "scale", "tolerance"), SCALES, ids=str)
def test_scales_of_either_side_do_not_matter(solver, way, scaled, dtype, scale, tolerance, monkeypatch):
    """Squared terms of the sums would be zero or infinite in the type of the parameters."""
    if way == "traced":
        monkeypatch.setattr(linear, "is_tracing", lambda: True)
    H, b = torch.linspace(0.5, 2.0, 8, dtype=dtype), torch.linspace(-1.0, 1.0, 8, dtype=dtype)
    H, b = H * scale if scaled == "both" else H, b * scale
    expected = b.double() / H.double()
    cut = {"alone": [8], "traced": [8], "lanes": [8], "two tensors": [3, 5]}[way]
    matrix, right = (Vector(t[None] if way == "lanes" else t for t in side.split(cut)) for side in (H, b))

    def product(v):
        return Vector(h * t for h, t in zip(matrix, v, strict=True))

    for start in (
        None,
        right.zeros_like(),
        Vector((t.double() / h * 0.5).to(dtype) for t, h in zip(right, matrix, strict=True)),
    ):
        result = solver(product, right, start, steps=20, tol=tolerance / 10, lanes=way == "lanes")
        found = torch.cat([t.reshape(-1) for t in result.solution])
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= tolerance * expected.norm()
        assert result.residual <= tolerance * b.double().norm()
        assert bool(result.iterations)
        assert not bool(result.diverged)


@pytest.mark.parametrize("solve", [linear.cg, linear.minres])
@pytest.mark.parametrize("other", [torch.float32, torch.float16])
def test_the_order_of_tensors_of_two_types_does_not_matter(solve, other):
    """The coarsest type sets where rounding begins, and the narrowest one whether the system is scaled."""
    n, scale = 6, 1e-3 if other is torch.float16 else 1.0
    basis = torch.linalg.qr(torch.randn(2 * n, 2 * n, dtype=torch.float64))[0]
    H = basis @ torch.diag(torch.linspace(1, 8, 2 * n, dtype=torch.float64)) @ basis.T
    H[:n, n:] = H[n:, :n] = 0
    b = torch.randn(2 * n, dtype=torch.float64) * scale
    found = []
    for order in (slice(None), slice(None, None, -1)):
        parts = [(slice(n), torch.float64), (slice(n, None), other)][order]

        def product(v, parts=parts):
            rows = [H[own, own] @ t.double() for (own, _), t in zip(parts, v, strict=True)]
            return Vector(t.to(kind) for t, (_, kind) in zip(rows, parts, strict=True))

        solved = solve(product, [b[own].to(kind) for own, kind in parts], steps=100)
        found.append(solved)
        for t, (own, kind) in zip(solved.solution, parts, strict=True):
            exact = torch.linalg.solve(H[own, own], b[own].to(kind).double())
            assert (t.double() - exact).norm() <= 50 * torch.finfo(other).eps * exact.norm()
    assert not any(bool(solved.diverged) or bool(solved.indefinite) for solved in found)
    assert found[0].iterations == found[1].iterations < 30


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_squares_of_the_narrowest_type_stay_in_its_range(order):
    parts = [(torch.tensor([1.0, 2.0]), torch.float64), (torch.tensor([3.0, 4.0]), torch.float32)][order]
    b = [1e-25 * torch.ones(2, dtype=kind) for _, kind in parts]
    solved = linear.cg(lambda v: Vector(H.to(t) * t for (H, _), t in zip(parts, v, strict=True)), b, steps=20)
    for (H, _), t in zip(parts, solved.solution, strict=True):
        close(t * 1e25, 1 / H.to(t), 1e-6, 1e-6)
