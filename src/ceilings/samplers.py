r"""Samplers that bend the next-token law: temperature, top-k, top-p.

A sampler turns the logits :math:`z` of a policy into another law :math:`q`: softmax of :math:`z / T`,
restricted to a kept set of tokens and renormalised. It is a policy of its own as long as the kept sets stand
still, with its own scores; the scores of the *unbent* policy do not have mean zero under it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ceilings.policies import AutoregressivePolicy, Enumeration

__all__ = ["Sampler", "prefix_mean", "sampled_law"]


@dataclass(frozen=True)
class Sampler:
    """Settings of a sampler, applied in the usual order: temperature, then top-k, then top-p.

    Parameters
    ----------
    temperature
        Divides the logits; 1 leaves them.
    top_k
        Number of tokens kept, the most likely ones; None keeps all. A tie goes to the lower token id.
    top_p
        The smallest set of most likely tokens with at least this much of the mass is kept; 1 keeps all.

    Raises
    ------
    ValueError
        If a setting is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that define no law."""
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}: it must be positive (greedy choice is top_k = 1)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: at least one token must be kept")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must lie in (0, 1]")

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probability of every token under the sampler.

        Parameters
        ----------
        logits
            Logits of the policy over the V tokens, one row a prefix.

        Returns
        -------
        Tensor
            Renormalised over the kept tokens; −inf for a token that is never drawn.

        Shapes
        ------
        logits (P, V) -> (P, V).
        """
        scaled = logits / self.temperature
        order = scaled.argsort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            scaled = scaled.scatter(-1, order[..., self.top_k :], -torch.inf)
        if self.top_p < 1:
            sorted_probs = scaled.softmax(-1).gather(-1, order)
            before = sorted_probs.cumsum(-1) - sorted_probs  # mass of the more likely tokens
            drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            scaled = scaled.masked_fill(drop, -torch.inf)
        return scaled.log_softmax(-1)


def sampled_law(policy: AutoregressivePolicy, theta: Tensor, sampler: Sampler) -> tuple[Enumeration, Tensor]:
    r"""What a sampler draws from a policy, and how the unbent policy would score it.

    Parameters
    ----------
    policy
        The policy whose logits the sampler bends.
    theta
        Its parameters.
    sampler
        Temperature and truncation.

    Returns
    -------
    Enumeration
        The sampler's law :math:`q` with its own scores :math:`s^q = \nabla \log q`, kept sets held fixed.
    Tensor
        Token scores :math:`s^1_t = \nabla \log \pi_\theta(y_t \mid y_{<t})` of the same responses, under the
        full policy at temperature 1.

    Shapes
    ------
    theta (D,) -> Enumeration, (Y, T, D).

    Units
    -----
    scores 1/[θ].

    References
    ----------
    Claim ``prop-assumptions``.
    """
    logits = policy.features @ theta
    log_q = sampler.log_probs(logits)
    mean_q = torch.einsum("pv,pvd->pd", log_q.exp(), policy.features)
    mean_policy = torch.einsum("pv,pvd->pd", logits.softmax(-1), policy.features)
    own = (policy.features - mean_q[:, None]) / sampler.temperature
    full = policy.features - mean_policy[:, None]
    return policy.assemble(log_q, own), policy.assemble(log_q, full).token_scores


def prefix_mean(law: Enumeration, values: Tensor) -> Tensor:
    r"""Expectation of a per-token quantity given the tokens before it, :math:`E[v_t \mid y_{<t}]`.

    Parameters
    ----------
    law
        The law of the responses.
    values
        ``values[y, t]`` is the quantity at step t of response y; a reward is the same at every step.

    Returns
    -------
    Tensor
        The conditional mean at every step of every response; zero after the response has ended.

    Shapes
    ------
    values (Y, T) or (Y, T, D) -> the same.

    Raises
    ------
    ValueError
        If ``values`` does not have one row a response and one column a step.
    """
    if values.shape[:2] != law.token_log_probs.shape:
        raise ValueError(
            f"values has shape {tuple(values.shape)}; expected (Y, T, …) = {tuple(law.token_log_probs.shape)}"
        )
    means = torch.zeros_like(values)
    for t in range(values.shape[1]):
        below: dict[tuple[int, ...], list[int]] = {}
        for row, response in enumerate(law.responses):
            if len(response) > t:
                below.setdefault(response[:t], []).append(row)
        for rows in below.values():
            weights = law.probs[rows] / law.probs[rows].sum()
            means[rows, t] = torch.tensordot(weights, values[rows, t], dims=1)
    return means
