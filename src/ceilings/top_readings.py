"""Other readings of "the top 1 %": within every tensor, relative to the weight, and how many entries tie at the cut."""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.overlaps import open_overlap
from ceilings.tied_overlaps import top_sides

__all__ = ["overlap_within_tensors", "relative_change", "tied_at_cut"]


def overlap_within_tensors(
    first: Tensor, second: Tensor, tensors: Tensor, share: float = 0.01
) -> tuple[float, float]:
    """Least and greatest share of one top set in the other, where every tensor has top sets of its own.

    Parameters
    ----------
    first, second
        Sizes of the same parameters.
    tensors
        Number of the tensor that every parameter belongs to.
    share
        Size of the sets as a share of the entries of a tensor; at least one entry each.

    Returns
    -------
    tuple
        Equal unless entries tie at a cut.

    Shapes
    ------
    first, second, tensors (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the lengths differ, or either is not what `ceilings.tied_overlaps.top_sides` takes.
    """
    if not first.shape == second.shape == tensors.shape:
        raise ValueError(
            f"{len(first)}, {len(second)} and {len(tensors)} entries: they are not about the same parameters"
        )
    least = most = size = 0
    for number in tensors.unique():
        here = tensors == number
        (a, open_a), (b, open_b) = top_sides(first[here], share), top_sides(second[here], share)
        low, high = open_overlap(torch.bincount(3 * a + b, minlength=9).view(3, 3), open_a, open_b)
        least, most, size = least + low, most + high, size + max(1, round(share * int(here.sum())))
    return least / size, most / size


def relative_change(change: Tensor, weights: Tensor) -> Tensor:
    """Size of every change over the size of the weight.

    Parameters
    ----------
    change, weights
        Changes, and the weights before.

    Returns
    -------
    Tensor
        0 where nothing changed; where a weight of zero changed, larger than any other.

    Shapes
    ------
    change, weights (D,) -> (D,).

    Units
    -----
    1.
    """
    least = weights.abs().where(weights != 0, torch.inf).min()
    # A weight of zero counts as the smallest of the others over 2¹⁶: a number in float32, and ranked above.
    return change.abs() / weights.abs().where(weights != 0, least / 2**16)


def tied_at_cut(values: Tensor, share: float = 0.01) -> float:
    """How many entries tie at the cut of a top set, as a multiple of the set's size.

    Parameters
    ----------
    values
        Sizes.
    share
        Size of the set as a share of all entries.

    Returns
    -------
    float
        0 where the set is not open: all of the ties belong to it.

    Shapes
    ------
    values (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the values are not what `ceilings.tied_overlaps.top_sides` takes.
    """
    sides, still_open = top_sides(values, share)
    tied = int((sides == 1).sum())
    return tied / max(1, round(share * len(values))) if tied > still_open else 0.0
