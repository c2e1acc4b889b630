"""Experiments: a slice of each, run now, gives what its record holds."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import ceilings.experiments
from ceilings.ceiling import gradient_ceiling, reward_variance
from ceilings.experiments import exact, forced, foreign, methods, real_training, sharpening
from ceilings.looseness import fisher_spectrum, rms_tightness
from ceilings.methods import METHODS
from ceilings.prefix_tree import enumeration, expected_reward
from ceilings.results import assert_reproduces, load
from ceilings.testing import assert_at_most, assert_equal
from ceilings.transformer import TinyTransformer, TransformerConfig
from notebooks import chapters, paths
from test_pretrained import require_built_in

REAL = {"prompts", "real_training", "real_updates"}  # experiments with the real model
NAMES = [m.name for m in pkgutil.iter_modules(ceilings.experiments.__path__) if not m.name.startswith("_")]


def runs_in_a_chapter(name):
    """Whether a chapter runs the slice itself, and compares it with the record, every time that it is checked."""
    call = f"assert_reproduces({name}.run({name}.SMOKE), record"
    return any(call in paths(chapter)[0].read_text(encoding="utf-8") for chapter in chapters())


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_is_of_the_record(name):
    module = importlib.import_module(f"ceilings.experiments.{name}")
    assert name == module.NAME
    assert set(module.SMOKE.seeds) <= set(module.FULL.seeds)


@pytest.mark.parametrize("name", [name for name in NAMES if not runs_in_a_chapter(name)])
def test_a_slice_agrees_with_the_record_to_four_digits(name):
    module = importlib.import_module(f"ceilings.experiments.{name}")
    if name in REAL:
        require_built_in()
    assert_reproduces(module.run(module.SMOKE), load(name, module.FULL), rtol=1e-4)


def test_the_slices_of_the_other_experiments_run_in_their_chapters():
    here = {name for name in NAMES if not runs_in_a_chapter(name)}
    assert runs_in_a_chapter("forced") and here >= {"real_training", "merging"}


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


@pytest.mark.claim("thm-supervised")
def test_the_record_of_foreign_data_keeps_every_inequality_and_scales_a_mixture():
    record = load("foreign", foreign.FULL)
    for path in foreign.PATHS:
        for level in record.values[path]:
            row = {
                name: record.tensor(path, level, "gradient", name)
                for name in record.values[path][level]["gradient"]
            }
            assert_at_most(row["norm"], row["nested"])
            assert_at_most(
                row["nested"], row["ceiling"], slack=1e-9
            )  # equal for a text of one token; stored rounded
            assert_equal(
                row["ceiling"], (row["chi_square"] * record.tensor("policy", "fisher")).sqrt(), rtol=1e-9
            )
            assert_at_most(row["kl"], row["chi_square"].log1p(), slack=1e-9)  # equal for one text
    for level in ("0.001", "0.01", "0.1"):
        for name, power in (("norm", 1), ("ceiling", 1), ("nested", 1), ("chi_square", 2), ("top", 0)):
            part, whole = (record.tensor("mixture", w, "gradient", name) for w in (level, "1"))
            assert_equal(part, float(level) ** power * whole, rtol=1e-6)


def test_data_laws_are_what_their_names_say():
    law = enumeration(foreign.policy(0), (0,), exact.CENTRE.max_len, 0)
    laws = foreign.data_laws(law, foreign.FULL, 0)
    for levels in laws.values():
        for q in levels.values():
            assert_equal(q.sum(), 1.0)
    far = laws["mixture"]["1"]
    assert_equal(laws["mixture"]["0.1"], 0.9 * law.probs + 0.1 * far)
    assert_equal(laws["tempered"]["0.3"].log().diff(), (0.7 * law.probs.log() + 0.3 * far.log()).diff())
    assert_equal(laws["sharpened"]["2"].log().diff(), 2 * far.log().diff())
    for text in laws["text"].values():
        assert sorted(text.tolist())[-2:] == [0.0, 1.0]
    assert laws["text"]["0"].argmax() == law.probs.argmax()
    assert laws["text"]["1"].argmax() == law.probs.argmin()
    for share, q in laws["accepted"].items():
        kept = q > 0
        assert_equal(q[kept], law.probs[kept] / law.probs[kept].sum())
        assert law.probs[kept].sum() >= float(share)  # and without its last response it would be less
        ratio = far / law.probs
        assert not bool(kept.all()) and ratio[kept].min() >= ratio[~kept].max()
        assert law.probs[kept].sum() - law.probs[kept][ratio[kept].argmin()] < float(share)


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


@pytest.fixture(scope="module")
def two_steps():
    """A short run with every null model."""
    torch.set_num_threads(1)
    config = replace(
        sharpening.FULL,
        seeds=(0,),
        rewards=("binary", "graded"),
        checkpoints=(0, 2),
        null_checkpoints=(0, 2),
        bystanders=3,
        draws=2,
    )
    return config, sharpening.run(config)


def test_every_run_starts_from_the_same_policy(two_steps):
    _, record = two_steps
    values = record.values["graded"]
    assert set(values) == {"exact", "sampled", *sharpening.NULLS}
    for name in ("reward", "entropy", "rms"):
        start = record.tensor("graded", "exact", name)[0, 0]
        assert_equal(record.tensor("graded", "sampled", name)[0, 0], start)
        for null in ("random direction", "sampled, dealt out"):
            assert_equal(record.tensor("graded", null, name)[0, :, 0], start, rtol=1e-5)
    # The draws to which one null model is trained are those that the other only looks at.
    assert_equal(
        record.tensor("graded", "dealt out", "rms")[0, :, 0],
        record.tensor("graded", "exact", "bystander")[0, 0, :2],
        rtol=1e-5,
    )
    for name in ("sigma", "fisher", "trace"):
        for part in values:
            assert float(record.tensor("graded", part, name)[0].reshape(-1, 2)[:, 0].abs().max()) == 0


def test_the_measured_run_is_the_run_that_it_says(two_steps):
    """Two Adam steps made here, and the policy measured by the functions that define the quantities."""
    config, record = two_steps
    model, _ = exact.pretrained(exact.CENTRE, exact.FULL, 0)
    before = enumeration(model, (0,), 3, 0)
    reward = exact.rewards(before, exact.CENTRE, 0)["graded"]
    optimiser = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    for _ in range(2):
        optimiser.zero_grad()
        (-expected_reward(model, (0,), reward, 3, 0)).backward()
        optimiser.step()
    after = enumeration(model, (0,), 3, 0)
    ceilings = [gradient_ceiling(law.scores, reward, law.probs) for law in (before, after)]
    kept = ceilings[0] > 1e-9 * ceilings[0].max()
    found = {
        name: record.tensor("graded", "exact", name)[0, 1] for name in ("sigma", "fisher", "reward", "rms")
    }
    assert_equal((ceilings[1] / ceilings[0])[kept].log().mean(), found["sigma"] + found["fisher"], rtol=1e-9)
    assert_equal(
        reward_variance(reward, after.probs) / reward_variance(reward, before.probs),
        (2 * found["sigma"]).exp(),
    )
    assert_equal(after.probs @ reward, found["reward"])
    assert_equal(rms_tightness(after.scores[:, kept], reward, after.probs), found["rms"], rtol=1e-9)
    assert float(found["reward"]) > float(record.tensor("graded", "exact", "reward")[0, 0])


def test_a_sampled_run_learns_and_the_same_run_without_a_signal_does_not():
    record = load("sharpening", sharpening.FULL)
    gain, null = (record.tensor("graded", part, "reward") for part in ("sampled", "sampled, dealt out"))
    gain = gain[:, -1] - gain[:, 0]
    assert float(gain.min()) > 0
    assert (
        float((null[..., -1].mean(1) - record.tensor("graded", "exact", "reward")[:, 0]).mean())
        < float(gain.mean()) / 2
    )


class Letters:
    """A tokenizer of single characters."""

    alphabet = "0123456789+= .\n"

    def __call__(self, text):
        return SimpleNamespace(input_ids=[1 + self.alphabet.index(letter) for letter in text])

    def decode(self, ids):
        return "".join("" if token == 0 else self.alphabet[token - 1] for token in ids)

    def __len__(self):
        return len(self.alphabet) + 1


def test_a_sum_is_right_if_it_is_said_first_and_whole():
    letters = Letters()
    puzzle = real_training.sums(letters, 4)
    assert len(puzzle.prompts) == 16 and puzzle.max_new_tokens == 3
    asked = {letters.decode(prompt): row for row, prompt in enumerate(puzzle.prompts)}
    for response, right in (
        ("5", 1),
        (" 5", 1),
        ("5.", 1),
        ("  5", 1),
        (" 5\n", 1),
        (" 57", 0),
        ("\n5", 0),
        (" 4", 0),
    ):
        assert puzzle.reward(asked["2 + 3 ="], tuple(letters(response).input_ids)) == right
    assert puzzle.reward(asked["4 + 4 ="], (*letters(" 8").input_ids, 0)) == 1
