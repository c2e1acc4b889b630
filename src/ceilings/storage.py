r"""Weights in a number format: which steps it can show, how it rounds, and an optimiser whose weights live in it.

A format is a grid. Values here are float64 numbers that lie on the grid of a narrower format, so that what is lost
is lost to that format alone: a sum is formed exactly enough in float64 and rounded *once*. Casting float64 to
bfloat16 in one call of torch rounds twice, through float32, and so may miss a tie.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from torch import Tensor

__all__ = [
    "STORAGES",
    "Storage",
    "StoredWeights",
    "half_gap",
    "rounds_to_change",
    "spacing",
    "stochastically_stored",
    "stored",
    "stored_dtype",
]

Storage = Literal["fp32", "bf16", "fp16", "master", "stochastic"]
#: Ways to keep weights: ``master`` is an fp32 master with a bf16 copy that computes, ``stochastic`` rounds at random.
STORAGES: Final[tuple[Storage, ...]] = ("fp32", "bf16", "fp16", "master", "stochastic")
_DTYPES: Final = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "master": torch.bfloat16,
    "stochastic": torch.bfloat16,
}


def stored_dtype(storage: Storage) -> torch.dtype:
    """Number format in which a storage hands out its weights.

    Parameters
    ----------
    storage
        One of `STORAGES`.

    Returns
    -------
    torch.dtype
        That of the copy that computes.

    Raises
    ------
    ValueError
        If there is no such storage.
    """
    if storage not in _DTYPES:
        raise ValueError(f"there is no storage {storage!r}: use one of {', '.join(STORAGES)}")
    return _DTYPES[storage]


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Distance between neighbours of the format, away from zero: one unit in the last place.

    Parameters
    ----------
    values
        Where; float64.
    dtype
        The format: float16, bfloat16 or float32.

    Returns
    -------
    Tensor
        :math:`2^{\max(\lfloor\log_2|w|\rfloor,\, e_{\min}) - p}` with p bits after the leading one.

    Shapes
    ------
    values of any shape -> the same.

    Units
    -----
    [θ].

    Raises
    ------
    ValueError
        If the values are not float64 and finite, or the format is none of these.
    """
    bits, least = _format(dtype)
    if values.dtype != torch.float64 or not bool(values.isfinite().all()):
        raise ValueError(f"weights are {values.dtype} or not finite: pass finite numbers in float64")
    exponent = torch.where(values == 0, least, torch.frexp(values).exponent - 1)
    return _power_of_two(exponent.clamp_min(least) - bits)


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest number of the format, ties to the even one.

    Parameters
    ----------
    values
        What to store; float64.
    dtype
        The format.

    Returns
    -------
    Tensor
        float64, on the grid of the format; infinite beyond its largest number.

    Shapes
    ------
    values of any shape -> the same.

    Raises
    ------
    ValueError
        If the values are not float64 and finite, or the format is not known.

    Notes
    -----
    One rounding. ``values.to(torch.bfloat16)`` makes two.
    """
    gap = spacing(values, dtype)
    nearest = (values / gap).round() * gap  # a power of two divides exactly, and `round` takes ties to even
    return torch.where(nearest.abs() > torch.finfo(dtype).max, nearest.sign() * math.inf, nearest)


def stochastically_stored(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    r"""One of the two neighbours of the format, at random, so that the mean is the value itself.

    Parameters
    ----------
    values
        What to store; float64.
    dtype
        The format.
    generator
        Source of randomness; one number an entry is drawn.

    Returns
    -------
    Tensor
        float64, on the grid of the format.

    Shapes
    ------
    values of any shape -> the same.

    Raises
    ------
    ValueError
        If the values are not float64 and finite, or the format is not known.

    Notes
    -----
    A weight on the grid whose step Δ does not reach the neighbour changes with probability :math:`|Δ|/\mathrm{gap}`.
    """
    gap = spacing(values, dtype)
    below = (values / gap).floor()
    draws = torch.rand(values.shape, generator=generator, dtype=torch.float64)
    return (below + (draws < values / gap - below)) * gap


def half_gap(weights: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Half the distance from a stored weight to its neighbour in the direction of a step.

    Parameters
    ----------
    weights
        Stored weights: float64 numbers on the grid of the format.
    steps
        Their steps; only the signs count.
    dtype
        The format.

    Returns
    -------
    Tensor
        Half a unit in the last place; a quarter where the weight is a power of two and the step goes toward zero.

    Shapes
    ------
    weights and steps of one shape -> the same.

    Units
    -----
    [θ].

    Raises
    ------
    ValueError
        If the shapes differ, or a weight is not a number of the format.

    References
    ----------
    Claim ``prop-ulp``.
    """
    if weights.shape != steps.shape:
        raise ValueError(f"{tuple(weights.shape)} weights but {tuple(steps.shape)} steps: give one each")
    gap = spacing(weights, dtype)
    whole = weights / gap
    if not bool((whole == whole.round()).all() and (weights.abs() <= torch.finfo(dtype).max).all()):
        raise ValueError(f"a weight is not a number of {dtype}: store the weights first, then step")
    bits, least = _format(dtype)
    # The last binade above the subnormal numbers is as fine below as above, so it has no narrow side.
    narrow = (whole.abs() == 2**bits) & (gap > math.ldexp(1.0, least - bits)) & (weights * steps < 0)
    return torch.where(narrow, gap / 4, gap / 2)


def rounds_to_change(weights: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a stored weight plus a step, stored again, is another number.

    Parameters
    ----------
    weights
        Stored weights: float64 numbers on the grid of the format.
    steps
        What is added before rounding to nearest, ties to even.
    dtype
        The format.

    Returns
    -------
    Tensor
        True = the stored number changes.

    Shapes
    ------
    weights and steps of one shape -> the same.

    Raises
    ------
    ValueError
        If the shapes differ, or a weight is not a number of the format.

    References
    ----------
    Claim ``prop-ulp``.
    """
    half = half_gap(weights, steps, dtype)
    odd = (weights / spacing(weights, dtype)).abs() % 2 == 1
    return (steps.abs() > half) | ((steps.abs() == half) & odd)


class StoredWeights:
    """An optimiser whose weights live in a number format; gradients and moments stay as they are.

    Parameters
    ----------
    optimiser
        Any optimiser of torch over float64 parameters. Their present values are stored at once.
    storage
        One of `STORAGES`.
    generator
        Source of randomness, for ``stochastic`` alone.

    Raises
    ------
    ValueError
        If a parameter is not float64, the storage is not known, or ``stochastic`` has no generator.

    Notes
    -----
    A departure from how models are trained, on purpose: only the stored weight is rounded. Activations, gradients and
    the optimiser's moments are float64, so a difference between two storages is due to the weights alone.
    """

    def __init__(
        self, optimiser: torch.optim.Optimizer, storage: Storage, generator: torch.Generator | None = None
    ) -> None:
        self.optimiser, self.storage, self.generator = optimiser, storage, generator
        self.dtype = stored_dtype(storage)
        if storage == "stochastic" and generator is None:
            raise ValueError("stochastic rounding draws numbers: pass a generator")
        self.weights = [p for group in optimiser.param_groups for p in group["params"]]
        if any(p.dtype != torch.float64 for p in self.weights):
            raise ValueError("a parameter is not float64: the formats are imitated in float64")
        with torch.no_grad():
            for weight in self.weights:
                weight.copy_(stored(weight, self.dtype))
        #: What the optimiser steps from; for ``master`` finer than what computes.
        self.kept = [weight.detach().clone() for weight in self.weights]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimiser.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """One step of the optimiser from the weights that are kept, then store."""
        for weight, kept in zip(self.weights, self.kept, strict=True):
            weight.copy_(kept)
        self.optimiser.step()
        for weight, kept in zip(self.weights, self.kept, strict=True):
            if self.storage == "stochastic":
                assert self.generator is not None
                kept.copy_(stochastically_stored(weight, self.dtype, self.generator))
            else:
                kept.copy_(stored(weight, torch.float32 if self.storage == "master" else self.dtype))
            weight.copy_(stored(kept, self.dtype))


def _format(dtype: torch.dtype) -> tuple[int, int]:
    """Bits after the leading one, and exponent of the least normal number."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{dtype} is not a format of weights here: use float16, bfloat16 or float32")
    info = torch.finfo(dtype)
    return -round(math.log2(info.eps)), round(math.log2(info.tiny))


def _power_of_two(exponents: Tensor) -> Tensor:
    """Exact powers of two, from their exponents: the bit pattern of a float64."""
    return (exponents.long() + 1023 << 52).view(torch.float64)
