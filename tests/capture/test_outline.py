"""Long graphs in parts: which parts are the same, what they hand on, and where vectors are looked at."""

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.capture import trace
from bilevel_optim.problem.tracing import end_region

from ..problems import close


class Parts:
    """A backend that keeps what it was given to compile."""

    def __init__(self):
        self.modules = []

    def __call__(self, module, example):
        self.modules.append(module)
        return module.forward

    def count(self, name):
        return sum(name in str(node.target) for module in self.modules for node in module.graph.nodes)


@pytest.fixture
def parts(monkeypatch):
    """In the test every graph is made in parts."""
    monkeypatch.setattr(trace, "LARGE", 0)
    return Parts()


@pytest.mark.parametrize("written", [False, True])
def test_a_part_that_is_given_one_value_twice_is_a_case_of_one_that_is_given_two(parts, written):
    """Unless it writes into one of them."""

    def function(values):
        term = total = values[0] @ values[0]
        for _ in range(6):
            end_region()
            term = (term.sin() @ term.cos()).tanh() - term.exp()
            if written:
                term, total = term.clone(), total.clone()
                term.sub_(total, alpha=0.1)
            total = total + term
        return [total, term]

    values = [torch.linspace(-0.4, 0.7, 9, dtype=torch.float64).view(3, 3)]
    graph = trace.Graph(function, values, parts)
    close(function(values), graph(values), 1e-12)
    assert len(parts.modules) == (2 if written else 1)


def test_what_is_made_for_another_part_alone_moves_there_only_if_less_is_handed_on(parts):
    """A view is handed on as it is; a scalar that each part makes of an argument stays with the part that reads it."""

    def function(values):
        a, rate = values
        for _ in range(6):
            end_region()
            a = a - (a.sin() @ a.cos()) * rate.neg().to(torch.float64)
        end_region()
        return [a.t()]

    values = [torch.linspace(-0.4, 0.7, 9, dtype=torch.float64).view(3, 3), torch.tensor(0.1)]
    graph = trace.Graph(function, values, parts)
    close(function(values), graph(values), 1e-12)
    assert len(parts.modules) == 1  # and the view at the end is too short to be compiled


@pytest.mark.parametrize("whole", [False, True])
def test_a_large_table_makes_a_graph_large_only_if_more_than_rows_of_it_is_read(whole, monkeypatch):
    asked = []
    monkeypatch.setattr(trace, "LARGE", 20)
    monkeypatch.setattr(trace, "in_parts", lambda module, backend: asked.append(module))
    values = [torch.ones(30, 2), torch.tensor([1, 2])]
    trace.Graph(lambda v: [v[0].sin() if whole else v[0][v[1]].sin()], values, Parts())
    assert bool(asked) == whole


@pytest.mark.filterwarnings("ignore::bilevel_optim.errors.BilevelWarning")
@pytest.mark.parametrize("method", ["ITD", "AID", "SOBA"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_run_knows_which_of_its_steps_failed(method, at):
    """Though what a step adds to goes on in the next one."""
    x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 0.2))
    options = {"AID": {"lower_steps": 3, "linear_solver": "neumann", "linear_steps": 3}, "ITD": {"lower_steps": 3}}
    optimizer = getattr(bo, method)([x], [y], lr=0.1, lower_lr=0.1, **options.get(method, {}))
    optimizer.compile(backend="eager", fullgraph=True)
    ones = [torch.ones(3, dtype=torch.float64)] * 40

    def run(rows):
        upper = bo.Objective(lambda rows: ((y - 1) * rows).square().sum(), rows)
        lower = bo.Objective(lambda row: (y * x.exp() - 1).square().sum(), ones)
        return optimizer.run(upper, lower, steps=4)

    for _ in range(3):
        run(ones[:4])
    before = [x.detach().clone(), y.detach().clone()]
    rows = ones[:4]
    rows[at] = torch.full((3,), torch.inf, dtype=torch.float64)
    with pytest.raises(bo.NonFiniteError):
        run(rows)
    moved = [not torch.equal(a, b) for a, b in zip(before, (x, y), strict=True)]
    assert moved == [at > 0, at > 0]


@pytest.mark.parametrize(("method", "most"), [("ITD", 6), ("AID", 8)])
def test_products_and_lower_steps_are_compiled_once(method, most, parts):
    """But for the first, the middle and the last lower step, of which the norm of the gradient is told."""
    data = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    counts = []
    for steps in (8, 12):
        parts.modules.clear()
        x, y = (torch.full((6,), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 0.2))
        options = {"linear_solver": "neumann", "linear_steps": steps} if method == "AID" else {}
        optimizer = getattr(bo, method)([x], [y], lr=0.1, lower_lr=0.1, lower_steps=steps, **options)
        optimizer.compile(backend=parts, fullgraph=True)
        for _ in range(4):
            optimizer.step(
                lambda y=y: ((data @ y).sigmoid() - 1).square().sum(),
                lambda x=x, y=y: ((data @ y).tanh() - 1).square().sum() + (x.exp() * y.square()).sum(),
            )
        counts.append(len(parts.modules))
    assert counts[0] == counts[1] <= most
    if method == "ITD":
        lower = [m.graph for m in parts.modules if any("tanh.default" in str(node.target) for node in m.graph.nodes)]
        norms = [node for graph in lower for node in graph.nodes if "vector_norm" in str(node.target)]
        assert norms
        assert all(n.args[0].op == "call_function" for n in norms), "of a gradient that has not left its part"
