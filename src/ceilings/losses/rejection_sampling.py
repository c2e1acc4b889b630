r"""Rejection-sampling fine-tuning: the likelihood of the policy's own accepted responses.

Departures from the papers:

1. Repeated and rare responses are kept as they were drawn; Yuan et al. keep distinct ones.
2. Accepted responses count alike over the whole batch, so prompts that are solved more often weigh more. Dong et al.
   keep the best response of every prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.losses.sequences import Average, check_tokens
from ceilings.losses.supervised import supervised_loss

__all__ = ["rejection_sampling_loss"]


def rejection_sampling_loss(
    log_probs: Tensor, mask: Tensor, accepted: Tensor, *, average: Average = "responses"
) -> Tensor:
    r"""Negative log-likelihood of the accepted responses.

    Parameters
    ----------
    log_probs
        Log-probability of every chosen token under the policy that is trained.
    mask
        True at the tokens of the response.
    accepted
        True for a response that is kept.
    average
        As in `ceilings.losses.supervised.supervised_loss`.

    Returns
    -------
    Tensor
        Mean over the accepted responses.

    Shapes
    ------
    log_probs (N, T), mask (N, T), accepted (N,) -> ().

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, ``accepted`` is not boolean, or nothing was accepted.

    Notes
    -----
    For one prompt and success rate p minus the expected gradient is :math:`\operatorname{Cov}_\pi(R, s)/p`: the
    policy gradient over p, with the same tightness and the ceiling :math:`\sqrt{(1-p)/p}\,\sqrt{F_{ii}}`.

    References
    ----------
    Claim ``thm-supervised``; Yuan et al. (2023); Dong et al. (2023).
    """
    check_tokens(log_probs, mask)
    if accepted.shape != mask.shape[:1] or accepted.dtype != torch.bool:
        raise ValueError(
            f"accepted must be boolean, one a response, (N,) = {tuple(mask.shape[:1])}; got {accepted.dtype} "
            f"of shape {tuple(accepted.shape)}"
        )
    if not bool(accepted.any()):
        raise ValueError("no response was accepted: there is nothing to learn from, so draw more of them")
    return supervised_loss(log_probs[accepted], mask[accepted], average=average)
