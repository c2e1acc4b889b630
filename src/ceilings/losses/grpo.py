r"""GRPO: PPO's surrogate with advantages standardised within the group of one prompt.

Departures from the paper:

1. Nothing is added to the standard deviation; a group of equal rewards gets the advantage 0.
2. The paper does not say which standard deviation. Published code divides by G − 1, and so does the default here.
3. Outcome rewards only: the paper's process-reward variant is not here.
4. The leash is off (``beta = 0``) unless asked for; the paper sets 0.04.
5. TRL's own default of the name averages over tokens; this is the paper's average.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ceilings.advantages import Scale, advantages
from ceilings.losses.ppo import clipped_surrogate
from ceilings.losses.sequences import check_tokens, masked_mean

__all__ = ["grpo_loss", "k3_divergence"]


def grpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    rewards: Tensor,
    groups: Sequence[int] | Tensor,
    *,
    behaviour_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    epsilon: float = 0.2,
    beta: float = 0.0,
    scale: Scale = "sample_std",
) -> Tensor:
    r"""Clipped surrogate with standardised advantages, averaged over the tokens of each response, then responses.

    Parameters
    ----------
    log_probs
        Log-probability of every chosen token under the policy that is trained.
    mask
        True at the tokens of the response.
    rewards
        Reward of every response.
    groups
        Responses with the same number answer the same prompt.
    behaviour_log_probs
        The same log-probabilities under the policy that sampled; None means the present one, ratio 1.
    reference_log_probs
        Under the reference policy; needed where ``beta`` is not 0.
    epsilon
        Half-width of the clip.
    beta
        Strength of the leash.
    scale
        Which standard deviation of the group divides, as in `ceilings.advantages`.

    Returns
    -------
    Tensor
        Mean over responses of the mean over their tokens of :math:`-\min(r A, \operatorname{clip}(r) A)`, plus
        :math:`\beta (e^{-d} + d - 1)` with :math:`d = \log(\pi_\theta/\pi_{\mathrm{ref}})` of one token.

    Shapes
    ------
    log_probs, mask, behaviour_log_probs, reference_log_probs (N, T), rewards (N,), groups (N,) -> ().

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, a group of one meets the sample standard deviation, a reward is
        not finite, or the reference is missing.

    Notes
    -----
    Dividing by the response's own length takes away the zero mean of the score (``prop-algorithms``). The leash's
    gradient is not that of the divergence of the responses: each prefix is held fixed.

    References
    ----------
    Claim ``prop-algorithms``; Shao et al. (2024), equations 3 and 4.
    """
    standardised = advantages(rewards, groups, scale=scale)
    token_losses = clipped_surrogate(log_probs, mask, standardised, behaviour_log_probs, epsilon=epsilon)
    if beta != 0:
        if reference_log_probs is None:
            raise ValueError(f"beta is {beta} but there are no reference_log_probs to hold the policy to")
        token_losses = token_losses + beta * k3_divergence(log_probs, reference_log_probs, mask)
    return masked_mean(token_losses / mask.sum(1, keepdim=True), mask, "responses")


def k3_divergence(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor) -> Tensor:
    r"""Estimate of KL(π‖π_ref) from each token, :math:`e^{-d} + d - 1` with :math:`d = \log(\pi/\pi_{\mathrm{ref}})`.

    Parameters
    ----------
    log_probs
        Log-probability of every chosen token under the policy.
    reference_log_probs
        Under the reference policy.
    mask
        True at the tokens of the response.

    Returns
    -------
    Tensor
        Never negative; its mean over tokens drawn from π is the divergence. 0 outside the mask.

    Shapes
    ------
    log_probs, reference_log_probs, mask (N, T) -> (N, T).

    Raises
    ------
    ValueError
        If the shapes differ or a response is empty.

    References
    ----------
    Shao et al. (2024), equation 4.
    """
    check_tokens(log_probs, mask)
    check_tokens(reference_log_probs, mask, "reference_log_probs")
    d = torch.where(mask, log_probs - reference_log_probs.detach(), 0)
    return (-d).exp() + d - 1
