r"""How much the largest of :math:`c_i |x_i|` and the largest of :math:`c_i` share where x knows nothing of c.

The ceilings c are given, as a list or as the quantiles of a law; x is noise of one law, independent of them. Then the
share is a number that the tail of c decides, and a reported overlap can be turned into the tail that would give it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "half_normal_survival",
    "lognormal_scales",
    "pareto_limit",
    "pareto_scales",
    "product_overlap",
    "spread_for_overlap",
]

#: From levels to the probability that ``|x|`` exceeds them.
Survival = Callable[[Tensor], Tensor]


def half_normal_survival(levels: Tensor) -> Tensor:
    """Probability that the size of a standard normal number exceeds a level.

    Parameters
    ----------
    levels
        Non-negative.

    Returns
    -------
    Tensor
        1 at zero.

    Shapes
    ------
    Any shape -> the same.
    """
    return torch.erfc(levels / math.sqrt(2))


def lognormal_scales(spread: float, count: int = 100_000) -> Tensor:
    r"""Quantiles of :math:`e^{\tau Z}`, Z standard normal, in the middle of equal shares.

    Parameters
    ----------
    spread
        τ, the standard deviation of the natural logarithm.
    count
        Number of shares.

    Returns
    -------
    Tensor
        Ascending.

    Shapes
    ------
    -> (count,).
    """
    return (spread * torch.special.ndtri(_middles(count))).exp()


def pareto_scales(spread: float, count: int = 100_000) -> Tensor:
    r"""Quantiles of :math:`e^{\tau E}`, E standard exponential: a Pareto law of index :math:`1/\tau`.

    Parameters
    ----------
    spread
        τ, the standard deviation of the natural logarithm.
    count
        Number of shares.

    Returns
    -------
    Tensor
        Ascending.

    Shapes
    ------
    -> (count,).
    """
    return (-spread * torch.log1p(-_middles(count))).exp()


def product_overlap(scales: Tensor, survival: Survival = half_normal_survival, share: float = 0.01) -> float:
    r"""Expected share of the top of :math:`c_i |x_i|` that lies in the top of :math:`c_i`, among many parameters.

    Parameters
    ----------
    scales
        The :math:`c_i`, positive.
    survival
        Probability that :math:`|x_i|` exceeds a level; continuous, one law for all.
    share
        Size of both sets as a share of all entries.

    Returns
    -------
    float
        :math:`\frac1{\alpha D} \sum_{i \in S} P(|x_i| > t/c_i)` with S the top set of c and t such that the sum over
        *all* i is :math:`\alpha D`. The set of the products is cut at this t rather than at its own order statistic,
        which is the same among many parameters.

    Shapes
    ------
    scales (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If a scale is not positive and finite, the share is outside (0, 1], or ``|x|`` is zero too often for a set of
        this size.

    References
    ----------
    Claim ``prop-top-overlap``.
    """
    if not bool(((scales > 0) & scales.isfinite()).all()) or not 0 < share <= 1:
        raise ValueError(f"a scale is not positive and finite, or share {share} is outside (0, 1]")
    size = max(1, round(share * len(scales)))
    logs = scales.double().log()

    def expected(level: float) -> Tensor:
        return survival((level - logs).exp())

    low, high = float(logs.min()) - 60, float(logs.max()) + 60
    if not float(expected(low).sum()) >= size:
        raise ValueError("|x| is zero too often: fewer products than the set has room for are not zero")
    while high - low > 1e-12 * max(1.0, abs(low), abs(high)):
        middle = (low + high) / 2
        low, high = (middle, high) if float(expected(middle).sum()) > size else (low, middle)
    return float(expected(high)[logs.topk(size).indices].sum()) / size


def spread_for_overlap(
    wanted: float,
    scales: Callable[[float], Tensor] = lognormal_scales,
    survival: Survival = half_normal_survival,
    share: float = 0.01,
) -> float:
    r"""Spread of the ceilings at which noise alone gives a wanted overlap.

    Parameters
    ----------
    wanted
        The overlap.
    scales
        From the spread to the ceilings: powers of one law.
    survival, share
        As in `product_overlap`.

    Returns
    -------
    float
        τ in (0, 20). The overlap rises with it, so that there is one.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If no such spread gives it.

    References
    ----------
    Claim ``prop-top-overlap``, part 2.
    """
    low, high = 1e-6, 20.0
    if (
        not product_overlap(scales(low), survival, share)
        <= wanted
        <= product_overlap(scales(high), survival, share)
    ):
        raise ValueError(f"no spread between {low} and {high} gives an overlap of {wanted}")
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if product_overlap(scales(middle), survival, share) < wanted else (low, middle)
        )
    return (low + high) / 2


def pareto_limit(index: float) -> float:
    r"""Overlap for ceilings with a Pareto tail and Gaussian noise, in the limit of a small share.

    Parameters
    ----------
    index
        a, where :math:`P(c > u) = u^{-a}` for large u.

    Returns
    -------
    float
        :math:`E \min(1, |x|^a / E|x|^a)`.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the index is not positive.

    Notes
    -----
    With :math:`b^a = E|x|^a = 2^{a/2} \Gamma(\tfrac{a+1}{2})/\sqrt\pi` it is
    :math:`P(|x| > b) + P(\chi^2_{a+1} \le b^2)`: the second law is that of the square of x tilted by
    :math:`|x|^a`.

    References
    ----------
    Claim ``prop-top-overlap``, part 4.
    """
    if not index > 0:
        raise ValueError(f"index {index}: a Pareto tail has a positive one")
    log_moment = index / 2 * math.log(2) + math.lgamma((index + 1) / 2) - math.lgamma(0.5)
    level = math.exp(log_moment / index)
    inside = torch.special.gammainc(
        torch.tensor((index + 1) / 2, dtype=torch.float64), torch.tensor(level**2 / 2, dtype=torch.float64)
    )
    return math.erfc(level / math.sqrt(2)) + float(inside)


def _middles(count: int) -> Tensor:
    """Middles of equal shares of [0, 1]."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count
