"""Tables with irrelevant columns, and classifiers to compare with `recipes.length_scales`."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn

from ..common.seeds import begin, stream
from .kernel_machine import Machine, kernel, start
from .libsvm import load_libsvm

__all__ = ["CONTROLS", "DATA", "OTHERS", "load"]

DATA = ("digits", "ijcnn1")
TESTED = 8000  # rows of ijcnn1


def _balanced(labels: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Return row numbers with equal counts of each class, in random order."""
    found = [torch.nonzero(labels == value).flatten() for value in torch.unique(labels)]
    rows = torch.cat([r[torch.randperm(len(r), generator=generator)[: n // len(found)]] for r in found])
    return rows[torch.randperm(len(rows), generator=generator)]


def load(name: str, root: Path | None, rows: int, extra: int, seed: int) -> tuple[Any, Any, Any, Any]:
    """Return training rows and labels, test rows and labels, of two classes; ``extra`` columns are shuffled copies.

    ``"digits"``: odd or even; at most half of the rows are for training. ``"ijcnn1"``: see `load_libsvm`.
    """
    generator = stream(seed, "data")
    if name == "digits":
        digits = load_digits()
        features, labels = torch.tensor(digits.data), torch.tensor(digits.target % 2)
        order = _balanced(labels, len(labels), generator)
        split = min(rows, len(order) // 2)
        parts = [(features[part], labels[part]) for part in (order[:split], order[split:])]
    else:
        parts = []
        for part, n in zip(load_libsvm(name, root, False), (rows, TESTED), strict=True):
            chosen = _balanced(part.labels, n, generator)
            parts.append((part.features[chosen].to_dense().double(), part.labels[chosen]))
    columns = torch.randint(parts[0][0].shape[1], (extra,), generator=generator).tolist()
    found: list[Any] = []
    for X, y in parts:
        noise = [X[torch.randperm(len(X), generator=generator), c] for c in columns]
        found += [torch.cat([X, torch.stack(noise, 1)], 1).numpy() if noise else X.numpy(), y.numpy()]
    return found[0], found[1], found[2], found[3]


def ridge_scales(X: Tensor, sign: Tensor, steps: int, lr: float) -> Tensor:
    """Learn the logarithms of scales without the library: kernel ridge regression, solved inside the graph."""
    scales, rho = start(X).requires_grad_(), X.new_tensor(-2.0).requires_grad_()
    adam, even = torch.optim.Adam([scales, rho], lr=lr), torch.arange(len(X)) % 2 == 0
    for _ in range(steps):
        adam.zero_grad()
        K, losses = kernel(X, X, scales), []
        for fold in (even, ~even):
            own = K[fold][:, fold]
            alpha = torch.linalg.solve(own + rho.exp() * torch.eye(len(own), dtype=X.dtype), sign[fold])
            losses.append((K[~fold][:, fold] @ alpha - sign[~fold]).square().mean())
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
    return scales.detach()


def direct_scales(X: Tensor, sign: Tensor, steps: int, lr: float) -> Tensor:
    """Learn the logarithms of the scales by gradients that treat the solutions as constants."""
    machine = Machine(X, sign, start(X))
    adam = torch.optim.Adam([machine.scales], lr=lr)
    for _ in range(steps):
        machine.solve()
        adam.zero_grad()
        machine.upper().backward(inputs=[machine.scales])  # type: ignore[no-untyped-call]
        adam.step()
    return machine.scales.detach()


def searched_scales(X: Tensor, sign: Tensor, steps: int, lr: float) -> Tensor:
    """Search the logarithms of the scales by TPE (needs `optuna`), from equal ones, by the upper loss of `AID`.

    For 1,200 rows it has a third of a processor second for each step, which is more than `AID` needs.
    """
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    first, until = start(X), time.process_time() + steps / 3 * (len(X) / 1200) ** 2
    names, machine = [f"s{c}" for c in range(X.shape[1])], Machine(X, sign, first)
    centre = float(first[0])

    def point(trial: Any) -> list[float]:
        return [trial.suggest_float(name, centre - 3, centre + 3) for name in names]

    def value(trial: Any) -> float:
        machine.scales.data.copy_(X.new_tensor(point(trial)))
        machine.rho.data.fill_(trial.suggest_float("rho", -8, 0))
        machine.solve()
        return float(machine.upper().detach())

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.enqueue_trial({**dict.fromkeys(names, centre), "rho": -4.0})
    study.optimize(value, callbacks=[lambda study, _: study.stop() if time.process_time() > until else None])
    return X.new_tensor([study.best_params[name] for name in names])


OTHERS = {"ridge": ridge_scales, "direct": direct_scales, "TPE": searched_scales}


@lru_cache(8)
def _importances(rows: bytes, columns: int, labels: bytes) -> Any:
    """Return the importances of the columns for extra trees; the grid asks for each several times."""
    X = np.frombuffer(rows).reshape(-1, columns)
    return ExtraTreesClassifier(300, random_state=0).fit(X, np.frombuffer(labels, np.int64)).feature_importances_


class Weighted(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """SVM on columns scaled by a power of the importances of extra trees."""

    def __init__(self, power: float = 1.0, C: float = 1.0, gamma: float = 1.0) -> None:
        self.power, self.C, self.gamma = power, C, gamma

    def fit(self, X: Any, y: Any) -> Weighted:
        """Fit the trees, then the SVM."""
        importances = _importances(X.astype(float).tobytes(), X.shape[1], y.astype(np.int64).tobytes())
        self.scale_ = importances**self.power / max((importances**self.power).max(), 1e-12)
        self.classes_, self.svm_ = np.unique(y), SVC(C=self.C, gamma=self.gamma).fit(X * self.scale_, y)
        return self

    def predict(self, X: Any) -> Any:
        """Return the class of each row."""
        return self.svm_.predict(X * self.scale_)

    def decision_function(self, X: Any) -> Any:
        """Return scores, above zero for the second class."""
        return self.svm_.decision_function(X * self.scale_)


class Gated(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Mean of networks with two hidden layers; each column has a gate with an L1 penalty."""

    def __init__(self, penalty: float = 1e-3, networks: int = 1, epochs: int = 200, seed: int = 0) -> None:
        self.penalty, self.networks, self.epochs, self.seed = penalty, networks, epochs, seed

    def fit(self, X: Any, y: Any) -> Gated:
        """Fit the networks by Adam with batches of 128."""
        self.classes_, codes = np.unique(y, return_inverse=True)
        rows, targets, self.nets_ = torch.tensor(X).float(), torch.tensor(codes).float(), []
        for k in range(self.networks):
            with torch.random.fork_rng():
                begin(1000 * self.seed + k, "weights")
                gate = nn.Parameter(torch.ones(rows.shape[1]))
                net = nn.Sequential(
                    nn.Linear(rows.shape[1], 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
                )
                adam = torch.optim.Adam([gate, *net.parameters()], lr=3e-3)
                for _ in range(self.epochs):
                    for batch in torch.split(torch.randperm(len(rows)), 128):
                        adam.zero_grad()
                        logits = net(rows[batch] * gate).squeeze(1)
                        loss = nn.functional.binary_cross_entropy_with_logits(logits, targets[batch])
                        (loss + self.penalty * gate.abs().sum()).backward()  # type: ignore[no-untyped-call]
                        adam.step()
            self.nets_.append((gate.detach(), net))
        return self

    @torch.no_grad()
    def decision_function(self, X: Any) -> Any:
        """Return scores, above zero for the second class."""
        rows = torch.tensor(X).float()
        return torch.stack([net(rows * gate).squeeze(1) for gate, net in self.nets_]).mean(0).numpy()

    def predict(self, X: Any) -> Any:
        """Return the class of each row."""
        return self.classes_[(self.decision_function(X) > 0).astype(int)]


def _searched(model: Any, grid: Mapping[str, Any], cv: Any = 5, scoring: str = "roc_auc") -> Any:
    """Return a model that standardises columns and takes the best of a grid by cross-validation."""
    return make_pipeline(StandardScaler(), GridSearchCV(model, grid, cv=cv, scoring=scoring))


ONCE = StratifiedShuffleSplit(1, test_size=1 / 3, random_state=0)
WIDTHS = {"C": [1, 10, 100, 1000], "gamma": [0.001, 0.003, 0.01, 0.03, 0.1]}
CONTROLS: dict[str, Callable[[int], Any]] = {
    "SVM": lambda seed: _searched(SVC(), WIDTHS),
    "L1": lambda seed: _searched(
        LogisticRegression(solver="liblinear", l1_ratio=1.0), {"C": [0.003, 0.01, 0.03, 0.1, 0.3, 1, 10]}
    ),
    "trees": lambda seed: ExtraTreesClassifier(500, random_state=seed),
    "boosting": lambda seed: _searched(
        HistGradientBoostingClassifier(random_state=seed),
        {"learning_rate": [0.05, 0.1, 0.2], "max_iter": [100, 300], "max_leaf_nodes": [7, 31]}, 3,
    ),
    "importances": lambda seed: _searched(
        Weighted(), {"power": [0.5, 1.0], "C": [1, 10, 100], "gamma": [0.01, 0.03, 0.1, 0.3, 1, 3, 10]}, 3,
        "accuracy",  # very narrow kernels rank well, but predict one class
    ),
    "networks": lambda seed: _searched(
        Gated(networks=5, seed=seed), {"penalty": [1e-3, 3e-3, 1e-2]}, ONCE
    ),
}  # fmt: skip
