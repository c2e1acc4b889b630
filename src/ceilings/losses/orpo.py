r"""ORPO: likelihood of the better response, plus a logistic term on the odds of the two.

Departures from the paper:

1. The likelihood term is the paper's mean over the tokens of each response, then over pairs. TRL takes one mean over
   all tokens of the batch, those of the prompts included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ceilings.losses.sequences import check_lengths, check_positive, check_responses

__all__ = ["log_odds", "odds_ratio_loss", "orpo_loss"]


def orpo_loss(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    odds_weight: float = 0.1,
) -> Tensor:
    r"""Likelihood and odds together, :math:`-\bar\ell^+ - \lambda \log \sigma(o^+ - o^-)`.

    Here :math:`\bar\ell = \log\pi(y)/|y|` and o is its log-odds (`log_odds`).

    Parameters
    ----------
    chosen_log_probs, rejected_log_probs
        Log-probability of the better and of the worse response of each pair: sums over tokens.
    chosen_lengths, rejected_lengths
        Tokens of each response.
    odds_weight
        :math:`\lambda` (TRL: ``beta``).

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
        If the lengths differ, a response is empty, a log-probability is positive or not finite, a response has
        probability 1 (infinite odds), or ``odds_weight`` is not positive.

    References
    ----------
    Claim ``prop-algorithms``; Hong, Lee and Thorne (2024), equations 6 and 7.
    """
    odds = odds_ratio_loss(chosen_log_probs, rejected_log_probs, chosen_lengths, rejected_lengths)
    check_positive("odds_weight", odds_weight)
    return -(chosen_log_probs / chosen_lengths).mean() + odds_weight * odds


def odds_ratio_loss(
    chosen_log_probs: Tensor, rejected_log_probs: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor
) -> Tensor:
    r"""Logistic term of ORPO alone, :math:`-\log \sigma(o^+ - o^-)`.

    Parameters
    ----------
    chosen_log_probs, rejected_log_probs, chosen_lengths, rejected_lengths
        As in `orpo_loss`.

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
        As in `orpo_loss`.

    References
    ----------
    Hong, Lee and Thorne (2024), equation 7.
    """
    check_responses("chosen_log_probs", chosen_log_probs)
    check_responses("rejected_log_probs", rejected_log_probs, chosen_log_probs)
    check_lengths("chosen_lengths", chosen_lengths, chosen_log_probs)
    check_lengths("rejected_lengths", rejected_lengths, chosen_log_probs)
    chosen = log_odds(chosen_log_probs / chosen_lengths)
    return -logsigmoid(chosen - log_odds(rejected_log_probs / rejected_lengths)).mean()


def log_odds(mean_log_probs: Tensor) -> Tensor:
    r"""Log-odds :math:`o = \bar\ell - \log(1 - e^{\bar\ell})` of a length-averaged log-probability.

    Parameters
    ----------
    mean_log_probs
        Log-probability of each response divided by its length, below 0.

    Returns
    -------
    Tensor
        The log-odds.

    Shapes
    ------
    (N,) -> (N,).

    Raises
    ------
    ValueError
        If a mean log-probability is not below 0, where the odds are infinite.
    """
    if not bool((mean_log_probs < 0).all()):
        row = int((~(mean_log_probs < 0)).nonzero()[0])
        raise ValueError(f"response {row} has probability 1, to rounding: its odds are infinite")
    # expm1 keeps what is left of 1 - p where p is close to 1.
    return mean_log_probs - torch.log(-torch.expm1(mean_log_probs))
