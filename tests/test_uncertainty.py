"""Cross-fitted tightness, floors and sample sizes against exact laws and exhaustive samples."""

import itertools
import math

import pytest
import torch

from ceilings import ceiling as dense
from ceilings.moments import ScoreMoments, flatten
from ceilings.scores import score_moments
from ceilings.testing import assert_equal, assert_within_standard_errors
from ceilings.transformer import TinyTransformer, TransformerConfig, enumeration
from ceilings.uncertainty import (
    cross_fit,
    cross_fitted_energy,
    cross_fitted_squares,
    cross_fitted_tightness,
    effective_sample_size,
    halves,
    noise_floor,
    permutation_floor,
    score_halves,
    weights_sample_size,
    with_permuted,
)

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def moments(scores, rewards, names=("reward",)):
    """Score moments of stored scores, one parameter called "theta"."""
    rewards = rewards if rewards.dim() == 2 else rewards[:, None]
    return ScoreMoments(
        scores={"theta": scores.sum(0)},
        squares={"theta": scores.square().sum(0)},
        reward_scores={"theta": rewards.T @ scores},
        reward_shift=torch.zeros(rewards.shape[1], dtype=F64),
        reward_sum=rewards.sum(0),
        reward_squares=rewards.square().sum(0),
        reward_names=names,
        count=len(scores),
        weight_sum=float(len(scores)),
    )


@pytest.fixture(scope="module")
def law():
    """A small policy, exact: probabilities, scores, and a reward that counts a token, with some noise of its own."""
    model = TinyTransformer(TransformerConfig(vocab_size=4, width=4, depth=1, heads=1, mlp_width=6))
    found = enumeration(model, (1,), 3)
    reward = found.rewards(lambda y: y.count(2) + 0.3 * y[0]).double()
    return found.probs, found.scores, reward


def draw(probs, size, seed):
    return torch.multinomial(probs, size, replacement=True, generator=generator(seed))


def samples(law, size, repeats, estimate, reward=None):
    """Values of an estimate of two halves over many samples."""
    probs, scores, exact = law
    found = []
    for seed in range(repeats):
        rows = draw(probs, size, seed)
        rewards = exact[rows] if reward is None else reward(seed, size)
        half = size // 2
        pair = [moments(scores[rows][part], rewards[part]) for part in (slice(half), slice(half, size))]
        found.append(flatten(estimate(*pair)))
    return torch.stack(found)


# Against the exact law


@pytest.mark.claim("prop-vacuous")
def test_cross_fitted_squares_find_the_exact_mean_and_in_sample_squares_do_not(law):
    probs, scores, reward = law
    exact = dense.signed_tightness(scores, reward, probs).square().nanmean()
    size, repeats = 256, 200  # the bias that is left falls as 1/N: a tenth at 64, a hundredth here
    fitted = samples(law, size, repeats, cross_fitted_squares).nanmean(1)
    naive = samples(law, size, repeats, lambda a, b: {"t": a.merge(b).tightness()["theta"].square()}).nanmean(
        1
    )
    error = fitted.std() / math.sqrt(repeats)
    assert_within_standard_errors(fitted.mean(), exact, error, k=4)
    assert naive.mean() - exact > 10 * naive.std() / math.sqrt(repeats)


def test_cross_fitted_tightness_is_right_where_the_sign_is_sure_and_never_too_large(law):
    probs, scores, reward = law
    exact = dense.tightness(scores, reward, probs)
    size, repeats = 256, 200
    fitted = samples(law, size, repeats, cross_fitted_tightness)
    mean, error = fitted.mean(0), fitted.std(0) / math.sqrt(repeats)
    sure = (exact * math.sqrt(size / 2) > 4) & ~exact.isnan()
    assert int(sure.sum()) > 10
    assert_within_standard_errors(mean[sure], exact[sure], error[sure], k=5)
    defined = ~(mean.isnan() | exact.isnan())
    assert float(((mean - exact) / error)[defined].max()) < 5


@pytest.mark.claim("prop-vacuous")
def test_a_reward_that_knows_nothing_has_cross_fitted_tightness_zero_and_in_sample_the_floor(law):
    size, repeats = 256, 200

    def coin(seed, n):
        return torch.rand(n, generator=generator(10_000 + seed), dtype=F64).round()

    fitted = samples(law, size, repeats, cross_fitted_tightness, coin).nanmean(1)
    naive = samples(law, size, repeats, lambda a, b: a.merge(b).tightness(), coin).nanmean(1)
    assert_within_standard_errors(fitted.mean(), 0.0, fitted.std() / math.sqrt(repeats), k=4)
    error = naive.std() / math.sqrt(repeats)
    assert_within_standard_errors(naive.mean(), noise_floor(size), error, k=4)
    assert naive.mean() > 5 * fitted.std() / math.sqrt(repeats)


def all_samples(options, size):
    """Every sample of some equally likely options."""
    return itertools.product(range(options), repeat=size)


def test_the_energy_is_unbiased_over_all_samples_and_the_square_of_one_estimate_is_not():
    scores = torch.tensor([[1.0, 0.5], [-2.0, 0.25], [1.0, -0.75]], dtype=F64)  # mean zero, equal odds
    rewards = torch.tensor([1.0, 0.0, 3.0], dtype=F64)
    g = dense.score_reward_covariance(scores, rewards)
    fitted, naive = [], []
    for rows in map(list, all_samples(3, 5)):
        a, b = (moments(scores[part], rewards[part]) for part in (rows[:2], rows[2:]))
        fitted.append(cross_fitted_energy(a, b)["theta"])
        naive.append((5 / 4 * a.merge(b).gradient()["theta"]).square())
    assert_equal(torch.stack(fitted).mean(0), g.square())
    assert float((torch.stack(naive).mean(0) - g.square()).min()) > 0.02


def test_without_any_relation_the_cross_fitted_tightness_is_zero_over_all_samples():
    scores = torch.tensor([[1.0], [-2.0], [1.0]], dtype=F64)
    rewards = torch.tensor([0.0, 1.0], dtype=F64)
    total = torch.zeros(1, dtype=F64)
    for rows in all_samples(6, 4):
        s, r = scores[[k % 3 for k in rows]], rewards[[k // 3 for k in rows]]
        total += cross_fitted_tightness(moments(s[:2], r[:2]), moments(s[2:], r[2:]))["theta"].nan_to_num()
    assert abs(float(total)) < 1e-9


# Floors


def test_the_floor_is_the_mean_of_a_half_normal():
    values = torch.randn(400, 200, generator=generator(), dtype=F64)
    other = torch.randn(400, 200, generator=generator(1), dtype=F64)
    rho = [abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) for a, b in zip(values, other, strict=True)]
    mean, error = torch.tensor(rho).mean(), torch.tensor(rho).std() / 20
    assert_within_standard_errors(mean, noise_floor(200), error, k=4)
    assert noise_floor(100, 3.0) == math.sqrt(3) * noise_floor(100)


@pytest.mark.claim("prop-vacuous")
def test_the_permutation_floor_is_the_formula_for_light_tails_and_far_below_for_rare_events():
    size, permutations = 64, 20
    light = torch.randn(size, 200, generator=generator(), dtype=F64)
    columns, names = with_permuted(
        torch.randn(size, generator=generator(1), dtype=F64), permutations, generator(2)
    )
    found = permutation_floor(moments(light, columns, names))["theta"].mean()
    assert abs(float(found) / noise_floor(size) - 1) < 0.05
    rare = torch.zeros(size, 20, dtype=F64)
    rare[torch.arange(20), torch.arange(20)] = 1
    one = torch.zeros(size, dtype=F64)
    one[0] = 1
    columns, names = with_permuted(one, 200, generator(3))
    found = permutation_floor(moments(rare, columns, names))["theta"].mean()
    # |ρ| is 1 with probability 1/N and 1/(N − 1) otherwise.
    assert_equal(found, 1 / size + (1 - 1 / size) / (size - 1), rtol=0.1)
    assert float(found) < noise_floor(size) / 2


def test_permutations_keep_the_values_and_the_groups():
    rewards = torch.arange(12, dtype=F64)
    columns, names = with_permuted(rewards, 3, generator())
    assert names == ("reward", "permuted-0", "permuted-1", "permuted-2")
    assert torch.equal(columns[:, 0], rewards)
    for k in (1, 2, 3):
        assert torch.equal(columns[:, k].sort().values, rewards) and not torch.equal(columns[:, k], rewards)
    groups = torch.tensor([2, 0, 1, 2, 0, 1, 2, 0, 1, 1, 0, 2])
    columns, _ = with_permuted(rewards, 200, generator(), groups)
    for g in (0, 1, 2):
        some = columns[groups == g]
        assert torch.equal(some[:, 1:].sort(0).values, rewards[groups == g][:, None].expand(-1, 200))
        # Every member comes to every place about equally often: 50 of 200 with standard deviation 6.
        counts = (some[:, 1:, None] == rewards[groups == g]).sum(1)
        assert int(counts.min()) > 25 and int(counts.max()) < 80


# Sample sizes


def test_the_effective_size_sees_the_kurtosis():
    size = 4000
    z = torch.randn(size, 300, generator=generator(), dtype=F64)
    reward = torch.randn(size, generator=generator(1), dtype=F64)
    half = size // 2

    def effective(scores):
        pair = [moments(scores[p], reward[p]) for p in (slice(half), slice(half, size))]
        return effective_sample_size(*pair)["theta"]

    # One degree of freedom an entry, 300 entries: a relative standard deviation of √(2/300) = 8 %.
    assert abs(effective(z) / size - 1) < 0.3
    # s = R z is uncorrelated with R and has κ = E R⁴ / (E R²)² = 3.
    assert abs(effective(reward[:, None] * z) * 3 / size - 1) < 0.4


def test_weights_count_for_less_than_they_are():
    assert weights_sample_size(torch.ones(7)) == 7
    assert weights_sample_size(torch.tensor([0.0, 5.0, 0.0])) == 1
    assert abs(weights_sample_size(torch.tensor([1.0, 1.0, 2.0])) - 16 / 6) < 1e-12
    assert weights_sample_size(torch.full((3,), 1e200, dtype=F64)) == 3


# Through the engine


def tiny():
    return TinyTransformer(TransformerConfig(vocab_size=7, width=8, depth=1, heads=2, mlp_width=12))


def rollouts(n=24):
    ids = torch.randint(7, (n, 7), generator=generator())
    mask = (torch.arange(7) > 2).expand(n, -1)
    return ids, mask, torch.randn(n, generator=generator(1), dtype=F64) + 3


def test_halves_and_permutations_pass_through_the_engine_together():
    ids, mask, rewards = rollouts()
    groups = torch.arange(24) // 4
    first, second = score_halves(
        tiny(), ids, mask, rewards, generator=generator(), groups=groups, permutations=2, batch_size=5
    )
    assert first.reward_names == ("reward", "permuted-0", "permuted-1")
    assert first.count == second.count == 12
    whole = score_moments(tiny(), ids, mask, rewards)
    merged = first.merge(second)
    assert_equal(flatten(merged.squares), flatten(whole.squares))
    assert_equal(flatten(merged.gradient("reward")), flatten(whole.gradient()), rtol=1e-9)
    assert abs(merged.reward_std("permuted-1") - whole.reward_std()) < 1e-12
    report = cross_fit(first, second)
    assert report.count == 24 and report.noise_floor == noise_floor(24)
    assert set(report.effective_size) == set(whole.names)
    assert not hasattr(report, "in_sample")
    for part in (report.tightness, report.squares, report.permuted, report.floor):
        assert {n: t.shape for n, t in part.items()} == {n: t.shape for n, t in whole.squares.items()}
    by_hand = flatten(cross_fitted_tightness(first, second, "permuted-0")) + flatten(
        cross_fitted_tightness(first, second, "permuted-1")
    )
    defined = ~by_hand.isnan()
    assert_equal(flatten(report.permuted)[defined], by_hand[defined] / 2)


def test_groups_stay_together_and_halves_are_random():
    groups = torch.tensor([5, 5, 9, 9, 9, 1, 1, 1, 7, 7])
    seen = set()
    for seed in range(40):
        first, second = halves(10, generator(seed), groups)
        assert sorted([*first.tolist(), *second.tolist()]) == list(range(10))
        labels = set(groups[first].tolist())
        assert not labels & set(groups[second].tolist()) and len(labels) == 2
        seen.add(frozenset(labels))
    assert len(seen) == 6
    first, second = halves(9, generator())
    assert (len(first), len(second)) == (4, 5)


def test_what_cannot_be_cross_fitted_is_refused():
    scores, rewards = torch.randn(4, 2, dtype=F64), torch.randn(4, dtype=F64)
    one, two = moments(scores, rewards), moments(scores, rewards, ("other",))
    ids, mask, r = rollouts(4)
    exact = score_moments(tiny(), ids, mask, r, weights=torch.full((4,), 0.25, dtype=F64))
    cases = [
        (lambda: noise_floor(0), "both must be positive"),
        (lambda: halves(3, generator()), "3 responses in 3 groups make no two halves"),
        (lambda: halves(4, generator(), torch.zeros(4)), "4 responses in 1 groups make no two halves"),
        (lambda: halves(4, generator(), torch.zeros(3)), r"groups have shape \(3,\) for 4 responses"),
        (lambda: with_permuted(torch.zeros(3, 1), 1, generator()), r"rewards have shape \(3, 1\)"),
        (lambda: with_permuted(torch.zeros(3), -1, generator()), "permutations is -1"),
        (lambda: permutation_floor(one), "no reward among \\('reward',\\) is permuted"),
        (lambda: cross_fitted_tightness(one, two), "the two halves differ in their reward_names"),
        (lambda: cross_fitted_squares(exact, exact), "these moments are exact expectations"),
        (lambda: cross_fitted_energy(one, moments(scores[:1], rewards[:1])), "a half has one response"),
        (lambda: weights_sample_size(torch.tensor([1.0, -1.0])), "finite and not negative"),
        (lambda: weights_sample_size(torch.zeros(2)), "not all zero"),
    ]
    for question, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            question()
        assert "\n" not in str(caught.value)


def test_the_halves_permute_within_the_groups():
    ids, mask, _ = rollouts()
    groups = torch.arange(24) // 4
    pair = score_halves(tiny(), ids, mask, groups.double().square(), generator=generator(), groups=groups)
    for half in pair:  # a reward that is the same within each group cannot change
        assert_equal(flatten(half.gradient("permuted-0")), flatten(half.gradient("reward")))
    pair = score_halves(tiny(), ids, mask, groups.double().square(), generator=generator())
    assert (
        float((flatten(pair[0].gradient("permuted-0")) - flatten(pair[0].gradient("reward"))).abs().max())
        > 0.1
    )
