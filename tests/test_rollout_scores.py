"""Scores of sampled responses at chosen parameters, and the tightness that halves of them agree on."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ceilings.ceiling import tightness
from ceilings.policies import AutoregressivePolicy
from ceilings.reference import per_sequence_scores
from ceilings.rollout_scores import response_scores, split_tightness
from ceilings.scores import score_moments
from ceilings.testing import assert_equal
from ceilings.uncertainty import cross_fitted_squares, cross_fitted_tightness

PROMPT, RESPONSES = (5, 2), ((3, 1), (7,), (3, 1), (4, 4, 6), (7,), (2, 9), (8, 1), (6, 6, 6))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).double().eval()


def padded():
    length = len(PROMPT) + max(map(len, RESPONSES))
    ids = torch.zeros(len(RESPONSES), length, dtype=torch.long)
    mask = torch.zeros(len(RESPONSES), length, dtype=torch.bool)
    for row, response in enumerate(RESPONSES):
        end = len(PROMPT) + len(response)
        ids[row, :end] = torch.tensor(PROMPT + response)
        mask[row, len(PROMPT) : end] = True
    return ids, mask


def everything(model):
    return {name: torch.arange(p.numel()) for name, p in model.named_parameters()}


def test_scores_are_those_of_the_responses_one_by_one(model):
    generator = torch.Generator().manual_seed(1)
    where = {n: torch.randperm(len(w), generator=generator)[:5] for n, w in everything(model).items()}
    found = response_scores(model, PROMPT, RESPONSES, where)
    expected = per_sequence_scores(model, *padded())
    chosen = [s.flatten(1)[:, where[name]] for name, s in expected.items()]
    assert_equal(found, torch.cat(chosen, 1), rtol=1e-5)  # norms of this architecture compute in float32
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[4])
    assert all(p.grad is None for p in model.parameters())


def test_one_split_gives_what_two_halves_of_the_engine_give(model):
    ids, mask = padded()
    rewards = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.5, 0.5, 1.0, -1.0], dtype=torch.float64)
    scores = response_scores(model, PROMPT, RESPONSES, everything(model))
    found = split_tightness(scores, rewards[None], 1, torch.Generator().manual_seed(3))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    halves = [score_moments(model, ids[half], mask[half], rewards[half]) for half in (order[:4], order[4:])]
    together = halves[0].merge(halves[1])
    kept = {name: f > 1e-24 * max(float(g.max()) for g in together.diagonal_fisher().values())
            for name, f in together.diagonal_fisher().items()}  # fmt: skip
    for value, entries in (
        (found.squares, cross_fitted_squares(*halves)),
        (found.mean, cross_fitted_tightness(*halves)),
        (found.in_sample, {name: t.square() for name, t in together.tightness().items()}),
    ):
        expected = torch.cat([entries[name][kept[name]] for name in entries])
        assert len(expected) == found.parameters
        assert_equal(value[0], expected.mean(), rtol=1e-4)


def sample(law, count, generator):
    return torch.multinomial(law.probs, count, replacement=True, generator=generator)


def test_squares_estimate_the_exact_mean_and_what_the_sample_says_of_itself_is_too_much():
    generator = torch.Generator().manual_seed(0)
    policy = AutoregressivePolicy.random(3, 3, 6, generator, eos=0)
    law = policy.enumerate(torch.randn(6, generator=generator, dtype=torch.float64))
    reward = torch.randn(15, generator=generator, dtype=torch.float64)
    truth = float(tightness(law.scores, reward, law.probs).square().mean())
    found = []
    for _ in range(300):
        drawn = sample(law, 64, generator)
        dealt = reward[drawn][torch.randperm(64, generator=generator)]
        found.append(split_tightness(law.scores[drawn], torch.stack([reward[drawn], dealt]), 4, generator))
    squares = torch.stack([f.squares for f in found])
    error = squares.std(0) / math.sqrt(300)
    assert abs(float(squares[:, 0].mean()) - truth) < 4 * float(error[0]) + truth * 2 / 64
    assert abs(float(squares[:, 1].mean())) < 4 * float(error[1])
    in_sample = torch.stack([f.in_sample for f in found]).mean(0)
    assert float(in_sample[1]) > 0.9 / 64  # noise: ρ̂² has the mean 1/(N − 1) where ρ = 0
    assert float(in_sample[0]) > truth + 4 * float(error[0])


def test_a_reward_that_is_the_score_is_tight_and_a_constant_one_is_undefined():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2000, 1, generator=generator, dtype=torch.float64)
    rewards = torch.stack([3 * scores[:, 0] + 2, torch.full((2000,), 0.1, dtype=torch.float64)])
    found = split_tightness(scores, rewards, 50, generator)
    assert abs(float(found.squares[0]) - 1) < 0.05 and abs(float(found.mean[0]) - 1) < 0.05
    assert_equal(found.in_sample[0], 1.0)
    assert all(bool(part[1].isnan()) for part in (found.squares, found.mean, found.in_sample))


def test_a_parameter_with_rounding_for_a_score_is_left_out():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    noisy = torch.cat([scores, 1e-17 * torch.randn(16, 2, generator=generator, dtype=torch.float64)], 1)
    rewards = torch.randn(1, 16, generator=generator, dtype=torch.float64)
    clean, padded_ = (
        split_tightness(s, rewards, 3, torch.Generator().manual_seed(0)) for s in (scores, noisy)
    )
    assert padded_.parameters == 3
    assert_equal(padded_.squares, clean.squares)


def test_errors_say_what_is_wrong(model):
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="'nowhere' is no parameter"):
        response_scores(model, PROMPT, RESPONSES, {"nowhere": torch.tensor([0])})
    for prompt, responses in (((), RESPONSES), (PROMPT, ((3,), ()))):
        with pytest.raises(ValueError, match="nothing to score"):
            response_scores(model, prompt, responses, everything(model))
    scores = torch.randn(8, 3)
    for s, rewards, splits in ((scores, torch.ones(8), 1), (scores, torch.ones(1, 7), 1), (scores, torch.ones(1, 8), 0),
                               (scores[:3], torch.ones(1, 3), 1)):  # fmt: skip
        with pytest.raises(ValueError, match="give at least four responses"):
            split_tightness(s, rewards, splits, generator)
    with pytest.raises(ValueError, match="no score varies"):
        split_tightness(torch.ones(8, 3), torch.ones(1, 8), 1, generator)
