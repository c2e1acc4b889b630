r"""Advantages: what is left of a reward once a baseline is taken off, and how it is scaled.

A baseline that does not depend on the response leaves the expected gradient alone (``thm-covariance``). The mean of
the group contains the response itself, so it shrinks the gradient by (G − 1)/G; the mean of the *others* does not.
A standard deviation is a function of the samples: dividing by it changes the expected gradient (``cor-bounded``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

__all__ = ["Baseline", "Scale", "advantages", "group_sizes", "penalised_rewards", "reward_to_go"]

Baseline = Literal["none", "mean", "leave_one_out"]
Scale = Literal["none", "sample_std", "population_std"]

# A spread this small against the rewards themselves is rounding of equal rewards, not a difference between them.
_EQUAL: Final = 1e-12


def group_sizes(groups: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Place of each response's group among the distinct groups, and their sizes.

    Parameters
    ----------
    groups
        Responses with the same number answer the same prompt.

    Returns
    -------
    tuple
        Index of each response's group, and the number of responses in each group.

    Shapes
    ------
    groups (N,) -> (N,), (number of groups,).

    Raises
    ------
    ValueError
        If ``groups`` is not a vector of whole numbers.
    """
    numbers = torch.as_tensor(groups)
    if numbers.ndim != 1 or numbers.is_floating_point() or len(numbers) == 0:
        raise ValueError(
            f"groups must be a non-empty vector of whole numbers (N,), got {numbers.dtype} "
            f"of shape {tuple(numbers.shape)}"
        )
    index = numbers.unique(return_inverse=True)[1]
    return index, torch.bincount(index)


def advantages(
    rewards: Tensor,
    groups: Sequence[int] | Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "none",
) -> Tensor:
    r"""Rewards minus a baseline of their group, divided by a scale of their group.

    Parameters
    ----------
    rewards
        Reward of every response.
    groups
        Responses with the same number answer the same prompt.
    baseline
        ``"none"``; ``"mean"`` of the group, the response included; ``"leave_one_out"``, the mean of the other
        responses of the group.
    scale
        ``"none"``; ``"sample_std"``, the standard deviation of the group's rewards with G − 1;
        ``"population_std"``, with G.

    Returns
    -------
    Tensor
        :math:`A_n = (R_n - b_n) / \sigma_n`, detached. Exactly 0 for a group of equal rewards under ``"mean"``
        or ``"leave_one_out"``, whatever the scale.

    Shapes
    ------
    rewards (N,), groups (N,) -> (N,).

    Units
    -----
    [R]; 1 once divided by a standard deviation.

    Raises
    ------
    ValueError
        If the lengths differ, a reward is not finite, an option is unknown, a scale is asked for without a
        baseline, or a group of one meets an option that needs two responses.

    Notes
    -----
    1. With G − 1 the realised advantages of a group have mean square (G − 1)/G, with G exactly 1.
    2. Published code adds a small number to the standard deviation. Here nothing is added; a group of equal
       rewards, where the quotient is 0/0, gets the advantage 0.
    3. ``"leave_one_out"`` is ``"mean"`` times G/(G − 1).

    References
    ----------
    Claims ``thm-covariance`` and ``cor-bounded``; Kool, van Hoof and Welling (2019) for leaving one out; Shao et
    al. (2024) for the standard deviation of the group.
    """
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be a floating-point vector (N,), got {rewards.dtype} of shape {tuple(rewards.shape)}"
        )
    index, size = group_sizes(groups)
    if len(index) != len(rewards):
        raise ValueError(f"{len(index)} groups for {len(rewards)} rewards: give one each")
    _check_options(rewards, baseline, scale)
    if (baseline == "leave_one_out" or scale == "sample_std") and bool((size == 1).any()):
        row = int((size[index] == 1).nonzero()[0])
        raise ValueError(
            f"response {row} is the only one of its group: {baseline if scale == 'none' else scale} needs two or "
            "more responses a prompt"
        )
    rewards = rewards.detach()
    centred, spread = _centred(rewards, index, size)
    if baseline == "none":
        return rewards.clone()
    if baseline == "leave_one_out":
        # NOTE a quotient of whole numbers would be float32.
        centred = centred * (size.to(rewards) / (size - 1).to(rewards))[index]
    if scale == "none":
        return centred
    divisor = size - 1 if scale == "sample_std" else size
    std = (spread / divisor.to(rewards)).sqrt()[index]
    return torch.where(std > 0, centred / std.where(std > 0, 1), 0)


def _check_options(rewards: Tensor, baseline: str, scale: str) -> None:
    """Refuse unknown options, infinite rewards, and a scale without a baseline."""
    if baseline not in ("none", "mean", "leave_one_out") or scale not in (
        "none",
        "sample_std",
        "population_std",
    ):
        raise ValueError(
            f"there is no baseline {baseline!r} with scale {scale!r}: use none, mean or leave_one_out, and none, "
            "sample_std or population_std"
        )
    if baseline == "none" and scale != "none":
        raise ValueError("a reward is divided by its standard deviation only after a baseline is taken off")
    if not bool(rewards.isfinite().all()):
        row = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"the reward of response {row} is not finite: every response needs a number")


def _centred(rewards: Tensor, index: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards minus the mean of their group, and each group's sum of squares about it; equal rewards give 0."""

    def total(values: Tensor) -> Tensor:
        return torch.zeros(len(size), dtype=values.dtype, device=values.device).index_add_(0, index, values)

    centred = rewards - (total(rewards) / size)[index]
    # NOTE the mean of three times 0.1 is not 0.1: without this, rounding would be divided by rounding.
    allowed = _EQUAL if rewards.dtype == torch.float64 else 1e-6
    centred = torch.where(centred.abs() <= allowed * rewards.abs(), 0, centred)
    return centred, total(centred.square())


def penalised_rewards(rewards: Tensor, log_ratios: Tensor, *, beta: float) -> Tensor:
    r"""Rewards with a leash to a reference policy folded in.

    Parameters
    ----------
    rewards
        Reward of every response.
    log_ratios
        :math:`\log \pi_\theta(y) - \log \pi_{\mathrm{ref}}(y)` of the whole response.
    beta
        Strength of the leash, 0 or more.

    Returns
    -------
    Tensor
        :math:`R - \beta \log(\pi_\theta / \pi_{\mathrm{ref}})`, detached.

    Shapes
    ------
    rewards (N,), log_ratios (N,) -> (N,).

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ or ``beta`` is negative.

    Notes
    -----
    The penalised reward depends on θ, yet its covariance with the score is the gradient of
    :math:`E[R] - \beta\, \mathrm{KL}(\pi_\theta \| \pi_{\mathrm{ref}})`: what the dependence adds is
    :math:`E_\pi[s] = 0` (``thm-distillation``).

    References
    ----------
    Claim ``thm-distillation``.
    """
    if rewards.shape != log_ratios.shape:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} but log-ratios of shape {tuple(log_ratios.shape)}: one each"
        )
    if beta < 0:
        raise ValueError(f"beta is {beta}: a leash has strength 0 or more")
    return rewards.detach() - beta * log_ratios.detach()


def reward_to_go(token_rewards: Tensor, mask: Tensor, *, discount: float = 1.0) -> Tensor:
    r"""Discounted sum of the rewards from each token to the end of its response.

    Parameters
    ----------
    token_rewards
        Reward of every token.
    mask
        True at the tokens of the response.
    discount
        :math:`\gamma`, in [0, 1].

    Returns
    -------
    Tensor
        :math:`\sum_{u \ge t} \gamma^{u - t} r_u`; 0 where the mask is False.

    Shapes
    ------
    token_rewards (N, T), mask (N, T) -> (N, T).

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the shapes differ or the discount is out of range.

    Notes
    -----
    The discount counts the masked-in tokens: padding between prompt and response does not discount.
    """
    if token_rewards.shape != mask.shape or mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"token_rewards has shape {tuple(token_rewards.shape)} and mask {tuple(mask.shape)} of {mask.dtype}; "
            "expected (N, T) twice, the mask boolean"
        )
    if not 0 <= discount <= 1:
        raise ValueError(f"the discount is {discount}: it must lie in [0, 1]")
    total = torch.zeros_like(token_rewards[:, 0])
    columns = []
    for t in reversed(range(token_rewards.shape[1])):
        total = torch.where(mask[:, t], token_rewards[:, t] + discount * total, total)
        columns.append(torch.where(mask[:, t], total, 0))
    return torch.stack(columns[::-1], dim=1)
