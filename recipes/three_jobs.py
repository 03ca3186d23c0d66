"""The three jobs of the README, compared with what one would do otherwise: less than a minute.

    python -m recipes.three_jobs

1. A training loop with Adam and a scheduler becomes bilevel by two lines. Half of its 1,000 labels of digits are wrong:
   it learns a weight for each image from 100 trusted ones.
2. Features are learned so that a head trained on 20 labels does well (hyper-representation).
3. A convolutional network is meta-learned on episodes of five classes with one image each (ANIL).

Every arm has the same number of updates and one seed, and no learning rate is tuned: the table shows what the code of
the README does, and says nothing about which method is best. The pages that the README links to have comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bilevel_optim as bo

from .common import Parser, draw, figure, save, show, train
from .few_shot.backbones import cnn4
from .few_shot.data import load
from .few_shot.episodes import Batch, Episodes
from .few_shot.learners import make
from .few_shot.training import evaluate

Curve = list[dict[str, Any]]
LOOP, FEATURES, EPISODES = "1. a training loop", "2. features for 20 labels", "3. episodes of new classes"


def digits(*sizes: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return all images, their labels, and the row numbers of the parts."""
    torch.manual_seed(0)
    found = load_digits()
    images, truth = torch.tensor(found.data).float() / 16, torch.tensor(found.target)
    return images, truth, [*torch.split(torch.randperm(len(truth)), [*sizes])]


def loop(label: str, arm: str, steps: int) -> Curve:
    """Train a linear classifier on wrong labels: as they are, or corrected in one way of three."""
    images, truth, (known, trusted, test) = digits(1000, 100, 697)
    labels = torch.where(torch.rand(1000) < 0.5, (truth[known] + 1) % 10, truth[known])
    weights = torch.zeros(1000, requires_grad=True)
    model = nn.Linear(64, 10)

    def ridge() -> Tensor:
        return 1e-3 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    def train_loss() -> Tensor:
        ce = F.cross_entropy(model(images[known]), labels, reduction="none")
        return (weights.sigmoid() * ce).mean() + ridge()

    def trusted_loss() -> Tensor:
        return F.cross_entropy(model(images[trusted]), truth[trusted])

    def corrected_loss() -> Tensor:
        likely = (model(images[known]).softmax(1) @ matrix).clamp_min(1e-8)
        return (1000 * F.nll_loss(likely.log(), labels) + 100 * trusted_loss()) / 1100 + ridge()

    def fit(loss: Callable[[], Tensor]) -> Callable[[], None]:
        """Return a step of the loop as it was."""
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

        def step() -> None:
            optimizer.zero_grad()
            loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()

        return step

    def bilevel() -> Callable[[], None]:
        """Return a step of the loop with two other lines."""
        adam = torch.optim.Adam
        optimizer = bo.AID([weights], model.parameters(), lr=0.1, lower_steps=10, linear_steps=30, upper_optimizer=adam)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

        def step() -> None:
            optimizer.zero_grad()
            optimizer.backward(trusted_loss, train_loss)
            optimizer.step()
            scheduler.step()

        return step

    if arm == "matrix":  # how often each class gets each label, by a model of the wrong labels
        step = fit(train_loss)
        for _ in range(steps):
            step()
        with torch.no_grad():
            guessed = model(images[trusted]).softmax(1)
            matrix = torch.stack([guessed[truth[trusted] == c].mean(0) for c in range(10)])
            model.reset_parameters()
    losses = {"plain": train_loss, "trusted": lambda: trusted_loss() + ridge(), "matrix": corrected_loss}

    def measure(k: int, _: Any) -> dict[str, float]:
        return {"accuracy": float((model(images[test]).argmax(1) == truth[test]).float().mean())}

    step = bilevel() if arm == "bilevel" else fit(losses[arm])
    return train(step, measure, steps=steps, label=label, every=max(steps // 20, 1))


def features(label: str, arm: str, steps: int) -> Curve:
    """Learn features, for a head trained on 20 labels or by ordinary training with a head of their own."""
    images, truth, (inner, outer, test) = digits(20, 1000, 777)
    body = nn.Sequential(nn.Linear(64, 32), nn.Tanh())
    head = nn.Linear(32, 10)

    def head_loss() -> Tensor:
        return F.cross_entropy(head(body(images[inner])), truth[inner]) + 5e-3 * head.weight.square().sum()

    def outer_loss() -> Tensor:
        return F.cross_entropy(head(body(images[outer])), truth[outer])

    def step() -> None:
        adam.zero_grad()
        if arm == "bilevel":
            optimizer.backward(outer_loss, head_loss)
        else:
            loss = outer_loss() + head_loss() if arm == "both sets, one loss" else outer_loss()
            loss.backward()  # type: ignore[no-untyped-call]
        adam.step()

    def measure(k: int, _: Any) -> dict[str, float]:
        """Return the accuracy of a head trained on the 20 labels; the head of an ordinary training goes on after it."""
        own = [p.detach().clone() for p in head.parameters()]
        if arm != "bilevel":
            optimizer.backward(outer_loss, head_loss)
        accuracy = float((head(body(images[test])).argmax(1) == truth[test]).float().mean())
        if arm != "bilevel":
            with torch.no_grad():
                for p, value in zip(head.parameters(), own, strict=True):
                    p.copy_(value)
        return {"accuracy": accuracy}

    optimizer = bo.ITD(body.parameters(), head.parameters(), lr=1.0, lower_lr=0.5, lower_steps=30, warm_start=False)
    learned = body.parameters() if arm == "bilevel" else [*body.parameters(), *head.parameters()]
    adam = torch.optim.Adam(learned, lr=0.01)
    return train(step, measure, steps=steps, label=label, every=max(steps // 10, 1))


def episodes(label: str, arm: str, steps: int) -> Curve:
    """Meta-train on episodes of digits, by ANIL or with prototypes."""
    torch.manual_seed(0)
    images = load("digits", None, Path())
    shown, unseen = (Episodes(images, split, way=5, shot=1, query=5) for split in ("train", "test"))
    body, head = cnn4(1, 16), nn.Linear(32, 5)
    start = [p.detach().clone().requires_grad_() for p in head.parameters()]

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(head(part[0]), part[1])

    objective = bo.Objective(loss, features=lambda batch: (body(batch.images), batch.labels))
    learned = [*body.parameters(), *start]
    anil = bo.ANIL(learned, head.parameters(), lr=1.0, lower_lr=0.1, lower_steps=5, tasks_per_step=4)
    metric = make("protonet", body, 5, tasks=4, seed=0) if arm == "prototypes" else None
    adam = torch.optim.Adam(learned, lr=3e-3)

    def step() -> None:
        if metric is None:
            anil.backward(objective, objective, tasks=shown)
        else:
            metric.backward(shown)
        adam.step()

    def measure(k: int, _: Any) -> dict[str, float]:
        if metric is not None:
            return {"accuracy": float(evaluate(metric, unseen, 100, 0).mean())}
        hits = []
        for support, query in unseen.fixed(100, 0, 1):
            anil.adapt(objective, Batch(support.images[0], support.labels[0]), write=True)
            with torch.no_grad():
                hits.append((head(body(query.images[0])).argmax(1) == query.labels[0]).float().mean())
        anil.load_start()
        return {"accuracy": float(torch.stack(hits).mean())}

    return train(step, measure, steps=steps, label=label, every=max(steps // 2, 1), first=True)


# The function of each job, its updates, and names of its arms; "bilevel" is the code of the README.
JOBS: dict[str, tuple[Callable[[str, str, int], Curve], int, dict[str, str]]] = {
    LOOP: (loop, 200, {
        "plain": "the loop as it was: all labels count",
        "trusted": "the loop on 100 trusted labels alone",
        "matrix": "noise matrix from the trusted (GLC)",
        "bilevel": "bilevel: weights learned from the trusted",
    }),
    FEATURES: (features, 150, {
        "ordinary": "features trained with a head of their own",
        "both sets, one loss": "one loss over all labels",
        "bilevel": "bilevel: trained for heads of 20 labels",
    }),
    EPISODES: (episodes, 150, {
        "prototypes": "prototypes: no inner loop",
        "bilevel": "bilevel: ANIL",
    }),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the program; return the numbers that it writes."""
    parser = Parser(__doc__, threads=1)
    parser.option("updates", None, "updates of each arm", type=int, shown="those of the README")
    args = parser.parse(arguments)
    print("Three jobs, compared with what one would do otherwise: less than a minute.", flush=True)
    results = {
        job: {text: run(text, arm, args.updates or steps) for arm, text in arms.items()}
        for job, (run, steps, arms) in JOBS.items()
    }
    rows = [
        [job if i == 0 else "", name, curve[-1]["accuracy"], curve[-1]["step"], curve[-1]["seconds"]]
        for job, curves in results.items()
        for i, (name, curve) in enumerate(curves.items())
    ]
    show("Accuracy on test images (1, 2), on new classes (3)", ("", "", "accuracy", "updates", "seconds"), rows)
    stem = args.out / "three_jobs"
    with figure(stem, "Test accuracy while training", (13.5, 3.6)) as canvas:
        axes: Any = canvas.subplots(1, 3)
        for axis, (job, curves) in zip(axes, results.items(), strict=True):
            draw(axis, curves, "step", "accuracy", title=job, xlabel="updates", ylabel="test accuracy")
            axis.legend(fontsize="small")
    return save(args, stem, {"results": results})


if __name__ == "__main__":
    main()
