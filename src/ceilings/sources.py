r"""Where rollouts come from: the policy's own samples, another policy's, or fixed data.

A source is a function of the present policy and a generator; it is one half of what makes a method, the other half is
its loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ceilings.puzzles import END, Puzzle
from ceilings.rollouts import Rollouts
from ceilings.sampling import sample_responses

__all__ = ["Source", "fixed_data", "own_samples", "policy_samples", "sample_puzzle"]

Source = Callable[[nn.Module, torch.Generator], Rollouts]


def sample_puzzle(
    model: nn.Module,
    puzzle: Puzzle,
    prompts: list[int],
    samples: int,
    generator: torch.Generator,
    *,
    graded: bool = False,
) -> Rollouts:
    """Responses of a model to some prompts of a puzzle, with their rewards.

    Parameters
    ----------
    model
        What samples, at temperature 1.
    puzzle
        Where the prompts and the rewards come from.
    prompts
        Numbers of the prompts; a prompt may come twice, as two groups.
    samples
        Responses a prompt, G.
    generator
        Source of randomness; one seed a prompt is drawn from it.
    graded
        Which reward.

    Returns
    -------
    Rollouts
        One group a prompt, in order.
    """
    seeds = torch.randint(2**62, (len(prompts),), generator=generator).tolist()
    drawn = sample_responses(
        model,
        [puzzle.prompts[row] for row in prompts],
        samples,
        [torch.Generator().manual_seed(seed) for seed in seeds],
        max_new_tokens=puzzle.max_new_tokens,
        end_ids=(END,),
    )
    rows = [row for row in prompts for _ in range(samples)]
    rewards = [puzzle.reward(row, y, graded=graded) for row, y in zip(rows, drawn.response_ids, strict=True)]
    return Rollouts(
        tuple(puzzle.prompts[row] for row in rows),
        drawn.response_ids,
        torch.tensor(rewards, dtype=torch.float64),
        tuple(group for group in range(len(prompts)) for _ in range(samples)),
        drawn.log_probs,
    )


def own_samples(puzzle: Puzzle, *, prompts: int = 16, samples: int = 8, graded: bool = False) -> Source:
    """Source of on-policy rollouts: the present policy answers prompts drawn uniformly.

    Parameters
    ----------
    puzzle
        Where the prompts and the rewards come from.
    prompts
        Prompts a batch.
    samples
        Responses a prompt, G.
    graded
        Which reward.

    Returns
    -------
    Source
        Draws a new batch at each call.
    """

    def draw(model: nn.Module, generator: torch.Generator) -> Rollouts:
        rows = torch.randint(len(puzzle.prompts), (prompts,), generator=generator).tolist()
        return sample_puzzle(model, puzzle, rows, samples, generator, graded=graded)

    return draw


def policy_samples(
    policy: nn.Module, puzzle: Puzzle, *, prompts: int = 16, samples: int = 8, graded: bool = False
) -> Source:
    """Source of another policy's rollouts, whatever the present one is.

    Parameters
    ----------
    policy
        What samples.
    puzzle, prompts, samples, graded
        As in `own_samples`.

    Returns
    -------
    Source
        Draws a new batch at each call.
    """
    own = own_samples(puzzle, prompts=prompts, samples=samples, graded=graded)
    return lambda _, generator: own(policy, generator)


def fixed_data(rollouts: Rollouts, *, groups: int = 16) -> Source:
    """Source that draws whole groups of rollouts that were collected once.

    Parameters
    ----------
    rollouts
        The data.
    groups
        Groups a batch, drawn without repetition.

    Returns
    -------
    Source
        Draws a part of the data at each call.

    Raises
    ------
    ValueError
        If there are fewer groups than a batch takes.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(rollouts.groups):
        members.setdefault(group, []).append(row)
    keys = list(members)
    if groups > len(keys):
        raise ValueError(f"a batch of {groups} groups from data with {len(keys)}: take fewer")

    def draw(_: nn.Module, generator: torch.Generator) -> Rollouts:
        picked = torch.randperm(len(keys), generator=generator)[:groups].tolist()
        return rollouts.take([row for k in picked for row in members[keys[k]]])

    return draw
