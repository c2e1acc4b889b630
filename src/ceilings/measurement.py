"""A measurement that takes a while: score moments of rollouts, saved on the way, stopped and resumed at will."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ceilings.distributed import team
from ceilings.moments import ScoreMoments
from ceilings.rollouts import Rollouts

__all__ = ["SHUFFLED", "Checkpoint", "Interrupted", "measure_rollouts", "reward_columns"]

#: Name of the reward that was dealt out anew: what tightness looks like when there is nothing to find.
SHUFFLED = "shuffled"


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
    rollouts: Rollouts, centre_by_group: bool, generator: torch.Generator
) -> tuple[Tensor, tuple[str, ...]]:
    """Reward of every rollout, and the same rewards shuffled.

    Parameters
    ----------
    rollouts
        The rollouts.
    centre_by_group
        Whether to subtract the mean of the group.
    generator
        Source of the shuffling.

    Returns
    -------
    tuple
        The columns and their names, ``reward`` and `SHUFFLED`.

    Shapes
    ------
    (N, 2).

    Units
    -----
    [R].
    """
    raw = rollouts.rewards.double()
    shuffled = rollouts.shuffled_rewards(generator)
    if centre_by_group:
        mean = raw - rollouts.centred_rewards()
        # The mean of a group survives shuffling within it; with groups of one there is nothing to centre.
        raw, shuffled = raw - mean, shuffled - mean
    return torch.stack([raw, shuffled], 1), ("reward", SHUFFLED)


def measure_rollouts(
    model: nn.Module,
    rollouts: Rollouts,
    rewards: Tensor,
    reward_names: tuple[str, ...],
    *,
    batch_size: int = 8,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
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
        Sequences in one pass of one process.
    checkpoint
        Where to save on the way and to resume from; None to keep nothing.
    progress
        Told after every batch how many sequences are done, and of how many.
    stop
        Asked after every batch whether to stop.

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
    accumulator = team().accumulator(model, reward_names, batch_size)
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
    return accumulator.moments()
