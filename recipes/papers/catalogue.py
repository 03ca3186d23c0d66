"""All experiments by their names."""

from __future__ import annotations

from . import cleaning, news, newsvendor, representation, reweighting, saddle
from .experiment import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment for module in (saddle, newsvendor, cleaning, news, reweighting, representation) for experiment in module.EXPERIMENTS
}
