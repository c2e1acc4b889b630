"""Cross-fitted tightness over parameters that share responses: sums by hand, and its error against chance."""

import math

import pytest
import torch

from ceilings import evidence
from ceilings.evidence import critical_value, tensor_evidence
from ceilings.moments import ScoreMoments
from ceilings.testing import assert_equal
from ceilings.uncertainty import (
    cross_fitted_energy,
    cross_fitted_squares,
    cross_fitted_tightness,
    effective_sample_size,
    permutation_floor,
    with_permuted,
)

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def moments(scores, columns, names):
    """Moments of stored scores, one parameter called "theta"."""
    return ScoreMoments(
        scores={"theta": scores.sum(0)},
        squares={"theta": scores.square().sum(0)},
        reward_scores={"theta": columns.T @ scores},
        reward_shift=torch.zeros(columns.shape[1], dtype=F64),
        reward_sum=columns.sum(0),
        reward_squares=columns.square().sum(0),
        reward_names=names,
        count=len(scores),
        weight_sum=float(len(scores)),
    )


def pair(scores, rewards, sizes, permutations, g):
    """Two halves with permuted rewards beside the real ones."""
    found = []
    for some in torch.arange(len(scores)).split(sizes):
        mixed, names = with_permuted(rewards[some, 0], permutations, g)
        real = tuple(f"r{k}" for k in range(rewards.shape[1]))
        columns = torch.cat([rewards[some], mixed[:, 1:]], 1)
        found.append(moments(scores[some], columns, (*real, *names[1:])))
    return found


def example(seed=0, n=24, d=40):
    g = generator(seed)
    scores = torch.randn(n, 3, generator=g, dtype=F64) @ torch.randn(3, d, generator=g, dtype=F64)
    scores[:, 5] = 0
    rewards = torch.randn(n, 2, generator=g, dtype=F64)
    return pair(scores, rewards, [10, n - 10], 2, g)


def test_sums_are_those_of_the_functions_for_one_estimate():
    first, second = example()
    found, fitted = tensor_evidence(first, second, rewards=2)
    whole = first.merge(second)
    assert found.defined == 39 and len(fitted) == 4
    for k, reward in enumerate(first.reward_names):
        exact = cross_fitted_tightness(first, second, reward)["theta"]
        assert torch.equal(fitted[k].isnan(), exact.isnan())
        assert_equal(fitted[k].nan_to_num(), exact.nan_to_num())
        if k < 2:
            estimate = found.estimate(k)
            assert estimate.mean == pytest.approx(float(exact.nanmean()))
            squares = cross_fitted_squares(first, second, reward)["theta"]
            assert estimate.mean_square == pytest.approx(float(squares.nanmean()))
            energy = cross_fitted_energy(first, second, reward)["theta"].sum()
            assert estimate.energy == pytest.approx(float(energy))
            size = effective_sample_size(first, second, reward)["theta"]
            assert estimate.effective_size == pytest.approx(size)
            assert found.in_sample_mean(k) == pytest.approx(float(whole.tightness(reward)["theta"].nanmean()))
    assert found.permutation_floor == pytest.approx(float(permutation_floor(whole)["theta"].nanmean()))
    assert found.permuted == pytest.approx(float(torch.stack(fitted[2:]).nanmean()))


def test_pieces_of_a_tensor_add_up_and_so_do_tensors(monkeypatch):
    first, second = example()
    whole, fitted = tensor_evidence(first, second, rewards=2)
    monkeypatch.setattr(evidence, "_CHUNK", 7)
    pieces, again = tensor_evidence(first, second, rewards=2)
    assert pieces.defined == whole.defined
    for field in ("tightness", "squares", "energy", "in_sample", "crossed", "spread"):
        assert_equal(getattr(pieces, field), getattr(whole, field))
    assert torch.equal(again[0].isnan(), fitted[0].isnan()) and again[0].shape == fitted[0].shape
    twice = whole + pieces
    assert twice.estimate().mean == pytest.approx(whole.estimate().mean)
    assert twice.estimate().standard_error == pytest.approx(whole.estimate().standard_error)
    assert twice.estimate().degrees_of_freedom == 10


@pytest.mark.parametrize("permutations, directions", [(1, 1), (1, 20), (2, 5)])
def test_the_standard_error_is_the_spread_that_chance_gives(permutations, directions):
    """Parameters that share a few directions: their number, 60, is no number of independent values."""
    g, means, errors, beyond, above, repeats = generator(directions), [], [], 0, 0, 300
    for _ in range(repeats):
        scores = torch.randn(64, directions, generator=g, dtype=F64)
        scores = scores @ torch.randn(directions, 60, generator=g, dtype=F64)
        rewards = torch.rand(64, 1, generator=g, dtype=F64).round()
        found = tensor_evidence(*pair(scores, rewards, [32, 32], permutations, g))[0].estimate()
        assert found.degrees_of_freedom == permutations * (2 * permutations + 1)
        means.append(found.mean)
        errors.append(found.standard_error)
        reach = critical_value(found.degrees_of_freedom) * found.standard_error
        beyond, above = beyond + (abs(found.mean) > reach), above + (found.mean > reach)
    spread, error = torch.tensor(means).std(), torch.tensor(errors).square().mean().sqrt()
    assert 0.8 < float(error / spread) < 1.35
    assert abs(float(torch.tensor(means).mean())) < 4 * float(spread) / math.sqrt(repeats)
    # 5 % are promised; errors from few draws make it less. 10 % is four standard errors above.
    assert beyond / repeats < 0.10
    # The words of a report count one side: one sample of forty. 6.1 % is four standard errors above 2.5 %.
    assert above / repeats < 0.061


def test_what_is_there_is_seen_whatever_the_halves():
    g = generator()
    scores = torch.randn(200, 5, generator=g, dtype=F64) @ torch.randn(5, 60, generator=g, dtype=F64)
    rewards = (scores[:, :1] / scores[:, :1].std() + torch.randn(200, 1, generator=g, dtype=F64)) / math.sqrt(
        2
    )
    found = tensor_evidence(*pair(scores, rewards, [90, 110], 2, g))[0].estimate()
    exact = torch.corrcoef(torch.cat([rewards, scores], 1).T)[0, 1:].abs().mean()
    assert abs(found.mean - float(exact)) < 0.1
    assert found.mean > 2 * critical_value(found.degrees_of_freedom) * found.standard_error


def test_a_reward_that_does_not_vary_says_nothing_and_spoils_nothing():
    g = generator()
    scores, rewards = torch.randn(24, 9, generator=g, dtype=F64), torch.randn(24, 2, generator=g, dtype=F64)
    rewards[:, 1] = 3.0
    found = tensor_evidence(*pair(scores, rewards, [12, 12], 1, g), rewards=2)[0]
    alone = tensor_evidence(*pair(scores, rewards[:, :1], [12, 12], 1, generator(1)))[0]
    assert found.estimate(0).mean == pytest.approx(alone.estimate(0).mean)
    nothing = found.estimate(1)
    assert nothing.mean is None and nothing.standard_error is None and nothing.energy == 0


def test_without_permuted_rewards_there_is_no_error():
    g = generator()
    scores, rewards = torch.randn(24, 9, generator=g, dtype=F64), torch.randn(24, 1, generator=g, dtype=F64)
    found = tensor_evidence(*pair(scores, rewards, [12, 12], 0, g))[0]
    assert found.estimate().standard_error is None and found.permuted is None


def test_only_one_parameter_at_a_time():
    first, second = example()
    both = [
        ScoreMoments(
            **{
                **part.__dict__,
                **{
                    p: getattr(part, p) | {"x": getattr(part, p)["theta"]}
                    for p in ("scores", "squares", "reward_scores")
                },
            }
        )
        for part in (first, second)
    ]
    with pytest.raises(ValueError, match="2 parameters: give the moments of one"):
        tensor_evidence(*both)


def test_few_draws_ask_for_more():
    assert [critical_value(n) for n in (1, 3, 10, 21, 36, 100)] == [12.7, 3.18, 2.23, 2.08, 2.03, 2.0]
    assert critical_value(4) == 2.23  # between two rows of the table
