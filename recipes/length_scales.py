r"""A kernel machine that ignores irrelevant columns: one length scale for each column, learned on two folds.

.. math::
    \min_{s, \rho} \sum_{k=1}^2 \mathrm{loss}(K_{-k,k}\, \alpha_k^*), \qquad
    \alpha_k^* = \arg\min_\alpha \mathrm{loss}(K_{k,k}\, \alpha) + \tfrac{e^\rho}{2} \alpha^T K_{k,k}\, \alpha, \qquad
    K_{ij} = \exp\Bigl(-\tfrac12 \sum_c e^{2 s_c} (X_{ic} - X_{jc})^2\Bigr)

The loss is logistic. Newton's method finds both :math:`\alpha`, `AID` computes the hypergradient in all scales, and
Adam steps along it. `LengthScales` is a scikit-learn classifier: it learns the scales, then fits an SVM to the scaled
columns, with C and the kernel width by cross-validation.

    python -m recipes.length_scales                                     # digits, odd or even, with 40 columns of noise
    python -m recipes.length_scales --data ijcnn1 --data-root DIR --extra 40 0 150 --seeds 3

Irrelevant columns are real ones with shuffled rows; scores are those of balanced test rows. Controls: `direct`, which
treats the solutions as constants; TPE (if Optuna is installed); an SVM, L1 logistic regression, extra trees, boosting,
an SVM on the trees' importances, five networks; all but the trees are tuned by cross-validation. Rates (of each method)
and steps of Adam were chosen with ``--validate`` on other splits of ijcnn1, and serve for digits too.

It does not win: plain autograd (`ridge`) finds scales as good or better with the squared loss, in closed form.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.svm import SVC
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

import bilevel_optim as bo

from .common import Parser, figure, interval, progress, save, show, whole
from .problems.irrelevant import CONTROLS, DATA, OTHERS, load
from .problems.kernel_machine import Machine, start


def learned_scales(X: Tensor, sign: Tensor, steps: int, lr: float) -> Tensor:
    """Learn the logarithms of the scales by the hypergradient of `AID`."""
    machine = Machine(X, sign, start(X))
    options: dict[str, Any] = {"lower_steps": 0, "lower_lr": 1.0, "lower_solver": machine.solve}
    x = [machine.scales, machine.rho]
    optimizer = bo.AID(x, machine.alpha, lr=1.0, linear_steps=30, damping=1e-6, **options)
    adam = torch.optim.Adam(x, lr=lr)
    for _ in range(steps):
        optimizer.backward(machine.upper, machine.lower)
        adam.step()
    return machine.scales.detach()


SEARCHES = {"AID": learned_scales, **OTHERS}
RATES = {"direct": 0.02}  # the others: 0.05


class LengthScales(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Scikit-learn classifier for two classes: an SVM on columns with learned scales.

    Args:
        steps: steps of Adam.
        lr: learning rate of Adam.
        how: ``"AID"``, ``"ridge"`` (the closed form), ``"direct"`` (without an indirect part) or ``"TPE"`` (Optuna).
    """

    def __init__(self, steps: int = 80, lr: float = 0.05, how: str = "AID") -> None:
        self.steps, self.lr, self.how = steps, lr, how

    def __sklearn_tags__(self) -> Any:
        """Return the tags of a classifier for two classes."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: Any) -> LengthScales:
        """Learn the scales, then the SVM."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes, counts = np.unique(y, return_inverse=True, return_counts=True)
        if len(self.classes_) != 2:
            kind = "one class" if len(self.classes_) < 2 else "multiclass"
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        self.mean_, self.std_ = X.mean(0), np.maximum(X.std(0), 1e-9)
        rows, sign = torch.tensor((X - self.mean_) / self.std_), torch.tensor(2.0 * codes - 1)
        self.scales_ = SEARCHES[self.how](rows, sign, self.steps, self.lr).exp().numpy()
        grid = {"C": [1, 10, 100, 1000], "gamma": [0.1, 0.3, 0.5, 1, 2]}
        folds = min(5, int(counts.min()))
        svm = GridSearchCV(SVC(), grid, cv=folds, scoring="roc_auc") if folds > 1 else SVC()
        self.svm_ = svm.fit(rows.numpy() * self.scales_, y)
        return self

    def decision_function(self, X: Any) -> Any:
        """Return scores, above zero for the second class."""
        check_is_fitted(self)
        rows = (validate_data(self, X, reset=False, dtype=np.float64) - self.mean_) / self.std_
        return self.svm_.decision_function(rows * self.scales_)

    def predict(self, X: Any) -> Any:
        """Return the class of each row."""
        above = self.decision_function(X) > 0
        return self.classes_[above.astype(int)]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Print the tables and draw the picture."""
    parser, names = Parser(__doc__, seed=True, threads=1), [*SEARCHES, *CONTROLS]
    parser.data(DATA, download=False)
    parser.option("extra", [0, 40], "irrelevant columns", type=whole(0))
    parser.option("rows", 1200, "maximal number of training rows", type=whole(20))
    parser.option("seeds", 1, "number of splits")
    parser.option("steps", 80, "steps of Adam")
    parser.option("lr", None, "learning rate of Adam", type=float, shown="0.05, for direct 0.02")
    parser.methods(names, [n for n in names if n != "TPE" or importlib.util.find_spec("optuna")], "--methods")
    parser.add_argument("--validate", action="store_true", help="score on a third of the training rows instead")
    args = parser.parse(arguments)
    results: dict[str, dict[str, list[list[float]]]] = {}
    for extra in args.extra:
        arms = results[str(extra)] = {name: [] for name in args.methods}
        for seed in range(args.seed, args.seed + args.seeds):
            X, y, T, t = load(args.data, args.data_root, args.rows, extra, seed)
            if args.validate:
                X, T, y, t = train_test_split(X, y, test_size=1 / 3, random_state=0, stratify=y)
            for name in progress(args.methods, f"{extra} columns"):
                begun, lr = time.process_time(), args.lr or RATES.get(name, 0.05)
                model = LengthScales(args.steps, lr, name) if name in SEARCHES else CONTROLS[name](seed)
                model.fit(X, y)
                seconds = time.process_time() - begun
                score = model.predict_proba(T)[:, 1] if name == "trees" else model.decision_function(T)
                arms[name].append([float(roc_auc_score(t, score)), float((model.predict(T) == t).mean()), seconds])
        title = f"{args.data}, {len(y)} rows, {X.shape[1]} columns, {extra} of them irrelevant"
        rows = [[name, *(interval(k) for k in zip(*runs, strict=True))] for name, runs in arms.items()]
        show(title, ["method", "AUC", "accuracy", "seconds"], rows)
    stem = args.out / f"length_scales_{args.data}"
    with figure(stem, f"{args.data}: accuracy (splits: {args.seeds})", (8, 4.5)) as canvas:
        axis, places = canvas.subplots(), sorted(args.extra)
        for name in args.methods:
            means = [np.mean(results[str(extra)][name], axis=0)[1] for extra in places]
            axis.plot(places, means, "o-" if name in SEARCHES else "s--", label=name, lw=3 if name == "AID" else 1.5)
        axis.set(xlabel="irrelevant columns", ylabel="accuracy", xticks=places)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="solid: learns scales")
    return save(args, stem, {"results": results})


if __name__ == "__main__":
    main()
