r"""The same model in other coordinates: every parameter times a number of its own, so that ceilings spread as wanted.

With :math:`\theta_i = a_i \phi_i` the policy is the same function, the score of :math:`\phi_i` is :math:`a_i` times
that of :math:`\theta_i`, and so is the ceiling. Which coordinates a model is trained in decides how heavy the tail of
its ceilings is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ceilings.update_rules import Stepper, flat_parameters, load_flat

__all__ = ["RescaledSteps", "power_scales"]


def power_scales(ceilings: Tensor, power: float) -> Tensor:
    r"""Factors that raise every ceiling to a power, up to one common factor and rounding to powers of two.

    Parameters
    ----------
    ceilings
        Ceilings in the model's own coordinates; positive.
    power
        1 leaves everything as it is; 0 makes all ceilings equal up to the rounding; above 1 the tail is heavier.

    Returns
    -------
    Tensor
        :math:`a_i = 2^{\mathrm{round}((k - 1) \log_2 (c_i / \tilde c))}` for the power k and the median ceiling.

    Shapes
    ------
    ceilings (D,) -> (D,).

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If a ceiling is not positive and finite.

    Notes
    -----
    Powers of two, so that a weight divided by its factor lies on the grid of a number format if the weight does.
    """
    if not bool(((ceilings > 0) & ceilings.isfinite()).all()):
        raise ValueError("a ceiling is zero or not finite: no factor raises it to a power, leave it out")
    return torch.exp2(((power - 1) * (ceilings / ceilings.median()).log2()).round())


class RescaledSteps:
    r"""An optimiser that works in coordinates of its own while the model computes in the old ones.

    Parameters
    ----------
    model
        The model whose gradients are taken; its parameters are :math:`\theta = a \phi`.
    scales
        The factors a, flat, in the order of the parameters.
    build
        From a model whose parameters are φ to its optimiser.

    Raises
    ------
    ValueError
        If the factors are not one positive number a parameter.
    """

    def __init__(self, model: nn.Module, scales: Tensor, build: Callable[[nn.Module], Stepper]) -> None:
        weights = flat_parameters(model)
        if scales.shape != weights.shape or not bool((scales > 0).all()):
            raise ValueError(
                f"{len(scales)} factors for {len(weights)} parameters: give one positive number each"
            )
        self.model, self.scales = model, scales
        #: The same model in the new coordinates.
        self.inner = copy.deepcopy(model)
        load_flat(self.inner, weights / scales)
        self.stepper = build(self.inner)
        load_flat(model, scales * flat_parameters(self.inner))

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad()
        self.stepper.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """One step in the new coordinates, by the chain rule."""
        sizes = [p.numel() for p in self.model.parameters()]
        for old, new, scale in zip(
            self.model.parameters(), self.inner.parameters(), self.scales.split(sizes), strict=True
        ):
            new.grad = None if old.grad is None else scale.view_as(old) * old.grad
        self.stepper.step()
        load_flat(self.model, self.scales * flat_parameters(self.inner))
