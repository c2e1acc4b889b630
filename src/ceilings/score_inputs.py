"""What the score engine takes in: token rows, masks, rewards and weights, refused early when wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, get_args

import torch
from torch import Tensor

from ceilings.moments import Level

__all__ = [
    "Batch",
    "check_law",
    "check_level",
    "check_rewards",
    "check_sequences",
    "portions",
    "scored_prefixes",
    "trimmed",
]

_WEIGHT_TOLERANCE: Final = 1e-6  # probabilities computed in float32 over a whole vocabulary still pass


class Batch(NamedTuple):
    """Sequences as the model sees them: position t predicts ``targets[n, t]``, which counts where ``scored``.

    Parameters
    ----------
    inputs, targets
        Tokens, and the tokens that follow them.
    scored
        True where the target belongs to the response.
    attention
        1 at real tokens.
    signs
        Signs of K draws for every target.

    Shapes
    ------
    signs (N, K, T), all others (N, T).
    """

    inputs: Tensor
    targets: Tensor
    scored: Tensor
    attention: Tensor
    signs: Tensor

    @property
    def last(self) -> int:
        """Number of positions from the first scored one on; a prompt needs no logits."""
        return self.inputs.shape[1] - int(self.scored.any(0).nonzero().min())

    def one(self, n: int) -> Batch:
        """One sequence alone.

        Parameters
        ----------
        n
            Which.

        Returns
        -------
        Batch
            As it stood in the batch, padding included.
        """
        return Batch(*(t[n : n + 1] for t in self))


def trimmed(input_ids: Tensor, response_mask: Tensor, attention: Tensor, signs: Tensor) -> Batch:
    """Drop the columns that are padding to the whole batch.

    Parameters
    ----------
    input_ids, response_mask, attention
        As in `ceilings.scores.score_moments`, checked.
    signs
        Signs of K draws for every token.

    Returns
    -------
    Batch
        Nothing after the last scored token can matter to a causal model, nor that token as an input.

    Shapes
    ------
    signs (N, K, T), all others (N, T).
    """
    stop = int(response_mask.any(0).nonzero().max())
    start = min(int(attention.any(0).nonzero().min()), stop - 1)
    inputs, targets = slice(start, stop), slice(start + 1, stop + 1)
    return Batch(
        input_ids[:, inputs],
        input_ids[:, targets],
        response_mask[:, targets],
        attention[:, inputs],
        signs[..., targets],
    )


def portions(response_mask: Tensor, size: int, by_token: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut the sequences into batches.

    Parameters
    ----------
    response_mask
        True at the tokens that are scored.
    size
        Rows in one batch.
    by_token
        True: every scored token is a row of its own, the shortest prefixes first, so that `trimmed` can cut
        what follows them.

    Yields
    ------
    tuple
        Which sequence each row is, and which of its tokens are scored.

    Shapes
    ------
    response_mask (N, T) -> (B,), (B, T).
    """
    if not by_token:
        for some in torch.arange(len(response_mask)).split(size):
            yield some, response_mask[some]
        return
    tokens = response_mask.cpu().nonzero()
    for part in tokens[tokens[:, 1].argsort(stable=True)].split(size):
        alone = torch.zeros(len(part), response_mask.shape[1], dtype=torch.bool)
        alone[torch.arange(len(part)), part[:, 1]] = True
        yield part[:, 0], alone.to(response_mask.device)


def scored_prefixes(
    input_ids: Tensor, response_mask: Tensor, attention: Tensor, weights: Tensor
) -> dict[tuple[int, ...], float]:
    """What stood before each scored token, each prefix once.

    Parameters
    ----------
    input_ids, response_mask, attention, weights
        As in `ceilings.scores.score_moments`, checked.

    Returns
    -------
    dict
        Total weight of the sequences that pass through each prefix.

    Shapes
    ------
    weights (N,), all others (N, T).
    """
    found: dict[tuple[int, ...], float] = {}
    for ids, scored, real, weight in zip(input_ids, response_mask, attention, weights, strict=True):
        tokens, where = ids[real.bool()].tolist(), scored[real.bool()].nonzero()[:, 0].tolist()
        for t in where:
            prefix = tuple(tokens[:t])
            found[prefix] = found.get(prefix, 0.0) + float(weight)
    return found


def check_law(weights: Tensor | None) -> None:
    """Refuse weights that are not the whole law of the responses.

    Parameters
    ----------
    weights
        Probabilities, or None for samples.

    Shapes
    ------
    weights (N,).

    Raises
    ------
    ValueError
        If they do not sum to 1.
    """
    total = 1.0 if weights is None else float(weights.double().sum())
    if not abs(total - 1) <= _WEIGHT_TOLERANCE:
        raise ValueError(
            f"weights sum to {total:.9g}, not 1: pass the probability of every response, or None for samples "
            "(for part of a law, feed a `ScoreAccumulator` and merge)"
        )


def check_sequences(input_ids: Tensor, response_mask: Tensor, attention_mask: Tensor | None) -> None:
    """Refuse token rows whose score is not defined.

    Parameters
    ----------
    input_ids, response_mask, attention_mask
        As in `ceilings.scores.score_moments`.

    Shapes
    ------
    (N, T) each.

    Raises
    ------
    ValueError
        If shapes or types are wrong, a sequence has no scored token, or a scored token is padding or first.
    """
    if input_ids.dim() != 2 or not input_ids.numel() or input_ids.is_floating_point():
        raise ValueError(
            f"input_ids must be whole numbers (N, T), got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    for name, mask in (("response_mask", response_mask), ("attention_mask", attention_mask)):
        if mask is not None and mask.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}: they must agree"
            )
    if response_mask.dtype != torch.bool:
        raise ValueError(
            f"response_mask is {response_mask.dtype}; give booleans, True at the tokens to score"
        )
    if not bool(response_mask.any(1).all()):
        row = int((~response_mask.any(1)).nonzero()[0])
        raise ValueError(
            f"sequence {row} has no scored token: leave empty responses out, their score is zero"
        )
    real = torch.ones_like(response_mask) if attention_mask is None else attention_mask.bool()
    preceded = torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], dim=1)
    for problem, where in (("is padding", ~real), ("has no real token before it", ~preceded)):
        bad = (response_mask & where).nonzero()
        if len(bad):
            raise ValueError(
                f"sequence {int(bad[0, 0])}: scored token {int(bad[0, 1])} {problem}; correct the masks"
            )


def check_level(level: Level, sign_draws: int | None, generator: torch.Generator | None) -> None:
    """Refuse a level that does not exist, and signs where they have no meaning.

    Parameters
    ----------
    level, sign_draws, generator
        As in `ceilings.scores.score_moments`.

    Raises
    ------
    ValueError
        If they do not fit together.
    """
    if level not in get_args(Level):
        raise ValueError(f"level is {level!r}; it must be one of {get_args(Level)}")
    if sign_draws is None:
        return
    if level != "token":
        raise ValueError(
            f"sign_draws estimates the squares of level 'token'; leave it out at level {level!r}"
        )
    if sign_draws < 1:
        raise ValueError(f"sign_draws is {sign_draws}; draw at least once, or pass None for the exact sum")
    if generator is None:
        raise ValueError("sign_draws needs a generator: pass `torch.Generator().manual_seed(...)`")


def check_rewards(rewards: Tensor, weights: Tensor | None, sequences: int, names: tuple[str, ...]) -> None:
    """Refuse rewards and weights that no expectation can use.

    Parameters
    ----------
    rewards
        Rewards, one column a name.
    weights
        Probabilities, or None.
    sequences
        Number of sequences, N.
    names
        What the rewards are called.

    Shapes
    ------
    rewards (N, K), weights (N,).

    Raises
    ------
    ValueError
        If a shape is wrong, a reward is not finite, or a weight is negative or not finite.
    """
    if rewards.shape != (sequences, len(names)):
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}, expected {(sequences, len(names))}: "
            f"one row a sequence, one column for each of {names}"
        )
    if not bool(rewards.isfinite().all()):
        row = int((~rewards.isfinite()).any(1).nonzero()[0])
        raise ValueError(
            f"the reward of sequence {row} is NaN or infinite: every sequence needs a finite reward"
        )
    if weights is None:
        return
    if weights.shape != (sequences,):
        raise ValueError(
            f"weights have shape {tuple(weights.shape)} for {sequences} sequences: give one each"
        )
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        row = int((~(weights.isfinite() & (weights >= 0))).nonzero()[0])
        raise ValueError(
            f"the weight of sequence {row} is {float(weights[row])}: a probability is finite and not negative"
        )
