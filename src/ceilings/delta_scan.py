"""Two tensors, block by block: what changed by which rule, how far, and on which weights."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ceilings.safetensors_file import TORCH_DTYPES
from ceilings.tally import GRIDS, Bins, Numbers, Tally, bucket_values, half_gap_exponents

__all__ = [
    "ABSOLUTE",
    "RELATIVE",
    "blocks",
    "changed",
    "coarser",
    "cut_to",
    "difference",
    "differs",
    "positions",
    "scan",
    "size_patterns",
]

#: Least difference that counts as a change by the absolute rule.
ABSOLUTE: Final = 1e-5
#: Least difference over the larger magnitude that counts as a change by the relative rule.
RELATIVE: Final = 1e-3
_BLOCK: Final = 2**19
# Sizes off the grid of the buckets are kept one by one up to this many, or one in so many entries: 4 bytes each.
_FEW: Final = 2**10
_FEW_IN: Final = 64
_NOTHING: Final = np.zeros(0, dtype=np.int64)
_SCRATCH: Final = threading.local()
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def coarser(first: str, second: str) -> str:
    """The number format of two that has fewer significant bits.

    Parameters
    ----------
    first, second
        Codes of floating formats.

    Returns
    -------
    str
        One of the two: what the other's numbers are rounded to before they are compared.
    """
    return min(first, second, key=lambda code: GRIDS[code])


def cut_to(tensor: Tensor, dtype: str) -> Tensor:
    """Tensor in the number format of a comparison.

    Parameters
    ----------
    tensor
        As it is stored.
    dtype
        Code of the format.

    Returns
    -------
    Tensor
        The tensor itself where nothing is to do.
    """
    return tensor.to(TORCH_DTYPES[dtype])


def difference(base: Tensor, tuned: Tensor) -> Tensor:
    """Change of every entry; what is infinite or NaN on either side counts as no change.

    Parameters
    ----------
    base, tuned
        Tensors of one number format and shape.

    Returns
    -------
    Tensor
        float32 where that holds a difference of 16-bit numbers, otherwise float64.
    """
    wide = _wide(base.dtype)
    change = tuned.to(wide) - base.to(wide)
    if not bool(torch.isfinite(change).all()):
        change = change.nan_to_num(0.0, 0.0, 0.0)
    return change


def size_patterns(change: Tensor) -> Tensor:
    """Bit patterns of sizes as float32; they are ordered like the sizes.

    Parameters
    ----------
    change
        Changes.

    Returns
    -------
    Tensor
        int32, not negative.
    """
    return change.abs().float().view(torch.int32)


def scan(base: Tensor, tuned: Tensor, dtype: str) -> Tally:
    """Count over two tensors.

    Parameters
    ----------
    base, tuned
        Tensors of one shape, as they are stored.
    dtype
        Number format in which they are compared; both are rounded to it alike.

    Returns
    -------
    Tally
        Counts and sums.
    """
    counter = _Counter(dtype, base.numel())
    for first, second in blocks(base, tuned, dtype):
        counter.add(first, second)
    return counter.tally()


def blocks(base: Tensor, tuned: Tensor, dtype: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors in the number format of a comparison, in small pieces.

    Parameters
    ----------
    base, tuned
        Tensors of one shape, as they are stored.
    dtype
        Number format in which they are compared.

    Yields
    ------
    tuple
        A piece of each, flat.
    """
    first, second = base.reshape(-1), tuned.reshape(-1)
    for start in range(0, len(first), _BLOCK):
        part = slice(start, start + _BLOCK)
        yield cut_to(first[part], dtype), cut_to(second[part], dtype)


def differs(base: Tensor, tuned: Tensor) -> Tensor:
    """Which entries differ in their bits.

    Parameters
    ----------
    base, tuned
        Tensors of one number format and shape.

    Returns
    -------
    Tensor
        True = different; zeros of either sign and NaN of any payload are told apart here.
    """
    integers = _INTEGERS[base.dtype.itemsize]
    return base.view(integers) != tuned.view(integers)


def positions(mask: Tensor) -> Tensor:
    """Where a mask is true.

    Parameters
    ----------
    mask
        Flat.

    Returns
    -------
    Tensor
        Ascending positions.
    """
    # NOTE several times faster than a mask as an index, or than nonzero, in PyTorch.
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _where_bits_differ(base: Tensor, tuned: Tensor) -> Tensor:
    """Ascending positions of the entries whose bits differ."""
    first, second = (np.ascontiguousarray(t.view(_INTEGERS[t.dtype.itemsize]).numpy()) for t in (base, tuned))
    together = 8 // first.itemsize
    whole = len(first) // together * together
    # Where few differ, eight bytes at a time are compared first, and single entries only in those that differ.
    a, b = (part[:whole].view(np.int64) for part in (first, second))
    words = np.flatnonzero(a != b)
    if 2 * len(words) > len(a):
        return torch.from_numpy(np.flatnonzero(first != second))
    at = np.flatnonzero(a[words].view(first.dtype) != b[words].view(first.dtype))
    shift = together.bit_length() - 1
    found = (words[at >> shift] << shift) + (at & together - 1)
    rest = whole + np.flatnonzero(first[whole:] != second[whole:])
    return torch.from_numpy(np.concatenate((found, rest)) if len(rest) else found)


def changed(base: Tensor, tuned: Tensor) -> Tensor:
    """Which entries changed by the rule of equality.

    Parameters
    ----------
    base, tuned
        Tensors of one number format and shape.

    Returns
    -------
    Tensor
        True = another number; zeros of either sign are equal, and so are NaN of any payload.
    """
    found = differs(base, tuned)
    if bool(found.any()):
        wide = _wide(base.dtype)
        a, b = base.to(wide), tuned.to(wide)
        found &= ~((a == b) | (a.isnan() & b.isnan()))
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Format in which differences of numbers of this format are taken."""
    # NOTE a float32 holds the difference of two bfloat16 numbers exactly unless one is 2**16 times the other.
    return torch.float32 if dtype.itemsize <= 2 else torch.float64


class _Counter:
    """Sums over blocks, one number for every bucket; one at a time in each thread."""

    def __init__(self, dtype: str, entries: int) -> None:
        # Formats of 8 bits are exact in bfloat16, where a bucket is one number.
        self.dtype = dtype
        self.entries, self.finer = entries, 0
        self.sums = Tally()
        self.sizes, self.mixed, self.weights, self.changed = (Bins(values=_NOTHING) for _ in range(4))
        self.size_energy, self.by_weight = Bins(), Bins()

    def add(self, base: Tensor, tuned: Tensor) -> None:
        """Count over one block."""
        sums = self.sums
        buckets, square = _weight_buckets(base)
        sums.parameters += len(base)
        sums.base_square += square
        self.weights += _counted(buckets)
        at = _where_bits_differ(base, tuned)
        if not len(at):
            return
        if len(at) < len(base):
            base, tuned, buckets = (part.index_select(0, at) for part in (base, tuned, buckets))
        self._changes(base, tuned, buckets)

    def _changes(self, base: Tensor, tuned: Tensor, buckets: Tensor) -> None:
        """Count over the entries that differ in their bits."""
        sums, wide = self.sums, _wide(base.dtype)
        a, b = base.to(wide), tuned.to(wide)
        change = b - a
        # NOTE numbers are finite and not the same nearly always: one look at the changes then replaces five.
        usual = math.isfinite(float(change.sum())) and float(change.abs().min()) > 0
        if not usual:
            same = (a == b) | (a.isnan() & b.isnan())
            sums.bits_only += _number(same)
            a, b, change, buckets = a[~same], b[~same], change[~same], buckets[~same]
        sums.equality += len(a)
        self.changed += _counted(buckets)
        if not usual:
            sized = change.isfinite()
            sums.non_finite += (lost := len(a) - _number(sized))
            sums.absolute += lost
            sums.relative += lost
            a, b, change, buckets = a[sized], b[sized], change[sized], buckets[sized]
        size = change.abs_()
        sums.absolute += _number(size > ABSOLUTE)
        sums.relative += _number(size > torch.maximum(a.abs(), b.abs()).mul_(RELATIVE))
        square = size.double().square()
        sums.fourth += float(square.dot(square))
        patterns = size_patterns(size)
        at = patterns >> 16
        finer = torch.from_numpy(np.flatnonzero(patterns.numpy() & 0xFFFF))
        if len(finer):
            self.mixed += _counted(at.index_select(0, finer))
            self._keep(patterns.index_select(0, finer))
        self.sizes += _counted(at)
        self.size_energy += _counted(at, square)
        self.by_weight += _counted(buckets, square)

    def _keep(self, patterns: Tensor) -> None:
        """Keep sizes that are not the least of their bucket, as long as they are few."""
        self.finer += len(patterns)
        if self.sums.finer is not None:
            few = self.finer <= max(_FEW, self.entries // _FEW_IN)
            self.sums.finer = [*self.sums.finer, patterns] if few else None

    def tally(self) -> Tally:
        """What was counted."""
        sums = self.sums
        sums.sizes, sums.size_energy, sums.mixed = self.sizes, self.size_energy, self.mixed
        sums.weights, sums.changed_weights, sums.weight_energy = self.weights, self.changed, self.by_weight
        sums.square = float(sums.size_energy.values.sum())
        if _is_on_grid(TORCH_DTYPES[self.dtype]):
            sums.base_square = float((sums.weights.values * _bucket_squares()[sums.weights.buckets]).sum())
        sums.gaps = self._gaps(sums.weights, sums.changed_weights)
        return sums

    def _gaps(self, weights: Bins, changed: Bins) -> dict[int, int]:
        """Unchanged entries by the least step that they could have shown."""
        unchanged = weights.values.copy()
        if len(changed.values):
            unchanged[changed.start - weights.start :][: len(changed.values)] -= changed.values
        exponents = half_gap_exponents(self.dtype)[weights.buckets]
        least = int(exponents.min())
        counts = np.bincount(exponents - least, unchanged)
        return {least + k: int(count) for k, count in enumerate(counts) if count}


@functools.cache
def _bucket_squares() -> Numbers:
    """Squares of the magnitudes at which the buckets begin, 0 for what is not finite."""
    return np.square(np.nan_to_num(bucket_values(), posinf=0.0))


def _number(mask: Tensor) -> int:
    """Number of true entries; PyTorch counts them several times more slowly."""
    return int(np.count_nonzero(mask.numpy()))


def _scratch(dtype: torch.dtype, count: int) -> Tensor:
    """Memory of this thread to be written over by every block: fresh pages cost as much as the work on them."""
    kept: dict[torch.dtype, Tensor] | None = getattr(_SCRATCH, "kept", None)
    if kept is None:
        kept = _SCRATCH.kept = {}
    if dtype not in kept or kept[dtype].numel() < count:
        kept[dtype] = torch.empty(count, dtype=dtype)
    return kept[dtype][:count]


def _counted(buckets: Tensor, weights: Tensor | None = None) -> Bins:
    """The number, or the weights, of the entries of each bucket."""
    if not len(buckets):
        return Bins(values=_NOTHING)
    start = int(buckets.min())
    return Bins(start, torch.bincount(buckets - start if start else buckets, weights).numpy())


def _is_on_grid(dtype: torch.dtype) -> bool:
    """Whether every number of a format is one of bfloat16, so that a bucket holds one number."""
    return dtype == torch.bfloat16 or dtype.itemsize == 1


def _weight_buckets(weights: Tensor) -> tuple[Tensor, float]:
    """Bucket of every weight, and the sum of squares where the buckets do not give it."""
    if _is_on_grid(weights.dtype):
        codes = weights.bfloat16().view(torch.int16)
        return torch.bitwise_and(codes, 0x7FFF, out=_scratch(torch.int16, len(codes))), 0.0
    pattern = (weights.float().view(torch.int32) >> 16) & 0x7FFF
    wide = weights.double()
    square = float(wide.dot(wide))
    if not math.isfinite(square):
        wide = wide.nan_to_num(0.0, 0.0, 0.0)
        square = float(wide.dot(wide))
    return pattern, square
