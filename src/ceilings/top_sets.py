r"""Order statistics, concentration and overlap of top sets, for a hundred million numbers held as many tensors.

A model's ceilings are a list of tensors, too long together to be sorted in a moment. Non-negative float32 numbers
are ordered like their bit patterns, so two counting passes, over the upper and over the lower 16 bits, find any order
statistic exactly. The upper half alone (sign, exponent and 7 bits: the bfloat16 grid) gives sums above a level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import torch
from torch import Tensor

__all__ = [
    "chance_overlap",
    "concentration",
    "overlap",
    "quantiles",
    "sampled_overlap",
    "stratified_sample",
    "take",
    "top_level",
    "top_set",
]

_BUCKETS: Final = 2**15  # patterns of the upper half of a non-negative float32
_BLOCK: Final = 2**22


def quantiles(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Exact quantiles of non-negative float32 numbers.

    Parameters
    ----------
    values
        The numbers, as any number of tensors.
    shares
        Which quantiles; the entry of rank ``ceil(share · n)`` is taken, no interpolation.

    Returns
    -------
    Tensor
        One number a share, float32.

    Shapes
    ------
    S shares -> (S,).

    Raises
    ------
    ValueError
        If there is no number, one is negative or NaN, one is not float32, or a share lies outside [0, 1].
    """
    if any(not 0 <= share <= 1 for share in shares):
        raise ValueError(f"shares must lie in [0, 1], got {list(shares)}")
    upper = torch.zeros(_BUCKETS + 1, dtype=torch.int64)
    for bits in _patterns(values):
        upper += torch.bincount(bits >> 16, minlength=_BUCKETS + 1)
    total = int(upper.sum())
    if total == 0:
        raise ValueError("there is no number to take a quantile of")
    ranks = [min(max(-int(-share * total // 1), 1), total) for share in shares]
    starts = upper.cumsum(0)
    buckets = torch.searchsorted(starts, torch.tensor(ranks))
    wanted = torch.zeros(_BUCKETS + 1, dtype=torch.bool).index_fill_(0, buckets, True)
    candidates = torch.cat([bits[wanted[bits >> 16]] for bits in _patterns(values)]).sort().values
    # Rank among the candidates: all of the smaller buckets that were not wanted come off.
    skipped = (upper * ~wanted).cumsum(0)
    found = candidates[torch.tensor(ranks) - skipped[buckets] - 1]
    return found.view(torch.float32)


def top_level(values: Sequence[Tensor], share: float) -> float:
    """Value of the smallest entry of the top ``share``.

    Parameters
    ----------
    values
        Non-negative float32 numbers, as any number of tensors.
    share
        Size of the top set as a share of all entries; 1 means everything.

    Returns
    -------
    float
        The level; entries equal to it may be more than the set has room for (ties).
    """
    count = sum(v.numel() for v in values)
    size = max(round(share * count), 1)
    return float(quantiles(values, [(count - size + 1) / count])[0])


def top_set(values: Sequence[Tensor], share: float) -> list[Tensor]:
    """Which entries are among the largest.

    Parameters
    ----------
    values
        Non-negative float32 numbers, as any number of tensors.
    share
        Size of the top set as a share of all entries.

    Returns
    -------
    list
        One mask a tensor; True = in the top set.

    Raises
    ------
    ValueError
        If ties at the level make the set more than a hundredth larger than asked.
    """
    level = top_level(values, share)
    masks = [v >= level for v in values]
    size, asked = _size(masks), max(round(share * sum(v.numel() for v in values)), 1)
    if size > 1.01 * asked:
        raise ValueError(f"ties: the top set holds {size} entries where {asked} were asked for")
    return masks


def overlap(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Share of one set that is also in another of the same size.

    Parameters
    ----------
    first, second
        Masks, tensor by tensor about the same parameters; see `top_set`.

    Returns
    -------
    float
        1 if the sets are equal; about their share of all entries if they are independent.

    Raises
    ------
    ValueError
        If shapes differ.
    """
    _check_masks(first, second)
    both = sum(int((a & b).sum()) for a, b in zip(first, second, strict=True))
    return 2 * both / (_size(first) + _size(second))


def chance_overlap(
    first: Sequence[Tensor], second: Sequence[Tensor], within: Literal["tensor", "row", "column"] = "tensor"
) -> float:
    """Overlap to expect of two sets that agree only in how many members each tensor has.

    Parameters
    ----------
    first, second
        Masks, tensor by tensor about the same parameters; see `top_set`.
    within
        Whose counts are kept: those of each tensor, or of each row or column of the matrices too.

    Returns
    -------
    float
        Exact expectation of `overlap` if within each tensor (row, column) the members were drawn at random.

    Raises
    ------
    ValueError
        If shapes differ.
    """
    _check_masks(first, second)
    both = 0.0
    for a, b in zip(first, second, strict=True):
        whole = a.ndim != 2 or within == "tensor"
        if whole:
            a, b = a.reshape(1, -1), b.reshape(1, -1)
        axis = 0 if within == "column" and not whole else 1
        counts = a.sum(axis).double(), b.sum(axis).double()
        both += float(counts[0] @ counts[1]) * len(counts[0]) / a.numel()
    return 2 * both / (_size(first) + _size(second))


def sampled_overlap(first: Tensor, second: Tensor, share: float) -> Tensor:
    """Overlap of top sets among sampled parameters, for many draws at once.

    Parameters
    ----------
    first
        One draw a row.
    second
        What every draw is compared with.
    share
        Size of the top sets as a share of the sample.

    Returns
    -------
    Tensor
        One overlap a draw.

    Shapes
    ------
    first (K, M), second (M,) -> (K,).

    Notes
    -----
    A sample of M parameters knows an overlap p of their top sets to about √(p(1 − p)/(share · M)).
    """
    size = max(round(share * len(second)), 1)
    member = torch.zeros(len(second), dtype=torch.float64).index_fill_(0, second.topk(size).indices, 1.0)
    return torch.stack([member[draw.topk(size).indices].mean() for draw in first])


def concentration(values: Iterable[Tensor], shares: Sequence[float]) -> Tensor:
    """Share of the sum that the largest entries hold.

    Parameters
    ----------
    values
        Non-negative float32 numbers, as any number of tensors; read once, so a generator will do.
    shares
        Sizes of the top sets as shares of all entries.

    Returns
    -------
    Tensor
        One share of the sum for each, float64. Between two levels of the bfloat16 grid it is interpolated: the
        error is below 1/128 of the mass of one grid cell.

    Shapes
    ------
    S shares -> (S,).

    Raises
    ------
    ValueError
        If the sum is zero, or a number is negative, NaN or not float32.
    """
    counts = torch.zeros(_BUCKETS + 1, dtype=torch.int64)
    sums = torch.zeros(_BUCKETS + 1, dtype=torch.float64)
    for bits in _patterns(values):
        bucket = bits >> 16
        counts += torch.bincount(bucket, minlength=_BUCKETS + 1)
        sums += torch.bincount(bucket, weights=bits.view(torch.float32).double(), minlength=_BUCKETS + 1)
    if not float(sums.sum()) > 0:
        raise ValueError("every number is zero: there is no sum to share")
    # From the top down, with the empty set in front.
    held = torch.cat([torch.zeros(1, dtype=torch.float64), sums.flip(0).cumsum(0)]) / sums.sum()
    size = torch.cat([torch.zeros(1, dtype=torch.float64), counts.flip(0).cumsum(0).double()]) / counts.sum()
    wanted = torch.tensor(shares, dtype=torch.float64)
    right = torch.searchsorted(size, wanted).clamp(1, len(size) - 1)
    left = right - 1
    step = (size[right] - size[left]).clamp_min(torch.finfo(torch.float64).tiny)
    return held[left] + (held[right] - held[left]) * ((wanted - size[left]) / step).clamp(0, 1)


def stratified_sample(sizes: dict[str, int], every: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Positions drawn at random, one in each block of ``every`` consecutive entries.

    Parameters
    ----------
    sizes
        Number of entries by name.
    every
        Length of a block; an incomplete last block has its share of a draw left out.
    generator
        Source of randomness.

    Returns
    -------
    dict
        Ascending flat positions by name; names with no complete block have none.

    Raises
    ------
    ValueError
        If ``every`` is below 1.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    return {
        name: torch.arange(size // every) * every
        + torch.randint(every, (size // every,), generator=generator)
        for name, size in sizes.items()
    }


def take(values: dict[str, Tensor], where: dict[str, Tensor]) -> Tensor:
    """Entries at flat positions, in the order of ``where``.

    Parameters
    ----------
    values
        One tensor a name.
    where
        Flat positions by name.

    Returns
    -------
    Tensor
        The entries in one vector.

    Shapes
    ------
    where M positions in all -> (M,).
    """
    return torch.cat([values[name].flatten()[positions] for name, positions in where.items()])


def _patterns(values: Iterable[Tensor]) -> Iterator[Tensor]:
    """Bit patterns of all numbers, block by block."""
    for tensor in values:
        if tensor.dtype != torch.float32:
            raise ValueError(f"order statistics here need float32, got {tensor.dtype}")
        for block in tensor.detach().contiguous().flatten().split(_BLOCK):
            bits = (block + 0.0).view(torch.int32)  # −0 becomes 0
            if bool((bits < 0).any()) or bool((bits > 0x7F800000).any()):
                raise ValueError(
                    "a number is negative or NaN: take absolute values, and leave out what is undefined"
                )
            yield bits


def _size(masks: Sequence[Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def _check_masks(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    if [v.shape for v in first] != [v.shape for v in second]:
        raise ValueError(
            "the two lists hold tensors of different shapes: they are not about the same parameters"
        )
