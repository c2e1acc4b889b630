"""Training some of the weights only: masks of one density, and an optimiser that sees no other gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ceilings.update_rules import Stepper

__all__ = ["MaskedStepper", "densest"]


class MaskedStepper:
    """An optimiser that is shown the gradient of some weights, and zero for the others.

    Parameters
    ----------
    stepper
        An optimiser of torch, or `ceilings.storage.StoredWeights`.
    model
        Its model.
    mask
        True = is trained.

    Raises
    ------
    ValueError
        If the mask has another number of entries than the model has parameters.

    Notes
    -----
    The gradient is multiplied by the mask before every step, as in Section 4 of the source. A rule whose step is not
    zero where all gradients were zero, such as weight decay, moves the other weights all the same.

    Shapes
    ------
    mask (D,).

    References
    ----------
    Mukherjee et al. (2025), Section 4.
    """

    def __init__(self, stepper: Stepper, model: nn.Module, mask: Tensor) -> None:
        self.stepper, self.parameters = stepper, list(model.parameters())
        sizes = [p.numel() for p in self.parameters]
        if mask.shape != (sum(sizes),):
            raise ValueError(
                f"the mask has shape {tuple(mask.shape)} and the model {sum(sizes)} parameters: give one entry for each"
            )
        self.masks = [
            part.view_as(p) for part, p in zip(mask.bool().split(sizes), self.parameters, strict=True)
        ]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.stepper.zero_grad()

    def step(self) -> Any:
        """Hide the other gradients, then step."""
        for parameter, mask in zip(self.parameters, self.masks, strict=True):
            if parameter.grad is not None:
                parameter.grad.mul_(mask)
        return self.stepper.step()


def densest(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Mask of the largest values; ties at the cut are drawn.

    Parameters
    ----------
    values
        One number for each weight.
    count
        Members of the mask.
    generator
        Source of randomness, for ties alone.

    Returns
    -------
    Tensor
        True = member; exactly ``count`` of them.

    Shapes
    ------
    values (D,) -> (D,).

    Raises
    ------
    ValueError
        If there are fewer values, or one is NaN.
    """
    if not 0 <= count <= len(values):
        raise ValueError(f"a mask of {count} of {len(values)} weights cannot be made: ask for fewer")
    if bool(values.isnan().any()):
        raise ValueError("a value is NaN and has no place in the order: replace it first")
    shuffled = torch.randperm(len(values), generator=generator)
    members = shuffled[values[shuffled].argsort(descending=True, stable=True)[:count]]
    mask = torch.zeros(len(values), dtype=torch.bool)
    mask[members] = True
    return mask
