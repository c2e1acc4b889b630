"""Two listed laws against exact fractions; what one law cannot say about another is refused."""

import itertools
from fractions import Fraction
from math import log

import pytest
import torch

from ceilings.ceiling import gradient_ceiling
from ceilings.off_policy import (
    chi_square_divergence,
    extra_term,
    importance_ceiling,
    importance_weights,
    kl_divergence,
    logged_score_mean,
)
from ceilings.testing import assert_equal

P = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4), Fraction(0)]
Q = [Fraction(1, 8), Fraction(5, 8), Fraction(1, 4), Fraction(0)]


def law(fractions):
    return torch.tensor([float(f) for f in fractions], dtype=torch.float64)


def test_weights_and_divergences_are_their_definitions():
    weights = [p / q if q else Fraction(0) for p, q in zip(P, Q, strict=True)]
    assert importance_weights(law(P), law(Q)).tolist() == [float(w) for w in weights]
    assert sum(q * w for q, w in zip(Q, weights, strict=True)) == 1
    chi = sum(q * q / p for p, q in zip(P, Q, strict=True) if p) - 1
    assert_equal(chi_square_divergence(law(Q), law(P)), float(chi), rtol=1e-14)
    kl = sum(float(p) * log(p / q) for p, q in zip(P, Q, strict=True) if p)
    assert_equal(kl_divergence(law(P), law(Q)), kl, rtol=1e-14)


def test_rejection_sampling_costs_one_minus_p_over_p():
    success = P[0] + P[1]
    kept = [P[0] / success, P[1] / success, Fraction(0), Fraction(0)]
    assert_equal(chi_square_divergence(law(kept), law(P)), float((1 - success) / success), rtol=1e-14)


def test_a_kl_divergence_has_the_gradient_of_its_definition():
    z = torch.tensor([0.3, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    probs = z.softmax(0)
    (found,) = torch.autograd.grad(kl_divergence(probs, reference), z)
    reward = (probs / reference).log().detach()
    assert_equal(found, (probs * (reward - probs @ reward)).detach(), rtol=1e-12)


@pytest.mark.parametrize("function", [importance_weights, chi_square_divergence, kl_divergence])
def test_laws_that_do_not_fit_are_refused(function):
    half, certain = law([Fraction(1, 2), Fraction(1, 2)]), law([Fraction(1), Fraction(0)])
    with pytest.raises(ValueError, match="response 1 has probability zero in .* and 0.5 in"):
        function(half, certain)
    with pytest.raises(ValueError, match="sums to 0.5, not 1"):
        function(half, half / 2)
    with pytest.raises(ValueError, match="list the same responses"):
        function(half, law([Fraction(1, 4)] * 4))


BEHAVIOUR = [Fraction(1, 4), Fraction(3, 4)]  # of a coin that the policy thinks fair
COIN_SCORES = torch.tensor([[0.5], [-0.5]], dtype=torch.float64)


@pytest.mark.claim("thm-behaviour")
def test_extra_term_of_a_coin():
    signals = law([Fraction(0), Fraction(1)])
    for baseline, wanted in ((0.0, Fraction(-3, 16)), (0.5, Fraction(-1, 16)), (0.75, Fraction(0))):
        assert extra_term(COIN_SCORES, signals, law(BEHAVIOUR), baseline).tolist() == [float(wanted)]


@pytest.mark.claim("thm-behaviour")
def test_extra_term_is_what_the_update_has_beside_its_covariance():
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    signals = torch.randn(6, generator=generator, dtype=torch.float64)
    probs = torch.rand(6, generator=generator, dtype=torch.float64)
    probs /= probs.sum()
    rows = range(6)
    mean = sum(float(probs[y] * signals[y]) for y in rows)
    centre = sum(probs[y] * scores[y] for y in rows)
    update = sum(probs[y] * (signals[y] - 0.7) * scores[y] for y in rows)
    double_sum = sum(
        probs[y] * probs[z] * (signals[y] - signals[z]) * (scores[y] - scores[z]) for y in rows for z in rows
    )
    assert_equal(extra_term(scores, signals, probs, 0.7), update - double_sum / 2)
    assert_equal(extra_term(scores, signals, probs, 0.0), mean * centre)


@pytest.mark.claim("thm-importance")
def test_importance_ceiling_bounds_the_gradient_and_is_its_definition():
    π, μ = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)], [Fraction(1, 5), Fraction(2, 5), Fraction(2, 5)]
    rewards, φ = [Fraction(1), Fraction(0), Fraction(3)], [Fraction(2), Fraction(-1), Fraction(0)]
    mean = sum(p * x for p, x in zip(π, φ, strict=True))
    s = [x - mean for x in φ]
    gradient = sum(p * r * x for p, r, x in zip(π, rewards, s, strict=True))
    average = sum(m * r for m, r in zip(μ, rewards, strict=True))
    variance = sum(m * (r - average) ** 2 for m, r in zip(μ, rewards, strict=True))
    moment = sum(p * p / m * x * x for p, m, x in zip(π, μ, s, strict=True))
    assert gradient**2 <= variance * moment
    found = importance_ceiling(law(s)[:, None], law(rewards), law(π), law(μ))
    assert_equal(found.square(), float(variance * moment), rtol=1e-13)


@pytest.mark.claim("thm-importance")
def test_importance_ceiling_on_the_policy_is_the_plain_one_and_two_options_are_tight():
    π = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    scores = torch.eye(3, dtype=torch.float64) - π
    rewards = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    assert_equal(importance_ceiling(scores, rewards, π, π), gradient_ceiling(scores, rewards, π))
    p, scores = (
        torch.tensor([0.3, 0.7], dtype=torch.float64),
        torch.tensor([[0.7], [-0.3]], dtype=torch.float64),
    )
    for other in (0.1, 0.5, 0.9):
        μ = torch.tensor([other, 1 - other], dtype=torch.float64)
        assert_equal(importance_ceiling(scores, rewards[:2], p, μ), 0.3 * 0.7)


def greedy_worst_case(rest, cap, values, guess):
    """Farthest that a mass, at most ``cap`` a token, can lie from a guess: every order of filling, tried."""
    worst = Fraction(0)
    for order in itertools.permutations(values):
        left, total = rest, Fraction(0)
        for value in order:
            total, left = total + min(left, cap) * value, left - min(left, cap)
        worst = max(worst, abs(total - guess))
    return worst


@pytest.mark.claim("cor-logged")
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_error_of_a_log_is_the_worst_over_all_laws_that_could_have_left_it(k):
    π = [Fraction(x, 20) for x in (3, 1, 6, 2, 5, 3)]
    μ = [Fraction(x, 40) for x in (10, 9, 8, 6, 4, 3)]  # the most likely first
    φ = [Fraction(x) for x in (2, -1, 0, 5, -3, 1)]
    rest, tail = 1 - sum(μ[:k]), range(k, 6)
    spread = sum(π[v] for v in tail)
    guess = rest * sum(π[v] * φ[v] for v in tail) / spread if spread else Fraction(0)
    centre = sum(p * x for p, x in zip(π, φ, strict=True))
    wanted = sum(m * x for m, x in zip(μ[:k], φ[:k], strict=True)) + guess - centre
    bound = greedy_worst_case(rest, μ[k - 1], [φ[v] for v in tail], guess)
    both = torch.stack(
        [law(φ), -law(φ)], dim=1
    )  # the worst case of one lies at the other end for its negative
    found, error = logged_score_mean(torch.arange(k), law(μ[:k]), law(π), both)
    assert_equal(found, law([wanted, -wanted]), rtol=1e-13)
    assert_equal(error, float(bound), rtol=1e-12, atol=1e-14)
    truth = sum(m * x for m, x in zip(μ, φ, strict=True)) - centre
    assert abs(wanted - truth) <= bound and (bound > 0) == (k < 5)


def test_log_of_everything_in_any_order_and_one_unlogged_token_leave_no_error():
    generator = torch.Generator().manual_seed(0)
    μ, π = (torch.rand(7, generator=generator, dtype=torch.float64) for _ in range(2))
    μ, π, φ = μ / μ.sum(), π / π.sum(), torch.randn(7, 3, generator=generator, dtype=torch.float64)
    order = torch.randperm(7, generator=generator)
    by_size = μ.argsort(descending=True)
    for tokens in (order, by_size[:6]):
        found, error = logged_score_mean(tokens, μ[tokens], π, φ)
        assert_equal(found, (μ - π) @ φ)
        assert_equal(error, 0.0, atol=1e-14)
    found, error = logged_score_mean(order[:1], torch.ones(1, dtype=torch.float64), π, φ)
    assert_equal(found, φ[order[0]] - π @ φ)
    assert_equal(error, 0.0, atol=1e-14)


def test_log_in_single_precision():
    generator = torch.Generator().manual_seed(0)
    μ, π = torch.randn(2, 1000, generator=generator).softmax(1)
    φ = torch.randn(1000, 3, generator=generator)
    top = μ.topk(50)
    found, error = logged_score_mean(top.indices, top.values, π, φ)
    exact = logged_score_mean(top.indices, top.values.double(), π.double() / π.double().sum(), φ.double())
    assert_equal(found, exact[0], rtol=1e-4)
    assert_equal(error, exact[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "logged", "message"),
    [
        ([0, 0], [0.4, 0.4], "2 different tokens between 0 and 3"),
        ([0, 4], [0.4, 0.4], "2 different tokens between 0 and 3"),
        ([-1, 0], [0.4, 0.4], "2 different tokens between 0 and 3"),
        ([0], [0.4, 0.4], "one probability a logged token"),
        ([], [], "at least one"),
        ([0, 1], [0.8, 0.4], "sum to 1.2"),
        ([0, 1], [0.8, -0.1], "negative"),
        ([0, 1], [0.6, 0.1], "0.3 of the mass is unlogged, more than 2 tokens of at most 0.1"),
    ],
)
def test_log_that_no_law_could_have_left_is_refused(tokens, logged, message):
    π, φ = torch.full((4,), 0.25, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    ids, logged = torch.tensor(tokens, dtype=torch.long), torch.tensor(logged, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        logged_score_mean(ids, logged, π, φ)


def test_unlogged_mass_without_a_shape_is_refused():
    π, φ = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="no shape to give the unlogged mass"):
        logged_score_mean(torch.tensor([0]), torch.tensor([0.9], dtype=torch.float64), π, φ)
    with pytest.raises(ValueError, match="2 logit_derivatives but 3 probs: list the same tokens"):
        logged_score_mean(torch.tensor([0]), torch.tensor([0.9], dtype=torch.float64), π, φ[:2])
    with pytest.raises(ValueError, match="probs sums to 0.5, not 1"):
        logged_score_mean(torch.tensor([0]), torch.tensor([0.9], dtype=torch.float64), π / 2, φ)


def test_quantities_of_other_responses_are_refused():
    half, certain = law([Fraction(1, 2)] * 2), law([Fraction(1), Fraction(0)])
    with pytest.raises(ValueError, match="2 scores but 3 behaviour_probs: list the same responses"):
        extra_term(COIN_SCORES, half, law([Fraction(1, 3)] * 3), 0.0)
    with pytest.raises(ValueError, match="3 signals but 2 behaviour_probs"):
        extra_term(COIN_SCORES, torch.zeros(3, dtype=torch.float64), half, 0.0)
    with pytest.raises(ValueError, match="behaviour_probs sums to 0.5, not 1"):
        extra_term(COIN_SCORES, half, half / 2, 0.0)
    with pytest.raises(
        ValueError, match="response 1 has probability zero in behaviour_probs and 0.5 in probs"
    ):
        importance_ceiling(COIN_SCORES, half, half, certain)
    with pytest.raises(ValueError, match="3 rewards but 2 behaviour_probs"):
        importance_ceiling(COIN_SCORES, torch.zeros(3, dtype=torch.float64), half, half)
    with pytest.raises(ValueError, match="probs sums to 0.5, not 1"):
        importance_ceiling(COIN_SCORES, half, half / 2, half)
