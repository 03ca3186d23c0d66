"""STABLE: tracked second derivatives, plain first ones, and lower steps that follow x."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch

from ...distributed.sharding import Split
from ...hypergradient.recursive import flat, shaped
