"""What a method declares of itself: the tables are made from it, and generic tests and recipes read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "REGISTRY", "UNDECLARED", "MethodInfo", "methods", "register"]
