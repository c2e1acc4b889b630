"""Top sets of one model under several prompts: what they share, and what chance would share.

A top set of a hundred million parameters is kept as one bit a parameter, and as how many members each tensor, row and
column has. Every count below is over all parameters; nothing is sampled but the null model that is drawn on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["SharedTops", "packed"]

_BYTES: Final = 2**19  # of each set, unpacked at once
Within = Literal["all", "tensor", "row", "column"]


def packed(masks: Sequence[Tensor]) -> Tensor:
    """One bit a parameter.

    Parameters
    ----------
    masks
        Tensor by tensor, True = member; see `ceilings.top_sets.top_set`.

    Returns
    -------
    Tensor
        The bits of all tensors one after another, as bytes; the last byte is filled up with zeros.

    Shapes
    ------
    D parameters in all -> (⌈D / 8⌉,).
    """
    whole = torch.cat([mask.flatten() for mask in masks])
    return torch.from_numpy(np.packbits(whole.numpy()))


class SharedTops:
    """Top sets about the same parameters, one a prompt.

    Parameters
    ----------
    bits
        One row a set, as `packed` makes them.
    shapes
        Shape of every tensor, in the order of the bits.

    Raises
    ------
    ValueError
        If there are fewer than two sets, one is empty, or the bits are not those of such tensors.

    Shapes
    ------
    bits (S, ⌈D / 8⌉).
    """

    def __init__(self, bits: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes]
        if bits.ndim != 2 or len(bits) < 2 or bits.shape[1] != -(-sum(sizes) // 8):
            raise ValueError(
                f"bits have shape {tuple(bits.shape)} for {sum(sizes)} parameters: give one row of bits for each "
                "of two sets or more"
            )
        self._bits, self._shapes = bits, [tuple(shape) for shape in shapes]
        self._starts = np.cumsum([0, *sizes])
        self._counts = {within: self._count(within) for within in ("all", "tensor", "row", "column")}
        self.sizes = self._counts["all"][0][:, 0]
        if not bool((self.sizes > 0).all()):
            raise ValueError("a top set is empty: there is nothing to share")

    def overlaps(self) -> Tensor:
        """Share of each set that is in each other.

        Returns
        -------
        Tensor
            1 on the diagonal; see `ceilings.top_sets.overlap`.

        Shapes
        ------
        -> (S, S).
        """
        both = torch.zeros(len(self._bits), len(self._bits), dtype=torch.float64)
        for members in self._blocks():
            both += (
                members.float() @ members.float().T
            ).double()  # exact: a block has fewer than 2^24 entries
        return both * 2 / (self.sizes[:, None] + self.sizes)

    def chance(self, within: Within) -> Tensor:
        """Overlap to expect of sets that agree only in how many members each tensor, row or column has.

        Parameters
        ----------
        within
            Whose counts are kept; "all" keeps only the size of each set. A vector is one row and one column.

        Returns
        -------
        Tensor
            Expected overlap of every pair if within each the members were drawn at random.

        Shapes
        ------
        -> (S, S).
        """
        counts, lengths = self._counts[within]
        both = (counts / lengths) @ counts.T
        return both * 2 / (self.sizes[:, None] + self.sizes)

    def drawn_overlaps(self, draws: int, generator: np.random.Generator) -> Tensor:
        """Overlaps of sets drawn anew, each with its own number of members in every tensor.

        Parameters
        ----------
        draws
            Number of draws.
        generator
            Source of randomness.

        Returns
        -------
        Tensor
            The null model of `overlaps`; symmetric, 1 on the diagonal.

        Shapes
        ------
        -> (draws, S, S).
        """
        counts, lengths = (x.long().numpy() for x in self._counts["tensor"])
        first, second = np.triu_indices(len(counts), 1)
        good, bad = counts[first], lengths - counts[first]
        both = generator.hypergeometric(good, bad, counts[second], (draws, *good.shape)).sum(-1)
        result = torch.eye(len(counts), dtype=torch.float64).repeat(draws, 1, 1)
        value = torch.from_numpy(both) * 2 / (self.sizes[first] + self.sizes[second])
        result[:, first, second] = result[:, second, first] = value
        return result

    def companions(self) -> Tensor:
        """How many of the other sets hold a member too.

        Returns
        -------
        Tensor
            Share of the members of each set that belong to exactly k of the other sets.

        Shapes
        ------
        -> (S, S), k from 0 to S − 1.
        """
        sets = len(self._bits)
        found = torch.zeros(sets, sets, dtype=torch.float64)
        for members in self._blocks():
            total = members.sum(0, dtype=torch.int64)
            for row, own in zip(found, members.bool(), strict=True):
                row += torch.bincount(total[own] - 1, minlength=sets)
        return found / self.sizes[:, None]

    def chance_companions(self) -> Tensor:
        """What `companions` would be if sets agreed only in how many members each tensor has.

        Returns
        -------
        Tensor
            Expected shares.

        Shapes
        ------
        -> (S, S), k from 0 to S − 1.
        """
        counts, lengths = self._counts["tensor"]
        share = counts / lengths
        sets = len(counts)
        found = torch.zeros(sets, sets, dtype=torch.float64)
        for own in range(sets):
            law = torch.zeros(share.shape[1], sets, dtype=torch.float64)
            law[:, 0] = 1
            for other in set(range(sets)) - {own}:
                p = share[other][:, None]
                law[:, 1:] = law[:, 1:] * (1 - p) + law[:, :-1] * p
                law[:, 0] *= 1 - p[:, 0]
            found[own] = counts[own] @ law / self.sizes[own]
        return found

    def tensor_counts(self) -> Tensor:
        """Members of every tensor.

        Returns
        -------
        Tensor
            Counts.

        Shapes
        ------
        -> (S, number of tensors).
        """
        return self._counts["tensor"][0]

    def _blocks(self) -> Iterator[Tensor]:
        """All sets' members, some parameters at a time: (S, entries) of 0 and 1."""
        for start in range(0, self._bits.shape[1], _BYTES):
            yield torch.from_numpy(np.unpackbits(self._bits[:, start : start + _BYTES].numpy(), axis=1))

    def _members(self, tensor: int) -> Iterator[Tensor]:
        """Members in one tensor, one set after another, shaped as it."""
        start, stop = int(self._starts[tensor]), int(self._starts[tensor + 1])
        for row in self._bits:
            bits = np.unpackbits(row[start // 8 : -(-stop // 8)].numpy())
            yield torch.from_numpy(bits[start % 8 :][: stop - start]).view(self._shapes[tensor])

    def _count(self, within: Within) -> tuple[Tensor, Tensor]:
        """Members of each part (S, parts), and how many entries a part has."""
        if within == "all":
            counts, _ = self._count("tensor")
            return counts.sum(1, keepdim=True), torch.tensor([float(self._starts[-1])], dtype=torch.float64)
        parts, lengths = [], []
        for tensor, shape in enumerate(self._shapes):
            whole = within == "tensor" or len(shape) != 2
            axis = 0 if within == "column" else 1
            rows = [(m.sum()[None] if whole else m.sum(axis)).double() for m in self._members(tensor)]
            parts.append(torch.stack(rows))
            size = float(np.prod(shape))
            lengths.append(torch.full((len(rows[0]),), size / len(rows[0]), dtype=torch.float64))
        return torch.cat(parts, 1), torch.cat(lengths)
