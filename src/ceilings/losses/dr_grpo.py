r"""Dr. GRPO: GRPO without its two divisions, by the standard deviation and by the response's own length.

Departures from the paper: the leash is left out, as in the paper's own runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ceilings.advantages import advantages
from ceilings.losses.ppo import clipped_surrogate
from ceilings.losses.sequences import masked_mean

__all__ = ["dr_grpo_loss"]


def dr_grpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    rewards: Tensor,
    groups: Sequence[int] | Tensor,
    *,
    max_length: int,
    behaviour_log_probs: Tensor | None = None,
    epsilon: float = 0.2,
) -> Tensor:
    r"""Clipped surrogate with centred rewards, divided by one constant length.

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
    max_length
        The constant L, the longest response that is allowed; it only scales the loss.
    behaviour_log_probs
        The same log-probabilities under the policy that sampled; None means the present one, ratio 1.
    epsilon
        Half-width of the clip.

    Returns
    -------
    Tensor
        :math:`-\frac{1}{N L} \sum_{n,t} \min(r A_n, \operatorname{clip}(r) A_n)`, with
        :math:`A_n = R_n - \bar R`.

    Shapes
    ------
    log_probs, mask, behaviour_log_probs (N, T), rewards (N,), groups (N,) -> ().

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ, a response is empty or longer than ``max_length``, or alone in its group.

    Notes
    -----
    On-policy it is REINFORCE with the mean of the group as baseline, over L: in expectation (G − 1)/(G L) times
    the policy gradient.

    References
    ----------
    Claim ``prop-algorithms``; Liu et al. (2025).
    """
    centred = advantages(rewards, groups)
    token_losses = clipped_surrogate(log_probs, mask, centred, behaviour_log_probs, epsilon=epsilon)
    longest = int(mask.sum(1).max())
    if max_length < longest:
        raise ValueError(f"max_length is {max_length} but a response has {longest} tokens")
    return masked_mean(token_losses, mask, "responses") / max_length
