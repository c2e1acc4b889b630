"""A measurement that takes a while: score moments of rollouts, saved on the way, stopped and resumed at will."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ceilings.distributed import team
from ceilings.moments import Level, ScoreMoments
from ceilings.rollouts import Rollouts
from ceilings.uncertainty import with_permuted

__all__ = ["Checkpoint", "Interrupted", "measure_rollouts", "reward_columns"]


class Interrupted(Exception):
    """The user asked to stop; what was done is saved."""


@dataclass(frozen=True)
class Checkpoint:
    """Where the moments of an unfinished measurement are kept, and how often they are saved.

    Parameters
    ----------
    path
        File of moments; one that is there is continued.
    seconds
        Least time between two savings; no more than a twentieth of the time goes into saving. 0 saves every batch.
    """

    path: Path
    seconds: float = 60.0


def reward_columns(
    rewards: Tensor,
    names: tuple[str, ...],
    groups: Sequence[int],
    folds: Sequence[Sequence[int]],
    permutations: int,
    generator: torch.Generator,
) -> tuple[Tensor, tuple[str, ...]]:
    """Rewards, and permuted copies of the first that know nothing of the responses.

    Parameters
    ----------
    rewards, names
        One column a reward, and their names.
    groups
        Group of each response. Rewards are permuted within groups, which keeps what is common to a group on both
        sides; those of groups of one are permuted among themselves.
    folds
        Rows of each fold; nothing is permuted from one to another, so that the folds stay independent.
    permutations
        Number of copies, P.
    generator
        Source of the permutations.

    Returns
    -------
    tuple
        The columns and their names; a copy is called ``permuted-0`` and so on.

    Shapes
    ------
    rewards (N, K) -> (N, K + P).

    Units
    -----
    [R].
    """
    sizes = Counter(groups)
    labels = torch.tensor([group if sizes[group] > 1 else -1 for group in groups])
    columns = torch.zeros(len(rewards), permutations, dtype=torch.float64)
    copies: tuple[str, ...] = ()
    for rows in map(list, folds):
        mixed, (_, *copied) = with_permuted(rewards[rows, 0].double(), permutations, generator, labels[rows])
        columns[rows], copies = mixed[:, 1:], tuple(copied)
    return torch.cat([rewards.double(), columns], 1), (*names, *copies)


def measure_rollouts(
    model: nn.Module,
    rollouts: Rollouts,
    rewards: Tensor,
    reward_names: tuple[str, ...],
    *,
    batch_size: int = 8,
    level: Level = "sequence",
    sign_draws: int | None = None,
    seed: int = 0,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
    slow: Callable[[float], None] = lambda seconds: None,
) -> ScoreMoments:
    """Score moments of rollouts, batch by batch.

    Parameters
    ----------
    model
        A causal language model.
    rollouts
        What it is measured on.
    rewards, reward_names
        One column a reward, and their names.
    batch_size
        Sequences in one pass of one process; tokens where every token is a row.
    level, sign_draws
        As in `ceilings.scores.score_moments`.
    seed
        Of the signs. They are drawn anew for every batch from its place in the order, so a run that was stopped
        goes on with the signs that it would have had.
    checkpoint
        Where to save on the way and to resume from; None to keep nothing.
    progress
        Told after every batch how many sequences are done, and of how many.
    stop
        Asked after every batch whether to stop.
    slow
        Told at the end how many seconds the parameters without a fast rule took.

    Returns
    -------
    ScoreMoments
        The moments of all rollouts. The finished moments are not saved here.

    Shapes
    ------
    rewards (N, K).

    Raises
    ------
    Interrupted
        If ``stop`` said so; the moments so far are in the checkpoint.
    ValueError
        If the checkpoint belongs to something else, or the engine refuses a rollout.

    Notes
    -----
    Sequences go from the longest to the shortest: rows of a batch need little padding, and a batch that does not fit
    into memory is the first one. The count in the file of moments says where to go on.
    """
    order = sorted(range(len(rollouts)), key=lambda row: -rollouts.lengths[row])
    signs = None if sign_draws is None else torch.Generator()
    accumulator = team().accumulator(
        model, reward_names, batch_size, level=level, sign_draws=sign_draws, generator=signs
    )
    done = 0
    if checkpoint is not None and checkpoint.path.exists():
        saved = ScoreMoments.load(checkpoint.path)
        if saved.count > len(rollouts):
            raise ValueError(
                f"{checkpoint.path} holds {saved.count} responses and there are {len(rollouts)}: "
                "it belongs to another run, choose another folder"
            )
        accumulator.restore(saved)
        done = saved.count
        del saved
    last, pause = time.monotonic(), 0.0 if checkpoint is None else checkpoint.seconds
    device = next(model.parameters()).device
    while done < len(rollouts):
        rows = order[done : done + batch_size * team().size]
        padded = rollouts.take(rows).padded()
        if signs is not None:
            signs.manual_seed(((seed << 32) + done) % (1 << 63))
        accumulator.add(
            padded.input_ids.to(device),
            padded.response_mask.to(device),
            rewards[rows],
            attention_mask=padded.attention_mask.to(device),
        )
        done += len(rows)
        progress(done, len(rollouts))
        stopping = done < len(rollouts) and stop()
        if checkpoint is not None and (stopping or time.monotonic() - last > pause):
            started = time.monotonic()
            accumulator.moments().save(checkpoint.path)
            last = time.monotonic()
            pause = max(checkpoint.seconds, 20 * (last - started)) if checkpoint.seconds else 0.0
        if stopping:
            raise Interrupted
    slow(accumulator.slow_seconds)
    return accumulator.moments()
