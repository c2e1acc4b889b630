r"""DPO: logistic regression on the difference of two log-ratios to a reference policy.

Departures from the paper: none. The source of the pairs is the caller's.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from ceilings.losses.sequences import check_positive, check_responses

__all__ = ["dpo_loss"]


def dpo_loss(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    chosen_reference_log_probs: Tensor,
    rejected_reference_log_probs: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    r"""Negative log-likelihood of the preferences, :math:`-\log \sigma(\beta (h^+ - h^-))`.

    With :math:`h = \log(\pi/\pi_{\mathrm{ref}})`.

    Parameters
    ----------
    chosen_log_probs, rejected_log_probs
        Log-probability of the better and of the worse response of each pair, under the policy that is trained.
    chosen_reference_log_probs, rejected_reference_log_probs
        The same under the reference policy; no gradient goes through them.
    beta
        Strength of the leash to the reference policy.

    Returns
    -------
    Tensor
        Mean over the pairs.

    Shapes
    ------
    All (N,) -> ().

    Raises
    ------
    ValueError
        If the lengths differ, a log-probability is positive or not finite, or ``beta`` is not positive.

    Notes
    -----
    The gradient is :math:`-\beta E[\sigma(-\beta(h^+ - h^-)) (s^+ - s^-)]`. For pairs of independent samples from the
    policy, none dropped, :math:`|g_i| \le \beta \sqrt{E[w^2]} \sqrt{2 F_{ii}}`; for foreign pairs there is no Fisher
    information in the bound.

    References
    ----------
    Claim ``prop-algorithms``; Rafailov et al. (2023), equation 7.
    """
    check_responses("chosen_log_probs", chosen_log_probs)
    for name, value in (
        ("rejected_log_probs", rejected_log_probs),
        ("chosen_reference_log_probs", chosen_reference_log_probs),
        ("rejected_reference_log_probs", rejected_reference_log_probs),
    ):
        check_responses(name, value, chosen_log_probs)
    check_positive("beta", beta)
    chosen = chosen_log_probs - chosen_reference_log_probs.detach()
    rejected = rejected_log_probs - rejected_reference_log_probs.detach()
    return -logsigmoid(beta * (chosen - rejected)).mean()
