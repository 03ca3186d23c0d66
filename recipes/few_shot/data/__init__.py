"""Images by class, in three splits of classes: loaders, checks of what they find, and a memory-mapped cache."""

from .images import Images
from .sets import DATA, load

__all__ = ["DATA", "Images", "load"]
