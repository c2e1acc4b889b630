r"""The three running sums of one parameter, and how the scores of a batch get into them.

The work is bound by memory traffic, not arithmetic, so gradients of single sequences exist only in a block
that stays in cache: one sequence on many rows of a large matrix, or many sequences on all rows of a small
one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ceilings.score_rules import RowsTerm, Term, joined

__all__ = ["ParameterSums"]

_BLOCK_BYTES: Final = 512 * 1024


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
    """

    def __init__(self, parameter: Tensor, rewards: int) -> None:
        shape = (1, parameter.numel()) if parameter.dim() < 2 else (len(parameter), parameter[0].numel())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.scores, self.squares = (
            torch.zeros(shape, dtype=dtype, device=parameter.device) for _ in range(2)
        )
        self.reward_scores = torch.zeros((rewards, *shape), dtype=dtype, device=parameter.device)

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

    def add(self, terms: list[Term], root_weights: Tensor, rewards: Tensor) -> None:
        r"""Add a batch.

        Parameters
        ----------
        terms
            All uses of the parameter; what they form is :math:`\sqrt{w_n} s_n`.
        root_weights
            :math:`\sqrt{w_n}`.
        rewards
            :math:`\sqrt{w_n} (R_n - c)`.

        Shapes
        ------
        root_weights (N,), rewards (K, N).
        """
        if all(isinstance(term, RowsTerm) for term in terms):
            self._add_rows([term for term in terms if isinstance(term, RowsTerm)], root_weights, rewards)
            return
        rows, columns = self.scores.shape
        room = max(1, _BLOCK_BYTES * torch.get_num_threads() // self.scores.element_size())
        height = min(rows, max(1, room // columns))
        depth = 1 if height < rows else max(1, min(len(root_weights), room // (height * columns)))
        buffer = self.scores.new_empty(depth, height, columns)
        for first in range(0, rows, height):
            some_rows = slice(first, min(first + height, rows))
            writes = [term.on_rows(some_rows) for term in terms]
            sums = self._on_rows(some_rows)
            for n in range(0, len(root_weights), depth):
                some = slice(n, min(n + depth, len(root_weights)))
                block = buffer[: some.stop - n, : some_rows.stop - first]
                for number, write in enumerate(writes):
                    write(block, some, number == 0)
                sums.add(block, root_weights[some], rewards[:, some])

    def add_one(self, score: Tensor, root_weight: float, rewards: Tensor) -> None:
        r"""Add one sequence.

        Parameters
        ----------
        score
            Its score s itself, in the shape of the parameter.
        root_weight
            :math:`\sqrt{w}`.
        rewards
            :math:`\sqrt{w} (R - c)`.

        Shapes
        ------
        rewards (K,).
        """
        block = (root_weight * score.to(self.scores.dtype)).view(1, *self.scores.shape)
        self._on_rows(slice(None)).add(block, torch.tensor([root_weight]), rewards[:, None])

    def _on_rows(self, rows: slice) -> _Part:
        """Views of the sums."""
        return _Part(self.scores[rows], self.squares[rows], list(self.reward_scores[:, rows].unbind(0)))

    def _add_rows(self, terms: list[RowsTerm], root_weights: Tensor, rewards: Tensor) -> None:
        """Add a table that is only looked up: touch the rows that occur, not the whole table."""
        term = terms[0] if len(terms) == 1 else joined(terms)
        weights, coefficients = root_weights.to(term.sums), rewards.to(term.sums)
        self.scores.index_add_(0, term.rows, term.sums * weights[term.sequences, None])
        for target, reward in zip(self.reward_scores, coefficients, strict=True):
            target.index_add_(0, term.rows, term.sums * reward[term.sequences, None])
        self.squares.index_add_(0, term.rows, term.sums.square())


class _Part(NamedTuple):
    """Some rows of the sums."""

    scores: Tensor
    squares: Tensor
    reward_scores: list[Tensor]

    def add(self, block: Tensor, root_weights: Tensor, rewards: Tensor) -> None:
        """Add the scores of a few sequences; overwrites the block."""
        if len(block) == 1:
            self.scores.add_(block[0], alpha=float(root_weights[0]))
            self.squares.addcmul_(block[0], block[0])
            for target, reward in zip(self.reward_scores, rewards[:, 0].tolist(), strict=True):
                target.add_(block[0], alpha=reward)
            return
        by_sequence = block.view(len(block), -1).T
        self.scores.view(-1).addmv_(by_sequence, root_weights.to(block))
        for target, reward in zip(self.reward_scores, rewards.to(block), strict=True):
            target.view(-1).addmv_(by_sequence, reward)
        self.squares.view(-1).addmv_(by_sequence.square_(), torch.ones_like(by_sequence[0]))
