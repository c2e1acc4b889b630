"""What the two experiments on updates share: exact moments, sources of noise, and going on after an interruption."""

import itertools
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from ceilings.experiments import _resume, optimisers, precision
from ceilings.experiments._start import Shape, Start, success
from ceilings.prefix_tree import enumeration, expected_reward
from ceilings.puzzles import END
from ceilings.results import Record, load
from ceilings.testing import assert_equal
from ceilings.update_rules import make_rule

TINY = Shape(length=1, letters=4, width=8, depth=1, heads=2, pretrain_steps=40, prompts=3, samples=4)


@pytest.fixture(scope="module")
def begin():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Start(
        Shape(length=1, letters=4, width=8, depth=1, heads=2, pretrain_steps=40, prompts=3, samples=4), 0
    )
    torch.set_num_threads(before)


def laws(begin):
    """For each prompt that is trained on: probabilities, scores and rewards, by enumeration."""
    for row, prompt in enumerate(begin.puzzle.prompts):
        law = enumeration(begin.model, prompt, 2, END)
        reward = torch.tensor([begin.puzzle.reward(row, y) for y in law.responses], dtype=torch.float64)
        yield law.probs, law.scores, reward


@pytest.mark.claim("prop-adam")
def test_mean_step_is_the_gradient_over_the_root_mean_square_of_every_batch(begin):
    """Two prompts, one response each: every batch."""
    signals = [(p, (r - p @ r)[:, None] * s) for p, s, r in laws(begin)]
    assert len(signals) == 2
    first = square = torch.zeros(len(begin.weights), dtype=torch.float64)
    for (p, x), (q, z) in itertools.product(signals, repeat=2):
        # E[((X + Z)/2)²] over independent responses to the two prompts.
        both = (p @ x.square() + q @ z.square() + 2 * (p @ x) * (q @ z)) / 4
        first, square = first + (p @ x + q @ z) / 2 / 4, square + both / 4
    moments = begin.moments(begin.puzzle)
    moves = moments.ceiling > 1e-12
    assert_equal(moments.gradient, first)
    assert_equal(moments.mean_step(2, 1)[moves], (first.abs() / square.sqrt())[moves])


def test_moments_are_means_over_the_prompts(begin):
    moments = begin.moments(begin.puzzle)
    found = list(laws(begin))
    assert_equal(moments.fisher, sum(p @ s.square() for p, s, _ in found) / 2)
    assert_equal(moments.variance, sum(p @ (r - p @ r).square() for p, _, r in found) / 2)
    assert bool((moments.tightness <= 1 + 1e-12).all()) and float(moments.tightness.max()) > 0.05


def test_success_is_the_expected_binary_reward(begin):
    with torch.no_grad():
        expected = [
            float(expected_reward(begin.model, prompt, partial(begin.puzzle.reward, row), 2, END))
            for row, prompt in enumerate(begin.puzzle.prompts)
        ]
    assert_equal(success(begin.model, begin.puzzle), sum(expected) / 2)


def test_prompts_are_split_in_two_halves(begin):
    assert not set(begin.puzzle.prompts) & set(begin.others.prompts)
    assert len(begin.puzzle.prompts) == len(begin.others.prompts) == 2


def test_noise_deals_the_rewards_of_each_group_out_anew(begin):
    plain = begin.source()(begin.model, begin.generator())
    noisy = [begin.source(k)(begin.model, begin.generator()) for k in range(8)]
    for other in noisy:
        assert other.response_ids == plain.response_ids
        assert torch.equal(
            other.rewards.view(3, 4).sort(1).values, plain.rewards.double().view(3, 4).sort(1).values
        )
    assert len({tuple(other.rewards.tolist()) for other in noisy}) > 1


def test_first_gradient_is_that_of_the_first_step_of_a_run(begin):
    after = begin.trained(lambda model: make_rule("sgd", model, 1.0), 1)
    moved = torch.cat([p.detach().flatten() for p in after.parameters()]) - begin.weights
    assert float(moved.abs().max()) > 0
    assert_equal(moved, -begin.first_gradient())


def test_what_was_kept_is_not_measured_again(tmp_path):
    calls, spent = [], []

    def measure():
        calls.append(1)
        return {"x": [1.5, math.nan], "y": {"z": 2}}

    first = _resume.kept_in(tmp_path / "deep", spent)("a", measure)
    again = _resume.kept_in(tmp_path / "deep", spent)("a", measure)
    assert len(calls) == 1 and len(spent) == 1
    assert first["y"] == again["y"] == {"z": 2} and math.isnan(again["x"][1])
    _resume.kept_in(tmp_path / "deep")("b", measure)
    assert len(calls) == 2 and not list(tmp_path.glob("**/*.partial"))
    assert _resume.not_kept("a", measure)["x"][0] == 1.5 and len(calls) == 3


def test_only_the_full_run_is_kept_and_its_folder_goes(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Settings:
        seeds: tuple[int, ...]

    (tmp_path / "results").mkdir()
    monkeypatch.setattr(_resume, "results_directory", lambda: tmp_path / "results")
    keeps = []

    def run(config, progress, keep=_resume.not_kept):
        keeps.append(keep)
        values = {"x": [keep(str(seed), lambda: {"v": 1.0})["v"] for seed in progress(config.seeds)]}
        return Record("precision", {}, config.seeds, values, {}, "float64", "", 1.0, "")

    full = Settings((0, 1))
    go = _resume.resumed(run, full, "precision")
    assert go(full, iter).wall_seconds >= 1.0
    assert go(Settings((0,)), iter).seeds == (0,)
    assert keeps[0] is not _resume.not_kept and keeps[1] is _resume.not_kept
    assert not list((tmp_path / "_build" / "partial").iterdir())


def test_what_is_unfinished_stays_where_only_the_same_experiment_finds_it(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Settings:
        seeds: tuple[int, ...]

    (tmp_path / "results").mkdir()
    monkeypatch.setattr(_resume, "results_directory", lambda: tmp_path / "results")
    with pytest.raises(KeyboardInterrupt), _resume.partial_folder("precision", Settings((0,))) as folder:
        _resume.kept_in(folder)("0", lambda: {"x": 1.0})
        raise KeyboardInterrupt
    with _resume.partial_folder("precision", Settings((1,))) as other:
        assert other != folder and not other.exists()
    with _resume.partial_folder("precision", Settings((0,))) as again:
        assert again == folder and (again / "0.json").is_file()
    assert not folder.exists()


def test_what_the_held_out_seed_did_not_run_is_nan():
    values = {"tuning": {"sgd": [1.0]}, "sgd": {"gain": [2.0, 3.0], "pairs": [[[1, 2]], [[3, 4]]]}}
    found = optimisers._filled(values, 3, held_out=True)
    assert found["tuning"]["sgd"][0] == 1.0 and all(math.isnan(x) for x in found["tuning"]["sgd"][1:])
    assert math.isnan(found["sgd"]["gain"][0]) and found["sgd"]["gain"][1:] == [2.0, 3.0]
    assert all(math.isnan(x) for x in found["sgd"]["pairs"][0][0])


def test_three_rules_of_unchanged_by_hand():
    base = torch.tensor([1.0, 1.0, 1e-6, 0.0, -2.0], dtype=torch.float64)
    tuned = torch.tensor([1.0, 1.0005, 2e-6, 0.0, -2.1], dtype=torch.float64)
    found = {name: mask.tolist() for name, mask in precision.unchanged(base, tuned).items()}
    assert found == {
        "exact": [True, False, False, True, False],
        "absolute": [True, False, True, True, False],
        "relative": [True, True, False, True, False],
    }


def test_binades_hold_every_weight_once():
    size = torch.tensor([0.0, 2.0**-20, 2.0**-12, 0.75, 1.0, 3.0, 0.5], dtype=torch.float64)
    assert precision._binade(size).tolist() == [0, 0, 0, 11, 12, 12, 11]
    shares = precision._by_binade(size, size > 0.6)
    assert shares[0] == 0 and shares[11] == 0.5 and shares[12] == 1 and math.isnan(shares[5])


@pytest.mark.claim("prop-ulp")
def test_in_bf16_the_relative_rule_is_equality_in_every_run_of_the_record():
    record = load("precision", precision.FULL)
    for rule in precision.FULL.crossed:
        for size in precision.FULL.sizes:
            row = record.values[rule][f"{size:g}"]["bf16"]
            assert row["exact"] == row["relative"]


def test_the_frozen_rates_are_those_that_the_held_out_seed_likes_best():
    record = load("optimisers", optimisers.FULL)
    for rule, chosen in zip(optimisers.RULES, optimisers.FULL.chosen, strict=True):
        gains = {size: record.tensor("tuning", rule, f"{size:g}")[0] for size in optimisers.FULL.first_steps}
        assert max(gains, key=gains.get) == chosen
