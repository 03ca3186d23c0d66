"""All experiments by their names."""

from __future__ import annotations

from . import (
    bound,
    cleaning,
    contexts,
    kappa,
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
)
from .experiment import Experiment

__all__ = ["EXPERIMENTS"]

MODULES = (
    representation,
    mnist,
    order,
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
)
EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment for module in MODULES for experiment in module.EXPERIMENTS
}
