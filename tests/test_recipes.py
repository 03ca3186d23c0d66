"""The recipes run, on bundled data and on files in the format of the public downloads."""

import json
import struct

import numpy as np
import pytest
import torch

from recipes import hyper_cleaning, meta_classification, newsvendor, task_data
from recipes.benchmarks import contextual
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


def test_hyper_cleaning_reads_mnist_files(tmp_path, monkeypatch):
    """torchvision's layout, with few random images."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 120), ("t10k", 40)):
        images, labels = (
            rng.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            rng.integers(0, 10, count, dtype=np.uint8),
        )
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
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
