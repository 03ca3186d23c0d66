"""Oracles are at a point and never change; many problems as one; vmap, chunks or a loop; ranks without a group."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo
from bilevel_optim import Vector
from bilevel_optim.distributed.ranks import Ranks
from bilevel_optim.oracle import batched
from bilevel_optim.oracle.lanes import stacked
from bilevel_optim.oracle.point import in_place
from bilevel_optim.oracle.session import EvaluationOptions, Session
from bilevel_optim.problem.objective import Sample

# ---------------------------------------------------------------------------------------------------- at a point


def scalars():
    """g = x y^3 + y, f = x^2 y: everything is known at any point."""
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    return x, y, bo.Oracle([x], [y], lambda: (x**2 * y).sum(), lambda: (x * y**3 + y).sum())


def figures(oracle, x, y):
    """Return value, gradients and products in v = 5 at a point, and their expected values."""
    f, g, v = oracle.f.draw(), oracle.g.draw(), Vector([torch.tensor([5.0])])
    loss, in_x, in_y = oracle.upper(f)
    alone, in_x_alone = oracle.upper_alone(f)
    value, slope = oracle.lower(g)
    with oracle.lower_system(g) as system:
        cross, hvp = system.both(v)
    _, hessian, mixed = oracle.lower_matrices(g)
    found = [alone, *in_x_alone, loss, *in_x, *in_y, value, *slope, *cross, *hvp, hessian, mixed]
    expected = [x * x * y, 2 * x * y, x * x * y, 2 * x * y, x * x, x * y**3 + y, 3 * x * y**2 + 1]
    expected += [15 * y**2, 30 * x * y, 6 * x * y, 3 * y**2]
    return [float(t) for t in found], pytest.approx(expected, rel=1e-13)


def contents(*tensors):
    return [(t.data_ptr(), t.detach().clone(), t.grad, t.requires_grad, t.is_leaf) for t in tensors]


def unchanged(before, *tensors):
    pairs = zip(before, contents(*tensors), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) and a[2:] == b[2:] for a, b in pairs)


def test_an_oracle_is_at_its_point_and_changes_nothing_live():
    x, y, oracle = scalars()
    before, elsewhere = contents(x, y), [torch.tensor([-1.0])]
    values = Vector([torch.tensor([0.5], requires_grad=True)])
    oracles = {
        (2.0, 3.0): oracle,
        (0.5, 3.0): oracle.at(upper=values),
        (2.0, -1.0): oracle.at(lower=elsewhere),
        (0.5, -1.0): oracle.at(values, elsewhere),
        (-1.0, 0.5): oracle.at(values, elsewhere).at(elsewhere, values),
    }
    for _ in range(2):  # in any order, and again
        for point, one in oracles.items():
            found, expected = figures(one, *point)
            assert found == expected
            assert (float(one.x[0]), float(one.y[0])) == point
            assert not one.x[0].requires_grad
            assert unchanged(before, x, y)
    assert [one.moved for one in oracles.values()] == [(a, b) for a, b in ((0, 0), (1, 0), (0, 1), (1, 1), (1, 1))]
    assert all(one.session is oracle.session for one in oracles.values())
    assert oracle.session.counts == {"upper_grad": 20, "lower_grad": 30, "hvp": 20, "jvp": 20, "loss": 0}
    assert values[0].grad is None


def test_products_alone_do_not_ask_for_the_value_of_the_loss():
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    oracle = bo.Oracle([x], [y], lambda: y.sum(), lambda: (x * y**2).sum() + torch.inf)
    with oracle.lower_system(oracle.g.draw(), gradient=False) as system:
        assert float(system.hvp(Vector([torch.ones(1)]))[0]) == 4
    oracle.checks.verify(1, set())
    with oracle.lower_system(oracle.g.draw()):
        pass
    with pytest.raises(bo.NonFiniteError, match="loss"):
        oracle.checks.verify(1, set())


def test_gradients_from_a_backward_pass_leave_none_behind():
    x, y, oracle = scalars()
    oracle.sharded = True  # whose gradients no other call gives
    _, (gradient,) = oracle.upper_alone(oracle.f.draw())
    assert (float(gradient), x.grad, y.grad) == (12.0, None, None)


def test_live_tensors_are_as_they_were_after_a_loss_that_fails():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def fails():
        raise KeyError("no such sample")

    oracle, before = bo.Oracle([x], [y], fails, fails), contents(x, y)
    away = oracle.at([torch.zeros(2)], [torch.zeros(2)])
    for evaluate in (away.upper, away.lower, away.lower_jointly, away.lower_matrices, away.kept_system):
        with pytest.raises(KeyError):
            evaluate(Sample(fails))
        assert unchanged(before, x, y)
    with pytest.raises(KeyError), away.lower_system(Sample(fails)):
        pass
    assert unchanged(before, x, y)


@pytest.mark.parametrize("hvp", ["exact", "finite-difference"])
def test_the_upper_system_has_the_hessian_of_both_variables(hvp):
    x, y, oracle = scalars()
    oracle = bo.Oracle([x], [y], oracle.f, oracle.g, session=Session(EvaluationOptions(hvp=hvp))).at(
        [torch.tensor([0.5])]
    )
    with oracle.upper_system(oracle.f.draw()) as system:
        product = system.product(Vector([torch.tensor([5.0]), torch.tensor([7.0])]))
    assert [float(t) for t in (system.loss, *system.gradient)] == [0.75, 3.0, 0.25]
    assert [float(t) for t in product] == [6 * 5 + 1 * 7, 1 * 5]  # [[2y, 2x], [2x, 0]]


def test_kept_products_stay_right_while_everything_moves():
    """Several are kept at once, as in unrolling; live tensors and other oracles move in between."""
    X, t, x = torch.randn(6, 5), torch.arange(6) % 3, torch.ones(6, requires_grad=True)
    w, u = y = [torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)]

    def losses():  # products of leaves, which graphs save themselves
        return F.cross_entropy((X @ w).tanh() @ u, t, reduction="none")

    oracle = bo.Oracle([x], y, lambda: losses().mean(), lambda: (x * losses()).mean() + w.pow(4).sum())
    start, sample = oracle.y.clone(), oracle.g.draw()
    points = [Vector(v + 0.1 * torch.randn_like(v) for v in start) for _ in range(3)]
    uppers = [torch.randn(6) for _ in range(3)]
    v = Vector(torch.randn_like(p) for p in start)
    expected = []
    for upper, point in zip(uppers, points, strict=True):
        with oracle.at([upper], point).lower_system(sample) as system:
            expected.append((system.gradient, system.hvp(v), system.cross(v), *system.both(v)))
    kept = [oracle.at([upper], point).kept_system(sample) for upper, point in zip(uppers, points, strict=True)]

    def check():
        before = contents(x, *y)
        for system, truth in zip(reversed(kept), reversed(expected), strict=True):
            found = (system.gradient, system.hvp(v), system.cross(v), *system.both(v))
            for a, b in zip(found, truth, strict=True):
                for one, other in zip(a, b, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
        assert unchanged(before, x, *y)

    check()
    away = oracle.at([torch.ones(6)], start * 0.5)
    away.upper(away.f.draw())
    away.lower(sample)
    check()
    with away.placed(), away.lower_system(sample):
        check()
    for tensor in (x, *y):
        tensor.data = tensor.data + 1.0
    check()
    Vector(y).copy_(start)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch notices, in no other case
        kept[0].hvp(v)


# ---------------------------------------------------------------------------------------------------- lanes


def many(vectorize=True, dropout=0.0, **options):
    """g_i = sum cosh(y_i) c_i + (y_i a_i).x, f_i = |y_i - c_i|^2 + x.x: three problems as one, and each alone."""
    x, y = torch.randn(2).requires_grad_(), torch.randn(2).requires_grad_()
    batch = (torch.rand(3, 2) + 0.5, torch.randn(3, 2))

    def lower(one):
        return (F.dropout(y, dropout).cosh() * one[0]).sum() + (y * one[1]) @ x

    def upper(one):
        return (y - one[0]).square().sum() + x @ x + (x * y).sum()

    oracle = bo.Oracle([x], [y], upper, lower, session=Session(EvaluationOptions(vectorize=vectorize)))
    points = Vector([torch.randn(3, 2)])
    return oracle, points, batch, stacked(oracle, points, lambda level: batch, **options)


def each_alone(oracle, points, batch, x=None):
    """For each problem the oracle at its point, with its samples."""
    for i in range(3):
        own = tuple(t[i] for t in batch)
        one = oracle.at(None if x is None else [x[i]], [points[0][i]])
        yield one, oracle.f.sample(own), oracle.g.sample(own)


@pytest.mark.parametrize("vectorize", [True, 2, False])
@pytest.mark.parametrize("own_x", [False, True])
def test_many_problems_as_one_are_each_alone(vectorize, own_x):
    upper, weights = torch.randn(3, 2), torch.tensor([0.5, 2.0, -1.0])
    oracle, points, batch, problem = many(vectorize, x=Vector([upper]) if own_x else None, weights=weights)
    before, v = contents(*oracle.live_x, *oracle.live_y), torch.randn(3, 2)
    loss, in_x, in_y = problem.upper(problem.f.draw())
    value, slope = problem.lower(problem.g.draw())
    with problem.lower_system(problem.g.draw()) as system:
        cross, hvp = system.both(Vector([v]))
    assert problem.session.counts == {"upper_grad": 3, "lower_grad": 6, "hvp": 3, "jvp": 3, "loss": 0}
    totals = [torch.zeros(()), torch.zeros(3, 2), torch.zeros(()), torch.zeros(3, 2)]
    for i, (one, xi, zeta) in enumerate(each_alone(oracle, points, batch, upper if own_x else None)):
        f, g_x, g_y = one.upper(xi)
        totals[0] += weights[i] * f
        totals[1][i] += weights[i] * g_x[0]
        totals[2] += weights[i] * one.lower(zeta)[0]
        torch.testing.assert_close(in_y[0][i], weights[i] * g_y[0])
        torch.testing.assert_close(slope[0][i], weights[i] * one.lower(zeta)[1][0])
        with one.lower_system(zeta) as alone:
            totals[3][i] += weights[i] * alone.cross(Vector([v[i]]))[0]
            torch.testing.assert_close(hvp[0][i], weights[i] * alone.hvp(Vector([v[i]]))[0])
    torch.testing.assert_close(loss, totals[0])
    torch.testing.assert_close(value, totals[2])
    torch.testing.assert_close(in_x[0], totals[1] if own_x else totals[1].sum(0))
    torch.testing.assert_close(cross[0], totals[3] if own_x else totals[3].sum(0))
    assert problem.session.found.fallback is None
    assert unchanged(before, *oracle.live_x, *oracle.live_y)


@pytest.mark.parametrize("kind", ["one x", "own x", "weights", "dropout"])
def test_one_by_one_only_one_graph_is_kept(kind):
    """The first evaluation looks whether the loss reads its parameters where torch sees it, then ends so too."""
    alive, kept = [], []
    upper = torch.randn(3, 2)
    options = {"one x": {}, "own x": {"x": Vector([upper])}, "weights": {"weights": torch.tensor([0.5, 2.0, -1.0])},
               "dropout": {"dropout": 0.5, "shared_rng": True}}[kind]  # fmt: skip
    torch.manual_seed(1)
    _, points, batch, together = many(True, **options)
    torch.manual_seed(1)
    oracle, _, _, apart = many(False, **options)
    y, own = oracle.live_y[0], oracle.g.loss

    def watched(one):
        middle = y * 1.0
        kept.append(sum(t() is not None for t in alive))
        alive.append(weakref.ref(middle))
        return own(one) + 0 * middle.square().sum()

    apart = stacked(oracle, points, lambda level: batch, **{k: v for k, v in options.items() if k != "dropout"})
    apart.g.loss.loss = watched
    for _ in range(3):
        found = []
        for problem in (together, apart):
            torch.manual_seed(2)
            kept.clear()
            found.append([*problem.lower(problem.g.draw()), *problem.upper(problem.f.draw())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
        assert max(kept[-3:]) == 0


def test_a_loss_of_none_of_the_lanes_is_refused_one_by_one():
    *_, problem = many(False)
    problem.lower(problem.g.draw())
    problem.g.loss.loss = lambda one: one[0].sum()
    with pytest.raises(ValueError, match="depends on no lower parameter"):
        problem.lower(problem.g.draw())


def test_matrices_of_many_problems():
    oracle, points, batch, _ = many()
    problem = stacked(oracle, points, lambda level: batch, x=Vector([torch.stack([*oracle.x] * 3)]))
    _, hessian, cross = problem.lower_matrices(problem.g.draw())
    for i, (one, _, zeta) in enumerate(each_alone(oracle, points, batch)):
        _, h, c = one.lower_matrices(zeta)
        torch.testing.assert_close(hessian[i], h[0])
        torch.testing.assert_close(cross[i], c[0])


@pytest.mark.parametrize("vectorize", [True, 2, False])
def test_matrices_of_several_parameters(vectorize):
    sizes = (2, 1, 3, 2)
    generator = torch.Generator().manual_seed(0)
    point = torch.randn(8, generator=generator, dtype=torch.float64)
    mixing = torch.randn(8, 8, generator=generator, dtype=torch.float64)

    def value(flat):
        return (mixing @ flat).sin().sum()

    tensors = [t.clone().requires_grad_() for t in point.split(sizes)]
    x, y = tensors[:2], tensors[2:]
    session = Session(EvaluationOptions(vectorize=vectorize))
    oracle = bo.Oracle(x, y, lambda: y[0].sum(), lambda: value(torch.cat(tensors)), session=session)
    gradient, hessian, cross = oracle.lower_matrices(oracle.g.draw())
    whole = torch.autograd.functional.hessian(value, point)
    torch.testing.assert_close(torch.cat([*gradient]), torch.autograd.functional.jacobian(value, point)[3:])
    torch.testing.assert_close(hessian, whole[None, 3:, 3:])
    torch.testing.assert_close(cross, whole[None, :3, 3:])


def test_a_stack_is_at_the_x_of_its_oracle():
    oracle, points, batch, _ = many()
    away = oracle.at([oracle.x[0] + 1])
    problem = stacked(away, points, lambda level: batch)
    expected = sum(one.at([away.x[0]]).upper(xi)[0] for one, xi, _ in each_alone(oracle, points, batch))
    torch.testing.assert_close(problem.upper(problem.f.draw())[0], expected)


@pytest.mark.parametrize("vectorize", [True, 2, False])
def test_equal_problems_share_random_numbers_if_asked(vectorize):
    for shared_rng in (True, False):
        oracle, _, batch, _ = many(vectorize, dropout=0.5)
        same = Vector([torch.ones(16, 2)]), tuple(t[:1].expand(16, 2) for t in batch)
        problem = stacked(oracle, same[0], lambda level, batch=same[1]: batch, shared_rng=shared_rng)
        sample = problem.g.draw()
        slopes = problem.lower(sample)[1][0]
        assert (slopes == slopes[0]).all() == shared_rng
        assert torch.equal(problem.lower(sample)[1][0], slopes)  # those of a sample stay


def test_many_problems_draw_from_their_sampler_alone():
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    oracle = bo.Oracle([x], [y], bo.Objective(lambda b: y.sum(), [1.0]), lambda b: (x * y).sum())
    with pytest.raises(ValueError, match="with tasks, the upper loss takes its batches from the sampler"):
        stacked(oracle, Vector([torch.ones(2, 1)]))


@pytest.mark.parametrize("vectorize", [True, False])
def test_checkpointing_many_problems_is_an_error_not_a_wrong_number(vectorize):
    """The second evaluation, in the backward pass, would be at what the live tensors hold."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def lower(one):
        return checkpoint(lambda one: (y * one).tanh(), one, use_reentrant=False).sum() + x @ y

    oracle = bo.Oracle([x], [y], lower, lower, session=Session(EvaluationOptions(vectorize=vectorize)))
    problem = stacked(oracle, Vector([torch.randn(3, 2)]), lambda level: torch.randn(3, 2))
    with pytest.raises(RuntimeError, match=r"cannot be redirected to the tasks' own values, as .* checkpointing"):
        problem.lower(problem.g.draw())


# ---------------------------------------------------------------------------------------------------- vmap or loop


def run(n, vectorize=True, session=None, fails=None, alone_fails=None, **options):
    """Return the evaluations, by their parts."""
    session = session or Session(EvaluationOptions(vectorize=vectorize))

    def together(part):
        if fails is not None:
            raise fails
        return [*range(n)[part]]

    def alone(i):
        if alone_fails is not None:
            raise alone_fails
        return i

    return batched.run(session, n, together, alone, **options), session


@pytest.mark.parametrize(
    ("vectorize", "parts"),
    [
        (True, [[0, 1, 2, 3, 4]]),
        (2, [[0, 1], [2, 3], [4]]),
        (5, [[0, 1, 2, 3, 4]]),
        (9, [[0, 1, 2, 3, 4]]),
        (1, [0, 1, 2, 3, 4]),
        (False, [0, 1, 2, 3, 4]),
    ],
)
def test_together_in_chunks_or_in_a_loop(vectorize, parts):
    found, session = run(5, vectorize)
    assert found == parts
    assert session.found.fallback is None
    assert run(1, vectorize)[0] == [0]
    assert run(0, vectorize)[0] == []


def test_a_single_failure_to_batch_is_looped_over_only_once():
    found, session = run(3, possible=False)
    assert (found, session.found.fallback) == ([0, 1, 2], None)
    assert run(3, session=session)[0] == [[0, 1, 2]]


@pytest.mark.parametrize("where", ["fails", "first"])
def test_the_loop_takes_over_for_good_and_says_why(where):
    error = RuntimeError("vmap: no rule for this\nand a long explanation")
    looks = []

    def first():
        looks.append(None)
        raise error

    found, session = run(3, **({"fails": error} if where == "fails" else {"first": first, "new": frozenset(["f"])}))
    assert found == [0, 1, 2]
    assert session.found.fallback == "RuntimeError: vmap: no rule for this"
    assert run(3, session=session, first=first)[0] == [0, 1, 2]
    assert len(looks) == 2 * (where == "first")  # twice, since what does not come again is not vmap's


def test_an_exception_of_the_loss_is_raised_again():
    """An error of the loss occurs in the loop too, and is no reason to give up vmap."""
    session = Session()
    for error in (KeyError("no such sample"), torch.OutOfMemoryError("too large")):
        with pytest.raises(type(error)) as raised:
            run(3, session=session, fails=error, alone_fails=error)
        assert raised.value is error
    assert session.found.fallback is None
    assert run(3, session=session)[0] == [[0, 1, 2]]
    with pytest.raises(KeyboardInterrupt):
        run(3, fails=KeyboardInterrupt())


def test_findings_of_a_step_are_private_until_it_is_committed():
    known = Session().found
    session = Session.after(Session(found=known, warned={"a"}), EvaluationOptions())
    run(3, session=session, fails=ValueError("no"))
    session.warned.add("b")
    assert (session.found.fallback, known.fallback) == ("ValueError: no", None)


# ---------------------------------------------------------------------------------------------------- ranks


def test_one_process_exchanges_nothing():
    ranks, vector = Ranks(), Vector([torch.ones(2), torch.zeros(())])
    tasks = {"ids": torch.arange(3), "name": "sine"}
    assert (ranks.rank, ranks.world, ranks.group) == (0, 1, None)
    for exchange in (ranks.mean, ranks.total):
        found = exchange(vector, vector[0])
        assert found[0] is vector
        assert found[1] is vector[0]
    assert ranks.mean() == ()
    assert ranks.broadcast_number(7) == 7
    assert ranks.copy_from_first(vector) is vector
    assert ranks.share(tasks, 3) == (tasks, 3)


def test_values_that_do_not_fit_leave_the_live_tensors_as_they_were():
    """The first tensor already holds its value when the second one is refused."""
    live = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    storages = [t.data_ptr() for t in live]
    values = Vector([torch.zeros(2), torch.zeros(3, device="meta")])
    with pytest.raises(RuntimeError, match="incompatible tensor type"), in_place([Vector(live)], [values]):
        pass
    assert [t.data_ptr() for t in live] == storages
