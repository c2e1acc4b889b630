r"""The covariance, its ceiling, and how much of the ceiling a reward uses.

For a reward :math:`R` and scores :math:`s` under one law, the policy gradient is
:math:`g = \operatorname{Cov}(R, s)` and Cauchy-Schwarz gives
:math:`|g_i| = |\rho_i|\, \sigma(R) \sqrt{F_{ii}} \le \sigma(R) \sqrt{F_{ii}}`.

Every function takes the same three arguments. ``weights`` are the exact probabilities of an enumeration;
without them each row is one rollout of weight 1/N. Covariance and variances use that one weighting: only then
does the inequality hold for every finite sample, which is also why checking it on a sample proves nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.policies import Enumeration, check_probs

__all__ = [
    "explained_reward_variance",
    "gradient_ceiling",
    "nested_ceiling",
    "reward_variance",
    "score_reward_covariance",
    "score_variance",
    "signed_tightness",
    "tightness",
]

# A variance this small against the second moment of its terms is rounding, not variation: (1e-12)² of it.
_ZERO_VARIANCE = 1e-24


def _weights(rewards: Tensor, scores: Tensor | None, weights: Tensor | None) -> Tensor:
    """Check one batch and return its weights, 1/N where none are given."""
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must be a non-empty vector (N,), got shape {tuple(rewards.shape)}")
    # NOTE 1/N in an integer dtype is 0: integer rewards would have variance 0.
    if not rewards.is_floating_point():
        raise ValueError(
            f"rewards are {rewards.dtype}: convert them to the floating-point dtype of the scores"
        )
    if not bool(torch.isfinite(rewards).all()):
        bad = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"reward {bad} is {float(rewards[bad])}: every response needs a finite reward")
    if scores is not None:
        if scores.ndim != 2 or len(scores) != len(rewards):
            raise ValueError(
                f"{len(rewards)} rewards but scores of shape {tuple(scores.shape)}: expected (N, D)"
            )
        if scores.dtype != rewards.dtype:
            raise ValueError(
                f"scores are {scores.dtype} and rewards {rewards.dtype}: cast one of them on purpose"
            )
        if not bool(torch.isfinite(scores).all()):
            bad = int((~torch.isfinite(scores)).any(1).nonzero()[0])
            raise ValueError(
                f"the score of response {bad} is not finite: a response of probability zero has no score"
            )
    if weights is None:
        return torch.full_like(rewards, 1 / len(rewards))
    check_probs(weights, "weights")
    if len(weights) != len(rewards):
        raise ValueError(f"{len(weights)} weights for {len(rewards)} rewards")
    if weights.dtype != rewards.dtype:
        raise ValueError(
            f"weights are {weights.dtype} and rewards {rewards.dtype}: cast one of them on purpose"
        )
    return weights


def score_reward_covariance(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Covariance of the reward with every score component: the policy gradient.

    Parameters
    ----------
    scores
        ``scores[n, i]`` is :math:`\partial_i \log \pi_\theta(y_n)`.
    rewards
        ``rewards[n]`` is the reward of response ``n``.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        :math:`E[(R - E R)(s - E s)]`; equal to :math:`\nabla E[R]` when the weights are the policy's own law.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (D,).

    Units
    -----
    [R]/[θ].

    Notes
    -----
    Divides by N, not N − 1, as `gradient_ceiling` does.

    References
    ----------
    Claim ``thm-covariance``; Williams (1992).
    """
    w = _weights(rewards, scores, weights)
    return (w * (rewards - w @ rewards)) @ (scores - w @ scores)


def reward_variance(rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Variance of the reward, :math:`\sigma^2(R)`.

    Parameters
    ----------
    rewards
        Reward of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        The variance, a scalar; divides by N, not N − 1.

    Shapes
    ------
    rewards (N,), weights (N,) -> ().

    Units
    -----
    [R]².
    """
    w = _weights(rewards, None, weights)
    return w @ (rewards - w @ rewards).square()


def score_variance(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Variance of every score component: :math:`F_{ii}` under the policy's own law.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response; used to check the batch only.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        The variances.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (D,).

    Units
    -----
    1/[θ]².
    """
    w = _weights(rewards, scores, weights)
    return w @ (scores - w @ scores).square()


def gradient_ceiling(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Ceiling of every gradient component, :math:`\sigma(R) \sqrt{F_{ii}}`.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        The largest :math:`|g_i|` that any reward of this standard deviation could produce.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (D,).

    Units
    -----
    [R]/[θ].

    References
    ----------
    Claim ``thm-ceiling``.
    """
    # NOTE a root each: the product of two small variances underflows, in float32 already at 1e-38.
    return reward_variance(rewards, weights).sqrt() * score_variance(scores, rewards, weights).sqrt()


def signed_tightness(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Correlation of the reward with every score component, :math:`\rho_i`.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        Values in [−1, 1]; NaN where the reward or the score does not vary, because there both sides of the
        bound are zero and no correlation exists.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (D,).

    Units
    -----
    1.

    References
    ----------
    Claim ``thm-ceiling``.
    """
    w = _weights(rewards, scores, weights)
    gradient = score_reward_covariance(scores, rewards, weights)
    ceiling = gradient_ceiling(scores, rewards, weights)
    reward_varies = reward_variance(rewards, weights) > _ZERO_VARIANCE * (w @ rewards.square())
    score_varies = score_variance(scores, rewards, weights) > _ZERO_VARIANCE * (w @ scores.square())
    varies = reward_varies & score_varies & (ceiling > 0)
    return torch.where(varies, (gradient / ceiling).clamp(-1, 1), torch.nan)


def tightness(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Share of its ceiling that every gradient component uses, :math:`|g_i| / (\sigma(R) \sqrt{F_{ii}})`.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        1 means that the reward is affine in that score, 0 that it is uncorrelated with it; NaN where the
        ceiling is zero.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (D,).

    Units
    -----
    1.

    References
    ----------
    Claim ``thm-ceiling``.
    """
    return signed_tightness(scores, rewards, weights).abs()


def explained_reward_variance(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Share of the reward's variance that is linear in the scores, :math:`g^\top F^{+} g / \sigma^2(R)`.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        A scalar in [0, 1]; NaN for a constant reward. 1 means that the reward is affine in the scores.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> ().

    Notes
    -----
    Least squares of the centred reward on the centred scores, each row weighted by the square root of its
    probability: no D × D matrix is formed.

    References
    ----------
    Claim ``thm-joint``.
    """
    w = _weights(rewards, scores, weights)
    root = w.sqrt()
    target = root * (rewards - w @ rewards)
    design = root[:, None] * (scores - w @ scores)
    left, singular, _ = torch.linalg.svd(design, full_matrices=False)
    rank = singular > singular.max() * max(design.shape) * torch.finfo(design.dtype).eps
    explained = (left[:, rank].T @ target).square().sum()
    total = target.square().sum()
    varies = total > _ZERO_VARIANCE * (w @ rewards.square())
    return torch.where(varies, explained / total, torch.nan)


def nested_ceiling(enumeration: Enumeration, rewards: Tensor) -> Tensor:
    r"""Ceiling that follows the reward token by token, between :math:`|g_i|` and the plain ceiling.

    With :math:`Q_t = E[R \mid y_{\le t}]` it is
    :math:`\sum_t E[\sigma(Q_t \mid y_{<t})\, \sigma(s_{t,i} \mid y_{<t})]`.

    Parameters
    ----------
    enumeration
        Every response of one prompt, with token scores.
    rewards
        Reward of every response.

    Returns
    -------
    Tensor
        At least :math:`|g_i|` and at most :math:`\sigma(R) \sqrt{F_{ii}}`.

    Shapes
    ------
    rewards (Y,) -> (D,).

    Units
    -----
    [R]/[θ].

    References
    ----------
    Claim ``thm-nested``.
    """
    _weights(rewards, enumeration.scores, enumeration.probs)
    total = torch.zeros(enumeration.scores.shape[1], dtype=rewards.dtype)
    for t in range(enumeration.token_scores.shape[1]):
        total += _nested_term(enumeration, rewards, t)
    return total


def _group(keys: list[tuple[int, ...]]) -> tuple[Tensor, int]:
    """Index of each key among the distinct keys, and their number."""
    index: dict[tuple[int, ...], int] = {}
    return torch.tensor([index.setdefault(k, len(index)) for k in keys], dtype=torch.long), len(index)


def _group_sum(values: Tensor, group: Tensor, size: int) -> Tensor:
    return torch.zeros(size, *values.shape[1:], dtype=values.dtype).index_add_(0, group, values)


def _nested_term(enumeration: Enumeration, rewards: Tensor, t: int) -> Tensor:
    """E[σ(Q_t | y_<t) σ(s_t | y_<t)] at one position, over the prefixes that are still open there."""
    rows = (enumeration.lengths > t).nonzero()[:, 0]
    kept = [enumeration.responses[int(r)] for r in rows]
    probs, scores = enumeration.probs[rows], enumeration.token_scores[rows, t]
    node, nodes = _group([y[: t + 1] for y in kept])  # y_<=t
    mass = _group_sum(probs, node, nodes)
    value = _group_sum(probs * rewards[rows], node, nodes) / mass  # Q_t
    first = torch.zeros(nodes, dtype=torch.long).index_copy_(0, node, torch.arange(len(kept)))
    prefix, prefixes = _group([kept[int(r)][:t] for r in first])
    return _nested_position(value, scores[first], mass, prefix, prefixes)


def _nested_position(value: Tensor, scores: Tensor, mass: Tensor, prefix: Tensor, prefixes: int) -> Tensor:
    """Probability-weighted product of the two conditional standard deviations, summed over the prefixes."""
    total = _group_sum(mass, prefix, prefixes)
    mean_value = _group_sum(mass * value, prefix, prefixes) / total
    mean_score = _group_sum(mass[:, None] * scores, prefix, prefixes) / total[:, None]
    value_variance = _group_sum(mass * (value - mean_value[prefix]).square(), prefix, prefixes) / total
    score_var = (
        _group_sum(mass[:, None] * (scores - mean_score[prefix]).square(), prefix, prefixes) / total[:, None]
    )
    return total @ (value_variance.sqrt()[:, None] * score_var.sqrt())
