"""Loaders on generated images in the formats of the public downloads, whole, damaged and incomplete."""

import csv
import gzip
import pickle

import numpy as np
import pytest
import torch

from recipes.few_shot.data import images as cache_module
from recipes.few_shot.data import load, sets
from recipes.few_shot.data.classes import cifar_splits
from recipes.few_shot.data.images import cached, decoded, fingerprint

SPLITS = ("train", "val", "test")
COUNTS = {"train": 4, "val": 2, "test": 3}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """The data sets with a few classes of three images."""
    monkeypatch.setattr(sets, "PER_CLASS", 3)
    monkeypatch.setattr(sets, "MINI", COUNTS)
    monkeypatch.setattr(sets, "CHARACTERS", COUNTS)
    monkeypatch.setattr(sets, "DRAWERS", 2)
    monkeypatch.setattr(sets, "PACKED", 2)


def write_image(path, value, mode="RGB", size=20):
    """An image of one grey value."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size) + (3,) * (mode == "RGB"), value, np.uint8)).save(path)


def write_tables(root, suffix=".csv", names=lambda label, i: f"{label}{i:08}.jpg"):
    number = 0
    for split in SPLITS:
        lines = ["filename,label"]
        for _ in range(COUNTS[split]):
            lines += [f"{names(f'n{number:08}', i)},n{number:08}" for i in range(3)]
            number += 1
        text = "\n".join(lines).encode()
        (root / f"{split}{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)


@pytest.fixture
def mini(tmp_path):
    """Class folders of JPEG files with split tables; the images of class c have the value 20 c."""
    root = tmp_path / "mini"
    for c in range(sum(COUNTS.values())):
        for i in range(3):
            write_image(root / "images" / f"n{c:08}" / f"n{c:08}{i:08}.jpg", 20 * c)
    write_tables(root)
    return root


def values(images):
    """The grey value of each class of each split."""
    return {split: pixels.float().mean((1, 2, 3, 4)).round().int().tolist() for split, pixels in images.pixels.items()}


EXPECTED = {"train": [0, 20, 40, 60], "val": [80, 100], "test": [120, 140, 160]}


def test_mini_imagenet_of_class_folders(mini, tmp_path):
    images = load("miniimagenet", mini, tmp_path / "cache", size=12)
    assert {s: tuple(p.shape) for s, p in images.pixels.items()} == {s: (n, 3, 3, 12, 12) for s, n in COUNTS.items()}
    assert all(p.dtype == torch.uint8 for p in images.pixels.values())
    assert values(images) == EXPECTED


def test_mini_imagenet_of_one_folder_with_packed_tables_elsewhere(mini, tmp_path):
    flat, tables = tmp_path / "flat", tmp_path / "tables"
    flat.mkdir()
    tables.mkdir()
    for path in mini.rglob("*.jpg"):
        path.rename(flat / path.name)
    write_tables(tables, ".csv.gz")
    assert values(load("miniimagenet", flat, tmp_path / "cache", size=8, tables=tables)) == EXPECTED


def test_mini_imagenet_of_folders_with_names_of_their_own(mini, tmp_path):
    for i, path in enumerate(sorted(mini.rglob("*.jpg"))):
        path.rename(path.with_name(f"image_{i}.JPEG"))
    assert values(load("miniimagenet", mini, tmp_path / "cache", size=8)) == EXPECTED


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda root: [p.unlink() for p in root.rglob("n00000002*.jpg")], r"1 classes of miniImageNet .*n00000002"),
        (lambda root: next(root.rglob("n0000000500000001.jpg")).unlink(), "n00000005 has 2.* fetch or unpack"),
        (lambda root: next(root.rglob("n0000000500000001.jpg")).write_bytes(b"\xff\xd8\xff no"), "1.jpg is damaged"),
        (lambda root: (root / "val.csv").unlink(), r"no split table val\.csv under .*mini-imagenet-tools"),
        (lambda root: (root / "val.csv").write_text("filename,label\na.jpg,n1\n"), "has 1 classes, but val has 2"),
        (lambda root: (root / "val.csv").write_text("file;class\na;b\n"), "not a split table"),
        (lambda root: (root / "val.csv").write_bytes((root / "train.csv").read_bytes()), "has 4 classes, but val"),
        (lambda root: [p.unlink() for p in root.rglob("*.jpg")], "expected class folders .* or the pickle files"),
    ],
)
def test_errors_name_the_fault_of_mini_imagenet(mini, tmp_path, harm, message):
    harm(mini)
    with pytest.raises(SystemExit, match=message):
        load("miniimagenet", mini, tmp_path / "cache", size=8)


def test_classes_of_two_splits_are_refused(mini, tmp_path):
    lines = (mini / "test.csv").read_text().splitlines()
    (mini / "val.csv").write_text("\n".join([*lines[:7]]))
    with pytest.raises(SystemExit, match="share 2 classes"):
        load("miniimagenet", mini, tmp_path / "cache", size=8)


def write_pickles(root, form, name="mini-imagenet-cache-{}.pkl", size=10):
    root.mkdir(exist_ok=True)
    first = 0
    for split in SPLITS:
        labels = np.repeat(np.arange(COUNTS[split]), 3)
        order = np.random.default_rng(0).permutation(len(labels))  # the images of a class need not follow each other
        pixels = np.broadcast_to((20 * (first + labels[order]))[:, None, None, None], (len(labels), size, size, 3))
        pixels = pixels.astype(np.uint8)
        if form == "class_dict":
            groups = {f"n{first + c:08}": np.flatnonzero(labels[order] == c).tolist() for c in range(COUNTS[split])}
            content = {"image_data": pixels, "class_dict": groups}
        else:
            content = {"data": pixels, "labels": labels[order].tolist()}
        (root / name.format(split)).write_bytes(pickle.dumps(content, protocol=2))
        first += COUNTS[split]


@pytest.mark.parametrize("form", ["class_dict", pytest.param("labels", marks=pytest.mark.slow)])
def test_pickles_are_read(tmp_path, form):
    write_pickles(tmp_path / "p", form)
    images = load("miniimagenet", tmp_path / "p", tmp_path / "cache", size=10)
    assert values(images) == EXPECTED
    assert images.pixels["test"].shape == (3, 3, 3, 10, 10)
    write_pickles(tmp_path / "c", form, "CIFAR_FS_{}.pickle")
    assert values(load("cifar_fs", tmp_path / "c", tmp_path / "cache", size=8)) == EXPECTED  # resized


def test_pickles_of_old_numpy_under_python_2_are_read(tmp_path):
    """Pickles like those of CIFAR-100 and CIFAR-FS: text keys, numpy.core, protocol 2 or less."""
    write_pickles(tmp_path / "p", "labels")
    for path in (tmp_path / "p").iterdir():
        old = pickle.dumps(pickle.loads(path.read_bytes()), protocol=0)
        path.write_bytes(old.replace(b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"))
        assert b"_core" not in path.read_bytes()
    assert values(load("miniimagenet", tmp_path / "p", tmp_path / "cache", size=10)) == EXPECTED


class Harm:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "damaged, or no pickle"),
        (lambda path: path.write_bytes(b"not one"), "damaged, or no pickle"),
        (lambda path: path.write_bytes(pickle.dumps({"data": Harm()})), r"wants to call builtins\.print"),
        (lambda path: path.write_bytes(pickle.dumps({"data": np.zeros((2, 3))})), "must hold image_data"),
        (lambda path: path.unlink(), r"mini-imagenet-cache-val\.pkl missing"),
        (
            lambda path: path.write_bytes(
                pickle.dumps({"data": np.zeros((6, 8, 8, 3), np.uint8), "labels": [0, 0, 0, 0, 1, 1]})
            ),
            "class 0 has 4, class 1 has 2",
        ),
        (
            lambda path: path.write_bytes(pickle.dumps({"data": np.zeros((3, 8, 8, 3), np.uint8), "labels": [0] * 3})),
            "has 1 classes, but val has 2",
        ),
    ],
)
def test_errors_name_the_fault_of_a_pickle(tmp_path, harm, message, capsys):
    write_pickles(tmp_path / "p", "labels")
    harm(tmp_path / "p" / "mini-imagenet-cache-val.pkl")
    with pytest.raises(SystemExit, match=message):
        load("miniimagenet", tmp_path / "p", tmp_path / "cache", size=10)
    assert "run" not in capsys.readouterr().out


@pytest.fixture
def full_cifar(monkeypatch):
    monkeypatch.setattr(sets, "MINI", {"train": 64, "val": 16, "test": 20})


def write_cifar(root):
    """CIFAR-100 as torchvision unpacks it: two training images and one test image of each class c, of the value 2 c."""
    names = sorted(c for some in cifar_splits("fc100").values() for c in some)
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}, protocol=2))
    for part, count in (("train", 2), ("test", 1)):
        labels = np.tile(np.arange(100), count)
        data = np.broadcast_to((2 * labels)[:, None], (len(labels), 3072)).astype(np.uint8)
        (folder / part).write_bytes(pickle.dumps({"data": data, "fine_labels": labels.tolist()}, protocol=2))
    return names


@pytest.mark.usefixtures("full_cifar")
@pytest.mark.parametrize("name", ["cifar_fs", "fc100"])
def test_cifar_of_torchvision(tmp_path, name):
    names = write_cifar(tmp_path)
    images = load(name, tmp_path, tmp_path / "cache")
    splits = cifar_splits(name)
    assert {s: tuple(p.shape[1:]) for s, p in images.pixels.items()} == dict.fromkeys(SPLITS, (3, 3, 32, 32))
    assert values(images) == {s: [2 * names.index(c) for c in some] for s, some in splits.items()}
    assert {s: len(some) for s, some in splits.items()} == (
        {"train": 64, "val": 16, "test": 20} if name == "cifar_fs" else {"train": 60, "val": 20, "test": 20}
    )
    (tmp_path / "cifar-100-python" / "test").unlink()
    with pytest.raises(SystemExit, match=r"test is missing: delete .*--download"):
        load(name, tmp_path, tmp_path / "other")


@pytest.mark.usefixtures("full_cifar")
def test_cifar_fs_of_class_folders(tmp_path):
    names = sorted(c for some in cifar_splits("fc100").values() for c in some)
    for k, name in enumerate(names):
        for i in range(3):
            write_image(tmp_path / "data" / name / f"{i}.png", k, size=4)
    images = load("cifar_fs", tmp_path, tmp_path / "cache", size=4)
    assert values(images)["val"] == [names.index(c) for c in cifar_splits("cifar_fs")["val"]]
    for path in (tmp_path / "data" / "worm").glob("*"):
        path.unlink()
    with pytest.raises(SystemExit, match=r"1 classes of CIFAR_FS are missing .*\(worm\)"):
        load("cifar_fs", tmp_path, tmp_path / "cache", size=4)
    with pytest.raises(SystemExit, match=r"no CIFAR-100 under .* --download"):
        load("fc100", tmp_path / "nothing", tmp_path / "cache")


@pytest.mark.usefixtures("full_cifar")
def test_packed_cifar(tmp_path):
    import lzma

    names = sorted(c for some in cifar_splits("fc100").values() for c in some)
    pixels = np.random.default_rng(0).integers(0, 256, (100, 2, 3, 32, 32), dtype=np.uint8)
    packed = pixels.copy()
    packed[:, :, 0] -= pixels[:, :, 1]
    packed[:, :, 2] -= pixels[:, :, 1]
    for axis in (-2, -1):
        packed = np.diff(packed, axis=axis, prepend=np.uint8(0))
    (tmp_path / "images.u8.xz").write_bytes(lzma.compress(packed.tobytes(), preset=0))
    with (tmp_path / "classes.csv").open("w") as file:
        csv.writer(file).writerows([["index", "class"], *((i, name) for i, name in enumerate(names))])
    images = load("fc100", tmp_path, tmp_path / "cache")
    assert "instead of 600" in images.note
    for split, some in cifar_splits("fc100").items():
        assert np.array_equal(images.pixels[split], pixels[[names.index(c) for c in some]])
    (tmp_path / "images.u8.xz").write_bytes(b"\xfd7zXZ\x00 damaged")
    with pytest.raises(SystemExit, match="damaged"):
        load("fc100", tmp_path, tmp_path / "cache")


def test_omniglot_of_torchvision(tmp_path):
    for part, count in (("background", 5), ("evaluation", 4)):
        for i in range(count):
            for drawer in range(2):
                folder = tmp_path / "omniglot-py" / f"images_{part}" / f"alphabet{i % 2}" / f"character{i:02}"
                write_image(folder / f"{drawer}.png", 255 - (10 * i + (part == "evaluation")), "L", 12)
    images = load("omniglot", tmp_path, tmp_path / "cache", size=12)
    assert {s: tuple(p.shape) for s, p in images.pixels.items()} == {s: (n, 2, 1, 12, 12) for s, n in COUNTS.items()}
    assert sorted(v for some in values(images).values() for v in some) == [0, 1, 10, 11, 20, 21, 30, 31, 40]
    next(tmp_path.rglob("1.png")).unlink()
    with pytest.raises(SystemExit, match=r"must have 2 images, but .* has 1"):
        load("omniglot", tmp_path, tmp_path / "cache", size=12)
    with pytest.raises(SystemExit, match=r"no Omniglot under .*--download"):
        load("omniglot", tmp_path / "nothing", tmp_path / "cache")


def test_both_forms_of_omniglot_number_the_characters_alike(tmp_path):
    """Alphabets in the order of their names are not the characters in the order of the file numbers."""
    packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
    packed.mkdir()
    for part, first, count in (("background", 0, 5), ("evaluation", 5, 4)):
        paper = np.arange(first, first + count) % 2 == 0
        np.savez(packed / f"images_{part}.npz", images=np.tile(paper[:, None, None, None], (2, 12, 12)))
        for i, white in enumerate(paper):
            alphabet = "Zulu" if i < 2 else "Arcadian"
            folder = unpacked / "omniglot-py" / f"images_{part}" / alphabet / f"character{i:02}"
            for drawer in range(2):
                write_image(folder / f"{first + i + 1:04}_{drawer + 1:02}.png", 255 * int(white), "L", 12)
    first, second = (load("omniglot", root, tmp_path / "cache", size=12) for root in (packed, unpacked))
    assert values(first) == values(second)
    assert len({v for some in values(first).values() for v in some}) == 2


def test_packed_omniglot(tmp_path):
    first, second = np.ones((5, 2, 12, 12), bool), np.ones((4, 2, 12, 12), bool)
    for i in range(9):
        (first if i < 5 else second)[i % 5, :, :, : i + 1] = False  # i + 1 of 12 columns are ink
    np.savez(tmp_path / "images_background.npz", images=first)
    np.savez(tmp_path / "images_evaluation.npz", images=second)
    images = load("omniglot", tmp_path, tmp_path / "cache", size=12)
    found = sorted(v for some in values(images).values() for v in some)
    assert found == [round(255 * (i + 1) / 12) for i in range(9)]
    small = load("omniglot", tmp_path, tmp_path / "cache", size=6)
    assert small.pixels["train"].shape == (4, 2, 1, 6, 6)
    (tmp_path / "images_evaluation.npz").write_bytes(b"PK no zip")
    with pytest.raises(SystemExit, match=r"images_evaluation\.npz is damaged"):
        load("omniglot", tmp_path, tmp_path / "cache", size=12)


def test_digits_need_nothing(tmp_path):
    images = load("digits", None, tmp_path)
    assert {s: tuple(p.shape) for s, p in images.pixels.items()} == {
        "train": (28, 174, 1, 16, 16), "val": (8, 174, 1, 16, 16), "test": (16, 174, 1, 16, 16)
    }  # fmt: skip
    seven = images.pixels["test"][8:]
    assert torch.equal(seven[1], seven[0].rot90(1, (-2, -1)))
    assert torch.equal(seven[4], seven[0].flip(-1))
    with pytest.raises(SystemExit, match="needs --data-root"):
        load("omniglot", None, tmp_path)


# ------------------------------------------------------------------------------------------------ the cache


def rows(count=3, stop=None, calls=None):
    def give():
        if calls is not None:
            calls.append(1)
        for i in range(count):
            if i == stop:
                raise KeyboardInterrupt
            yield np.full((2, 2), i, np.uint8)

    return give


def test_the_cache_is_made_once_and_mapped(tmp_path):
    calls = []
    first = cached(tmp_path, "set-a", (3, 2, 2), rows(calls=calls))
    second = cached(tmp_path, "set-a", (3, 2, 2), rows(calls=calls))
    assert len(calls) == 1
    assert first[:, 0, 0].tolist() == [0, 1, 2]
    second.fill_(9)  # a copy of the pages in memory: the file stays
    assert torch.equal(cached(tmp_path, "set-a", (3, 2, 2), rows(calls=calls)), first)


def test_an_interrupted_cache_is_rebuilt(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "set-a", (3, 2, 2), rows(stop=2))
    assert list(tmp_path.iterdir()) == []
    assert cached(tmp_path, "set-a", (3, 2, 2), rows())[:, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("harm", [lambda d: d[: len(d) // 2], lambda d: d[:-1], lambda d: b"", lambda d: b"no array"])
def test_a_damaged_cache_is_rebuilt(tmp_path, harm):
    cached(tmp_path, "set-a", (3, 2, 2), rows())
    (path,) = tmp_path.iterdir()
    path.write_bytes(harm(path.read_bytes()))
    assert cached(tmp_path, "set-a", (3, 2, 2), rows())[:, 0, 0].tolist() == [0, 1, 2]


def test_too_few_rows_are_no_cache(tmp_path):
    with pytest.raises(SystemExit, match="2 classes were read, 3 are expected"):
        cached(tmp_path, "set-a", (3, 2, 2), rows(2))
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="give a folder with --cache"):
        cached(tmp_path / "file", "set-a", (3, 2, 2), rows())


def test_the_cache_follows_its_source(mini, tmp_path, monkeypatch):
    load("miniimagenet", mini, tmp_path / "cache", size=8)
    read = []
    monkeypatch.setattr(sets, "decoded", lambda *some: read.append(1) or decoded(*some))
    load("miniimagenet", mini, tmp_path / "cache", size=8)
    assert not read
    path = next(mini.rglob("n0000000000000000.jpg"))
    before = fingerprint([path])
    write_image(path, 200)
    assert fingerprint([path]) != before
    assert values(load("miniimagenet", mini, tmp_path / "cache", size=8))["train"][0] > 50
    assert read


def test_the_default_cache_is_that_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_module.default_cache() == tmp_path / "bilevel_optim"
