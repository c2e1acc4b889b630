r"""PPO: the importance ratio times the advantage, clipped where it has gone far enough.

Departures from the paper:

1. The policy term only: no value loss and no entropy bonus.
2. Advantages are given. The paper estimates them with a learned critic; pass such estimates a token, or a reward
   minus a baseline a response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.losses.reinforce import check_advantages
from ceilings.losses.sequences import check_positive, check_tokens, masked_mean

__all__ = ["clip_share", "clipped_surrogate", "ppo_loss"]


def ppo_loss(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    behaviour_log_probs: Tensor | None = None,
    *,
    epsilon: float = 0.2,
) -> Tensor:
    r"""Mean of the clipped surrogate over all tokens of the batch.

    Parameters
    ----------
    log_probs
        Log-probability of every chosen token under the policy that is trained.
    mask
        True at the tokens of the response.
    advantages
        One number a response, or one a token; constants.
    behaviour_log_probs
        The same log-probabilities under the policy that sampled; None means the present one, ratio 1.
    epsilon
        Half-width of the clip.

    Returns
    -------
    Tensor
        :math:`-\frac{1}{\sum_n |y_n|} \sum_{n,t} \min(r A, \operatorname{clip}(r, 1-\epsilon, 1+\epsilon) A)`, with
        :math:`r = \pi_\theta / \mu` of one token.

    Shapes
    ------
    log_probs, mask, behaviour_log_probs (N, T), advantages (N,) or (N, T) -> ().

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, an advantage is not finite, or the behaviour policy gives a
        sampled token probability zero.

    Notes
    -----
    A ratio of one token corrects the law of that token and not of the tokens before it: off-policy this is no
    importance-weighted gradient (``thm-importance``), clipped or not.

    References
    ----------
    Claim ``prop-algorithms``; Schulman et al. (2017), equation 7.
    """
    return masked_mean(
        clipped_surrogate(log_probs, mask, advantages, behaviour_log_probs, epsilon=epsilon), mask, "tokens"
    )


def clipped_surrogate(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    behaviour_log_probs: Tensor | None = None,
    *,
    epsilon: float = 0.2,
) -> Tensor:
    r"""Clipped surrogate of every token, to be averaged.

    Parameters
    ----------
    log_probs, mask, advantages, behaviour_log_probs, epsilon
        As in `ppo_loss`.

    Returns
    -------
    Tensor
        :math:`-\min(r A, \operatorname{clip}(r, 1-\epsilon, 1+\epsilon) A)`; 0 outside the mask.

    Shapes
    ------
    log_probs, mask, behaviour_log_probs (N, T), advantages (N,) or (N, T) -> (N, T).

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        As in `ppo_loss`.
    """
    ratio = _ratio(log_probs, mask, behaviour_log_probs)
    advantages = check_advantages(advantages, mask)
    check_positive("epsilon", epsilon)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)


def clip_share(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    behaviour_log_probs: Tensor | None = None,
    *,
    epsilon: float = 0.2,
) -> Tensor:
    r"""Share of tokens whose gradient the clip removes.

    Parameters
    ----------
    log_probs, mask, advantages, behaviour_log_probs, epsilon
        As in `ppo_loss`.

    Returns
    -------
    Tensor
        1 means that no token has a gradient left; 0 that the clip does nothing.

    Shapes
    ------
    log_probs, mask, behaviour_log_probs (N, T), advantages (N,) or (N, T) -> ().

    Raises
    ------
    ValueError
        As in `ppo_loss`.
    """
    ratio = _ratio(log_probs.detach(), mask, behaviour_log_probs)
    advantages = check_advantages(advantages, mask)
    clipped = (ratio > 1 + epsilon) & (advantages > 0) | (ratio < 1 - epsilon) & (advantages < 0)
    return clipped[mask].to(log_probs.dtype).mean()


def _ratio(log_probs: Tensor, mask: Tensor, behaviour_log_probs: Tensor | None) -> Tensor:
    """π/μ of every token; 1 outside the mask."""
    check_tokens(log_probs, mask)
    if behaviour_log_probs is None:
        behaviour_log_probs = log_probs.detach()
    check_tokens(behaviour_log_probs, mask, "behaviour_log_probs")
    return torch.where(mask, log_probs - behaviour_log_probs.detach(), 0).exp()
