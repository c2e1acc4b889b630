r"""The three running sums of one parameter, and how the scores of a batch get into them.

The work is bound by memory traffic, not arithmetic, so gradients of single sequences exist only in a block
that stays in cache: a few sequences on some rows of a matrix, or many sequences on all rows of a small one.
Several sequences at once, because the three sums are then read and written once a block, not once a sequence.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ceilings.score_rules import RowsTerm, Term, joined

__all__ = ["ParameterSums"]

_BLOCK_BYTES: Final = 1024 * 1024  # a thread's second-level cache holds it and its rows of the sums
_SEQUENCES: Final = 8  # more of them would leave products of too few rows
_ROWS: Final = 32  # a matrix product of fewer is slow


class ParameterSums:
    r"""Sums of w s, w s² and w (R − c) s over sequences, for one parameter.

    Parameters
    ----------
    parameter
        Its shape, dtype and device are used, not its values.
    rewards
        Number of rewards, K.

    Shapes
    ------
    scores and squares (rows, columns), reward_scores (K, rows, columns): a vector is one row.

    Notes
    -----
    Sums start in the dtype of the scores, float32 or wider. After `widen` they are float64 while batches are
    still summed in the narrow dtype, in cache.
    """

    def __init__(self, parameter: Tensor, rewards: int) -> None:
        shape = (1, parameter.numel()) if parameter.dim() < 2 else (len(parameter), parameter[0].numel())
        self._dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.scores, self.squares = (
            torch.zeros(shape, dtype=self._dtype, device=parameter.device) for _ in range(2)
        )
        self.reward_scores = torch.zeros((rewards, *shape), dtype=self._dtype, device=parameter.device)

    @classmethod
    def of(
        cls, scores: Tensor, squares: Tensor, reward_scores: Tensor, device: torch.device
    ) -> ParameterSums:
        """Sums that were summed before.

        Parameters
        ----------
        scores, squares, reward_scores
            As in `ceilings.moments.ScoreMoments`; taken over, not copied, where they lie on the device.
        device
            Where to go on.

        Returns
        -------
        ParameterSums
            Ready for more.

        Shapes
        ------
        scores and squares as the parameter, reward_scores ``(K, *parameter)``.
        """
        sums = cls(scores.new_empty(0), 0)
        shape = (1, scores.numel()) if scores.dim() < 2 else (len(scores), scores[0].numel())
        sums.scores, sums.squares = scores.to(device).view(shape), squares.to(device).view(shape)
        sums.reward_scores = reward_scores.to(device).view(-1, *shape)
        return sums

    def widen(self) -> None:
        """Continue in float64: past some thousands of terms float32 forgets the small ones."""
        self.scores, self.squares = self.scores.double(), self.squares.double()
        self.reward_scores = self.reward_scores.double()

    def add(
        self,
        terms: list[Term],
        root_weights: Tensor,
        rewards: Tensor,
        squares: float = 1.0,
        linear: bool = True,
    ) -> None:
        r"""Add a batch.

        Parameters
        ----------
        terms
            All uses of the parameter; what they form is :math:`\sqrt{w_n} s_n`.
        root_weights
            :math:`\sqrt{w_n}`.
        rewards
            :math:`\sqrt{w_n} (R_n - c)`.
        squares
            How much each square counts; 0 leaves the squares as they are.
        linear
            False: leave the other two sums as they are.

        Shapes
        ------
        root_weights (N,), rewards (K, N).
        """
        if all(isinstance(term, RowsTerm) for term in terms):
            looked_up = [term for term in terms if isinstance(term, RowsTerm)]
            self._add_rows(looked_up, root_weights, rewards, squares, linear)
            return
        rows, columns = self.scores.shape
        depth, height = _block_shape(len(root_weights), rows, columns, self._dtype.itemsize)
        buffer = self.scores.new_empty(depth * height * columns, dtype=self._dtype)
        block, by_sequence = buffer[:0], buffer[:0]
        whole = _Shares.of(root_weights, rewards, squares, linear, buffer)
        starts = range(0, len(root_weights), depth)
        portions = [(slice(n, n + depth), whole.some(slice(n, n + depth))) for n in starts]
        everything = self._flat()
        for first in range(0, rows, height):
            some_rows = slice(first, min(first + height, rows))
            writes = [term.on_rows(some_rows) for term in terms]
            sums = everything.some(first * columns, (some_rows.stop - first) * columns)
            partial = sums if self.scores.dtype == self._dtype else sums.zeros(self._dtype)
            for some, shares in portions:
                shape = (len(shares.weights), some_rows.stop - first, columns)
                if block.shape != shape:
                    block = buffer[: shape[0] * shape[1] * columns].view(shape)
                    by_sequence = block.view(shape[0], -1).T
                for number, write in enumerate(writes):
                    write(block, some, number == 0)
                partial.add(by_sequence, shares)
            if partial is not sums:
                sums.fold(partial)

    def add_one(
        self, score: Tensor, root_weight: float, rewards: Tensor, squares: float = 1.0, linear: bool = True
    ) -> None:
        r"""Add one sequence.

        Parameters
        ----------
        score
            Its score s itself, in the shape of the parameter.
        root_weight
            :math:`\sqrt{w}`.
        rewards
            :math:`\sqrt{w} (R - c)`.
        squares, linear
            As in `add`.

        Shapes
        ------
        rewards (K,).
        """
        block = (root_weight * score.to(self.scores.dtype)).view(1, -1)
        weight = torch.tensor([root_weight], dtype=torch.float64)
        shares = _Shares.of(weight, rewards[:, None], squares, linear, block)
        self._flat().add(block.T, shares)

    def _flat(self) -> _Part:
        """Views of the sums."""
        rewards = [target.view(-1) for target in self.reward_scores]
        return _Part(self.scores.view(-1), self.squares.view(-1), rewards)

    def _add_rows(
        self, terms: list[RowsTerm], root_weights: Tensor, rewards: Tensor, squares: float, linear: bool
    ) -> None:
        """Add a table that is only looked up: touch the rows that occur, not the whole table."""
        term = terms[0] if len(terms) == 1 else joined(terms)
        found = term.sums.to(self.scores.dtype)
        if linear:
            weights, coefficients = root_weights.to(found), rewards.to(found)
            self.scores.index_add_(0, term.rows, found * weights[term.sequences, None])
            for target, reward in zip(self.reward_scores, coefficients, strict=True):
                target.index_add_(0, term.rows, found * reward[term.sequences, None])
        if squares:
            self.squares.index_add_(0, term.rows, found.square(), alpha=squares)


def _block_shape(sequences: int, rows: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Sequences and rows of one block."""
    room = _BLOCK_BYTES * torch.get_num_threads() // itemsize
    height = min(rows, max(_ROWS, room // (_SEQUENCES * columns)))
    depth = max(1, min(sequences, room // (height * columns)))
    if depth < sequences:
        depth = -(-sequences // -(-sequences // depth))  # no small remainder
    return depth, height


class _Shares(NamedTuple):
    """How much each sequence of a block counts in each sum; nothing where a sum is left as it is."""

    weights: Tensor
    squares: Tensor | None
    rewards: list[Tensor] | None

    @classmethod
    def of(cls, root_weights: Tensor, rewards: Tensor, squares: float, linear: bool, like: Tensor) -> _Shares:
        """Shares as `ParameterSums.add` takes them, where and in the dtype in which they are used."""
        weights = root_weights.to(like)
        ones = torch.full_like(weights, squares) if squares else None
        return cls(weights, ones, list(rewards.to(like)) if linear else None)

    def some(self, sequences: slice) -> _Shares:
        """Shares of some of the sequences."""
        squares = None if self.squares is None else self.squares[sequences]
        rewards = None if self.rewards is None else [r[sequences] for r in self.rewards]
        return _Shares(self.weights[sequences], squares, rewards)


class _Part(NamedTuple):
    """Some entries of the sums, flat."""

    scores: Tensor
    squares: Tensor
    reward_scores: list[Tensor]

    def some(self, start: int, length: int) -> _Part:
        """Fewer entries."""
        rewards = [target.narrow(0, start, length) for target in self.reward_scores]
        return _Part(self.scores.narrow(0, start, length), self.squares.narrow(0, start, length), rewards)

    def zeros(self, dtype: torch.dtype) -> _Part:
        """Room for a batch."""
        empty = torch.zeros_like(self.scores, dtype=dtype)
        rewards = [torch.zeros_like(empty) for _ in self.reward_scores]
        return _Part(empty, torch.zeros_like(empty), rewards)

    def fold(self, other: _Part) -> None:
        """Add the sums of a batch."""
        self.scores.add_(other.scores)
        self.squares.add_(other.squares)
        for target, found in zip(self.reward_scores, other.reward_scores, strict=True):
            target.add_(found)

    def add(self, by_sequence: Tensor, shares: _Shares) -> None:
        """Add the scores of a few sequences, one a column; overwrites them."""
        if shares.rewards is not None:
            self.scores.addmv_(by_sequence, shares.weights)
            for target, reward in zip(self.reward_scores, shares.rewards, strict=True):
                target.addmv_(by_sequence, reward)
        if shares.squares is not None:
            self.squares.addmv_(by_sequence.square_(), shares.squares)
