"""All experiments by name."""

from __future__ import annotations

from . import (
    bound,
    cleaning,
    contexts,
    kappa,
    laws,
    meta,
    mnist,
    news,
    newsvendor,
    order,
    representation,
    reweighting,
    saddle,
    solver,
    texts,
    theorem,
)
from .experiment import Experiment

__all__ = ["EXPERIMENTS"]

MODULES = (
    representation,
    mnist,
    order,
    theorem,
    bound,
    news,
    reweighting,
    saddle,
    kappa,
    cleaning,
    texts,
    contexts,
    meta,
    newsvendor,
    solver,
    laws,
)
EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment for module in MODULES for experiment in module.EXPERIMENTS
}
