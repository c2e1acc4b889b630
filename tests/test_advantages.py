"""Advantages against loops over exact fractions; what equal rewards and groups of one do."""

from fractions import Fraction

import pytest
import torch

from ceilings.advantages import advantages, group_sizes, penalised_rewards, reward_to_go
from ceilings.testing import assert_equal

# A group of four: 4/3 has no exact float32, which a quotient of whole numbers would be.
REWARDS = torch.tensor([1.0, 0.0, 4.0, 2.0, 2.5, 7.0, 5.0], dtype=torch.float64)
GROUPS = (3, 3, 8, 3, 8, 8, 8)


def members(n):
    return [m for m in range(len(GROUPS)) if GROUPS[m] == GROUPS[n]]


def by_hand(n, baseline):
    """Advantage of one response, in exact arithmetic."""
    exact = [Fraction(float(r)) for r in REWARDS]
    others = [m for m in members(n) if baseline == "mean" or m != n]
    return exact[n] - (sum(exact[m] for m in others) / len(others) if baseline != "none" else 0)


@pytest.mark.parametrize("baseline", ["none", "mean", "leave_one_out"])
def test_baselines_are_those_of_the_group(baseline):
    expected = torch.tensor([float(by_hand(n, baseline)) for n in range(7)], dtype=torch.float64)
    assert_equal(advantages(REWARDS, GROUPS, baseline=baseline), expected, rtol=1e-15)


@pytest.mark.parametrize("scale, lost", [("sample_std", 1), ("population_std", 0)])
def test_scales_are_the_standard_deviation_with_their_divisor(scale, lost):
    found = advantages(REWARDS, torch.tensor(GROUPS), scale=scale)
    for n in range(7):
        squares = [by_hand(m, "mean") ** 2 for m in members(n)]
        std = float(sum(squares) / (len(squares) - lost)) ** 0.5
        assert_equal(found[n], float(by_hand(n, "mean")) / std, rtol=1e-14)
    # Stated in the notes: mean square (G − 1)/G or 1.
    assert_equal(found[[0, 1, 3]].square().mean(), 2 / 3 if lost else 1.0, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", ["none", "sample_std", "population_std"])
def test_equal_rewards_have_no_advantage_at_all(scale, dtype):
    rewards = torch.full((3,), 0.1, dtype=dtype)
    for baseline in ("mean", "leave_one_out"):
        assert advantages(rewards, (0, 0, 0), baseline=baseline, scale=scale).tolist() == [0, 0, 0]


def test_advantages_are_constants():
    assert not advantages(REWARDS.clone().requires_grad_(), GROUPS, baseline="none").requires_grad


@pytest.mark.parametrize(
    "options, message",
    [
        ({"baseline": "leave_one_out"}, "response 2 is the only one of its group: leave_one_out needs two"),
        ({"scale": "sample_std"}, "response 2 is the only one of its group: sample_std needs two"),
        ({"baseline": "none", "scale": "sample_std"}, "only after a baseline is taken off"),
        ({"baseline": "median"}, "there is no baseline 'median'"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        advantages(torch.tensor([1.0, 2.0, 3.0]), (0, 0, 1), **options)


def test_a_group_of_one_has_the_advantage_zero_by_its_own_mean():
    assert advantages(torch.tensor([1.0, 2.0, 3.0]), (0, 0, 1)).tolist() == [-0.5, 0.5, 0]
    assert advantages(torch.tensor([3.0]), (0,), scale="population_std").tolist() == [0]


def test_wrong_shapes_and_values_are_refused():
    with pytest.raises(ValueError, match="2 groups for 3 rewards"):
        advantages(torch.zeros(3), (0, 0))
    with pytest.raises(ValueError, match="rewards must be a floating-point vector"):
        advantages(torch.zeros(3, dtype=torch.long), (0, 0, 0))
    with pytest.raises(ValueError, match="reward of response 1 is not finite"):
        advantages(torch.tensor([0, torch.nan]), (0, 0))
    with pytest.raises(ValueError, match="groups must be a non-empty vector of whole numbers"):
        group_sizes(torch.tensor([0.5, 1.0]))
    with pytest.raises(ValueError, match=r"rewards of shape \(2,\) but log-ratios of shape \(3,\)"):
        penalised_rewards(torch.zeros(2), torch.zeros(3), beta=1.0)
    with pytest.raises(ValueError, match="beta is -1"):
        penalised_rewards(torch.zeros(2), torch.zeros(2), beta=-1.0)
    with pytest.raises(ValueError, match="discount is 1.5"):
        reward_to_go(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), discount=1.5)
    with pytest.raises(ValueError, match="expected .N, T. twice, the mask boolean"):
        reward_to_go(torch.zeros(1, 2), torch.ones(1, 2))


def test_a_leash_takes_off_the_log_ratio():
    ratios = torch.tensor([1.0, -2.0], requires_grad=True)
    found = penalised_rewards(torch.tensor([3.0, 4.0]), ratios, beta=0.5)
    assert found.tolist() == [2.5, 5.0] and not found.requires_grad


def test_reward_to_go_is_the_discounted_sum_of_what_follows():
    rewards = torch.tensor([[9.0, 1.0, 2.0, 4.0], [1.0, 2.0, 3.0, torch.nan]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True], [True, False, True, False]])
    found = reward_to_go(rewards, mask, discount=0.5)
    assert found.tolist() == [[0, 1 + 1 + 1, 2 + 2, 4], [1 + 1.5, 0, 3, 0]]
