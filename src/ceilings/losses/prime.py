r"""PRIME: an outcome reward, plus rewards a token from a model that is trained on outcomes alone.

The implicit reward of a token is the log-ratio of a second policy, :math:`\pi_\varphi`, to a reference; its sum over a
response is the logit of success, and cross-entropy on outcomes trains it while the policy is trained.

Departures from the paper:

1. The baselines are those of its equation for the advantage; its released code differs there (it subtracts the
   response's own reward too, times a constant) and whitens the advantages over the batch. Neither is done here.
2. The discount is 1 unless asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ceilings.advantages import advantages, reward_to_go
from ceilings.losses.ppo import ppo_loss
from ceilings.losses.sequences import check_positive, check_tokens

__all__ = ["implicit_rewards", "prime_advantages", "prime_loss", "prime_reward_loss"]


def implicit_rewards(
    reward_model_log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, beta: float = 0.05
) -> Tensor:
    r"""Implicit reward of every token, :math:`r_\varphi(y_t) = \beta \log(\pi_\varphi/\pi_{\mathrm{ref}})`.

    Parameters
    ----------
    reward_model_log_probs
        Log-probability of every chosen token under the reward model :math:`\pi_\varphi`.
    reference_log_probs
        The same under the reference policy.
    mask
        True at the tokens of the response.
    beta
        Scale of the rewards.

    Returns
    -------
    Tensor
        0 outside the mask; carries the gradient of the reward model.

    Shapes
    ------
    All (N, T) -> (N, T).

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, or ``beta`` is not positive.

    References
    ----------
    Cui et al. (2025).
    """
    check_tokens(reward_model_log_probs, mask, "reward_model_log_probs")
    check_tokens(reference_log_probs, mask, "reference_log_probs")
    check_positive("beta", beta)
    return beta * torch.where(mask, reward_model_log_probs - reference_log_probs.detach(), 0)


def prime_reward_loss(
    reward_model_log_probs: Tensor,
    reference_log_probs: Tensor,
    mask: Tensor,
    outcomes: Tensor,
    *,
    beta: float = 0.05,
) -> Tensor:
    r"""Cross-entropy that trains the reward model, with the logit :math:`\sum_t r_\varphi(y_t)`.

    Parameters
    ----------
    reward_model_log_probs, reference_log_probs, mask, beta
        As in `implicit_rewards`.
    outcomes
        Outcome of every response, in [0, 1].

    Returns
    -------
    Tensor
        Mean over the responses.

    Shapes
    ------
    log-probabilities and mask (N, T), outcomes (N,) -> ().

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, or an outcome lies outside [0, 1].

    References
    ----------
    Cui et al. (2025).
    """
    rewards = implicit_rewards(reward_model_log_probs, reference_log_probs, mask, beta=beta)
    if outcomes.shape != rewards.shape[:1]:
        raise ValueError(f"outcomes of shape {tuple(outcomes.shape)} for {len(rewards)} responses: one each")
    if not bool(((outcomes >= 0) & (outcomes <= 1)).all()):
        raise ValueError("an outcome lies outside [0, 1]: cross-entropy needs a probability of success")
    return binary_cross_entropy_with_logits(rewards.sum(1), outcomes.to(rewards))


def prime_advantages(
    token_rewards: Tensor,
    mask: Tensor,
    outcomes: Tensor,
    groups: Sequence[int] | Tensor,
    *,
    discount: float = 1.0,
) -> Tensor:
    r"""Advantage of every token: returns of the implicit rewards, plus the outcome, each less the others' mean.

    Parameters
    ----------
    token_rewards
        Implicit reward of every token.
    mask
        True at the tokens of the response.
    outcomes
        Outcome of every response.
    groups
        Responses with the same number answer the same prompt.
    discount
        Of the implicit rewards.

    Returns
    -------
    Tensor
        :math:`\sum_{u \ge t} \gamma^{u-t} [r_\varphi(y_u) - b] + R - b_R`, where b is the mean over the other responses
        of their mean implicit reward a token and :math:`b_R` the mean of their outcomes; detached.

    Shapes
    ------
    token_rewards (N, T), mask (N, T), outcomes (N,), groups (N,) -> (N, T).

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, or alone in its group.

    Notes
    -----
    The baseline is taken off once a remaining token, so the length of the response is part of the signal.

    References
    ----------
    Claim ``prop-algorithms``; Cui et al. (2025).
    """
    check_tokens(torch.zeros_like(token_rewards), mask, "token_rewards")
    token_rewards = torch.where(mask, token_rewards.detach(), 0)
    mean = token_rewards.sum(1) / mask.sum(1)
    others = mean - advantages(mean, groups, baseline="leave_one_out")
    returns = reward_to_go(token_rewards - others[:, None], mask, discount=discount)
    outcome = advantages(outcomes.to(token_rewards), groups, baseline="leave_one_out")
    return torch.where(mask, returns + outcome[:, None], 0)


def prime_loss(
    log_probs: Tensor,
    mask: Tensor,
    token_rewards: Tensor,
    outcomes: Tensor,
    groups: Sequence[int] | Tensor,
    behaviour_log_probs: Tensor | None = None,
    *,
    epsilon: float = 0.2,
    discount: float = 1.0,
) -> Tensor:
    r"""PPO's loss of the policy with the advantages of `prime_advantages`.

    Parameters
    ----------
    log_probs
        Log-probability of every chosen token under the policy that is trained.
    mask
        True at the tokens of the response.
    token_rewards
        Implicit reward of every token, from the reward model as it stands.
    outcomes
        Outcome of every response.
    groups
        Responses with the same number answer the same prompt.
    behaviour_log_probs
        Log-probabilities under the policy that sampled; None means the present one, ratio 1.
    epsilon
        Half-width of the clip.
    discount
        Of the implicit rewards.

    Returns
    -------
    Tensor
        A scalar.

    Shapes
    ------
    log_probs, mask, token_rewards, behaviour_log_probs (N, T), outcomes (N,), groups (N,) -> ().

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, or alone in its group.

    References
    ----------
    Claim ``prop-algorithms``; Cui et al. (2025).
    """
    signal = prime_advantages(token_rewards, mask, outcomes, groups, discount=discount)
    return ppo_loss(log_probs, mask, signal, behaviour_log_probs, epsilon=epsilon)
