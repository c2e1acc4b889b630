"""Parts of the change of a ceiling, against hand formulas and an enumerated policy."""

from __future__ import annotations

import math

import pytest
import torch

from ceilings.ceiling import gradient_ceiling, reward_variance, score_reward_covariance
from ceilings.ceiling_change import ceiling_change, jackknife
from ceilings.policies import AutoregressivePolicy
from ceilings.testing import assert_equal


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_both_parts_by_hand():
    found = ceiling_change((0.5, doubles(4.0, 1.0, 1.0)), (0.25, doubles(1.0, 1.0, 4.0)))
    half = math.log(2)
    assert_equal(found.reward, -half)
    assert_equal(found.fisher, doubles(-half, 0.0, half))
    assert_equal(found.total, doubles(-2 * half, -half, 0.0), atol=1e-15)
    assert_equal(found.share, 1.0)  # the parts of the Fisher information cancel in the mean
    assert_equal(found.led_by_reward, 2 / 3)  # equal parts are led by neither


def test_both_halves_of_a_change_that_is_shared():
    found = ceiling_change((1.0, doubles(1.0, 9.0)), (0.1, doubles(0.01, 0.09)))
    assert_equal(found.share, 0.5)
    assert float(found.led_by_reward) in (0.0, 0.5, 1.0)  # a tie, decided by rounding


def test_nothing_has_no_share():
    unmoved = ceiling_change((1.0, doubles(2.0, 3.0)), (1.0, doubles(2.0, 3.0)))
    assert bool(unmoved.share.isnan()) and float(unmoved.led_by_reward) == 0


def test_the_parts_add_up_to_the_change_of_the_ceilings():
    generator = torch.Generator().manual_seed(0)
    policy = AutoregressivePolicy.random(3, 3, 6, generator, eos=0)
    laws = [policy.enumerate(torch.randn(6, generator=generator, dtype=torch.float64)) for _ in range(2)]
    rewards = torch.randn(len(laws[0].probs), generator=generator, dtype=torch.float64)
    states = [(reward_variance(rewards, law.probs).sqrt(), law.probs @ law.scores.square()) for law in laws]
    ceilings = [gradient_ceiling(law.scores, rewards, law.probs) for law in laws]
    assert_equal(ceiling_change(*states).total, (ceilings[1] / ceilings[0]).log())


@pytest.mark.claim("prop-sharpening")
@pytest.mark.parametrize("best", [1, 3])
def test_what_failures_make_of_gradient_spread_and_fisher_information(best):
    """Parts 1 and 2 on policies with shared parameters, the classes drawn at random."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        policy = AutoregressivePolicy.random(3, 2, 5, generator, eos=0)
        law = policy.enumerate(torch.randn(5, generator=generator, dtype=torch.float64))
        short = 0.1 + torch.rand(len(law.probs), generator=generator, dtype=torch.float64)
        right = torch.randperm(len(short), generator=generator)[:best]
        short[right] = 0
        failed, s = short > 0, law.scores
        eps = law.probs[failed].sum()
        q = law.probs[failed] / eps
        gradient = score_reward_covariance(s, 7 - short, law.probs)
        assert_equal(gradient, -eps * (q * short[failed]) @ s[failed])
        variance = eps * (q @ short[failed].square() - eps * (q @ short[failed]).square())
        assert_equal(reward_variance(7 - short, law.probs), variance)
        fisher = law.probs @ s.square()
        within = law.probs[right] @ s[right].square()
        assert_equal(fisher, within + eps * q @ s[failed].square())
        if best == 1:
            assert_equal(fisher, eps * (q @ s[failed].square() + eps / (1 - eps) * (q @ s[failed]).square()))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((1.0, doubles(1.0, 2.0)), (1.0, doubles(1.0)), "give one model's"),
        ((0.0, doubles(1.0)), (1.0, doubles(1.0)), "not positive"),
        ((1.0, doubles(1.0)), (1.0, doubles(0.0)), "not positive"),
        ((1.0, doubles(1.0)), (1.0, doubles(math.nan)), "not positive"),
    ],
)
def test_what_has_no_logarithm_is_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        ceiling_change(before, after)


def test_the_jackknife_takes_off_a_bias_of_one_over_n():
    truth, bias, n = 3.0, 5.0, 64
    assert_equal(jackknife(truth + bias / n, (truth + 2 * bias / n, truth + 2 * bias / n)), truth)


def test_the_jackknife_of_the_logarithm_of_a_variance():
    """Mean squares of N normal numbers: E log is about −1/N, and what is left is far smaller."""
    generator = torch.Generator().manual_seed(0)
    squares = torch.randn(20_000, 2, 32, generator=generator, dtype=torch.float64).square().mean(2)
    plain, halves = squares.mean(1).log().mean(), squares.log().mean(0)
    assert_equal(plain, -1 / 64, atol=4e-3, rtol=0)
    assert abs(float(jackknife(plain, (halves[0], halves[1])))) < 4e-3
