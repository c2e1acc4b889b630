r"""Supervised fine-tuning: the likelihood of given responses.

Departures from common practice: none; both of its averages are here.
"""

from __future__ import annotations

from torch import Tensor

from ceilings.losses.sequences import Average, check_tokens, masked_mean

__all__ = ["supervised_loss"]


def supervised_loss(log_probs: Tensor, mask: Tensor, *, average: Average = "responses") -> Tensor:
    r"""Negative log-likelihood of the responses, :math:`-\frac1N \sum_n \log \pi_\theta(y_n)`.

    Parameters
    ----------
    log_probs
        Log-probability of every token of the data under the policy that is trained.
    mask
        True at the tokens of the response; the prompt is not learnt.
    average
        ``"responses"``: mean over responses of the sum of their tokens, the gradient of which is
        :math:`-E_q[s]`. ``"tokens"``: mean over all tokens of the batch, as trainers do it.

    Returns
    -------
    Tensor
        A scalar.

    Shapes
    ------
    log_probs (N, T), mask (N, T) -> ().

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty, or a log-probability is positive or not finite.

    Notes
    -----
    For data from a law q minus the gradient is :math:`E_q[s] = \operatorname{Cov}_\pi(q/\pi, s)`: the reward is the
    ratio of the two laws, and the price of its ceiling is :math:`\chi^2(q \| \pi)`.

    References
    ----------
    Claim ``thm-supervised``.
    """
    check_tokens(log_probs, mask)
    return -masked_mean(log_probs, mask, average)
