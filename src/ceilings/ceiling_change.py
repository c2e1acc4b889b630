r"""Why a ceiling moved: because the rewards spread less, or because the Fisher information fell.

The logarithm of a ceiling is a sum, :math:`\log c_i = \log \sigma(R) + \tfrac12 \log F_{ii}`, so its change between
two policies has two parts and nothing is left over. The first part is one number for all parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CeilingChange", "ceiling_change", "jackknife"]


@dataclass(frozen=True, eq=False)
class CeilingChange:
    r"""Change of the logarithm of every ceiling, in its two parts.

    Parameters
    ----------
    reward
        :math:`\Delta \log \sigma(R)`.
    fisher
        :math:`\Delta \tfrac12 \log F_{ii}`.

    Shapes
    ------
    reward (), fisher (D,).

    Units
    -----
    1.
    """

    reward: Tensor
    fisher: Tensor

    @property
    def total(self) -> Tensor:
        """Change of the logarithm of every ceiling."""
        return self.reward + self.fisher

    @property
    def share(self) -> Tensor:
        """Share that the reward's spread has in the mean change; NaN where the mean ceiling did not move."""
        total = self.total.mean()
        return torch.where(total != 0, self.reward / total, torch.nan)

    @property
    def led_by_reward(self) -> Tensor:
        """Share of the parameters for which the reward's part is the lower one, that is, took more away."""
        return (self.reward < self.fisher).to(self.fisher).mean()


def ceiling_change(
    before: tuple[Tensor | float, Tensor], after: tuple[Tensor | float, Tensor]
) -> CeilingChange:
    r"""Split the change of every ceiling between two policies.

    Parameters
    ----------
    before, after
        :math:`\sigma(R)` and the Fisher diagonal under each policy.

    Returns
    -------
    CeilingChange
        Both parts.

    Shapes
    ------
    Diagonals (D,).

    Raises
    ------
    ValueError
        If the diagonals differ in shape, or a deviation or an entry of a diagonal is not positive.

    Notes
    -----
    A ceiling that is zero has no logarithm: leave such parameters out, of both diagonals, beforehand.

    References
    ----------
    Claim ``prop-sharpening``.
    """
    stds = [torch.as_tensor(std, dtype=torch.float64) for std, _ in (before, after)]
    first, second = before[1], after[1]
    if first.shape != second.shape:
        raise ValueError(
            f"diagonals of shapes {tuple(first.shape)} and {tuple(second.shape)}: give one model's"
        )
    if not all(bool((x > 0).all()) for x in (*stds, first, second)):
        raise ValueError("a deviation or an entry of a diagonal is not positive: leave such parameters out")
    return CeilingChange(stds[1].log() - stds[0].log(), (second.double().log() - first.double().log()) / 2)


def jackknife(whole: Tensor | float, halves: tuple[Tensor | float, Tensor | float]) -> Tensor:
    r"""Take off the bias of order 1/N that a function of sample means has.

    Parameters
    ----------
    whole
        The statistic of all N responses, such as a mean of :math:`\log \hat F_{ii}`.
    halves
        The same statistic of two halves that together are all responses.

    Returns
    -------
    Tensor
        Twice the whole less the mean of the halves.

    Shapes
    ------
    All alike.

    Notes
    -----
    With a bias of b/N the whole shows b/N and each half 2b/N. What is left has the order 1/N².
    """
    first, second = (torch.as_tensor(half, dtype=torch.float64) for half in halves)
    return 2 * torch.as_tensor(whole, dtype=torch.float64) - (first + second) / 2
