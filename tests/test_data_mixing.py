"""Data mixing: right gradients of the shares, shares that match a known answer, the same on several ranks."""

import json
import lzma
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import bilevel_optim as bo
from recipes.common.ledger import Ledger
from recipes.data_mixing import __main__ as program
from recipes.data_mixing import cost, learning, texts, training
from recipes.data_mixing.network import SIZES, Ranks, Transformer

from .ranks.processes import together

ALONE = Ranks()
SMALL = {"scale": "small", "length": 6, "batch": 12, "parallel": "ddp", "lower_lr": 3e-2, "lower_steps": 3, "lr": 0.2}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Single precision, a size that takes no time, and little text."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setitem(
        SIZES, "small", {"width": 8, "layers": 1, "heads": 2, "length": 6, "batch": 12, "lower_lr": 3e-2}
    )
    monkeypatch.setattr(texts, "LIMIT", 20_000)


def arguments(**options):
    return SimpleNamespace(**{**SMALL, **options})


def cycles(period, n=600):
    """The first characters again and again."""
    return torch.arange(n) % period


def noise(n=600):
    return torch.randint(5, (n,), generator=torch.Generator().manual_seed(0))


def test_texts_are_what_they_are_called():
    found = texts.python()
    text = {name: "".join((texts.CHARACTERS + "?")[i] for i in t) for name, t in found.sources.items()}
    assert [*text] == ["docstrings", "code", "headers", "noise"]
    assert all(0 < len(t) <= 20_000 for t in text.values())
    assert "def " in text["code"]
    assert text["code"].count('"""') < 0.2 * text["code"].count("def ")  # of strings that are no docstrings
    assert "#include" in text["headers"]
    words = set(text["docstrings"].split())
    assert sum(word in words for word in text["noise"].split()) > 0.3 * len(text["noise"].split())
    whole = "".join(texts.topics.values())
    assert sum(map(len, found.target.values())) == pytest.approx(len(whole), rel=0.01)
    assert min(map(len, found.target.values())) > 100_000
    starts = {tuple(t[:200].tolist()) for t in found.target.values()}
    assert len(starts) == 3


def test_newsgroups_by_their_first_names(tmp_path):
    groups = ["comp.graphics", "talk.politics.misc", "soc.religion.christian", "comp.windows.x"]
    for part in ("train", "test"):
        lines = [json.dumps({"group": g, "text": f"Subject: s\n\n{part} {g} " + "word " * 20}) for g in groups * 4]
        with lzma.open(tmp_path / f"{part}.jsonl.xz", "wt") as file:
            file.write("\n".join(lines) + "\n")
    found = texts.newsgroups(tmp_path, False)
    assert [*found.sources] == ["comp", "talk"]
    assert len(found.sources["comp"]) == pytest.approx(2 * len(found.sources["talk"]), rel=0.2)
    assert set(found.target) == {"train", "validation", "test"}
    assert set(found.pair) <= set(found.sources)


def test_a_batch_has_the_shares():
    pieces, generator = [torch.full((50,), i) for i in range(3)], torch.Generator().manual_seed(0)
    weights = torch.tensor([0.07, 0.33, 0.6])
    found = torch.stack(
        [training.mixed(pieces, weights.tolist(), 10, 4, generator)[:, 0].bincount(minlength=3) for _ in range(400)]
    ).double()
    assert (found.sum(1) == 10).all()
    assert ((found - 10 * weights).abs() < 1 + 1e-6).all()
    torch.testing.assert_close(found.mean(0), 10 * weights.double(), rtol=0.0, atol=0.08)


def test_the_network_looks_back_only():
    torch.manual_seed(0)
    model = Transformer(8, 2, 2, 10)
    given = torch.randint(90, (2, 10))
    other = given.clone()
    other[:, 6] += 1
    changed = (model.scores(given) - model.scores(other)).abs().amax((0, 2))
    assert (changed[:6] == 0).all()
    assert (changed[6:] > 1e-6).all()
    per_window = model(torch.cat([given, given[:, :1]], 1))
    expected = torch.nn.functional.cross_entropy(model.scores(given[:1])[0], torch.cat([given[0, 1:], given[0, :1]]))
    torch.testing.assert_close(per_window[0], expected)


@pytest.mark.parametrize("name", [name for name in SIZES if name != "tiny"])
def test_sizes_are_what_they_are_called(name):
    size = SIZES[name]
    with torch.device("meta"):
        model = Transformer(size["width"], size["layers"], size["heads"], size["length"])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(float(name[:-1]) * 1e6, rel=0.1)


# The recipe's methods, with so many steps that nothing but their formula is left to be wrong.
EXACT = {
    "aid": (partial(learning.METHODS["aid"].make, damping=0.0, linear_steps=40, linear_lr=0.03, lower_steps=1), 1e-4),
    "f2sa": (partial(learning.METHODS["f2sa"].make, nu=1e-3, lower_steps=40), 1e-2),
    "soba": (partial(learning.METHODS["soba"].make, linear_lr=0.03), 1e-3),
}


@pytest.mark.slow
def test_gradients_of_the_shares_are_right():
    """A tiny instance at the solution of its lower problem, made strongly convex by what holds it to its start."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Transformer(4, 1, 1, 6, vocabulary=5)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)
    start = [p.detach().clone() for p in model.parameters()]
    x, up, low = learning.problem({"a": cycles(3), "b": noise()}, cycles(4), model, arguments(), 0, ALONE)
    with torch.no_grad():
        x.copy_(torch.tensor([0.3, -0.2]))
    upper_batch, data = next(iter(up.data)), next(iter(low.data))

    def lower():
        pairs = zip(model.parameters(), start, strict=True)
        return low.loss(data) + 5 * sum((p - q).square().sum() for p, q in pairs)

    def closure():
        descent.zero_grad()
        loss = lower()
        loss.backward()
        return loss

    descent = torch.optim.LBFGS(model.parameters(), max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe")
    descent.step(closure)
    for name, (make, rtol) in EXACT.items():
        x.grad = None
        optimizer = make([x], model.parameters(), lr=0.0, lower_lr=0.03)
        for _ in range(40 if name == "soba" else 0):  # one step of its linear system each
            optimizer.backward(lambda: up.loss(upper_batch), lower)
        report = bo.check_hypergradient(optimizer, lambda: up.loss(upper_batch), lower, rtol=rtol)
        assert report.reference == "dense"
        assert report.norm > 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["f2sa", "aid", "soba"])
@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")  # the linear system of a model that is new
def test_the_useful_source_is_found(name):
    found = learning.learned(
        name, {"alike": cycles(4), "noise": noise()}, cycles(4), arguments(steps=30, warmup=10), 0, ALONE
    )
    assert found["weights"]["alike"] > 0.6
    assert found["curve"][-1]["alike"] > 0.75
    assert sum(found["weights"].values()) == pytest.approx(1)
    assert found["curve"][0]["alike"] == 0.5  # the shares rest at first


def test_without_the_indirect_term_nothing_is_learned():
    found = learning.learned(
        "first-order", {"a": cycles(4), "b": noise()}, cycles(4), arguments(steps=4, warmup=0), 0, ALONE
    )
    assert found["weights"] == {"a": 0.5, "b": 0.5}


def test_doremi_prefers_text_that_is_still_to_be_learned():
    # Noise cannot be learned better than the reference does; a long period is learned late.
    found = learning.doremi({"noise": noise(), "long": cycles(50, 2000)}, arguments(steps=30), 0, ALONE)
    assert found["weights"]["long"] > found["weights"]["noise"]
    assert sum(found["weights"].values()) == pytest.approx(1)


def test_the_valley_and_the_regret():
    grid = {s: [(s - centre) ** 2 + centre for centre in (0.3, 0.4)] for s in (0.0, 0.2, 0.7, 1.0)}
    assert training.valleys(grid) == pytest.approx([0.3, 0.4])
    assert training.valleys({s: grid[s] for s in (0.2, 0.7)}) == [0.2, 0.2]
    found = training.excess([1.0, 2.0], [0.5, 1.6])
    assert found.mean == pytest.approx(0.45)
    assert (found.high - found.low) / 2 == pytest.approx(12.7062047 * 0.05)


RUN = "--scale small --steps 4 --warmup 1 --lower-steps 2 --lr 0.5 --train-steps 5 --seeds 2 --grid 0.2 0.8 --judged 12"


def test_the_program(tmp_path, capsys):
    given = [*RUN.split(), "--optimizer", "f2sa", "first-order", "--out", str(tmp_path)]
    numbers = program.main(given)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "Two sources, headers and code" in printed.out
    stem = tmp_path / "data_mixing_python_small"
    assert json.loads(stem.with_suffix(".json").read_text()) == json.loads(json.dumps(numbers))
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    mixtures = numbers["mixtures"]
    assert mixtures.keys() == {"f2sa", "first-order", "doremi", "uniform", "target only"}
    assert mixtures["first-order"]["losses"] == mixtures["uniform"]["losses"]
    assert mixtures["first-order"]["losses"] != mixtures["f2sa"]["losses"]
    characters = {r["curve"][-1]["characters"] for r in mixtures.values()}
    assert characters == {5 * 12 * 6}
    pair = numbers["two sources"]
    learnt = pair["learned"]["f2sa"]
    shares = [w["headers"] for w in learnt["weights of seeds"]]
    assert shares[0] != shares[1]  # each seed learns shares, and a model is trained on them
    assert learnt["distance"].mean == pytest.approx(sum(shares) / 2 - pair["optimum"].mean)
    best = pair["grid"][f"{pair['best of grid']:g}"]["losses"]
    assert learnt["regret"].mean == pytest.approx((sum(learnt["losses"]) - sum(best)) / 2)
    assert numbers["minutes of the processor"] > 0
    # Nothing is run again that is in the records.
    again = program.main([*given, "--resume"])
    assert again["runs made"] == 0 < numbers["runs made"]
    assert again["minutes of the processor"] == numbers["minutes of the processor"]
    assert again["mixtures"]["f2sa"]["losses"] == mixtures["f2sa"]["losses"]


def written(root):
    """Two sources, and a target that is like one of them."""
    lines = {"wanted": "the cat sat on the mat. ", "like": "the mat on the cat sat. ", "other": "0123456789 "}
    for name, line in lines.items():
        (root / name / "more").mkdir(parents=True)
        for i in range(4):
            (root / name / ("more" if i % 2 else "") / f"{i}.txt").write_text(line * 200, encoding="utf-8")
        (root / name / ".hidden").write_text("none")


def test_a_folder_of_your_own(tmp_path):
    written(tmp_path / "books")
    given = [*RUN.split(), "--text", str(tmp_path / "books"), "--target", "wanted", "--optimizer", "f2sa"]
    given += ["--steps", "20", "--lr", "0.2", "--seeds", "1", "--out", str(tmp_path), "--batch", "12"]
    numbers = program.main(given)
    assert numbers["sources"] == ["like", "other"]
    found = numbers["mixtures"]["f2sa"]["weights"]
    assert found["like"].mean > 0.55
    assert (tmp_path / "data_mixing_books_small.png").exists()
    assert program.main([*given, "--resume"])["runs made"] == 0
    with (tmp_path / "books" / "like" / "0.txt").open("a") as file:
        file.write("something else")
    assert program.main([*given, "--resume"])["runs made"] > 0


def test_a_folder_that_lacks_something(tmp_path):
    for given, message in ((tmp_path / "none", "is no folder"), (tmp_path, "found no source")):
        with pytest.raises(SystemExit, match=message):
            texts.folders(given, "wanted")
    written(tmp_path)
    with pytest.raises(SystemExit, match=r"one named goal .* 0 of the target"):
        texts.folders(tmp_path, "goal")
    assert [*texts.folders(tmp_path, "wanted").target] == ["train", "validation", "test"]
    for path in (tmp_path / "other").rglob("*.txt"):
        path.write_text("short")
    with pytest.raises(SystemExit, match="too short: other"):
        texts.folders(tmp_path, "wanted")


def test_a_target_in_one_file_is_cut_at_empty_lines(tmp_path):
    written(tmp_path)
    for path in (tmp_path / "wanted").rglob("*.txt"):
        path.unlink()
    (tmp_path / "wanted" / "all.txt").write_text("\n\n".join(f"Part {i}. " + "words " * 500 for i in range(8)))
    found = texts.folders(tmp_path, "wanted").target
    assert len(found["train"]) > 1.5 * len(found["test"]) > 3_000


def test_the_ledger_counts_live_bytes():
    known = torch.zeros(10, dtype=torch.float64)
    with Ledger([known]) as ledger:
        a = torch.zeros(100, dtype=torch.float64)
        b = a + 1
        del a
        c = b.view(10, 10)  # shares its memory
        del b
        assert ledger.bytes() == 80 + 800
        assert ledger.peak == 80 + 1600
        del c
    assert ledger.bytes() == 80


@pytest.mark.parametrize(
    ("name", "parameters", "kept"),
    [
        ("aid", cost.UNREAD // 3 - 1, 6),
        ("aid", cost.UNREAD // 3 + 1, 4),
        ("soba", cost.UNREAD // 3 - 1, 7),
        ("soba", cost.UNREAD // 3 + 1, 4),
        ("f2sa", cost.UNREAD // 5 - 1, 10),
        ("f2sa", cost.UNREAD // 5 + 1, 7),
        ("first-order", 1000, 3),
    ],
)
def test_vectors_of_diagnostics_stay_until_they_are_read_if_they_are_small(name, parameters, kept):
    """What stays otherwise: y, Adam's two moments, and v; of F2SA two copies with their moments instead."""
    setting = learning.METHODS[name]
    x, y = torch.ones(1, requires_grad=True), torch.ones(parameters, requires_grad=True)
    options = {} if setting.single else {"lower_steps": 1}
    optimizer = setting.make([x], [y], lr=0.1, lower_lr=1e-3, lower_optimizer=torch.optim.Adam, **options)
    with Ledger([y]) as ledger:
        for _ in range(3):
            optimizer.backward(lambda: y.square().mean() + x.sum(), lambda: x * y.square().sum() / 2)
        assert kept == cost.state(name, parameters + 1)
        assert ledger.bytes() / y.nbytes == pytest.approx(kept, abs=0.05)
        optimizer.metrics()
        assert ledger.bytes() / y.nbytes == pytest.approx(cost.STATE[name], abs=0.05)


@pytest.mark.slow
def test_cost_is_as_worked_out(tmp_path):
    found = cost.main(["--scale", "tiny", "--out", str(tmp_path)])
    for name, r in found["results"].items():
        assert r["state"] == pytest.approx(cost.state(name, r["parameters"]), abs=0.01)
        assert r["state, worked out"] == cost.state(name, r["parameters"])
        assert r["peak"] > r["state"] + 1
        assert r["sent"] == {}


def everything(rank, parallel):
    """Return the results of one rank of two, or of one alone."""
    ranks = ALONE if rank is None else Ranks(rank, 2, dist.group.WORLD)
    SIZES["small"] = {"width": 8, "layers": 1, "heads": 2}
    args = arguments(parallel=parallel, steps=3, warmup=1, lower_steps=1, train_steps=2, judged=12)
    pieces = {"a": cycles(4), "b": noise()}
    found = {
        name: [*learning.learned(name, pieces, cycles(5), args, 0, ranks)["weights"].values()]
        for name in learning.METHODS
    }
    found["doremi"] = [*learning.doremi(pieces, args, 0, ranks)["weights"].values()]
    SIZES["wide"] = {"width": 16, "layers": 1, "heads": 2}  # next to which a batch is small
    cost_args = arguments(scale="wide", parallel=parallel, lower_steps=3)
    for name in () if rank is None else learning.METHODS:
        r = cost.measured(name, cost_args, ranks)
        sent = r["sent"]["allreduce" if parallel == "ddp" else "reducescatter"]
        assert sent == pytest.approx(cost.gradients(name, 3, parallel == "fsdp"), rel=0.02), name
        if parallel == "ddp":  # nothing is kept that was only passing through
            assert r["state"] == pytest.approx(cost.state(name, r["parameters"]), rel=0.02), name
    curve = training.trained([*pieces.values()], [0.3, 0.7], cycles(5), args, 0, ranks)
    return found | {"trained": [p["held-out loss"] for p in curve]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the linear system of the implicit hypergradient is not solved")  # a step or two
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_find_what_one_finds(parallel, tmp_path):
    torch.set_default_dtype(torch.float64)
    results = together(2, tmp_path, everything, parallel)
    alone = everything(None, parallel)
    assert alone["f2sa"] != [0.5, 0.5]
    for rank in range(2):
        for name, expected in alone.items():
            assert results[rank][name] == pytest.approx(expected, abs=1e-7), (rank, name)
