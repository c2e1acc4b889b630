r"""What each post-training loss does in expectation, from probabilities, scores and covariances alone.

Nothing here calls a loss or differentiates one: these are the independent side of the checks of `ceilings.algorithms`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.gradient_forms import Form, group_law, member_signals, response_form, token_form
from ceilings.policies import Enumeration, check_probs

__all__ = [
    "distillation_form",
    "dpo_form",
    "grpo_form",
    "kto_form",
    "orpo_form",
    "ppo_form",
    "prime_form",
    "simpo_form",
    "supervised_form",
]


def grpo_form(law: Enumeration, rewards: Tensor, size: int) -> Form:
    r"""GRPO at ratio 1: the covariance of the expected advantage with :math:`s/|y|`.

    Parameters
    ----------
    law
        The policy.
    rewards
        Reward of every response.
    size
        Responses a group, G.

    Returns
    -------
    Form
        Signal :math:`a(y) = E[A_1 \mid y_1 = y]`, with the standard deviation of G − 1.

    Shapes
    ------
    rewards (Y,).
    """
    groups, mass = group_law(law.probs, size)
    r = rewards[groups]
    centred = r - r.mean(1, keepdim=True)
    spread = (centred.square().sum(1, keepdim=True) / (size - 1)).sqrt()
    alike = (r == r[:, :1]).all(1, keepdim=True)
    standardised = torch.where(alike, 0, centred / spread.where(~alike, 1))
    signal = member_signals(law.probs, groups, mass, standardised / size)
    return response_form(law.probs, signal, law.scores / law.lengths[:, None])


def ppo_form(
    behaviour: Enumeration, policy: Enumeration, rewards: Tensor, size: int, *, epsilon: float
) -> Form:
    r"""PPO on groups of another law, with the mean of the group as baseline.

    Parameters
    ----------
    behaviour
        The policy that samples, μ.
    policy
        The policy that is trained, over the same responses.
    rewards
        Reward of every response.
    size
        Responses a group; they are the batch.
    epsilon
        Half-width of the clip; infinity for none.

    Returns
    -------
    Form
        Covariance of the signal that is left with :math:`r_t s_t`, prefix by prefix, and its ceiling.

    Shapes
    ------
    rewards (Y,).

    Notes
    -----
    Where the clip acts the surrogate of the token is constant in θ: its weight is zero. What is left of the signal sees
    the ratio, but it is a number like any other, and :math:`r_t s_t` has mean zero at every prefix.
    """
    groups, mass = group_law(behaviour.probs, size)
    advantages = rewards[groups] - rewards[groups].mean(1, keepdim=True)
    value = advantages / behaviour.lengths[groups].sum(1, keepdim=True)
    ratio = (policy.token_log_probs - behaviour.token_log_probs).exp()
    taken = torch.arange(ratio.shape[1]) < behaviour.lengths[:, None]
    directions = (ratio * taken)[:, :, None] * policy.token_scores
    over, under = ratio[groups] > 1 + epsilon, ratio[groups] < 1 - epsilon
    clipped = over & (advantages > 0)[:, :, None] | under & (advantages < 0)[:, :, None]
    signals = member_signals(behaviour.probs, groups, mass, value[:, :, None] * ~clipped)
    return token_form(behaviour, signals, directions)


def prime_form(law: Enumeration, rewards: Tensor, token_rewards: Tensor, size: int) -> Form:
    r"""PRIME at ratio 1: outcomes less those of the others, and the rewards to go less the others' mean a token.

    Parameters
    ----------
    law
        The policy.
    rewards
        Outcome of every response.
    token_rewards
        Reward of every token, from the reward model as it stands; zero after the response has ended.
    size
        Responses a group; they are the batch.

    Returns
    -------
    Form
        A covariance at every prefix.

    Shapes
    ------
    rewards (Y,), token_rewards (Y, T).
    """
    groups, mass = group_law(law.probs, size)
    taken = torch.arange(token_rewards.shape[1]) < law.lengths[:, None]
    mean = (token_rewards * taken).sum(1) / law.lengths
    others = (mean[groups].sum(1, keepdim=True) - mean[groups]) / (size - 1)
    outcome = (size * rewards[groups] - rewards[groups].sum(1, keepdim=True)) / (size - 1)
    left = taken.flip(1).cumsum(1).flip(1)  # tokens from t to the end
    to_go = (token_rewards * taken).flip(1).cumsum(1).flip(1)
    value = to_go[groups] - others[:, :, None] * left[groups] + outcome[:, :, None]
    value = value * taken[groups] / law.lengths[groups].sum(1)[:, None, None]
    return token_form(law, member_signals(law.probs, groups, mass, value), law.token_scores)


def dpo_form(probs: Tensor, scores: Tensor, log_ratios: Tensor, rewards: Tensor, *, beta: float) -> Form:
    r"""DPO on pairs of independent responses, ties dropped: wins less losses, less a leash.

    Parameters
    ----------
    probs
        Law of each response of a pair.
    scores
        Scores of the policy that is trained.
    log_ratios
        :math:`h = \log(\pi/\pi_{\mathrm{ref}})`.
    rewards
        The higher of two is chosen.
    beta
        Strength of the leash.

    Returns
    -------
    Form
        Signal :math:`\frac{\beta}{P}\big(E'[\varepsilon] - E'[|\varepsilon| \tanh \tfrac\beta2(h - h')]\big)`, where
        :math:`\varepsilon = \operatorname{sign}(R - R')`, the mean is over the other response and P is the
        probability that a pair is kept. Its own mean is 0.

    Shapes
    ------
    probs, log_ratios, rewards (Y,), scores (Y, D).
    """
    sign, kept = _preferences(probs, rewards)
    leash = (beta / 2 * (log_ratios[:, None] - log_ratios)).tanh() * sign.abs()
    return response_form(probs, beta / kept * ((sign - leash) @ probs), scores)


def simpo_form(
    probs: Tensor, scores: Tensor, mean_log_probs: Tensor, lengths: Tensor, rewards: Tensor, **strength: float
) -> Form:
    r"""SimPO on pairs of independent responses, ties dropped: a covariance with :math:`s/|y|`.

    Parameters
    ----------
    probs, scores, rewards
        As in `dpo_form`.
    mean_log_probs, lengths
        :math:`\log\pi(y)/|y|`, and tokens of every response.
    strength
        ``beta`` and ``margin``.

    Returns
    -------
    Form
        Signal :math:`\frac{2\beta}{P} E'[\varepsilon\, w]`, of mean 0.

    Shapes
    ------
    probs, mean_log_probs, lengths, rewards (Y,), scores (Y, D).
    """
    sign, kept = _preferences(probs, rewards)
    beta, margin = strength["beta"], strength["margin"]
    weight = torch.sigmoid(margin - beta * sign * (mean_log_probs[:, None] - mean_log_probs))
    return response_form(probs, 2 * beta / kept * ((sign * weight) @ probs), scores / lengths[:, None])


def orpo_form(
    probs: Tensor,
    scores: Tensor,
    mean_log_probs: Tensor,
    lengths: Tensor,
    rewards: Tensor,
    *,
    odds_weight: float,
) -> Form:
    r"""ORPO on pairs of independent responses, ties dropped: two covariances and a likelihood.

    Parameters
    ----------
    probs, scores, mean_log_probs, lengths, rewards
        As in `simpo_form`.
    odds_weight
        :math:`\lambda`.

    Returns
    -------
    Form
        Wins less losses with :math:`d = s/|y|`, and the weights of the odds with :math:`d/(1 - \bar p)`; the remainder
        is half the pair's likelihood, :math:`E[d + d']/2`, whichever of the two is chosen.

    Shapes
    ------
    probs, mean_log_probs, lengths, rewards (Y,), scores (Y, D).
    """
    sign, kept = _preferences(probs, rewards)
    directions = scores / lengths[:, None]
    p = mean_log_probs.exp()
    odds = p / (1 - p)
    loser = torch.where(sign > 0, odds[None, :], odds[:, None])
    weight = loser / (odds[:, None] + odds[None, :])  # sigmoid(−(o⁺ − o⁻)) = odds⁻ / (odds⁺ + odds⁻)
    wins = response_form(probs, sign @ probs / kept, directions)
    ratio = response_form(
        probs, 2 * odds_weight / kept * ((sign * weight) @ probs), directions / (1 - p)[:, None]
    )
    blind = (probs * (sign.abs() @ probs)) @ directions / kept
    return wins + ratio + Form(0 * blind, blind, 0 * blind)


def kto_form(
    probs: Tensor,
    scores: Tensor,
    log_ratios: Tensor,
    desirable: Tensor,
    point: Tensor | float,
    **strength: float,
) -> Form:
    r"""KTO on single responses, with the reference point held.

    Parameters
    ----------
    probs, scores, log_ratios
        As in `dpo_form`, the law of one response.
    desirable
        True for a desirable response.
    point
        The reference point z.
    strength
        ``beta``, ``desirable_weight`` and ``undesirable_weight``.

    Returns
    -------
    Form
        Signal :math:`\pm\lambda\beta\,v(1 - v)` with :math:`v = \operatorname{sigmoid}(\beta(h - z))`, which is not
        centred: under a law that is not the policy's, the product of the means remains.

    Shapes
    ------
    probs, log_ratios, desirable (Y,), scores (Y, D).
    """
    beta = strength["beta"]
    slope = beta / 4 / (beta / 2 * (log_ratios - point)).cosh().square()  # β v(1 − v)
    # NOTE numbers alone would make this float32.
    signs = probs.new_tensor([-strength["undesirable_weight"], strength["desirable_weight"]])
    return response_form(probs, signs[desirable.long()] * slope, scores)


def supervised_form(law: Enumeration, data_probs: Tensor) -> Form:
    r"""Supervised fine-tuning: the covariance of :math:`q/\pi` with the score.

    Parameters
    ----------
    law
        The policy.
    data_probs
        Law q of the data; for rejection sampling, the policy's own law given success.

    Returns
    -------
    Form
        With the ceiling :math:`\sqrt{\chi^2(q \| \pi)}\,\sqrt{F_{ii}}`.

    Shapes
    ------
    data_probs (Y,).
    """
    check_probs(data_probs, "data_probs")
    return response_form(law.probs, data_probs / law.probs, law.scores)


def distillation_form(law: Enumeration, teacher: Enumeration) -> Form:
    r"""Per-token distillation on the policy's own responses, prefixes held.

    Parameters
    ----------
    law
        The policy.
    teacher
        The teacher, over the same responses.

    Returns
    -------
    Form
        Signal :math:`-\log(\pi/\pi_T)` of each token alone; a covariance at every prefix.
    """
    return token_form(law, teacher.token_log_probs - law.token_log_probs, law.token_scores)


def _preferences(probs: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Which of two responses is preferred, +1 for the first, and the probability that they differ."""
    sign = torch.sign(rewards[:, None] - rewards)
    kept = probs @ sign.abs() @ probs
    if not float(kept) > 0:
        raise ValueError("all rewards are equal: every pair is a tie, and nothing is kept")
    return sign, kept
