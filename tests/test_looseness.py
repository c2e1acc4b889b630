"""Joint looseness: each quantity against another way to compute it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ceilings import looseness
from ceilings.ceiling import explained_reward_variance, tightness
from ceilings.fisher import exact_diagonal_fisher, fisher_matrix, score_correlation_matrix
from ceilings.policies import AutoregressivePolicy, Enumeration, SoftmaxPolicy
from ceilings.prefix_tree import enumeration
from ceilings.testing import assert_at_most, assert_equal
from ceilings.transformer import TinyTransformer, TransformerConfig

SEEDS = range(24)


def random_case(seed: int) -> tuple[Enumeration, torch.Tensor]:
    """A policy over 15 responses with fewer or more parameters than that, and a reward."""
    generator = torch.Generator().manual_seed(seed)
    size = (3, 6, 14, 30)[seed % 4]
    policy = AutoregressivePolicy.random(3, 3, size, generator, eos=0)
    law = policy.enumerate(torch.randn(size, generator=generator, dtype=torch.float64) / size**0.5)
    return law, torch.randn(len(law.probs), generator=generator, dtype=torch.float64)


@pytest.mark.claim("thm-joint")
@pytest.mark.parametrize("seed", SEEDS)
def test_squared_direction_tightness_adds_up_to_the_explained_share(seed):
    law, reward = random_case(seed)
    rho, eigenvalues = looseness.direction_tightness(law.scores, reward, law.probs)
    fisher = fisher_matrix(law.probs, law.scores)
    gradient = (law.probs * reward) @ law.scores
    by_inverse = gradient @ torch.linalg.pinv(fisher, hermitian=True, rtol=1e-10) @ gradient
    centred = reward - law.probs @ reward
    root = law.probs.sqrt().numpy()
    fitted = np.linalg.lstsq(root[:, None] * law.scores.numpy(), root * centred.numpy(), rcond=1e-12)[0]
    variance = law.probs @ centred.square()
    assert_equal(rho.square().sum(), by_inverse / variance, rtol=1e-7)
    assert_equal(
        rho.square().sum(),
        1 - law.probs @ (centred - law.scores @ torch.from_numpy(fitted)).square() / variance,
        rtol=1e-9,
    )
    assert_equal(rho.square().sum(), explained_reward_variance(law.scores, reward, law.probs), rtol=1e-10)
    assert_equal(eigenvalues, torch.linalg.eigvalsh(fisher).flip(0)[: len(rho)], rtol=1e-10)
    assert_at_most(rho.square().sum(), 1.0)
    assert len(rho) == min(law.scores.shape[1], 14)


@pytest.mark.claim("thm-joint")
@pytest.mark.parametrize("seed", SEEDS[:8])
def test_direction_tightness_is_the_correlation_with_the_score_along_each_eigenvector(seed):
    law, reward = random_case(seed)
    rho, _ = looseness.direction_tightness(law.scores, reward, law.probs)
    _, vectors = torch.linalg.eigh(fisher_matrix(law.probs, law.scores))
    along = law.scores @ vectors.flip(1)[:, : len(rho)]
    assert_equal(rho.abs(), tightness(along, reward, law.probs), rtol=1e-7)


@pytest.mark.claim("thm-joint")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_forced_rms_bounds_every_reward_and_one_attains_it(seed):
    law, reward = random_case(seed)
    correlation = score_correlation_matrix(law.probs, law.scores)
    bound = looseness.forced_rms(law.scores, law.probs)
    assert_equal(bound, (torch.linalg.eigvalsh(correlation)[-1] / len(correlation)).sqrt(), rtol=1e-10)
    assert_at_most(looseness.rms_tightness(law.scores, reward, law.probs), bound)
    best = looseness.tightest_reward(law.scores, law.probs)
    assert_equal(looseness.rms_tightness(law.scores, best, law.probs), bound, rtol=1e-10)
    assert_equal(law.probs @ best.square(), 1.0)
    assert_equal(law.probs @ best, 0.0, atol=1e-12)
    assert_at_most(len(looseness.fisher_spectrum(law.scores, law.probs)) ** -0.5, bound)


@pytest.mark.claim("thm-joint")
@pytest.mark.claim("thm-energy")
@pytest.mark.parametrize("seed", SEEDS)
def test_weighted_tightness_and_the_energy_bound(seed):
    law, reward = random_case(seed)
    fisher = exact_diagonal_fisher(law.probs, law.scores)
    rho = tightness(law.scores, reward, law.probs)
    weighted = looseness.fisher_weighted_tightness(law.scores, reward, law.probs)
    assert_equal(weighted, (rho.square() * fisher).sum() / fisher.sum(), rtol=1e-10)
    top = torch.linalg.eigvalsh(fisher_matrix(law.probs, law.scores))[-1]
    assert_equal(looseness.fisher_concentration(law.scores, law.probs), top / fisher.sum(), rtol=1e-10)
    assert_at_most(weighted, top / fisher.sum())
    gradient = (law.probs * reward) @ law.scores
    for size in range(1, min(4, len(fisher))):
        for chosen in itertools.islice(itertools.combinations(range(len(fisher)), size), 10):
            subset = torch.zeros(len(fisher), dtype=torch.bool)
            subset[list(chosen)] = True
            outside = [i for i in range(len(fisher)) if i not in chosen]
            share = sum(float(gradient[i]) ** 2 for i in outside) / sum(float(g) ** 2 for g in gradient)
            bound = looseness.outside_share_bound(law.scores, reward, subset, law.probs)
            assert_equal(looseness.outside_share(gradient.square(), subset), share)
            assert_equal(bound, sum(float(fisher[i]) for i in outside) / float((rho.square() * fisher).sum()))
            assert_at_most(share, bound)


@pytest.mark.claim("thm-joint")
def test_two_responses_force_no_looseness():
    policy = SoftmaxPolicy(lambda t: torch.stack([t.sin().sum(), t.exp().sum()]))
    law = policy.enumerate(torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64))
    reward = torch.tensor([0.0, 5.0], dtype=torch.float64)
    assert_equal(tightness(law.scores, reward, law.probs), torch.ones(3))
    assert_equal(looseness.forced_rms(law.scores, law.probs), 1.0)


@pytest.mark.claim("thm-joint")
def test_eight_scores_of_rank_eight_can_all_be_nearly_tight():
    """s_i = R + 0.1 e_i with orthonormal R, e_i: ρ_i² = 1/1.01 by hand, λ_max(C) = (8 + 0.01)/1.01."""
    sign = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    walsh = torch.kron(torch.kron(sign, sign), torch.kron(sign, sign))  # orthogonal, first row constant
    reward, noise = walsh[1], walsh[2:10]
    scores = (reward + 0.1 * noise).T
    law = SoftmaxPolicy(lambda t: scores @ t).enumerate(torch.zeros(8, dtype=torch.float64))
    assert_equal(law.scores, scores)
    assert_equal(looseness.rms_tightness(law.scores, reward, law.probs), math.sqrt(1 / 1.01))
    assert_equal(looseness.forced_rms(law.scores, law.probs), math.sqrt(8.01 / 1.01 / 8))
    assert len(looseness.fisher_spectrum(law.scores, law.probs)) == 8


@pytest.mark.claim("cor-average-reward")
@pytest.mark.parametrize("seed", SEEDS[:8])
def test_over_an_orthonormal_basis_of_rewards_each_parameter_spends_one(seed):
    law, _ = random_case(seed)
    root = law.probs.sqrt()
    basis = torch.linalg.qr(torch.cat([root[:, None], torch.eye(15, dtype=torch.float64)], dim=1)[:, :15]).Q[
        :, 1:
    ]
    squares = sum(tightness(law.scores, phi / root, law.probs).square() for phi in basis.T)
    assert_equal(squares, torch.ones(law.scores.shape[1]))


def test_without_weights_every_row_counts_the_same():
    law, reward = random_case(1)
    even = torch.full_like(law.probs, 1 / 15)
    for function in (looseness.rms_tightness, looseness.fisher_weighted_tightness):
        assert_equal(function(law.scores, reward), function(law.scores, reward, even))
    for function in (looseness.forced_rms, looseness.fisher_concentration, looseness.fisher_spectrum):
        assert_equal(function(law.scores), function(law.scores, even))


def test_a_parameter_that_does_nothing_is_left_out_of_the_mean():
    law, reward = random_case(1)
    padded = torch.cat([law.scores, torch.zeros(15, 3, dtype=torch.float64)], dim=1)
    for function in (looseness.rms_tightness, looseness.fisher_weighted_tightness):
        assert_equal(function(padded, reward, law.probs), function(law.scores, reward, law.probs))
    assert_equal(looseness.forced_rms(padded, law.probs), looseness.forced_rms(law.scores, law.probs))


@pytest.mark.claim("thm-joint")
@pytest.mark.parametrize("seed", SEEDS[:8])
def test_a_parameter_that_shifts_all_logits_alike_has_no_ceiling_though_its_score_is_rounding(seed):
    generator = torch.Generator().manual_seed(seed)
    policy = AutoregressivePolicy.random(3, 3, 6, generator, eos=0)
    policy.features[..., 2] = torch.randn(policy.features.shape[0], 1, generator=generator)
    law = policy.enumerate(torch.randn(6, generator=generator, dtype=torch.float64))
    assert 0 < float(law.scores[:, 2].abs().max()) < 1e-14  # zero by thm-logits, rounding here
    keep = [0, 1, 3, 4, 5]
    alive, reward = law.scores[:, keep], torch.randn(15, generator=generator, dtype=torch.float64)
    assert looseness.varying_scores(law.scores, law.probs).nonzero()[:, 0].tolist() == keep
    correlation = score_correlation_matrix(law.probs, alive)
    bound = (torch.linalg.eigvalsh(correlation)[-1] / 5).sqrt()
    assert_equal(looseness.forced_rms(law.scores, law.probs), bound, rtol=1e-10)
    rho = tightness(alive, reward, law.probs)
    assert_equal(looseness.rms_tightness(law.scores, reward, law.probs), rho.square().mean().sqrt())
    best = looseness.tightest_reward(law.scores, law.probs)
    assert_equal(looseness.rms_tightness(alive, best, law.probs), bound, rtol=1e-10)


def test_parameters_of_a_decoder_without_a_ceiling_are_those_that_no_probability_depends_on():
    """Every parameter is moved far and all responses are enumerated again: does any probability change?

    After the prompt 1 1 attention averages two equal values, whatever the queries and keys.
    """
    model = TinyTransformer(TransformerConfig(4, 4, 1, 1, 8), seed=3)
    law = enumeration(model, (1, 1), 1, 0)
    varies = looseness.varying_scores(law.scores, law.probs)
    changes = []
    with torch.no_grad():
        for parameter in model.parameters():
            for place in range(parameter.numel()):
                entry = parameter.view(-1)[place : place + 1]
                before = entry.clone()
                moved = []
                for step in (0.7, -0.4):
                    entry.copy_(before + step)
                    moved.append((enumeration(model, (1, 1), 1, 0).probs - law.probs).abs().max())
                entry.copy_(before)
                changes.append(max(moved))
    change = torch.stack(changes)
    dead = law.scores[:, change < 1e-13]
    assert dead.shape[1] == 2 * 4 * 4  # queries and keys
    assert 0 < float(dead.abs().max()) < 1e-14
    assert torch.equal(varies, change > 1e-13)


def test_a_small_ceiling_is_a_ceiling():
    law, reward = random_case(1)
    for scale, counted in ((1e-9, True), (1e-15, False)):
        scores = torch.cat([law.scores, scale * law.scores[:, :1]], dim=1)
        assert bool(looseness.varying_scores(scores, law.probs)[-1]) is counted


def test_the_top_set_has_the_largest_ceilings_and_is_never_empty():
    law, _ = random_case(2)
    fisher = exact_diagonal_fisher(law.probs, law.scores)
    mask = looseness.top_ceilings(law.scores, 0.3, law.probs)
    assert int(mask.sum()) == round(0.3 * 14)
    assert float(fisher[mask].min()) >= float(fisher[~mask].max())
    assert int(looseness.top_ceilings(law.scores, 0.001, law.probs).sum()) == 1


def test_a_constant_reward_has_no_tightness():
    law, reward = random_case(1)
    flat = torch.full_like(reward, 0.1)  # its computed variance is rounding, not zero
    assert bool(looseness.fisher_weighted_tightness(law.scores, flat, law.probs).isnan())
    assert bool(looseness.rms_tightness(law.scores, flat, law.probs).isnan())
    mask = looseness.top_ceilings(law.scores, 0.2, law.probs)
    assert bool(looseness.outside_share_bound(law.scores, flat, mask, law.probs).isnan())


def test_errors_say_what_is_wrong():
    law, reward = random_case(1)
    with pytest.raises(ValueError, match="the reward is constant"):
        looseness.direction_tightness(law.scores, torch.ones_like(reward), law.probs)
    with pytest.raises(ValueError, match="no score varies"):
        looseness.forced_rms(torch.zeros_like(law.scores), law.probs)
    with pytest.raises(ValueError, match="share is 0"):
        looseness.top_ceilings(law.scores, 0, law.probs)
    for subset in (torch.ones(6, dtype=torch.long), torch.ones(5, dtype=torch.bool)):
        with pytest.raises(ValueError, match="boolean mask"):
            looseness.outside_share(torch.ones(6), subset)
    with pytest.raises(ValueError, match="not 1"):
        looseness.forced_rms(law.scores, law.probs / 2)
