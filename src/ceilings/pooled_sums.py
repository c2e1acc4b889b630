r"""Score moments whose sequences lie on several processes: every process sums its own, and the sums are added.

All that `ceilings.moments.ScoreMoments` stores are plain sums over responses, so this is exact: the processes
talk only when they pool, once a run or once a saving, never during a backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ceilings import scores
from ceilings.moments import Weighting
from ceilings.score_sums import ParameterSums

__all__ = ["PooledAccumulator"]


class _Part(NamedTuple):
    """What a process tells the others before they add."""

    weighting: Weighting | None
    shift: Tensor
    reward_sum: Tensor
    reward_squares: Tensor
    responses: int
    weight_sum: float
    slow: frozenset[str]
    signature: tuple[Any, ...]


class PooledAccumulator(scores.ScoreAccumulator):
    r"""A `ceilings.scores.ScoreAccumulator` on each of several processes, of which the first ends up with all sums.

    Parameters, attributes and errors are those of its parent. Every process makes one, over the same model, adds
    the sequences that are its own, and calls `pool` when all do.

    Notes
    -----
    Rewards are shifted by a constant, and each process chooses its own; pooling moves them to the constant of
    the first process that has sequences, which loses nothing.
    """

    def pool(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the sums of all processes to the first one; the others start again from zero.

        Parameters
        ----------
        group
            Processes that talk over the network of the CPU, for the small things; None for the default group, over
            which the tensors go in any case.

        Raises
        ------
        ValueError
            If the processes measure different parameters, rewards or levels, or some have weights and others none.

        Notes
        -----
        Collective: every process must call it, those without a sequence too. Nothing is added twice: pool, add
        more, pool again.
        """
        parts: list[_Part] = [self._part()] * dist.get_world_size()
        dist.all_gather_object(parts, parts[0], group=group)
        failures: list[Exception | None] = [None] * len(parts)
        failure: Exception | None = None
        try:
            filled = _check(parts)
            if filled:
                self._prepare(filled, sum(part.responses for part in parts))
        except Exception as error:
            failure = error
        # NOTE one that fails alone, for lack of memory say, would leave the others waiting for its sums.
        dist.all_gather_object(failures, failure, group=group)
        for found in failures:
            if found is not None:
                raise found
        if filled:
            self._reduce(parts, filled)

    def reseed(self, seed: int) -> None:
        """Draw the next signs from another seed.

        Parameters
        ----------
        seed
            One that no other process has.
        """
        if self._generator is not None:
            self._generator.manual_seed(seed)

    def _part(self) -> _Part:
        """What the others must know of this process."""
        slow = set(self._slow_next_token)
        if self._fast:
            slow |= self._parameters.keys() - self._fast
        shapes = tuple((name, tuple(p.shape)) for name, p in self._parameters.items())
        signature = (self.level, self.reward_names, shapes)
        return _Part(
            self._weighting,
            self._shift,
            self._reward_sum,
            self._reward_squares,
            self._count,
            self._weight_sum,
            frozenset(slow),
            signature,
        )

    def _prepare(self, filled: list[_Part], count: int) -> None:
        """Make room where there are no sums yet; agree on the constant and on the dtype."""
        first = filled[0]
        if self._weighting is None:
            self._weighting, self._shift = first.weighting, first.shift
            self._reward_sum = self._reward_squares = torch.zeros_like(first.shift)
            self._sums = {n: ParameterSums(p, len(first.shift)) for n, p in self._parameters.items()}
            self._fast = set(self._parameters)
        move = self._shift - first.shift
        for sums in self._sums.values():
            if count > scores._NARROW_SEQUENCES:
                sums.widen()
            for k, step in enumerate(move.tolist()):
                if step:
                    sums.reward_scores[k].add_(sums.scores, alpha=step)
        self._shift = first.shift

    def _reduce(self, parts: list[_Part], filled: list[_Part]) -> None:
        """Add up, on the first process."""
        mine = dist.get_rank() == 0
        for sums in self._sums.values():
            for tensor in (sums.scores, sums.squares, sums.reward_scores):
                dist.reduce(tensor, dst=0)
                if not mine:
                    tensor.zero_()
        shift, nothing = filled[0].shift, torch.zeros_like(filled[0].shift)
        moved = [_moved(part, shift) for part in filled]
        self._reward_sum = sum((m[0] for m in moved), nothing) if mine else nothing
        self._reward_squares = sum((m[1] for m in moved), nothing) if mine else nothing
        self._count = sum(part.responses for part in filled) if mine else 0
        self._weight_sum = sum(part.weight_sum for part in filled) if mine else 0.0
        slow = frozenset[str]().union(*(part.slow for part in parts))
        # A parameter that is slow anywhere is reported; here it may go on being fast, which is as exact.
        self._slow_next_token |= slow


def _moved(part: _Part, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the rewards of one process, about another constant."""
    move = part.shift - shift
    squares = part.reward_squares + 2 * move * part.reward_sum + move.square() * part.weight_sum
    return part.reward_sum + move * part.weight_sum, squares


def _check(parts: list[_Part]) -> list[_Part]:
    """Processes that have sequences; refuses those that do not belong together."""
    for rank, part in enumerate(parts):
        if part.signature != parts[0].signature:
            raise ValueError(
                f"process {rank} measures other parameters, rewards or another level than process 0: "
                "give all of them the same model and options"
            )
    filled = [part for part in parts if part.weighting is not None]
    if len({part.weighting for part in filled}) > 1:
        raise ValueError(
            "some processes have weights and others none: give weights to all sequences or to none"
        )
    return filled
