"""What two sets of changed weights share, and what they would share if only coarse facts about them agreed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ceilings.spectrum import random_stable_rank

__all__ = ["ChangeSpectra", "change_spectra", "cells_by_binade", "cells_by_tensor", "overlap_by_cells"]

_EXPONENTS: Final = (-20, 3)

#: Means over the matrices, by name.
ChangeSpectra = dict[str, float]


def cells_by_tensor(sizes: Sequence[int]) -> Tensor:
    """Number of the tensor that every entry of a flat vector belongs to.

    Parameters
    ----------
    sizes
        Entries of every tensor, in the order of the vector.

    Returns
    -------
    Tensor
        Counted from 0.

    Shapes
    ------
    D entries in all -> (D,).
    """
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def cells_by_binade(weights: Tensor, tensors: Tensor) -> Tensor:
    r"""Cells that hold the weights of one tensor between two neighbouring powers of two.

    Parameters
    ----------
    weights
        The weights.
    tensors
        As `cells_by_tensor` gives them.

    Returns
    -------
    Tensor
        Number of the cell of every weight. All below :math:`2^{-21}` in size are in one cell of their tensor.

    Shapes
    ------
    weights and tensors (D,) -> (D,).

    Notes
    -----
    Within such a cell all weights have one distance to the next stored number: what the number format alone decides is
    the same for all of them, up to the size of the step.
    """
    low, high = _EXPONENTS
    exponent = torch.frexp(weights).exponent.clamp(low, high) - low
    return tensors * (high - low + 1) + torch.where(weights == 0, 0, exponent)


def overlap_by_cells(first: Tensor, second: Tensor, cells: Tensor) -> tuple[float, float]:
    """Share of one set that is in another, and what chance gives.

    Parameters
    ----------
    first, second
        True = member.
    cells
        Number of the cell of every entry.

    Returns
    -------
    tuple
        The share of the first set's members that the second has too, and its expectation if each set kept how many
        members it has in every cell and these were drawn at random. NaN, both, for an empty first set.

    Shapes
    ------
    first, second, cells (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the shapes differ, or the sets are no masks.

    Notes
    -----
    With a single cell the chance is the density of the second set, whatever the first is.
    """
    if (
        not first.shape == second.shape == cells.shape
        or first.dtype != torch.bool
        or second.dtype != torch.bool
    ):
        raise ValueError(
            f"sets of shapes {tuple(first.shape)} and {tuple(second.shape)} and cells of {tuple(cells.shape)}: give "
            "two masks and one cell an entry"
        )
    count = int(cells.max()) + 1
    total, a, b = (torch.bincount(x, minlength=count).double() for x in (cells, cells[first], cells[second]))
    members = float(a.sum())
    if members == 0:
        return float("nan"), float("nan")
    expected = float((a * b / total.clamp_min(1)).sum())
    return float((first & second).sum()) / members, expected / members


def change_spectra(changes: Sequence[Tensor], directions: Sequence[int] = (1, 4)) -> ChangeSpectra:
    r"""Rank, stable rank and leading energy of the changes of some matrices, each a mean over the matrices.

    Parameters
    ----------
    changes
        Matrices; those that are all zeros are left out of the means.
    directions
        How many leading singular values to sum.

    Returns
    -------
    dict
        ``rank``: numerical rank over the greatest possible one, counting singular values above the tolerance
        that `torch.linalg.matrix_rank` takes for float32. ``stable rank`` over the greatest possible one. ``random``:
        the same of a large matrix of independent entries, `ceilings.spectrum.random_stable_rank`. ``energy k``: share
        of the squares in the k leading singular values. NaN where every matrix is zero.

    Units
    -----
    1.
    """
    names = ("rank", "stable rank", "random", *(f"energy {k}" for k in directions))
    rows = []
    for change in changes:
        values = torch.linalg.svdvals(change.double())
        if float(values[0]) == 0:
            continue
        short, long = sorted(change.shape)
        tolerance = values[0] * long * torch.finfo(torch.float32).eps
        energy = values.square()
        rows.append(
            [
                float((values > tolerance).sum()) / short,
                float(energy.sum() / energy[0]) / short,
                random_stable_rank(short, long) / short,
                *(float(energy[:k].sum() / energy.sum()) for k in directions),
            ]
        )
    means = torch.tensor(rows, dtype=torch.float64).mean(0).tolist() if rows else [float("nan")] * len(names)
    return dict(zip(names, means, strict=True))
