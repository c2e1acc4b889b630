"""Assertions that say the numbers: for the cells of the book and for the tests.

Exact claims are compared by `assert_equal` in float64, or decided by `assert_identity` in SymPy. Inequalities
are checked on every coordinate by `assert_at_most`. Sampled claims state their standard error and how many of
them are allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import sympy as sp

__all__ = [
    "assert_at_most",
    "assert_differs",
    "assert_equal",
    "assert_identity",
    "assert_within_standard_errors",
]


def _double(value: Tensor | float) -> Tensor:
    # NOTE a Python number would become float32 by default, good for 7 digits only.
    return value.double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _refuse_infinite(*sides: Tensor) -> None:
    if not all(bool(torch.isfinite(side).all()) for side in sides):
        raise AssertionError("an entry is infinite: its difference from anything has no size")


def _pair(left: Tensor | float, right: Tensor | float) -> tuple[Tensor, Tensor]:
    a, b = _double(left), _double(right)
    if a.shape != b.shape and b.ndim > 0 and a.ndim > 0:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    for name, x in (("left", a), ("right", b)):
        if x.numel() == 0:
            raise ValueError(f"the {name} side is empty: an assertion over nothing cannot fail")
        if bool(torch.isnan(x).any()):
            raise AssertionError(f"the {name} side has a NaN")
    return a, b


def assert_equal(
    actual: Tensor | float, expected: Tensor | float, rtol: float = 1e-10, atol: float = 0.0
) -> None:
    """Assert that two tensors agree to rounding: ``max|actual − expected| ≤ rtol · max|expected| + atol``.

    Parameters
    ----------
    actual
        What was computed.
    expected
        What it must be; a scalar is compared with every entry.
    rtol
        Tolerance relative to the largest expected entry.
    atol
        Absolute tolerance; needed where the expected value is 0, and then the caller states its scale.

    Raises
    ------
    AssertionError
        If they differ by more, or an entry is NaN or infinite.
    ValueError
        If the shapes differ or a side is empty.
    """
    a, b = _pair(actual, expected)
    _refuse_infinite(a, b)  # an infinite expectation would allow an infinite difference
    error, allowed = float((a - b).abs().max()), rtol * float(b.abs().max()) + atol
    if not error <= allowed:
        raise AssertionError(f"largest difference {error:.3g} exceeds {allowed:.3g}")


def assert_differs(actual: Tensor | float, expected: Tensor | float, by_at_least: float) -> None:
    """Assert that two tensors differ somewhere by a stated amount: a broken assumption must be visible.

    Parameters
    ----------
    actual, expected
        The two sides.
    by_at_least
        Smallest acceptable largest difference.

    Raises
    ------
    AssertionError
        If they are closer than that everywhere, or an entry is NaN or infinite.
    ValueError
        If the shapes differ or a side is empty.
    """
    a, b = _pair(actual, expected)
    _refuse_infinite(a, b)
    gap = float((a - b).abs().max())
    if not gap >= by_at_least:
        raise AssertionError(
            f"largest difference {gap:.3g} is below {by_at_least:.3g}: nothing is broken here"
        )


def assert_at_most(lower: Tensor | float, upper: Tensor | float, slack: float = 1e-12) -> None:
    """Assert ``lower ≤ upper`` on every coordinate, up to rounding.

    Parameters
    ----------
    lower, upper
        The two sides.
    slack
        Rounding allowed, relative to the largest finite entry of ``upper``.

    Raises
    ------
    AssertionError
        If a coordinate violates the inequality, with the worst one named, or an entry is NaN.
    ValueError
        If the shapes differ or a side is empty.
    """
    a, b = _pair(lower, upper)
    excess = (a - b).flatten()
    # NOTE an infinite (vacuous) bound on one coordinate must not excuse the others.
    allowed = slack * float(torch.where(torch.isfinite(b), b, 0).abs().max())
    worst = int(excess.argmax())
    if not float(excess[worst]) <= allowed:
        left, right = a.expand_as(excess.view((a - b).shape)).flatten(), b.expand((a - b).shape).flatten()
        raise AssertionError(f"coordinate {worst}: {float(left[worst]):.6g} > {float(right[worst]):.6g}")


def assert_within_standard_errors(
    estimate: Tensor | float, expected: Tensor | float, standard_error: Tensor | float, k: float
) -> None:
    """Assert that every estimate lies within ``k`` standard errors of its expectation.

    Parameters
    ----------
    estimate
        Sampled values.
    expected
        Their exact expectations.
    standard_error
        Standard error of each estimate, positive.
    k
        How many standard errors are allowed; choose it for the number of coordinates compared.

    Raises
    ------
    AssertionError
        If one lies further away.
    ValueError
        If a standard error is not positive and finite, the shapes differ, or a side is empty.
    """
    a, b = _pair(estimate, expected)
    error = _double(standard_error)
    if error.ndim > 0 and error.shape != (a - b).shape:
        raise ValueError(
            f"standard errors of shape {tuple(error.shape)} for estimates of {tuple((a - b).shape)}"
        )
    if not bool(((error > 0) & torch.isfinite(error)).all()):
        raise ValueError("a standard error is not positive and finite: such a check cannot be read")
    distance = float(((a - b).abs() / error).max())
    if not distance <= k:
        raise AssertionError(f"{distance:.2f} standard errors away, {k:g} allowed")


def assert_identity(expr: sp.Expr) -> None:
    """Assert that a rational expression is identically zero; expanding its numerator decides this.

    Parameters
    ----------
    expr
        Difference of the two sides, rational in its symbols.

    Raises
    ------
    AssertionError
        If it is not identically zero.
    ValueError
        If it is not a rational function of exact numbers, where SymPy would only try.
    """
    import sympy as sp

    expr = sp.sympify(expr)
    if not expr.is_rational_function(*expr.free_symbols):
        raise ValueError(f"not a rational function of its symbols, so equality cannot be decided: {expr}")
    if expr.has(sp.Float):
        raise ValueError(f"holds a rounded number, so equality cannot be decided; use Rational: {expr}")
    # A rational function is zero exactly when its expanded numerator is; far quicker than dividing out common factors.
    numerator, _ = sp.fraction(sp.together(expr))
    if sp.expand(numerator) != 0:
        raise AssertionError(f"not identically zero: {sp.cancel(expr)}")
