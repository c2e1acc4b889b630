"""What batches show of a known tightness: against the definitions, the engine's estimators, and all batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ceilings import estimation, uncertainty
from ceilings.ceiling import signed_tightness, tightness
from ceilings.policies import AutoregressivePolicy
from ceilings.testing import assert_at_most, assert_equal, assert_within_standard_errors
from test_uncertainty import moments

F64 = torch.float64


def law_of(seed, size=6):
    generator = torch.Generator().manual_seed(seed)
    policy = AutoregressivePolicy.random(3, 3, size, generator, eos=0)
    law = policy.enumerate(torch.randn(size, generator=generator, dtype=F64))
    return law.scores, torch.randn(15, generator=generator, dtype=F64), law.probs


def test_kurtosis_is_the_ratio_it_is_defined_by():
    s, r, p = law_of(0)
    centred = r - (p * r).sum()
    for i in range(s.shape[1]):
        top = sum(float(p[y] * centred[y] ** 2 * s[y, i] ** 2) for y in range(15))
        expected = top / float((p * centred**2).sum() * (p * s[:, i] ** 2).sum())
        assert float(estimation.joint_kurtosis(s, r, p)[i]) == pytest.approx(expected, rel=1e-12)


def test_independent_reward_and_score_have_kurtosis_one_and_a_straight_line_has_no_noise():
    s = torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=F64)[:, None]
    r, p = torch.tensor([0.0, 3.0, 0.0, 3.0], dtype=F64), torch.full((4,), 0.25, dtype=F64)
    assert_equal(estimation.joint_kurtosis(s, r, p), 1.0)
    assert_equal(estimation.correlation_variance(s, r, p), 1.0)
    s, _, p = law_of(1)
    assert_equal(estimation.correlation_variance(s, 2 - 3 * s[:, 0], p)[0], 0.0, atol=1e-12)


@pytest.mark.claim("prop-vacuous")
def test_the_variance_of_a_sampled_correlation_is_seen_in_batches():
    s, r, p = law_of(2)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(p, 4000 * 1000, replacement=True, generator=generator).view(1000, 4000)
    seen = torch.stack([signed_tightness(s[y], r[y]) for y in drawn])
    ratio = 4000 * seen.var(0) / estimation.correlation_variance(s, r, p)
    # A sample variance of B normal values has a relative standard error of √(2/B); six of them are compared.
    assert_within_standard_errors(ratio, torch.ones_like(ratio), math.sqrt(2 / 1000), k=4)


def test_folded_normal_mean_is_the_integral():
    x = torch.linspace(-12, 12, 200_001, dtype=F64)
    density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    for rho, variance, count in ((0.0, 3.0, 64), (0.3, 1.0, 16), (-0.1, 0.5, 100)):
        expected = torch.trapezoid((rho + math.sqrt(variance / count) * x).abs() * density, x)
        found = estimation.in_sample_mean(
            torch.tensor([rho], dtype=F64), torch.tensor([variance], dtype=F64), count
        )
        assert_equal(found[0], expected, rtol=1e-6)
    floor = estimation.in_sample_mean(torch.zeros(1, dtype=F64), torch.tensor([3.0], dtype=F64), 64)
    assert_equal(floor[0], uncertainty.noise_floor(64, 3.0))


@pytest.mark.claim("cor-cross-fit")
def test_needed_count_is_where_the_cross_fitted_mean_has_lost_that_share():
    rho = torch.tensor([0.02, -0.2, 0.7], dtype=F64)
    kappa = torch.tensor([1.0, 4.0, 2.0], dtype=F64)
    for lost in (0.01, 0.05, 0.5):
        for i, count in enumerate(estimation.needed_count(rho, kappa, lost)):
            for n, sign in ((math.floor(float(count)) - 1, 1), (math.ceil(float(count)) + 1, -1)):
                if n < 2:
                    continue
                mean = estimation.cross_fitted_mean(rho[i : i + 1], kappa[i : i + 1], n)
                assert sign * (float(rho[i].abs()) * (1 - lost) - float(mean)) > 0
    assert float(estimation.needed_count(torch.zeros(1, dtype=F64), kappa[:1])) == math.inf


def test_batches_give_what_the_estimators_of_the_engine_give():
    """The same responses, once by how often each occurs and once one by one."""
    s, r, p = law_of(3)
    found = estimation.draw_batches(s, r, p, 20, batches=7, generator=torch.Generator().manual_seed(5))
    drawn = torch.multinomial(p, 140, replacement=True, generator=torch.Generator().manual_seed(5)).view(
        7, 20
    )
    for k, y in enumerate(drawn):
        first, second = (moments(s[part], r[part]) for part in (y[:10], y[10:]))
        assert_equal(found.in_sample[k], tightness(s[y], r[y]))
        assert_equal(found.cross_fitted[k], uncertainty.cross_fitted_tightness(first, second)["theta"])
        assert_equal(found.squares[k], uncertainty.cross_fitted_squares(first, second)["theta"])


def test_shuffled_batches_keep_rewards_and_lose_the_pairs():
    s = torch.linspace(-1, 1, 15, dtype=F64)[:, None]
    r, p = s[:, 0] + 2, torch.full((15,), 1 / 15, dtype=F64)  # as tight as can be
    generator = torch.Generator().manual_seed(0)
    real = estimation.draw_batches(s, r, p, 64, batches=50, generator=generator)
    null = estimation.draw_batches(s, r, p, 64, batches=400, generator=generator, shuffled=True)
    assert_equal(real.in_sample[:, 0], torch.ones(50, dtype=F64))
    rms = null.in_sample[:, 0].square().mean().sqrt()
    # Permuted within halves of 32 of about equal spread: each half has the mean square 1/31, their mean half of it.
    assert 0.9 / 8 < float(rms) < 1.1 / 8
    assert abs(float(null.cross_fitted[:, 0].mean())) < 4 * float(null.cross_fitted[:, 0].std()) / 20


def test_a_batch_without_variety_gives_nan():
    s, _, p = law_of(5)
    drawn = estimation.draw_batches(
        s, torch.full((15,), 0.3, dtype=F64), p, 8, batches=3, generator=torch.Generator().manual_seed(0)
    )
    assert bool(
        drawn.in_sample.isnan().all() and drawn.cross_fitted.isnan().all() and drawn.squares.isnan().all()
    )


@pytest.mark.claim("prop-vacuous")
def test_the_mean_square_over_all_pairings_depends_on_nothing():
    generator = torch.Generator().manual_seed(0)
    for n in (2, 3, 5, 7):
        s, r = torch.randn(n, 2, generator=generator, dtype=F64).exp() ** 3, torch.zeros(n, dtype=F64)
        r[0] = 1.0  # one success, heavy scores
        every = torch.stack([tightness(s, r[list(order)]) for order in itertools.permutations(range(n))])
        assert_equal(every.square().mean(0), torch.full((2,), 1 / (n - 1), dtype=F64))


@pytest.mark.claim("cor-cross-fit")
def test_over_all_pairs_of_halves_the_product_is_unbiased_and_the_sign_never_adds():
    """Every pair of halves of three responses, each with its probability: no sampling."""
    s, r, p = law_of(6)
    s, r, p = s[:4], r[:4], p[:4] / p[:4].sum()
    s = s - p @ s
    triples = torch.tensor(list(itertools.product(range(4), repeat=3)))
    weight = p[triples].prod(1)
    half = ((r[triples] - r[triples].mean(1, keepdim=True))[..., None] * s[triples]).sum(1) / 2
    g = (p * (r - p @ r)) @ s
    assert_equal(weight @ half, g)
    assert_equal(torch.einsum("a,b,ai,bi->i", weight, weight, half, half), g.square())
    wrong = weight @ ((half.sign() * g.sign() < 0).double() + (half == 0).double() / 2)
    signed = torch.einsum("a,b,ai,bi->i", weight, weight, half.sign().double(), half)
    assert_equal(signed, g.abs() * (1 - 2 * wrong))
    assert_at_most(signed, g.abs())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: estimation.in_sample_mean(x, x, 0), "count is 0"),
        (lambda x: estimation.cross_fitted_mean(x, x, 1), "two halves"),
        (lambda x: estimation.needed_count(x, x, 0.0), "strictly between"),
        (lambda x: estimation.needed_count(x, x, 1.0), "strictly between"),
        (lambda x: draw(5, 1), "even count"),
        (lambda x: draw(2, 1), "even count"),
        (lambda x: draw(4, 0), "a batch"),
    ],
)
def test_impossible_questions_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(1, dtype=F64))


def draw(count, batches):
    s, r, p = law_of(0)
    return estimation.draw_batches(
        s, r, p, count, batches=batches, generator=torch.Generator().manual_seed(0)
    )
