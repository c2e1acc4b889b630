r"""What N sampled responses show of a tightness that is known exactly.

`ceilings.uncertainty` estimates a tightness where nothing better can be had. Here the policy is enumerated, so the
truth is a finite sum, and the estimators can be held against it: what they return on average, by a normal
approximation and by drawing batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ceilings.ceiling import reward_variance, score_variance, signed_tightness

__all__ = [
    "Batches",
    "correlation_variance",
    "cross_fitted_mean",
    "draw_batches",
    "in_sample_mean",
    "joint_kurtosis",
    "needed_count",
]

# Below this share of its second moment a variance is rounding: the column is constant in that batch.
_CONSTANT: Final = 1e-12


def _standardised(scores: Tensor, rewards: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Reward and scores of mean 0 and variance 1; NaN where nothing varies."""
    defined = ~signed_tightness(scores, rewards, probs).isnan()
    reward = (rewards - probs @ rewards) / reward_variance(rewards, probs).sqrt()
    unit = (scores - probs @ scores) / score_variance(scores, rewards, probs).sqrt()
    return reward, torch.where(defined, unit, torch.nan)


def joint_kurtosis(scores: Tensor, rewards: Tensor, probs: Tensor) -> Tensor:
    r"""How often unusual rewards and large scores come together, :math:`E[(R - E R)^2 s_i^2] / (\sigma^2 F_{ii})`.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    probs
        Probability of every response.

    Returns
    -------
    Tensor
        :math:`\kappa_i`: 1 where the squares are uncorrelated, as for independent reward and score; NaN where
        nothing varies. The sampled covariance has the variance :math:`\sigma^2 F_{ii} (\kappa_i - \rho_i^2) / N`.

    Shapes
    ------
    scores (Y, D), rewards (Y,), probs (Y,) -> (D,).

    Units
    -----
    1.

    References
    ----------
    Claim ``prop-vacuous``.
    """
    a, b = _standardised(scores, rewards, probs)
    return (probs * a.square()) @ b.square()


def correlation_variance(scores: Tensor, rewards: Tensor, probs: Tensor) -> Tensor:
    r"""N times the variance of the sampled correlation, for large N.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    probs
        Probability of every response.

    Returns
    -------
    Tensor
        :math:`\tau_i^2 = E[(ab - \rho_i (a^2 + b^2)/2)^2]` with a and b the reward and the score at mean 0 and
        variance 1. Equal to `joint_kurtosis` at :math:`\rho_i = 0`, and 0 at :math:`|\rho_i| = 1`.

    Shapes
    ------
    scores (Y, D), rewards (Y,), probs (Y,) -> (D,).

    Units
    -----
    1.

    Notes
    -----
    The delta method for :math:`\hat\rho = \hat g / (\hat\sigma \hat F^{1/2})`.
    """
    a, b = _standardised(scores, rewards, probs)
    rho = signed_tightness(scores, rewards, probs)
    influence = a[:, None] * b - rho * (a.square()[:, None] + b.square()) / 2
    return probs @ influence.square()


def in_sample_mean(rho: Tensor, variance: Tensor, count: int) -> Tensor:
    r"""Mean of :math:`|\hat\rho_i|` over batches of N responses, by the normal approximation.

    Parameters
    ----------
    rho
        The true correlations.
    variance
        `correlation_variance`.
    count
        N.

    Returns
    -------
    Tensor
        Mean absolute value of a normal variable of mean :math:`\rho_i` and variance :math:`\tau_i^2 / N`;
        at :math:`\rho_i = 0` the noise floor :math:`\sqrt{2 \kappa_i / (\pi N)}`.

    Shapes
    ------
    rho (D,), variance (D,) -> (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If ``count`` is not positive.

    References
    ----------
    Claim ``prop-vacuous``.
    """
    if count < 1:
        raise ValueError(f"count is {count}: give the number of responses of a batch, at least 1")
    deviation = (variance / count).sqrt()
    size = rho.abs() / deviation.clamp_min(torch.finfo(rho.dtype).tiny)
    density = (-size.square() / 2).exp() / math.sqrt(2 * math.pi)
    return rho.abs() * (1 - 2 * torch.special.ndtr(-size)) + 2 * deviation * density


def cross_fitted_mean(rho: Tensor, kurtosis: Tensor, count: int) -> Tensor:
    r"""Mean of the cross-fitted tightness over batches of N responses, by the normal approximation.

    Parameters
    ----------
    rho
        The true correlations.
    kurtosis
        `joint_kurtosis`.
    count
        N; each half has N/2.

    Returns
    -------
    Tensor
        :math:`|\rho_i| (1 - 2 P_i)` with :math:`P_i = \Phi(-|\rho_i| \sqrt{N / (2 (\kappa_i - \rho_i^2))})`, the
        probability that half the responses get the sign wrong.

    Shapes
    ------
    rho (D,), kurtosis (D,) -> (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If ``count`` is below 2.

    References
    ----------
    Claim ``cor-cross-fit``.
    """
    if count < 2:
        raise ValueError(f"count is {count}: two halves need at least 2 responses")
    spread = (kurtosis - rho.square()).clamp_min(torch.finfo(rho.dtype).tiny)
    wrong = torch.special.ndtr(-rho.abs() * (count / (2 * spread)).sqrt())
    return rho.abs() * (1 - 2 * wrong)


def needed_count(rho: Tensor, kurtosis: Tensor, lost: float = 0.05) -> Tensor:
    r"""Responses from which the cross-fitted tightness of a parameter loses no more than a given share.

    Parameters
    ----------
    rho
        The true correlations.
    kurtosis
        `joint_kurtosis`.
    lost
        The share, :math:`2 P_i`.

    Returns
    -------
    Tensor
        :math:`N = 2 z^2 (\kappa_i - \rho_i^2) / \rho_i^2` with :math:`\Phi(-z)` half of ``lost``; infinite at
        :math:`\rho_i = 0`.

    Shapes
    ------
    rho (D,), kurtosis (D,) -> (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If ``lost`` does not lie strictly between 0 and 1.

    References
    ----------
    Claim ``cor-cross-fit``.
    """
    if not 0 < lost < 1:
        raise ValueError(f"lost is {lost}: give a share strictly between 0 and 1")
    z = float(torch.special.ndtri(torch.tensor(lost / 2, dtype=torch.float64)))
    return 2 * z**2 * (kurtosis / rho.square() - 1).clamp_min(0)


@dataclass(frozen=True)
class Batches:
    r"""Estimates of one tightness a parameter, one row a batch; NaN where a column was constant.

    Parameters
    ----------
    in_sample
        :math:`|\hat\rho_i|` of the whole batch.
    cross_fitted
        Sign from one half, value from the other: `ceilings.uncertainty.cross_fitted_tightness`.
    squares
        Product of both halves: `ceilings.uncertainty.cross_fitted_squares`.

    Shapes
    ------
    (B, D) each.

    Units
    -----
    1.
    """

    in_sample: Tensor
    cross_fitted: Tensor
    squares: Tensor


def draw_batches(
    scores: Tensor,
    rewards: Tensor,
    probs: Tensor,
    count: int,
    *,
    batches: int,
    generator: torch.Generator,
    shuffled: bool = False,
) -> Batches:
    """Sample batches of responses from an enumerated policy and estimate every tightness from each.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    probs
        Probability of every response.
    count
        N, even: the first half of a batch is one half, the rest is the other.
    batches
        Number of batches, B.
    generator
        Source of randomness.
    shuffled
        True permutes the rewards within each half: the null model, which has the same scores and rewards but
        not the same pairs.

    Returns
    -------
    Batches
        All estimates.

    Shapes
    ------
    scores (Y, D), rewards (Y,), probs (Y,) -> (B, D).

    Raises
    ------
    ValueError
        If ``count`` is odd or below 4, or there is no batch.

    Notes
    -----
    A batch enters by how often each response occurs and what rewards it was given, so that the cost depends on
    the number of distinct responses and not on N.
    """
    if count < 4 or count % 2 or batches < 1:
        raise ValueError(
            f"count is {count} and batches {batches}: give an even count of 4 or more, and a batch"
        )
    drawn = torch.multinomial(probs, batches * count, replacement=True, generator=generator)
    drawn = drawn.view(batches, 2, count // 2)
    given = rewards[drawn]
    if shuffled:
        order = torch.rand(given.shape, generator=generator, dtype=torch.float64).argsort(-1)
        given = given.gather(-1, order)
    sums = (torch.ones_like(given), given, given.square())
    empty = torch.zeros(batches, 2, len(probs), dtype=given.dtype)
    often, reward, squared = (empty.scatter_add(-1, drawn, x) for x in sums)
    return _estimates(scores - probs @ scores, often, reward, squared.sum((1, 2)))


def _estimates(scores: Tensor, often: Tensor, reward: Tensor, squared: Tensor) -> Batches:
    """Estimates from how often each response occurs in each half, and the sum of the rewards it was given."""
    half = float(often[0, 0].sum())
    mean = reward.sum(-1, keepdim=True) / half
    first, second = ((reward - mean * often) @ scores / (half - 1)).unbind(1)  # unbiased covariances
    n, every, total = 2 * half, often.sum(1), reward.sum((1, 2))
    reward_var = squared / n - (total / n).square()
    second_moment = every @ scores.square() / n
    score_var = second_moment - (every @ scores / n).square()
    varies = (reward_var > _CONSTANT * squared / n)[:, None] & (score_var > _CONSTANT * second_moment)
    together = (reward.sum(1) - total[:, None] / n * every) @ scores / n
    ceiling = torch.where(varies, (reward_var[:, None] * score_var).clamp_min(0).sqrt(), torch.nan)
    a, b = (g * (n - 1) / (n * ceiling) for g in (first, second))
    return Batches((together / ceiling).abs(), (a.sign() * b + b.sign() * a) / 2, a * b)
