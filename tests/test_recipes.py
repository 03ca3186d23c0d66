"""The recipes run, on bundled data and on files in the format of the public downloads."""

import json
import struct
import warnings
from functools import partial

import numpy as np
import pytest
import torch

import bilevel_optim as bo
from recipes import compare, hyper_cleaning, hyper_representation
from recipes.benchmarks import paths
from recipes.report import table


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "mnist"], "needs --data-root"),
        (["--data", "mnist", "--data-root", "/nonexistent"], "--download"),
    ],
)
def test_missing_data_says_what_to_do(arguments, message):
    with pytest.raises(SystemExit, match=message):
        hyper_cleaning.main(arguments)


@pytest.mark.parametrize("arguments", [["--corruption", "1.5"], ["--steps", "0"], ["--optimizer", "newton"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        hyper_cleaning.main(arguments)
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
    seconds, peak = paths.measure("chunks", 2, 2, 1, "cpu")
    assert seconds > 0
    assert peak >= 0
