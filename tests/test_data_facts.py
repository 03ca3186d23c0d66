"""Oddities of data sets are counted right, on tiny sets in the formats of the public ones."""

import json
import lzma
from pathlib import Path

import numpy as np
import torch

from recipes.benchmarks import data_effects, data_facts
from recipes.few_shot.data import Images
from recipes.problems.libsvm import load_libsvm
from recipes.problems.problem import Part

DOCS = Path(__file__).parents[1] / "docs"


def test_rows_of_libsvm_files(tmp_path):
    rows = ["+1 1:1 3:1", "-1 1:1 3:1", "+1 2:1", "+1 2:1", "-1 "]
    (tmp_path / "a9a").write_text("\n".join(rows) + "\n")
    (tmp_path / "a9a.t").write_text("-1 1:1 3:1\n+1 1:1\n-1 2:1\n")
    facts = data_facts.SETS["a9a"].counted(tmp_path)
    assert (facts["training rows"], facts["test rows"], facts["columns"], facts["rank"]) == (5, 3, 123, 2)
    assert facts["training rows that occurred before"] == 2
    assert facts["training rows with a twin of another label"] == 2
    assert facts["test rows that occur in training"] == 2
    assert facts["training rows without an entry"] == 1
    assert facts["constant columns"] == 120
    assert facts["accuracy on test rows not in training"] == 1.0
    other = data_facts.digest(*(t.numpy() for part in load_libsvm("a9a", tmp_path, False) for t in part))
    assert facts["contents"] == other
    (tmp_path / "a9a").write_text("\n".join(rows[:-1]) + "\n-1 123:1\n")
    assert data_facts.SETS["a9a"].counted(tmp_path)["contents"] != other


def test_rows_are_kept_once():
    part = Part(torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 1]]), torch.tensor([1, 2, 3, 4]))
    assert data_effects.distinct(part).labels.tolist() == [1, 2, 4]


def write_texts(root, part, texts):
    lines = (json.dumps({"group": group, "text": text}) for group, text in texts)
    (root / f"{part}.jsonl.xz").write_bytes(lzma.compress("\n".join(lines).encode()))


def test_texts_of_newsgroups(tmp_path):
    head, signature = "From: a\nSubject: b\n\n", "\n\nthe signature"
    long = "\n\n" + "word " * 70
    write_texts(tmp_path, "train", [
        ("a", f"{head}the middle{signature}"),  # of three paragraphs the middle one stays
        ("b", f"{head}the middle{signature}"),
        ("a", "From: a\nno empty line"),
        ("a", f"{head}> quoted\n> more"),
        ("a", f"{head}short{long}"),
    ])  # fmt: skip
    write_texts(tmp_path, "test", [("b", f"{head}the middle{signature}"), ("b", f"{head}another one{signature}")])
    facts = data_facts.of_newsgroups(tmp_path)
    assert facts["train: texts"] == 5
    assert facts["train: empty without headers, footers and quotes"] == 2
    assert facts["train: without a word of two letters"] == 2
    assert facts["train: identical to an earlier one"] == 2
    assert facts["train: footer rule cuts more than 300 characters"] == 1
    assert facts["texts, not empty, that occur in several groups"] == 1
    assert facts["test: not empty, and in training too"] == 1
    assert facts["test: empty without headers, footers and quotes"] == 0


def pictures(split_classes, seed=0):
    generator = np.random.default_rng(seed)
    pixels = {s: torch.from_numpy(generator.integers(0, 255, (n, 3, 1, 4, 4), np.uint8)) for s, n in split_classes}
    return Images("tiny", pixels, (0.0,), (1.0,))


def test_images_of_two_classes_and_turned_ones():
    images = pictures((("train", 3), ("val", 1), ("test", 2)))
    clean = data_facts.of_classes(images)
    assert not any(clean[key] for key in clean if "occur" in key or "turned" in key or key == "constant pixels")
    images.pixels["test"][0, 1] = images.pixels["train"][2, 0]  # two classes, two splits
    images.pixels["train"][1, 2] = images.pixels["train"][1, 0]  # one class
    images.pixels["train"][0, 0] = images.pixels["val"][0, 0].rot90(1, (-2, -1))
    for pixels in images.pixels.values():
        pixels[..., 3, 3] = 7
        pixels[..., 0, 0] = pixels[..., 0, 3] = pixels[..., 3, 0] = 7
    facts = data_facts.of_classes(images)
    assert (facts["train classes"], facts["val classes"], facts["test classes"]) == (3, 1, 2)
    assert facts["images that occurred before"] == 2
    assert facts["images that occur in two classes"] == facts["images that occur in two splits"] == 1
    assert facts["images equal to a turned image of another class"] == 2  # one of each class
    assert facts["constant pixels"] == 4
    assert data_facts.of_classes(data_effects.without_twins(images))["images that occur in two classes"] == 0


def test_ways_to_resize_ink():
    stroke = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    stroke[..., 3] = 255  # a line one pixel wide
    ink = {name: resize(stroke, 4) for name, resize in data_effects.RESIZED.items()}
    # Antialiasing by two has the weights 1, 3, 3, 1 of 8; the line is the second pixel of its pair.
    assert ink["antialiased"][0, 0, 0].tolist() == [0, 96, 32, 0]
    assert ink["as truth values"][0, 0, 0].tolist() == [0, 255, 255, 0]
    assert ink["nearest neighbour"][0, 0, 0].tolist() in ([0, 255, 0, 0], [0, 0, 0, 0])


def test_the_files_of_fashion_mnist_are_those_of_mnist(tmp_path, monkeypatch):
    """A pixel that is always zero, a twin with another label, and a test image that occurs in training."""
    images = np.random.default_rng(0).integers(1, 255, (60, 2, 2), np.uint8)
    labels = np.arange(60, dtype=np.uint8) % 10
    images[:, 1, 1], images[1] = 0, images[0]
    raw = tmp_path / "fashion" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, pixels, own in (("train", images, labels), ("t10k", images[:3], labels[:3])):
        sizes = b"".join(size.to_bytes(4, "big") for size in pixels.shape)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + pixels.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + own.tobytes())
    monkeypatch.setattr(data_facts, "IMAGES", 60)
    facts = data_facts.SETS["fashion"].counted(data_facts.rooted(tmp_path, "fashion"))
    assert (facts["training rows"], facts["test rows"], facts["columns"]) == (59, 3, 4)
    assert facts["constant columns"] == 1
    assert facts["training rows with a twin of another label"] == 2
    assert facts["test rows that occur in training"] == 3
    assert "rank" not in facts


def test_tables_of_miniimagenet(tmp_path, monkeypatch):
    monkeypatch.setattr(data_facts, "MINI", {"train": 1, "val": 1, "test": 1})
    for i, split in enumerate(("train", "val", "test")):
        rows = [f"n0000000{i}{k:08}.jpg,n0000000{i}" for k in (1, 2, 3 + i)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["filename,label", *rows]) + "\n")
    facts = data_facts.of_tables(tmp_path)
    assert (facts["files"], facts["files that occurred before"], facts["classes without 600 files"]) == (9, 0, 3)
    assert facts["classes whose file numbers have gaps"] == 2


def test_differences_are_paired_by_seed():
    values = {"as it is": [1.0, 2.0, 3.0], "without": [1.5, 2.5, 3.5]}
    assert data_facts.compared(values) == (2.0, "0.5 [0.5, 0.5]", "a change, 3 seeds")
    assert data_facts.compared({"as it is": [1.0, 2.0], "without": [1.0, 2.0]})[1:] == ("0", "no change, 2 seeds")
    assert data_facts.compared({"as it is": [1.0, 2.0], "without": [1.1, 1.8]})[2] == "within the noise, 2 seeds"
    tiny = {"as it is": [1.0, 2.0], "without": [1.0001, 2.0001]}
    assert data_facts.compared(tiny)[2] == "below the digits of a table, 2 seeds"


def test_a_folder_with_a_folder_for_each_set(tmp_path):
    (tmp_path / "libsvm").mkdir()
    assert data_facts.rooted(tmp_path, "a9a") == tmp_path / "libsvm"
    assert data_facts.rooted(tmp_path / "libsvm", "a9a") == tmp_path / "libsvm"
    assert data_facts.rooted(None, "a9a") is None


def test_the_page_is_that_of_the_record():
    numbers = json.loads((DOCS / "records/data_facts.json").read_text())
    assert (DOCS / "data.md").read_text() == data_facts.page(numbers)
    assert numbers["facts"].keys() == data_facts.SETS.keys() - {"fashion"}  # no copy was at hand
    assert numbers["effects"].keys() == data_effects.EFFECTS.keys()
