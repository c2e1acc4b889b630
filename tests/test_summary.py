"""Statistics of moments made by hand: zeros, shares, names, the derived tensors."""

import dataclasses
import json
import math

import pytest
import torch

from ceilings.folds import Folds, two_halves
from ceilings.moments import ScoreMoments
from ceilings.readable import number, percent, with_error
from ceilings.report import write_json
from ceilings.summary import _Histogram, derived_tensors, summarise


def by_hand(scores, rewards):
    """Moments of given scores (N, D) in a single parameter."""
    name = "model.layers.3.mlp.experts.7.w1.weight"
    return ScoreMoments(
        scores={name: scores.sum(0)},
        squares={name: scores.square().sum(0)},
        reward_scores={name: (rewards[:, None] * scores).sum(0)[None]},
        reward_shift=torch.zeros(1).double(),
        reward_sum=rewards.sum()[None],
        reward_squares=rewards.square().sum()[None],
        reward_names=("reward",),
        count=len(scores),
        weight_sum=float(len(scores)),
    )


def test_parameters_that_nothing_moves_are_counted_as_such():
    scores = torch.zeros(4, 10).double()
    scores[:, :4] = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None] * torch.tensor([1.0, 2.0, 3.0, 4.0])
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0]).double()
    found = summarise(Folds([by_hand(scores, rewards)] * 2), "responses")
    # F = 1, 4, 9, 16 and six zeros; the reward has standard deviation 1/2 and is perfectly correlated.
    assert found["fisher"]["zero"] == 6 and found["fisher"]["total"] == pytest.approx(30)
    assert found["ceiling"]["quantiles"]["0.5"] == 0
    assert found["ceiling"]["quantiles"]["0.95"] == pytest.approx(2, rel=0.04)
    assert found["fisher"]["share_in_top"]["0.1"] == pytest.approx(16 / 30)
    assert found["fisher"]["share_in_top"]["0.3"] == pytest.approx(29 / 30)
    assert found["tightness"]["defined"] == 4 and found["tightness"]["undefined"] == 6
    # Both halves say ρ = 1: covariances that divide by 3, deviations that divide by 7, of 4 and 8 responses.
    assert found["tightness"]["mean"] == pytest.approx(7 / 6) and found["gradient"]["norm"] == pytest.approx(
        30**0.5 / 2
    )
    assert found["uncertainty"]["mean_score_ratio"] == 0
    assert found["tensors"][0]["layer"] == 3 and found["tensors"][0]["matrix"] == "mlp.experts.*.w1"
    assert found["gradient"]["norm_permuted"] is None and found["tightness"]["standard_error"] is None


def test_halves_keep_groups_whole_where_they_can():
    g = torch.Generator().manual_seed(0)
    first, second, kept = two_halves([5, 5, 9, 9, 9, 1], g)
    assert kept == "groups" and sorted(first + second) == list(range(6))
    groups = [5, 5, 9, 9, 9, 1]
    assert not {groups[k] for k in first} & {groups[k] for k in second}
    for groups in ([3] * 7, [0, *[1] * 6]):  # one group, and one beside a single response
        first, second, kept = two_halves(groups, g)
        assert kept == "responses" and (len(first), len(second)) == (3, 4)
    assert two_halves([0, 1, 2], g) is None


def test_folds_from_files_are_those_from_memory(tmp_path):
    g = torch.Generator().manual_seed(0)
    parts = [
        by_hand(torch.randn(6, 5, generator=g).double(), torch.randn(6, generator=g).double()) for _ in "ab"
    ]
    for k, part in enumerate(parts):
        part.save(tmp_path / f"{k}.safetensors")
    memory, files = Folds(parts), Folds([tmp_path / f"{k}.safetensors" for k in range(2)])
    assert memory.names == files.names and memory.count == files.count == 12 and len(files) == 2
    merged = parts[0].merge(parts[1])
    for folds in (memory, files):
        name = folds.names[0]
        assert torch.equal(folds.together(name).squares[name], merged.squares[name])
        assert torch.equal(folds.of(name)[1].reward_scores[name], parts[1].reward_scores[name])
    with pytest.raises(ValueError, match="there are no moments"):
        Folds([])
    with pytest.raises(ValueError, match="their parameters differ"):
        Folds([parts[0], dataclasses.replace(parts[0], **renamed(parts[0]))])
    with pytest.raises(ValueError, match="holds no parameter called 'x'"):
        ScoreMoments.load(tmp_path / "0.safetensors", "x")


def renamed(moments):
    """Parts of moments under another name."""
    return {
        part: {"x": next(iter(getattr(moments, part).values()))}
        for part in ("scores", "squares", "reward_scores")
    }


def test_derived_tensors_are_those_of_the_moments():
    g = torch.Generator().manual_seed(0)
    moments = by_hand(torch.randn(6, 5, generator=g).double(), torch.randn(6, generator=g).double())
    for what, expected in (
        ("gradient", moments.gradient()),
        ("fisher", moments.diagonal_fisher()),
        ("ceiling", moments.ceiling()),
        ("tightness", moments.tightness()),
    ):
        found = derived_tensors(Folds([moments]), what)
        assert all(torch.equal(found[name], expected[name]) for name in moments.names)
    with pytest.raises(ValueError, match="'shape' is not derived from moments"):
        derived_tensors(Folds([moments]), "shape")


def test_every_entry_of_a_large_tensor_is_counted():
    histogram = _Histogram()
    histogram.add(torch.full((2**24 + 1000,), 0.0005))
    histogram.add(torch.tensor([1.0, torch.nan]))
    assert float(histogram.counts.sum()) == histogram.defined == 2**24 + 1001 and histogram.undefined == 1
    assert histogram.summary()["quantiles"]["0.99"] == pytest.approx(0.0005)


def test_numbers_are_for_readers():
    assert [percent(x, 2) for x in (0.0567, 0.5, 0.996, 1.0)] == [
        f"{t}\u00a0%" for t in ("5.7", "50", "100", "100")
    ]
    assert percent(1e-4) == "0.01\u00a0%"
    assert [number(x) for x in (None, 0.0, 0.1234, 2118.4, 1.5e-6)] == [
        "–",
        "0",
        "0.123",
        "2,118",
        "1.50 × 10⁻⁶",
    ]


def test_a_number_has_no_more_digits_than_its_error_allows():
    assert with_error(6.28e-4, 0.0383) == "0.001 ± 0.038"
    assert with_error(-0.0326, 0.0081) == "−0.0326 ± 0.0081"
    assert with_error(-1e-9, 0.05) == "0.000 ± 0.050" and with_error(123.4, 25.0) == "123 ± 25"
    assert with_error(None, None) == "–" and with_error(0.25, None) == "0.25"


def test_json_is_written_in_lines_and_says_the_same(tmp_path):
    row = {"name": "é", "numbers": [1, 2.5, None], "inner": {"a": True}}
    values = {
        "flat": {"a": 1},
        "none": [],
        "empty": {},
        "few": [row] * 2,
        "many": [row] * 9,
        "deep": {"x": {"y": [1]}},
    }
    write_json(tmp_path / "v.json", values)
    text = (tmp_path / "v.json").read_text(encoding="utf-8")
    assert json.loads(text) == values and text.endswith("}\n")
    assert sum('"name": "é"' in line for line in text.splitlines()) == 11
    assert max(map(len, text.splitlines())) < 90
    with pytest.raises(ValueError):
        write_json(tmp_path / "v.json", {"a": {"b": math.nan}})
    assert json.loads((tmp_path / "v.json").read_text(encoding="utf-8")) == values
    assert [path.name for path in tmp_path.iterdir()] == ["v.json"]
