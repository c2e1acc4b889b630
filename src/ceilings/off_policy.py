r"""Two laws at once: responses drawn from μ, or given by q, judged under the policy π.

All of it is for laws that are listed in full, such as `ceilings.policies.Enumeration` holds; `logged_score_mean`
alone makes do with the part of a next-token law that an engine logs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.ceiling import reward_variance
from ceilings.policies import check_probs

__all__ = [
    "chi_square_divergence",
    "extra_term",
    "importance_ceiling",
    "importance_weights",
    "kl_divergence",
    "logged_score_mean",
]


def importance_weights(probs: Tensor, behaviour_probs: Tensor) -> Tensor:
    r"""Weights :math:`w = \pi/\mu` that turn an expectation under μ into one under π.

    Parameters
    ----------
    probs
        Probability of every response under the policy.
    behaviour_probs
        Probability of the same responses under the policy that samples.

    Returns
    -------
    Tensor
        One weight a response; their mean under μ is 1. A response that neither gives has the weight 0.

    Shapes
    ------
    probs (Y,), behaviour_probs (Y,) -> (Y,).

    Raises
    ------
    ValueError
        If either is no law, they list different numbers of responses, or μ is zero where π is not.

    References
    ----------
    Claim ``thm-importance``.
    """
    return _ratio(probs, behaviour_probs, "probs", "behaviour_probs")


def chi_square_divergence(data_probs: Tensor, probs: Tensor) -> Tensor:
    r"""Divergence :math:`\chi^2(q \| \pi) = E_\pi[(q/\pi)^2] - 1`: the variance of the reward :math:`q/\pi`.

    Parameters
    ----------
    data_probs
        Probability of every response under the law q of the data.
    probs
        Probability of the same responses under the policy.

    Returns
    -------
    Tensor
        A scalar, 0 or more.

    Shapes
    ------
    data_probs (Y,), probs (Y,) -> ().

    Raises
    ------
    ValueError
        If either is no law, they list different numbers of responses, or π is zero where q is not.

    References
    ----------
    Claim ``thm-supervised``.
    """
    ratio = _ratio(data_probs, probs, "data_probs", "probs")
    return probs @ (ratio - 1).square()


def kl_divergence(probs: Tensor, reference_probs: Tensor) -> Tensor:
    r"""Divergence :math:`\mathrm{KL}(\pi \| \pi_{\mathrm{ref}})` between two listed laws.

    Parameters
    ----------
    probs
        Probability of every response under the policy.
    reference_probs
        Probability of the same responses under the reference.

    Returns
    -------
    Tensor
        A scalar, 0 or more.

    Shapes
    ------
    probs (Y,), reference_probs (Y,) -> ().

    Units
    -----
    nat.

    Raises
    ------
    ValueError
        If either is no law, they list different numbers of responses, or the reference is zero where π is not.

    References
    ----------
    Claim ``thm-distillation``.
    """
    ratio = _ratio(probs, reference_probs, "probs", "reference_probs")
    return probs @ torch.where(probs > 0, ratio, 1).log()


def extra_term(scores: Tensor, signals: Tensor, behaviour_probs: Tensor, baseline: float | Tensor) -> Tensor:
    r"""What a baseline adds to the covariance under μ, :math:`(E_\mu A - b)\, E_\mu[s]`.

    Parameters
    ----------
    scores
        Score of every response under the policy, :math:`s(y) = \nabla_\theta \log \pi_\theta(y)`.
    signals
        What multiplies the score of each response, :math:`A(y)`.
    behaviour_probs
        Probability of every response under the law μ that samples; zero where the policy has no score.
    baseline
        The constant b subtracted from every signal; 0 for none.

    Returns
    -------
    Tensor
        :math:`E_\mu[(A - b)\, s] - \mathrm{Cov}_\mu(A, s)`; zero for :math:`b = E_\mu A`.

    Shapes
    ------
    scores (Y, D), signals (Y,), behaviour_probs (Y,) -> (D,).

    Units
    -----
    [A]/[θ].

    Raises
    ------
    ValueError
        If ``behaviour_probs`` is no law, or the three list different numbers of responses.

    References
    ----------
    Claim ``thm-behaviour``.
    """
    check_probs(behaviour_probs, "behaviour_probs")
    _same_responses(behaviour_probs, "behaviour_probs", scores=scores, signals=signals)
    return (behaviour_probs @ signals - baseline) * (behaviour_probs @ scores)


def importance_ceiling(scores: Tensor, rewards: Tensor, probs: Tensor, behaviour_probs: Tensor) -> Tensor:
    r"""Ceiling of the policy gradient that samples from μ obey, :math:`\sigma_\mu(R) \sqrt{E_\mu[w^2 s_i^2]}`.

    Parameters
    ----------
    scores
        Score of every response under the policy.
    rewards
        Reward of every response.
    probs
        Probability of every response under the policy.
    behaviour_probs
        Probability of every response under the law μ that samples.

    Returns
    -------
    Tensor
        At least :math:`|g_i|`. `ceilings.ceiling.gradient_ceiling` bounds the same :math:`g_i`, and either of the
        two may be the smaller.

    Shapes
    ------
    scores (Y, D), rewards (Y,), probs (Y,), behaviour_probs (Y,) -> (D,).

    Units
    -----
    [R]/[θ].

    Raises
    ------
    ValueError
        If a law is no law, the four list different numbers of responses, or μ is zero where π is not.

    References
    ----------
    Claim ``thm-importance``.
    """
    weights = importance_weights(probs, behaviour_probs)
    _same_responses(behaviour_probs, "behaviour_probs", scores=scores, rewards=rewards)
    second_moment = behaviour_probs @ (weights[:, None] * scores).square()
    return reward_variance(rewards, behaviour_probs).sqrt() * second_moment.sqrt()


def logged_score_mean(
    token_ids: Tensor, logged_probs: Tensor, probs: Tensor, logit_derivatives: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Mean of a token's score under a law μ of which only the most likely tokens were logged.

    Parameters
    ----------
    token_ids
        The K most likely tokens under μ at one prefix.
    logged_probs
        Their probabilities under μ, not renormalised.
    probs
        The policy's own probabilities at this prefix, of the whole vocabulary.
    logit_derivatives
        ``logit_derivatives[v, i]`` is :math:`\partial_i z_v`; a token's score is this minus its mean under π.

    Returns
    -------
    Tensor
        Estimate of :math:`m_i = E_\mu[s_i]`, in which the unlogged mass is spread as the policy spreads it.
    Tensor
        The largest error that any law with this log can give the estimate; some law attains it. Zero where at
        most one token is unlogged.

    Shapes
    ------
    token_ids (K,), logged_probs (K,), probs (V,), logit_derivatives (V, D) -> (D,), (D,).

    Units
    -----
    1/[θ].

    Raises
    ------
    ValueError
        If the shapes do not fit, a token is logged twice, the logged probabilities exceed 1 or cannot be the
        largest, or π gives the unlogged tokens nothing to spread.

    Notes
    -----
    No unlogged token has more than the smallest logged probability. Under that cap the mean of
    :math:`\partial_i z` is extreme when the tokens with the largest (or smallest) derivative are filled first.

    References
    ----------
    Claim ``cor-logged``.
    """
    _check_log(token_ids, logged_probs, probs, logit_derivatives)
    unlogged = torch.ones_like(probs, dtype=torch.bool)
    unlogged[token_ids] = False
    policy_mean = probs @ logit_derivatives
    mean = logged_probs @ logit_derivatives[token_ids] - policy_mean
    rest, cap = (1 - logged_probs.sum()).clamp_min(0), logged_probs.min()
    if not bool(unlogged.any()):
        return mean, torch.zeros_like(mean)
    shape, tail = probs[unlogged], logit_derivatives[unlogged]
    if float(shape.sum()) == 0 < float(rest):
        raise ValueError("probs is zero on every unlogged token: there is no shape to give the unlogged mass")
    guess = rest * (shape @ tail) / shape.sum().clamp_min(torch.finfo(shape.dtype).tiny)
    fill = (rest - cap * torch.arange(len(tail), dtype=rest.dtype, device=rest.device)).clamp(0, float(cap))
    fill = fill[: max(1, int((fill > 0).sum()))]
    high = fill @ tail.topk(len(fill), dim=0).values
    low = fill @ tail.topk(len(fill), dim=0, largest=False).values
    return mean + guess, torch.maximum(high - guess, guess - low).clamp_min(0)


def _check_log(token_ids: Tensor, logged_probs: Tensor, probs: Tensor, logit_derivatives: Tensor) -> None:
    """Refuse a log that no law over this vocabulary could have left."""
    check_probs(probs)
    _same_responses(probs, "probs", "tokens", logit_derivatives=logit_derivatives)
    if token_ids.ndim != 1 or token_ids.shape != logged_probs.shape or len(token_ids) == 0:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and logged_probs {tuple(logged_probs.shape)}: give one "
            "probability a logged token, and at least one"
        )
    if len(token_ids.unique()) != len(token_ids) or not 0 <= int(token_ids.min()) <= int(
        token_ids.max()
    ) < len(probs):
        raise ValueError(
            f"token_ids must be {len(token_ids)} different tokens between 0 and {len(probs) - 1}"
        )
    rest = 1 - float(logged_probs.sum())
    slack = 1e-9 if logged_probs.dtype == torch.float64 else 1e-4
    if not bool((logged_probs >= 0).all()) or rest < -slack:
        raise ValueError(
            f"logged_probs must not be negative or sum to more than 1; they sum to {1 - rest:.9g}"
        )
    room = (len(probs) - len(token_ids)) * float(logged_probs.min())
    if rest > room + slack:
        raise ValueError(
            f"{rest:.3g} of the mass is unlogged, more than {len(probs) - len(token_ids)} tokens of at most "
            f"{float(logged_probs.min()):.3g} can hold: log the most likely tokens, not renormalised"
        )


def _same_responses(law: Tensor, law_name: str, rows: str = "responses", **others: Tensor) -> None:
    """Refuse quantities that do not have one row an entry of the law."""
    for name, values in others.items():
        if len(values) != len(law):
            raise ValueError(f"{len(values)} {name} but {len(law)} {law_name}: list the same {rows}")


def _ratio(above: Tensor, below: Tensor, above_name: str, below_name: str) -> Tensor:
    """Quotient of two laws over the same responses; 0/0 is 0."""
    check_probs(above.detach(), above_name)
    check_probs(below.detach(), below_name)
    if above.shape != below.shape:
        raise ValueError(f"{len(above)} {above_name} but {len(below)} {below_name}: list the same responses")
    if bool(((below == 0) & (above > 0)).any()):
        row = int(((below == 0) & (above > 0)).nonzero()[0])
        raise ValueError(
            f"response {row} has probability zero in {below_name} and {float(above[row]):.3g} in {above_name}: no "
            "weight can make up for what is never drawn"
        )
    return torch.where(above > 0, above, 0) / torch.where(below > 0, below, 1)
