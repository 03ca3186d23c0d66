"""Extreme eigenvalues of a symmetric operator that is known by its products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Spectrum", "lanczos"]

DENSE = 512  # largest dimension for which the matrix itself is formed
STEPS = 256  # most products of one run of Lanczos's method

Product = Callable[[Tensor], Tensor]


def lanczos(product: Product, start: Tensor, steps: int, goes_on: Callable[[], bool]) -> tuple[Tensor, Tensor, Tensor]:
    r"""Run Lanczos's method, :math:`V^\top H V = T` with V an orthonormal basis of a vector's Krylov space.

    Args:
        product: H, on vectors of one dimension.
        start: the vector.
        steps: most products.
        goes_on: returns True if there is time for another product.

    Returns:
        Eigenvalues of T in double precision, ascending; its eigenvectors in the space of H, as columns; and for each
        the norm of its residual as an eigenvector of H.
    """
    basis, diagonal, beside = [start / start.norm()], list[float](), list[float]()
    while len(diagonal) < min(steps, start.numel()):
        image = product(basis[-1])
        diagonal.append(float(image.dot(basis[-1])))
        known = torch.stack(basis)
        for _ in range(2):  # orthogonalised twice against all: rounding would bring back the largest eigenvectors
            image = image - known.mT @ (known @ image)
        beside.append(float(image.norm()))
        if beside[-1] <= 1e3 * torch.finfo(start.dtype).eps * max(map(abs, diagonal)) or not goes_on():
            break
        basis.append(image / beside[-1])
    n = len(diagonal)
    T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, value in enumerate(beside[: n - 1]):
        T[i, i + 1] = T[i + 1, i] = value
    values, vectors = torch.linalg.eigh(T)
    return values, torch.stack(basis[:n]).mT @ vectors.to(start), beside[-1] * vectors[-1].abs()


class Spectrum:
    """Eigenvalues of a symmetric operator H.

    Args:
        product: H, on vectors of one dimension.
        like: such a vector.
        goes_on: returns True if there is time for another product.

    Attributes:
        values: eigenvalues, or Ritz values, which lie between the extreme eigenvalues, ascending.
        exact: whether these are all eigenvalues.
        largest, smallest: the extremes.
        uncertainty: bound on the distance of these from the nearest eigenvalues.
    """

    def __init__(self, product: Product, like: Tensor, goes_on: Callable[[], bool]) -> None:
        size = like.numel()
        self.exact = size <= DENSE
        if self.exact:
            columns = [product(one) for one in torch.eye(size, dtype=like.dtype, device=like.device)]
            matrix = torch.stack(columns).double().cpu()
            self.values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
            error = torch.zeros_like(self.values)
        else:
            generator = torch.Generator().manual_seed(0)
            start = torch.randn(size, generator=generator, dtype=like.dtype, device="cpu").to(like)
            self.values, _, error = lanczos(product, start, STEPS, goes_on)
        self.smallest, self.largest = float(self.values[0]), float(self.values[-1])
        self.uncertainty = float(max(error[0], error[-1]))
