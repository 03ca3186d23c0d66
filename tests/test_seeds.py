"""Random streams of the recipes: no learner starts with the answer, and its seed does not change the data."""

import ast
import importlib
import inspect
import warnings
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import recipes
from recipes.common import seeds
from recipes.papers.catalogue import EXPERIMENTS
from recipes.papers.experiment import Trial
from recipes.papers.runner import middle

FOLDER = Path(recipes.__file__).parent
OF_DATA = ("data", "labels", "features", "power iteration")
RANDOM = ("rand", "uniform", "normal", "bernoulli", "multinomial", "exponential", "geometric")
RECIPES = {  # short runs of the programs that train something on random data or from a random start
    "black_box": "--tolls 3 --budget 12 --seeds 1 --methods PZOBO",
    "compare": "--problem quadratic --budget 40 --methods pzobo-1 --grid 0.1 --seeds 1",
    "hyper_cleaning": "--steps 1 --optimizer prahgd",
    "hyper_regularization": "--samples 700 --lr 10 --lower-lr 0.5 --evaluations 1 --seeds 1 --optimizer svrb",
    "hyper_representation": "--steps 1 --optimizer pzobo",
    "learn_to_regularize": "--steps 1 --optimizer prahgd",
    "meta_classification": "--steps 1 --tasks 3 --levels 2 --optimizer rt-mlmc",
    "newsvendor": "--steps 1 --price 10 --test-points 500 --optimizer rt-mlmc",
    "saddle_escape": "--seeds 1 --steps 2 --optimizer pragda",
    "benchmarks.bilevel_suite": "--seconds 0.01 --evaluations 1 --seeds 1 --methods pzobo-1 --ratios 1 --steps 0.1",
}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


class Draws(TorchDispatchMode):
    """Draws by stream, and the starts of optimizers."""

    def __init__(self, monkeypatch, salt=0):
        super().__init__()
        self.names, self.drawn, self.starts, self.owners = {}, [], [], {}
        add = torch.optim.Optimizer.add_param_group

        def derived(seed, name):
            found = known(seed if name in OF_DATA else seed + salt, name)
            self.names[found] = name
            return found

        def add_param_group(optimizer, group):
            add(optimizer, group)
            if optimizer.param_groups[-1].get("level") != "lower":
                self.starts += [(t, t.detach().clone()) for t in optimizer.param_groups[-1]["params"]]

        known = seeds.derived
        monkeypatch.setattr(seeds, "derived", derived)
        monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", add_param_group)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if any(word in name for word in RANDOM) and isinstance(found, torch.Tensor):
            given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Generator)]
            generator = given[0] if given else torch.default_generator
            self.owners.setdefault(generator.initial_seed(), {})[id(generator)] = generator  # kept alive
            self.drawn.append((generator.initial_seed(), found, found.detach().clone().flatten().double()))
        return found

    def of_data(self):
        return [values for seed, _, values in self.drawn if self.names.get(seed) in OF_DATA]

    def leaks(self):
        """Starts that are like what made the data, and seeds that torch's own generator shares with another."""
        both = {
            seed for seed, owners in self.owners.items() if id(torch.default_generator) in owners and len(owners) > 1
        }
        found = [self.names.get(seed, seed) for seed in both]
        for live, start in self.starts:
            values = start.flatten().double()
            if values.numel() < 30 or not values.std() > 0:
                continue
            for seed, drawn, truth in self.drawn:
                n = min(len(values), len(truth))
                if self.names.get(seed) not in OF_DATA or n < 30 or drawn.data_ptr() == live.data_ptr():
                    continue
                alike = torch.corrcoef(torch.stack([values[:n], truth[:n]]))[0, 1].abs()
                if alike > max(0.3, 5 / n**0.5):
                    found.append(f"a start of {tuple(start.shape)} is that of the data: correlation {alike:.2f}")
        return found


def record_draws(monkeypatch, act, salt=0):
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = Draws(patched, salt)
        with draws:
            act()
    return draws


def checked(monkeypatch, act):
    draws = record_draws(monkeypatch, act)
    assert draws.leaks() == []
    other = record_draws(monkeypatch, act, salt=1)
    data, again = draws.of_data(), other.of_data()
    assert len(data) == len(again)
    assert all(torch.equal(a, b) for a, b in zip(data, again, strict=True))
    return draws, other


def function_of(experiment):
    return getattr(experiment.run, "func", experiment.run)


def one_run(experiment):
    """The start of the method that the claim is about, and a step of it."""
    name = experiment.rule.arms[0]
    arm, numbers = experiment.arms[name], experiment.scales["smoke"]
    few = {key: min(numbers[key], 10) for key in ("contexts", "repeats") if key in numbers}  # all drawn in one way
    scale = {**numbers, "evaluations": 1, **few}
    for other in EXPERIMENTS.values():  # make the data again
        for value in vars(inspect.getmodule(function_of(other))).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    trial = Trial(arm.make, middle(arm), 3, 1 if experiment.unit == "updates" else scale["budget"] / 1e3, scale, None)
    return experiment.run(trial)


DIFFERENT = {(function_of(e), e.scales["smoke"].get("data")): e.id for e in [*EXPERIMENTS.values()][::-1]}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", sorted(set(DIFFERENT.values())))
def test_no_experiment_starts_at_its_answer(name, monkeypatch):
    checked(monkeypatch, lambda: one_run(EXPERIMENTS[name]))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_starts_at_its_answer(name, monkeypatch, tmp_path, capsys):
    module = importlib.import_module(f"recipes.{name}")
    if hasattr(module, "plot"):
        monkeypatch.setattr(module, "plot", lambda *_, **__: None)
    count = iter(range(9))
    checked(monkeypatch, lambda: module.main([*RECIPES[name].split(), "--out", str(tmp_path / str(next(count)))]))


def test_a_leaked_start_is_found(monkeypatch):
    """The network of the rule drawn from the seed of the demand, as it once was."""
    experiment = EXPERIMENTS["004-newsvendor-30"]

    def act():
        derived = seeds.derived
        with monkeypatch.context() as leaky:
            leaky.setattr(seeds, "derived", lambda seed, name: derived(seed, "data" if name == "start" else name))
            one_run(experiment)

    found = record_draws(monkeypatch, act).leaks()
    assert any("correlation 1.00" in leak for leak in found)
    assert "data" in found


def test_seeds_of_streams():
    assert seeds.derived(7, "data") == 7
    found = [seeds.derived(s, n) for s in range(50) for n in ("data", "start", "method", "batches", "labels")]
    assert len({*found}) == 250
    assert all(0 <= seed < 2**63 for seed in found)
    draws = [torch.rand(2000, generator=seeds.stream(0, n)) for n in ("data", "start", "method", "batches")]
    for a, b in combinations(draws, 2):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.1
    seeds.begin(3, "start")
    assert torch.equal(torch.rand(5), torch.rand(5, generator=seeds.stream(3, "start")))


def test_all_seeds_are_derived_by_name():
    """No recipe seeds a generator by itself."""
    for path in FOLDER.rglob("*.py"):
        if path.name in ("seeds.py", "three_jobs.py"):  # the latter is the code that README shows
            continue
        called = [n.func.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)
                  and isinstance(n.func, ast.Attribute)]  # fmt: skip
        assert "manual_seed" not in called, path
        assert "seed" not in called, path
