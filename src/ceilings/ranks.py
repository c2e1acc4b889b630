"""Whether two sizes of the same parameters rise together: correlation of their ranks, over all or within tensors."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["rank_correlation", "rank_correlation_within", "ranks"]


def ranks(values: Tensor) -> Tensor:
    """Place of every entry in ascending order; equal entries share the mean of their places.

    Parameters
    ----------
    values
        A vector without NaN.

    Returns
    -------
    Tensor
        float64, from 0.

    Shapes
    ------
    values (D,) -> (D,).

    Raises
    ------
    ValueError
        If the values are no vector or hold NaN.
    """
    if values.ndim != 1 or bool(values.isnan().any()):
        raise ValueError(f"values of shape {tuple(values.shape)}: give a vector without NaN")
    _, group, size = values.unique(return_inverse=True, return_counts=True)
    return ((size.cumsum(0) - size).double() + (size - 1).double() / 2)[group]


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's correlation.

    Parameters
    ----------
    first, second
        Two numbers for every parameter.

    Returns
    -------
    float
        1: the same order, -1: the opposite one; NaN where either has one value only.

    Shapes
    ------
    first (D,), second (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the lengths differ, or either is not what `ranks` takes.
    """
    if first.shape != second.shape:
        raise ValueError(
            f"{tuple(first.shape)} and {tuple(second.shape)}: give two numbers for every parameter"
        )
    a, b = (x - x.mean() for x in (ranks(first), ranks(second)))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else math.nan


def rank_correlation_within(first: Tensor, second: Tensor, tensors: Tensor) -> float:
    """Mean of the rank correlations within tensors, each counted by its entries.

    Parameters
    ----------
    first, second
        Two numbers for every parameter.
    tensors
        Number of the tensor of every parameter.

    Returns
    -------
    float
        What is left if it is not asked which tensor an entry stands in; tensors without a correlation are left out.

    Shapes
    ------
    first (D,), second (D,), tensors (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the lengths differ, or no tensor has a correlation.
    """
    if first.shape != tensors.shape:
        raise ValueError(
            f"{tuple(first.shape)} entries but {tuple(tensors.shape)} tensors: name one for each"
        )
    total = weight = 0.0
    for tensor in tensors.unique():
        here = tensors == tensor
        found = rank_correlation(first[here], second[here])
        if not math.isnan(found):
            total, weight = total + found * int(here.sum()), weight + int(here.sum())
    if weight == 0:
        raise ValueError("no tensor has two different numbers on both sides: nothing can be ranked")
    return total / weight
