"""Problems of the recipes: their data, batches, losses, gradients and value functions."""

import bz2
import gzip
import hashlib
import itertools
import lzma
import pathlib
import struct

import pytest
import torch

import bilevel_optim as bo
from recipes import hyper_regularization
from recipes.benchmarks import bilevel_suite, many_tasks
from recipes.common.sampling import IndexBatches, IndexTerms
from recipes.problems import libsvm
from recipes.problems.problem import Part, Problem
from recipes.problems.softmax import Cleaning, Regularised, corrupted, standardised, with_bias
from recipes.problems.value_function import lower_solution, value_and_gradient


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


def digest(rows):
    """SHA-256 of labels, ends of rows, indices from zero and values, each as little-endian numbers of 8 bytes."""
    ends = [0, *itertools.accumulate(len(row) for _, row in rows)]
    entries = [(k - 1, value) for _, row in rows for k, value in sorted(row.items())]
    parts = (
        struct.pack(f"<{len(rows)}d", *(label for label, _ in rows)),
        struct.pack(f"<{len(ends)}q", *ends),
        struct.pack(f"<{len(entries)}q", *(k for k, _ in entries)),
        struct.pack(f"<{len(entries)}d", *(value for _, value in entries)),
    )
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site with two small files in place of a9a, whose contents are the expected ones."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name in ("a9a", "a9a.t"):
        (folder / name).write_bytes(svmlight(ROWS))
    monkeypatch.setattr(libsvm, "URL", f"{pathlib.Path(folder).as_uri()}/")
    monkeypatch.setattr(libsvm, "CONTENTS", {"a9a": digest(ROWS), "a9a.t": digest(ROWS)})
    return folder


FALSE = {
    "another value": (svmlight([*ROWS[:-1], (1, {4: -2})]), "other contents than expected"),
    "another label": (svmlight([*ROWS[:-1], (-1, {4: -1})]), "other contents than expected"),
    "another order": (svmlight(ROWS[::-1]), "other contents than expected"),
    "a page of errors": (b"<html>not found</html>", "is no file of examples"),
    "a large file": (svmlight(ROWS) * 200, "is larger than 4096 bytes"),
}


@pytest.mark.parametrize("kind", FALSE)
def test_libsvm_files_with_other_contents_are_not_kept(site, tmp_path, monkeypatch, kind):
    content, message = FALSE[kind]
    monkeypatch.setattr(libsvm, "MOST", 4096)
    (site / "a9a").write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        libsvm.load_libsvm("a9a", tmp_path / "new", download=True)
    assert not [*(tmp_path / "new").iterdir()]


def test_a_libsvm_file_that_unpacks_without_end_is_not_kept(site, tmp_path, monkeypatch):
    monkeypatch.setattr(libsvm, "UNPACKED", 2**16)
    (site / "ijcnn1.bz2").write_bytes(bz2.compress(svmlight(ROWS) * 2**12))
    with pytest.raises(SystemExit, match="is larger than 65536 bytes"):
        libsvm.load_libsvm("ijcnn1", tmp_path / "new", download=True)
    assert not [*(tmp_path / "new").iterdir()]


def test_libsvm_files_may_have_other_spaces(site, tmp_path):
    (site / "a9a").write_bytes(svmlight(ROWS).replace(b"\n", b" \n"))
    train, _ = libsvm.load_libsvm("a9a", tmp_path / "new", download=True)
    assert train.features.shape == (5, 123)


def test_libsvm_files_are_fetched(site, tmp_path):
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
    batches = IndexBatches(10, 3, seed=0)
    first, second = torch.cat(list(batches)), torch.cat(list(batches))
    for order in (first, second):
        assert len(order.unique()) == len(order) == 9
    assert first.tolist() != second.tolist()
    assert batches.drawn == 18
    several = IndexBatches(10, 3, seed=0, tasks=4)
    assert [tuple(index.shape) for index in several] == [(4, 3)] * 3
    assert several.drawn == 36
    objective = bo.Objective(lambda index: index.sum(), IndexBatches(4, 9, seed=1))
    assert sorted(objective.draw().batch.tolist()) == [0, 1, 2, 3]


def test_index_terms():
    terms = IndexTerms(lambda index: index.double().mean(), 10, 3, seed=0, tasks=4)
    assert sorted(torch.cat([terms.term(k).batch for k in range(len(terms))]).tolist()) == list(range(10))
    assert terms.drawn == 40
    batch = terms.draw().batch
    assert terms.drawn == 40 + 4 * len(batch)
    assert torch.stack([terms.term(k)() for k in range(len(terms))]).mean() == pytest.approx(4.5)


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


def small_parts():
    parts = [Part(torch.randn(n, 4), torch.randint(3, (n,))) for n in (30, 20, 10)]
    parts[0].labels[:3] = torch.arange(3)
    return parts


def signed(parts):
    return [Part(part.features, (part.labels > 1) * 2.0 - 1) for part in parts[:2]]


PROBLEMS = {
    "quadratics": lambda parts: bilevel_suite.Quadratics(200, (6, 3), 0.05),
    "logistic": lambda parts: bilevel_suite.Logistic(*signed(parts)),
    "one penalty per class": bilevel_suite.softmax,
    "one penalty per feature": lambda parts: Regularised(parts, 0.1, torch.zeros(4, 1)),
    "one penalty per weight": lambda parts: Regularised(with_bias(parts), 0.1, torch.zeros(5, 3)),
    "cleaning": lambda parts: bilevel_suite.cleaning(parts, corruption=0.5),
    "reweighting": lambda parts: hyper_regularization.Reweighting(*signed(parts), 0.1),
    "many reweightings": lambda parts: hyper_regularization.Reweighting(*signed(parts), 0.1, torch.tensor([1.0, 4.0])),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_of_the_problems_against_differences(name):
    problem = PROBLEMS[name](small_parts())
    problem.tol = 1e-11
    x, direction = problem.x + 0.1, torch.randn_like(problem.x)
    expected = central_difference(lambda at: problem.value(at, problem.y).value, x, direction)
    found = problem.value(x, problem.y)
    assert float((found.gradient * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    torch.testing.assert_close(problem.solution(x, problem.y), found.solution, rtol=1e-6, atol=1e-8)


def test_losses_of_the_softmax_problems():
    """Compare with the loss of torch on the same examples."""
    parts = small_parts()
    y, index = torch.randn(4, 3), torch.tensor([3, 3, 7])
    plain, penalty = torch.nn.functional.cross_entropy, torch.randn(4, 1)
    problem = Regularised(parts, 0.1, penalty)
    features, labels = parts[0]
    expected = plain(features[index] @ y, labels[index]) + 0.1 * sum(
        penalty[k].exp().sum() * y[k].square().sum() for k in range(4)
    )
    torch.testing.assert_close(problem.lower(penalty, y, index), expected)
    torch.testing.assert_close(problem.upper(penalty, y), plain(parts[1].features @ y, parts[1].labels))
    hits = (parts[2].features @ y).argmax(1) == parts[2].labels
    assert problem.accuracy(y) == 1 - problem.test_error(y) == pytest.approx(hits.double().mean().item())
    problem = Cleaning(parts, 0.1)
    torch.testing.assert_close(
        problem.lower(torch.full((30,), torch.inf), y), plain(features @ y, labels) + 0.1 * y.square().sum()
    )
    curvature = torch.autograd.functional.hessian(lambda y: problem.lower(torch.full((30,), torch.inf), y), y)
    assert torch.linalg.eigvalsh(curvature.view(12, 12))[-1] <= 1 / problem.lower_lr


def test_so_many_labels_are_wrong():
    labels = torch.randint(10, (200,))
    changed = corrupted(labels, 0.3, 10, torch.Generator().manual_seed(0))
    assert int((changed != labels).sum()) == 60
    assert set(changed.tolist()) <= set(range(10))
    assert len(((changed - labels) % 10).unique()) == 10


def test_features_are_standardised_by_the_training_part():
    parts = [Part(3 * torch.randn(50, 2) + 5, torch.zeros(50)) for _ in range(2)]
    parts[0].features[:, 1] = 7.0  # without variance
    first, second = standardised(parts)
    torch.testing.assert_close(first.features.mean(0), torch.zeros(2))
    torch.testing.assert_close(first.features[:, 0].std(correction=0), torch.tensor(1.0))
    torch.testing.assert_close(second.features[:, 1], parts[1].features[:, 1] - 7)


def test_closed_form_of_the_quadratics():
    problem = PROBLEMS["quadratics"](None)
    generic = Problem.value(problem, problem.x, problem.y)
    closed = problem.value(problem.x, problem.y)
    assert generic.value - problem.minimum == pytest.approx(closed.value)
    torch.testing.assert_close(generic.gradient, closed.gradient)
    best = problem.value(problem.minimiser, problem.y)
    assert best.value == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(best.gradient, torch.zeros(3))
    assert closed.value > 0


def test_examples_keep_their_labels():
    labels = torch.arange(50.0)
    part = Part(labels.unsqueeze(1) * torch.ones(3), labels).take(torch.randperm(50)[:20])
    assert len(part.labels.unique()) == 20
    torch.testing.assert_close(part.features, part.labels.unsqueeze(1).expand(-1, 3))


def test_rows_of_the_sampler_are_those_of_the_stacked_losses():
    examples = Part(torch.randn(20, 3), torch.ones(20))
    problem = hyper_regularization.Reweighting(examples, examples, 0.1, torch.tensor([1.0, 2.0, 5.0, 10.0]))
    sampler = hyper_regularization.Rows(problem)
    tasks = sampler.sample(2, None)
    index, scale = sampler.lower(tasks, 6, None)
    assert sampler.drawn == 12
    sampler.upper(tasks, 3, None)
    assert sampler.drawn == 18
    x, y = torch.randn(20), torch.randn(4, 4)
    rows = [problem.lower(x, y[task], index[i], scale[i]) for i, task in enumerate(tasks.tolist())]
    stacked = problem.lower(x, y[tasks], index, problem.scales[tasks])
    torch.testing.assert_close(sum(rows), stacked)
    whole = torch.stack([problem.upper(x, y[i], torch.arange(20), problem.scales[i]) for i in range(4)])
    torch.testing.assert_close(whole.sum(), problem.upper(x, y))
    assert problem.objective(y) == pytest.approx(float(whole.mean()))


def test_libsvm_files_are_reweighted(tmp_path):
    torch.set_default_dtype(torch.float32)
    for name in ("ijcnn1", "ijcnn1.t"):
        (tmp_path / name).write_bytes(svmlight(ROWS * 10))
    arguments = ["--data", "ijcnn1", "--data-root", str(tmp_path), "--out", str(tmp_path), "--seeds", "1"]
    numbers = hyper_regularization.main([*arguments, "--samples", "2000", "--lr", "1", "--optimizer", "aid"])
    assert len(numbers["grid"]["aid"]) == 2


@pytest.mark.slow
def test_noise_of_drawing_tasks_follows_the_law():
    problem = many_tasks.Quadratics(torch.linspace(0.2, 2.0, 5), 3, 2)
    measured, law = many_tasks.noise(problem, torch.tensor([0.1, 0.1, 0.2, 0.2, 0.4], dtype=torch.float64), 400, 0)
    assert measured == pytest.approx(law, rel=0.4)  # 400 steps are about 40 independent draws


def test_many_tasks_knows_its_hypergradients():
    problem = many_tasks.Quadratics(torch.linspace(0.5, 1.5, 6), 3, 2)
    rows = problem.tasks.lower(torch.arange(6), None, None)[:, 0]
    x = torch.zeros(6, 3, requires_grad=True)
    y = torch.einsum("mpi,mi->mp", rows[..., :3], x) + rows[..., 3]
    (truth,) = torch.autograd.grad((y - rows[..., 4]).square().sum() / 2, x)
    torch.testing.assert_close(problem.hypergradients(), truth)
