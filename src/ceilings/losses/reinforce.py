r"""REINFORCE: the log-probability of a response, weighted by its advantage.

Departures from the paper: none for one update a batch; the paper updates after every response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.losses.sequences import check_tokens, masked_mean

__all__ = ["check_advantages", "reinforce_loss"]


def reinforce_loss(log_probs: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    r"""Policy-gradient surrogate, :math:`-\frac1N \sum_n \sum_t A_{n,t} \log \pi_\theta(y_{n,t} \mid y_{n,<t})`.

    Parameters
    ----------
    log_probs
        Log-probability of every chosen token under the policy that is trained.
    mask
        True at the tokens of the response.
    advantages
        One number a response, or one a token; constants, without gradient.

    Returns
    -------
    Tensor
        A scalar; minus its gradient estimates :math:`\nabla E_\pi[R]` if the responses were drawn from the
        policy and the baseline does not depend on the response.

    Shapes
    ------
    log_probs (N, T), mask (N, T), advantages (N,) or (N, T) -> ().

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, or the advantages carry a gradient or are not finite.

    Notes
    -----
    The value means nothing; its gradient does.

    References
    ----------
    Claim ``prop-algorithms``; Williams (1992).
    """
    check_tokens(log_probs, mask)
    return -masked_mean(check_advantages(advantages, mask) * log_probs, mask, "responses")


def check_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages as one number a token.

    Parameters
    ----------
    advantages
        One number a response, or one a token.
    mask
        True at the tokens of the response.

    Returns
    -------
    Tensor
        The advantages a token, 0 outside the mask.

    Shapes
    ------
    advantages (N,) or (N, T), mask (N, T) -> (N, T).

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shape is neither, or an advantage is not finite or carries a gradient.
    """
    if advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"advantages of shape {tuple(advantages.shape)} for responses of shape {tuple(mask.shape)}: give one "
            "number a response, (N,), or one a token, (N, T)"
        )
    if advantages.requires_grad:
        raise ValueError("the advantages carry a gradient: this loss takes them as constants, so detach them")
    advantages = (advantages[:, None] if advantages.ndim == 1 else advantages).expand(mask.shape)
    if not bool(advantages[mask].isfinite().all()):
        raise ValueError("an advantage is not finite: every token of a response needs a number")
    # NOTE what stands outside the mask may be NaN, and NaN times a gradient of zero is NaN.
    return torch.where(mask, advantages, 0)
