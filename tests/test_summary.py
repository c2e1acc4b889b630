"""Statistics of moments made by hand: zeros, shares, names, the derived tensors."""

import math

import pytest
import torch

from ceilings.charts import number, percent
from ceilings.moments import ScoreMoments
from ceilings.summary import _Histogram, derived_tensors, noise_floor, summarise


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
    found = summarise(by_hand(scores, torch.tensor([1.0, 0.0, 1.0, 0.0]).double()))
    # F = 1, 4, 9, 16 and six zeros; the reward has standard deviation 1/2 and is perfectly correlated.
    assert found["fisher"]["zero"] == 6 and found["fisher"]["total"] == pytest.approx(30)
    assert found["ceiling"]["quantiles"]["0.5"] == 0
    assert found["ceiling"]["quantiles"]["0.95"] == pytest.approx(2, rel=0.04)
    assert found["fisher"]["share_in_top"]["0.1"] == pytest.approx(16 / 30)
    assert found["fisher"]["share_in_top"]["0.3"] == pytest.approx(29 / 30)
    assert found["tightness"]["defined"] == 4 and found["tightness"]["undefined"] == 6
    assert found["tightness"]["mean"] == pytest.approx(1) and found["gradient"]["norm"] == pytest.approx(
        30**0.5 / 2
    )
    assert found["uncertainty"]["mean_score_ratio"] == 0
    assert found["tensors"][0]["layer"] == 3 and found["tensors"][0]["matrix"] == "mlp.experts.*.w1"
    assert found["gradient"]["norm_shuffled"] is None and found["uncertainty"]["shuffled_tightness"] is None


def test_noise_floor_is_the_mean_of_an_unrelated_correlation():
    n, draws = 200, 4000
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(draws, n, generator=g)
    reward = torch.randn(n, generator=g)
    rho = torch.stack([torch.corrcoef(torch.stack([row, reward]))[0, 1].abs() for row in scores])
    # |ρ̂| has standard deviation √(1 − 2/π)/√n; five standard errors.
    assert abs(float(rho.mean()) - noise_floor(n)) < 5 * math.sqrt((1 - 2 / math.pi) / n / draws)


def test_derived_tensors_are_those_of_the_moments():
    g = torch.Generator().manual_seed(0)
    moments = by_hand(torch.randn(6, 5, generator=g).double(), torch.randn(6, generator=g).double())
    for what, expected in (
        ("gradient", moments.gradient()),
        ("fisher", moments.diagonal_fisher()),
        ("ceiling", moments.ceiling()),
        ("tightness", moments.tightness()),
    ):
        found = derived_tensors(moments, what)
        assert all(torch.equal(found[name], expected[name]) for name in moments.names)
    with pytest.raises(ValueError, match="'shape' is not derived from moments"):
        derived_tensors(moments, "shape")


def test_every_entry_of_a_large_tensor_is_counted():
    histogram = _Histogram()
    histogram.add(torch.full((2**24 + 1000,), 0.0005))
    histogram.add(torch.tensor([1.0, torch.nan]))
    assert float(histogram.counts.sum()) == histogram.defined == 2**24 + 1001 and histogram.undefined == 1
    assert histogram.summary()["quantiles"]["0.99"] == 0.0005


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
