"""Mean steps: every batch enumerated, and Adam itself run for long at fixed parameters."""

import itertools

import pytest
import torch

from ceilings.policies import AutoregressivePolicy
from ceilings.steps import adam_mean_step, batch_second_moment, score_reward_kurtosis
from ceilings.testing import assert_equal, assert_within_standard_errors


def law(seed, width=3):
    generator = torch.Generator().manual_seed(seed)
    found = AutoregressivePolicy.random(3, 2, width, generator, eos=0).enumerate(
        torch.randn(width, generator=generator, dtype=torch.float64)
    )
    return found.probs, found.scores, torch.randn(len(found.probs), generator=generator, dtype=torch.float64)


@pytest.mark.claim("prop-sgd")
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_second_moment_of_a_batch_is_that_over_all_batches(batch):
    p, s, r = law(0)
    centred = r - p @ r
    total = torch.zeros(3, dtype=torch.float64)
    for rows in itertools.product(range(len(p)), repeat=batch):
        chance = float(p[list(rows)].prod())
        total += chance * sum(centred[row] * s[row] for row in rows).square() / batch**2
    assert_equal(batch_second_moment(s, r, p, batch=batch), total)


@pytest.mark.claim("prop-adam")
def test_kurtosis_term_by_term():
    p, s, r = law(1)
    mean = sum(float(p[y] * r[y]) for y in range(len(p)))
    for i in range(3):
        raw = sum(float(p[y] * (r[y] - mean) ** 2 * s[y, i] ** 2) for y in range(len(p)))
        variance = sum(float(p[y] * (r[y] - mean) ** 2) for y in range(len(p)))
        fisher = sum(float(p[y] * s[y, i] ** 2) for y in range(len(p)))
        assert_equal(score_reward_kurtosis(s, r, p)[i], raw / variance / fisher)


@pytest.mark.claim("prop-adam")
def test_binary_reward_with_equal_scores_in_both_classes_or_at_one_half_has_kurtosis_one():
    s = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
    r = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    for p in ([0.1, 0.1, 0.4, 0.4], [0.25] * 4):
        assert_equal(score_reward_kurtosis(s, r, torch.tensor(p, dtype=torch.float64)), 1.0)
    uneven = torch.tensor([[3.0], [-3.0], [1.0], [-1.0]], dtype=torch.float64)
    assert_equal(score_reward_kurtosis(uneven, r, torch.full((4,), 0.25, dtype=torch.float64)), 1.0)
    rare = torch.tensor([0.1, 0.1, 0.4, 0.4], dtype=torch.float64)
    # E[(R − p)² s²] = .2·.64·9 + .8·.04·1 = 1.184; σ²F = .16·(.2·9 + .8) = .416
    assert_equal(score_reward_kurtosis(uneven, r, rare), 1.184 / 0.416)


@pytest.mark.claim("prop-adam")
def test_adam_at_fixed_parameters_steps_as_predicted():
    """512 copies of each parameter, one torch optimiser, gradients of independent batches."""
    p, s, r = law(2)
    batch, copies, rate = 8, 512, 1e-3
    weight = torch.nn.Parameter(torch.zeros(copies, 3, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=rate, betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(5)
    signal = (r - p @ r)[:, None] * s
    marks = []
    for _ in range(3000):
        rows = torch.multinomial(p, copies * batch, replacement=True, generator=generator).view(copies, batch)
        weight.grad = -signal[rows].mean(1)
        adam.step()
        marks.append(weight.detach().clone())
    mean = (marks[-1] - marks[999]) / 2000
    predicted = adam_mean_step(s, r, p, batch=batch, rate=rate)
    error = mean.std(0) / copies**0.5 + 0.02 * predicted.abs()  # β2 < 1 leaves a bias below 2 %
    assert_within_standard_errors(mean.mean(0), predicted, error, k=3)


@pytest.mark.claim("prop-adam")
def test_ceiling_divides_out_and_a_large_epsilon_lets_it_back_in():
    p, s, r = law(3)
    scaled = s * torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64)
    for batch in (1, 64):
        plain = adam_mean_step(s, r, p, batch=batch)
        assert_equal(adam_mean_step(scaled, 7 * r, p, batch=batch), plain)
    large = adam_mean_step(scaled, r, p, batch=4, epsilon=1e9)
    assert_equal(large, (p * (r - p @ r)) @ scaled / 1e9, rtol=1e-6)


def test_no_ceiling_no_step_to_speak_of():
    p, s, r = law(4)
    s = torch.cat([s, torch.zeros(len(s), 1, dtype=torch.float64)], 1)
    assert batch_second_moment(s, r, p, batch=2)[3] == 0
    assert bool(adam_mean_step(s, r, p, batch=2).isnan()[3])
    assert bool(score_reward_kurtosis(s, r, p).isnan()[3])


def test_an_empty_batch_is_refused():
    p, s, r = law(5)
    with pytest.raises(ValueError, match="at least one response"):
        batch_second_moment(s, r, p, batch=0)
