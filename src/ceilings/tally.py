"""Counts and sums over the entries of two tensors, which add up over tensors to those of a layer and of a model.

Magnitudes are counted by the upper half of their float32 pattern (sign, exponent, 7 bits: the bfloat16 grid): a few
thousand buckets, from which order statistics and shares of the sum follow, with an error that is known.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BUCKETS", "GRIDS", "Bins", "Numbers", "Tally", "bucket_values", "half_gap_exponents"]

#: An array of NumPy: these have a few thousand entries, on which it takes a fraction of the time of PyTorch.
Numbers = NDArray[Any]

BUCKETS: Final = 2**15
_SUMMED: Final = (
    "parameters equality absolute relative bits_only non_finite base_square square fourth sizes size_energy mixed "
    "weights changed_weights weight_energy"
).split()
_INFINITE: Final = 0x7F80  # from here on, buckets hold what is infinite or not a number
#: Bits after the leading one, and least exponent, of the floating formats.
GRIDS: Final = {
    "F64": (52, -1022),
    "F32": (23, -126),
    "F16": (10, -14),
    "BF16": (7, -126),
    "F8_E4M3": (3, -6),
    "F8_E4M3FNUZ": (3, -7),
    "F8_E5M2": (2, -14),
    "F8_E5M2FNUZ": (2, -15),
}


@functools.cache
def bucket_values(edge: int = 0) -> Numbers:
    """Magnitudes at which the buckets begin.

    Parameters
    ----------
    edge
        0 for the least magnitude of each bucket, 1 for that of the next one.

    Returns
    -------
    NDArray
        Ascending, float64; infinite from the bucket of infinity on.

    Shapes
    ------
    -> (BUCKETS,).
    """
    pattern = np.minimum(np.arange(BUCKETS, dtype=np.int32) + edge, _INFINITE) << 16
    return pattern.view(np.float32).astype(np.float64)


@functools.cache
def half_gap_exponents(dtype: str) -> Numbers:
    """Size of the least step that a weight of each bucket can show, as a power of two.

    Parameters
    ----------
    dtype
        Number format of the weights.

    Returns
    -------
    NDArray
        Whole exponents: a step below 2 to that power leaves the stored number as it is, in either direction.

    Shapes
    ------
    -> (BUCKETS,).

    Notes
    -----
    Half the gap to the neighbour. Just at a power of two the neighbour towards zero is half as far; of such weights
    that is known where a bucket holds one number, as in bfloat16 and formats of 8 bits.

    References
    ----------
    Claim ``prop-ulp``.
    """
    bits, least = GRIDS[dtype]
    bucket = np.arange(BUCKETS)
    exponent = np.maximum((bucket >> 7) - 127, least)
    power = (bucket & 0x7F == 0) & (bucket >> 7 > least + 127) & (bits <= 7)
    return exponent - bits - 1 - power


@dataclass
class Bins:
    """One number a bucket, without the empty buckets at both ends.

    Parameters
    ----------
    start
        Bucket of the first number.
    values
        The numbers.
    """

    start: int = 0
    values: Numbers = field(default_factory=lambda: np.zeros(0))

    @property
    def buckets(self) -> slice:
        """Buckets that have a number."""
        return slice(self.start, self.start + len(self.values))

    def __iadd__(self, other: Bins) -> Bins:
        count, mine = len(other.values), len(self.values)
        if not count:
            return self
        if not mine:
            self.start, self.values = other.start, other.values.copy()
            return self
        start = min(self.start, other.start)
        end = max(self.start + mine, other.start + count)
        if end - start > mine:
            wide = np.zeros(end - start, dtype=self.values.dtype)
            wide[self.start - start : self.start - start + mine] = self.values
            self.start, self.values = start, wide
        self.values[other.start - start : other.start - start + count] += other.values
        return self

    def dense(self) -> Numbers:
        """One number for every bucket.

        Returns
        -------
        NDArray
            The numbers, zeros included.

        Shapes
        ------
        -> (BUCKETS,).
        """
        found = np.zeros(BUCKETS, dtype=self.values.dtype)
        found[self.start : self.start + len(self.values)] = self.values
        return found


@dataclass
class Tally:
    """What was counted over one tensor, or over many.

    Parameters
    ----------
    parameters
        Entries compared.
    equality, absolute, relative
        Entries that changed by each rule.
    bits_only
        Entries that differ in their bits and are the same number: zeros of either sign, NaN of any payload.
    non_finite
        Entries that changed to, from or between what is infinite or NaN; they have no size.
    base_square, square, fourth
        Sum of the squared weights of the base, of the squared changes, and of their fourth powers.
    sizes, size_energy
        Number of changed entries and their squared change, by size of the change.
    mixed
        Number of changed entries whose size is not the least of its bucket: where there are none, all sizes of the
        bucket are equal.
    finer
        Patterns of those sizes, as int32; None where they were too many to keep.
    weights, changed_weights, weight_energy
        Number of entries, of changed entries, and their squared change, by magnitude of the weight.
    gaps
        Number of unchanged entries by the least step that they could have shown, see `half_gap_exponents`;
        key is the exponent.
    """

    parameters: int = 0
    equality: int = 0
    absolute: int = 0
    relative: int = 0
    bits_only: int = 0
    non_finite: int = 0
    base_square: float = 0.0
    square: float = 0.0
    fourth: float = 0.0
    sizes: Bins = field(default_factory=Bins)
    size_energy: Bins = field(default_factory=Bins)
    mixed: Bins = field(default_factory=Bins)
    finer: list[Tensor] | None = field(default_factory=list)
    weights: Bins = field(default_factory=Bins)
    changed_weights: Bins = field(default_factory=Bins)
    weight_energy: Bins = field(default_factory=Bins)
    gaps: dict[int, int] = field(default_factory=dict)

    def __iadd__(self, other: Tally) -> Tally:
        for name in _SUMMED:
            total = getattr(self, name)
            total += getattr(other, name)
            setattr(self, name, total)
        self.finer = None if self.finer is None or other.finer is None else self.finer + other.finer
        for exponent, count in other.gaps.items():
            self.gaps[exponent] = self.gaps.get(exponent, 0) + count
        return self

    def relative_size(self) -> float | None:
        """Norm of the change over norm of the base.

        Returns
        -------
        float | None
            1 means as long as the weights; None where the base is zero.
        """
        return math.sqrt(self.square / self.base_square) if self.base_square else None

    def participation(self) -> float | None:
        """Number of equal changes that would be as concentrated as these.

        Returns
        -------
        float | None
            Between 1 and the number of changed entries; None where nothing changed.
        """
        return self.square**2 / self.fourth if self.fourth else None

    def energy_share(self, share: float) -> tuple[float, float] | None:
        """Share of the squared change in the entries that changed most.

        Parameters
        ----------
        share
            How many entries, as a share of all that were compared.

        Returns
        -------
        tuple | None
            Lower and upper bound, equal where the cut falls between two buckets; None where nothing changed.
        """
        if not self.square:
            return None
        wanted = max(1, round(share * self.parameters))
        start, counts, energy = _together(self.sizes, self.size_energy)
        counts, energy = counts[::-1], energy[::-1]
        held = counts.cumsum()
        at = int(held.searchsorted(wanted))
        total = float(energy.sum())
        if at >= len(held):
            return 1.0, 1.0
        before = float(energy[:at].sum())
        inside = wanted - (int(held[at - 1]) if at else 0)
        low, high = _part_of_bucket(start + len(held) - 1 - at, inside, int(counts[at]), float(energy[at]))
        return (before + low) / total, min(1.0, (before + high) / total)

    def smallest_decile(self) -> float | None:
        """Share of the changes that fall on the tenth of the weights of smallest magnitude.

        Returns
        -------
        float | None
            A tenth by chance; weights that tie at the cut, and those of its bucket, count in proportion. None where
            nothing changed.
        """
        if not self.equality:
            return None
        _, counts, changed = _together(self.weights, self.changed_weights)
        held = counts.cumsum()
        wanted = 0.1 * self.parameters
        at = int(held.searchsorted(wanted))
        inside = (wanted - float(held[at] - counts[at])) / float(counts[at])
        return float((changed[:at].sum() + inside * changed[at]) / changed.sum())

    def median_step(self) -> float | None:
        """Median size of the changes that were seen.

        Returns
        -------
        float | None
            The least size of the bucket that holds it, so at most 1/128 too small; None where nothing changed.
        """
        held = self.sizes.dense().cumsum()
        if not held[-1]:
            return None
        at = int(held.searchsorted((held[-1] + 1) // 2))
        return float(bucket_values()[at])

    def hidden(self, step: float) -> int:
        """Unchanged entries that could not have shown a step.

        Parameters
        ----------
        step
            Size of the step.

        Returns
        -------
        int
            How many have a least visible step above this one.
        """
        return sum(count for exponent, count in self.gaps.items() if step < math.ldexp(1.0, exponent))


def _together(first: Bins, second: Bins) -> tuple[int, Numbers, Numbers]:
    """Two bins over the range of both: where it begins, and their numbers."""
    start = min(first.start, second.start)
    end = max(b.start + len(b.values) for b in (first, second))
    found = []
    for b in (first, second):
        wide = np.zeros(end - start, dtype=b.values.dtype)
        wide[b.start - start : b.start - start + len(b.values)] = b.values
        found.append(wide)
    return start, found[0], found[1]


def _part_of_bucket(bucket: int, wanted: int, count: int, energy: float) -> tuple[float, float]:
    """Bounds on the energy of the largest ``wanted`` of ``count`` entries of a bucket."""
    # They hold at least their mean share, and each entry lies between the ends of the bucket.
    if wanted == count:
        return energy, energy
    least, most = (float(bucket_values(edge)[bucket]) ** 2 for edge in (0, 1))
    low = max(energy * wanted / count, energy - (count - wanted) * most)
    return low, max(low, min(wanted * most, energy - (count - wanted) * least))
