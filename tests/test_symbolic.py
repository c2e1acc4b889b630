"""The symbolic policies against exact fractions and against the numeric library."""

from fractions import Fraction

import pytest
import sympy as sp
import torch

from ceilings.ceiling import score_reward_covariance
from ceilings.policies import AutoregressivePolicy, SoftmaxPolicy
from ceilings.symbolic import (
    covariance,
    expectation,
    lagrange_certificate,
    score,
    softmax_weights,
    theta_derivative,
    token_tree,
)

F64 = torch.float64


def at(expr, symbols, values):
    return sp.Rational(expr.subs(dict(zip(symbols, values, strict=True))))


def test_softmax_probabilities_are_weights_over_their_sum():
    w, probs = softmax_weights(3)
    assert [str(x) for x in w] == ["w_1", "w_2", "w_3"] and all(x.is_positive for x in w)
    assert [at(p, w, (1, 2, 3)) for p in probs] == [Fraction(1, 6), Fraction(1, 3), Fraction(1, 2)]
    assert sp.cancel(sum(probs) - 1) == 0
    assert [str(x) for x in softmax_weights(2, "v")[0]] == ["v_1", "v_2"]


def test_the_theta_derivative_is_the_derivative_in_the_logarithm():
    theta, w = sp.Symbol("theta", real=True), sp.Symbol("w", positive=True)
    expr = w**3 / (1 + w)
    by_substitution = sp.diff(expr.subs(w, sp.exp(theta)), theta)
    assert sp.simplify(by_substitution - theta_derivative(expr, w).subs(w, sp.exp(theta))) == 0


def test_scores_are_one_hot_minus_probabilities_and_agree_with_the_numeric_policy():
    w, probs = softmax_weights(3)
    weights = (1, 2, 3)
    law = SoftmaxPolicy(lambda z: z).enumerate(torch.log(torch.tensor(weights, dtype=F64)))
    for i in range(3):
        exact = [at(s, w, weights) for s in score(probs, w[i])]
        assert exact == [int(a == i) - Fraction(weights[i], 6) for a in range(3)]
        assert [abs(float(e) - n) < 1e-14 for e, n in zip(exact, law.scores[:, i].tolist(), strict=True)] == [
            True
        ] * 3


@pytest.mark.claim("thm-covariance")
def test_expectation_and_covariance_are_those_of_fractions_and_of_the_numeric_library():
    w, probs = softmax_weights(3)
    weights, rewards = (1, 2, 3), (2, -1, 5)
    p = [Fraction(x, 6) for x in weights]
    mean = sum(a * r for a, r in zip(p, rewards, strict=True))
    assert at(expectation(probs, list(map(sp.Integer, rewards))), w, weights) == mean
    exact = at(covariance(probs, list(map(sp.Integer, rewards)), score(probs, w[1])), w, weights)
    assert exact == p[1] * (rewards[1] - mean)  # g_i = π_i (R_i − E R) for a table
    law = SoftmaxPolicy(lambda z: z).enumerate(torch.log(torch.tensor(weights, dtype=F64)))
    numeric = score_reward_covariance(law.scores, torch.tensor(rewards, dtype=F64), law.probs)
    assert abs(float(numeric[1]) - float(exact)) < 1e-14


@pytest.mark.claim("thm-ceiling")
def test_the_certificate_is_the_gap_of_cauchy_schwarz_and_zero_exactly_for_proportional_values():
    _, probs = softmax_weights(3)
    a, b, c = sp.symbols("a_1:4"), sp.symbols("b_1:4"), sp.Symbol("c")

    def gap(left, right):
        squares = expectation(probs, [x**2 for x in left]) * expectation(probs, [x**2 for x in right])
        return squares - expectation(probs, [x * y for x, y in zip(left, right, strict=True)]) ** 2

    assert sp.cancel(gap(a, b) - lagrange_certificate(probs, a, b)) == 0
    assert sp.cancel(lagrange_certificate(probs, a, [c * x for x in a])) == 0
    assert lagrange_certificate([sp.Rational(1, 3)] * 3, [1, 0, 0], [0, 1, 0]) == sp.Rational(1, 9)


def test_a_token_tree_lists_its_leaves_in_order_and_agrees_with_the_numeric_policy():
    u, first = softmax_weights(3, "u")
    v, second = softmax_weights(3, "v")
    leaves = token_tree(first, [[], second, second])  # token 0 stops
    assert len(leaves) == 7 and sp.cancel(sum(leaves) - 1) == 0
    features = torch.zeros(3, 3, 6, dtype=F64)
    features[0, range(3), range(3)] = 1.0
    features[1:, range(3), range(3, 6)] = 1.0  # both second steps share their parameters
    weights = (1, 2, 3, 5, 7, 11)
    law = AutoregressivePolicy(features, 2, eos=0).enumerate(torch.log(torch.tensor(weights, dtype=F64)))
    for i, symbol in enumerate((*u, *v)):
        for leaf, s, prob, numeric in zip(
            leaves, score(leaves, symbol), law.probs.tolist(), law.scores[:, i].tolist(), strict=True
        ):
            assert abs(float(at(leaf, (*u, *v), weights)) - prob) < 1e-14
            assert abs(float(at(s, (*u, *v), weights)) - numeric) < 1e-13


def test_lengths_that_differ_are_refused():
    _, probs = softmax_weights(3)
    with pytest.raises(ValueError, match="3 probabilities for 2 values"):
        expectation(probs, [1, 2])
    with pytest.raises(ValueError, match="3 probabilities for 4 values"):
        covariance(probs, [1, 2, 3, 4], [1, 2, 3])
    with pytest.raises(ValueError, match="3 probabilities for 2 and 3 values"):
        lagrange_certificate(probs, [1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="3 first tokens but 2 laws"):
        token_tree(probs, [[], []])
