r"""What a step of an optimiser is on average, from the moments of reward and score.

With B independent responses and the true mean as baseline a batch estimates the gradient by
:math:`\hat g_i = \frac1B \sum_n (R_n - E R) s_{n,i}`. Its second moment decides what Adam divides by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.ceiling import gradient_ceiling, score_reward_covariance, tightness

__all__ = ["adam_mean_step", "batch_second_moment", "score_reward_kurtosis"]


def score_reward_kurtosis(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""How unusual rewards and large scores go together, :math:`\kappa_i = E[(R - E R)^2 s_i^2] / (\sigma^2 F_{ii})`.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    weights
        Probability of every response; None for equal ones.

    Returns
    -------
    Tensor
        1 where squared deviation and squared score are uncorrelated; NaN where the ceiling is zero.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the shapes differ or the weights do not sum to 1.

    References
    ----------
    Claim ``prop-adam``.
    """
    ceiling = gradient_ceiling(scores, rewards, weights)
    law = torch.full((len(rewards),), 1 / len(rewards), dtype=scores.dtype) if weights is None else weights
    centred = scores - law @ scores
    raw = law @ ((rewards - law @ rewards)[:, None] * centred).square()
    return torch.where(tightness(scores, rewards, weights).isnan(), torch.nan, raw / ceiling.square())


def batch_second_moment(
    scores: Tensor, rewards: Tensor, weights: Tensor | None = None, *, batch: int
) -> Tensor:
    r"""Mean square of a batch's gradient estimate, :math:`\sigma^2 F_{ii} (\kappa_i + (B - 1) \rho_i^2) / B`.

    Parameters
    ----------
    scores, rewards, weights
        As in `score_reward_kurtosis`.
    batch
        Number of responses, B.

    Returns
    -------
    Tensor
        Expectation of the squared estimate; 0 where the ceiling is zero.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (D,).

    Units
    -----
    ([R]/[θ])².

    Raises
    ------
    ValueError
        If ``batch`` is not positive, the shapes differ or the weights do not sum to 1.

    References
    ----------
    Claim ``prop-sgd``.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}: a batch has at least one response")
    ceiling = gradient_ceiling(scores, rewards, weights)
    gradient = score_reward_covariance(scores, rewards, weights)
    kurtosis = score_reward_kurtosis(scores, rewards, weights).nan_to_num(0.0)
    return (ceiling.square() * kurtosis + (batch - 1) * gradient.square()) / batch


def adam_mean_step(
    scores: Tensor,
    rewards: Tensor,
    weights: Tensor | None = None,
    *,
    batch: int,
    rate: float = 1.0,
    epsilon: float = 0.0,
) -> Tensor:
    r"""Mean step of Adam at fixed parameters and long memory, :math:`\eta g_i / (\sqrt{E \hat g_i^2} + \varepsilon)`.

    Parameters
    ----------
    scores, rewards, weights
        As in `score_reward_kurtosis`.
    batch
        Number of responses, B.
    rate
        Learning rate, η.
    epsilon
        What Adam adds to the root of its second moment.

    Returns
    -------
    Tensor
        Step up the gradient; with ``epsilon`` 0 it is :math:`\eta \sqrt B \rho_i / \sqrt{\kappa_i + (B - 1) \rho_i^2}`,
        which does not contain the ceiling. NaN where the ceiling is zero.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (D,).

    Units
    -----
    [θ] per step, as ``rate``; ``epsilon`` is in [R]/[θ].

    Raises
    ------
    ValueError
        If ``batch`` is not positive, the shapes differ or the weights do not sum to 1.

    References
    ----------
    Claim ``prop-adam``; Kingma and Ba (2015), Algorithm 1.
    """
    root = batch_second_moment(scores, rewards, weights, batch=batch).sqrt()
    gradient = score_reward_covariance(scores, rewards, weights)
    step = rate * gradient / (root + epsilon)
    return torch.where(tightness(scores, rewards, weights).isnan(), torch.nan, step)
