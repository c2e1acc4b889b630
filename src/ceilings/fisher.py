r"""The Fisher information of a policy, always named by its kind.

*Exact*: the expectation is a finite sum over the policy's own law. *Monte-Carlo*: responses are drawn from
the policy. *Empirical*: responses come from data; it is not an estimate of the Fisher information (Kunstner,
Hennig and Balles, 2019) and no ceiling holds for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.policies import check_probs

__all__ = [
    "empirical_diagonal_fisher",
    "exact_diagonal_fisher",
    "fisher_matrix",
    "monte_carlo_diagonal_fisher",
    "score_correlation_matrix",
]


def _check(probs: Tensor, scores: Tensor) -> None:
    check_probs(probs)
    if scores.ndim != 2 or len(scores) != len(probs):
        raise ValueError(f"scores must have shape (Y, D) with Y = {len(probs)}, got {tuple(scores.shape)}")
    if scores.dtype != probs.dtype:
        raise ValueError(f"scores are {scores.dtype} and probs {probs.dtype}: cast one of them on purpose")
    if not bool(torch.isfinite(scores).all()):
        bad = int((~torch.isfinite(scores)).any(1).nonzero()[0])
        raise ValueError(
            f"the score of response {bad} is not finite: a response of probability zero has no score"
        )


def fisher_matrix(probs: Tensor, scores: Tensor) -> Tensor:
    r"""Exact Fisher information matrix :math:`F = E_\pi[s s^\top]`.

    Parameters
    ----------
    probs
        Probability of every response.
    scores
        Score of every response.

    Returns
    -------
    Tensor
        The symmetric, positive semi-definite matrix; its rank is at most Y − 1.

    Shapes
    ------
    probs (Y,), scores (Y, D) -> (D, D).

    Units
    -----
    1/[θ]².

    References
    ----------
    Claim ``thm-joint``.
    """
    _check(probs, scores)
    return torch.einsum("y,yi,yj->ij", probs, scores, scores)


def exact_diagonal_fisher(probs: Tensor, scores: Tensor) -> Tensor:
    r"""Exact diagonal Fisher information :math:`F_{ii} = E_\pi[s_i^2]`.

    Parameters
    ----------
    probs
        Probability of every response.
    scores
        Score of every response.

    Returns
    -------
    Tensor
        Second moment of each score component; equal to its variance because scores have mean zero.

    Shapes
    ------
    probs (Y,), scores (Y, D) -> (D,).

    Units
    -----
    1/[θ]².

    References
    ----------
    Claims ``thm-zero-mean``, ``thm-ceiling``.
    """
    _check(probs, scores)
    return probs @ scores.square()


def monte_carlo_diagonal_fisher(scores: Tensor) -> Tensor:
    r"""Monte-Carlo diagonal Fisher information: mean of squares over responses drawn from the policy.

    Parameters
    ----------
    scores
        Scores of N responses *sampled from the policy itself* at temperature 1, without truncation.

    Returns
    -------
    Tensor
        Unbiased estimate of `exact_diagonal_fisher`.

    Shapes
    ------
    scores (N, D) -> (D,).

    Units
    -----
    1/[θ]².

    Raises
    ------
    ValueError
        If there is no score.

    Notes
    -----
    Squares, then averages. Averaging first (one backward pass through a batch mean) estimates F/N instead.
    """
    if scores.ndim != 2 or len(scores) == 0:
        raise ValueError(f"scores must have shape (N, D) with N ≥ 1, got {tuple(scores.shape)}")
    return scores.square().mean(0)


def empirical_diagonal_fisher(scores: Tensor) -> Tensor:
    """Empirical diagonal Fisher: mean of squares over responses *from data*.

    Parameters
    ----------
    scores
        Scores of N responses that the policy did not draw, such as human text.

    Returns
    -------
    Tensor
        The same arithmetic as `monte_carlo_diagonal_fisher`, but not an estimate of the Fisher information:
        under another law the scores need not have mean zero.

    Shapes
    ------
    scores (N, D) -> (D,).

    Units
    -----
    1/[θ]².

    References
    ----------
    Kunstner, Hennig and Balles (2019).
    """
    return monte_carlo_diagonal_fisher(scores)


def score_correlation_matrix(probs: Tensor, scores: Tensor) -> Tensor:
    r"""Correlation matrix of the score components, :math:`C_{ij} = F_{ij} / \sqrt{F_{ii} F_{jj}}`.

    Its largest eigenvalue bounds the sum of squared tightness over the parameters.

    Parameters
    ----------
    probs
        Probability of every response.
    scores
        Score of every response.

    Returns
    -------
    Tensor
        Correlations among the components with :math:`F_{ii} > 0`; rows and columns of the others are zero.

    Shapes
    ------
    probs (Y,), scores (Y, D) -> (D, D).

    References
    ----------
    Claim ``thm-joint``.
    """
    fisher = fisher_matrix(probs, scores)
    diagonal = fisher.diagonal()
    inverse_std = torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(diagonal.dtype).tiny).rsqrt(), 0)
    return inverse_std[:, None] * fisher * inverse_std
