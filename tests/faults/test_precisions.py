"""Parameters of other types than they were: cast between steps, loaded from a state of others, and mixed."""

import copy
import io
from functools import partial

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.pytree import replace

from ..problems import Given, Quadratic, same, seeded, values
from ..registry import each

pytestmark = pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")  # of rounding
PLAIN = each(lambda row: row.declared.tasks != "required" and row.declared.losses == 2)


class Cast(Given):
    """f = |y - 1|^2 / 2 and g = |y - x|^2 / 2 in whatever precision the parameters have."""

    def __init__(self, row, *kinds):
        x, y = (torch.full((3,), v).to(kind) for v, kind in zip((2.0, 0.0), kinds, strict=True))
        self.net = torch.nn.ParameterList([x, y])
        x, y = self.net
        super().__init__([x], [y], lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        if row.declared.initial:
            self.net.append(torch.zeros(3).to(kinds[0]))
            self.x.append(self.net[2])

    def optimizer(self, row, **options):
        return row(self.x, self.y, short=True, **options)


def options_of(row):
    return {} if row.declared.lower_optimizer == "none" else {"lower_optimizer": torch.optim.Adam, "lower_lr": 0.01}


@pytest.mark.parametrize("kinds", [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str)
@PLAIN
def test_parameters_may_be_cast_between_steps(row, kinds):
    """FSLA and SABA raised torch's own error at each step, and each time had drawn their batches."""
    problem = Cast(row, kinds[0], kinds[0])
    optimizer = problem.optimizer(row, **options_of(row))
    problem.run(optimizer, 3)
    problem.net.to(kinds[1])
    problem.run(optimizer, 3)
    assert {t.dtype for t in (*problem.x, *problem.y)} == {kinds[1]}
    fresh = Cast(row, kinds[1], kinds[1])
    other = fresh.optimizer(row, **options_of(row))
    fresh.run(other, 6)
    types = [
        {(name, v.dtype) for entries in one.state.values() for name, v in entries.items() if torch.is_tensor(v)}
        for one in (optimizer, other)
    ]
    assert types[0] == types[1]
    assert optimizer._run_state.steps == 6


@PLAIN
def test_a_state_of_other_types_is_cast_to_those_of_the_parameters(row):
    problem = Cast(row, torch.float64, torch.float64)
    optimizer = problem.optimizer(row, **options_of(row))
    problem.run(optimizer, 3)
    other = Cast(row, torch.float32, torch.float32)
    resumed = other.optimizer(row, **options_of(row))
    resumed.load_state_dict(optimizer.state_dict())
    other.run(resumed, 3)
    assert resumed._run_state.steps == 6


@PLAIN
def test_a_state_saved_between_a_cast_and_a_step_continues(row):
    """It was taken for one of the new types, so it was not cast, and some methods failed."""
    ends = []
    for saved in (False, True):
        problem = Cast(row, torch.float64, torch.float64)
        optimizer = problem.optimizer(row, **options_of(row))
        torch.manual_seed(0)
        problem.run(optimizer, 3)
        problem.net.float()
        if saved:
            state, optimizer = optimizer.state_dict(), problem.optimizer(row, **options_of(row))
            optimizer.load_state_dict(state)
        problem.run(optimizer, 3)
        ends.append(values(problem.x, problem.y))
    assert same(*ends)


def test_a_state_with_wrong_types_is_refused():
    problem = Quadratic(n=4, m=2)
    optimizer = bo.SOBA(problem.x, problem.y, lr=0.1, lower_lr=0.1)
    problem.run(optimizer, 2)
    state, before = copy.deepcopy(optimizer.state_dict()), str(optimizer.state_dict())
    with pytest.raises(ValueError, match="damaged: the types of the parameters are"):
        optimizer.load_state_dict(rewritten(state, types=["float64", "Tensor"]))
    assert str(optimizer.state_dict()) == before


def rewritten(state, **entries):
    """A state with other entries among what belongs to no parameter."""
    own = torch.load(io.BytesIO(state["param_groups"][0]["bilevel"]), weights_only=True)
    file = io.BytesIO()
    torch.save({**own, **entries}, file)
    state["param_groups"][0]["bilevel"] = file.getvalue()
    return state


class Failing(bo.SOBA):
    """An estimate or an update that cannot be written."""

    how = None

    def estimate(self, oracle, given):
        found = super().estimate(oracle, given)
        if self.how == "gradient":
            return replace(found, gradient=bo.Vector(t.float() for t in found.gradient))
        if self.how == "lower":
            return replace(found, lower=bo.Vector(t[:2] for t in found.lower))
        return found

    def update(self, x, gradient, given):
        found = super().update(x, gradient, given)
        return replace(found, x=bo.Vector(t[:1] for t in found.x)) if self.how == "x" else found


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize(("how", "error"), [("gradient", RuntimeError), ("lower", ValueError), ("x", ValueError)])
def test_a_write_that_raises_undoes_all(how, error, done):
    problem = Quadratic(n=4, m=2)
    f, g = (bo.Objective(lambda batch, loss=loss: loss() * batch, [1.0, 2.0, 3.0]) for loss in problem.losses)
    optimizer = Failing(problem.x, problem.y, lr=0.1, lower_lr=0.1, generator=seeded())
    for _ in range(done):
        optimizer.step(f, g)

    def all_of_it():
        grads = str([t.grad for t in problem.x])
        return str(values(problem.x, problem.y)), grads, str(optimizer.state_dict()), f.state_dict(), g.state_dict()

    before, optimizer.how = str(all_of_it()), how
    for _ in range(2):
        with pytest.raises(error):
            optimizer.step(f, g)
        assert str(all_of_it()) == before
    optimizer.how = None
    optimizer.step(f, g)
    assert optimizer._run_state.steps == done + 1


@pytest.mark.parametrize("kinds", [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str)
@PLAIN
def test_the_levels_may_have_different_types(row, kinds):
    """STABLE, SVRB, BSVRB and RSVRB raised an error of torch."""
    ends = []
    for some in (kinds, (torch.float64, torch.float64)):
        problem = Cast(row, *some)
        optimizer = problem.optimizer(row)
        problem.run(optimizer, 3)
        other = problem.optimizer(row)
        other.load_state_dict(optimizer.state_dict())
        problem.run(other)
        ends.append(torch.cat([t.detach().double() for t in (*problem.x, *problem.y)]))
        assert [t.dtype for t in (*problem.x[:1], *problem.y)] == [*some]
    rough = row.name == "F2SA-1"  # order 1 in single precision
    torch.testing.assert_close(*ends, rtol=1e-2 if rough else 1e-3, atol=1e-3)


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("cls", [bo.F2SA, bo.BOME, bo.FirstOrder, bo.AID])
def test_adapting_after_a_change_of_type(cls, loaded):
    """The curvature that the steps had measured was read in its old type."""
    options = {"hvp": "finite-difference"} if cls is bo.AID else {}
    target, found = torch.tensor([1.0, 2.0, 3.0]), []
    for kind in (torch.float64, torch.float32):
        net = torch.nn.ParameterList([torch.full((3,), 2.0).double(), torch.zeros(3).double()])

        def made(net=net):
            return cls([net[0]], [net[1]], lr=0.1, lower_steps=3, **options)

        optimizer = made()
        rows = torch.diag(torch.tensor([1.0, 1.5, 2.0]))

        def loss(t=0.0, net=net, rows=rows):
            return (rows.to(net[0]) @ (net[1] - net[0] - t)).square().sum() / 2

        optimizer.step(lambda net=net: (net[1] - 1).square().sum() / 2, loss)
        state = optimizer.state_dict()
        net.to(kind)
        if loaded:
            optimizer = made()
            optimizer.load_state_dict(state)
        (y,) = optimizer.adapt(loss, target.to(kind), steps=3)
        assert y.dtype == kind
        found.append(y.double())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_averages_have_the_types_of_the_parameters():
    net = torch.nn.ParameterList([torch.full((3,), 2.0).double(), torch.zeros(3).double()])
    optimizer = bo.RAHGD([net[0]], [net[1]], lr=0.1, lower_lr=0.1, lower_steps=3)
    for _ in range(3):
        optimizer.step(lambda: (net[1] - 1).square().sum() / 2, lambda: (net[1] - net[0]).square().sum() / 2)
    (before,) = optimizer.averaged_parameters()
    net.float()
    assert torch.equal(optimizer.averaged_parameters()[0], before.float())


def two_tensors(cls, kinds, **options):
    """Return the relative error for f = |y - t|^2 / 2 and g = y'Ay / 2 - y'B sin(x), with y in two tensors."""
    draw = seeded(2)
    A, B, t = (torch.randn(*size, generator=draw, dtype=torch.float64) for size in ((5, 5), (5, 4), (5,)))
    A = A @ A.T / 5 + torch.eye(5).double()
    x = torch.linspace(-0.5, 0.5, 4, dtype=kinds[0]).requires_grad_()
    y = [torch.zeros(n, dtype=kind).requires_grad_() for n, kind in zip((3, 2), kinds[1:], strict=True)]

    def whole():
        return torch.cat([p.double() for p in y])

    optimizer = cls([x], y, lr=1.0, lower_lr=0.3, lower_steps=100, **options)
    optimizer.backward(
        lambda: (whole() - t).square().sum() / 2, lambda: whole() @ (A @ whole() / 2 - B @ x.double().sin())
    )
    at = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad((torch.linalg.solve(A, B @ at.sin()) - t).square().sum() / 2, at)
    return float((x.grad - right).norm() / right.norm())


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("coarse", [0, 1, 2])
def test_steps_of_differences_follow_the_coarsest_type(coarse, order):
    """With float64 before float32, nu was that of float64: F2SA was off by 1 %, with bfloat16 by 108 %."""
    kinds = [torch.float32 if i == coarse else torch.float64 for i in range(3)]
    assert two_tensors(bo.F2SA, kinds, order=order) < 1e-3
    if order == 1:
        assert two_tensors(bo.AID, kinds, hvp="finite-difference") < 1e-4  # 0.7 % for the second y
        kinds[coarse] = torch.bfloat16
        assert two_tensors(bo.F2SA, kinds) < 0.1


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [3, 4, 5, 7])
def test_weights_of_copies_cancel_a_large_part_of_g(order, kind):
    """The sum of the weights in float32 was not zero in the float64 of the losses: off by up to 270 % (order 3)."""
    draw = seeded(0)
    B, t = torch.randn(3, 4, generator=draw).double(), torch.randn(3, generator=draw).double()
    x = torch.linspace(-0.5, 0.5, 4, dtype=torch.float32).requires_grad_()
    y = torch.zeros(3, dtype=kind, requires_grad=True)
    optimizer = bo.F2SA([x], [y], lr=1.0, lower_lr=0.3, lower_steps=100, order=order)
    optimizer.backward(
        lambda: (y.double() - t).square().sum() / 2,
        lambda: (y.double() - B @ x.double().sin()).square().sum() / 2 + 1e3 * x.double().square().sum(),
    )
    at = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad((B @ at.sin() - t).square().sum() / 2, at)
    assert (x.grad - right).norm() < 3e-4 * right.norm()


@pytest.mark.filterwarnings("default::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize("how", ["autocast", "types"])
def test_rounded_paths_are_told(how):
    """The differences of paths were said to be right to 1e-5, but were off by 6 to 17 %."""
    x, w = torch.linspace(-0.5, 0.5, 7).requires_grad_(), torch.zeros(3, 1, requires_grad=True)
    small = torch.zeros(1, dtype=torch.bfloat16 if how == "types" else torch.float32, requires_grad=True)
    rows, target = torch.randn(7, 3, generator=seeded(0)), torch.randn(7, generator=seeded(1))

    def residual():
        return ((rows @ w)[:, 0] + small).float() - target

    optimizer = bo.PZOBO([x], [w, small], lr=1.0, lower_lr=0.1, lower_steps=20, direction="orthogonal", directions=7)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"),
        pytest.warns(bo.BilevelWarning, match="mostly rounding"),
    ):
        optimizer.backward(lambda: residual().square().mean(), lambda: (x.exp() * residual().square()).mean())
    assert optimizer.metrics()["difference_error"] > 0.01


@pytest.mark.parametrize("cls", [bo.AID, bo.ITD, bo.F2SA])
def test_autocast_in_a_loss_sees_the_present_weights_within_a_disabled_one(cls):
    """Autocast forgets its copies of weights only at the end of the outermost context, which may be a disabled one."""
    inputs = torch.randn(20, 4, dtype=torch.float, generator=torch.Generator().manual_seed(0))

    def run(outer):
        torch.manual_seed(1)
        model, weights = torch.nn.Linear(4, 3, dtype=torch.float), torch.zeros(10, requires_grad=True)

        def errors(part):
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs[part])
            return (outputs.float() - 1).square().mean(1)

        optimizer = cls([weights], model.parameters(), lr=1.0, lower_lr=0.3, lower_steps=5)
        for step in range(3):
            with outer if step else torch.enable_grad():
                optimizer.step(
                    lambda: errors(slice(10, 20)).mean(),
                    lambda: (weights.sigmoid() * errors(slice(10))).mean() + 0.1 * model.weight.square().sum(),
                )
        return [weights.detach(), *(p.detach() for p in model.parameters())]

    expected = run(torch.enable_grad())
    for outer in (torch.autocast("cpu", torch.bfloat16, enabled=False), torch.autocast("cuda", enabled=False)):
        assert all(map(torch.equal, run(outer), expected))


@pytest.mark.parametrize("cls", [bo.RSVRB, bo.BSVRB])
def test_rows_of_a_run_that_is_cast_to_bfloat16_stay_in_single_precision(cls):
    """As in a run that begins so; linear systems have no bfloat16."""
    ends = []
    for kind in (torch.float32, torch.bfloat16):
        targets = torch.linspace(-1, 1, 6).view(6, 1, 1)
        x, y = torch.full((1,), 2.0, requires_grad=True), torch.zeros(6, 1, requires_grad=True)
        optimizer = cls([x], [y], lr=0.05, lower_lr=0.1, task_batch=3, generator=seeded())
        for k in range(30):
            if k == 15:
                x.data, y.data, x.grad = x.data.to(kind), y.data.to(kind), None
                targets = targets.to(kind)
            optimizer.step(
                lambda rows, y=y: (y - 1).square().sum() / 2,
                lambda rows, x=x, y=y: (y - x - rows[0]).square().sum() / 2,
                tasks=bo.TensorTasks(targets),
            )
        kinds = {t.dtype for name, t in optimizer.state[y].items() if name.startswith("rows.")}
        assert torch.bfloat16 not in kinds
        ends.append(x.detach().double())
    assert abs(float(ends[0] - ends[1])) < 0.03


class Narrow(Given):
    """f = |y - 1|^2 / 2 + 1e-5 x_0, and a lower solution that x_0 moves by a thousandth, in float16."""

    def __init__(self, **options):
        x, y = (torch.full((3,), v, dtype=torch.float16, requires_grad=True) for v in (-9.0, 0.0))
        scale = torch.tensor([1e-3, 1.0, 1.0])
        super().__init__(
            [x],
            [y],
            lambda: (y.float() - 1).square().sum() / 2 + 1e-5 * x.float()[0],
            lambda: (y.float() - scale * x.float()).square().sum() / 2,
        )
        self.optimizer = bo.AID([x], [y], lower_lr=0.1, lower_steps=3, **options)


@pytest.mark.parametrize("checked", [True, False])
def test_adam_in_float16_does_not_write_infinity(checked):
    """Its eps is zero there: an entry whose squared gradient is zero too was divided by zero, and x was infinite."""
    problem = Narrow(lr=0.1, upper_optimizer=torch.optim.Adam, check_finite=checked)
    if not checked:
        problem.run(problem.optimizer)
        assert problem.x[0].isinf().any()
        return
    before = values(problem.x, problem.y)
    with pytest.raises(bo.NonFiniteError, match="leaves the range of float16") as raised:
        problem.run(problem.optimizer)
    assert raised.value.oracle == "the update of x"
    assert same(values(problem.x, problem.y), before)
    assert not problem.optimizer.state
    problem.optimizer.param_groups[0]["eps"] = 1e-4
    problem.run(problem.optimizer, 3)
    assert problem.x[0].isfinite().all()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("verb", ["step", "run", "backward"])
def test_an_update_that_leaves_the_range_of_float16_changes_nothing(verb, captured):
    problem = Narrow(lr=1e-3)
    optimizer = problem.optimizer
    if captured:
        optimizer.compile(backend="aot_eager")
    problem.run(optimizer, 5)  # so that the next compiled step is not made eagerly too
    assert "compile_fallback" not in optimizer.diagnostics
    optimizer.param_groups[0]["lr"] = 6e4
    if verb == "backward":
        optimizer.backward(*problem.losses)
    before, state = values(problem.x, problem.y), str(optimizer.state_dict())
    with pytest.raises(bo.NonFiniteError, match="the update of x at outer step 5"):
        {
            "step": partial(optimizer.step, *problem.losses),
            "run": partial(optimizer.run, *problem.losses, steps=2),
            "backward": optimizer.step,
        }[verb]()
    assert same(values(problem.x, problem.y), before)
    assert str(optimizer.state_dict()) == state
    optimizer.param_groups[0]["lr"] = 1e-3
    problem.run(optimizer, 2)
    assert problem.x[0].isfinite().all()


def test_a_gradient_in_float16_that_is_not_finite_is_named():
    problem = Narrow(lr=1e-3)
    problem.optimizer.backward(*problem.losses)
    problem.x[0].grad[1] = torch.inf
    before = values(problem.x, problem.y)
    with pytest.raises(bo.NonFiniteError, match=r"the update of x .*\.grad that it follows was not finite"):
        problem.optimizer.step()
    assert same(values(problem.x, problem.y), before)
