"""The replication: bases, sources and nulls of its runs, the rule of its tuning, and what its record must hold."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from ceilings.experiments import replication
from ceilings.experiments._bases import METHODS, NULLS, PAPER, Base, Recipe
from ceilings.families import FAMILIES
from ceilings.methods import PREFERENCE
from ceilings.results import load
from ceilings.storage import stored
from ceilings.testing import assert_equal
from ceilings.update_rules import flat_parameters

TINY = Recipe(length=2, letters=3, pretrain_steps=12, steps=2, prompts=3, samples=8)


@pytest.fixture(scope="module")
def base():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Base("GPT2", TINY)
    torch.set_num_threads(before)


def test_a_base_is_a_file_of_bf16_and_its_prompts_are_split(base):
    assert torch.equal(base.weights.bfloat16().double(), base.weights)
    first, second = (set(half.prompts) for half in base.halves)
    assert not first & second and len(first | second) == 9
    again = Base("GPT2", TINY)
    assert torch.equal(again.weights, base.weights)


def test_success_of_foreign_is_the_descending_order(base):
    for method, order in (("near", 1), ("foreign", -1), ("grpo", 1)):
        puzzle = base.puzzle(method)
        for prompt, answer in zip(puzzle.prompts, puzzle.answers, strict=True):
            assert answer == (*sorted(prompt[:-1])[::order], 0)


def test_demonstrations_are_own_right_answers_or_as_many_descending_ones(base):
    near, foreign, own = base.demonstrations("near", 0), base.demonstrations("foreign", 0), base.own(0)
    assert len(own) == TINY.prompts * TINY.steps * TINY.samples
    right = [
        (p, y) for p, y in zip(own.prompt_ids, own.response_ids, strict=True) if y == (*sorted(p[:-1]), 0)
    ]
    assert list(zip(near.prompt_ids, near.response_ids, strict=True)) == right
    assert len(set(near.groups)) == len(near) == len(foreign)
    assert all(
        y == (*sorted(p[:-1])[::-1], 0) for p, y in zip(foreign.prompt_ids, foreign.response_ids, strict=True)
    )
    assert base.surprise("foreign") > base.surprise("near") > 0


@pytest.mark.parametrize("method", PREFERENCE)
def test_preferences_are_drawn_once_from_the_base_whatever_the_seed(base, method):
    own = set(zip(base.own(0).prompt_ids, base.own(0).response_ids, strict=True))
    other = base.trained("grpo", 0.05, 0)
    for seed in (0, 1):
        drawn = base._source(method, seed, 0)(other, torch.Generator().manual_seed(seed))
        assert len(drawn) == TINY.prompts * TINY.samples
        assert set(zip(drawn.prompt_ids, drawn.response_ids, strict=True)) <= own


def test_nulls_deal_the_rewards_of_each_group_out_anew_and_keep_the_responses(base):
    draws = {}
    for method in ("grpo", "grpo shuffled"):
        source = base._source(method, 0, 0)
        draws[method] = [source(base.model, torch.Generator().manual_seed(k)) for k in range(12)]
    moved = 0
    for plain, dealt in zip(*draws.values(), strict=True):
        assert plain.response_ids == dealt.response_ids
        a, b = (x.rewards.view(TINY.prompts, -1) for x in (plain, dealt))
        assert torch.equal(a.sort(1).values, b.sort(1).values)
        moved += int(not torch.equal(a, b))
    assert moved > 0


def test_runs_of_one_seed_are_equal_and_of_two_seeds_are_not_but_share_their_start(base):
    first, again, other = (flat_parameters(base.trained("dpo", 1e-3, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(flat_parameters(base.model), base.weights)
    # Two steps of Adam are no longer than the rate each, to a few per cent.
    assert 0 < float((first - base.weights).abs().max()) < 2.1e-3


def test_a_run_in_bf16_is_the_same_run_with_rounded_weights(base):
    narrow = flat_parameters(base.trained_in_bf16("grpo", 1e-3, 0))
    assert torch.equal(narrow.bfloat16().double(), narrow)
    small = dataclasses.replace(TINY, steps=1)
    one = Base("GPT2", small)
    wide = flat_parameters(one.trained("grpo", 1e-3, 0))
    assert torch.equal(flat_parameters(one.trained_in_bf16("grpo", 1e-3, 0)), stored(wide, torch.bfloat16))


def test_the_frozen_rate_is_the_smallest_at_which_every_family_learns():
    gains = {"a": {1e-4: 0.2, 1e-3: 0.5, 3e-5: 0.11}, "b": {3e-5: 0.09, 1e-4: 0.1, 1e-3: 0.4}}
    assert replication.frozen_rate(gains) == 1e-4
    assert replication.frozen_rate({"a": {1e-4: 0.0, 1e-3: 0.05}}) == 1e-3


def test_every_seed_is_compared_with_the_next(base):
    size = len(base.weights)
    config = replication.Config(seeds=(0, 1, 2), share=2 / size, density=3 / size)
    changes = []
    for members in ((0, 1), (1, 2), (2, 9)):
        change = torch.zeros_like(base.weights)
        change[list(members)] = 1.0
        changes.append(change)
    found = replication._overlaps(config, base, changes, changes)
    assert tuple(found) == replication.SETS
    for name in ("changed", "top"):
        assert [row[0] for row in found[name]] == [0.5, 0.5, 0.0]
        assert_equal(torch.tensor([row[1] for row in found[name]]), torch.full((3,), 2 / size))
    expected = torch.tensor([1 - 1 / (size - 2), 1 - 1 / (size - 2), 1 - 2 / (size - 2)])
    assert_equal(torch.tensor([row[0] for row in found["unchanged"]]), expected)


def test_matched_sets_are_those_of_a_coarser_format(base):
    """Largest by change over gap: the same weights change if every gap is wider by one factor."""
    config = replication.Config(seeds=(0,), density=0.25)
    change = 0.01 * torch.randn(
        len(base.weights), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    mask = replication._sets(config, base, change)["matched"]
    assert int(mask.sum()) == round(0.25 * len(mask))
    gaps = torch.exp2(base.weights.abs().clamp_min(2.0**-126).log2().floor() - 7)
    assert (change.abs() / gaps)[mask].min() >= (change.abs() / gaps)[~mask].max()


def test_only_matrices_inside_the_layers_have_a_spectrum(base):
    parts = replication._matrices(base, torch.arange(len(base.weights)).double())
    named = dict(base.model.named_parameters())
    assert [tuple(p.shape) for p in parts] == [
        tuple(p.shape) for n, p in named.items() if ".h." in n and p.ndim == 2
    ]
    assert float(parts[0][0, 1] - parts[0][0, 0]) == 1.0


def test_the_record_has_every_cell_and_freezes_by_the_rule():
    config = replication.FULL
    record = load("replication", config)
    assert set(PAPER) < set(METHODS) and len(PAPER) == 7 and len(FAMILIES) == 10
    assert set(record.values["runs"]) == set(FAMILIES)
    for family in FAMILIES:
        assert set(record.values["runs"][family]) == {*METHODS, *NULLS}
        assert record.tensor("base", family, "parameters").max() <= 100_000
        assert record.tensor("base", family, "embedding share").max() < 0.5
    for method, rate in zip(METHODS, config.rates, strict=True):
        gains = {
            family: {
                r: float(record.tensor("tuning", family, method, f"{r:g}", "gain").mean())
                for r in config.tuning_rates
            }
            for family in config.tuning_families
        }
        assert replication.frozen_rate(gains) == rate, method


def test_in_every_run_a_coarser_rule_or_format_leaves_no_fewer_weights_unchanged():
    record = load("replication", replication.FULL)
    for family, methods in record.values["runs"].items():
        for method in methods:
            fp32, bf16 = (
                {
                    rule: record.tensor("runs", family, method, kind, rule)
                    for rule in ("exact", "absolute", "relative")
                }
                for kind in ("fp32", "bf16")
            )
            for kind in (fp32, bf16):
                assert bool(
                    (kind["exact"] <= kind["absolute"]).all() and (kind["exact"] <= kind["relative"]).all()
                )
            assert bool((fp32["exact"] <= bf16["exact"]).all())
            assert torch.equal(bf16["exact"], bf16["relative"])  # half a gap is more than a thousandth
            for name in replication.SETS:
                sets = record.tensor("runs", family, method, "seeds", name)
                assert bool(((sets >= 0) & (sets <= 1)).all())
            assert not any(math.isnan(x) for x in record.tensor("runs", family, method, "gain").tolist())
