"""Sums of two processes, added: what one process sums, whatever the shares."""

import json

import pytest
import torch

import pair_pooled
from ceilings.moments import ScoreMoments
from ceilings.scores import score_moments
from ceilings.testing import assert_equal
from pair import run_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pooled")
    for code, _, complained in run_pair(pair_pooled.pooled, folder):
        assert code == 0, complained
    return folder


@pytest.mark.parametrize("case", [*pair_pooled.SHARES, "twice", "weighted", "wide"])
def test_pooled_sums_are_those_of_one_process(folder, case):
    dtype = torch.float32 if case == "wide" else torch.float64
    weights = torch.arange(1, 12) / 66 if case == "weighted" else None
    expected = score_moments(
        pair_pooled.model(dtype), *pair_pooled.batch(), weights=weights, reward_names=("a", "b")
    )
    raw = ScoreMoments.load(folder / f"{case}.safetensors")
    found = raw.shifted(expected.reward_shift)
    tolerance = 1e-5 if case == "wide" else 1e-12
    for part in ("scores", "squares", "reward_scores"):
        for name in expected.names:
            assert_equal(getattr(found, part)[name], getattr(expected, part)[name], rtol=tolerance)
    assert_equal(found.reward_sum, expected.reward_sum, rtol=1e-12, atol=1e-12)
    assert_equal(found.reward_squares, expected.reward_squares, rtol=1e-12)
    assert found.count == 11 and found.weight_sum == pytest.approx(expected.weight_sum, rel=1e-12)
    assert found.slow_parameters == () and found.weighting == expected.weighting
    # More sequences than float32 should sum are summed wide, however few each process has.
    assert raw.squares[raw.names[0]].dtype == torch.float64
    # The constant is that of the first process with sequences, near its rewards.
    if case == "uneven":
        assert_equal(raw.reward_shift, pair_pooled.batch()[2][:3].mean(0), rtol=1e-12)


def test_what_does_not_belong_together_is_refused_by_all(folder):
    for rank in range(2):
        parameters, weights = json.loads((folder / f"refused{rank}.json").read_text())
        assert "process 1 measures other parameters" in parameters
        assert "some processes have weights and others none" in weights


def test_processes_with_different_models_are_refused(tmp_path):
    (first, *_), (second, *_) = run_pair(pair_pooled.strangers, tmp_path)
    assert "process 1 has loaded another model" in json.loads((tmp_path / "strangers.json").read_text())
    assert (first, second) == (7, 0)  # the exit code is that of process 0
