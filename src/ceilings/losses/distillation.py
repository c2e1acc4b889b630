r"""On-policy distillation: the student samples, a teacher judges every token (reverse KL).

Departures from the papers:

1. Agarwal et al. interpolate between divergences and mix in fixed data; here the divergence is the reverse KL and
   the responses are whatever the caller sampled.
2. Lu and Thinking Machines Lab give each token its own log-ratio as reward and nothing for later tokens: that is
   ``credit="token"``. ``credit="to_go"`` adds the later tokens, which makes it unbiased for the divergence of whole
   responses.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ceilings.advantages import reward_to_go
from ceilings.losses.reinforce import reinforce_loss
from ceilings.losses.sequences import Average, check_tokens, masked_mean

__all__ = ["check_laws", "reverse_kl_loss", "sampled_reverse_kl_loss", "token_reverse_kl"]


def reverse_kl_loss(
    laws: Tensor, teacher_laws: Tensor, mask: Tensor, *, average: Average = "responses"
) -> Tensor:
    r"""Divergence from the teacher's law at every token, over the whole vocabulary.

    Parameters
    ----------
    laws
        Log-probabilities of all tokens after each prefix, under the policy that is trained.
    teacher_laws
        The same under the teacher; no gradient goes through them.
    mask
        True at the tokens of the response.
    average
        ``"responses"``: sum over the tokens, mean over responses. ``"tokens"``: mean over tokens.

    Returns
    -------
    Tensor
        :math:`\frac1N \sum_n \sum_t \mathrm{KL}(\pi_\theta(\cdot \mid y_{<t}) \| \pi_T(\cdot \mid y_{<t}))`.

    Shapes
    ------
    laws (N, T, V), teacher_laws (N, T, V), mask (N, T) -> ().

    Units
    -----
    nat.

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, a law does not sum to 1, or the teacher gives probability zero
        where the policy does not.

    Notes
    -----
    The prefixes are held fixed: no gradient says how the policy's choice now changes the prefixes later. So it is
    not the gradient of the divergence of whole responses, except for responses of one token.

    References
    ----------
    Claim ``thm-distillation``; Agarwal et al. (2024), with the reverse KL.
    """
    return masked_mean(token_reverse_kl(laws, teacher_laws, mask), mask, average)


def token_reverse_kl(laws: Tensor, teacher_laws: Tensor, mask: Tensor) -> Tensor:
    r"""Divergence :math:`\mathrm{KL}(\pi(\cdot \mid y_{<t}) \| \pi_T(\cdot \mid y_{<t}))` at every token.

    Parameters
    ----------
    laws, teacher_laws, mask
        As in `reverse_kl_loss`.

    Returns
    -------
    Tensor
        0 outside the mask.

    Shapes
    ------
    laws (N, T, V), teacher_laws (N, T, V), mask (N, T) -> (N, T).

    Units
    -----
    nat.

    Raises
    ------
    ValueError
        As in `reverse_kl_loss`.
    """
    check_laws("laws", laws, mask)
    check_laws("teacher_laws", teacher_laws, mask)
    if laws.shape != teacher_laws.shape:
        raise ValueError(
            f"laws of shape {tuple(laws.shape)} but teacher_laws of shape {tuple(teacher_laws.shape)}: the two "
            "need the same tokens and vocabulary"
        )
    possible = (laws > -torch.inf) & mask[:, :, None]
    if bool((possible & (teacher_laws == -torch.inf)).any()):
        n, t, v = (int(k) for k in (possible & (teacher_laws == -torch.inf)).nonzero()[0])
        raise ValueError(
            f"the teacher gives token {v} probability zero at position {t} of response {n} and the policy does "
            "not: the divergence is infinite; use a teacher that was not truncated"
        )
    ratio = torch.where(possible, laws, 0) - torch.where(possible, teacher_laws.detach(), 0)
    return (torch.where(possible, laws, -torch.inf).exp() * ratio).sum(2)


def sampled_reverse_kl_loss(
    log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, *, credit: Literal["token", "to_go"] = "token"
) -> Tensor:
    r"""Policy-gradient surrogate whose reward is minus the log-ratio to the teacher, :math:`-\log(\pi_\theta/\pi_T)`.

    Parameters
    ----------
    log_probs
        Log-probability of every chosen token under the policy that is trained, which also sampled it.
    teacher_log_probs
        The same under the teacher.
    mask
        True at the tokens of the response.
    credit
        ``"token"``: each token answers for its own log-ratio. ``"to_go"``: for those of the later tokens too.

    Returns
    -------
    Tensor
        :math:`\frac1N \sum_{n,t} c_{n,t} \log \pi_\theta(y_{n,t} \mid y_{n,<t})` with a detached credit c.

    Shapes
    ------
    All (N, T) -> ().

    Units
    -----
    nat.

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, the credit is unknown, or the teacher gives a sampled token
        probability zero.

    Notes
    -----
    On-policy its expected gradient is, with ``"to_go"``, :math:`\nabla \mathrm{KL}(\pi \| \pi_T)` of whole responses,
    although the reward depends on θ; with ``"token"``, the gradient of `reverse_kl_loss`. The value means nothing.

    References
    ----------
    Claim ``thm-distillation``; Lu and Thinking Machines Lab (2025).
    """
    check_tokens(log_probs, mask)
    check_tokens(teacher_log_probs, mask, "teacher_log_probs")
    if credit not in ("token", "to_go"):
        raise ValueError(f"there is no credit {credit!r}: use token or to_go")
    rewards = torch.where(mask, teacher_log_probs - log_probs, 0).detach()
    return reinforce_loss(log_probs, mask, rewards if credit == "token" else reward_to_go(rewards, mask))


def check_laws(name: str, laws: Tensor, mask: Tensor) -> None:
    """Refuse what is not a whole next-token law at every token of the responses.

    Parameters
    ----------
    name
        What to call it in a message.
    laws
        Log-probabilities of all tokens after each prefix.
    mask
        True at the tokens of the response.

    Shapes
    ------
    laws (N, T, V), mask (N, T).

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, or a law does not sum to 1.
    """
    if laws.ndim != 3 or laws.shape[:2] != mask.shape or not laws.is_floating_point():
        raise ValueError(
            f"{name} must be floating point of shape (N, T, V) with (N, T) = {tuple(mask.shape)}; got {laws.dtype} "
            f"of shape {tuple(laws.shape)}"
        )
    check_tokens(torch.zeros_like(laws[:, :, 0]), mask, name)
    totals = laws.detach()[mask].exp().sum(-1)
    allowed = 1e-9 if laws.dtype == torch.float64 else 1e-4
    if not bool(((totals - 1).abs() <= allowed).all()):
        worst = float(totals[(totals - 1).abs().nan_to_num(torch.inf).argmax()])
        raise ValueError(
            f"a law of {name} sums to {worst:.6g}, not 1: pass log-probabilities of the whole vocabulary, neither "
            "logits nor the top few"
        )
