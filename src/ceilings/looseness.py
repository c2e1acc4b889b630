r"""What one reward can do to all ceilings at once.

A single ceiling can be tight; all of them together usually cannot, because the correlations of one reward with
many scores share one unit vector. Put the functions of the response under :math:`\langle a, b \rangle = E[ab]`:
the centred reward and each centred score, divided by their standard deviations, are unit vectors, and
:math:`\rho_i` is the inner product of two of them. Everything here is read off the matrix of those vectors by a
singular value decomposition of size min(N, D); no D × D matrix is formed.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ceilings.ceiling import (
    gradient_ceiling,
    reward_variance,
    score_reward_covariance,
    score_variance,
    tightness,
)

__all__ = [
    "direction_tightness",
    "fisher_concentration",
    "fisher_spectrum",
    "fisher_weighted_tightness",
    "forced_rms",
    "outside_share",
    "outside_share_bound",
    "rms_tightness",
    "tightest_reward",
    "top_ceilings",
    "varying_scores",
]

# A standard deviation below this share of the largest, or of the root of its own second moment, is rounding. Sums of
# numbers of double precision leave about 1e-16 of the largest; a parameter with a true ceiling this low is lost too.
_ROUNDING: Final = 1e-12


def _weighted_scores(scores: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows √w (s − E s), whose Gram matrix is F, and √w."""
    w = scores.new_full((len(scores),), 1 / len(scores)) if weights is None else weights
    score_variance(scores, torch.zeros_like(w), weights)  # refuses what is not a batch of scores
    return w.sqrt()[:, None] * (scores - w @ scores), w.sqrt()


def _unit_scores(scores: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Unit vectors of the scores that vary, as columns, and √w."""
    design, root = _weighted_scores(scores, weights)
    varies = _varies(design, root, scores)
    if not bool(varies.any()):
        raise ValueError("no score varies: every ceiling is zero and no tightness is defined")
    return design[:, varies] / design[:, varies].norm(dim=0), root


def _varies(design: Tensor, root: Tensor, scores: Tensor) -> Tensor:
    """Which scores vary by more than rounding."""
    length = design.norm(dim=0)
    own = (root[:, None] * scores).norm(dim=0)
    return length > _ROUNDING * torch.maximum(own, length.max())


def varying_scores(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Which parameters have a ceiling: their scores vary by more than rounding.

    Parameters
    ----------
    scores
        Score of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        True where :math:`\sqrt{F_{ii}}` exceeds 1e-12 times the largest of them, and 1e-12 times the root of
        :math:`E[s_i^2]`. The n of `forced_rms` and `rms_tightness`.

    Shapes
    ------
    scores (N, D), weights (N,) -> (D,).

    Notes
    -----
    A parameter that no logit depends on, such as the word vector of a token that is never read, has the score zero
    in exact arithmetic and some 1e-17 here. The correlation of such rounding with a reward is as large as any.

    References
    ----------
    Claim ``thm-joint``.
    """
    return _varies(*_weighted_scores(scores, weights), scores)


def _is_constant(rewards: Tensor, weights: Tensor | None) -> bool:
    """Whether a reward varies by rounding only; then it is uncorrelated even with itself."""
    return bool(tightness(rewards[:, None], rewards, weights).isnan())


def direction_tightness(
    scores: Tensor, rewards: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Correlation of the reward with the score along each eigenvector of the Fisher matrix.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response; it must vary.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    tuple
        :math:`\rho_k`, each up to the sign of its eigenvector, and the eigenvalues :math:`\lambda_k > 0`,
        largest first. :math:`\sum_k \rho_k^2` is the share of the reward's variance that is linear in the scores.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> (r,), (r,) with r the rank of F.

    Units
    -----
    1, and 1/[θ]² for the eigenvalues.

    Raises
    ------
    ValueError
        If the reward is constant.

    References
    ----------
    Claim ``thm-joint``.
    """
    design, root = _weighted_scores(scores, weights)
    if _is_constant(rewards, weights):
        raise ValueError("the reward is constant: it has no correlation with any score")
    left, singular, _ = torch.linalg.svd(design, full_matrices=False)
    rank = _numerical_rank(singular, design)
    target = root * (rewards - root.square() @ rewards) / reward_variance(rewards, weights).sqrt()
    return left[:, :rank].T @ target, singular[:rank].square()


def fisher_spectrum(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Positive eigenvalues of the Fisher matrix.

    Parameters
    ----------
    scores
        Score of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        :math:`\lambda_1 \ge \dots \ge \lambda_r > 0`; their number r is the rank of F, at most N − 1.

    Shapes
    ------
    scores (N, D), weights (N,) -> (r,).

    Units
    -----
    1/[θ]².

    References
    ----------
    Claim ``thm-joint``.
    """
    design, _ = _weighted_scores(scores, weights)
    singular = torch.linalg.svdvals(design)
    return singular[: _numerical_rank(singular, design)].square()


def _numerical_rank(singular: Tensor, design: Tensor) -> int:
    """Number of singular values that are not rounding."""
    return int((singular > singular.max() * max(design.shape) * torch.finfo(design.dtype).eps).sum())


def rms_tightness(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Root mean square of the tightness over the parameters that have a ceiling, see `varying_scores`.

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
        A scalar in [0, 1], at most `forced_rms`; NaN if no tightness is defined.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> ().

    Units
    -----
    1.

    References
    ----------
    Claim ``thm-joint``.
    """
    every = tightness(scores, rewards, weights)
    return every[varying_scores(scores, weights)].square().nanmean().sqrt()


def forced_rms(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Largest root-mean-square tightness that any reward can reach, :math:`\sqrt{\lambda_{\max}(C)/n}`.

    Parameters
    ----------
    scores
        Score of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        A scalar in [1/√r, 1], with C the correlation matrix of the n scores that vary and r its rank. 1 means
        that nothing is forced; `tightest_reward` attains it.

    Shapes
    ------
    scores (N, D), weights (N,) -> ().

    Units
    -----
    1.

    References
    ----------
    Claim ``thm-joint``.
    """
    unit, _ = _unit_scores(scores, weights)
    return torch.linalg.matrix_norm(unit, ord=2) / unit.shape[1] ** 0.5


def tightest_reward(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Reward of mean 0 and variance 1 whose root-mean-square tightness is `forced_rms`.

    Parameters
    ----------
    scores
        Score of every response.
    weights
        Probabilities of an enumeration, all positive, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        The reward, up to its sign.

    Shapes
    ------
    scores (N, D), weights (N,) -> (N,).

    Units
    -----
    [R].

    References
    ----------
    Claim ``thm-joint``.
    """
    unit, root = _unit_scores(scores, weights)
    left, _, _ = torch.linalg.svd(unit, full_matrices=False)
    return left[:, 0] / root


def fisher_weighted_tightness(scores: Tensor, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Mean of :math:`\rho_i^2` in which each parameter counts by its Fisher information.

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
        :math:`\|g\|^2 / (\sigma^2(R) \operatorname{tr} F)`, a scalar in [0, 1], at most
        `fisher_concentration`; NaN for a constant reward.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,) -> ().

    Units
    -----
    1.

    References
    ----------
    Claims ``thm-joint`` and ``thm-energy``.
    """
    gradient = score_reward_covariance(scores, rewards, weights)
    share = gradient.square().sum() / gradient_ceiling(scores, rewards, weights).square().sum()
    return share.new_tensor(torch.nan) if _is_constant(rewards, weights) else share


def fisher_concentration(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Share of the Fisher information along one direction, :math:`\lambda_{\max}(F)/\operatorname{tr} F`.

    Parameters
    ----------
    scores
        Score of every response.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        A scalar in [1/r, 1] with r the rank of F; 1 means that one direction carries it all.

    Shapes
    ------
    scores (N, D), weights (N,) -> ().

    Units
    -----
    1.

    References
    ----------
    Claim ``thm-joint``.
    """
    spectrum = fisher_spectrum(scores, weights)
    return spectrum[0] / spectrum.sum()


def top_ceilings(scores: Tensor, share: float, weights: Tensor | None = None) -> Tensor:
    r"""Parameters with the largest ceilings.

    Parameters
    ----------
    scores
        Score of every response.
    share
        Share of the parameters to mark, in (0, 1]; at least one is marked.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        Boolean mask, True at the ``share`` of parameters with the largest :math:`F_{ii}`; the same for every
        reward.

    Shapes
    ------
    scores (N, D), weights (N,) -> (D,).

    Raises
    ------
    ValueError
        If ``share`` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; give a number above 0 and at most 1")
    fisher = _weighted_scores(scores, weights)[0].square().sum(0)
    mask = torch.zeros(len(fisher), dtype=torch.bool)
    mask[fisher.topk(max(1, round(share * len(fisher)))).indices] = True
    return mask


def outside_share(values: Tensor, subset: Tensor) -> Tensor:
    """Share of a non-negative quantity that lies outside a set of parameters.

    Parameters
    ----------
    values
        Such as :math:`g_i^2` or :math:`F_{ii}`.
    subset
        True at the parameters in the set.

    Returns
    -------
    Tensor
        A scalar in [0, 1]; 0 means that the set holds everything.

    Shapes
    ------
    values (D,), subset (D,) -> ().

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If ``subset`` is not a mask over the entries of ``values``.
    """
    if subset.dtype != torch.bool or subset.shape != values.shape:
        raise ValueError(
            f"subset must be a boolean mask of shape {tuple(values.shape)}, "
            f"got {subset.dtype} of shape {tuple(subset.shape)}"
        )
    return values[~subset].sum() / values.sum()


def outside_share_bound(
    scores: Tensor, rewards: Tensor, subset: Tensor, weights: Tensor | None = None
) -> Tensor:
    r"""Bound on the share of gradient energy outside a set S, :math:`F(S^c) / \sum_i \rho_i^2 F_{ii}`.

    Parameters
    ----------
    scores
        Score of every response.
    rewards
        Reward of every response.
    subset
        True at the parameters in S.
    weights
        Probabilities of an enumeration, or None for N rollouts of weight 1/N.

    Returns
    -------
    Tensor
        A scalar, at least :math:`\sum_{i \notin S} g_i^2 / \|g\|^2`. From 1 upwards it says
        nothing; NaN for a constant reward.

    Shapes
    ------
    scores (N, D), rewards (N,), subset (D,), weights (N,) -> ().

    Units
    -----
    1.

    References
    ----------
    Claim ``thm-energy``.
    """
    tail = outside_share(score_variance(scores, rewards, weights), subset)
    return tail / fisher_weighted_tightness(scores, rewards, weights)
