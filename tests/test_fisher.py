"""The Fisher information against closed forms, NumPy, and the mistakes that are made with it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ceilings.fisher import (
    empirical_diagonal_fisher,
    exact_diagonal_fisher,
    fisher_matrix,
    monte_carlo_diagonal_fisher,
    score_correlation_matrix,
)
from ceilings.policies import AutoregressivePolicy, SoftmaxPolicy

F64 = torch.float64


def tabular(seed, options=5):
    theta = torch.randn(options, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return SoftmaxPolicy(lambda z: z).enumerate(theta)


def sequences(seed, parameters=4, eos=0):
    generator = torch.Generator().manual_seed(seed)
    policy = AutoregressivePolicy.random(3, 3, parameters, generator, eos)
    return policy, policy.enumerate(torch.randn(parameters, generator=generator, dtype=F64))


@pytest.mark.claim("thm-logits")
@pytest.mark.parametrize("seed", range(5))
def test_of_a_tabular_softmax_it_is_diag_pi_minus_pi_pi_transposed(seed):
    law = tabular(seed)
    probs = law.probs.numpy()
    expected = np.diag(probs) - np.outer(probs, probs)
    assert np.abs(fisher_matrix(law.probs, law.scores).numpy() - expected).max() < 1e-15
    assert np.abs(exact_diagonal_fisher(law.probs, law.scores).numpy() - probs * (1 - probs)).max() < 1e-15


@pytest.mark.claim("thm-logits")
def test_it_is_the_variance_of_the_logit_derivative_token_by_token():
    policy, law = sequences(3)
    features, expected = policy.features.numpy(), 0.0
    for p, prefix in enumerate(policy.prefixes):
        t = len(prefix)
        children = {y[t]: 0.0 for y in law.responses if len(y) > t and y[:t] == prefix}
        for y, prob in zip(law.responses, law.probs.tolist(), strict=True):
            if len(y) > t and y[:t] == prefix:
                children[y[t]] += prob
        reach = np.array([children[v] for v in range(3)])
        q = reach / reach.sum()
        expected = expected + reach.sum() * (q @ features[p] ** 2 - (q @ features[p]) ** 2)
    assert np.allclose(exact_diagonal_fisher(law.probs, law.scores).numpy(), expected, rtol=1e-12)


@pytest.mark.claim("thm-logits")
def test_a_derivative_alike_on_99_percent_of_the_mass_still_has_a_large_fisher():
    theta = torch.log(torch.tensor([0.6, 0.39, 0.01], dtype=F64))
    law = SoftmaxPolicy(lambda z: torch.cat([z[1:3], z[3:] + 30 * z[:1]])).enumerate(
        torch.cat([theta[:1] * 0, theta])
    )
    assert abs(float(exact_diagonal_fisher(law.probs, law.scores)[0]) - 900 * 0.01 * 0.99) < 1e-10


@pytest.mark.claim("thm-tokens")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([None, 0, 2]))
def test_the_fisher_of_a_sequence_is_the_sum_over_its_tokens(seed, eos):
    _, law = sequences(seed, eos=eos)
    per_token = sum(law.probs @ law.token_scores[:, t].square() for t in range(3))
    diagonal = exact_diagonal_fisher(law.probs, law.scores)
    assert torch.allclose(diagonal, per_token, rtol=1e-11, atol=0)


@pytest.mark.claim("thm-joint")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_it_is_symmetric_positive_semi_definite_and_of_rank_below_the_number_of_responses(seed, parameters):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(4, parameters, generator=generator, dtype=F64)
    law = SoftmaxPolicy(lambda theta: mix @ theta).enumerate(
        torch.randn(parameters, generator=generator, dtype=F64)
    )
    matrix = fisher_matrix(law.probs, law.scores)
    assert torch.allclose(matrix.diagonal(), exact_diagonal_fisher(law.probs, law.scores), rtol=1e-13)
    assert torch.allclose(matrix, matrix.T, rtol=0, atol=1e-14)
    values = np.linalg.eigvalsh(matrix.numpy())
    assert values.min() > -1e-12
    assert (values > 1e-10 * values.max()).sum() <= 3


def test_the_monte_carlo_estimate_converges_on_the_exact_diagonal():
    _, law = sequences(1)
    exact = exact_diagonal_fisher(law.probs, law.scores)
    n = 40_000
    rows = torch.multinomial(law.probs, n, replacement=True, generator=torch.Generator().manual_seed(5))
    squares = law.scores[rows].square()
    error = squares.std(0) / n**0.5
    assert bool(((monte_carlo_diagonal_fisher(law.scores[rows]) - exact).abs() < 4.5 * error).all())


def test_squares_then_averages_so_that_twice_the_batch_keeps_the_mean():
    # The square of a mean halves when the batch doubles; the mean of squares does not.
    scores = torch.tensor([[1.0, -2.0], [-1.0, 2.0]], dtype=F64)
    assert monte_carlo_diagonal_fisher(scores).tolist() == [1.0, 4.0]
    assert monte_carlo_diagonal_fisher(scores.repeat(2, 1)).tolist() == [1.0, 4.0]
    assert empirical_diagonal_fisher(scores).tolist() == [1.0, 4.0]


def test_the_empirical_fisher_of_data_is_not_the_fisher_information():
    law = tabular(0)
    likeliest = int(law.probs.argmax())
    data = law.scores[likeliest].expand(7, -1)  # text that always says the same
    assert (
        float((empirical_diagonal_fisher(data) - exact_diagonal_fisher(law.probs, law.scores)).abs().max())
        > 0.05
    )


@pytest.mark.claim("thm-joint")
def test_correlations_are_those_of_numpy_and_a_dead_parameter_has_none():
    _, law = sequences(2)
    scores = torch.cat([law.scores, torch.zeros(len(law.probs), 1, dtype=F64)], dim=1)
    matrix = score_correlation_matrix(law.probs, scores).numpy()
    covariance = np.cov(law.scores.numpy().T, aweights=law.probs.numpy(), ddof=0)
    std = np.sqrt(np.diag(covariance))
    assert np.allclose(matrix[:4, :4], covariance / np.outer(std, std), rtol=1e-10)
    assert not matrix[4].any() and not matrix[:, 4].any()


@pytest.mark.parametrize("function", [fisher_matrix, exact_diagonal_fisher, score_correlation_matrix])
@pytest.mark.parametrize(
    ("probs", "scores", "message"),
    [
        ([0.5, 0.5], torch.zeros(3, 2, dtype=F64), r"\(Y, D\) with Y = 2, got \(3, 2\)"),
        ([0.5, 0.5], torch.zeros(2, dtype=F64), r"\(Y, D\) with Y = 2, got \(2,\)"),
        ([0.5, 0.4], torch.zeros(2, 1, dtype=F64), "truncated"),
        ([0.5, 0.5], torch.zeros(2, 1, dtype=torch.float32), "cast one of them on purpose"),
        ([1.0, 0.0], torch.tensor([[1.0], [float("-inf")]], dtype=F64), "score of response 1 is not finite"),
    ],
)
def test_a_batch_that_is_not_an_enumeration_is_refused(function, probs, scores, message):
    with pytest.raises(ValueError, match=message):
        function(torch.tensor(probs, dtype=F64), scores)


@pytest.mark.parametrize("function", [monte_carlo_diagonal_fisher, empirical_diagonal_fisher])
@pytest.mark.parametrize("shape", [(0, 3), (3,), (2, 2, 2)])
def test_an_estimate_needs_at_least_one_score_vector(function, shape):
    with pytest.raises(ValueError, match=r"shape \(N, D\) with N ≥ 1"):
        function(torch.zeros(shape, dtype=F64))
