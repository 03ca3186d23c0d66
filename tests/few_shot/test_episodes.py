"""Episodes, augmentation, backbones and their normalisation."""

import pytest
import torch

from recipes.few_shot.backbones import BACKBONES, Norm, calibrate, cnn4, resnet12
from recipes.few_shot.data import Images
from recipes.few_shot.episodes import Episodes, augmented

from . import problems


def numbered(classes=7, each=9):
    """Images whose first pixel is the number of their class, and second that within the class."""
    pixels = torch.zeros(classes, each, 1, 2, 2, dtype=torch.uint8)
    pixels[:, :, 0, 0, 0] = torch.arange(classes).unsqueeze(1)
    pixels[:, :, 0, 0, 1] = torch.arange(each)
    return Images("numbered", {"train": pixels}, (0.0,), (1 / 255,))


def test_an_episode_has_different_classes_and_images():
    episodes = Episodes(numbered(), "train", way=4, shot=2, query=3)
    tasks = episodes.sample(50, torch.Generator().manual_seed(0))
    support, query = episodes.lower(tasks, None, None), episodes.upper(tasks, None, None)
    assert support.images.shape == (50, 8, 1, 2, 2)
    assert query.images.shape == (50, 12, 1, 2, 2)
    assert support.labels[0].tolist() == [0, 1, 2, 3] * 2
    for s, q, ls, lq in zip(support.images.round(), query.images.round(), support.labels, query.labels, strict=True):
        shown = [(int(i[0, 0, 0]), int(i[0, 0, 1])) for i in (*s, *q)]
        assert len(set(shown)) == 20
        classes = {label: {c for (c, _), k in zip(shown, (*ls, *lq), strict=True) if k == label} for label in range(4)}
        assert all(len(found) == 1 for found in classes.values())
        assert len(set.union(*classes.values())) == 4
    drawn = support.images[:, :4, 0, 0, 0].round().long().flatten()
    assert torch.bincount(drawn, minlength=7).min() > 10


def test_fixed_episodes_are_the_same_each_time():
    episodes = problems.episodes()
    first, second = ([s.images for s, _ in episodes.fixed(5, 1, 2)] for _ in range(2))
    assert [len(part) for part in first] == [2, 2, 1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(next(episodes.fixed(5, 2, 2))[0].images, first[0])


def test_rotated_classes_are_classes():
    episodes = Episodes(numbered(3), "train", way=12, shot=1, query=1, rotations=True)
    tasks = episodes.sample(1, torch.Generator().manual_seed(0))
    support = episodes.lower(tasks, None, None).images[0, :, 0].round().int()
    corners = [(0, 0), (1, 0), (1, 1), (0, 1)]  # where turns by 0, 90, 180, 270 degrees bring the first pixel
    pixels = episodes.pixels[tasks[0, :, 0] % 27, 0].int()
    for image, original, turn in zip(support, pixels, tasks[0, :, 0] // 27, strict=True):
        assert image[corners[turn]] == original[0, 0]
        assert torch.equal(image, original.rot90(int(turn)))
    with pytest.raises(SystemExit, match="too few for 4-way episodes"):
        Episodes(numbered(3), "train", way=4, shot=1, query=1)
    with pytest.raises(SystemExit, match="has 3 train classes of 9 images: too few"):
        Episodes(numbered(3), "train", way=2, shot=5, query=5)


def test_batches_of_some_rows():
    episodes = problems.episodes()
    tasks = episodes.sample(3, torch.Generator().manual_seed(0))
    some = episodes.lower(tasks, 40, torch.Generator().manual_seed(1))
    whole = episodes.lower(tasks, None, None)
    assert some.images.shape[:2] == some.labels.shape == (3, 40)
    for images, labels, all_images, all_labels in zip(*some[:2], *whole[:2], strict=True):
        which = [int((all_images == image).flatten(1).all(1).nonzero()) for image in images]
        assert all_labels[which].tolist() == labels.tolist()
        assert len(set(which)) == 6


def test_support_comes_along_where_it_is_asked_for():
    episodes = problems.episodes(beside=True)
    tasks = episodes.sample(2, None)
    assert torch.equal(episodes.upper(tasks, None, None).known, episodes.lower(tasks, None, None).images)
    assert problems.episodes().upper(tasks, None, None).known is None


def test_augmentation_shifts_and_flips():
    picture = torch.rand(1, 3, 16, 16).expand(60, 3, 16, 16)
    found = augmented(picture, torch.Generator().manual_seed(0), jitter=0.0)
    padded = torch.nn.functional.pad(picture[0], [2] * 4)
    crops = {(r, c, f): (padded[:, r : r + 16, c : c + 16].flip(-1) if f else padded[:, r : r + 16, c : c + 16])
             for r in range(5) for c in range(5) for f in (False, True)}  # fmt: skip
    seen = [next(k for k, crop in crops.items() if torch.allclose(crop, image)) for image in found]
    assert {r for r, _, _ in seen} == {c for _, c, _ in seen} == set(range(5))
    assert {f for *_, f in seen} == {False, True}


def test_augmentation_changes_colours_within_bounds():
    grey, colour = torch.full((200, 3, 8, 8), 0.5), torch.rand(200, 3, 8, 8)
    found = augmented(grey, torch.Generator().manual_seed(0))[:, :, 4, 4]
    assert torch.allclose(found, found[:, :1].expand_as(found))
    bright = found.mean(1)
    assert bright.min() >= 0.5 * 0.6 * 0.6
    assert bright.max() <= 0.5 * 1.4 * 1.4
    assert bright.std() > 0.05
    changed = augmented(colour, torch.Generator().manual_seed(0))
    assert changed.min() >= 0
    assert changed.max() <= 1
    assert torch.equal(changed, augmented(colour, torch.Generator().manual_seed(0)))
    assert augmented(torch.rand(2, 1, 8, 8)).shape == (2, 1, 8, 8)


def test_augmented_training_episodes_differ_and_others_do_not():
    episodes = problems.episodes(augment=True)
    tasks, generator = episodes.sample(2, None), torch.Generator().manual_seed(0)
    first, second = (episodes.lower(tasks, None, generator).images for _ in range(2))
    assert not torch.allclose(first, second)


# ------------------------------------------------------------------------------------------------ backbones


def test_sizes_of_the_backbones():
    network, small = resnet12(3, 32), cnn4(3, 84)
    assert sum(p.numel() for p in network.parameters()) == 12_424_320
    assert sum(p.numel() for p in small.parameters()) == 28_896
    assert (network.width, small.width, cnn4(1, 28).width) == (640, 800, 32)
    wide = BACKBONES["cnn4-64"](1, 28)
    assert (wide.width, sum(p.numel() for p in wide.parameters())) == (64, 111_936)
    assert resnet12(1, 20, width=4)(torch.randn(2, 1, 20, 20)).shape == (2, 40)


def test_norm_is_batch_norm():
    norm, images = Norm(3, "batch"), torch.randn(5, 3, 4, 4)
    torch.nn.init.normal_(norm.weight)
    expected = torch.nn.functional.batch_norm(images, None, None, norm.weight, norm.bias, training=True)
    assert torch.equal(norm(images), expected)
    assert torch.equal(norm.eval()(images), expected)
    norm.first = 5
    assert torch.allclose(norm(images), expected)


@pytest.mark.parametrize("statistics", ["batch", "support", "running"])
def test_images_that_a_query_image_sees(statistics):
    """Other query images with ``batch`` only; the support with ``support`` only."""
    body = problems.body(statistics)
    calibrate(body, [torch.randn(4, 1, 6, 6)])
    body.eval()
    known, query = torch.randn(4, 1, 6, 6), torch.randn(3, 1, 6, 6)
    beside = {"known": known} if statistics == "support" else {}
    whole = body(query, **beside)
    alone = body(query[:1], **beside)
    assert torch.allclose(whole[:1], alone) == (statistics != "batch")
    if beside:
        assert not torch.allclose(body(query, known=known + torch.randn(4, 1, 6, 6)), whole)
        assert torch.allclose(body(query, known=known.flip(0)), whole)


def test_calibration_takes_the_statistics_of_all_images():
    body = problems.body("running")
    batches = [torch.randn(6, 1, 6, 6) for _ in range(3)]
    calibrate(body, batches)
    (norm,) = body.norms
    activations = torch.cat([body.layers[1](body.layers[0](batch)) for batch in batches])
    assert torch.allclose(norm.mean, activations.mean((0, 2, 3)))
    assert torch.allclose(norm.variance, activations.var((0, 2, 3), correction=0))
    assert body.training
    assert norm.seen is None
