"""Every program runs, on bundled data and on files in the format of public downloads, with the expected results."""

import argparse
import csv
import importlib
import json
import lzma
import math
import pkgutil
import re
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import bilevel_optim as bo
import recipes
import recipes.benchmarks
from recipes import (
    audit_labels,
    hyper_cleaning,
    hyper_representation,
    learn_to_regularize,
    length_scales,
    meta_classification,
    saddle_escape,
)
from recipes.benchmarks import conditioning, contextual, many_tasks, overhead, step_path
from recipes.common import Parser, progress, rows, save, spend, summary, table, train, tuned
from recipes.problems import few_images, kernel_machine, suspects
from recipes.problems.newsgroups import SparseFeatures, load_newsgroups
from recipes.problems.problem import Part
from recipes.problems.tasks import SUPERCLASSES, load_tasks


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def compared(r):
    results, grid = r["results"], r["grid"]
    assert results["aid"]["value"] < 0.2 * results["first-order"]["value"]
    assert grid["aid"]["1e+09"] > 1e6
    assert all(250 < result["curve"][-1]["calls"] <= 300 for result in results.values())
    # The gap at y*(x) is that of x alone; at the y that is held it may be anything.
    assert all(p["value"] > 0 and p["value"] != p["held"] for p in results["itd"]["curve"][1:])


def cleaned(r):
    for result in r["results"].values():
        assert result["accuracy"] > r["baselines"]["corrupted labels"] + 0.02
        assert result["precision"] > 0.8
        assert result["recall"] > 0.8
    assert r["baselines"]["true labels"] > 0.93


def represented(r):
    assert all(result["curve"][-1]["accuracy"] > 0.88 for result in r["results"].values())
    assert all(len({*result["accuracies"]}) == 2 for result in r["results"].values()), "each seed is a run of its own"
    assert r["results"]["pzobo-code"]["oracle_calls"]["lower_grad"] == r["arguments"]["steps"] * 10 * 2


def regularized(r):
    for name, result in r["results"].items():
        assert len(result["curve"]) == 7
        assert result["loss"] < (0.9 if name == "ba" else 0.7) * result["curve"][0]["loss"]
        assert (result["penalty_range"] == [0.0, 0.0]) == (name == "first-order")


def reweighted(r):
    runs = r["results"]
    assert all(run["solved"] < r["equal_weights"] - 0.01 for run in runs["f2sa-2"])
    assert runs["first-order"][0]["solved"] == pytest.approx(r["equal_weights"], abs=1e-4)
    assert [run["seed"] for run in runs["f2sa-2"]] == [0, 1]
    assert all(5000 < run["samples"] <= 6000 for run in runs["f2sa-2"])
    assert [len(run["curve"]) for run in runs["f2sa-2"]] == [4, 4]


def learned_centre(r):
    for result in r["results"].values():
        assert result["exact_loss"] < r["centre_zero"]["exact_loss"] - 0.2
        assert result["accuracy"] > 0.5


def verdicts_of_bfloat16(r):
    (row,) = r["results"].values()
    assert row["AID"]["verdict"] == "right"
    assert row["AID"]["error"] < 0.05
    assert row["PZOBO"]["deviation"] > 0.1
    assert "mostly rounding" in row["PZOBO"]["said"]


def near_the_best_step(r):
    (found,) = r["results"]["float32"].values()
    assert all(own["default"] <= 3 * own["error"] for own in found.values())


def better_than_one_number(r):
    for (run,) in r["results"].values():
        assert run["losses"][-1] < run["control"]
        assert not run["at_edge"]


def no_silent_solve(r):
    (row,) = r["results"].values()
    assert len(row) == 38
    assert {cell["verdict"] for cell in row.values()} == {"right", "told"}  # a dense matrix without an inverse is told
    assert r["iterations"][0][1:] == [6, 6, 6, 6]


def right_hypergradients(r):
    assert len(r["results"]) == 2
    for row in r["results"].values():
        assert row["quadratic"]["error"] < 1e-12
        assert row["constrained"]["error"] < 1e-12
        assert row["sparse"]["error"] < 1e-12


def rounding_alone(r):
    own = [row for row in r["results"] if row["library"] == "bo.solve"]
    assert len(own) == 4
    assert all(row["float64"] < 1e-14 and row["float32"] < 1e-5 and not row["said"] for row in own)


def restarts_are_slow(r):
    for values in r["results"].values():
        assert values["kept"] < 0.1 < 0.7 < values["restart"]
        assert values["rarely"] < 0.5
    for pace in ("still", "slow"):
        values = r["runs"][f"40 rows, 200 unknowns, condition 1e4; {pace}; 5"]
        assert values["kept"] < 1e-3 < 0.1 < values["restart"] < 1 < values["residual"]


def constant_pixels(r):
    assert r["facts"]["digits"]["constant columns"] == 3
    assert r["facts"]["digits"]["rank"] == 61


def sold(r):
    for result in r["results"].values():
        assert r["references"]["true demand known"] < result["cost"] < result["curve"][0]["cost"]
    assert 4 < r["demand"]["mean"] < 7
    assert r["demand"]["std"] > 1


def tolled(r):
    for result in r["results"].values():
        assert min(result["gain"]) > -1e-6
        assert max(result["gain"]) > 0.05
        assert all(24 <= solves <= 30 for solves in result["solves"])


def tolled_by_half(r):
    gains = {name: result["gain"][0] for name, result in r["results"]["tiny"].items()}
    assert gains["no toll"] == pytest.approx(0, abs=1e-6)
    assert gains["marginal cost"] < 0 < gains["marginal cost, best factor"]
    assert gains["AID, Newton, L-BFGS"] > gains["marginal cost, best factor"] + 20
    assert gains["AID, Newton, L-BFGS"] == pytest.approx(gains["adjoint by hand, L-BFGS"], abs=1)


def hung(r):
    errors = {name: result["error"][0] for name, result in r["results"].items()}
    start = r["start"]["measured on the target"][0]
    assert errors["AID, Newton, L-BFGS"] < 0.5 * start < 0.5 * r["start"]["all threads 1.1 long"][0]
    assert errors["ITD, 20 lower steps, Adam"] < 0.9 * start
    curve = r["results"]["AID, Newton, L-BFGS"]["curve"][0]
    assert errors["AID, Newton, L-BFGS"] == pytest.approx(curve[-1]["error"], rel=1e-3)


def audited(r):
    found = {name: result["average precision"][0] for name, result in r["results"]["structured"].items()}
    assert found["matrix"] > found["small-loss"] + 0.3
    assert min(found["glc"], found["joint"], found["trusted-only"]) > found["small-loss"] + 0.1
    assert r["results"]["structured"]["matrix"]["accuracy after removal"][0] > 0.75


def scaled(r):
    accuracy = {name: runs[0][1] for name, runs in r["results"]["40"].items()}
    assert accuracy["AID"] > max(accuracy["direct"], accuracy["SVM"]) + 0.02


def distilled(r):
    means, learned = r["results"]["centres"], r["results"]["itd"]  # where the images start, and end
    assert learned["MLP"][0] > means["MLP"][0] + 0.02
    assert learned["softmax"][0] > means["softmax"][0] + 0.02


def escaped(r):
    names = ["pragda", "gda, lr 1"]
    assert [(e["start"], e["method"]) for e in r["results"]] == [(s, n) for s in saddle_escape.STARTS for n in names]
    assert all(hit < 90 for hit in r["results"][0]["hit"])
    assert r["results"][1]["hit"] == [None]


def timed_contexts(r):
    assert len(r["end-to-end"]["sum 2 RT-MLMC"]["rms"]) == 1
    assert r["time"]["K=2 tasks=2"]["DL-SGD"] > 0


def unreached(r):
    assert len(r["results"]) == 8
    assert all(e["calls"] == math.inf for e in r["results"])


def rows_grow(r):
    rows = {(e["tasks"], e["variant"]): e["rows"] for e in r["cost"] if e["sampling"] == "uniform"}
    assert rows[40, "exact_mean"] == pytest.approx(2 * rows[20, "exact_mean"])
    assert rows[40, "matrix_free"] < rows[40, "exact_mean"]
    assert len(r["complexity"]) == 6


def more_rates_work(numbers):
    """The start has a loss, and each lower rate one end for each of six upper rates."""
    ends = numbers["representation"]
    assert math.isfinite(ends["start"])
    fixed, auto = ends["AID"]
    assert (len(fixed), len(auto)) == (6, 6)
    assert fixed != auto


def suited(r):
    assert r["new_runs"] == 1
    curve = r["best"]["aid"][0]["curve"]
    assert [curve[0]["seconds"], len(curve)] == [0, 3]
    assert 0 <= curve[-1]["test_error"] <= 1


def timed_eagerly(numbers):
    rows = numbers["results"]["logistic"]
    assert [*rows] == ["soba", "f2sa"]
    assert all(row["us"]["eager"] > 0 and not row["errors"] for row in rows.values())


def exchanged(r):
    assert [*r["results"]] == ["soba, 1", "rows-split, 1"]
    for row in r["results"].values():  # one process alone exchanges nothing
        assert row["tensors"] >= row["between"] > row["state"] > 0 == row["reduced"] == row["gathered"]


def transferred(r):
    assert len(r["results"]) == len(r["arguments"]["cases"]) * len(r["arguments"]["arms"])
    for name, found in r["results"].items():
        assert len(found["tests"]) == 1
        assert 0.05 < min(found["tests"]) <= max(found["tests"]) < 1, name


# Arguments of each program's run, its files, and facts about its numbers.
RUNS = {
    "audit_labels": (
        "--noise structured --seeds 1 --steps 150 --methods small-loss trusted-only glc joint matrix",
        "audit_labels_digits",
        audited,
    ),
    "black_box": ("--tolls 3 --budget 30 --seeds 2 --methods PZOBO Nelder-Mead", "black_box", tolled),
    "compare": (
        "--problem quadratic --budget 300 --methods aid first-order itd --grid 0.1 0.5 1e9 --seeds 2",
        "compare_quadratic",
        compared,
    ),
    "hanging_net": ("--side 6 --seconds 1 --seeds 1", "hanging_net", hung),
    "long_runs": ("--list", None, None),
    "length_scales": (
        "--rows 300 --extra 40 --steps 50 --lr 0.05 --methods AID direct SVM",
        "length_scales_digits",
        scaled,
    ),
    "distil": (
        "--steps 20 --lower-steps 10 --lower-lr 0.1 --lr 0.1 --seeds 1 --methods centres itd",
        "distil_digits_1",
        distilled,
    ),
    "hyper_cleaning": ("--steps 8 --optimizer aid itd f2sa", "hyper_cleaning_digits", cleaned),
    "hyper_regularization": (
        "--samples 6000 --lr 10 --lower-lr 0.5 --evaluations 3 --seeds 2 --optimizer f2sa-2 first-order",
        "hyper_regularization_breast_cancer",
        reweighted,
    ),
    "hyper_representation": (
        "--steps 25 --seeds 2 --optimizer aid-fp pzobo-code one-level",
        "hyper_representation_digits",
        represented,
    ),
    "learn_to_regularize": (
        "--steps 6 --optimizer rahgd prahgd aid aid-nesterov itd ba paid f2sa-1 f2sa-2 f2sa-3 first-order",
        "learn_to_regularize_digits",
        regularized,
    ),
    "meta_classification": (
        "--steps 6 --tasks 3 --levels 2 --optimizer rt-mlmc maml",
        "meta_classification_digits",
        learned_centre,
    ),
    "newsvendor": (
        "--steps 30 --levels 2 --price 10 --test-points 1000 --optimizer erm rt-mlmc wdro",
        "newsvendor",
        sold,
    ),
    "saddle_escape": ("--seeds 2 --steps 100 --optimizer pragda gda,_lr_1", "saddle_escape", escaped),
    "three_jobs": ("--updates 4", "three_jobs", lambda r: None),
    "learned_solver": ("--seeds 1 --steps 30", "learned_solver", better_than_one_number),
    "tolls": ("--sizes tiny --seconds 0.5 --seeds 1", "tolls", tolled_by_half),
    "transfer": ("--steps 3 --seeds 1 --most 3 --arms untrained ordinary ITD", "transfer_digits_20", transferred),
    "benchmarks.bilevel_suite": (
        "--seconds 0.05 --evaluations 2 --seeds 1 --methods aid --ratios 0.001 --steps 0.1",
        "bilevel_suite_digits_corruption0.5",
        suited,
    ),
    "benchmarks.conditioning": ("--kappa 3 --most 60", "conditioning", unreached),
    "benchmarks.contextual": (
        "--part end-to-end time --seeds 1 --budget 500 --levels 2 --tasks 1 2 --repeats 1",
        "contextual",
        timed_contexts,
    ),
    "benchmarks.many_tasks": ("--part both --tasks 20 40 --steps 3 --held 5", "many_tasks", rows_grow),
    "benchmarks.lower_rates": ("--problems representation --methods AID --steps 3", "lower_rates", more_rates_work),
    "benchmarks.hard_cases": ("--cases bfloat16 --methods AID PZOBO", "hard_cases", verdicts_of_bfloat16),
    "benchmarks.difference_steps": (
        "--losses softmax --precisions float32",
        "difference_steps",
        near_the_best_step,
    ),
    "benchmarks.peers": (
        "--peers bilevel_optim,_ITD bilevel_optim,_solve --problems quadratic constrained sparse",
        "peers",
        right_hypergradients,
    ),
    "benchmarks.layers": ("--repeats 1", "layers", rounding_alone),
    "benchmarks.data_facts": ("", "data_facts", constant_pixels),
    "benchmarks.warm_starts": (
        "--conditions 1e4 --products 5 --drifts 1e-9 --in-runs 5 --systems 40_rows,_200_unknowns,_condition_1e4",
        "warm_starts",
        restarts_are_slow,
    ),
    "benchmarks.step_parts": ("--methods soba --steps 2 --calls 1 --backend eager", None, None),
    "benchmarks.step_path": ("", None, None),
    "benchmarks.linear_systems": ("--systems ranking_with_a_bias", "linear_systems", no_silent_solve),
    "benchmarks.copies": ("--batches 2 --orders 2 --repeats 1", None, None),
    "benchmarks.divergence": ("--cases quartic --methods SOBA AID --rates 1e-12 1 --steps 21", None, None),
    "benchmarks.directions": ("--directions 2 --width 20", None, None),
    "benchmarks.speed": (
        "--problems logistic --methods soba f2sa --entries eager --inner 1 --rounds 1",
        "speed",
        timed_eagerly,
    ),
    "benchmarks.ranks": (
        "--ranks 1 --cases soba rows-split --examples 8 --width 4 --tasks 8 --repeats 1",
        "ranks",
        exchanged,
    ),
    "benchmarks.overhead": ("--n 40 --steps 2 --repeats 1", None, None),
    "benchmarks.suggest": ("--cases quartic --methods SOBA --steps 3 --max-seconds 1", None, None),
    "benchmarks.paths": ("--directions 2 --chunk 2 --repeats 1", None, None),
}
PLAIN = (
    "black_box", "contextual", "conditioning", "data_facts", "difference_steps", "hard_cases", "layers",
    "linear_systems", "lower_rates", "many_tasks", "peers", "ranks", "transfer", "warm_starts",
)  # without a figure  # fmt: skip


def test_every_program_has_a_run():
    packages = {"recipes.": recipes, "recipes.benchmarks.": recipes.benchmarks}
    names = [prefix + m.name for prefix, p in packages.items() for m in pkgutil.iter_modules(p.__path__) if not m.ispkg]
    programs = {name.removeprefix("recipes.") for name in names if hasattr(importlib.import_module(name), "main")}
    assert programs == RUNS.keys() | {"benchmarks.derivatives"}  # its rows are in tests/test_derivatives.py


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, request):
    """Run a program in this process; return its result and its output."""
    small = {method: {key: values[:1] for key, values in grid.items()} for method, grid in conditioning.GRID.items()}
    monkeypatch.setattr(conditioning, "GRID", small)
    monkeypatch.setattr(many_tasks, "BETA", 0.5)
    monkeypatch.setattr(few_images, "MARKS", (20, 60))
    slow = request.config.getoption("--slow")
    monkeypatch.setattr(suspects, "MARKS", (150,) if slow else (60,))
    few = {
        name: (method, grid[:1] if name == "glc" and not slow else grid[-1:])
        for name, (method, grid) in audit_labels.METHODS.items()
    }
    monkeypatch.setattr(audit_labels, "METHODS", few)

    def call(name, arguments, out=tmp_path, pictures=False):
        module = importlib.import_module(f"recipes.{name}")
        if not pictures and hasattr(module, "plot"):  # a second each
            monkeypatch.setattr(module, "plot", lambda *_, **__: None)
        given = [
            a.replace("_", " ") if a.startswith(("gda", "ranking", "40")) else a.replace(",_", ", ")
            for a in arguments.split()
        ]

        def alone(_, *inner):  # instead of in a process of its own
            module.main([*map(str, inner)])
            return json.loads(capsys.readouterr().out.splitlines()[-1])

        if hasattr(module, "alone"):
            monkeypatch.setattr(module, "alone", alone)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            warnings.filterwarnings("ignore", "We've integrated functorch", FutureWarning)  # TorchOpt, if it is there
            numbers = module.main([*given, *([] if out is None else ["--out", str(out)])])
        return numbers, capsys.readouterr()

    return call


# Programs that other tests run too (audits, searches without time, jobs), or whose parts they test (kernels), and
# programs of which the test expects lines alone.
LONG = ("audit_labels", "hanging_net", "length_scales", "three_jobs", "tolls")
LONG += ("benchmarks.paths", "benchmarks.step_parts", "benchmarks.step_path", "benchmarks.bilevel_suite")
# Tables of a study each, like those of the benchmarks that run, and a study of saddle points, like that of the papers.
LONG += tuple(
    f"benchmarks.{name}"
    for name in ("contextual", "copies", "difference_steps", "linear_systems", "lower_rates", "many_tasks", "suggest")
)
LONG += ("benchmarks.warm_starts", "saddle_escape")
# What replaces their arguments without --slow.
SHORTER = {
    "hyper_cleaning": "--steps 8 --optimizer aid f2sa",
    "learn_to_regularize": "--steps 6 --optimizer rahgd aid-nesterov ba f2sa-2 first-order",
    "meta_classification": "--steps 6 --tasks 2 --levels 2 --optimizer rt-mlmc maml",
    "transfer": "--steps 1 --seeds 1 --most 3 --cases wrong --arms untrained ITD --labels 10 20",
    "newsvendor": "--steps 12 --levels 2 --price 10 --test-points 1000 --optimizer erm rt-mlmc wdro",
    "hyper_representation": "--steps 18 --seeds 2 --optimizer aid-fp pzobo-code",
}


@pytest.mark.usually(*(RUNS.keys() - set(LONG)))
@pytest.mark.parametrize("name", RUNS)
def test_program(name, run, tmp_path, request, monkeypatch):
    arguments, stem, check = RUNS[name]
    if not request.config.getoption("--slow"):
        arguments = SHORTER.get(name, arguments)
        monkeypatch.setattr(few_images, "MARKS", (20,))
    numbers, printed = run(name, arguments, None if stem is None else tmp_path, pictures=True)
    assert len(printed.out.splitlines()) > 3
    assert printed.err == ""  # no progress bar where there is no terminal
    if stem is None:
        return
    assert json.loads((tmp_path / f"{stem}.json").read_text()) == json.loads(json.dumps(numbers))
    assert {"arguments", "environment"} < numbers.keys()
    if name.removeprefix("benchmarks.") not in PLAIN:
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    check(numbers)


def test_whitened_means_are_linear_discriminants():
    """Times the covariance within classes they are the centred means, but for one factor."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(10).repeat_interleave(30)
    features = torch.randn(300, 4, generator=generator) @ torch.randn(4, 4, generator=generator) + labels.unsqueeze(1)
    data = Part(features, labels)
    images = few_images.whitened(data, features[:10], torch.arange(10), generator, shrinkage=0.0)
    means = torch.stack([features[labels == c].mean(0) for c in range(10)])
    within = torch.cov((features - means[labels]).T)
    ratio = images @ within / (means - means.mean(0))
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_hyper_cleaning_with_momentum_and_perturbations(run):
    names = ["ba", "paid", "rahgd", "prahgd"]
    numbers, _ = run("hyper_cleaning", f"--steps 6 --optimizer {' '.join(names)}")
    for name in names:
        assert numbers["results"][name]["recall"] > 0.6
    lower = {name: numbers["results"][name]["oracle_calls"]["lower_grad"] for name in names}
    assert lower["paid"] == lower["rahgd"] == lower["prahgd"] == 6 * 21
    assert lower["ba"] > 6 * 21


def test_first_order_control_learns_nothing(run):
    numbers, _ = run("hyper_cleaning", "--steps 2 --optimizer first-order")
    assert numbers["results"]["first-order"]["recall"] == 0


@pytest.mark.parametrize("problem", ["regularisation", "cleaning"])
def test_compare_on_digits(run, problem):
    numbers, _ = run("compare", f"--budget 200 --problem {problem} --methods aid --grid 30 --evaluations 2 --seeds 1")
    result = numbers["results"]["aid"]
    assert result["curve"][-1]["value"] < result["curve"][1]["value"] < result["curve"][0]["value"]
    assert result["accuracy"] > 0.7


def test_many_lower_problems(run, tmp_path):
    numbers, _ = run(
        "hyper_regularization",
        "--tasks 5 --samples 30000 --lr 10 --lower-lr 0.5 --evaluations 2 --seeds 1 --optimizer aid saba rsvrb-free",
    )
    (result,) = numbers["results"]["aid"]
    assert result["solved"] < numbers["equal_weights"] - 0.005
    assert result["samples"] == 5 * 32 * result["steps"] * 12
    (result,) = numbers["results"]["rsvrb-free"]
    assert result["samples"] == 5 * 32 * result["steps"] * 2
    assert (tmp_path / "hyper_regularization_breast_cancer_5.json").exists()


def test_saturated_demand(run):
    numbers, printed = run(
        "newsvendor", "--steps 2 --price 10 --test-points 500 --optimizer erm dl-sgd aid --literal-init --levels 1"
    )
    assert numbers["demand"]["mean"] > 9.99
    assert numbers["demand"]["std"] < 1e-3
    assert "mean 10.000" in printed.out


def test_bilevel_suite_resumes(run, tmp_path):
    arguments = "--seconds 0.3 --evaluations 2 --seeds 2 --problem quadratics --examples 500 --dims 8 3 --ratios 3"
    first, _ = run("benchmarks.bilevel_suite", f"{arguments} --methods aid --steps 0.1")
    assert first["new_runs"] == 2
    # One step of the other size is enough to see that it diverges: a busy machine makes few in the time.
    again, _ = run("benchmarks.bilevel_suite", f"{arguments} --methods aid f2sa-1 --steps 0.1 1e200")
    assert again["new_runs"] == 1 + 3  # the other step size of aid; both of f2sa, and its second seed
    assert again["best"]["aid"] == first["best"]["aid"]
    (records,) = tmp_path.glob("*.records.jsonl")
    assert len(records.read_text().splitlines()) == 6
    assert any(json.loads(line)["result"]["diverged"] for line in records.read_text().splitlines())
    assert first["best"]["aid"][0]["value"] < first["start"]


def test_captured_steps_in_the_recipes(run, monkeypatch):
    """The same results, by the graphs themselves; a suite's run starts its clock when they are made."""
    captured = []

    def compile(optimizer, **options):
        captured.append(optimizer)
        function(optimizer, backend="eager", **options)

    function = bo.BilevelOptimizer.compile
    monkeypatch.setattr(bo.BilevelOptimizer, "compile", compile)
    (eager, _), (again, _) = (
        run("hyper_cleaning", f"--steps 3 --lower-steps 2 --optimizer aid {flag}") for flag in ("", "--compile")
    )
    assert len(captured) == captured[0].captured_graphs == 1
    found, known = (numbers["results"]["aid"] for numbers in (again, eager))
    assert [p["loss"] for p in found["curve"]] == pytest.approx([p["loss"] for p in known["curve"]], rel=1e-4)
    arguments = "--seconds 0.05 --evaluations 2 --seeds 1 --problem quadratics --examples 500 --dims 8 3 --ratios 3"
    numbers, _ = run("benchmarks.bilevel_suite", f"{arguments} --methods soba --steps 0.1 --compile")
    assert captured[-1].captured_graphs == 1
    assert numbers["best"]["soba"][0]["compile_fallback"] is None


@pytest.mark.slow
def test_golden_trajectories_of_the_linear_representation(run):
    """T25 of the PZOBO specification, to step 10: deterministic methods within 1 %, random ones in their order."""
    names = ["itd", "aid-fp", "first-order", "pzobo-code", "pzobo-16", "pzobo"]
    numbers, _ = run("hyper_representation", f"--data linear --steps 11 --optimizer {' '.join(names)}")
    losses = {name: {p["step"] - 1: p["loss"] for p in result["curve"]} for name, result in numbers["results"].items()}
    for name in names[:3]:
        reference = hyper_representation.REFERENCE[name]
        assert [losses[name][0], losses[name][10]] == pytest.approx(reference[:2], rel=0.01)
    assert losses["itd"][0] == pytest.approx(508.638, abs=1e-3)
    assert losses["pzobo-code"][10] == pytest.approx(losses["first-order"][10], rel=0.1)
    # One direction alone may be lucky: of 508.6 the references leave 102 with 16 directions, and 268 with one.
    assert losses["itd"][10] < losses["pzobo-16"][10] / 3 < losses["pzobo-16"][0] / 9
    assert losses["pzobo"][10] < losses["pzobo"][0]


def test_conditioning_counts_oracle_calls():
    setting = {"lr": 1.0, "lower_steps": 10, "linear_steps": 10}
    spent = conditioning.calls(conditioning.quadratic, 10.0, "AID", setting, 5000)
    assert 500 < spent < 5000
    assert conditioning.calls(conditioning.quadratic, 10.0, "AID", setting, 100) == math.inf
    for make in (conditioning.quadratic, conditioning.quartic):
        problem = make(10.0)
        before = problem.gradient()
        optimizer = bo.AID(
            [problem.x], [problem.y], lr=0.0, lower_lr=1 / problem.lower_smoothness, lower_steps=400, linear_steps=30
        )
        optimizer.backward(problem.upper, problem.lower)
        torch.testing.assert_close(problem.x.grad, before)


def test_every_level_has_its_state():
    states = contextual.states_by_level(3)
    problem = contextual.classifiers(tasks=2, rows=3, features=4)
    optimizer = contextual.method(problem, bo.RTMLMC, 3, 1)
    for level, state in states.items():
        assert len(contextual.seconds(problem, optimizer, 1, state)) == 1
        assert optimizer.diagnostics["level_counts"].argmax() == level


def test_entries_of_the_overhead_benchmark_agree(monkeypatch):
    monkeypatch.setattr(overhead, "RIDGE", 1.0)  # positive definite on few examples too
    unrolled = ["unrolled: hand-written", "unrolled: bilevel_optim ITD", "unrolled: bilevel_optim ITD checkpoint"]
    implicit = ["implicit: hand-written", "implicit: bilevel_optim AID"]
    first_order = ["first order: hand-written", "first order: bilevel_optim F2SA"]
    for names, steps in ((unrolled, 3), (implicit, 5), (first_order, 3)):
        first, *others = [overhead.measure(name, 60, steps, "cpu")["norm"] for name in names]
        assert others == pytest.approx([first] * len(others), rel=1e-3)


# ------------------------------------------------------------------------------------------------------- data on disk


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
def test_newsgroups_are_read_split_and_stripped(tmp_path, how, run):
    write_posts(tmp_path, how)
    train, val, test = load_newsgroups(tmp_path, download=False, keep=False, seed=0)
    assert [len(p.labels) for p in (train, val, test)] == [12, 12, 6]
    assert train.labels.bincount().tolist() == val.labels.bincount().tolist() == [4, 4, 4]
    assert train.features.shape[1] == 9 + 2  # without "from", "host" and the groups' names
    kept, _, _ = load_newsgroups(tmp_path, download=False, keep=True, seed=0)
    assert kept.features.shape[1] == 9 + 2 + 5
    norms = train.features.matrix.to_dense().norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(12))
    if how == "lines":
        numbers, _ = run(
            "learn_to_regularize",
            f"--data 20newsgroups --data-root {tmp_path} --steps 3 --optimizer rahgd itd f2sa-2 --lr 1",
        )
        for result in numbers["results"].values():
            assert result["accuracy"] == 1
            assert result["vectorize_fallback"] is None


def test_sparse_features_are_differentiated_as_dense_ones():
    dense = torch.rand(6, 9) * (torch.rand(6, 9) < 0.4)
    sparse = SparseFeatures(dense.to_sparse_coo().coalesce())
    assert sparse.largest_singular_value(200) == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-4)
    assert sparse[:] is sparse
    W, V = torch.rand(9, 3, requires_grad=True), torch.rand(9, 3)
    found = []
    for features in (sparse, dense):
        (gradient,) = torch.autograd.grad((features @ W).tanh().square().sum(), W, create_graph=True)
        (product,) = torch.autograd.grad(gradient, W, V)
        stacked = torch.func.vmap(torch.func.grad(lambda w, f=features: (f @ w).tanh().square().sum()))(
            torch.stack([W.detach(), V])
        )
        found.append((gradient.detach(), product, stacked))
    torch.testing.assert_close(*found)


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


def test_mnist_files_are_read(tmp_path, monkeypatch, run):
    mnist_files(tmp_path)
    monkeypatch.setitem(hyper_cleaning.SETTINGS["mnist"], "sizes", (80, 40))
    arguments = f"--data mnist --data-root {tmp_path}"
    numbers, _ = run("hyper_cleaning", f"{arguments} --steps 2 --optimizer aid --corruption 0.25")
    assert numbers["results"]["aid"]["oracle_calls"]["lower_grad"] == 2 * 11
    numbers, _ = run("hyper_representation", f"{arguments} --sizes 300 300 --steps 1 --optimizer first-order")
    assert numbers["results"]["first-order"]["oracle_calls"]["lower_grad"] == 10


def test_folders_of_images_are_read(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)

    def images(folder, count, size):
        folder.mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{i}.png")

    for names in SUPERCLASSES.values():
        for name in names.split():
            images(tmp_path / "cifar" / "data" / name, 5, (32, 32, 3))
    for alphabet in ("Greek", "Latin"):
        for i in range(11):
            images(tmp_path / "omniglot-py" / "images_background" / alphabet / f"character{i:02}", 10, (30, 30))
    shares, generator = (0.6, 0.2, 0.2), torch.Generator().manual_seed(0)
    support, query, test = load_tasks("cifar_fs", tmp_path / "cifar", 3, shares, generator)
    shapes = [tuple(part.features.shape) for part in (support, query, test)]
    assert shapes == [(3, 30, 512), (3, 10, 512), (3, 10, 512)]
    assert support.labels[0].bincount().tolist() == [3] * 10
    support, *_ = load_tasks("omniglot", tmp_path, 2, shares, generator)
    assert support.features.shape == (2, 60, 512)
    torch.testing.assert_close(support.features.norm(dim=-1), torch.full((2, 60), 5.0))
    with pytest.raises(SystemExit, match="found 2 groups of ten characters"):
        load_tasks("omniglot", tmp_path, 3, shares, generator)
    with pytest.raises(SystemExit, match="no folder of PNG files for 100 classes"):
        load_tasks("cifar_fs", tmp_path / "omniglot-py", 3, shares, generator)


def test_no_image_that_tests_a_task_of_digits_trains_another(monkeypatch):
    """Tasks share the images of a digit: the rows of support, query and test must not."""
    import sklearn.datasets

    from recipes.problems.tasks import _digits

    bunch = sklearn.datasets.load_digits()
    bunch.images = np.ones((1, 8, 8)) * 16 * np.arange(len(bunch.target))[:, None, None]  # each shows its own number
    monkeypatch.setattr(sklearn.datasets, "load_digits", lambda: bunch)
    images = _digits(20, torch.Generator().manual_seed(0))[:, :, :, 0, 3:5, 3:5].mean((-1, -2)).round().long()
    rows = [{*images[:, :, row].flatten().tolist()} for row in range(60)]
    assert sum(map(len, rows)) == len(set().union(*rows)) > 1500


def scalar(shape, classes):
    """A model of one's own, for ``--model``."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), classes))


@pytest.mark.usually("glc")
@pytest.mark.parametrize("method", ["glc", "weights"])
def test_an_audit_of_images_of_your_own(method, tmp_path, run):
    from PIL import Image

    rng = np.random.default_rng(0)
    for folder, count in (("photos", 40), ("checked", 8)):
        for name, light in (("day", 150), ("night", 0)):
            (tmp_path / folder / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(light, light + 100, (9, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / folder / name / f"{i}.png")
    wrong = tmp_path / "photos" / "day" / "wrong.png"
    Image.fromarray(np.zeros((9, 12, 3), dtype=np.uint8)).save(wrong)
    own = f"--images {tmp_path / 'photos'} --trusted {tmp_path / 'checked'} --size 8 --steps 60"
    numbers, printed = run("audit_labels", f"{own} --methods {method} --model tests.test_recipes:scalar")
    assert numbers["results"]["none"][method]["trusted accuracy"] == [1]
    assert f"audit_labels_photos_none_{method}.csv" in printed.out
    with (tmp_path / f"audit_labels_photos_none_{method}.csv").open() as file:
        first, *others = csv.DictReader(file)
    assert (first["where"], first["label"], first["guess"]) == (str(wrong), "day", "night")
    assert len(others) == 80
    assert (tmp_path / "audit_labels_photos.png").exists()
    (tmp_path / "checked" / "dusk").mkdir()
    (tmp_path / "checked" / "dusk" / "0.png").write_bytes(wrong.read_bytes())
    with pytest.raises(SystemExit, match="classes that the untrusted rows lack: dusk"):
        run("audit_labels", own)
    with pytest.raises(SystemExit, match="need --trusted"):
        run("audit_labels", f"--images {tmp_path / 'photos'}")


def test_images_of_an_audit_stay_with_their_files_and_labels(tmp_path, monkeypatch):
    """In folders of other sizes, and in the list and the picture, which begin with the worst."""
    from contextlib import contextmanager

    from matplotlib.figure import Figure
    from PIL import Image

    for folder, counts in (("all", (3, 2)), ("checked", (1, 2)), ("later", (2, 1))):
        for start, (name, count) in zip((20, 120), zip(("day", "night"), counts, strict=True), strict=True):
            (tmp_path / folder / name).mkdir(parents=True)
            for i in range(count):
                Image.new("L", (4, 4), start + 10 * i).save(tmp_path / folder / name / f"{i}.png")
    data = suspects.images(tmp_path / "all", tmp_path / "checked", tmp_path / "later", 4)
    light = torch.tensor([20.0, 30, 40, 120, 130])
    for part, pixels, labels in (
        (data.rows, light, [0, 0, 0, 1, 1]),
        (data.trusted, torch.tensor([20.0, 120, 130]), [0, 1, 1]),
        (data.test, torch.tensor([20.0, 30, 120]), [0, 0, 1]),
    ):
        found = part.features.flatten(1)
        close = (pixels - light.mean()) / light.repeat_interleave(3 * 16).std()
        torch.testing.assert_close(found, close[:, None].expand_as(found), rtol=1e-4, atol=1e-5)
        assert part.labels.tolist() == labels
    assert [Path(file).relative_to(tmp_path / "all").as_posix() for file in data.where] == [
        "day/0.png", "day/1.png", "day/2.png", "night/0.png", "night/1.png",
    ]  # fmt: skip
    seen = suspects.Rows(data.rows, data.trusted, None, 2, 0)
    worst = suspects.listed(torch.tensor([0.1, 0.5, 0.2, 0.9, 0.3]), torch.tensor([1, 1, 1, 0, 0]), seen, data)
    assert [row[0] for row in worst] == [3, 1, 4, 2, 0]
    assert [[Path(row[1]).name, *row[2:]] for row in worst[:2]] == [
        ["0.png", "night", pytest.approx(0.9), "day"], ["1.png", "day", pytest.approx(0.5), "night"],
    ]  # fmt: skip
    canvas = Figure()

    @contextmanager
    def figure(*_):
        yield canvas

    monkeypatch.setattr(suspects, "figure", figure)
    marked = data._replace(rows=Part(data.rows.features.clone(), data.rows.labels))
    marked.rows.features[:, :, 0, 0] += torch.arange(1.0, 6)[:, None]  # one pixel apart, to know an image by
    marked.rows.features[3, :, 0, 1] += 2.0
    suspects.picture(tmp_path / "none", "", {"none": {"glc": {"accuracy": 1.0}}}, worst, marked)
    shown = [axis for axis in canvas.subfigs[1].axes if axis.images]
    assert [axis.get_title() for axis in shown[:2]] == ["night: day?", "day: night?"]
    assert [float(axis.images[0].get_array()[0, 1].max()) > 0.2 for axis in shown] == [True, *[False] * 4]


def test_an_audit_of_a_table_of_your_own(tmp_path, run):
    rng = np.random.default_rng(0)
    for name, count in (("all", 60), ("checked", 12), ("later", 12)):
        lines = ["height,colour,id,kind"]
        for i in range(count):
            kind = ("cat", "dog")[i % 2]
            shown = "dog" if (name, i) == ("all", 4) else kind
            lines.append(f"{rng.normal(i % 2):.3f},{('black', 'brown')[i % 2]},no {i},{shown}")
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    own = f"--table {tmp_path}/all.csv --trusted {tmp_path}/checked.csv --test {tmp_path}/later.csv"
    numbers, printed = run("audit_labels", f"{own} --label kind --steps 30 --methods small-loss weights")
    assert "Column id is left out" in printed.out
    assert numbers["results"]["none"]["weights"]["own accuracy"] == [1]
    with (tmp_path / "audit_labels_all_none_weights.csv").open() as file:
        first = next(csv.DictReader(file))
    assert (first["where"], first["label"], first["guess"]) == (f"{tmp_path}/all.csv:6", "dog", "cat")
    numbers, _ = run("audit_labels", f"{own} --label kind --methods glc confident --noise random --seeds 1 --share 0.2")
    for method in ("glc", "confident"):
        assert numbers["results"]["random"][method]["average precision"][0] > 0.9
    with pytest.raises(SystemExit, match="no column label: height, colour, id, kind"):
        run("audit_labels", own)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (hyper_cleaning, "--data mnist", "needs --data-root"),
        (hyper_cleaning, "--data mnist --data-root /nonexistent", "--download"),
        (learn_to_regularize, "--data 20newsgroups", "needs --data-root"),
        (learn_to_regularize, "--data 20newsgroups --data-root EMPTY", "--download"),
        (meta_classification, "--data omniglot", "needs --data-root"),
    ],
)
def test_missing_data_says_what_to_do(program, arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        program.main(arguments.replace("EMPTY", str(tmp_path)).split())


# ---------------------------------------------------------------------------------------------------- shared code


@pytest.mark.slow
def test_the_readme_says_what_its_command_prints(run):
    numbers, _ = run("three_jobs", "")
    said = re.findall(r"It prints [^[]*", (Path(__file__).parents[1] / "README.md").read_text())
    for text, curves in zip(said, numbers["results"].values(), strict=True):
        ends = [point["accuracy"] for curve in curves.values() for point in (curve[0], curve[-1])]
        for number in map(float, re.findall(r"0\.\d\d\d", text)):
            assert min(abs(number - end) for end in ends) <= 0.02, text


@pytest.mark.parametrize("name", RUNS)
def test_help_of_every_program(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"recipes.{name}").main(["--help"])
    first = importlib.import_module(f"recipes.{name}").__doc__.split("\n")[0]
    assert "".join(first.split()) in "".join(capsys.readouterr().out.split())


OTHERS = ("data_mixing.__main__", "data_mixing.cost", "few_shot.__main__", "few_shot.compare", "few_shot.benchmark")
OTHERS += ("few_shot.tables", "papers.__main__")


def arguments_of(name, monkeypatch):
    """The arguments that a program takes; it does not run."""
    seen = []

    def parse(parser, _):
        seen.append(parser)
        raise SystemExit

    monkeypatch.setattr(Parser, "parse", parse)
    with pytest.raises(SystemExit):
        importlib.import_module(f"recipes.{name}").main([])
    return [action for action in seen[0]._actions if action.type is not None]


@pytest.mark.parametrize("name", [*RUNS, *OTHERS])
def test_no_program_takes_a_number_that_is_none(name, monkeypatch):
    found = arguments_of(name, monkeypatch)
    assert not [action.dest for action in found if action.type in (int, float)], "these types take any number"
    for action in found:
        if isinstance(action.type, type) or action.dest == "device":  # texts and paths
            continue
        for text in ("inf", "nan", "-1", "9" * 400, "many"):  # the fourth is too large for a float
            with pytest.raises(argparse.ArgumentTypeError, match=rf"^invalid value: {text} \(must be a .*\)$"):
                action.type(text)


ODD = {
    "newsvendor": [
        "--lr inf", "--lr 0", "--shift nan", "--shift -1", "--seed 99999999999999999999", "--seed -1", "--levels 40"
    ],
    "hanging_net": ["--rate inf", "--side 2", "--seconds nan", "--seed 99999999999999999999", "--threads 100000"],
    "tolls": ["--seed 99999999999999999999", "--seconds 0"],
    "compare": ["--grid inf 3", "--budget inf"],
    "few_shot.__main__": ["--lr inf", "--way 1", "--size 1", "--steps 2 --seconds 3"],
    "few_shot.compare": ["--limit nan", "--steps 2 --seconds 3"],
    "few_shot.benchmark": ["--way 1", "--size 15"],
    "meta_classification": ["--levels 13"],
    "data_mixing.__main__": ["--steps 20", "--length 2", "--grid nan 0.5", "--seed -1"],
    "length_scales": ["--lr inf", "--extra -1", "--rows 1"],
    "hyper_regularization": ["--samples 0", "--data-seed -1"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), [(name, bad) for name, several in ODD.items() for bad in several])
def test_odd_values_are_refused_at_once(name, arguments, capsys, tmp_path):
    out = [] if name == "few_shot.benchmark" else ["--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"recipes.{name}").main([*arguments.split(), *out])
    flag, value, *_ = arguments.split()
    message = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"argument {flag}: invalid value: {value} \((must be|not together with) .*\)$", message)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_takes_no_files_is_refused_before_the_run(capsys, tmp_path, monkeypatch):
    (tmp_path / "taken" / "saddle_escape.json").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    cases = {
        "taken": r"saddle_escape\.json in it must be a file",
        "file/x": "Not a directory",
        "nowhere": "No such file",
    }
    if sys.platform == "linux":
        cases["/proc/x"] = "nothing can be written to /proc"  # though its owner may
    monkeypatch.setattr(saddle_escape, "run", None)
    for out, message in cases.items():
        with pytest.raises(SystemExit, match="2"):
            saddle_escape.main(["--out", str(tmp_path / out)])
        found = capsys.readouterr().err.splitlines()[-1]
        assert re.search(rf"argument --out: invalid value: {tmp_path / out} \(.*{message}.*\)$", found)
    before = sorted(tmp_path.rglob("*"))
    made = Parser("", seed=True)
    assert made.parse(["--out", str(tmp_path / "new" / "newer")]).out == tmp_path / "new" / "newer"
    assert sorted(tmp_path.rglob("*")) == before, "the check leaves nothing behind"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").write_text("")
    with pytest.raises(SystemExit, match="2"):
        Parser("").parse([])  # the default is tried too
    assert "argument --out: invalid value: results" in capsys.readouterr().err


def test_records_hold_no_folders_of_the_machine(tmp_path):
    args = argparse.Namespace(data_root=tmp_path / "mnist", out=Path("docs/records"), labels=10)
    save(args, tmp_path / "record", {"results": {}})
    text = (tmp_path / "record.json").read_text()
    assert json.loads(text)["arguments"] == {"data_root": "mnist", "out": "docs/records", "labels": 10}
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("name", "arguments"), [("hanging_net", "--side 3 --seeds 1"), ("tolls", "--sizes tiny --seeds 1")]
)
def test_a_search_without_time_reports_its_start(name, arguments, run, tmp_path):
    module = importlib.import_module(f"recipes.{name}")
    methods = [m for m in module.METHODS if m != "CMA-ES"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        found = module.main([*arguments.split(), "--seconds", "1e-9", "--out", str(tmp_path), "--methods", *methods])
    results = found["results"] if name == "hanging_net" else found["results"]["tiny"]
    start = (found["start"]["measured on the target"] if name == "hanging_net"
             else results["marginal cost, best factor"]["gain"])  # fmt: skip
    for method in methods:
        assert results[method]["error" if name == "hanging_net" else "gain"] == pytest.approx(start, rel=1e-6)


BAD = ["--corruption 1.5", "--steps 0", "--optimizer newton", "--lr -1", "--device gpu", f"--out {__file__}/x"]


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        hyper_cleaning.main([*arguments.split(), *([] if "--steps" in arguments else ["--steps", "1"])])
    assert arguments.split()[0] in capsys.readouterr().err


def test_arguments_follow_from_their_defaults(capsys):
    def parser():
        made = Parser("What it is.\nMore.", seed=True)
        made.data(("small", "large"))
        made.settings("data", {"small": {"steps": 3}, "large": {"steps": 30}}, steps="steps, 10%")
        made.option("grid", [0.1, 1.0], "rates")
        return made

    assert parser().parse([]).steps == 3
    args = parser().parse(["--data", "large", "--grid", "2"])
    assert (args.steps, args.grid, args.seed, args.threads) == (30, [2.0], 0, None)
    assert parser().parse(["--data", "large", "--steps", "7"]).steps == 7
    for bad in (["--grid", "0"], ["--steps", "1.5"]):
        with pytest.raises(SystemExit):
            parser().parse(bad)
    with pytest.raises(SystemExit):
        parser().parse(["--help"])
    assert "steps, 10%; default: 3 (small), 30 (large)" in " ".join(capsys.readouterr().out.split())


def test_progress_shows_on_a_terminal_only(capsys, monkeypatch):
    assert list(progress(range(3), "loop")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    list(progress(range(3), "loop"))
    assert "loop" in capsys.readouterr().err


def test_measured_after_the_first_every_few_and_the_last_step():
    seen = []
    curve = train(lambda: 7, lambda k, r: seen.append((k, r)) or {"loss": k}, steps=6, label="", every=3, first=True)
    assert seen == [(0, None), (1, 7), (4, 7), (6, 7)]
    assert [p["step"] for p in curve] == [0, 1, 4, 6]


def test_values_that_are_not_finite_end_a_run():
    def step():
        taken.append(1)
        if len(taken) == 3:
            raise bo.NonFiniteError("upper loss", 2)

    taken = []
    curve = train(step, lambda k, r: {"loss": 1.0}, steps=9, label="")
    assert [p["step"] for p in curve] == [1, 2, 3]
    assert math.isnan(curve[-1]["loss"])
    taken = [1, 1]
    with pytest.raises(bo.NonFiniteError):
        train(step, lambda k, r: {"loss": 1.0}, steps=9, label="")
    taken.clear()
    found = spend(
        step, lambda: {"value": 1.0, "other": None}, budget=9, spent=lambda _: len(taken), evaluations=3,
        judged=("value", "other"),
    )  # fmt: skip
    assert (found["diverged"], found["value"], found["other"], found["steps"]) == (True, math.inf, None, 1)


def test_a_budget_is_spent_and_measured_more_densely_at_first():
    taken = []
    found = spend(
        lambda: taken.extend([1] * 3), lambda: {"value": len(taken)}, budget=16, spent=lambda _: len(taken),
        evaluations=4, judged=("value",),
    )  # fmt: skip
    assert [p["value"] for p in found["curve"]] == [0, 3, 6, 9, 15]  # at 0, 1, 4, 9 and within 16
    assert (found["diverged"], found["value"], found["steps"]) == (False, 15, 5)
    taken.clear()
    found = spend(
        lambda: taken.extend([1] * 10), lambda: {"value": len(taken)}, budget=16, spent=lambda _: len(taken),
        evaluations=4, judged=(),
    )  # fmt: skip
    assert [p["value"] for p in found["curve"]] == [0, 10, 10, 10, 10]


def test_the_best_of_a_grid_gets_the_other_seeds():
    def one(name, rate, seed):
        return {"rate": rate, "seed": seed, "score": math.inf if name == "b" else abs(rate - 2) + seed, "count": seed}

    found = tuned(["a", "b"], [1, 2, 3], one, "score", seeds=3)
    tried, best = found["a"]
    assert [r["score"] for r in tried] == [1, 0, 1]
    assert [(r["rate"], r["seed"]) for r in best] == [(2, 0), (2, 1), (2, 2)]
    medians = summary({name: runs for name, (_, runs) in found.items()}, "score", "count")
    assert [*medians] == ["a", "b"]
    assert medians["a"] == {"score": 1, "count": 1, "range": 2}
    assert medians["b"]["range"] is None


def test_rows_tell_losses_from_evaluations_of_losses():
    results = {"a": {"loss": 0.5, "oracle_calls": {"upper_grad": 1, "loss": 7}}, "b": {"loss": 2.0}}
    assert rows(results, "loss", calls=5) == [["a", 0.5, 1, None, None, None, 7], ["b", 2.0, *[None] * 5]]


def test_table():
    text = table(["a", "bb"], [["x", 1.23456], ["long", None], ["n", 12345.6]])
    assert text.splitlines() == ["a        bb", "----  -----", "x     1.235", "long      -", "n     12346"]


def test_a_process_of_its_own(tmp_path, monkeypatch):
    from recipes.common import alone

    (tmp_path / "measured.py").write_text(
        "import json, sys\n"
        "if 'fail' in sys.argv: raise SystemExit('no luck')\n"
        "print('text')\n"
        "print(json.dumps(sys.argv[1:]))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert alone("measured", "--n", 3) == ["--n", "3"]
    assert alone("measured", "fail") == "no luck"


def test_scales_of_kernels_have_the_right_hypergradient():
    """At Newton's solutions, compared with finite differences of the upper loss."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    machine = kernel_machine.Machine(X, X[:, 0].sign(), kernel_machine.start(X))
    x = [machine.scales, machine.rho]
    options = {"lower_steps": 0, "lower_lr": 1.0, "lower_solver": machine.solve}
    optimizer = bo.AID(x, machine.alpha, lr=1.0, linear_solver="direct", **options)
    optimizer.backward(machine.upper, machine.lower)
    for p in x:
        found = torch.zeros_like(p)
        for i in range(p.numel()):
            ends = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    p.view(-1)[i] += step
                    machine.solve()
                    ends.append(float(machine.upper()))
                    p.view(-1)[i] -= step
            found.view(-1)[i] = (ends[0] - ends[1]) / 2e-5
        torch.testing.assert_close(p.grad, found, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 8))])
def test_length_scales_is_an_estimator_of_scikit_learn(part):
    """In each part, every eighth check of scikit-learn."""
    from sklearn.utils.estimator_checks import estimator_checks_generator

    checks = [*estimator_checks_generator(length_scales.LengthScales(steps=1))]
    assert len(checks) > 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of data with columns that are constant, and the like
        for estimator, check in checks[part::8]:
            check(estimator)


def test_a_walk_counts_a_context_once():
    """A profile sees each entry of a generator: once when it begins, and again when its block ends."""
    calls = step_path.walk(step_path.step_of("AID"))
    assert [count for (_, name, _), count in calls.items() if name == "Oracle.lower_system"] == [1]
