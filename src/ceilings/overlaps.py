"""Overlap of the sets that two fine-tunes changed, as an interval where ties leave a set open."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Cut", "CutFinder", "OverlapCounts", "open_overlap"]


@dataclass(frozen=True)
class Cut:
    """Where a set of the largest changes ends.

    Parameters
    ----------
    size
        Entries that the set shall have.
    pattern
        Bit pattern, as float32, of the size of its smallest entry.
    above
        Entries that are larger; all of them belong.
    tied
        Entries of just this size, of which ``size - above`` belong: which ones is open unless all do.
    """

    size: int
    pattern: int
    above: int
    tied: int

    @property
    def value(self) -> float:
        """Size of the smallest entry."""
        return float(torch.tensor(self.pattern, dtype=torch.int32).view(torch.float32))


class CutFinder:
    """Finds a cut exactly: the upper half of the patterns is counted already, the lower half is counted here.

    Parameters
    ----------
    counts
        Number of entries by the upper half of the pattern of their size, entries without a change among the zeros.
    size
        Entries that the set shall have.
    mixed
        How many of them have a lower half that is not zero; None if that is not known.
    finer
        Patterns of the entries that have, where these were kept.
    """

    def __init__(
        self, counts: Tensor, size: int, mixed: Tensor | None = None, finer: Sequence[Tensor] | None = None
    ) -> None:
        held = counts.flip(0).cumsum(0)
        at = int(torch.searchsorted(held, size))
        self.size = size
        self.bucket = len(counts) - 1 - at
        self.above = int(held[at] - counts[self.bucket])
        self._lower = torch.zeros(2**16, dtype=torch.int64)
        #: Whether nothing has to be counted any more: the entries of the bucket are of one size, or are known.
        self.settled = False
        if finer:
            self.add(torch.cat(list(finer)))
        self.settled = finer is not None or (mixed is not None and not int(mixed[self.bucket]))
        if self.settled:
            self._lower[0] = counts[self.bucket] - self._lower.sum()

    def add(self, patterns: Tensor) -> None:
        """Count more entries.

        Parameters
        ----------
        patterns
            Patterns of their sizes, int32.
        """
        if self.settled:
            return
        inside = patterns[patterns >> 16 == self.bucket] & 0xFFFF
        if len(inside):
            self._lower += torch.bincount(inside, minlength=2**16)

    def add_zeros(self, count: int) -> None:
        """Count entries without a change.

        Parameters
        ----------
        count
            How many.
        """
        if self.bucket == 0 and not self.settled:
            self._lower[0] += count

    def empty(self) -> CutFinder:
        """A finder of the same cut that has counted nothing yet.

        Returns
        -------
        CutFinder
            To be added to this one later.
        """
        other = copy.copy(self)
        other._lower = torch.zeros_like(self._lower)
        return other

    def __iadd__(self, other: CutFinder) -> CutFinder:
        if not self.settled:
            self._lower += other._lower
        return self

    def energy_inside(self) -> float:
        """Sum of squares of those members of the set that lie in the bucket of the cut.

        Returns
        -------
        float
            Sizes rounded to float32.
        """
        patterns = torch.arange(2**16, dtype=torch.int32) | self.bucket << 16
        squares = patterns.view(torch.float32).double().square()
        cut = self.cut()
        low = cut.pattern & 0xFFFF
        above = self._lower[low + 1 :].double() @ squares[low + 1 :]
        return float(above + (cut.size - cut.above) * squares[low])

    def cut(self) -> Cut:
        """The cut, once every entry was counted.

        Returns
        -------
        Cut
            Its size, and the ties at it.
        """
        held = self._lower.flip(0).cumsum(0) + self.above
        at = int(torch.searchsorted(held, self.size))
        low = len(held) - 1 - at
        tied = int(self._lower[low])
        return Cut(self.size, self.bucket << 16 | low, int(held[at]) - tied, tied)


@dataclass
class OverlapCounts:
    """Entries of two checkpoints by whether each changed, and by where each lies against its cut.

    Parameters
    ----------
    parameters
        Entries of both.
    changed
        Entries that the first, the second, and both changed.
    sides
        ``sides[i][j]``: entries below (0), at (1) or above (2) the cut of the first and of the second.
    changed_by_chance, top_by_chance
        Overlap to expect if each had as many members in every tensor as it has, at random.
    """

    parameters: int = 0
    changed: list[int] = field(default_factory=lambda: [0, 0, 0])
    sides: Tensor = field(default_factory=lambda: torch.zeros(3, 3, dtype=torch.int64))
    changed_by_chance: float = 0.0
    top_by_chance: float = 0.0

    def __iadd__(self, other: OverlapCounts) -> OverlapCounts:
        self.parameters += other.parameters
        self.changed = [a + b for a, b in zip(self.changed, other.changed, strict=True)]
        self.sides = self.sides + other.sides
        self.changed_by_chance += other.changed_by_chance
        self.top_by_chance += other.top_by_chance
        return self

    def finish_tensor(self, first: Cut, second: Cut) -> OverlapCounts:
        """Add what chance gives within this tensor, once all of it was counted.

        Parameters
        ----------
        first, second
            The cuts of the two checkpoints.

        Returns
        -------
        OverlapCounts
            The same counts.
        """
        self.changed_by_chance = self.changed[0] * self.changed[1] / self.parameters
        rows, columns = self.sides.sum(1).tolist(), self.sides.sum(0).tolist()
        members = [
            side[2] + side[1] * (cut.size - cut.above) / cut.tied
            for side, cut in ((rows, first), (columns, second))
        ]
        self.top_by_chance = members[0] * members[1] / self.parameters
        return self


def open_overlap(sides: Tensor, first: int, second: int) -> tuple[int, int]:
    """Least and greatest number of common members of two sets that ties leave open.

    Parameters
    ----------
    sides
        ``sides[i][j]``: entries below (0), at (1) or above (2) the cut of the first set and of the second.
    first, second
        Members of each set that are to be chosen among those at its cut.

    Returns
    -------
    tuple
        Both are attained by some choice.

    Shapes
    ------
    sides (3, 3).
    """
    at_below, at_at, at_above = (int(n) for n in sides[1])
    below_at, above_at = int(sides[0][1]), int(sides[2][1])
    both = int(sides[2][2])
    # Most: take what the other has for certain, then the same ones of those that are open to both.
    sure = min(first, at_above), min(second, above_at)
    most = both + sum(sure) + min(first - sure[0], second - sure[1], at_at)
    # Least: take what the other has not, then different ones of those that are open to both.
    rest = max(0, first - at_below), max(0, second - below_at)
    shared = min(rest[0], at_at), min(rest[1], at_at)
    forced = sum(r - s for r, s in zip(rest, shared, strict=True))
    return both + forced + max(0, sum(shared) - at_at), most
