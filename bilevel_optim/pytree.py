"""torch's functions for nested tuples, lists and dicts of tensors, which have no public name yet."""

from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_unflatten"]
