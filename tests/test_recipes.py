"""The recipes run, on bundled data and on files in the format of the public downloads."""

import json
import struct

import numpy as np
import pytest
import torch

from recipes import hyper_cleaning
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
