"""PAID: approximate implicit differentiation with perturbations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

from ..optimizer.base import CommonOptions
