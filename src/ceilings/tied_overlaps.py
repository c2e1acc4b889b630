r"""Overlap of the largest entries of two vectors, as an interval where ties leave a set open, and what chance gives.

A stored change takes few values, and so does a sum of signs: many entries tie at the cut of "the top 1 %", and then
there is no one such set. The overlap is an interval, both ends of which some choice attains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.overlaps import open_overlap

__all__ = ["overlap_interval", "random_overlaps", "top_sides"]


def top_sides(values: Tensor, share: float) -> tuple[Tensor, int]:
    """Which entries are below, at and above the cut of the largest.

    Parameters
    ----------
    values
        Sizes; compared as float32, so that rounding in the last digits of float64 breaks no tie.
    share
        Size of the set as a share of all entries; at least one entry.

    Returns
    -------
    tuple
        0 below, 1 at, 2 above the cut for every entry; and how many of those at the cut belong to the set.

    Shapes
    ------
    values (D,) -> (D,).

    Raises
    ------
    ValueError
        If the values are no vector or hold NaN, or the share is outside (0, 1].
    """
    if values.ndim != 1 or bool(values.isnan().any()) or not 0 < share <= 1:
        raise ValueError(
            f"values of shape {tuple(values.shape)} and share {share}: give a vector without NaN, and a share in (0, 1]"
        )
    sizes = values.float()
    count = max(1, round(share * len(sizes)))
    cut = sizes.topk(count).values[-1]
    above = sizes > cut
    return above.long() * 2 + (sizes == cut).long(), count - int(above.sum())


def overlap_interval(first: Tensor, second: Tensor, share: float = 0.01) -> tuple[float, float]:
    """Least and greatest share of one top set that lies in the other.

    Parameters
    ----------
    first, second
        Sizes of the same parameters.
    share
        Size of both sets as a share of all entries.

    Returns
    -------
    tuple
        Equal unless entries tie at a cut; both are attained by some choice among the ties.

    Shapes
    ------
    first (D,), second (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the lengths differ, or either is not what `top_sides` takes.
    """
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} and {len(second)} entries: they are not about the same parameters")
    (a, open_a), (b, open_b) = top_sides(first, share), top_sides(second, share)
    sides = torch.bincount(3 * a + b, minlength=9).view(3, 3)
    size = max(1, round(share * len(first)))
    least, most = open_overlap(sides, open_a, open_b)
    return least / size, most / size


def random_overlaps(
    first: Tensor, second: Tensor, tensors: Tensor, share: float, draws: int, generator: torch.Generator
) -> Tensor:
    """Overlap when the first set keeps only how many of its members lie in each tensor.

    Parameters
    ----------
    first, second
        Sizes of the same parameters.
    tensors
        Number of the tensor that every parameter belongs to.
    share
        Size of both sets as a share of all entries.
    draws
        Number of draws.
    generator
        Source of randomness; it also settles ties.

    Returns
    -------
    Tensor
        One overlap a draw.

    Shapes
    ------
    first, second, tensors (D,) -> (draws,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If either is not what `top_sides` takes.
    """
    size = max(1, round(share * len(first)))
    result = []
    for _ in range(draws):
        members = _members(second, share, generator)
        counts = torch.bincount(tensors[_members(first, share, generator)], minlength=int(tensors.max()) + 1)
        # Within each tensor the members are the first so many of a random order.
        order = (tensors + torch.rand(len(tensors), generator=generator, dtype=torch.float64)).argsort()
        sizes = torch.bincount(tensors, minlength=len(counts))
        place = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[tensors[order]]
        drawn = order[place < counts[tensors[order]]]
        result.append(int(torch.isin(drawn, members).sum()) / size)
    return torch.tensor(result, dtype=torch.float64)


def _members(values: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """One of the top sets, ties settled at random."""
    sides, still_open = top_sides(values, share)
    ties = (sides == 1).nonzero()[:, 0]
    picked = ties[torch.randperm(len(ties), generator=generator)[:still_open]]
    return torch.cat([(sides == 2).nonzero()[:, 0], picked])
