"""MAML and its relatives against closed forms, autograd through the adaptation, and one another."""

import pytest
import torch
import torch.nn.functional as F

import bilevel_optim as bo


class Softmax:
    """m linear classifiers; x is their common initial value, or centre."""

    def __init__(self, m=3, n=7, d=4, C=3, proximal=0.0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.sets = [
            (torch.randn(m, n, d, generator=generator), torch.randint(0, C, (m, n), generator=generator))
            for _ in range(2)
        ]
        self.x = (0.3 * torch.randn(d, C, generator=generator)).requires_grad_()
        self.y = torch.zeros(d, C, requires_grad=True)
        self.m, self.proximal = m, proximal
        self.tasks = bo.TensorTasks(*self.sets)

    def f(self, batch):
        return F.cross_entropy(batch[0] @ self.y, batch[1])

    def g(self, batch):
        return self.f(batch) + self.proximal / 2 * (self.y - self.x).square().sum()

    def loss(self, v, i, kind):
        inputs, labels = self.sets[kind]
        return F.cross_entropy(inputs[i] @ v, labels[i])

    def reference(self, steps, rate, first_order=False):
        """The mean over tasks of d f(y_T(x))/dx by autograd through the steps."""
        x = self.x.detach().clone().requires_grad_()
        total = 0
        for i in range(self.m):
            v = x
            for _ in range(steps):
                value = self.loss(v, i, 0) + self.proximal / 2 * (v - x).square().sum()
                step = torch.autograd.grad(value, v, create_graph=True)[0]
                v = v - rate * (step.detach() if first_order else step)
            total = total + self.loss(v, i, 1) / self.m
        return torch.autograd.grad(total, x)[0]

    def estimate(self, cls, **options):
        optimizer = cls([self.x], [self.y], **{"lr": 0.1, "lower_lr": 0.3, "lower_steps": 3, **options})
        optimizer.backward(self.f, self.g, tasks=self.tasks)
        return self.x.grad.clone()


@pytest.mark.parametrize("proximal", [0.0, 1.5])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_maml_is_the_derivative_through_the_adaptation(steps, proximal, checkpoint):
    problem = Softmax(proximal=proximal)
    got = problem.estimate(bo.MAML, lower_steps=steps, checkpoint=checkpoint)
    torch.testing.assert_close(got, problem.reference(steps, 0.3), rtol=1e-10, atol=1e-12)


def test_one_step_does_not_see_the_proximal_term():
    """The factor is (1 - gamma lambda) I + gamma lambda I - gamma H: the same without lambda."""
    plain, proximal = Softmax().estimate(bo.MAML, lower_steps=1), Softmax(proximal=1.5).estimate(bo.MAML, lower_steps=1)
    torch.testing.assert_close(plain, proximal, rtol=1e-12, atol=1e-14)
    more = [Softmax(proximal=p).estimate(bo.MAML, lower_steps=2) for p in (0.0, 1.5)]
    assert (more[0] - more[1]).abs().max() > 1e-4


def test_formula_of_one_step():
    """(I - gamma H_i) grad f_i(y_hat), averaged."""
    problem = Softmax()
    x, gamma, expected = problem.x.detach(), 0.3, torch.zeros(12)
    for i in range(problem.m):
        gradient = torch.func.grad(problem.loss)(x, i, 0)
        hessian = torch.func.jacrev(torch.func.grad(problem.loss))(x, i, 0).reshape(12, 12)
        outer = torch.func.grad(problem.loss)(x - gamma * gradient, i, 1).reshape(-1)
        expected += (outer - gamma * hessian @ outer) / problem.m
    torch.testing.assert_close(problem.estimate(bo.MAML, lower_steps=1).reshape(-1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 4])
def test_first_order_maml(steps):
    problem = Softmax()
    got = problem.estimate(bo.FOMAML, lower_steps=steps)
    torch.testing.assert_close(got, problem.reference(steps, 0.3, first_order=True), rtol=1e-10, atol=1e-12)
    assert (got - problem.reference(steps, 0.3)).norm() > 1e-2 * got.norm()
    assert not any(bo.FOMAML([problem.x], [problem.y], lr=1, lower_lr=1, lower_steps=1).oracle_counts.values())


def test_first_order_error_is_linear_in_the_step():
    errors = []
    for rate in (1e-3, 2e-3):
        problem = Softmax()
        errors.append((problem.estimate(bo.FOMAML, lower_lr=rate) - problem.reference(3, rate)).norm())
    assert float(errors[1] / errors[0]) == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("where", ["argument", "loss"])
def test_implicit_maml_is_exact_at_the_solution(where):
    """mean of (I + H_i/lambda)^-1 grad f_i at y_i*."""
    lam = 1.5
    problem = Softmax(proximal=lam if where == "loss" else 0.0)
    options = {"proximal": lam} if where == "argument" else {}
    got = problem.estimate(bo.iMAML, lower_lr=0.3, lower_steps=150, linear_steps=20, **options)
    expected, x = torch.zeros(12), problem.x.detach()
    for i in range(problem.m):
        v = x.clone()
        for _ in range(300):
            v = v - 0.3 * (torch.func.grad(problem.loss)(v, i, 0) + lam * (v - x))
        hessian = torch.func.jacrev(torch.func.grad(problem.loss))(v, i, 0).reshape(12, 12)
        outer = torch.func.grad(problem.loss)(v, i, 1).reshape(-1)
        expected += torch.linalg.solve(torch.eye(12) + hessian / lam, outer) / problem.m
    torch.testing.assert_close(got.reshape(-1), expected, rtol=1e-9, atol=1e-12)


def test_implicit_maml_agrees_with_long_maml():
    long = Softmax(proximal=2.0).estimate(bo.MAML, lower_steps=150)
    implicit = Softmax().estimate(bo.iMAML, proximal=2.0, lower_steps=150, linear_steps=20)
    torch.testing.assert_close(long, implicit, rtol=1e-9, atol=1e-12)


def test_without_a_proximal_term_implicit_maml_says_so():
    problem = Softmax()
    problem.g = problem.f
    with pytest.raises(ValueError, match="neither loss depends on any upper parameter"):
        problem.estimate(bo.iMAML)


def test_anil_differentiates_body_and_initial_head():
    torch.manual_seed(0)
    body, head = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)
    start = [p.detach().clone().requires_grad_() for p in head.parameters()]
    sets = [(torch.randn(3, 6, 4), torch.randint(0, 3, (3, 6))) for _ in range(2)]

    def loss(batch):
        return F.cross_entropy(head(body(batch[0]).tanh()), batch[1])

    optimizer = bo.ANIL([*body.parameters(), *start], head.parameters(), lr=0.1, lower_lr=0.4, lower_steps=3)
    optimizer.backward(loss, loss, tasks=bo.TensorTasks(*sets))
    upper = [p.detach().clone().requires_grad_() for p in (*body.parameters(), *start)]
    total = 0
    for i in range(3):
        w, b = upper[2:]
        features = [(s[0][i] @ upper[0].T + upper[1]).tanh() for s in sets]
        for _ in range(3):
            inner = F.cross_entropy(features[0] @ w.T + b, sets[0][1][i])
            dw, db = torch.autograd.grad(inner, (w, b), create_graph=True)
            w, b = w - 0.4 * dw, b - 0.4 * db
        total = total + F.cross_entropy(features[1] @ w.T + b, sets[1][1][i]) / 3
    for p, expected in zip((*body.parameters(), *start), torch.autograd.grad(total, upper), strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-9, atol=1e-12)


def test_momentum_and_adam_are_differentiated_from_the_start():
    problem = Softmax(m=1)
    for factory in (lambda p: torch.optim.SGD(p, momentum=0.9), torch.optim.Adam):

        def value(at, factory=factory):
            v = at.clone().requires_grad_()
            inner = factory([{"params": [v], "lr": 0.05}])
            for _ in range(3):
                inner.zero_grad()
                problem.loss(v, 0, 0).backward()
                inner.step()
            return problem.loss(v, 0, 1).detach()

        got = problem.estimate(bo.MAML, lower_lr=0.05, lower_optimizer=factory)
        direction = torch.randn(4, 3)
        x = problem.x.detach()
        difference = (value(x + 1e-5 * direction) - value(x - 1e-5 * direction)) / 2e-5
        assert float((got * direction).sum()) == pytest.approx(float(difference), rel=1e-5)


def test_without_tasks_there_is_one():
    problem = Softmax(m=1)
    expected = problem.reference(3, 0.3)
    batches = [(inputs[0], labels[0]) for inputs, labels in problem.sets]
    optimizer = bo.MAML([problem.x], [problem.y], lr=0.1, lower_lr=0.3, lower_steps=3)
    optimizer.backward(lambda: problem.f(batches[1]), lambda: problem.g(batches[0]))
    torch.testing.assert_close(problem.x.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cls", [bo.MAML, bo.FOMAML, bo.iMAML])
def test_shapes_must_fit(cls):
    x, y = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = cls([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    with pytest.raises(ValueError, match=r"must have the same shapes: \[\(2,\)\], but they have \[\(3,\)\]"):
        optimizer.step(lambda: y.sum(), lambda: y.square().sum())


def test_anil_needs_a_body():
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.ANIL([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    with pytest.raises(ValueError, match="ANIL needs upper parameters beside the initial values"):
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
        optimizer.step(
            lambda b: (y - b).square().sum() / 2, lambda b: (y - b).square().sum() / 2, tasks=bo.TensorTasks(target)
        )
    assert (x - target.mean((0, 1))).norm() < 0.2
