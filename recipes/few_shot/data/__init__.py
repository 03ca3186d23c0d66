"""Images by class, in three splits of classes: loaders with checks, and a memory-mapped cache."""

from .images import Images
from .sets import DATA, load

__all__ = ["DATA", "Images", "load"]
