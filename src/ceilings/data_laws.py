r"""Laws of given data, judged under the policy, and signals that are given token by token.

For data from a law q the reward of supervised learning is :math:`q/\pi`, so `ceilings.ceiling` takes it as it takes
any reward: `ceilings.ceiling.gradient_ceiling` is then :math:`\sqrt{\chi^2(q \| \pi)}\, \sqrt{F_{ii}}` and
`ceilings.ceiling.nested_ceiling` its token-by-token form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.policies import Enumeration, check_probs
from ceilings.samplers import prefix_mean

__all__ = ["tempered_law", "token_ceiling", "token_covariance"]


def tempered_law(probs: Tensor, data_probs: Tensor, weight: float) -> Tensor:
    r"""Law between two others, :math:`\propto \pi^{1 - w} f^{w}`.

    Parameters
    ----------
    probs
        Probability of every response under the policy :math:`\pi`.
    data_probs
        Probability of the same responses under the other law f.
    weight
        w: 0 gives the policy, 1 the other law, more than 1 a law beyond it.

    Returns
    -------
    Tensor
        Probabilities.

    Shapes
    ------
    probs (Y,), data_probs (Y,) -> (Y,).

    Raises
    ------
    ValueError
        If either is no law, they list different numbers of responses, one of them has a zero, or the weight is
        negative or not finite.

    Notes
    -----
    A mixture :math:`(1 - \lambda) \pi + \lambda f` only scales the gradient; this path also turns it.

    References
    ----------
    Claim ``thm-supervised``.
    """
    for name, law in (("probs", probs), ("data_probs", data_probs)):
        check_probs(law, name)
        if bool((law == 0).any()):
            raise ValueError(
                f"{name} gives response {int((law == 0).nonzero()[0])} probability zero: it has no power"
            )
    if probs.shape != data_probs.shape:
        raise ValueError(f"{len(probs)} probs but {len(data_probs)} data_probs: list the same responses")
    if not 0 <= weight < float("inf"):
        raise ValueError(f"weight is {weight}: give a finite number, 0 or more")
    return ((1 - weight) * probs.log() + weight * data_probs.log()).softmax(0)


def token_covariance(law: Enumeration, signals: Tensor) -> Tensor:
    r"""Expected update when every token answers for its own signal, :math:`\sum_t E[\mathrm{Cov}(A_t, s_t | y_{<t})]`.

    Parameters
    ----------
    law
        Every response with its token scores.
    signals
        ``signals[y, t]`` belongs to token t of response y and depends on :math:`y_{\le t}` only.

    Returns
    -------
    Tensor
        One number a parameter.

    Shapes
    ------
    signals (Y, T) -> (D,).

    Units
    -----
    [R]/[θ].

    Raises
    ------
    ValueError
        If there is not one signal a response and step.

    Notes
    -----
    What a token's signal says of later tokens is all that it knows of them: with the reward-to-go as signal this
    would be the policy gradient, with the token's own share it is not.

    References
    ----------
    Claim ``thm-distillation``.
    """
    centred = signals - prefix_mean(law, signals)
    return torch.einsum("y,yt,ytd->d", law.probs, centred, law.token_scores)


def token_ceiling(law: Enumeration, signals: Tensor) -> Tensor:
    r"""Ceiling of `token_covariance`, :math:`\sum_t E[\sigma(A_t | y_{<t})\, \sigma(s_{t,i} | y_{<t})]`.

    Parameters
    ----------
    law, signals
        As there.

    Returns
    -------
    Tensor
        At least the absolute value of the update.

    Shapes
    ------
    signals (Y, T) -> (D,).

    Units
    -----
    [R]/[θ].

    Raises
    ------
    ValueError
        If there is not one signal a response and step.

    References
    ----------
    Claim ``thm-distillation``.
    """
    centred = signals - prefix_mean(law, signals)
    signal_spread = prefix_mean(law, centred.square()).sqrt()
    score_spread = prefix_mean(law, law.token_scores.square()).sqrt()
    return torch.einsum("y,yt,ytd->d", law.probs, signal_spread, score_spread)
