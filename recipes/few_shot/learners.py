"""Meta-learners with one interface: bilevel optimizers on a head or all parameters, and two without a lower loop.

All of them see episodes of the same classes. `Learner.backward` sets ``.grad`` of the meta-learned parameters, for use
by any ``torch.optim`` optimizer; `Learner.scores` adapts to the support of unseen classes and scores their query.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from ..common.seeds import stream
from .backbones import Body
from .episodes import Batch, Episodes

__all__ = ["LEARNERS", "Adapting", "HeadAdapting", "Learner", "Metric", "Reptile", "make"]


def _apart(batch: Batch) -> Iterator[Batch]:
    """Yield the batch of each task."""
    for i, images in enumerate(batch.images):
        yield Batch(images, batch.labels[i], None if batch.known is None else batch.known[i])


class Learner(ABC):
    """Meta-learner of a body.

    Args:
        body: the backbone.
        way: classes per episode.
        tasks: episodes per meta-step.
        generator: source of all randomness in training.
        autocast: evaluate the body in bfloat16.

    Attributes:
        network: all learned parameters, including the start of adaptation.
        upper: the tensors that the outer optimizer updates.
    """

    def __init__(self, body: Body, way: int, *, tasks: int, generator: torch.Generator, autocast: bool = False) -> None:
        self.body, self.way, self.tasks, self.generator, self.autocast = body, way, tasks, generator, autocast
        self.device = next(body.parameters()).device
        self.network = nn.ModuleDict({"body": body})
        body.layout = torch.channels_last
        self.upper: list[Tensor] = []

    @abstractmethod
    def backward(self, episodes: Episodes) -> Tensor:
        """Draw the episodes of a meta-step and set ``.grad``; return the mean query loss."""

    @abstractmethod
    def scores(self, support: Batch, query: Batch) -> Tensor:
        """Return scores (tasks, query images, way) of the query of each task, after adaptation to its support."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which training resumes."""
        return {"network": self.network.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        self.network.load_state_dict(state["network"])
        self.generator.set_state(state["generator"])

    def metrics(self) -> dict[str, float]:
        """Return figures of the last meta-step, besides its loss."""
        return {}

    def features(self, batch: Batch) -> Tensor:
        """Return the features of the images of one task."""
        with self._cast():
            return self.body(batch.images, batch.known).float() if self.autocast else self._plain(batch)

    def _plain(self, batch: Batch) -> Tensor:
        features: Tensor = self.body(batch.images, batch.known)
        return features

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def each_task(self, batch: Batch) -> Tensor:
        """Return the features of several tasks, each normalised separately."""
        return torch.stack([self.features(part) for part in _apart(batch)])

    def _head(self) -> nn.Linear:
        head = nn.Linear(self.body.width, self.way).to(self.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head


class Bilevel(Learner):
    """Learner whose gradient comes from a `BilevelOptimizer`, with episodes as its tasks."""

    optimizer: bo.BilevelOptimizer
    upper_loss: bo.Objective
    lower_loss: bo.Objective
    start: list[Tensor]  # start of adaptation

    def _optimizer(
        self,
        method: Callable[..., bo.BilevelOptimizer],
        lower: nn.Module,
        body: list[Tensor],
        *,
        momentum: float,
        initial: bool,
        **options: Any,
    ) -> None:
        if initial:
            self.network["start"] = nn.ParameterList([p.detach().clone() for p in lower.parameters()])
            self.start = [*self.network["start"].parameters()]
            self.upper = [*body, *self.start]
        else:
            self.start, self.upper = [*lower.parameters()], body
        self.optimizer = method(
            self.upper, lower.parameters(), lr=1.0, tasks_per_step=self.tasks, generator=self.generator,
            lower_optimizer=lambda groups: torch.optim.SGD(groups, momentum=momentum), **options,
        )  # fmt: skip

    def backward(self, episodes: Episodes) -> Tensor:
        return self.optimizer.backward(self.upper_loss, self.lower_loss, tasks=episodes)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])

    def metrics(self) -> dict[str, float]:
        return self.optimizer.metrics()


class _Part:
    """Features and labels of a batch, read by a head's loss; of one task or of several stacked tasks."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.learner.features(batch), batch.labels

    def stacked(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.learner.each_task(batch), batch.labels


class HeadAdapting(Bilevel):
    r"""Learner with the body as upper variable and a linear head as lower one, as in ANIL and PZOBO's experiments.

    .. math:: g_i(x, w) = \ell(w; \phi_x(S_i)) + \tfrac\rho2 \|w\|^2, \qquad f_i(x, w) = \ell(w; \phi_x(D_i))

    Features are computed once for each body and batch (``Objective(features=)``), so that lower steps evaluate only the
    head. The head starts at zero, later at the mean of the final heads of the last episodes; a method that learns its
    start uses that instead.

    Args:
        ridge: :math:`\rho`.
        momentum: momentum of the lower steps.
        initial: True if the method learns the start of the head.
        options: options of the optimizer.
        common: see `Learner`.
    """

    def __init__(
        self,
        body: Body,
        way: int,
        method: Callable[..., bo.BilevelOptimizer],
        *,
        ridge: float,
        momentum: float,
        initial: bool = False,
        options: dict[str, Any],
        **common: Any,
    ) -> None:
        super().__init__(body, way, **common)
        self.ridge, self.momentum, self.head = ridge, momentum, self._head()
        self.network["head"] = self.head
        self._optimizer(method, self.head, [*body.parameters()], momentum=momentum, initial=initial, **options)
        self.upper_loss = bo.Objective(self._query_loss, features=_Part(self))
        self.lower_loss = bo.Objective(self._support_loss, features=_Part(self))

    def _query_loss(self, part: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(part[0]), part[1])

    def _support_loss(self, part: tuple[Tensor, Tensor]) -> Tensor:
        loss = self._query_loss(part)
        if not self.ridge:
            return loss
        return loss + self.ridge / 2 * (self.head.weight.square().sum() + self.head.bias.square().sum())

    @torch.no_grad()
    def scores(self, support: Batch, query: Batch) -> Tensor:
        features, count = self.each_task(support), len(support.images)
        group = next(g for g in self.optimizer.param_groups if g["level"] == "lower")
        # All tasks at once, as `optimizer.adapt` adapts to one only.
        heads = [p.detach().expand(count, *p.shape).clone().requires_grad_() for p in self.start]
        weight, bias = heads
        steps = self.optimizer._lower_factory([{"params": heads, "lr": group["lr"]}])
        for _ in range(self.optimizer.lower_steps):
            with torch.enable_grad():
                scores = torch.baddbmm(bias.unsqueeze(1), features, weight.mT)
                fit = count * F.cross_entropy(scores.flatten(0, 1), support.labels.flatten())
                loss = fit + self.ridge / 2 * (weight.square().sum() + bias.square().sum())
            for head, gradient in zip(heads, torch.autograd.grad(loss, heads), strict=True):
                head.grad = gradient
            steps.step()
        return torch.baddbmm(bias.unsqueeze(1), self.each_task(query), weight.mT)


class Adapting(Bilevel):
    """Learner that adapts all parameters from a learned initial point, as MAML and its relatives do.

    Args:
        method, momentum, options, common: see `HeadAdapting`.
    """

    def __init__(
        self,
        body: Body,
        way: int,
        method: Callable[..., bo.BilevelOptimizer],
        *,
        momentum: float,
        options: dict[str, Any],
        **common: Any,
    ) -> None:
        super().__init__(body, way, **common)
        self.network["head"] = self._head()
        self.whole = nn.ModuleList([body, self.network["head"]])
        self._optimizer(method, self.whole, [], momentum=momentum, initial=True, **options)
        self.upper_loss = self.lower_loss = bo.Objective(self._loss)

    def _logits(self, batch: Batch) -> Tensor:
        scores: Tensor = self.network["head"](self.features(batch))
        return scores

    def _loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self._logits(batch), batch.labels)

    @torch.no_grad()
    def scores(self, support: Batch, query: Batch) -> Tensor:
        found = []
        for task, asked in zip(_apart(support), _apart(query), strict=True):
            self.optimizer.adapt(self.lower_loss, task, write=True)
            found.append(self._logits(asked))
        return torch.stack(found)


class Reptile(Adapting):
    """Reptile: the initial point moves towards the result of a few steps on the whole episode."""

    def backward(self, episodes: Episodes) -> Tensor:
        drawn = episodes.sample(self.tasks, self.generator)
        parts = [get(drawn, None, self.generator) for get in (episodes.lower, episodes.upper)]
        whole = Batch(*(torch.cat(pair, 1) for pair in zip(*(part[:2] for part in parts), strict=True)))
        total = torch.zeros((), device=self.device)
        for tensor in self.start:
            tensor.grad = torch.zeros_like(tensor)
        for task in _apart(whole):
            ends = self.optimizer.adapt(self.lower_loss, task, write=True)
            with torch.no_grad():
                total += self._loss(task) / self.tasks
                for tensor, end in zip(self.start, ends, strict=True):
                    assert tensor.grad is not None
                    tensor.grad += (tensor - end) / self.tasks
        return total


class Metric(Learner):
    r"""Learner with a closed-form head: prototypes (ProtoNet), or differentiable ridge regression (R2-D2).

    Args:
        head: ``"prototypes"``: scores are minus squared distances to the mean of each class, as ten times the mean over
            features, because their sum would saturate the softmax at the start; ``"ridge"``:
            :math:`W = Z^T (Z Z^T + \lambda I)^{-1} Y`, with learned scale, offset and :math:`\lambda`.
        common: see `Learner`.
    """

    def __init__(self, body: Body, way: int, head: str, **common: Any) -> None:
        super().__init__(body, way, **common)
        self.head = head
        if head == "ridge":
            start = [torch.zeros((), device=self.device), torch.full((), 2.0, device=self.device)]
            self.scales = nn.ParameterList([*start, torch.zeros((), device=self.device)])
            self.network["scales"] = self.scales
        self.upper = [*self.network.parameters()]

    def backward(self, episodes: Episodes) -> Tensor:
        drawn = episodes.sample(self.tasks, self.generator)
        support, query = (get(drawn, None, self.generator) for get in (episodes.lower, episodes.upper))
        for tensor in self.upper:
            tensor.grad = None
        loss = F.cross_entropy(self.scores(support, query).flatten(0, 1), query.labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def scores(self, support: Batch, query: Batch) -> Tensor:
        known, asked = self.each_task(support), self.each_task(query)
        classes = F.one_hot(support.labels, self.way).to(known)
        if self.head == "prototypes":
            means = classes.mT @ known / classes.sum(1).unsqueeze(-1)
            near = 2 * asked @ means.mT - means.square().sum(-1).unsqueeze(1)  # up to a term equal for all classes
            return near * (10 / self.body.width)
        log_lambda, log_scale, offset = self.scales.parameters()
        inner = known @ known.mT
        shifted = inner + log_lambda.exp() * torch.eye(inner.shape[-1], device=inner.device)
        weight = known.mT @ torch.linalg.solve(shifted, classes)
        scores: Tensor = log_scale.exp() * (asked @ weight) + offset
        return scores


HEAD: dict[str, Any] = {
    "ridge": 0.5,
    "momentum": 0.9,
}  # the lower problem of arXiv:2110.07004, with its code's momentum
STEPS: dict[str, Any] = {"lower_lr": 0.01, "lower_steps": 30}
PATHS: dict[str, Any] = {**STEPS, "directions": 1, "smoothing": 0.1, "warm_start": True}
# With one joint step from a zero head, the gradient of f in the body would be zero.
JOINT: dict[str, Any] = {"joint_steps": 10, "joint_lr": 0.05, "eta": 5.0}
ADAPT: dict[str, Any] = {"lower_lr": 0.4, "lower_steps": 1}
SLOW: dict[str, Any] = {"lower_lr": 0.1}
NEAR: dict[str, Any] = {**SLOW, "proximal": 2.0, "linear_steps": 3}

# Plain steps of these sizes suit CNN4. They diverge with larger features, so they are divided by `Body.gain`.
SCALED = ("anil", "maml", "fomaml", "fomaml-5", "imaml", "imaml-16", "reptile")

# Class of each learner, and its arguments, with the method if it is a bilevel one.
LEARNERS: dict[str, tuple[type[Learner], dict[str, Any]]] = {
    "pzobo": (HeadAdapting, {"method": bo.PZOBO, **HEAD, "options": PATHS}),
    "pzobo-code": (
        HeadAdapting,
        {"method": bo.PZOBO, **HEAD, "options": {**PATHS, "direction": "block_sphere", "scale": "none"}},
    ),
    "first-order": (HeadAdapting, {"method": bo.FirstOrder, **HEAD, "options": STEPS}),
    "aid": (HeadAdapting, {"method": bo.AID, **HEAD, "options": {**STEPS, "linear_steps": 10}}),
    "itd": (HeadAdapting, {"method": bo.ITD, **HEAD, "options": STEPS}),
    "f2sa": (HeadAdapting, {"method": bo.F2SA, **HEAD, "options": {**STEPS, "nu": 0.1}}),
    "bome": (HeadAdapting, {"method": bo.BOME, **HEAD, "options": {**STEPS, **JOINT}}),
    "anil": (
        HeadAdapting,
        {"method": bo.ANIL, "ridge": 0.0, "momentum": 0.0, "initial": True, "options": {**SLOW, "lower_steps": 5}},
    ),
    "maml": (Adapting, {"method": bo.MAML, "momentum": 0.0, "options": ADAPT}),
    "fomaml": (Adapting, {"method": bo.FOMAML, "momentum": 0.0, "options": ADAPT}),
    "fomaml-5": (Adapting, {"method": bo.FOMAML, "momentum": 0.0, "options": {**SLOW, "lower_steps": 5}}),
    "imaml": (
        Adapting,
        {"method": bo.iMAML, "momentum": 0.0, "options": {**NEAR, "lower_steps": 3}},
    ),
    "imaml-16": (
        Adapting,
        {"method": bo.iMAML, "momentum": 0.0, "options": {**NEAR, "lower_steps": 16, "linear_steps": 5}},
    ),
    "reptile": (Reptile, {"method": bo.FOMAML, "momentum": 0.0, "options": {**SLOW, "lower_steps": 5}}),
    "protonet": (Metric, {"head": "prototypes"}),
    "ridge": (Metric, {"head": "ridge"}),
}  # fmt: skip


def make(
    name: str,
    body: Body,
    way: int,
    *,
    tasks: int,
    seed: int,
    autocast: bool = False,
    vectorize: bool | int = True,
) -> Learner:
    """Return the learner of this name for a body, with the settings of `LEARNERS`."""
    kind, settings = LEARNERS[name]
    if autocast and name.startswith("pzobo"):
        raise SystemExit("pzobo takes differences of lower solves, which bfloat16 would drown: no --autocast")
    settings = dict(settings)
    if "options" in settings:
        settings["options"] = {**settings["options"], "vectorize": vectorize}
    if name in SCALED:
        settings["options"]["lower_lr"] /= body.gain
    generator = stream(seed, "method")
    return kind(body, way, tasks=tasks, generator=generator, autocast=autocast, **settings)
