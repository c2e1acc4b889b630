"""Experiments: a slice of each, run now, gives what its record holds."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

import pytest
import torch

import ceilings.experiments
from ceilings.experiments import forced, methods
from ceilings.looseness import fisher_spectrum
from ceilings.methods import METHODS
from ceilings.prefix_tree import enumeration
from ceilings.results import assert_reproduces, load
from ceilings.testing import assert_at_most, assert_equal
from ceilings.transformer import TinyTransformer, TransformerConfig
from test_pretrained import require_built_in

# Experiments with the real model: single precision, whose digits differ between processors.
SINGLE = {"prompts": 1e-3}
NAMES = [m.name for m in pkgutil.iter_modules(ceilings.experiments.__path__) if not m.name.startswith("_")]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_agrees_with_the_record_to_four_digits_or_three(name):
    module = importlib.import_module(f"ceilings.experiments.{name}")
    assert name == module.NAME
    assert set(module.SMOKE.seeds) <= set(module.FULL.seeds)
    if name in SINGLE:
        require_built_in()
    assert_reproduces(module.run(module.SMOKE), load(name, module.FULL), rtol=SINGLE.get(name, 1e-4))


def test_a_changed_setting_does_not_pass_for_the_record():
    other = forced.run(replace(forced.SMOKE, seeds=(0,), learning_rate=0.011))
    with pytest.raises(AssertionError, match="trained decoder"):
        assert_reproduces(other, load("forced", forced.FULL))


@pytest.mark.claim("thm-joint")
@pytest.mark.claim("thm-energy")
def test_the_record_keeps_every_inequality():
    record = load("forced", forced.FULL)
    for family in forced.FAMILIES:
        of_policy = {name: record.tensor(family, "policy", name) for name in record.values[family]["policy"]}
        assert_at_most(of_policy["rank"].rsqrt(), of_policy["forced_rms"])
        for reward in forced.REWARDS:
            of_reward = {name: record.tensor(family, reward, name) for name in record.values[family][reward]}
            assert_at_most(of_reward["explained_share"], torch.ones(24), slack=1e-11)
            assert_at_most(of_reward["rms_tightness"], of_policy["forced_rms"])
            assert_at_most(of_reward["weighted_tightness"], of_policy["fisher_concentration"])
            assert_at_most(of_reward["outside_share"], of_reward["outside_bound"])


def test_a_prompt_that_responses_repeat_costs_the_decoder_eight_directions():
    """The laws after 1, 1 1 and 1 1 1 coincide for every θ: two of the three add nothing, 4 options each."""
    model = TinyTransformer(TransformerConfig(5, 12, 2, 2, 24), seed=3)
    for prompt, rank in (((1,), 84 - 2 * 4), ((0,), 84)):
        law = enumeration(model, prompt, 3, 0)
        assert len(fisher_spectrum(law.scores, law.probs)) == rank


def test_every_method_beats_its_start_by_three_standard_errors_and_the_null_model_does_not():
    record = load("methods", methods.FULL)
    found = methods.gains(record)
    assert set(found) == {*METHODS, methods.NULL}
    assert all(gain > 3 * error for name, (gain, error) in found.items() if name != methods.NULL)
    # Rewards that know nothing of the response: every step is noise, and what was learnt before is lost.
    assert found[methods.NULL][0] < -3 * found[methods.NULL][1]
    for name in METHODS:
        assert_equal(record.tensor(name, "reward")[:, 0], record.tensor(methods.NULL, "reward")[:, 0])
        assert record.tensor(name, "kl")[:, 0].tolist() == [0] * 5
        clipped = record.tensor(name, "clip_share")
        assert bool((clipped > 0).all()) if name == "ppo" else bool((clipped == 0).all())


def test_a_gain_needs_two_seeds():
    one = replace(load("methods", methods.FULL), seeds=(0,), values={"rloo": {"reward": [[0.1, 0.2]]}})
    with pytest.raises(ValueError, match="one seed has no standard error"):
        methods.gains(one)


def test_rewards_are_what_their_names_say():
    law = forced.policies(replace(forced.SMOKE, seeds=(5,)), 5)["few features"]
    drawn = forced.rewards(law.responses, forced.FULL, seed=5)
    assert set(drawn["binary"].tolist()) == {0.0, 1.0}
    assert_at_most(drawn["graded"], torch.ones(85))
    assert float(drawn["graded"].max()) == 1.0
    assert torch.equal(drawn["shuffled"].sort().values, drawn["graded"].sort().values)
    assert not torch.equal(drawn["shuffled"], drawn["graded"])
