r"""What every loss checks, and how log-probabilities of tokens become those of responses.

Shapes are those of a padded batch: N responses, T token positions, V tokens of vocabulary. ``mask`` is True at the
tokens of a response; what stands elsewhere is never read.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

__all__ = ["Average", "masked_mean", "mean_log_probs", "response_mask", "sequence_log_probs"]

Average = Literal["responses", "tokens"]

# log_softmax may exceed 0 by rounding, in float32 by about 1e-7 a token.
_ROUNDING: Final = 1e-5


def response_mask(lengths: Tensor, width: int) -> Tensor:
    """Mask of responses that start at position 0.

    Parameters
    ----------
    lengths
        Tokens of each response.
    width
        Number of positions, T.

    Returns
    -------
    Tensor
        True at the first ``lengths[n]`` positions of row n.

    Shapes
    ------
    lengths (N,) -> (N, T).

    Raises
    ------
    ValueError
        If a response is longer than the rows.
    """
    if lengths.ndim != 1 or (len(lengths) and int(lengths.max()) > width):
        raise ValueError(f"lengths must be a vector (N,) of at most {width}, got {lengths.tolist()}")
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def sequence_log_probs(token_log_probs: Tensor, mask: Tensor) -> Tensor:
    r"""Log-probability of every response, :math:`\log \pi(y) = \sum_t \log \pi(y_t \mid y_{<t})`.

    Parameters
    ----------
    token_log_probs
        Log-probability of every chosen token.
    mask
        True at the tokens of the response.

    Returns
    -------
    Tensor
        Sum over the tokens of each response.

    Shapes
    ------
    token_log_probs (N, T), mask (N, T) -> (N,).

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, or a log-probability is positive or not finite.
    """
    check_tokens(token_log_probs, mask)
    return torch.where(mask, token_log_probs, 0).sum(1)


def mean_log_probs(token_log_probs: Tensor, mask: Tensor) -> Tensor:
    r"""Log-probability of every response divided by its length.

    Parameters
    ----------
    token_log_probs
        Log-probability of every chosen token.
    mask
        True at the tokens of the response.

    Returns
    -------
    Tensor
        :math:`\bar\ell = \log \pi(y) / |y|`.

    Shapes
    ------
    token_log_probs (N, T), mask (N, T) -> (N,).

    Raises
    ------
    ValueError
        As in `sequence_log_probs`.

    Notes
    -----
    Its gradient is the score divided by the length, which does not have mean zero under the policy: that is what
    takes SimPO and ORPO out of reach of the ceiling.
    """
    return sequence_log_probs(token_log_probs, mask) / mask.sum(1)


def masked_mean(values: Tensor, mask: Tensor, average: Average) -> Tensor:
    """Average of a quantity a token: over responses (sums of tokens) or over tokens.

    Parameters
    ----------
    values
        The quantity.
    mask
        True at the tokens of the response.
    average
        ``"responses"``: sum over the tokens of a response, mean over responses. ``"tokens"``: mean over all tokens
        of the batch, which gives long responses more weight.

    Returns
    -------
    Tensor
        A scalar.

    Shapes
    ------
    values (N, T), mask (N, T) -> ().

    Raises
    ------
    ValueError
        If ``average`` is neither.
    """
    if average not in ("responses", "tokens"):
        raise ValueError(f"there is no average {average!r}: use responses or tokens")
    total = torch.where(mask, values, 0).sum()
    return total / (len(mask) if average == "responses" else mask.sum())


def check_tokens(token_log_probs: Tensor, mask: Tensor, name: str = "log_probs") -> None:
    """Refuse what is not a batch of log-probabilities of tokens, with at least one token a response."""
    if token_log_probs.ndim != 2 or not token_log_probs.is_floating_point():
        raise ValueError(
            f"{name} must be floating point of shape (N, T), got {token_log_probs.dtype} "
            f"of shape {tuple(token_log_probs.shape)}"
        )
    if mask.shape != token_log_probs.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be boolean and of the shape of {name}, "
            f"{tuple(token_log_probs.shape)}"
        )
    if not bool(mask.any()):
        raise ValueError("every token is masked out: there is nothing to learn from")
    if not bool(mask.any(1).all()):
        row = int((~mask.any(1)).nonzero()[0])
        raise ValueError(f"response {row} is empty: it has no log-probability to change, so leave it out")
    _check_log_probs(token_log_probs.detach()[mask], name)


def check_responses(name: str, value: Tensor, like: Tensor | None = None) -> None:
    """Refuse what is not one finite log-probability a response, as many as in ``like``."""
    if value.ndim != 1 or not value.is_floating_point() or len(value) == 0:
        raise ValueError(
            f"{name} must be a non-empty floating-point vector (N,), got {value.dtype} "
            f"of shape {tuple(value.shape)}"
        )
    if like is not None and len(value) != len(like):
        raise ValueError(f"{len(value)} {name} for {len(like)} responses: give one each")
    _check_log_probs(value.detach(), name)


def check_lengths(name: str, lengths: Tensor, like: Tensor) -> None:
    """Refuse what is not one positive whole number a response."""
    if lengths.shape != like.shape or lengths.is_floating_point():
        raise ValueError(
            f"{name} must hold one whole number a response, (N,) = {tuple(like.shape)}; got {lengths.dtype} "
            f"of shape {tuple(lengths.shape)}"
        )
    if bool((lengths < 1).any()):
        row = int((lengths < 1).nonzero()[0])
        raise ValueError(
            f"response {row} of {name} is empty: it has no mean log-probability, so leave it out"
        )


def check_positive(name: str, value: float) -> None:
    """Refuse a strength that is not positive."""
    if not value > 0:
        raise ValueError(f"{name} is {value}: it must be positive")


def _check_log_probs(values: Tensor, name: str) -> None:
    """Refuse NaN, infinities and probabilities above 1."""
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"{name} has an entry that is not finite: a response that its policy cannot give has no "
            "log-ratio and no score"
        )
    if bool((values > _ROUNDING).any()):
        raise ValueError(
            f"{name} has the entry {float(values.max()):.3g}: a log-probability is 0 or less; were logits passed?"
        )
