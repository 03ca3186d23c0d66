"""Training, resuming, choosing, evaluating, comparing; the programs."""

import contextlib
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import bilevel_optim as bo
from recipes.few_shot import __main__ as program
from recipes.few_shot import benchmark, compare, plan, profile, tables, training
from recipes.few_shot.backbones import Body, Norm
from recipes.few_shot.data import DATA
from recipes.few_shot.learners import make
from recipes.few_shot.picture import projected, separation
from recipes.few_shot.training import Training, evaluate, interval, pretrain, train

from . import problems


def learner(name="protonet", statistics="batch", **options):
    return make(name, problems.body(statistics), 2, tasks=2, seed=0, **options)


def trained(made, steps, checkpoint=None, validation=None, log=None, **options):
    how = Training(**{"lr": 0.02, "steps": steps, "evaluations": 2, "episodes": 10, "schedule": "cosine", **options})
    val_episodes = validation or problems.episodes("val")
    return train(made, problems.episodes(augment=True), val_episodes, how, checkpoint=checkpoint, log=log)


def timeless(found):
    return [{k: v for k, v in point.items() if k != "seconds"} for point in found["curve"]]


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize("name", ["protonet", "pzobo", "f2sa", "maml", "reptile"])
def test_resumed_training_gives_the_same_numbers(name, tmp_path, monkeypatch):
    """Training is stopped after the checkpoint in the middle, and goes on from it with a new learner."""
    whole = learner(name)
    expected = trained(whole, 4)
    stopped, path = learner(name), tmp_path / "run.pt"
    backward, calls = type(stopped).backward, []

    def interrupted(self, episodes):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return backward(self, episodes)

    with monkeypatch.context() as patch:
        patch.setattr(type(stopped), "backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(stopped, 4, path)
    resumed = learner(name)
    found = trained(resumed, 4, path)
    assert str(timeless(found)) == str(timeless(expected))
    assert found["curve"][0]["accuracy"] == expected["curve"][0]["accuracy"]
    for a, b in zip(whole.network.state_dict().values(), resumed.network.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    # A finished run is not trained further.
    assert str(trained(learner(name), 4, path)["curve"]) == str(found["curve"])


class Validation:
    """Stands in for `evaluate`: these mean accuracies, one after the other."""

    def __init__(self, *accuracies):
        self.accuracies = [*accuracies]

    def __call__(self, *_):
        return torch.full((4,), self.accuracies.pop(0))


def test_the_best_on_validation_classes_is_kept(monkeypatch):
    monkeypatch.setattr(training, "evaluate", Validation(0.2, 0.8, 0.5))
    seen = []
    made = learner()
    found = trained(made, 4, log=lambda step, figures: seen.append((step, figures)))
    assert [point["accuracy"] for point in found["curve"]] == pytest.approx([0.2, 0.8, 0.5])
    assert found["best_step"] == 2
    assert found["validation"] == pytest.approx(0.8)
    again = learner()
    monkeypatch.setattr(training, "evaluate", Validation(0.2, 0.8))
    trained(again, 2, schedule="constant", evaluations=1)
    monkeypatch.setattr(training, "evaluate", Validation(0.2, 0.8, 0.5))
    constant = learner()
    trained(constant, 4, schedule="constant")
    for a, b in zip(constant.network.state_dict().values(), again.network.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [step for step, _ in seen] == [0, 2, 4]
    assert all(isinstance(v, (int, float)) for v in seen[1][1].values())


def test_learning_rates_follow_their_schedules():
    rates = {name: [] for name in training.SCHEDULES}
    for name, seen in rates.items():
        trained(
            learner(), 4, schedule=name, evaluations=4, log=lambda _, figures, seen=seen: seen.append(figures["lr"])
        )
    assert rates["constant"] == [0.02] * 5
    cosine = [0.02 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates["cosine"][1:] == pytest.approx(cosine)
    assert rates["steps"][1:] == pytest.approx([0.02, 0.02, 0.002, 0.002])


def test_gradients_are_clipped(monkeypatch):
    norms, step = [], torch.optim.Adam.step

    def noted(self, *given):
        norms.append(float(torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()))
        return step(self, *given)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    trained(learner(), 2, clip=1e-3)
    assert norms == pytest.approx([1e-3] * 2, rel=1e-3)


def test_a_run_that_diverges_keeps_the_best_and_says_so(monkeypatch):
    made = learner("first-order")

    def diverging(*_):
        raise bo.NonFiniteError("upper_grad", 0, "")

    monkeypatch.setattr(type(made), "backward", diverging)
    found = trained(made, 4)
    assert found["diverged"]
    assert found["steps"] == 0
    assert len(found["curve"]) == 1


def test_a_budget_of_seconds_ends_a_run(monkeypatch):
    times = iter(range(0, 1000, 1))
    monkeypatch.setattr(training, "clock", lambda device: 0.25 * next(times))  # a step takes 0.25 s
    found = trained(learner(), None, seconds=1.0, schedule="constant", evaluations=2)
    assert found["steps"] == 4
    assert [point["step"] for point in found["curve"]] == [0, 2, 4]
    assert found["curve"][-1]["seconds"] == 1.0


def test_the_bar_counts_seconds_or_steps(monkeypatch):
    bars = []

    class Bar(contextlib.nullcontext):
        def __init__(self, _, label, *, total, initial, bar_format=None):
            super().__init__(self)
            self.total, self.n = total, initial
            bars.append(self)

        def update(self, n):
            self.n += n

        def set_postfix(self, **_):
            pass

    times = iter(range(0, 1000, 1))
    monkeypatch.setattr(training, "clock", lambda device: 0.25 * next(times))
    monkeypatch.setattr(training, "progress", Bar)
    trained(learner(), None, seconds=1.0, schedule="constant", evaluations=1)
    trained(learner(), 3)
    assert [(bar.total, bar.n) for bar in bars] == [(1.0, 1.0), (3, 3)]


def test_the_plan_is_said_before_torch_is_imported():
    code = "import sys; from recipes.few_shot.plan import plan; print(plan([])); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "protonet, first-order, aid, anil on 5-way 1-shot episodes of digits with cnn4" in said
    assert said.endswith("False\n")
    assert int(re.search(r"takes about (\d+) s\.", said)[1]) <= 60
    longer = plan.plan(["--data", "omniglot", "--learners", "aid", "maml", "--shot", "5", "--way", "20"])
    assert "aid, maml on 20-way 5-shot episodes of omniglot" in longer
    assert "2 minutes" in longer
    assert "30 meta-steps each" in plan.plan(["--steps", "30"])
    assert plan.BUDGETS.keys() == {*DATA}


@pytest.mark.parametrize("name", ["protonet", "first-order", "anil", "fomaml"])
def test_evaluation_changes_nothing_and_is_the_same_each_time(name):
    made = learner(name, "running")
    before = {k: v.clone() for k, v in made.network.state_dict().items()}
    random = made.generator.get_state()
    val_episodes, train_episodes = problems.episodes("val"), problems.episodes()
    first = evaluate(made, val_episodes, 7, 3, train_episodes)
    assert torch.equal(first, evaluate(made, val_episodes, 7, 3, train_episodes))
    assert len(first) == 7
    assert not torch.equal(first, evaluate(made, val_episodes, 7, 4, train_episodes))
    assert all(torch.equal(before[k], v) for k, v in made.network.state_dict().items())
    assert torch.equal(random, made.generator.get_state())
    assert all(module.training for module in made.network.modules())


def test_running_statistics_are_those_of_training_episodes(monkeypatch):
    made, seen = learner("protonet", "running"), []
    scores = type(made).scores

    def noted(self, *batches):
        seen.append([(norm.training, norm.mean.clone()) for norm in self.body.norms])
        return scores(self, *batches)

    monkeypatch.setattr(type(made), "scores", noted)
    evaluate(made, problems.episodes("val"), 2, 0, problems.episodes())
    (during,) = seen
    assert not during[0][0]
    assert during[0][1].abs().max() > 0
    (norm,) = [m for m in made.network.modules() if isinstance(m, Norm)]
    assert norm.mean.abs().max() == 0


def test_intervals():
    found = interval(torch.tensor([0.2, 0.4, 0.6, 0.8]))
    assert found == {
        "accuracy": pytest.approx(0.5), "interval": pytest.approx(1.96 * 0.2582 / 2, rel=1e-3), "episodes": 4
    }  # fmt: skip


def test_training_learns():
    made = learner("ridge")
    before = float(evaluate(made, problems.episodes("val"), 40, 0).mean())
    trained(made, 30, schedule="constant", evaluations=3)
    assert float(evaluate(made, problems.episodes("val"), 40, 0).mean()) > max(before, 0.9)


def test_pretraining_separates_the_classes_and_resumes(tmp_path, monkeypatch):
    shown = problems.episodes()

    def body(steps, checkpoint=None):
        torch.manual_seed(0)
        made = problems.body("batch")
        pretrain(made, shown, steps, lr=0.01, batch=20, checkpoint=checkpoint)
        return made

    def separation(body):
        """Variance between the classes over the variance within them."""
        with torch.no_grad():
            features = body(shown.normalised(shown.pixels)).unflatten(0, (shown.classes, shown.each))
        means = features.mean(1)
        return (means - means.mean(0)).square().sum(1).mean() / (features - means[:, None]).square().sum(2).mean()

    whole = body(80)
    assert separation(whole) > 2 * separation(body(0))  # 16.8 and 5.4
    monkeypatch.setattr(training, "OFTEN", -1.0)  # a checkpoint after each update
    steps, adam = [], torch.optim.Adam.step

    def interrupted(self, *given):
        steps.append(1)
        if len(steps) == 25:
            raise KeyboardInterrupt
        return adam(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            body(80, tmp_path / "run.pt")
    resumed = body(80, tmp_path / "run.pt")
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_images_for_pretraining_have_the_labels_of_their_classes():
    shown = problems.episodes()
    images, labels, _ = shown.classified(50, torch.Generator().manual_seed(0))
    of_class = shown.normalised(shown.pixels).unflatten(0, (shown.classes, shown.each))
    for image, label in zip(images, labels, strict=True):
        assert any(torch.equal(image, one) for one in of_class[label])


# ------------------------------------------------------------------------------------------------ programs


def record(rate, validation, last=None, *, diverged=False, step=1):
    """Entries of a run that a search for the learning rate reads."""
    point = {"seconds": 1.0, "accuracy": validation if last is None else last}
    return {"learner": "a", "lr": rate, "seed": 0, "validation": validation, "curve": [point], "best_step": step,
            "diverged": diverged, "steps": 9}  # fmt: skip


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.01, [0.0032, 0.01, 0.032]),
        (0.1, [0.0032, 0.01, 0.032, 0.1, 0.32]),
        (1e-3, [0.00032, 0.001, 0.0032, 0.01, 0.032]),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_the_best_learning_rate_is_inside_the_grid(best, tried, flat):
    """Also if all runs are best at their common start: then by what the last evaluation found."""

    def run(name, rate, seed):
        assert (name, seed) == ("a", 0)
        accuracy = -abs(math.log(rate / best))
        return record(rate, 0.3 if flat else accuracy, accuracy)

    assert [r["lr"] for r in compare.tuned("a", run, 0.01, 9)] == tried
    assert len(compare.tuned("a", run, 1e-9 * best, 6)) == 6
    known = [record(1.0, 1.0)]
    assert [r["lr"] for r in compare.tuned("a", run, 0.01, 9, known)] == [0.0032, 0.01, 0.032, 1.0, 3.2]


def test_the_best_of_equal_runs_is_that_which_ends_best_and_then_the_slowest():
    best = record(0.1, 0.5, 0.4)
    worse = [record(0.03, 0.5, 0.3), record(1.0, 0.4, 0.4), record(0.3, 0.5, 0.4), record(0.01, 0.5, diverged=True)]
    for runs in ([best, *worse], [*worse, best]):
        assert max(runs, key=compare.merit) is best


def test_a_table_shows_the_best_run_and_says_if_its_learning_rate_is_at_an_edge(tmp_path, capsys, monkeypatch):
    """A run that was tested before a better rate was found is not what the table shows."""
    monkeypatch.setattr(compare, "plot", lambda *_: None)
    records = compare.Records(tmp_path / "a.json", {})

    def notes(*runs):
        records.runs = [{**r, "test": {"accuracy": r["lr"], "interval": 0.0}} for r in runs]
        compare.report(records, "", [])
        (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a  ")]
        return row

    low, high = record(0.01, 0.5, 0.3, step=0), record(1.0, 0.5, 0.2, step=0)
    assert re.match(r"a +0.1 .* 0.01 to 1  ", notes(low, record(0.1, 0.6), high))
    assert re.match(r"a +1 .* 0.01 to 1 \(edge\)", notes(low, record(0.1, 0.6), record(1.0, 0.7)))
    assert re.match(r"a +0.1 .* 0.01 to 1 \(none impr", notes(low, record(0.1, 0.5, 0.4, step=0), high))
    assert re.match(r"a +0.01 .* 0.01 to 1 \(edge, none impr", notes(low, high))


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The arguments of a small comparison on digits; programs draw no pictures."""
    torch.set_default_dtype(torch.float32)
    for module in (compare, program):
        monkeypatch.setattr(module, "plot", lambda *_: None)
    size = "--steps 2 --evaluations 1 --episodes 3 --test-episodes 6 --tasks 1 --query 2 --out"
    return [*size.split(), str(tmp_path)]


def test_a_comparison_is_made_once(command, tmp_path, capsys, monkeypatch):
    arguments = [*command, "--learners", "protonet", "fomaml", "--seeds", "2", "--best", "1", "--most", "3"]
    made = []
    one = compare.one
    monkeypatch.setattr(compare, "one", lambda *a, **k: made.append(a[2:5]) or one(*a, **k))
    assert not compare.main([*arguments, "--limit", "1e-9"])["done"]
    assert "run the same command again" in capsys.readouterr().out
    found = compare.main(arguments)
    assert found["done"]
    assert len(made) == 2 * (3 + 1) + 1  # three rates, the best again for its test, another seed of the better one
    path = tmp_path / "digits_cnn4_5way_1shot.json"
    saved = json.loads(path.read_text())
    tested = [r for r in saved["runs"] if "test" in r]
    assert len(saved["runs"]) == 7
    assert sorted(r["seed"] for r in tested) == [0, 0, 1]
    assert all(r["test"]["episodes"] == 6 for r in tested)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 7 - len(tested)  # those of finished runs are removed
    del made[:]
    compare.main(arguments)
    assert not made
    out = capsys.readouterr().out
    assert "protonet" in out
    assert "seconds to a validation accuracy" in out
    with pytest.raises(SystemExit, match="is of other settings"):
        compare.main([*arguments, "--episodes", "4"])


def test_jobs_of_one_comparison_share_their_records(command, tmp_path, monkeypatch):
    """Seed 0 of all learners, then more seeds: each search and run is made once, and leaves no checkpoint."""
    shared = [*command, "--learners", "protonet", "fomaml", "--share", "0.5", "--most", "3"]
    made = []
    one = compare.one
    monkeypatch.setattr(compare, "one", lambda *a, **k: made.append(a[0].steps) or one(*a, **k))
    assert compare.main([*shared, "--seeds", "1"])["done"]
    assert made == [1, 1, 1, 2] * 2  # three rates with half the budget, the best with the whole
    del made[:]
    assert compare.main([*shared, "--seeds", "2", "--best", "1"])["done"]
    assert made == [2]
    assert not [*(tmp_path / "checkpoints").iterdir()]


def test_tables_have_the_best_rate_of_each_learner_and_say_what_was_not_run(tmp_path):
    def run(learner, lr, seed, accuracy, **more):
        curve = [{"accuracy": accuracy}]
        return {"learner": learner, "lr": lr, "seed": seed, "validation": accuracy, "diverged": False, "best_step": 1,
                "seconds": 600.0, "curve": curve, **more}  # fmt: skip

    def test(accuracy):
        return {"test": {"accuracy": accuracy, "interval": 0.01, "episodes": 600}}

    runs = [run("maml", lr, 0, 0.8 + (lr == 0.1) / 10, search=True) for lr in (0.03, 0.1, 0.3)]
    runs += [run("maml", 0.1, seed, 0.9, **test(0.9)) for seed in (1, 0)] + [run("maml", 0.03, 0, 0.99, **test(0.99))]
    runs += [run("anil", 0.1, 0, 0.9, search=True), run("aid", 0.1, 0, 0.9, search=True)]
    runs += [run("anil", 0.1, 0, 0.9, **test(0.95)), run("aid", 0.1, 1, 0.9, **test(0.95))]
    path = tmp_path / "omniglot_cnn4_5way_1shot_9.json"
    path.write_text(json.dumps({"facts": {"share": 0.1}, "runs": runs}))
    page = f"a\n<!-- table: {path.stem} maml aid anil -->\nold\n<!-- end -->\nb"
    made = tables.written(page, tmp_path)
    assert made.splitlines()[3:] == [
        "| --- | --- | --- | --- | --- | --- |",
        "| `anil` | 0.950 ± 0.010 | 1 | - | 0.1, of 0.1 to 0.1 (edge) | 10 |",
        "| `maml` | 0.900 [0.900, 0.900] | 2 | 0.987 ± 0.004 | 0.1, of 0.03 to 0.3 | 10 |",
        "| `aid` | no run yet | - | - | - | - |",
        "<!-- end -->",
        "b",
    ]
    assert tables.written(made, tmp_path) == made
    assert tables.written(page, tmp_path / "none").count("no run yet") == 3


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.parent.name)
def test_the_pages_say_what_the_records_say(path):
    """Rows with as many seeds as the record: runs that were recorded since come in when the tables are written next."""
    page = path.read_text(encoding="utf-8")

    def rows(text):
        cells = [
            line.split(" | ")
            for part in text.split("<!-- table: ")[1:]
            for line in part.split("<!-- end")[0].splitlines()
        ]
        return [row for row in cells if len(row) == 6 and row[2].isdigit()]

    recorded = rows(tables.written(page))
    assert recorded
    for row in rows(page):
        assert row in recorded or any(row[0] == new[0] and int(new[2]) > int(row[2]) for new in recorded), row


def test_the_program_trains_and_resumes(command, tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    first = program.main([*command, "--learners", "first-order", "--statistics", "support", "--augment"])
    run = first["results"]["first-order"]
    assert run["steps"] == 2
    assert run["test"]["episodes"] == 6
    lines = (tmp_path / "few_shot_digits_cnn4_5way_1shot_first-order_seed0.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2
    assert "hypergradient_norm" in json.loads(lines[-1])
    again = program.main([*command, "--learners", "first-order", "--statistics", "support", "--augment", "--resume"])[
        "results"
    ]["first-order"]
    assert again["curve"][1:] == run["curve"][1:]
    assert again["test"] == run["test"]
    assert "test accuracy" in capsys.readouterr().out


def test_features_of_unseen_classes_are_drawn(command, tmp_path):
    found = program.main([*command, "--learners", "protonet", "--picture"])["results"]["protonet"]["separation"]
    assert set(found) == {"before", "after"}
    assert (tmp_path / "few_shot_digits_cnn4_5way_1shot_protonet_features.png").stat().st_size > 10_000
    values = torch.randn(4, 6, 3)
    values[..., 2] *= 1e-3
    apart = torch.tensor([[0.0, 0, 0], [9, 0, 0], [0, 9, 0], [9, 9, 0]]).unsqueeze(1)
    assert separation(values + apart) > 20 > 1 > separation(values)
    flat = projected(values + apart)
    assert torch.allclose(torch.cdist(flat[:, 0], flat[:, 0]), torch.cdist(*[(values + apart)[:, 0, :2]] * 2), atol=0.5)


def test_help_names_the_learners(capsys):
    for module in (program, compare):
        with pytest.raises(SystemExit) as end:
            module.main(["--help"])
        assert end.value.code == 0
        assert "pzobo-code" in capsys.readouterr().out


@pytest.mark.parametrize("loop", benchmark.LOOPS)
def test_loops_compute_the_same(loop, capsys, request):
    torch.set_default_dtype(torch.float32)
    if not loop.startswith("hand"):
        pytest.importorskip(loop)
    size = ["--size", "16", "--way", "2", "--query", "2", "--tasks", "2", "--repeats", "1"]
    names = [*benchmark.LOOPS[loop]]
    if loop == "hand-last" and not request.config.getoption("--slow"):
        names = ["anil"]  # the others are those of "hand"
    for name in names:
        ours = benchmark.main([*size, "--alone", name])["norm"]
        other = benchmark.main([*size, "--alone", name, "--loop", loop])["norm"]
        if name != "pzobo":  # a single random direction, another one here and there
            assert ours == pytest.approx(other, rel=1e-3)


def test_the_profile_counts_evaluations_of_the_body(capsys, monkeypatch):
    """Time is the number of images that the body has seen: one episode has four, and a head adapts in five steps."""
    seen = 0
    plain = Body.forward

    def forward(body, images, known=None):
        nonlocal seen
        seen += len(images)
        return plain(body, images, known)

    monkeypatch.setattr(Body, "forward", forward)
    monkeypatch.setattr(profile, "clock", lambda device: seen)
    size = ["--size", "16", "--way", "2", "--query", "1", "--tasks", "1", "--rounds", "1"]
    found = profile.main([*size, "--learners", "anil", "protonet"])
    assert found.pop("steps") == {"body": 4, "anil": 4, "anil, each time": 12, "protonet": 4}
    assert set(found) == {"contiguous", "channels last", "channels last, bfloat16"}
    assert {tuple(parts.items()) for parts in found.values()} == {(("forward", 4), ("forward and backward", 4))}
    assert "body at each lower step" in capsys.readouterr().out


def test_the_benchmark_takes_turns_and_keeps_the_shortest(capsys, monkeypatch):
    called = []

    def alone(module, *given):
        called.append((given[1], given[given.index("--loop") + 1] if "--loop" in given else "library"))
        return {"seconds": 2.0 + 4 * ("--loop" in given) + (len(called) < 3), "mebibytes": 3.0, "norm": 1.0}

    monkeypatch.setattr(benchmark, "alone", alone)
    found = benchmark.main(["--learners", "anil", "ridge", "--way", "3", "--rounds", "2"])["results"]
    assert called == [("anil", "library"), ("anil", "hand")] * 2 + [("ridge", "library")] * 2
    assert {entry: one["seconds"] for entry, one in found["anil"].items()} == {"library": 2, "hand": 6}
    assert [*found["ridge"]] == ["library"]
    out = capsys.readouterr().out
    assert "3-way 1-shot" in out
    assert re.search(r"anil +hand +6 +3 +1 +0.3333\n", out)


@pytest.mark.filterwarnings("ignore:the linear system")  # one image a class, in float32: rounding decides
def test_the_example_of_the_readme_runs(capsys, monkeypatch):
    torch.set_default_dtype(torch.float32)
    text = (Path(program.__file__).parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(example.splitlines()) <= 42

    class Noise:
        data = torch.randint(0, 256, (1000, 16, 16, 3), dtype=torch.uint8).numpy()
        targets = [*range(100)] * 10

    monkeypatch.setattr("torchvision.datasets.CIFAR100", lambda *_, **__: Noise)
    models = pytest.importorskip("torchvision.models")
    resnet10 = partial(models.ResNet, models.resnet.BasicBlock, [1, 1, 1, 1])
    monkeypatch.setattr(models, "resnet18", resnet10)
    for old, new in (
        ("range(1000)", "range(1)"),
        ("shot=5, query=5", "shot=1, query=1"),
        ("tasks_per_step=4", "tasks_per_step=2"),
    ):
        assert old in example
        example = example.replace(old, new)
    exec(example, {})
    assert "tensor(" in capsys.readouterr().out
