r"""SimPO: logistic regression on the difference of two length-averaged log-probabilities, without a reference.

Departures from the paper: none.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from ceilings.losses.sequences import check_lengths, check_positive, check_responses

__all__ = ["simpo_loss"]


def simpo_loss(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
) -> Tensor:
    r"""Negative log-likelihood :math:`-\log \sigma(\beta(\bar\ell^+ - \bar\ell^-) - \gamma)`.

    Here :math:`\bar\ell = \log\pi(y)/|y|`.

    Parameters
    ----------
    chosen_log_probs, rejected_log_probs
        Log-probability of the better and of the worse response of each pair: sums over tokens.
    chosen_lengths, rejected_lengths
        Tokens of each response.
    beta
        Scale of the mean log-probabilities.
    margin
        :math:`\gamma`, the margin that is asked for (TRL: ``simpo_gamma``).

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
        If the lengths differ, a response is empty, a log-probability is positive or not finite, or ``beta`` is not
        positive.

    Notes
    -----
    Its direction is :math:`s^+/|y^+| - s^-/|y^-|`, whose mean under the policy is not zero: with responses of
    unequal length even random preferences push somewhere.

    References
    ----------
    Claim ``prop-algorithms``; Meng, Xia and Chen (2024), equation 6.
    """
    check_responses("chosen_log_probs", chosen_log_probs)
    check_responses("rejected_log_probs", rejected_log_probs, chosen_log_probs)
    check_lengths("chosen_lengths", chosen_lengths, chosen_log_probs)
    check_lengths("rejected_lengths", rejected_lengths, chosen_log_probs)
    check_positive("beta", beta)
    difference = chosen_log_probs / chosen_lengths - rejected_log_probs / rejected_lengths
    return -logsigmoid(beta * difference - margin).mean()
