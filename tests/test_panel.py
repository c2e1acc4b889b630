"""Many rewards at once: each number is the one that the library's definitions give for that reward alone."""

from __future__ import annotations

import pytest
import torch

from ceilings import looseness
from ceilings.ceiling import (
    explained_reward_variance,
    gradient_ceiling,
    nested_ceiling,
    score_reward_covariance,
)
from ceilings.experiments import exact
from ceilings.panel import Panel, top_overlap
from ceilings.policies import AutoregressivePolicy
from ceilings.prefix_tree import enumeration, expected_reward
from ceilings.testing import assert_at_most, assert_equal
from ceilings.transformer import TinyTransformer, TransformerConfig

F64 = torch.float64


def few(seed):
    """A law with fewer parameters than responses, and one parameter that does nothing."""
    generator = torch.Generator().manual_seed(seed)
    policy = AutoregressivePolicy.random(3, 3, 6, generator, eos=0)
    policy.features[..., 2] = 1.0  # the same for every token: its score is zero
    return policy.enumerate(torch.randn(6, generator=generator, dtype=F64))


def decoder(seed):
    return enumeration(TinyTransformer(TransformerConfig(4, 4, 1, 1, 8), seed), (0,), 3, 0)


@pytest.mark.claim("thm-nested")
@pytest.mark.claim("thm-joint")
@pytest.mark.parametrize("law", [few(0), few(1), decoder(2)], ids=["few", "few too", "decoder"])
def test_a_panel_gives_what_the_definitions_give(law):
    panel = Panel(law)
    drawn = torch.randn(5, len(law.probs), generator=torch.Generator().manual_seed(0), dtype=F64) + 3
    gradient, ceiling, nested = panel.gradient(drawn), panel.ceiling(drawn), panel.nested(drawn)
    keep = panel.varies
    for k, reward in enumerate(drawn):
        assert_equal(gradient[k], score_reward_covariance(law.scores, reward, law.probs)[keep])
        assert_equal(ceiling[k], gradient_ceiling(law.scores, reward, law.probs)[keep])
        assert_equal(nested[k], nested_ceiling(law, reward)[keep])
        assert_equal(
            panel.directions(drawn)[k].sum(),
            explained_reward_variance(law.scores, reward, law.probs),
            rtol=1e-9,
        )
        rho_k, _ = looseness.direction_tightness(law.scores, reward, law.probs)
        assert_equal(panel.directions(drawn)[k], rho_k.square(), rtol=1e-7)
    assert_equal(panel.forced_rms(), looseness.forced_rms(law.scores[:, keep], law.probs))
    assert_at_most(gradient.abs(), nested)
    assert_at_most(nested, ceiling)


def test_a_parameter_that_does_nothing_is_left_out():
    panel = Panel(few(3))
    assert panel.varies.tolist() == [True, True, False, True, True, True]
    assert panel.gradient(torch.randn(2, 15, dtype=F64)).shape == (2, 5)


def test_the_score_along_a_direction_is_a_reward_that_this_direction_explains():
    panel = Panel(decoder(4))
    u = torch.randn(3, int(panel.varies.sum()), generator=torch.Generator().manual_seed(1), dtype=F64)
    rewards = panel.along(u)
    # Cov(uᵀs, s)ᵀu = uᵀFu = Var(uᵀs)
    assert_equal((panel.gradient(rewards) * u).sum(1), panel.spread(rewards).square())
    assert_equal(panel.directions(rewards).sum(1), torch.ones(3, dtype=F64), rtol=1e-9)


def test_overlap_counts_the_members_of_both_top_sets():
    ceiling = torch.arange(200.0, dtype=F64)[None]
    gradient = torch.stack([ceiling[0], -ceiling[0], ceiling[0].flip(0), ceiling[0].roll(1)])
    assert top_overlap(gradient, ceiling.expand(4, -1)).tolist() == [1.0, 1.0, 0.0, 0.5]


def test_the_divergence_from_the_teacher_is_the_sum_over_responses():
    cell, config = exact.Cell(width=4, depth=1, vocab_size=4, steps=0), exact.FULL
    model, divergence = exact.pretrained(cell, config, 5)
    law = enumeration(model, (0,), 3, 0)
    generator = torch.Generator().manual_seed(2005)
    step = (1.5 * torch.randn(4, 4, generator=generator, dtype=F64)).softmax(-1)
    teacher = [
        float(torch.stack([step[a, b] for a, b in zip((0, *y), y, strict=False)]).prod())
        for y in law.responses
    ]
    teacher = torch.tensor(teacher, dtype=F64)
    assert_equal(teacher.sum(), 1.0)
    assert_equal(torch.tensor(divergence, dtype=F64), teacher @ (teacher / law.probs).log())


def test_pretraining_approaches_the_teacher():
    start, middle, end = (exact.pretrained(exact.Cell(steps=n), exact.FULL, 0)[1] for n in (0, 10, 100))
    assert start > 2 * middle > 4 * end


def test_rewards_of_the_experiment_are_what_their_names_say():
    model, _ = exact.pretrained(exact.Cell(steps=10), exact.FULL, 1)
    law = enumeration(model, (0,), 3, 0)
    drawn = exact.rewards(law, exact.CENTRE, 1)
    assert sorted(drawn) == sorted(exact.REWARDS)
    best = law.responses[int(drawn["graded"].argmax())]
    assert float(drawn["graded"].max()) == 1.0 and len(best) == 3 and 0 not in best
    assert drawn["sparse"].sum() == 1 and drawn["sparse"][law.responses.index(best)] == 1
    assert drawn["binary"].tolist() == [float(best[0] in y) for y in law.responses]
    assert torch.equal(drawn["shuffled"].sort().values, drawn["graded"].sort().values)
    first = [
        sum(float(p) for y, p in zip(law.responses, law.probs, strict=True) if y[0] == v) for v in range(5)
    ]
    two = sorted(range(5), key=lambda v: first[v])[-2:]
    assert drawn["indifferent"].tolist() == [float(y[0] in two) for y in law.responses]


def test_the_gradient_of_a_cell_is_that_of_the_expected_reward():
    model, _ = exact.pretrained(exact.Cell(steps=10), exact.FULL, 2)
    law = enumeration(model, (0,), 3, 0)
    reward = exact.rewards(law, exact.CENTRE, 2)["graded"]
    model.zero_grad()
    expected_reward(model, (0,), reward, 3, 0).backward()
    panel = Panel(law)
    assert bool(panel.varies.all())
    assert_equal(panel.gradient(reward[None])[0], torch.cat([p.grad.flatten() for p in model.parameters()]))
