r"""How far a parameter may move for a budget of KL divergence, and the steps that such a leash leaves.

To second order :math:`\mathrm{KL}(\pi_\theta \Vert \pi_{\theta+\Delta}) \approx \tfrac12 \Delta^\top F \Delta`, and to
first order the reward gains :math:`g^\top \Delta`. All that is here is about these two forms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ceilings.policies import check_probs

__all__ = ["QuadraticLeash", "joint_reach", "lone_reach"]


def lone_reach(diagonal_fisher: Tensor, budget: float) -> Tensor:
    r"""How far each parameter can go if it moves alone.

    Parameters
    ----------
    diagonal_fisher
        :math:`F_{ii}`.
    budget
        KL divergence K that may be spent.

    Returns
    -------
    Tensor
        :math:`\sqrt{2K/F_{ii}}`; infinite where :math:`F_{ii} = 0`.

    Shapes
    ------
    diagonal_fisher (D,) -> (D,).

    Units
    -----
    [θ].

    Raises
    ------
    ValueError
        If an entry is negative or the budget not positive.

    References
    ----------
    Claim ``prop-leash``.
    """
    _check_budget(budget)
    if bool((diagonal_fisher < 0).any()):
        raise ValueError("a diagonal entry is negative: Fisher information is a variance")
    return (2 * budget / diagonal_fisher).sqrt()


def joint_reach(fisher: Tensor, budget: float, *, tolerance: float = 1e-10) -> Tensor:
    r"""How far each parameter can go if the others help it.

    Parameters
    ----------
    fisher
        The Fisher matrix.
    budget
        KL divergence K that may be spent.
    tolerance
        Eigenvalues below this share of the largest count as zero, and so does what a unit vector has outside the range,
        in squared length.

    Returns
    -------
    Tensor
        :math:`\sqrt{2K (F^+)_{ii}}`; infinite where the unit vector is not in the range of F.

    Shapes
    ------
    fisher (D, D) -> (D,).

    Units
    -----
    [θ].

    Raises
    ------
    ValueError
        If the matrix is not square and symmetric, or the budget not positive.

    References
    ----------
    Claim ``prop-leash``.
    """
    _check_budget(budget)
    if fisher.ndim != 2 or fisher.shape[0] != fisher.shape[1] or not torch.allclose(fisher, fisher.T):
        raise ValueError(f"a matrix of shape {tuple(fisher.shape)}: give a square, symmetric Fisher matrix")
    values, vectors = torch.linalg.eigh(fisher)
    kept = values > tolerance * values[-1]
    squares = vectors[:, kept].square()
    reach = (2 * budget * (squares / values[kept]).sum(1)).sqrt()
    return torch.where(1 - squares.sum(1) > tolerance, math.inf, reach)


class QuadraticLeash:
    r"""Steps of a policy whose reward is taken as linear and whose KL divergence as quadratic.

    Parameters
    ----------
    scores
        Of all responses, those of several prompts one after the other.
    rewards
        Reward of every response, less the mean of its prompt.
    weights
        Probability of every response, times that of its prompt.

    Shapes
    ------
    scores (N, D), rewards (N,), weights (N,).

    Raises
    ------
    ValueError
        If the lengths differ, or the weights are no probabilities.

    Notes
    -----
    With :math:`S` the scores times the roots of the weights, :math:`F = S^\top S` and :math:`g = S^\top a`. Functions
    of F act on g through the N by N matrix :math:`S S^\top`: F itself, D by D, is never formed.

    References
    ----------
    Claims ``prop-leash``, ``prop-stand-in``.
    """

    def __init__(self, scores: Tensor, rewards: Tensor, weights: Tensor) -> None:
        check_probs(weights, "weights")
        if scores.shape[:1] != weights.shape:
            raise ValueError(f"{len(scores)} scores for {len(weights)} weights: give one row each")
        self.root = weights.sqrt()
        self.rows = self.root[:, None] * scores
        values, self.vectors = torch.linalg.eigh(self.rows @ self.rows.T)
        #: Eigenvalues of the Fisher matrix, ascending, as many as responses.
        self.values = values.clamp_min(0.0)
        self.aim(rewards)

    def aim(self, rewards: Tensor) -> None:
        """Take other rewards of the same responses.

        Parameters
        ----------
        rewards
            Reward of every response, less the mean of its prompt.

        Shapes
        ------
        rewards (N,).

        Raises
        ------
        ValueError
            If there is not one for each response.
        """
        if rewards.shape != self.root.shape:
            raise ValueError(f"{tuple(rewards.shape)} rewards for {len(self.root)} responses: give one each")
        self._signal = self.vectors.T @ (self.root * rewards)

    @property
    def gradient(self) -> Tensor:
        """The gradient g."""
        return self._along(torch.ones_like(self.values))

    def flow(self, strength: float, time: float) -> Tensor:
        r"""Where gradient ascent on :math:`g^\top \Delta - \tfrac12 \beta \Delta^\top F \Delta` is after a time.

        Parameters
        ----------
        strength
            β; at 0 there is no leash.
        time
            Rate times steps, in the limit of small rates.

        Returns
        -------
        Tensor
            :math:`\beta^{-1} F^+ (1 - e^{-\beta t F}) g`.

        Shapes
        ------
        -> (D,).

        Units
        -----
        [θ].

        Raises
        ------
        ValueError
            If the strength or the time is negative.
        """
        if strength < 0 or time < 0:
            raise ValueError(f"strength {strength} and time {time}: neither may be negative")
        x = strength * time * self.values
        return self._along(time * torch.where(x > 1e-12, -torch.expm1(-x) / x.clamp_min(1e-300), 1.0))

    def damped(self, share: float) -> Tensor:
        r"""Natural-gradient step :math:`(F + \lambda)^{-1} g`, up to its length.

        Parameters
        ----------
        share
            λ as a share of the largest eigenvalue.

        Returns
        -------
        Tensor
            Toward :math:`F^+ g` as the share falls, toward the gradient as it grows.

        Shapes
        ------
        -> (D,).

        Raises
        ------
        ValueError
            If the share is not positive.
        """
        if not share > 0:
            raise ValueError(f"share is {share}: the damping must be positive")
        return self._along(1 / (self.values + share * self.values[-1]))

    def natural(self, tolerance: float = 1e-10) -> Tensor:
        r"""Natural gradient :math:`F^+ g`, the best direction for a KL budget.

        Parameters
        ----------
        tolerance
            Eigenvalues below this share of the largest count as zero.

        Returns
        -------
        Tensor
            The shortest of the best steps, up to its length.

        Shapes
        ------
        -> (D,).
        """
        kept = self.values > tolerance * self.values[-1]
        return self._along(torch.where(kept, 1 / self.values.clamp_min(1e-300), 0.0))

    def inside(self, tolerance: float = 1e-10) -> Tensor:
        """Squared length of what the range of F has of every unit vector.

        Parameters
        ----------
        tolerance
            Eigenvalues below this share of the largest count as zero.

        Returns
        -------
        Tensor
            1 where the parameter's joint reach is finite; below 1 where it is infinite.

        Shapes
        ------
        -> (D,).
        """
        kept = self.values > tolerance * self.values[-1]
        basis = (self.vectors[:, kept] / self.values[kept].sqrt()).T @ self.rows
        return basis.square().sum(0)

    def _along(self, factors: Tensor) -> Tensor:
        """A function of F, by its values at the eigenvalues, applied to the gradient."""
        return (self.vectors @ (factors * self._signal)) @ self.rows


def _check_budget(budget: float) -> None:
    """Refuse a budget that allows nothing."""
    if not budget > 0:
        raise ValueError(f"budget is {budget}: a KL budget must be positive")
