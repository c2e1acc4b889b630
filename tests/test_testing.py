"""An assertion that cannot fail checks nothing: each is made to pass and made to fail."""

import math

import pytest
import sympy as sp
import torch

from ceilings.testing import (
    assert_at_most,
    assert_differs,
    assert_equal,
    assert_identity,
    assert_within_standard_errors,
)

F64 = torch.float64
INF, NAN = math.inf, math.nan


def vector(*values):
    return torch.tensor(values, dtype=F64)


def test_equal_allows_rounding_relative_to_the_largest_entry_and_no_more():
    assert_equal(vector(1e-9, 100.0), vector(0.0, 100.0))
    assert_equal(vector(1.0, 1.0), 1.0)
    assert_equal(vector(1e-9), 0.0, atol=1e-8)
    assert_equal(vector(2.0, 4.0), vector(2.1, 4.0), rtol=0.05)
    with pytest.raises(AssertionError, match=r"largest difference 2e-08 exceeds 1e-08"):
        assert_equal(vector(2e-8, 100.0), vector(0.0, 100.0))
    with pytest.raises(AssertionError, match="exceeds 0"):
        assert_equal(vector(1e-300), vector(0.0))
    with pytest.raises(AssertionError):
        assert_equal(vector(1.0, -1.0), 1.0)
    with pytest.raises(AssertionError):
        assert_equal(vector(-1.0), vector(1.0))


def test_a_python_number_keeps_its_sixteen_digits():
    assert_equal(vector(0.1), 0.1, rtol=1e-15)
    with pytest.raises(AssertionError):
        assert_equal(0.1, 0.1 + 1e-9)
    with pytest.raises(AssertionError):
        assert_at_most(vector(0.1 + 1e-9), 0.1)


def test_equal_is_relative_to_the_expected_side():
    with pytest.raises(AssertionError):
        assert_equal(vector(1e10), vector(1.0), rtol=1e-3)


@pytest.mark.parametrize(("actual", "expected"), [(1.0, INF), (INF, INF), (INF, 1.0), (-INF, INF)])
def test_equal_refuses_infinities(actual, expected):
    with pytest.raises(AssertionError, match="infinite"):
        assert_equal(vector(actual, 0.0), vector(expected, 0.0))


def test_differs_asks_for_a_visible_gap():
    assert_differs(vector(1.0, 2.0), vector(1.0, 2.5), by_at_least=0.5)
    with pytest.raises(AssertionError, match="largest difference 0.5 is below 0.6: nothing is broken here"):
        assert_differs(vector(1.0, 2.0), vector(1.0, 2.5), by_at_least=0.6)
    with pytest.raises(AssertionError, match="infinite"):
        assert_differs(vector(INF), vector(1.0), by_at_least=1.0)


def test_at_most_names_the_worst_coordinate():
    assert_at_most(vector(1.0, 2.0), vector(1.0, 2.0))
    assert_at_most(vector(1.0 + 1e-13, -5.0), vector(1.0, 0.0))
    assert_at_most(vector(0.5, 0.7), 0.7)
    assert_at_most(0.5, vector(0.5, 0.7))
    with pytest.raises(AssertionError, match=r"coordinate 1: 3 > 2$"):
        assert_at_most(vector(1.5, 3.0), vector(1.0, 2.0))
    with pytest.raises(AssertionError, match=r"coordinate 1: 0.8 > 0.7$"):
        assert_at_most(vector(0.5, 0.8), 0.7)
    with pytest.raises(AssertionError, match=r"coordinate 0: 0.6 > 0.5$"):
        assert_at_most(0.6, vector(0.5, 0.7))
    with pytest.raises(AssertionError):
        assert_at_most(vector(1.0 + 1e-11), vector(1.0))


def test_a_vacuous_bound_on_one_coordinate_does_not_excuse_another():
    assert_at_most(vector(1.0, 1e300), vector(1.0, INF))
    with pytest.raises(AssertionError, match="coordinate 0: 5 > 1"):
        assert_at_most(vector(5.0, 1.0), vector(1.0, INF))
    with pytest.raises(AssertionError):
        assert_at_most(vector(INF), vector(1.0))


def test_standard_errors_are_counted_on_the_worst_coordinate():
    assert_within_standard_errors(vector(1.0, 2.0), vector(1.2, 2.2), vector(0.1, 0.1), k=2.1)
    assert_within_standard_errors(1.0, 1.2, 0.1, k=2.1)
    with pytest.raises(AssertionError, match=r"4.00 standard errors away, 3 allowed"):
        assert_within_standard_errors(vector(1.0, 2.0), vector(1.1, 2.4), vector(0.1, 0.1), k=3)


@pytest.mark.parametrize("error", [0.0, -1.0, INF, NAN])
def test_a_standard_error_must_be_a_positive_number(error):
    with pytest.raises(ValueError, match="not positive and finite"):
        assert_within_standard_errors(vector(1.0, 1.0), vector(1.0, 1.0), vector(1.0, error), k=3)


def test_standard_errors_must_match_the_estimates():
    with pytest.raises(ValueError, match="standard errors of shape"):
        assert_within_standard_errors(
            vector(1.0, 9.0), vector(1.0, 1.0), torch.ones(2, 1, dtype=F64) * 10, k=3
        )


checks = pytest.mark.parametrize(
    "check",
    [
        assert_equal,
        assert_at_most,
        lambda a, b: assert_differs(a, b, by_at_least=0.1),
        lambda a, b: assert_within_standard_errors(a, b, 1.0, k=1e9),
    ],
    ids=["equal", "at_most", "differs", "standard_errors"],
)


@checks
def test_nan_never_passes(check):
    with pytest.raises(AssertionError, match="left side has a NaN"):
        check(vector(1.0, NAN), vector(1.0, 1.0))
    with pytest.raises(AssertionError, match="right side has a NaN"):
        check(vector(1.0, 1.0), vector(1.0, NAN))


@checks
def test_nothing_never_passes(check):
    with pytest.raises(ValueError, match="empty: an assertion over nothing cannot fail"):
        check(vector(), vector())


@checks
def test_shapes_are_not_broadcast(check):
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(2, 1\) differ"):
        check(vector(1.0, 2.0), vector(1.0, 2.0)[:, None])


def test_an_identity_is_decided():
    x, y = sp.symbols("x y")
    assert_identity((x**2 - y**2) / (x - y) - x - y)
    assert_identity(0)
    with pytest.raises(AssertionError, match="not identically zero: x"):
        assert_identity(x + y - y)
    with pytest.raises(AssertionError):
        assert_identity(1 / (1 + x**2))


@pytest.mark.parametrize("expr", [sp.exp(sp.Symbol("x")) - 1, sp.sqrt(sp.Symbol("x")), sp.nan, sp.zoo])
def test_what_cannot_be_decided_is_refused(expr):
    with pytest.raises(ValueError, match="cannot be decided"):
        assert_identity(expr)


def test_rounded_numbers_decide_nothing():
    with pytest.raises(ValueError, match="use Rational"):
        assert_identity(0.1 * sp.Symbol("x") - sp.Symbol("y") / 10)
