"""The stochastic recipe and benchmark: loaders, the value function, runs on small data."""

import bz2
import gzip
import json
import lzma
import pathlib
from functools import partial

import pytest
import torch
from recipes.value_function import lower_solution, value_and_gradient

import bilevel_optim as bo
from recipes import hyper_regularization, libsvm, stochastic
from recipes.benchmarks import bilevel_suite, many_tasks


@pytest.fixture
def single():
    torch.set_default_dtype(torch.float32)


def svmlight(rows):
    """Text of rows of (label, {feature from one: value})."""
    return "".join(f"{label:+d} {' '.join(f'{k}:{v}' for k, v in row.items())}\n" for label, row in rows).encode()


ROWS = [(1, {1: 1, 5: 0.5}), (-1, {}), (-1, {3: 2}), (1, {2: 1}), (1, {4: -1})]


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_libsvm_files_are_read(tmp_path, suffix, pack):
    (tmp_path / f"ijcnn1{suffix}").write_bytes(pack(svmlight(ROWS)))
    (tmp_path / f"ijcnn1.t{suffix}").write_bytes(pack(svmlight(ROWS[:2])))
    train, test = libsvm.load_libsvm("ijcnn1", tmp_path, download=False)
    assert train.features.shape == (5, 22)
    assert test.features.shape == (2, 22)
    assert train.labels.tolist() == [1, -1, -1, 1, 1]
    assert train.features[0].nonzero().flatten().tolist() == [0, 4]
    assert float(train.features[2, 2]) == 2


def test_a_test_part_is_held_out_where_there_is_none(tmp_path, capsys):
    (tmp_path / "w8a").write_bytes(svmlight(ROWS))
    train, test = libsvm.load_libsvm("w8a", tmp_path, download=False)
    assert len(train.labels) == 4
    assert len(test.labels) == 1
    assert "No w8a.t" in capsys.readouterr().out


def test_libsvm_files_are_fetched(tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    for name in ("a9a", "a9a.t"):
        (site / name).write_bytes(svmlight(ROWS))
    monkeypatch.setattr(libsvm, "URL", f"{pathlib.Path(site).as_uri()}/")
    train, _ = libsvm.load_libsvm("a9a", tmp_path / "new", download=True)
    assert train.features.shape == (5, 123)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a9a", "a9a.t"]
    with pytest.raises(SystemExit, match="cannot fetch"):
        libsvm.load_libsvm("w8a", tmp_path / "new", download=True)
    with pytest.raises(SystemExit, match="--download"):
        libsvm.load_libsvm("w8a", tmp_path, download=False)
    with pytest.raises(SystemExit, match="needs --data-root"):
        libsvm.load_libsvm("w8a", None, download=False)


def test_index_batches():
    batches = stochastic.IndexBatches(10, 3, seed=0)
    first, second = torch.cat(list(batches)), torch.cat(list(batches))
    for order in (first, second):
        assert len(order.unique()) == len(order) == 9
    assert first.tolist() != second.tolist()
    assert batches.drawn == 18
    several = stochastic.IndexBatches(10, 3, seed=0, tasks=4)
    assert [tuple(index.shape) for index in several] == [(4, 3)] * 3
    assert several.drawn == 36
    objective = bo.Objective(lambda index: index.sum(), stochastic.IndexBatches(4, 9, seed=1))
    assert sorted(objective.draw().batch.tolist()) == [0, 1, 2, 3]


def test_index_terms():
    terms = stochastic.IndexTerms(lambda index: index.double().mean(), 10, 3, seed=0, tasks=4)
    assert sorted(torch.cat([terms.term(k).batch for k in range(len(terms))]).tolist()) == list(range(10))
    assert terms.drawn == 40
    batch = terms.draw().batch
    assert terms.drawn == 40 + 4 * len(batch)
    assert torch.stack([terms.term(k)() for k in range(len(terms))]).mean() == pytest.approx(4.5)


def test_every_public_method_has_its_place():
    def kind(make):
        return make.func if isinstance(make, partial) else make

    public = {c for c in vars(bo).values() if isinstance(c, type) and issubclass(c, bo.BilevelOptimizer)}
    offered = {kind(method.make) for method in stochastic.METHODS.values()}
    assert public - {bo.BilevelOptimizer} == offered | {getattr(bo, name) for name in stochastic.ELSEWHERE}


def test_value_function_of_ridge_regression():
    """Against autograd through the closed form of the lower solution."""
    A, b, C, d = torch.randn(12, 5), torch.randn(12), torch.randn(9, 5), torch.randn(9)
    x = torch.randn(5, requires_grad=True)

    def lower(x, y):
        return (A @ y - b).square().sum() / 2 + (x.exp() * y.square()).sum() / 2

    def upper(x, y):
        return (C @ y - d).square().sum() / 2 + x.square().sum()

    exact = torch.linalg.solve(A.T @ A + torch.diag(x.exp()), A.T @ b)
    h = upper(x, exact)
    (gradient,) = torch.autograd.grad(h, x)
    found = value_and_gradient(upper, lower, x, torch.zeros(5), tol=1e-11)
    assert found.value == pytest.approx(float(h.detach()), rel=1e-12)
    torch.testing.assert_close(found.gradient, gradient)
    torch.testing.assert_close(found.solution, exact.detach())


def test_newton_needs_its_backtracking():
    """From far away on a loss whose curvature vanishes full Newton steps diverge."""

    def lower(x, y):
        return (1 + y.square()).sqrt().sum() + 1e-3 * y.square().sum()

    y = lower_solution(lower, torch.zeros(1), torch.tensor([30.0, -20.0]), tol=1e-10)
    torch.testing.assert_close(y, torch.zeros(2), atol=1e-9, rtol=0)


def central_difference(h, x, direction, width=1e-5):
    return (h(x + width * direction) - h(x - width * direction)) / (2 * width)


def small_problems():
    inputs = [torch.randn(n, 4) for n in (30, 20, 10)]
    signs = [torch.randint(2, (n,)) * 2.0 - 1 for n in (30, 20)]
    parts = [(features, torch.randint(3, (len(features),))) for features in inputs]
    parts[0][1][:3] = torch.arange(3)
    return {
        "quadratics": bilevel_suite.Quadratics(200, (6, 3), 0.05),
        "logistic": bilevel_suite.Logistic(tuple(zip(inputs[:2], signs, strict=True))),
        "softmax": bilevel_suite.Softmax(*parts),
        "cleaning": bilevel_suite.Cleaning(*parts, corruption=0.5),
    }


@pytest.mark.parametrize("name", ["quadratics", "logistic", "softmax", "cleaning"])
def test_gradients_of_the_suite_against_differences(name):
    problem = small_problems()[name]
    problem.tol = 1e-11
    x, direction = problem.x + 0.1, torch.randn_like(problem.x)
    expected = central_difference(lambda at: problem.value(at, problem.y).value, x, direction)
    assert float(problem.value(x, problem.y).gradient @ direction) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_closed_form_of_the_quadratics():
    problem = small_problems()["quadratics"]
    generic = bilevel_suite.Problem.value(problem, problem.x, problem.y)
    closed = problem.value(problem.x, problem.y)
    assert generic.value - problem.minimum == pytest.approx(closed.value)
    torch.testing.assert_close(generic.gradient, closed.gradient)
    best = problem.value(problem.minimiser, problem.y)
    assert best.value == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(best.gradient, torch.zeros(3))
    assert closed.value > 0


@pytest.mark.parametrize("tasks", [None, 3])
def test_solutions_of_the_reweighting(tasks):
    features, labels = torch.randn(40, 4), torch.randint(2, (40,)) * 2.0 - 1
    scales = None if tasks is None else torch.tensor([1.0, 4.0, 9.0])
    examples = libsvm.Examples(features, labels)
    problem = hyper_regularization.Reweighting(examples, examples, 0.01, scales)
    x, y = torch.randn(40), problem.start()[1].detach()
    column = problem.scales if tasks is None else problem.scales.unsqueeze(1)

    def lower(x, y):
        return problem.lower(x, y, torch.arange(40), column)

    found = problem.solution(x, y, tol=1e-11)
    torch.testing.assert_close(found, lower_solution(lower, x, y, tol=1e-12), rtol=1e-6, atol=1e-8)
    loss = problem.upper(found, torch.arange(40), column)
    assert problem.objective(found) == pytest.approx(float(loss) / len(problem.scales))


def test_examples_keep_their_labels():
    labels = torch.arange(50.0)
    part = hyper_regularization.some(
        libsvm.Examples(labels.unsqueeze(1) * torch.ones(3), labels), 20, torch.Generator().manual_seed(0)
    )
    assert len(part.labels.unique()) == 20
    torch.testing.assert_close(part.features, part.labels.unsqueeze(1).expand(-1, 3))


def test_rows_of_the_sampler_are_those_of_the_stacked_losses():
    examples = libsvm.Examples(torch.randn(20, 3), torch.ones(20))
    problem = hyper_regularization.Reweighting(examples, examples, 0.1, torch.tensor([1.0, 2.0, 5.0, 10.0]))
    sampler = hyper_regularization.Rows(problem)
    tasks = sampler.sample(2, None)
    index, scale = sampler.lower(tasks, 6, None)
    assert sampler.drawn == 12
    x, y = torch.randn(20), torch.randn(4, 4)
    rows = [problem.lower(x, y[task], index[i], scale[i]) for i, task in enumerate(tasks.tolist())]
    stacked = problem.lower(x, y[tasks], index, problem.scales[tasks].unsqueeze(1))
    torch.testing.assert_close(sum(rows), stacked)


@pytest.mark.usefixtures("single")
def test_hyper_regularization(tmp_path, capsys):
    arguments = ["--samples", "6000", "--lr", "10", "--lower-lr", "0.5", "--evaluations", "3", "--out", str(tmp_path)]
    numbers = hyper_regularization.main([*arguments, "--seeds", "2", "--optimizer", "f2sa-2", "first-order"])
    runs = numbers["results"]
    assert all(r["solved"] < numbers["equal_weights"] - 0.01 for r in runs["f2sa-2"])
    assert runs["first-order"][0]["solved"] == pytest.approx(numbers["equal_weights"], abs=1e-4)
    assert [r["seed"] for r in runs["f2sa-2"]] == [0, 1]
    assert all(6000 <= r["samples"] < 8000 for r in runs["f2sa-2"])
    assert (
        json.loads((tmp_path / "hyper_regularization_breast_cancer.json").read_text())["results"].keys() == runs.keys()
    )
    assert (tmp_path / "hyper_regularization_breast_cancer.png").read_bytes().startswith(b"\x89PNG")
    assert "equal weights" in capsys.readouterr().out


@pytest.mark.usefixtures("single")
def test_hyper_regularization_with_many_lower_problems(tmp_path):
    arguments = ["--tasks", "5", "--samples", "30000", "--lr", "10", "--lower-lr", "0.5", "--evaluations", "2"]
    numbers = hyper_regularization.main(
        [*arguments, "--seeds", "1", "--optimizer", "aid", "saba", "--out", str(tmp_path)]
    )
    (run,) = numbers["results"]["aid"]
    assert run["solved"] < numbers["equal_weights"] - 0.005
    assert run["samples"] == 5 * 32 * run["steps"] * 12
    assert (tmp_path / "hyper_regularization_breast_cancer_5.png").exists()


@pytest.mark.usefixtures("single")
def test_hyper_regularization_reads_libsvm_files(tmp_path):
    for name in ("ijcnn1", "ijcnn1.t"):
        (tmp_path / name).write_bytes(svmlight(ROWS * 10))
    arguments = ["--data", "ijcnn1", "--data-root", str(tmp_path), "--out", str(tmp_path), "--seeds", "1"]
    numbers = hyper_regularization.main([*arguments, "--samples", "2000", "--lr", "1", "--optimizer", "aid"])
    assert len(numbers["grid"]["aid"]) == 2


@pytest.mark.usefixtures("single")
def test_bilevel_suite_resumes(tmp_path, capsys):
    arguments = ["--seconds", "0.05", "--evaluations", "2", "--seeds", "2", "--out", str(tmp_path), "--ratios", "0.001"]
    first = bilevel_suite.main([*arguments, "--methods", "aid", "--steps", "0.1"])
    assert first["new_runs"] == 2
    again = bilevel_suite.main([*arguments, "--methods", "aid", "f2sa", "--steps", "0.1", "1e9"])
    assert again["new_runs"] == 1 + 3  # the other step size of aid; both of f2sa, and its second seed
    assert again["best"]["aid"] == first["best"]["aid"]
    (stem,) = {path.name.split(".r")[0].removesuffix(".json").removesuffix(".png") for path in tmp_path.iterdir()}
    assert len((tmp_path / f"{stem}.records.jsonl").read_text().splitlines()) == 6
    assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    curve = first["best"]["aid"][0]["curve"]
    assert curve[0]["seconds"] == 0
    assert len(curve) == 3
    assert 0 <= curve[-1]["test_error"] <= 1
    assert "at the start" in capsys.readouterr().out


@pytest.mark.usefixtures("single")
def test_bilevel_suite_on_quadratics(tmp_path):
    arguments = ["--problem", "quadratics", "--examples", "2000", "--dims", "8", "3", "--mu", "0.1", "--seeds", "1"]
    numbers = bilevel_suite.main(
        [*arguments, "--seconds", "0.5", "--methods", "soba", "--steps", "0.1", "--ratios", "3", "--out", str(tmp_path)]
    )
    assert numbers["best"]["soba"][0]["curve"][-1]["value"] < 0.5 * numbers["start"]


def test_many_tasks_counts_samples_and_measures_rows(tmp_path):
    numbers = many_tasks.main(["--part", "cost", "--tasks", "20", "40", "--steps", "3", "--out", str(tmp_path)])
    rows = {(e["tasks"], e["variant"]): e["rows"] for e in numbers["cost"] if e["sampling"] == "uniform"}
    assert rows[40, "exact_mean"] == pytest.approx(2 * rows[20, "exact_mean"])
    assert rows[40, "matrix_free"] < rows[40, "exact_mean"]
    assert (tmp_path / "many_tasks.json").exists()


def test_noise_of_drawing_tasks_follows_the_law(tmp_path):
    problem = many_tasks.Quadratics(torch.linspace(0.2, 2.0, 5), 3, 2)
    measured, law = many_tasks.noise(problem, torch.tensor([0.1, 0.1, 0.2, 0.2, 0.4], dtype=torch.float64), 400, 0)
    assert measured == pytest.approx(law, rel=0.4)  # 400 steps are about 40 independent draws
    numbers = many_tasks.main(["--part", "complexity", "--held", "5", "--out", str(tmp_path)])
    assert len(numbers["complexity"]) == 6


def test_many_tasks_knows_its_hypergradients():
    problem = many_tasks.Quadratics(torch.linspace(0.5, 1.5, 6), 3, 2)
    rows = problem.tasks.lower(torch.arange(6), None, None)[:, 0]
    x = torch.zeros(6, 3, requires_grad=True)
    y = torch.einsum("mpi,mi->mp", rows[..., :3], x) + rows[..., 3]
    (truth,) = torch.autograd.grad((y - rows[..., 4]).square().sum() / 2, x)
    torch.testing.assert_close(problem.hypergradients(), truth)
