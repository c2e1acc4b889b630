"""Samplers against exact fractions, complex-step derivatives of their own law, and sums by hand."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ceilings.policies import AutoregressivePolicy
from ceilings.samplers import Sampler, prefix_mean, sampled_law

F64 = torch.float64
WEIGHTS = (4, 8, 1, 2)  # unsorted on purpose


def close(actual, expected, rtol=1e-10):
    actual, expected = np.asarray(actual, dtype=float), np.asarray(expected, dtype=float)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= rtol * np.abs(expected).max() + 1e-14


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [
        (Sampler(), (4, 8, 1, 2)),
        (Sampler(temperature=0.5), (16, 64, 1, 4)),
        (Sampler(top_k=1), (0, 8, 0, 0)),
        (Sampler(top_k=3), (4, 8, 0, 2)),
        (Sampler(top_k=99), (4, 8, 1, 2)),
        (Sampler(top_p=0.5), (0, 8, 0, 0)),  # 8/15 > 0.5 alone
        (Sampler(top_p=0.6), (4, 8, 0, 0)),
        (Sampler(top_p=0.81), (4, 8, 0, 2)),  # 12/15 = 0.8 is not enough
        (Sampler(top_p=0.999), (4, 8, 1, 2)),
        (Sampler(temperature=0.5, top_p=0.75), (0, 64, 0, 0)),  # temperature first: 64/85 > 0.75
        (Sampler(top_k=2, top_p=0.66), (0, 8, 0, 0)),  # top-k first: 8/12 > 0.66
    ],
)
def test_one_step_in_exact_fractions(sampler, weights):
    logits = torch.log(torch.tensor([WEIGHTS], dtype=F64))
    exact = [float(Fraction(w, sum(weights))) for w in weights]
    close(sampler.log_probs(logits).exp()[0], exact)


def test_a_tie_at_the_cut_goes_to_the_lower_token():
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=F64)
    assert (Sampler(top_k=2).log_probs(logits) > -torch.inf).tolist() == [[True, True, False, False]]
    kept = Sampler(top_k=3).log_probs(torch.zeros(1, 5000, dtype=F64)) > -torch.inf
    assert kept[0].nonzero()[:, 0].tolist() == [0, 1, 2]


def case(seed, eos=0):
    generator = torch.Generator().manual_seed(seed)
    policy = AutoregressivePolicy.random(4, 3, 3, generator, eos)
    return policy, torch.randn(3, generator=generator, dtype=F64), generator


samplers = st.builds(
    Sampler,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 2, 3]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
)


def law_by_hand(policy, theta, sampler, responses, kept_at):
    """q(y) by products; the kept sets are those at ``kept_at``, so that θ may be complex."""
    features, total = policy.features.numpy(), []
    for y in responses:
        product = 1.0
        for t, token in enumerate(y):
            rows = features[policy.prefixes.index(y[:t])]
            kept = sampler.log_probs(torch.tensor(rows @ kept_at)[None])[0].numpy() > -np.inf
            weights = np.exp(rows @ theta / sampler.temperature) * kept
            product = product * weights[token] / weights.sum()
        total.append(product)
    return np.array(total)


@pytest.mark.claim("prop-assumptions")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), samplers, st.sampled_from([None, 0]))
def test_its_law_and_its_own_scores(seed, sampler, eos):
    policy, theta, _ = case(seed, eos)
    law, _ = sampled_law(policy, theta, sampler)
    point, step = theta.numpy(), 1e-30
    close(law.probs, law_by_hand(policy, point, sampler, law.responses, point))
    for i, column in enumerate(np.eye(3)):
        slope = law_by_hand(policy, point + 1j * step * column, sampler, law.responses, point).imag / step
        close(law.scores[:, i], slope / law.probs.numpy())


@pytest.mark.claim("prop-assumptions")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), samplers, st.sampled_from([None, 0]))
def test_the_unbent_score_is_the_bent_one_times_the_temperature_plus_its_mean(seed, sampler, eos):
    policy, theta, generator = case(seed, eos)
    law, full = sampled_law(policy, theta, sampler)
    plain = policy.enumerate(theta)
    index = [plain.responses.index(y) for y in law.responses]
    close(full, plain.token_scores[index])
    mean = prefix_mean(law, full)
    close(full - mean, sampler.temperature * law.token_scores, rtol=1e-9)
    rewards = torch.randn(len(law.probs), generator=generator, dtype=F64)
    value = prefix_mean(law, rewards[:, None].expand(law.token_log_probs.shape))
    gradient = law.probs @ (rewards[:, None] * law.scores)
    left = torch.einsum("y,ytd->d", law.probs * (rewards - 3), full)
    right = sampler.temperature * gradient + torch.einsum("y,yt,ytd->d", law.probs, value, mean)
    right -= 3 * torch.einsum("y,ytd->d", law.probs, mean)
    close(left, right, rtol=1e-9)


def test_without_bending_it_is_the_policy_itself():
    policy, theta, _ = case(1)
    law, full = sampled_law(policy, theta, Sampler())
    plain = policy.enumerate(theta)
    assert law.responses == plain.responses
    close(law.scores, plain.scores)
    close(full, plain.token_scores)


def test_a_prefix_mean_by_hand():
    # Responses 0 | 10 | 11 with probabilities 1/2, 1/8, 3/8.
    policy = AutoregressivePolicy(torch.zeros(2, 2, 1, dtype=F64), 2, eos=0)
    log_probs = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=F64).log()
    law = policy.assemble(log_probs, policy.features)
    values = torch.tensor([[8.0, 99.0], [0.0, 4.0], [16.0, 8.0]], dtype=F64)
    close(prefix_mean(law, values), [[10, 0], [10, 7], [10, 7]])
    close(prefix_mean(law, values[:, :, None]), np.array([[10, 0], [10, 7], [10, 7]])[:, :, None])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0: it must be positive"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, r"top_p is 0.0: it must lie in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_argumentsthat_define_no_law_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**arguments)


def test_values_that_do_not_fit_the_responses_are_refused():
    policy, theta, _ = case(0)
    law, _ = sampled_law(policy, theta, Sampler())
    with pytest.raises(ValueError, match="values has shape"):
        prefix_mean(law, law.probs[:, None])
