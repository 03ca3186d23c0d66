"""The recipes run, on bundled data and on files in the format of the public downloads."""

import json
import lzma
import struct
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from recipes.newsgroups import Features, load_newsgroups
from recipes.report import table

import bilevel_optim as bo
from recipes import (
    compare,
    hyper_cleaning,
    hyper_representation,
    learn_to_regularize,
    meta_classification,
    newsvendor,
    saddle_escape,
    task_data,
)
from recipes.benchmarks import conditioning, contextual, paths


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def test_hyper_cleaning_on_digits(tmp_path, capsys):
    numbers = hyper_cleaning.main(["--steps", "30", "--out", str(tmp_path), "--optimizer", "aid", "itd", "f2sa"])
    for result in numbers["results"].values():
        assert result["accuracy"] > numbers["baselines"]["corrupted labels"] + 0.02
        assert result["precision"] > 0.8
        assert result["recall"] > 0.8
    assert numbers["baselines"]["true labels"] > 0.93
    assert json.loads((tmp_path / "hyper_cleaning_digits.json").read_text())["results"].keys() == {"aid", "itd", "f2sa"}
    assert (tmp_path / "hyper_cleaning_digits.png").read_bytes().startswith(b"\x89PNG")
    assert "cleaned by f2sa" in capsys.readouterr().out


def test_hyper_cleaning_with_momentum_and_perturbations(tmp_path):
    names = ["ba", "paid", "rahgd", "prahgd"]
    numbers = hyper_cleaning.main(["--steps", "12", "--out", str(tmp_path), "--optimizer", *names])
    for name in names:
        assert numbers["results"][name]["recall"] > 0.6
    lower = {name: numbers["results"][name]["oracle_calls"]["lower_grad"] for name in names}
    assert lower["paid"] == lower["rahgd"] == lower["prahgd"] == 12 * 21
    assert lower["ba"] > 12 * 21


def test_saddle_escape(tmp_path, capsys):
    names = ["pragda", "gda, lr 1"]
    arguments = ["--optimizer", *names, "--seeds", "2", "--steps", "100", "--out", str(tmp_path)]
    numbers = saddle_escape.main(arguments)
    assert [(r["start"], r["method"]) for r in numbers["results"]] == [
        (s, n) for s in saddle_escape.STARTS for n in names
    ]
    assert all(hit < 90 for hit in numbers["results"][0]["hit"])
    assert numbers["results"][1]["hit"] == [None]
    assert (tmp_path / "saddle_escape.png").read_bytes().startswith(b"\x89PNG")
    assert "on a slope: pragda" in capsys.readouterr().out


def test_learn_to_regularize_on_digits(tmp_path):
    names = ["rahgd", "prahgd", "aid", "aid-nesterov", "itd", "ba", "paid", "f2sa-1", "f2sa-2", "f2sa-3", "first-order"]
    numbers = learn_to_regularize.main(["--steps", "8", "--out", str(tmp_path), "--optimizer", *names])
    for name in names:
        result = numbers["results"][name]
        assert len(result["curve"]) == 9
        assert result["loss"] < (0.85 if name == "ba" else 0.6) * result["curve"][0]["loss"]
        assert (result["penalty_range"] == [0.0, 0.0]) == (name == "first-order")
    assert (tmp_path / "learn_to_regularize_digits.png").read_bytes().startswith(b"\x89PNG")


WORDS = {"red": "crimson scarlet ruby", "sea": "wave tide shell", "sky": "cloud wind bird"}


def write_posts(root, how):
    """Three groups of short posts, each with a header that gives the group away."""
    for part, count in (("train", 24), ("test", 6)):
        posts = []
        for group, words in WORDS.items():
            for i in range(count // 3):
                body = f"{words.split()[i % 3]} {words.split()[(i + 1) % 3]} the and"
                posts.append({"group": group, "id": str(i), "text": f"From: {group}@host\n\n{body}\n"})
        if how == "lines":
            with lzma.open(root / f"{part}.jsonl.xz", "wt", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(post) + "\n" for post in posts)
        else:
            for post in posts:
                folder = root / f"20news-bydate-{part}" / post["group"]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / post["id"]).write_text(post["text"], encoding="latin-1")


@pytest.mark.parametrize("how", ["lines", "archive"])
def test_newsgroups_are_read_split_and_stripped(tmp_path, how):
    write_posts(tmp_path, how)
    train, val, test = load_newsgroups(tmp_path, download=False, keep=False, seed=0)
    assert [len(p.labels) for p in (train, val, test)] == [12, 12, 6]
    assert train.labels.bincount().tolist() == val.labels.bincount().tolist() == [4, 4, 4]
    assert train.features.sparse
    assert train.features.shape[1] == 9 + 2  # without "from", "host" and the groups' names
    kept, _, _ = load_newsgroups(tmp_path, download=False, keep=True, seed=0)
    assert kept.features.shape[1] == 9 + 2 + 5
    norms = train.features.matrix.to_dense().norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(12))
    arguments = ["--data", "20newsgroups", "--data-root", str(tmp_path), "--out", str(tmp_path), "--steps", "3"]
    numbers = learn_to_regularize.main([*arguments, "--optimizer", "rahgd", "itd", "f2sa-2", "--lr", "1"])
    for result in numbers["results"].values():
        assert result["accuracy"] == 1
        assert result["vectorize_fallback"] is None


def test_sparse_features_are_differentiated_as_dense_ones():
    dense = torch.rand(6, 9) * (torch.rand(6, 9) < 0.4)
    sparse = Features(dense.to_sparse_coo().coalesce())
    assert sparse.sparse
    assert sparse.largest_singular_value(200) == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-4)
    W, V = torch.rand(9, 3, requires_grad=True), torch.rand(9, 3)
    found = []
    for features in (sparse, Features(dense)):
        (gradient,) = torch.autograd.grad((features @ W).tanh().square().sum(), W, create_graph=True)
        (product,) = torch.autograd.grad(gradient, W, V)
        stacked = torch.func.vmap(torch.func.grad(lambda w, f=features: (f @ w).tanh().square().sum()))(
            torch.stack([W.detach(), V])
        )
        found.append((gradient.detach(), product, stacked))
    torch.testing.assert_close(*found)


def test_conditioning_counts_oracle_calls():
    setting = {"lr": 1.0, "lower_steps": 10, "linear_steps": 10}
    spent = conditioning.calls(conditioning.quadratic, 10.0, "AID", setting, 5000)
    assert 500 < spent < 5000
    assert conditioning.calls(conditioning.quadratic, 10.0, "AID", setting, 100) == float("inf")
    for make in (conditioning.quadratic, conditioning.quartic):
        problem = make(10.0)
        before = problem.gradient()
        optimizer = conditioning.bo.AID(
            [problem.x], [problem.y], lr=0.0, lower_lr=1 / problem.lower_smoothness, lower_steps=400, linear_steps=30
        )
        optimizer.backward(problem.upper, problem.lower)
        torch.testing.assert_close(problem.x.grad, before)


def test_first_order_control_learns_nothing(tmp_path):
    numbers = hyper_cleaning.main(["--steps", "5", "--out", str(tmp_path), "--optimizer", "first-order"])
    assert numbers["results"]["first-order"]["recall"] == 0


def mnist_files(root, count=600):
    """Few random images in torchvision's layout."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, size in (("train", count), ("t10k", 40)):
        images, labels = (
            rng.integers(0, 256, (size, 28, 28), dtype=np.uint8),
            rng.integers(0, 10, size, dtype=np.uint8),
        )
        header = struct.pack(">IIII", 2051, size, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, size) + labels.tobytes())


def test_hyper_cleaning_reads_mnist_files(tmp_path, monkeypatch):
    mnist_files(tmp_path)
    monkeypatch.setitem(hyper_cleaning.SETTINGS["mnist"], "sizes", (80, 40))
    arguments = ["--data", "mnist", "--data-root", str(tmp_path), "--out", str(tmp_path), "--steps", "2"]
    numbers = hyper_cleaning.main([*arguments, "--optimizer", "aid", "--corruption", "0.25"])
    assert numbers["results"]["aid"]["oracle_calls"]["lower_grad"] == 2 * 11


def test_meta_classification_on_digits(tmp_path, capsys):
    chosen = ["rt-mlmc", "maml"]
    arguments = ["--steps", "6", "--tasks", "3", "--levels", "2", "--out", str(tmp_path), "--optimizer", *chosen]
    numbers = meta_classification.main(arguments)
    for result in numbers["results"].values():
        assert result["exact_loss"] < numbers["centre_zero"]["exact_loss"] - 0.2
        assert result["accuracy"] > 0.5
    assert json.loads((tmp_path / "meta_classification_digits.json").read_text())["results"].keys() == set(chosen)
    assert (tmp_path / "meta_classification_digits.png").read_bytes().startswith(b"\x89PNG")
    assert "centre zero" in capsys.readouterr().out


def test_meta_classification_reads_image_folders(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)

    def images(folder, count, size):
        folder.mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{i}.png")

    for names in task_data.SUPERCLASSES.values():
        for name in names.split():
            images(tmp_path / "cifar" / "data" / name, 5, (32, 32, 3))
    for alphabet in ("Greek", "Latin"):
        for i in range(11):
            images(tmp_path / "omniglot-py" / "images_background" / alphabet / f"character{i:02}", 20, (30, 30))
    shares, generator = (0.6, 0.2, 0.2), torch.Generator().manual_seed(0)
    support, query, test = task_data.load_tasks("cifar_fs", tmp_path / "cifar", 3, shares, generator)
    assert [tuple(part.inputs.shape) for part in (support, query, test)] == [(3, 30, 512), (3, 10, 512), (3, 10, 512)]
    assert support.labels[0].bincount().tolist() == [3] * 10
    support, *_ = task_data.load_tasks("omniglot", tmp_path, 2, shares, generator)
    assert support.inputs.shape == (2, 120, 512)
    torch.testing.assert_close(support.inputs.norm(dim=-1), torch.full((2, 120), 5.0))
    with pytest.raises(SystemExit, match="found 2 groups of ten characters"):
        task_data.load_tasks("omniglot", tmp_path, 3, shares, generator)
    with pytest.raises(SystemExit, match="no folder of PNG files for 100 classes"):
        task_data.load_tasks("cifar_fs", tmp_path / "omniglot-py", 3, shares, generator)
    with pytest.raises(SystemExit, match="needs --data-root"):
        meta_classification.main(["--data", "omniglot"])


def test_newsvendor(tmp_path, capsys):
    arguments = ["--steps", "60", "--levels", "2", "--price", "10", "--test-points", "5000", "--out", str(tmp_path)]
    numbers = newsvendor.main([*arguments, "--optimizer", "erm", "rt-mlmc"])
    for result in numbers["results"].values():
        assert numbers["references"]["true demand known"] < result["cost"] < result["curve"][0]["cost"]
    assert 4 < numbers["demand"]["mean"] < 7
    assert numbers["demand"]["std"] > 1
    assert (tmp_path / "newsvendor.png").read_bytes().startswith(b"\x89PNG")
    trap = newsvendor.main([*arguments, "--optimizer", "erm", "--literal-init"])
    assert trap["demand"]["mean"] > 9.99
    assert trap["demand"]["std"] < 1e-3
    assert "mean 10.000" in capsys.readouterr().out


def test_contextual_benchmark(tmp_path, monkeypatch):
    arguments = ["--part", "end-to-end", "time", "--seeds", "1", "--budget", "500", "--out", str(tmp_path)]
    numbers = contextual.main([*arguments, "--levels", "2", "--tasks", "1", "2", "--repeats", "1"])
    assert len(numbers["end-to-end"]["sum 2 RT-MLMC"]["rms"]) == 1
    assert numbers["time"]["K=2 tasks=2"]["DL-SGD"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "mnist"], "needs --data-root"),
        (["--data", "mnist", "--data-root", "/nonexistent"], "--download"),
        (["--data", "20newsgroups"], "needs --data-root"),
        (["--data", "20newsgroups", "--data-root", "EMPTY"], "--download"),
    ],
)
def test_missing_data_says_what_to_do(arguments, message, tmp_path):
    arguments = [str(tmp_path) if a == "EMPTY" else a for a in arguments]
    with pytest.raises(SystemExit, match=message):
        (learn_to_regularize if "20newsgroups" in arguments else hyper_cleaning).main(arguments)


@pytest.mark.parametrize("arguments", [["--corruption", "1.5"], ["--steps", "0"], ["--optimizer", "newton"]])
def test_bad_arguments_are_refused(arguments, capsys):
    for recipe in (hyper_cleaning,) if arguments[0] == "--corruption" else (hyper_cleaning, learn_to_regularize):
        with pytest.raises(SystemExit):
            recipe.main(arguments)
        assert arguments[0] in capsys.readouterr().err


def test_table():
    text = table(["a", "bb"], [["x", 1.23456], ["long", None]])
    assert text.splitlines() == ["a        bb", "----  -----", "x     1.235", "long      -"]


def test_golden_trajectories_of_the_linear_representation(tmp_path):
    """T25 of the PZOBO specification, to step 10: deterministic methods within 1 %, random ones in their order."""
    names = ["itd", "aid-fp", "first-order", "pzobo-code", "pzobo-16", "pzobo"]
    arguments = ["--data", "linear", "--steps", "11", "--out", str(tmp_path), "--optimizer", *names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        numbers = hyper_representation.main(arguments)
    losses = {name: {int(p["step"]): p["loss"] for p in result["curve"]} for name, result in numbers["results"].items()}
    for name in names[:3]:
        reference = hyper_representation.REFERENCE["linear"][name]
        assert [losses[name][0], losses[name][10]] == pytest.approx(reference[:2], rel=0.01)
    assert losses["itd"][0] == pytest.approx(508.638, abs=1e-3)
    assert losses["pzobo-code"][10] == pytest.approx(losses["first-order"][10], rel=0.1)
    assert losses["itd"][10] < losses["pzobo-16"][10] / 3 < losses["pzobo"][10] / 3


def test_hyper_representation_on_digits(tmp_path, capsys):
    arguments = ["--steps", "25", "--out", str(tmp_path), "--optimizer", "aid-fp", "pzobo-code", "one-level"]
    results = hyper_representation.main(arguments)["results"]
    assert all(r["curve"][-1]["accuracy"] > 0.88 for r in results.values())
    assert results["pzobo-code"]["oracle_calls"]["lower_grad"] == 25 * 10 * 2
    assert (tmp_path / "hyper_representation_digits.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out accuracy" in capsys.readouterr().out


def test_hyper_representation_reads_mnist_files(tmp_path):
    mnist_files(tmp_path)
    arguments = ["--data", "mnist", "--data-root", str(tmp_path), "--out", str(tmp_path), "--sizes", "300", "300"]
    results = hyper_representation.main([*arguments, "--steps", "1", "--optimizer", "first-order"])["results"]
    assert results["first-order"]["oracle_calls"]["lower_grad"] == 10


def test_compare_offers_every_method():
    def kind(make):
        return make.func if isinstance(make, partial) else make

    public = {c for c in vars(bo).values() if isinstance(c, type) and issubclass(c, bo.BilevelOptimizer)}
    offered = {kind(make) for make in compare.METHODS.values()} | {getattr(bo, name) for name in compare.ELSEWHERE}
    assert public - {bo.BilevelOptimizer} == offered


def test_compare(tmp_path, capsys):
    arguments = ["--budget", "300", "--out", str(tmp_path)]
    numbers = compare.main(
        [
            *arguments,
            "--problem",
            "quadratic",
            "--methods",
            "aid-cg",
            "first-order",
            "itd",
            "--grid",
            "0.1",
            "0.5",
            "1e9",
        ]
    )
    values = {name: r["value"] for name, r in numbers["results"].items()}
    assert values["aid-cg"] < 0.2 * values["first-order"]
    assert numbers["grid"]["aid-cg"]["1e+09"] == float("inf")
    assert all(
        sum(compare.COST[k] * n for k, n in r["oracle_calls"].items()) >= 300 for r in numbers["results"].values()
    )
    for problem in ("regularisation", "cleaning"):
        numbers = compare.main([*arguments, "--problem", problem, "--methods", "aid-cg", "--grid", "30"])
        curve = numbers["results"]["aid-cg"]["curve"]
        assert curve[-1]["value"] < curve[1]["value"] < curve[0]["value"]
        assert numbers["results"]["aid-cg"]["accuracy"] > 0.7
    assert "outer steps" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:the estimate of the hypergradient is mostly noise")
def test_paths_benchmark_measures():
    figures = paths.measure("chunks", 2, 2, 1, "cpu")  # raises if the paths were looped instead
    assert len(figures) == 2
