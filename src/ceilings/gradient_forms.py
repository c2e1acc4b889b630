r"""An expected update as a covariance of signal and direction, and what is left.

The expected update of a loss (minus its expected gradient) is a mean of a number for each response, the *signal*, times
a vector for each response, the *direction*. A mean of products is a covariance plus the product of the means; `Form`
keeps the two apart, with the ceiling of the first. Groups are enumerated in full: with Y responses and G a group these
are :math:`Y^G`, so keep both small.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ceilings.policies import Enumeration, check_probs

__all__ = ["Form", "group_law", "member_signals", "response_form", "token_form"]


@dataclass(frozen=True)
class Form:
    r"""An expected update as a covariance and what is left.

    Parameters
    ----------
    covariance
        Covariance of signal and direction under the sampling law.
    remainder
        Product of their means, and whatever else does not vary with the signal.
    ceiling
        Product of their standard deviations: no entry of ``covariance`` exceeds it.

    Shapes
    ------
    all (D,).
    """

    covariance: Tensor
    remainder: Tensor
    ceiling: Tensor

    @property
    def update(self) -> Tensor:
        """The expected update, (D,)."""
        return self.covariance + self.remainder

    def __add__(self, other: Form) -> Form:
        """Sum of two updates; their ceilings add by the triangle inequality."""
        return Form(
            self.covariance + other.covariance,
            self.remainder + other.remainder,
            self.ceiling + other.ceiling,
        )


def response_form(probs: Tensor, signal: Tensor, directions: Tensor) -> Form:
    r"""Form of :math:`E[c\, d] = \operatorname{Cov}(c, d) + E[c]\,E[d]`, one signal a response.

    Parameters
    ----------
    probs
        Sampling law.
    signal
        :math:`c(y)`.
    directions
        :math:`d(y)`, for most losses the score.

    Returns
    -------
    Form
        With the ceiling :math:`\sigma(c)\,\sigma(d_i)`.

    Shapes
    ------
    probs (Y,), signal (Y,), directions (Y, D).

    Raises
    ------
    ValueError
        If the shapes differ or ``probs`` is no law.

    References
    ----------
    Claim ``prop-signal``.
    """
    check_probs(probs)
    if signal.shape != probs.shape or directions.shape[:1] != probs.shape:
        raise ValueError(
            f"{len(probs)} responses, signals of shape {tuple(signal.shape)} and directions of shape "
            f"{tuple(directions.shape)}: give one of each a response"
        )
    mean, drift = probs @ signal, probs @ directions
    centred, moved = signal - mean, directions - drift
    spread = (probs @ centred.square()).sqrt() * (probs @ moved.square()).sqrt()
    return Form((probs * centred) @ moved, mean * drift, spread)


def token_form(law: Enumeration, signals: Tensor, directions: Tensor) -> Form:
    r"""Form of :math:`\sum_t E[c_t d_t]`, one signal a token: covariances at every prefix.

    Parameters
    ----------
    law
        Responses and sampling law; its scores are not used.
    signals
        :math:`c_t(y)`, which may depend on later tokens.
    directions
        :math:`d_t`, which may depend on the tokens up to t only.

    Returns
    -------
    Form
        Covariance :math:`\sum_t E[\operatorname{Cov}(c_t, d_t \mid y_{<t})]`, ceiling
        :math:`\sum_t E[\sigma(E[c_t \mid y_{\le t}] \mid y_{<t})\, \sigma(d_t \mid y_{<t})]`.

    Shapes
    ------
    signals (Y, T), directions (Y, T, D).

    Raises
    ------
    ValueError
        If the shapes differ.

    References
    ----------
    Claims ``prop-signal`` and ``thm-nested``.
    """
    if signals.shape != law.token_log_probs.shape or directions.shape[:2] != signals.shape:
        raise ValueError(
            f"signals of shape {tuple(signals.shape)} and directions of shape {tuple(directions.shape)}; the law "
            f"has (Y, T) = {tuple(law.token_log_probs.shape)}"
        )
    zero = torch.zeros_like(directions[0, 0])
    total = Form(zero, zero, zero)
    for t in range(signals.shape[1]):
        for prefix in sorted({y[:t] for y in law.responses if len(y) > t}):
            rows = [k for k, y in enumerate(law.responses) if y[:t] == prefix and len(y) > t]
            tokens = sorted({law.responses[k][t] for k in rows})
            own = [[k for k in rows if law.responses[k][t] == token] for token in tokens]
            mass = torch.stack([law.probs[k].sum() for k in own])
            known = torch.stack([law.probs[k] @ signals[k, t] for k in own]) / mass
            step = response_form(mass / mass.sum(), known, torch.stack([directions[k[0], t] for k in own]))
            weight = mass.sum()
            total += Form(weight * step.covariance, weight * step.remainder, weight * step.ceiling)
    return total


def group_law(probs: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Every ordered group of independent responses, with its probability.

    Parameters
    ----------
    probs
        Law of one response.
    size
        Responses a group, G.

    Returns
    -------
    tuple
        Rows of the members, and the probability of the group.

    Shapes
    ------
    probs (Y,) -> (Y^G, G), (Y^G,).
    """
    groups = torch.tensor(list(itertools.product(range(len(probs)), repeat=size)))
    return groups, probs[groups].prod(1)


def member_signals(probs: Tensor, groups: Tensor, mass: Tensor, values: Tensor) -> Tensor:
    r"""Signal of a response, :math:`c(y) = \sum_n E[v_n \mid y_n = y]`, from values of the members of groups.

    Parameters
    ----------
    probs
        Law of one response.
    groups, mass
        As `group_law` gives them.
    values
        :math:`v_n`, a number for each member, or one for each of its tokens.

    Returns
    -------
    Tensor
        The signal, so that :math:`E[\sum_n v_n d(y_n)] = E[c\, d]` for every direction d.

    Shapes
    ------
    groups (M, G), mass (M,), values (M, G) or (M, G, T) -> (Y,) or (Y, T).
    """
    flat = (values * mass.reshape(-1, *[1] * (values.ndim - 1))).flatten(0, 1)
    total = torch.zeros(len(probs), *values.shape[2:], dtype=probs.dtype).index_add_(
        0, groups.flatten(), flat
    )
    return total / probs.reshape(-1, *[1] * (values.ndim - 2))
