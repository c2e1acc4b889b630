"""Singular values of a change, from its blocks: exact through a Gram matrix, or estimated where that is too large."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["DIRECTIONS", "Spectrum", "random_share", "random_stable_rank", "spectrum"]

#: How many leading singular values are summed.
DIRECTIONS: Final = (1, 8, 64)
_EXACT: Final = 1024  # shorter side up to which the Gram matrix is made
_BLOCK: Final = 2**19
_OVERSAMPLING: Final = 16
_ITERATIONS: Final = 5

#: A piece of the change, by rows and columns.
Piece = Callable[[slice, slice], Tensor]


@dataclass(frozen=True)
class Spectrum:
    """Leading part of the spectrum of a matrix.

    Parameters
    ----------
    energy
        Squared Frobenius norm.
    top
        Squared leading singular values, summed, by how many they are.
    error
        Estimate of how far too low each sum may be; zero where it is exact to rounding.
    exact
        Whether the Gram matrix was made.
    """

    energy: float
    top: dict[int, float]
    error: dict[int, float]
    exact: bool

    @property
    def stable_rank(self) -> float:
        """Squared Frobenius norm over squared spectral norm."""
        return self.energy / self.top[1]


def random_stable_rank(rows: int, columns: int) -> float:
    """Stable rank of a large matrix of independent entries.

    Parameters
    ----------
    rows, columns
        Its shape.

    Returns
    -------
    float
        The limit as the matrix grows: the largest singular value is then √rows + √columns standard deviations.
    """
    return rows * columns / (math.sqrt(rows) + math.sqrt(columns)) ** 2


def random_share(rows: int, columns: int, directions: int) -> float:
    """Largest share of the energy that leading directions of a large matrix of independent entries can hold.

    Parameters
    ----------
    rows, columns
        Its shape.
    directions
        How many.

    Returns
    -------
    float
        As if each were as large as the largest; at most 1.
    """
    return min(1.0, directions / random_stable_rank(rows, columns))


def spectrum(piece: Piece, rows: int, columns: int) -> Spectrum | None:
    """Leading singular values of a matrix that is made piece by piece.

    Parameters
    ----------
    piece
        Gives the entries of given rows and columns.
    rows, columns
        Shape of the matrix.

    Returns
    -------
    Spectrum | None
        None for a matrix of zeros.

    Notes
    -----
    Up to a shorter side of 1024 the Gram matrix is summed in float64 and all its eigenvalues found. Beyond, subspace
    iteration with 64 + 16 random directions in float32: its sums never exceed the true ones and grow with every
    iteration; the error is extrapolated from how much the last ones still grew.
    """
    if min(rows, columns) <= _EXACT:
        return _exact(piece, rows, columns)
    return _iterated(piece, rows, columns)


def _exact(piece: Piece, rows: int, columns: int) -> Spectrum | None:
    """All singular values."""
    short = min(rows, columns)
    gram = torch.zeros(short, short, dtype=torch.float64)
    step = max(1, _BLOCK // short)
    for start in range(0, max(rows, columns), step):
        part, whole = slice(start, start + step), slice(None)
        if columns <= rows:
            block = piece(part, whole).double()
            gram.addmm_(block.T, block)
        else:
            block = piece(whole, part).double()
            gram.addmm_(block, block.T)
    energy = float(gram.diagonal().sum())
    if not energy:
        return None
    values = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)
    top = {k: float(values[:k].sum()) for k in DIRECTIONS}
    return Spectrum(energy, top, dict.fromkeys(DIRECTIONS, 0.0), True)


def _iterated(piece: Piece, rows: int, columns: int) -> Spectrum | None:
    """Leading singular values by subspace iteration."""
    width = min(max(DIRECTIONS) + _OVERSAMPLING, rows, columns)
    side = torch.randn(columns, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    sums: dict[int, list[float]] = {k: [] for k in DIRECTIONS}
    energy = 0.0
    for _ in range(_ITERATIONS):
        side = torch.linalg.qr(side).Q
        energy, images = _through(piece, rows, side)
        if not energy:
            return None
        left = torch.linalg.qr(images).Q
        side = _back(piece, left, columns)
        values = torch.linalg.svdvals(side.double()).square()
        for k in DIRECTIONS:
            sums[k].append(float(values[:k].sum()))
    return Spectrum(
        energy, {k: s[-1] for k, s in sums.items()}, {k: _to_come(s) for k, s in sums.items()}, False
    )


def _through(piece: Piece, rows: int, side: Tensor) -> tuple[float, Tensor]:
    """Squared norm of the matrix, and its product with some directions."""
    images = torch.empty(rows, side.shape[1], dtype=torch.float32)
    energy, step = 0.0, max(1, _BLOCK // side.shape[0])
    for start in range(0, rows, step):
        block = piece(slice(start, start + step), slice(None)).float()
        energy += float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2
        images[start : start + step] = block @ side
    return energy, images


def _back(piece: Piece, left: Tensor, columns: int) -> Tensor:
    """Product of the transposed matrix with some directions."""
    found = torch.zeros(columns, left.shape[1], dtype=torch.float32)
    step = max(1, _BLOCK // columns)
    for start in range(0, left.shape[0], step):
        part = slice(start, start + step)
        found.addmm_(piece(part, slice(None)).float().T, left[part])
    return found


def _to_come(sums: list[float]) -> float:
    """Twice what a slowly growing sum would still gain if each gain were the same share of the one before."""
    last, before = sums[-1] - sums[-2], sums[-2] - sums[-3]
    ratio = min(0.95, max(0.0, last / before)) if before > 0 else 0.0
    return 2 * max(0.0, last) * max(1.0, ratio / (1 - ratio))
