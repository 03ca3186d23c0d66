"""The 20 Newsgroups texts as sparse tf-idf features, and a matrix product that can be differentiated twice."""

from __future__ import annotations

import json
import lzma
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.seeds import stream
from .problem import Part, folder

__all__ = ["SparseFeatures", "load_newsgroups", "stripped", "texts_of"]


class SparseFeatures:
    """Constant sparse matrix of features, one row per example, with fast products by it and its transpose.

    ``features @ W`` can be differentiated any number of times in W, and vmapped: a batch of W is one product. torch's
    own sparse products transpose the matrix in every backward pass; this class keeps the transpose.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.shape = matrix.shape
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            self.matrix, self.transposed = matrix.to_sparse_csr(), matrix.t().coalesce().to_sparse_csr()

    def to(self, device: torch.device | str) -> SparseFeatures:
        """Move the matrix, in place."""
        self.matrix, self.transposed = self.matrix.to(device), self.transposed.to(device)
        return self

    def __matmul__(self, other: Tensor) -> Tensor:
        product: Tensor = _Product.apply(self, False, other)
        return product

    def __getitem__(self, index: slice | Tensor) -> SparseFeatures:
        """Return all rows, or a copy of some, which is slow to make: reuse it."""
        if isinstance(index, slice):
            if index != slice(None):
                raise NotImplementedError("rows of sparse features are taken by a tensor of indices")
            return self
        whole: Tensor = self.matrix.to_sparse_coo()  # type: ignore[no-untyped-call]
        return SparseFeatures(whole.index_select(0, index).coalesce())

    def largest_singular_value(self, iterations: int = 50) -> float:
        """Return the largest singular value, by power iteration."""
        v = torch.rand(self.shape[1], 1, generator=stream(0, "power iteration")).to(self.matrix.device)
        u = v
        for _ in range(iterations):
            u = self.matrix @ (v / v.norm())
            v = self.transposed @ u
        return float(u.norm())


class _Product(torch.autograd.Function):
    """Product A W or A' W with a constant sparse A."""

    generate_vmap_rule = False

    @staticmethod
    def forward(features: SparseFeatures, transpose: bool, other: Tensor) -> Tensor:
        return (features.transposed if transpose else features.matrix) @ other

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.features, ctx.transpose = inputs[:2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _Product.apply(ctx.features, not ctx.transpose, gradient)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], features: SparseFeatures, transpose: bool, other: Tensor) -> Any:
        # The copies become columns of one matrix.
        columns = other.movedim(dims[2] or 0, 1)
        product = _Product.apply(features, transpose, columns.reshape(len(columns), -1))
        return product.reshape(len(product), *columns.shape[1:]), 1


def load_newsgroups(
    root: Path | None, download: bool, keep: bool, seed: int, least: int = 1, footers: bool = False
) -> tuple[Part, Part, Part]:
    """Return the training and validation parts (stratified halves of the official training part) and the test part.

    Args:
        root: a folder with ``train.jsonl.xz`` and ``test.jsonl.xz`` (one object with ``group`` and ``text`` per line),
            with the unpacked ``20news-bydate`` archive, or scikit-learn's cache.
        download: let scikit-learn fetch the texts into ``root``.
        keep: keep headers, footers and quoted replies, which give the group away.
        seed: seed of the split.
        least: minimal number of texts that contain a word, for the word to be a feature.
        footers: keep footers alone.
    """
    from scipy.sparse import csr_matrix
    from sklearn.model_selection import train_test_split

    whole, held_out, labels, test_labels = _vectors(folder(root, "20newsgroups"), download, keep, least, footers)
    first, second = train_test_split(list(range(len(labels))), test_size=0.5, stratify=labels, random_state=seed)

    def part(matrix: Any, targets: list[int]) -> Part:
        entries = csr_matrix(matrix).tocoo()
        indices = torch.stack([torch.as_tensor(entries.row).long(), torch.as_tensor(entries.col).long()])
        values = torch.as_tensor(entries.data, dtype=torch.float32)
        matrix = torch.sparse_coo_tensor(indices, values, entries.shape, check_invariants=True).coalesce()
        return Part(SparseFeatures(matrix), torch.tensor(targets))

    return (
        part(whole[first], [labels[i] for i in first]),
        part(whole[second], [labels[i] for i in second]),
        part(held_out, test_labels),
    )


@lru_cache(maxsize=1)
def _vectors(
    root: Path, download: bool, keep: bool, least: int, footers: bool
) -> tuple[Any, Any, list[int], list[int]]:
    """Return the features of the training and test parts, then their group numbers."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    (train, train_groups), (test, test_groups) = (texts_of(root, part, download) for part in ("train", "test"))
    if not keep:
        train, test = stripped(train, footers), stripped(test, footers)
    numbers = {name: i for i, name in enumerate(sorted(set(train_groups)))}
    vectorizer = TfidfVectorizer(min_df=least)
    whole, held_out = vectorizer.fit_transform(train), vectorizer.transform(test)
    return whole, held_out, [numbers[g] for g in train_groups], [numbers[g] for g in test_groups]


def texts_of(root: Path, part: str, download: bool) -> tuple[list[str], list[str]]:
    """Return texts and group names of the part ``train`` or ``test``; see `load_newsgroups`."""
    lines, folder = root / f"{part}.jsonl.xz", root / f"20news-bydate-{part}"
    if lines.exists():
        with lzma.open(lines, "rt", encoding="utf-8", newline="\n") as file:
            posts = [json.loads(line) for line in file]
        return [p["text"] for p in posts], [p["group"] for p in posts]
    if folder.exists():
        files = sorted(folder.glob("*/*"))
        return [f.read_text(encoding="latin-1") for f in files], [f.parent.name for f in files]
    from sklearn.datasets import fetch_20newsgroups

    try:
        bunch = fetch_20newsgroups(data_home=str(root), subset=part, download_if_missing=download, shuffle=False)
    except OSError as error:
        raise SystemExit(f"no 20 Newsgroups in {root}: {error} (--download fetches them)") from error
    return list(bunch.data), [bunch.target_names[t] for t in bunch.target]


def stripped(texts: list[str], footers: bool = False) -> list[str]:
    """Remove headers, quotes and (unless they are to stay) footers, as scikit-learn's ``remove=`` does."""
    from sklearn.datasets import _twenty_newsgroups as rules

    bare = [rules.strip_newsgroup_quoting(rules.strip_newsgroup_header(text)) for text in texts]
    return bare if footers else [rules.strip_newsgroup_footer(text) for text in bare]
