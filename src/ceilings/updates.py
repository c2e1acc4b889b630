r"""What a fine-tune did to the weights: is the change small, sparse, low-rank?

Three claims, three measures. *Small* is a norm, *sparse* counts entries in a named number format, *low-rank*
looks at singular values of one matrix. No one of them implies another (claim ``prop-not-sparse``).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["energy_share", "relative_size", "singular_energy_share", "stable_rank", "update_sparsity"]


def _check_pair(base: Tensor, tuned: Tensor) -> None:
    if base.shape != tuned.shape:
        raise ValueError(
            f"base has shape {tuple(base.shape)} and tuned {tuple(tuned.shape)}: nothing to compare"
        )
    if base.numel() == 0:
        raise ValueError("base and tuned are empty")
    if not (base.is_floating_point() and tuned.is_floating_point()):
        raise ValueError(f"base is {base.dtype} and tuned {tuned.dtype}: weights must be floating point")
    for name, weights in (("base", base), ("tuned", tuned)):
        if not bool(torch.isfinite(weights).all()):
            raise ValueError(f"{name} has an entry that is NaN or infinite")


def relative_size(base: Tensor, tuned: Tensor) -> float:
    r"""Size of the change relative to the weights, :math:`\|\theta' - \theta\| / \|\theta\|`.

    Parameters
    ----------
    base, tuned
        Weights before and after.

    Returns
    -------
    float
        0 means that nothing moved, 1 that the change is as long as the weights.

    Shapes
    ------
    base and tuned of one shape.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the shapes differ, a weight is not finite, or ``base`` is zero.
    """
    _check_pair(base, tuned)
    norm = float(base.double().norm())
    if norm == 0:
        raise ValueError("base is all zeros: a relative size has no meaning")
    return float((tuned.double() - base.double()).norm()) / norm


def update_sparsity(base: Tensor, tuned: Tensor, dtype: torch.dtype) -> float:
    """Share of the weights whose value in ``dtype`` did not change.

    Parameters
    ----------
    base, tuned
        Weights before and after; both are rounded to ``dtype`` alike.
    dtype
        The number format that the statement is about: a change may be dense in float32 and sparse in bfloat16.

    Returns
    -------
    float
        1 means that no stored value moved, 0 that every one did. −0 and +0 count as equal.

    Shapes
    ------
    base and tuned of one shape.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the shapes differ or a weight is not finite.
    """
    _check_pair(base, tuned)
    return float((base.to(dtype) == tuned.to(dtype)).double().mean())


def stable_rank(matrix: Tensor) -> float:
    r"""Squared Frobenius norm over squared spectral norm: how many directions share the energy.

    Parameters
    ----------
    matrix
        The change of one weight matrix.

    Returns
    -------
    float
        Between 1 (one direction) and the rank; changes little under rounding noise, unlike the rank itself.

    Shapes
    ------
    matrix (O, I).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If it is not a matrix or is zero.
    """
    values = _singular_values(matrix)
    return float((values / values[0]).square().sum())


def singular_energy_share(matrix: Tensor, k: int) -> float:
    r"""Share of the squared Frobenius norm in the k largest singular values.

    Parameters
    ----------
    matrix
        The change of one weight matrix.
    k
        Number of singular values.

    Returns
    -------
    float
        1 means that rank k holds all of the change.

    Shapes
    ------
    matrix (O, I).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If it is not a matrix, is zero, or ``k`` is not positive.
    """
    if k < 1:
        raise ValueError(f"k is {k}: count at least one singular value")
    energy = _singular_values(matrix).square()
    return float(energy[:k].sum() / energy.sum())


def _singular_values(matrix: Tensor) -> Tensor:
    if matrix.ndim != 2:
        raise ValueError(f"rank is a property of a matrix (O, I), got shape {tuple(matrix.shape)}")
    values = torch.linalg.svdvals(matrix.double())
    if len(values) == 0 or float(values[0]) == 0:
        raise ValueError("the matrix is empty or all zeros: it has no rank to speak of")
    return values


def energy_share(task_vector: Tensor, share: float) -> float:
    r"""Share of the squared norm in the largest coordinates.

    Parameters
    ----------
    task_vector
        The change of the weights.
    share
        Share of the coordinates to count, in (0, 1]; at least one is counted.

    Returns
    -------
    float
        1 means that these coordinates hold all of the change; ``share`` itself means a flat change.

    Shapes
    ------
    task_vector of any shape.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If ``share`` is outside (0, 1] or the task vector is zero.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}: it must lie in (0, 1]")
    energy = task_vector.double().flatten().square()
    total = float(energy.sum())
    if total == 0:
        raise ValueError("the task vector is zero: nothing moved")
    count = max(1, round(share * len(energy)))
    return float(energy.topk(count).values.sum()) / total
