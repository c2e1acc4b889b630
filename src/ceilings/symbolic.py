r"""Policies, expectations and scores in SymPy, in a form where equality is *decided*.

Logits enter only through :math:`w = e^\theta > 0`, so that every probability, score and gradient is a
rational function of ``w`` and the rewards. For rational functions `sympy.cancel` is a decision procedure: it
returns 0 exactly for what is identically 0. Inequalities are shown by certificates: an identity that writes
the gap as a sum of squares.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import sympy as sp

__all__ = [
    "covariance",
    "expectation",
    "lagrange_certificate",
    "score",
    "softmax_weights",
    "theta_derivative",
    "token_tree",
]


def softmax_weights(n: int, name: str = "w") -> tuple[tuple[sp.Symbol, ...], list[sp.Expr]]:
    r"""Positive weights :math:`w_a = e^{\theta_a}` and the probabilities that they give.

    Parameters
    ----------
    n
        Number of options.
    name
        Name of the symbols.

    Returns
    -------
    tuple
        The symbols ``w_1 … w_n`` and the probabilities ``w_a / Σ w``.
    """
    w = sp.symbols(f"{name}_1:{n + 1}", positive=True)
    return w, [wa / sum(w) for wa in w]


def theta_derivative(expr: sp.Expr, w: sp.Symbol) -> sp.Expr:
    r"""Derivative in the logit :math:`\theta = \ln w`, which is :math:`w\, \partial / \partial w`.

    Parameters
    ----------
    expr
        A rational function of ``w``.
    w
        The weight of the logit.

    Returns
    -------
    sympy.Expr
        :math:`\partial\, \mathrm{expr} / \partial \theta`, rational again.
    """
    return w * sp.diff(expr, w)


def score(probs: Sequence[sp.Expr], w: sp.Symbol) -> list[sp.Expr]:
    r"""Score of every response in one logit, :math:`\partial_\theta \pi(y) / \pi(y)`.

    Parameters
    ----------
    probs
        Probability of every response, rational in ``w``.
    w
        The weight of the logit.

    Returns
    -------
    list
        One score a response, cancelled.
    """
    return [sp.cancel(theta_derivative(p, w) / p) for p in probs]


def expectation(probs: Sequence[sp.Expr], values: Sequence[sp.Expr]) -> sp.Expr:
    """Expectation of ``values`` under ``probs``.

    Parameters
    ----------
    probs
        Probability of every response.
    values
        Value at every response.

    Returns
    -------
    sympy.Expr
        The sum of products.

    Raises
    ------
    ValueError
        If the lengths differ.
    """
    if len(probs) != len(values):
        raise ValueError(f"{len(probs)} probabilities for {len(values)} values")
    return sum((p * v for p, v in zip(probs, values, strict=True)), sp.Integer(0))


def covariance(probs: Sequence[sp.Expr], left: Sequence[sp.Expr], right: Sequence[sp.Expr]) -> sp.Expr:
    """Covariance of two functions of the response.

    Parameters
    ----------
    probs
        Probability of every response.
    left, right
        The two functions.

    Returns
    -------
    sympy.Expr
        ``E[(left − E left)(right − E right)]``.
    """
    mean_left, mean_right = expectation(probs, left), expectation(probs, right)
    return expectation(probs, [(a - mean_left) * (b - mean_right) for a, b in zip(left, right, strict=True)])


def lagrange_certificate(
    probs: Sequence[sp.Expr], left: Sequence[sp.Expr], right: Sequence[sp.Expr]
) -> sp.Expr:
    r"""Sum of squares equal to the gap of Cauchy-Schwarz, :math:`\E a^2 \, \E b^2 - (\E ab)^2`.

    Parameters
    ----------
    probs
        Probability of every response; they need not sum to 1.
    left, right
        The two functions a and b, centred by the caller where a variance is meant.

    Returns
    -------
    sympy.Expr
        :math:`\sum_{y<y'} \pi_y \pi_{y'} (a_y b_{y'} - a_{y'} b_y)^2`: visibly non-negative, and zero exactly
        where a and b are proportional on the support.

    Raises
    ------
    ValueError
        If the lengths differ.

    References
    ----------
    Lagrange's identity; claim ``thm-ceiling``.
    """
    if not len(probs) == len(left) == len(right):
        raise ValueError(f"{len(probs)} probabilities for {len(left)} and {len(right)} values")
    pairs = itertools.combinations(range(len(probs)), 2)
    return sum(
        (probs[y] * probs[z] * (left[y] * right[z] - left[z] * right[y]) ** 2 for y, z in pairs),
        sp.Integer(0),
    )


def token_tree(first: Sequence[sp.Expr], second: Sequence[Sequence[sp.Expr]]) -> list[sp.Expr]:
    """Probabilities of two-token responses: the first token, then a law that depends on it.

    Parameters
    ----------
    first
        Law of the first token.
    second
        ``second[a]`` is the law of the second token after ``a``; an empty sequence means that ``a`` ends the
        response.

    Returns
    -------
    list
        Probabilities of the responses, in the order of the tree.

    Raises
    ------
    ValueError
        If there is not one law a first token.
    """
    if len(first) != len(second):
        raise ValueError(
            f"{len(first)} first tokens but {len(second)} laws of the second: give one each, [] to stop"
        )
    leaves: list[sp.Expr] = []
    for p, law in zip(first, second, strict=True):
        leaves += [p * q for q in law] if law else [p]
    return leaves
