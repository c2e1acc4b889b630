r"""KTO: single responses, each marked desirable or not, against a reference point.

Departures from the paper:

1. The paper's estimate of the reference point pairs each prompt of the batch with the response to another; which
   responses those are is the caller's choice (`kto_reference_point` takes their log-probabilities).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.losses.sequences import check_positive, check_responses

__all__ = ["kto_loss", "kto_reference_point"]


def kto_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    r"""Mean of :math:`\lambda_y (1 - \sigma(\pm\beta (h - z)))`, with plus for desirable responses.

    Here :math:`h = \log(\pi/\pi_{\mathrm{ref}})`.

    Parameters
    ----------
    log_probs
        Log-probability of every response under the policy that is trained.
    reference_log_probs
        The same under the reference policy; no gradient goes through it.
    desirable
        True for a desirable response.
    reference_point
        :math:`z`, at least 0; a constant.
    beta
        Strength of the leash to the reference policy.
    desirable_weight, undesirable_weight
        :math:`\lambda_D` and :math:`\lambda_U`; to be balanced against the numbers of each kind.

    Returns
    -------
    Tensor
        Mean over the responses.

    Shapes
    ------
    log_probs, reference_log_probs, desirable (N,), reference_point () -> ().

    Raises
    ------
    ValueError
        If the lengths differ, ``desirable`` is not boolean, the reference point is negative, not finite or carries
        a gradient, or a strength is not positive.

    Notes
    -----
    The reference point is a function of the policy through which no gradient goes: for this reason the gradient is
    not that of any fixed objective (``prop-algorithms``).

    References
    ----------
    Claim ``prop-algorithms``; Ethayarajh et al. (2024), equation 7.
    """
    check_responses("log_probs", log_probs)
    check_responses("reference_log_probs", reference_log_probs, log_probs)
    if desirable.shape != log_probs.shape or desirable.dtype != torch.bool:
        raise ValueError(
            f"desirable must be boolean, one a response, (N,) = {tuple(log_probs.shape)}; got {desirable.dtype} "
            f"of shape {tuple(desirable.shape)}"
        )
    for name, value in (
        ("beta", beta),
        ("desirable_weight", desirable_weight),
        ("undesirable_weight", undesirable_weight),
    ):
        check_positive(name, value)
    point = torch.as_tensor(reference_point, dtype=log_probs.dtype)
    if point.requires_grad or point.ndim != 0 or not 0 <= float(point) < torch.inf:
        raise ValueError("the reference point must be one finite number, 0 or more, without a gradient")
    distance = beta * (log_probs - reference_log_probs.detach() - point)
    losses = torch.where(
        desirable, desirable_weight * torch.sigmoid(-distance), undesirable_weight * torch.sigmoid(distance)
    )
    return losses.mean()


def kto_reference_point(mismatched_log_probs: Tensor, mismatched_reference_log_probs: Tensor) -> Tensor:
    r"""Reference point :math:`z = \max(0, \text{mean of } \log(\pi/\pi_{\mathrm{ref}}))` over mismatched responses.

    Parameters
    ----------
    mismatched_log_probs
        Log-probability, under the policy, of responses that belong to other prompts.
    mismatched_reference_log_probs
        The same under the reference policy.

    Returns
    -------
    Tensor
        A scalar, detached.

    Shapes
    ------
    Both (N,) -> ().

    Raises
    ------
    ValueError
        If the lengths differ or a log-probability is positive or not finite.

    Notes
    -----
    Stands for KL(π‖π_ref), but the responses are not drawn from π given the prompt: it is biased, and the paper
    says so.

    References
    ----------
    Ethayarajh et al. (2024), where it is called an estimate for practice.
    """
    check_responses("mismatched_log_probs", mismatched_log_probs)
    check_responses("mismatched_reference_log_probs", mismatched_reference_log_probs, mismatched_log_probs)
    return (mismatched_log_probs - mismatched_reference_log_probs).detach().mean().clamp_min(0)
