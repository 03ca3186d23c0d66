"""Shared by the programs: command line, loops that time and tune, methods by name, output files."""

from .arguments import Parser, not_negative, share, whole
from .intervals import Interval, interval
from .processes import alone, forget_peak, peak
from .report import CALLS, draw, environment, figure, plot, rows, save, save_json, show, table
from .running import gradients, median_curve, progress, spend, summary, synchronize, timed, train, tuned

__all__ = [
    "CALLS",
    "Interval",
    "Parser",
    "alone",
    "draw",
    "environment",
    "figure",
    "forget_peak",
    "gradients",
    "interval",
    "median_curve",
    "not_negative",
    "peak",
    "plot",
    "progress",
    "rows",
    "save",
    "save_json",
    "share",
    "show",
    "spend",
    "summary",
    "synchronize",
    "table",
    "timed",
    "train",
    "tuned",
    "whole",
]
