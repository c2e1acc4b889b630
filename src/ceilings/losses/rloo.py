r"""RLOO: REINFORCE whose baseline is the mean reward of the other responses to the prompt.

Departures from the paper:

1. The leash to a reference policy is part of the reward there; here it is folded in by
   `ceilings.advantages.penalised_rewards` before the loss is called.
2. TRL's version is a clipped ratio of whole responses. At ratio 1 it has this gradient and another value.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ceilings.advantages import advantages
from ceilings.losses.reinforce import reinforce_loss

__all__ = ["rloo_loss"]


def rloo_loss(log_probs: Tensor, mask: Tensor, rewards: Tensor, groups: Sequence[int] | Tensor) -> Tensor:
    r"""REINFORCE with the leave-one-out baseline, :math:`A_n = R_n - \frac{1}{G-1}\sum_{m \ne n} R_m`.

    Parameters
    ----------
    log_probs
        Log-probability of every chosen token under the policy that is trained.
    mask
        True at the tokens of the response.
    rewards
        Reward of every response.
    groups
        Responses with the same number answer the same prompt.

    Returns
    -------
    Tensor
        :math:`-\frac1N \sum_n A_n \log \pi_\theta(y_n)`.

    Shapes
    ------
    log_probs (N, T), mask (N, T), rewards (N,), groups (N,) -> ().

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty or alone in its group, or a reward is not finite.

    Notes
    -----
    Unbiased: E of minus the gradient is Cov(R, s) for every G, while the plain mean of the group gives
    (G − 1)/G of it.

    References
    ----------
    Claim ``prop-algorithms``; Ahmadian et al. (2024); Kool, van Hoof and Welling (2019).
    """
    return reinforce_loss(log_probs, mask, advantages(rewards, groups, baseline="leave_one_out"))
