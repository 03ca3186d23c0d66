r"""Meta-learn a centre of linear classifiers: 20 tasks of 10 classes on 512 fixed features.

.. math::
    \min_x\ E_i\, \ell_i(y_i^*(x); D_i^{\text{query}}), \qquad
    y_i^*(x) = \arg\min_y\ \ell_i(y; D_i^{\text{support}}) + \tfrac\lambda2 \|y - x\|^2, \qquad \lambda = 2

with the softmax loss of a linear classifier. Every method sees the same two losses; RT-MLMC and DL-SGD solve a new
lower problem to a given accuracy, MAML takes a few steps and differentiates through them.

    python -m recipes.meta_classification                                             # scikit-learn's digits
    python -m recipes.meta_classification --data cifar_fs --data-root DIR             # superclasses of CIFAR-100
    python -m recipes.meta_classification --data omniglot --data-root DIR             # alphabets

Shape of the problem: arXiv:2310.18535, section 4.1 (tiny-ImageNet on a pre-trained network there). The features here
come from a small network with fixed random weights, so that nothing has to be downloaded; such features limit the
accuracy. A task turns 60 of about 180 images of each digit by its own angle; an image that tests one task trains no
other. Only the digits have the same classes in all tasks; in the other data sets classes share only their numbers, so
that a common centre lowers the loss (lambda keeps the scores small) but costs accuracy. The learning rate
of x is lr / sqrt(t); with the default, 200 updates are far from enough, see ``--lr 10``. rt-mlmc has evenly spread
levels, lower steps of at most 1/L, and all terms of the Neumann series; the paper's version has independent levels, no
such cap and one random term.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import bilevel_optim as bo

from .common import CALLS, Parser, plot, rows, save, show, train, whole
from .common.seeds import stream
from .problems.problem import Part
from .problems.tasks import CLASSES, LAMBDA, Centre, load_tasks

CURVATURE, ROWS = 12.5 + LAMBDA, 8  # features have norm 5: softmax curvature at most 12.5
SOLVE: dict[str, Any] = {"lower_lr": 1 / CURVATURE, "lower_steps": 20}
LEVELS: dict[str, Any] = {"lower_lr": 1 / LAMBDA, "neumann_steps": 10}
METHODS: dict[str, tuple[type[bo.BilevelOptimizer], dict[str, Any]]] = {
    "rt-mlmc": (bo.RTMLMC, LEVELS),
    "dl-sgd": (bo.DLSGD, LEVELS),
    "aid": (bo.AID, {**SOLVE, "linear_steps": 10}),
    "imaml": (bo.iMAML, {**SOLVE, "linear_steps": 10}),
    "maml": (bo.MAML, {"lower_steps": 1}),
    "maml-8": (bo.MAML, {"lower_steps": 8}),
    "fomaml": (bo.FOMAML, {"lower_steps": 8}),
    "first-order": (bo.FirstOrder, SOLVE),
}


@torch.no_grad()
def evaluate(problem: Centre, test: Part, steps: int = 100, rate: float = 1 / CURVATURE) -> tuple[float, float]:
    """Return test loss and accuracy after ``steps`` full-batch steps of adaptation, mean over all tasks."""
    inputs, labels = problem.support
    y, one_hot = problem.x.expand(len(inputs), -1, -1).clone(), F.one_hot(labels, CLASSES).float()
    for _ in range(steps):
        residual = (inputs @ y).softmax(-1) - one_hot
        y -= rate * (inputs.mT @ residual / residual.shape[1] + LAMBDA * (y - problem.x))
    scores = test.features @ y
    loss = F.cross_entropy(scores.flatten(0, 1), test.labels.flatten())
    return float(loss), float((scores.argmax(-1) == test.labels).float().mean())


def learn(problem: Centre, test: Part, name: str, args: Any) -> dict[str, Any]:
    """Learn the centre with one method and plain gradient steps on x."""
    with torch.no_grad():
        problem.x.zero_()
        problem.y.zero_()
    kind, options = METHODS[name]
    adapted = name in ("maml", "maml-8", "fomaml")  # these adapt by a few steps; the others solve the lower problem
    options = {"lower_lr": args.adapt_lr, **options} if adapted else {"lower_init": problem.starts, **options}
    if options.get("neumann_steps"):
        options["levels"] = args.levels
    optimizer = kind(
        [problem.x], [problem.y], lr=args.lr, tasks_per_step=args.tasks_per_step, lower_batch=args.rows,
        upper_batch=4 * args.rows, generator=stream(args.seed, "method"), **options,
    )  # fmt: skip
    if args.compile:
        optimizer.compile()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: (t + 1) ** -0.5, lambda t: 1.0])

    def step() -> None:
        optimizer.step(problem.upper, problem.lower, tasks=problem.tasks)
        scheduler.step()

    how = (options["lower_steps"], args.adapt_lr) if adapted else ()
    curve = train(
        step, lambda k, _: dict(zip(("loss", "accuracy"), evaluate(problem, test, *how), strict=True)),
        steps=args.steps, label=name, every=max(args.steps // 20, 1),
    )  # fmt: skip
    exact_loss, exact_accuracy = evaluate(problem, test)
    return {
        "loss": curve[-1]["loss"],
        "accuracy": curve[-1]["accuracy"],
        "exact_loss": exact_loss,
        "exact_accuracy": exact_accuracy,
        "milliseconds_per_step": 1e3 * curve[-1]["seconds"] / args.steps,
        "oracle_calls": optimizer.oracle_counts,
        "curve": curve,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True, compiled=True)
    parser.data(("digits", "cifar_fs", "omniglot"), download=False)
    parser.methods(METHODS, [*METHODS][:7])
    parser.option("steps", 200, "updates of the centre")
    parser.option("lr", 1.0, "learning rate of x, divided by the root of the step")
    parser.option("levels", 6, "K of RT-MLMC and DL-SGD, which makes about 2^K lower steps", type=whole(1, 12))
    parser.option("tasks", 20, "number of tasks")
    parser.option("tasks_per_step", 4, "tasks per step")
    parser.option("rows", ROWS, "rows per lower batch")
    parser.option("adapt_lr", 0.1, "learning rate of MAML's adaptation")
    args = parser.parse(arguments)
    generator = stream(args.seed, "data")
    support, query, test = load_tasks(args.data, args.data_root, args.tasks, (0.6, 0.2, 0.2), generator)
    problem = Centre(support, query)
    start = evaluate(problem, test)
    results = {name: learn(problem, test, name, args) for name in args.optimizer}

    figures = ("loss", "accuracy", "exact_loss", "exact_accuracy", "milliseconds_per_step")
    zero: list[object] = ["centre zero", None, None, *start, *[None] * 5]
    size = f"{args.tasks} tasks of {CLASSES} classes, {support.labels.shape[1]} support rows"
    title = f"Meta-learning a centre, {args.data}, {size}, {args.steps} updates"
    header = ("", "test loss", "accuracy", "loss, exact", "accuracy", "ms/step", *[*CALLS.values()][:4])
    show(f"{title}\nadapted by the method's own steps, and exactly", header, [zero, *rows(results, *figures, calls=4)])
    stem = args.out / f"meta_classification_{args.data}"
    axis = {"ylabel": "test loss after adaptation", "yscale": "log"}
    panels = [("step", "loss", {**axis, "xlabel": "updates"}), ("seconds", "loss", {**axis, "xscale": "log"})]
    plot(stem, title, {name: r["curve"] for name, r in results.items()}, panels)
    centre = {"exact_loss": start[0], "exact_accuracy": start[1]}
    return save(args, stem, {"centre_zero": centre, "results": results})


if __name__ == "__main__":
    main()
