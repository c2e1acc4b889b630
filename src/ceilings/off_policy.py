r"""Two laws at once: responses drawn from μ, or given by q, judged under the policy π.

All of it is for laws that are listed in full, such as `ceilings.policies.Enumeration` holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.policies import check_probs

__all__ = ["chi_square_divergence", "importance_weights", "kl_divergence"]


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
