"""MAML and its relatives against closed forms, autograd through the adaptation, and one another."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev

import bilevel_optim as bo

from ..problems import Problem, close, seeded


class Softmax(Problem):
    """m linear classifiers; x is their common initial value, or centre."""

    def __init__(self, m=3, n=7, d=4, C=3, proximal=0.0):
        g = seeded()
        self.sets = [
            (torch.randn(m, n, d, generator=g), torch.randint(0, C, (m, n), generator=g)) for _ in range(2)
        ]  # fmt: skip
        self.x = [(0.3 * torch.randn(d, C, generator=g)).requires_grad_()]
        self.y, self.m, self.proximal = [torch.zeros(d, C, requires_grad=True)], m, proximal
        self.tasks = bo.TensorTasks(*self.sets)

    def upper(self, batch):
        return F.cross_entropy(batch[0] @ self.y[0], batch[1])

    def lower(self, batch):
        return self.upper(batch) + self.proximal / 2 * (self.y[0] - self.x[0]).square().sum()

    def loss(self, v, i, kind):
        inputs, labels = self.sets[kind]
        return F.cross_entropy(inputs[i] @ v, labels[i])

    def reference(self, steps, rate=0.3, first_order=False):
        """The mean over tasks of d f(y_T(x))/dx by autograd through the steps."""
        x, total = self.x[0].detach().clone().requires_grad_(), 0
        for i in range(self.m):
            v = x
            for _ in range(steps):
                value = self.loss(v, i, 0) + self.proximal / 2 * (v - x).square().sum()
                step = torch.autograd.grad(value, v, create_graph=True)[0]
                v = v - rate * (step.detach() if first_order else step)
            total = total + self.loss(v, i, 1) / self.m
        return torch.autograd.grad(total, x)[0]

    def estimate(self, cls, **options):
        optimizer = cls(self.x, self.y, **{"lr": 0.1, "lower_lr": 0.3, "lower_steps": 3, **options})
        self.apply(optimizer.backward)
        return self.x[0].grad.clone()


def agree(got, expected, rtol=1e-10):
    close(got, expected.view_as(got), 1e-12, rtol)


@pytest.mark.parametrize("proximal", [0.0, 1.5])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_maml_is_the_derivative_through_the_adaptation(steps, proximal, checkpoint):
    problem = Softmax(proximal=proximal)
    agree(problem.estimate(bo.MAML, lower_steps=steps, checkpoint=checkpoint), problem.reference(steps))


def test_one_step_does_not_see_the_proximal_term():
    """The factor is (1 - gamma lambda) I + gamma lambda I - gamma H: the same without lambda."""
    one, two = ([Softmax(proximal=p).estimate(bo.MAML, lower_steps=n) for p in (0.0, 1.5)] for n in (1, 2))
    agree(*one, rtol=1e-12)
    assert (two[0] - two[1]).abs().max() > 1e-4


def test_formula_of_one_step():
    """(I - gamma H_i) grad f_i(y_hat), averaged."""
    problem = Softmax()
    x, gamma, expected = problem.x[0].detach(), 0.3, torch.zeros(12)
    for i in range(problem.m):
        hessian = jacrev(grad(problem.loss))(x, i, 0).reshape(12, 12)
        outer = grad(problem.loss)(x - gamma * grad(problem.loss)(x, i, 0), i, 1).reshape(-1)
        expected += (outer - gamma * hessian @ outer) / problem.m
    agree(problem.estimate(bo.MAML, lower_steps=1), expected)


@pytest.mark.parametrize("steps", [1, 4])
def test_first_order_maml(steps):
    problem = Softmax()
    got = problem.estimate(bo.FOMAML, lower_steps=steps)
    agree(got, problem.reference(steps, first_order=True))
    assert (got - problem.reference(steps)).norm() > 1e-2 * got.norm()


def test_first_order_error_is_linear_in_the_step():
    problem = Softmax()
    errors = [(problem.estimate(bo.FOMAML, lower_lr=r) - problem.reference(3, r)).norm() for r in (1e-3, 2e-3)]
    assert float(errors[1] / errors[0]) == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("where", ["argument", "loss"])
def test_implicit_maml_is_exact_at_the_solution(where):
    """mean of (I + H_i/lambda)^-1 grad f_i at y_i*, and what MAML tends to."""
    lam = 1.5
    problem = Softmax(proximal=lam if where == "loss" else 0.0)
    options = {"proximal": lam} if where == "argument" else {}
    got = problem.estimate(bo.iMAML, lower_steps=80, linear_steps=20, **options)
    expected, x = torch.zeros(12), problem.x[0].detach()
    for i in range(problem.m):
        v, loss = x.clone(), problem.loss
        for _ in range(8):
            H = jacrev(grad(loss))(v, i, 0).reshape(12, 12) + lam * torch.eye(12)
            v = v - torch.linalg.solve(H, (grad(loss)(v, i, 0) + lam * (v - x)).reshape(-1)).view_as(v)
        hessian, outer = jacrev(grad(loss))(v, i, 0).reshape(12, 12), grad(loss)(v, i, 1).reshape(-1)
        expected += torch.linalg.solve(torch.eye(12) + hessian / lam, outer) / problem.m
    agree(got, expected, rtol=1e-9)
    agree(Softmax(proximal=lam).estimate(bo.MAML, lower_steps=100), expected, rtol=1e-9)


def test_without_a_proximal_term_implicit_maml_says_so():
    problem = Softmax()
    problem.lower = problem.upper
    with pytest.raises(ValueError, match="neither loss depends on any upper parameter"):
        problem.estimate(bo.iMAML)


def test_anil_differentiates_body_and_initial_head():
    torch.manual_seed(0)
    body, head = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)
    x = [*body.parameters(), *(p.detach().clone().requires_grad_() for p in head.parameters())]
    sets = [(torch.randn(3, 6, 4), torch.randint(0, 3, (3, 6))) for _ in range(2)]

    def loss(batch):
        return F.cross_entropy(head(body(batch[0]).tanh()), batch[1])

    optimizer = bo.ANIL(x, head.parameters(), lr=0.1, lower_lr=0.4, lower_steps=3)
    optimizer.backward(loss, loss, tasks=bo.TensorTasks(*sets))
    W, a, *start = upper = [p.detach().clone().requires_grad_() for p in x]
    total = 0
    for i in range(3):
        (w, b), features = start, [(s[0][i] @ W.T + a).tanh() for s in sets]
        for _ in range(3):
            inner = F.cross_entropy(features[0] @ w.T + b, sets[0][1][i])
            dw, db = torch.autograd.grad(inner, (w, b), create_graph=True)
            w, b = w - 0.4 * dw, b - 0.4 * db
        total = total + F.cross_entropy(features[1] @ w.T + b, sets[1][1][i]) / 3
    for p, expected in zip(x, torch.autograd.grad(total, upper), strict=True):
        agree(p.grad, expected, rtol=1e-9)


@pytest.mark.parametrize("factory", [lambda p: torch.optim.SGD(p, momentum=0.9), torch.optim.Adam])
def test_momentum_and_adam_are_differentiated_from_the_start(factory):
    problem, direction = Softmax(m=1), torch.randn(4, 3)

    def value(at):
        v = at.clone().requires_grad_()
        inner = factory([{"params": [v], "lr": 0.05}])
        for _ in range(3):
            inner.zero_grad()
            problem.loss(v, 0, 0).backward()
            inner.step()
        return problem.loss(v, 0, 1).detach()

    got, x = problem.estimate(bo.MAML, lower_lr=0.05, lower_optimizer=factory), problem.x[0].detach()
    difference = (value(x + 1e-5 * direction) - value(x - 1e-5 * direction)) / 2e-5
    assert float((got * direction).sum()) == pytest.approx(float(difference), rel=1e-5)


@pytest.mark.usually("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_adam_is_differentiated_where_a_feature_of_the_tasks_is_zero(compiled):
    """Two tasks without their second feature, one with it: against central differences of torch's own steps."""
    factory, direction = functools.partial(torch.optim.Adam, eps=1e-3), torch.tensor([0.5, -1.0, 0.7])
    rows, targets = torch.randn(3, 8, 3), torch.randn(3, 8)
    rows[:2, :, 1] = 0.0

    def value(start):
        total = 0.0
        for row, target in zip(rows, targets, strict=True):
            y = start.clone().requires_grad_()
            inner = factory([y], lr=0.05)
            for _ in range(3):
                inner.zero_grad()
                (row @ y - target).square().mean().backward()
                inner.step()
            total += ((row @ y - 2 * target).square().mean() + y[1]).item() / 3
        return total

    start = torch.randn(3)
    x, y = start.clone().requires_grad_(), start.clone().requires_grad_()
    optimizer = bo.MAML([x], [y], lr=0.0, lower_lr=0.05, lower_steps=3, lower_optimizer=factory)
    if compiled:
        optimizer.compile(backend="eager")
    for _ in range(2):
        optimizer.step(
            lambda b: (b[0] @ y - 2 * b[1]).square().mean() + y[1],
            lambda b: (b[0] @ y - b[1]).square().mean(),
            tasks=bo.TensorTasks((rows, targets)),
        )
    assert "compile_fallback" not in optimizer.diagnostics
    expected = (value(start + 1e-5 * direction) - value(start - 1e-5 * direction)) / 2e-5
    assert float(x.grad @ direction) == pytest.approx(expected, rel=1e-6)


def test_without_tasks_there_is_one():
    problem = Softmax(m=1)
    lower, upper = ((inputs[0], labels[0]) for inputs, labels in problem.sets)
    optimizer = bo.MAML(problem.x, problem.y, lr=0.1, lower_lr=0.3, lower_steps=3)
    optimizer.backward(lambda: problem.upper(upper), lambda: problem.lower(lower))
    agree(problem.x[0].grad, problem.reference(3))


@pytest.mark.parametrize("cls", [bo.MAML, bo.FOMAML, bo.iMAML, bo.ANIL, bo.ESMAML])
def test_shapes_must_fit(cls):
    x, y = torch.zeros(3, requires_grad=True), torch.zeros(2 if cls is not bo.ANIL else 3, requires_grad=True)
    optimizer = cls([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    message = {
        bo.ANIL: "ANIL needs upper parameters besides the initial values of the lower ones, but got as many tensors",
        bo.ESMAML: r"ESMAML starts the lower parameters.*\[\(2,\)\].*\[\(3,\)\]",
    }.get(cls, r"must have the same shapes: \[\(2,\)\], but they have \[\(3,\)\]")
    with pytest.raises(ValueError, match=message):
        optimizer.step(lambda: y.sum(), lambda: y.square().sum())


@pytest.mark.parametrize("cls", [bo.MAML, bo.FOMAML, bo.iMAML])
def test_learns_tasks_that_have_something_in_common(cls):
    """Targets around a common value: its estimate is the best initial value."""
    torch.manual_seed(1)
    target = torch.tensor([2.0, -1.0]) + 0.3 * torch.randn(40, 1, 2)
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    options = {"proximal": 1.0} if cls is bo.iMAML else {}
    optimizer = cls([x], [y], lr=0.5, lower_lr=0.2, lower_steps=2, tasks_per_step=8, **options)
    for _ in range(40):
        optimizer.step(*[lambda b: (y - b).square().sum() / 2] * 2, tasks=bo.TensorTasks(target))
    assert (x - target.mean((0, 1))).norm() < 0.2
