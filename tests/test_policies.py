"""Policies against enumerations by hand: exact fractions, and derivatives by the complex step."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ceilings.policies import AutoregressivePolicy, Enumeration, SoftmaxPolicy, check_probs

F64 = torch.float64


def vector(*values):
    return torch.tensor(values, dtype=F64)


def close(actual, expected, rtol=1e-10):
    """Largest difference against the largest expected entry; NumPy only, not the library's own assertions."""
    actual, expected = np.asarray(actual, dtype=float), np.asarray(expected, dtype=float)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= rtol * max(np.abs(expected).max(), 1e-300) + 1e-15


def response_probability(features, prefixes, theta, response):
    """π(y) as a product of softmax steps, written once more; works for complex θ."""
    product = 1.0
    for t, token in enumerate(response):
        rows = features[prefixes.index(response[:t])]
        weights = [np.exp(row @ theta) for row in rows]
        product = product * weights[token] / sum(weights)
    return product


def complex_step_score(features, prefixes, theta, response):
    """∂ log π(y) without a difference of nearly equal numbers: Im π(θ + ih) / (h π)."""
    step = 1e-30
    value = response_probability(features, prefixes, theta, response)
    columns = np.eye(len(theta))
    slopes = [
        response_probability(features, prefixes, theta + 1j * step * column, response).imag / step
        for column in columns
    ]
    return np.array(slopes) / value


@st.composite
def policies(draw):
    """A random policy over at most 27 responses, with its parameter vector."""
    max_len, eos = draw(st.integers(1, 3)), draw(st.sampled_from([None, 0, 1, 2]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    policy = AutoregressivePolicy.random(3, max_len, draw(st.integers(1, 4)), generator, eos)
    theta = torch.randn(policy.features.shape[2], generator=generator, dtype=F64)
    return policy, theta


sixty = settings(max_examples=60, deadline=None, derandomize=True)


def test_the_softmax_of_log_integers_is_the_fraction_of_each():
    weights = [1, 2, 3, 6]
    policy, theta = SoftmaxPolicy(lambda z: z), torch.log(vector(*weights))
    exact = [Fraction(w, sum(weights)) for w in weights]
    close(policy.probs(theta), [float(p) for p in exact])
    close(policy.log_probs(theta), [math.log(p) for p in exact])
    scores = [[float((a == b) - exact[b]) for b in range(4)] for a in range(4)]
    close(policy.scores(theta), scores)


def test_softmax_scores_follow_the_chain_rule_of_nonlinear_logits():
    policy, theta = (
        SoftmaxPolicy(lambda t: torch.stack([t[0] ** 2, t[0] * t[1], t[1].sin()])),
        vector(0.7, -0.4),
    )
    a, b = 0.7, -0.4
    jacobian = np.array([[2 * a, 0], [b, a], [0, math.cos(b)]])
    weights = np.exp([a * a, a * b, math.sin(b)])
    probs = weights / weights.sum()
    close(policy.scores(theta), jacobian - probs @ jacobian)


def test_a_softmax_policy_enumerates_as_responses_of_one_token():
    law = SoftmaxPolicy(lambda z: z).enumerate(vector(0.0, 1.0, -1.0))
    assert law.responses == ((0,), (1,), (2,))
    assert law.lengths.tolist() == [1, 1, 1]
    assert torch.equal(law.token_scores[:, 0], law.scores)
    close(law.token_log_probs[:, 0], law.probs.log())


def test_open_prefixes_and_responses_by_hand():
    assert AutoregressivePolicy.open_prefixes(3, 2, eos=0) == ((), (1,), (2,))
    assert AutoregressivePolicy.open_prefixes(2, 2) == ((), (0,), (1,))
    generator = torch.Generator().manual_seed(0)
    law = AutoregressivePolicy.random(3, 2, 1, generator, eos=0).enumerate(vector(0.3))
    assert law.responses == ((0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2))
    assert law.lengths.tolist() == [1, 2, 2, 2, 2, 2, 2]
    full = AutoregressivePolicy.random(2, 3, 1, generator).enumerate(vector(0.3))
    assert full.responses == tuple(itertools.product(range(2), repeat=3))


@pytest.mark.claim("thm-tokens")
def test_a_two_token_policy_in_exact_fractions():
    # First token from (1, 2, 3)/6, token 0 stops; after 1 the law is (1, 1, 2)/4, after 2 it is (3, 1, 1)/5.
    # The one parameter is the log-weight of token 1, shared by all three prefixes.
    laws = {(): (1, 2, 3), (1,): (1, 1, 2), (2,): (3, 1, 1)}
    features = torch.zeros(3, 3, 10, dtype=F64)
    theta = torch.zeros(10, dtype=F64)
    for p, weights in enumerate(laws.values()):
        for v, w in enumerate(weights):
            features[p, v, 1 + 3 * p + v], theta[1 + 3 * p + v] = 1.0, math.log(w)
        features[p, 1, 0] = 1.0
    law = AutoregressivePolicy(features, 2, eos=0).enumerate(theta)

    def step(prefix, token):
        weights = laws[prefix]
        return Fraction(weights[token], sum(weights)), (token == 1) - Fraction(weights[1], sum(weights))

    for row, y in enumerate(law.responses):
        steps = [step(y[:t], y[t]) for t in range(len(y))]
        close(law.probs[row], float(math.prod(p for p, _ in steps)))
        close(law.scores[row, 0], float(sum(s for _, s in steps)))


@sixty
@given(policies())
def test_probabilities_scores_and_token_scores_match_the_complex_step(case):
    policy, theta = case
    law, features, point = policy.enumerate(theta), policy.features.numpy(), theta.numpy()
    close(law.probs, [response_probability(features, policy.prefixes, point, y) for y in law.responses])
    close(law.scores, [complex_step_score(features, policy.prefixes, point, y) for y in law.responses])
    for row, y in enumerate(law.responses):
        partial = np.zeros(len(point))
        for t in range(len(y)):
            longer = complex_step_score(features, policy.prefixes, point, y[: t + 1])
            close(law.token_scores[row, t], longer - partial)
            partial = longer


@sixty
@given(policies())
def test_an_ended_response_is_padded_with_zeros(case):
    policy, theta = case
    law = policy.enumerate(theta)
    for row, y in enumerate(law.responses):
        assert int(law.lengths[row]) == len(y)
        assert len(y) == policy.max_len or y[-1] == policy.eos
        assert not law.token_scores[row, len(y) :].any() and not law.token_log_probs[row, len(y) :].any()
    close(law.token_log_probs.sum(1).exp(), law.probs)
    close(law.token_scores.sum(1), law.scores)


@pytest.mark.claim("thm-zero-mean")
@sixty
@given(policies())
def test_the_score_has_mean_zero(case):
    policy, theta = case
    law = policy.enumerate(theta)
    assert abs(float(law.probs.sum()) - 1) < 1e-13
    assert float((law.probs @ law.scores).abs().max()) < 1e-13 * float(1 + law.scores.abs().max())


@pytest.mark.claim("thm-tokens")
@sixty
@given(policies())
def test_token_scores_have_mean_zero_given_every_prefix(case):
    policy, theta = case
    law = policy.enumerate(theta)
    for prefix in policy.prefixes:
        t = len(prefix)
        below = [r for r, y in enumerate(law.responses) if len(y) > t and y[:t] == prefix]
        mean = law.probs[below] @ law.token_scores[below, t]
        assert float(mean.abs().max()) < 1e-13 * float(1 + law.token_scores.abs().max())


@pytest.mark.claim("thm-zero-mean")
def test_where_a_probability_touches_zero_its_slope_is_zero():
    t = torch.tensor(0.0, dtype=F64, requires_grad=True)
    law = torch.stack([t**2, 0.5 - t**2, torch.full_like(t, 0.5)])
    reward = vector(1e6, 0.0, 1.0)
    (slope,) = torch.autograd.grad(law @ reward, t)
    assert float(slope) == 0.0  # no support, no gradient, however large the reward


def test_rewards_are_evaluated_on_every_response_in_the_dtype_of_the_law():
    law = AutoregressivePolicy.random(3, 2, 1, torch.Generator().manual_seed(0), eos=0).enumerate(vector(0.3))
    rewards = law.rewards(lambda y: len(y) == 2)
    assert rewards.dtype == F64 and rewards.tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_random_policies_are_repeatable_and_in_float64():
    one, two = (
        AutoregressivePolicy.random(3, 3, 2, torch.Generator().manual_seed(7), eos=1) for _ in range(2)
    )
    assert torch.equal(one.features, two.features) and one.features.dtype == F64


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        (torch.tensor([1, 0]), "floating-point vector"),
        (torch.ones(1, 1, dtype=F64), r"floating-point vector .* shape \(1, 1\)"),
        (torch.tensor(1.0, dtype=F64), "floating-point vector"),
        (torch.ones(0, dtype=F64), "empty"),
        (vector(0.5, float("nan")), "NaN or negative"),
        (vector(1.5, -0.5), "NaN or negative"),
        (vector(0.5, 0.4), "sums to 0.9, not 1: the support is truncated"),
        (vector(0.5, 0.6), "sums to 1.1, not 1"),
        (vector(0.5, float("inf")), "sums to inf"),
        (vector(0.5, 0.5 + 1e-8), "not 1"),
    ],
)
def test_what_is_not_a_law_is_refused(probs, message):
    with pytest.raises(ValueError, match=message):
        check_probs(probs)


def test_a_law_in_float32_may_be_off_by_its_rounding_only():
    check_probs(torch.full((3,), 1 / 3, dtype=torch.float32))
    with pytest.raises(ValueError, match="weights sums to"):
        check_probs(torch.tensor([0.5, 0.499], dtype=torch.float32), "weights")


def fields(**changes):
    """The six fields of a law of three responses, one of them short, with some changed."""
    law = AutoregressivePolicy.random(2, 2, 2, torch.Generator().manual_seed(0), eos=0).enumerate(
        vector(0.1, 0.2)
    )
    names = ("responses", "probs", "scores", "token_scores", "token_log_probs", "lengths")
    return {name: getattr(law, name) for name in names} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probs": vector(0.5, 0.5, 0.0)}, "response 2 has probability zero, hence no score"),
        ({"probs": vector(0.5, 0.3, 0.1)}, "truncated"),
        ({"responses": ((0,), (1, 0))}, "3 probabilities but 2 rows in responses"),
        ({"scores": torch.zeros(2, 2, dtype=F64)}, "2 rows in scores"),
        ({"scores": torch.zeros(3, dtype=F64)}, r"scores must have shape \(Y, D\)"),
        ({"token_scores": torch.zeros(4, 2, 2, dtype=F64)}, "4 rows in token_scores"),
        ({"token_scores": torch.zeros(3, 2, dtype=F64)}, r"expected \(Y, T, D\) with D = 2"),
        ({"token_scores": torch.zeros(3, 2, 5, dtype=F64)}, r"expected \(Y, T, D\) with D = 2"),
        ({"token_log_probs": torch.zeros(1, 2, dtype=F64)}, "1 rows in token_log_probs"),
        ({"token_log_probs": torch.zeros(3, 3, dtype=F64)}, r"expected \(Y, T\) = \(3, 2\)"),
        ({"lengths": torch.ones(2, dtype=torch.long)}, "2 rows in lengths"),
        ({"lengths": torch.tensor([2, 2, 2])}, "number of tokens of each response"),
        ({"responses": ((0,), (1, 1), (1, 1))}, "listed twice"),
    ],
)
def test_fields_that_do_not_describe_one_set_of_responses_are_refused(changes, message):
    Enumeration(**fields())
    with pytest.raises(ValueError, match=message):
        Enumeration(**fields(**changes))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (
            lambda z: torch.stack([z[0], z[0] - float("inf")]),
            "infinite or NaN: an option of probability zero",
        ),
        (lambda z: z * float("nan"), "infinite or NaN"),
        (lambda z: z[:0], "non-empty vector"),
        (lambda z: torch.stack([z, z]), r"got shape \(2, 2\)"),
        (lambda z: z.sum(), r"got shape \(\)"),
    ],
)
@pytest.mark.parametrize("method", ["log_probs", "probs", "scores", "enumerate"])
def test_logits_without_a_score_are_refused(logits, message, method):
    with pytest.raises(ValueError, match=message):
        getattr(SoftmaxPolicy(logits), method)(vector(0.0, 1.0))


def test_a_probability_that_underflows_to_zero_is_refused():
    with pytest.raises(ValueError, match="response 1 has probability zero"):
        SoftmaxPolicy(lambda z: z).enumerate(vector(0.0, -800.0))


@pytest.mark.parametrize(
    ("shape", "max_len", "eos", "message"),
    [
        ((3, 2), 1, None, r"shape \(P, V, D\)"),
        ((1, 3, 2), 0, None, "at least one token"),
        ((4, 3, 2), 2, 0, "features for 4 prefixes, but V = 3, max_len = 2, eos = 0 has 3 open prefixes"),
        ((3, 3, 2), 2, None, "has 4 open prefixes"),
        ((4, 3, 2), 2, 3, "eos is 3, but the 3 tokens are 0 to 2"),
        ((4, 3, 2), 2, -1, "eos is -1"),
    ],
)
def test_features_that_do_not_fit_the_tree_are_refused(shape, max_len, eos, message):
    with pytest.raises(ValueError, match=message):
        AutoregressivePolicy(torch.zeros(shape, dtype=F64), max_len, eos)


def test_step_laws_that_do_not_fit_the_tree_are_refused():
    policy = AutoregressivePolicy.random(3, 1, 2, torch.Generator().manual_seed(0))
    log_probs = torch.full((1, 3), 1 / 3, dtype=F64).log()
    with pytest.raises(ValueError, match=r"the tree needs \(P, V\) = \(1, 3\)"):
        policy.assemble(log_probs[:, :2], policy.features)
    with pytest.raises(ValueError, match=r"token_scores \(1, 2, 2\)"):
        policy.assemble(log_probs, policy.features[:, :2])
    with pytest.raises(ValueError, match=r"log_probs has shape \(1, 2\)"):
        policy.assemble(log_probs[:, :2], policy.features[:, :2])


def test_a_token_that_is_never_drawn_takes_its_responses_along():
    policy = AutoregressivePolicy.random(2, 2, 1, torch.Generator().manual_seed(0))
    log_probs = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]], dtype=F64).log()
    law = policy.assemble(log_probs, torch.full((3, 2, 1), 1.0, dtype=F64))
    assert law.responses == ((0, 0), (1, 0), (1, 1))
    close(law.probs, [0.5, 0.125, 0.375])


def test_parameters_that_do_not_fit_the_features_are_refused():
    policy = AutoregressivePolicy.random(3, 1, 2, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"theta has shape \(3,\); the features expect \(2,\)"):
        policy.enumerate(vector(0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match=r"theta is torch.float32 and the features torch.float64"):
        policy.enumerate(torch.zeros(2, dtype=torch.float32))
