"""Overlaps with ties: every choice among the ties tried, and chance by the hypergeometric mean."""

import itertools

import pytest
import torch

from ceilings.testing import assert_within_standard_errors
from ceilings.tied_overlaps import overlap_interval, random_overlaps, top_sides


def choices(values, size):
    """Every set of the largest that some order of the ties gives."""
    ranked = sorted(values, reverse=True)
    cut = ranked[size - 1]
    sure = {i for i, v in enumerate(values) if v > cut}
    ties = [i for i, v in enumerate(values) if v == cut]
    return [sure | set(extra) for extra in itertools.combinations(ties, size - len(sure))]


@pytest.mark.parametrize("seed", range(8))
def test_interval_holds_exactly_what_some_choice_attains(seed):
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(0, 4, (12,), generator=generator).double() for _ in range(2))
    found = [len(a & b) / 3 for a in choices(first.tolist(), 3) for b in choices(second.tolist(), 3)]
    assert overlap_interval(first, second, 0.25) == (min(found), max(found))


def test_without_ties_the_interval_is_a_number():
    x = torch.arange(200.0)
    assert overlap_interval(x, x, 0.05) == (1, 1)
    assert overlap_interval(x, -x, 0.05) == (0, 0)
    half = torch.where(x >= 195, 1000 + x, torch.where(x >= 190, -x, x))
    assert overlap_interval(x, half, 0.05) == (0.5, 0.5)


def test_last_digits_of_float64_break_no_tie():
    steps = torch.full((100,), 0.3, dtype=torch.float64) + 1e-17 * torch.arange(100)
    noisy = torch.full((100,), 0.1, dtype=torch.float64) * 3 + torch.tensor(
        [0, 5e-17] * 50, dtype=torch.float64
    )
    for values in (steps, noisy):
        sides, still_open = top_sides(values, 0.1)
        assert (sides == 1).all() and still_open == 10


def test_chance_within_tensors_is_hypergeometric():
    generator = torch.Generator().manual_seed(1)
    tensors = torch.tensor([0] * 30 + [1] * 70)
    first, second = (torch.rand(100, generator=generator) for _ in range(2))
    a, b = (set(v.topk(10).indices.tolist()) for v in (first, second))
    expected = sum(
        len([i for i in a if inside(i)]) * len([i for i in b if inside(i)]) / size / 10
        for inside, size in ((lambda i: i < 30, 30), (lambda i: i >= 30, 70))
    )
    drawn = random_overlaps(first, second, tensors, 0.1, 3000, generator)
    assert_within_standard_errors(drawn.mean(), expected, drawn.std() / 3000**0.5, k=4)


def test_chance_keeps_how_many_lie_in_each_tensor():
    """All large ones of both in one small tensor that they fill: chance cannot do otherwise than share them all."""
    tensors = torch.tensor([0] * 10 + [1] * 90)
    x = torch.cat([torch.ones(10), torch.zeros(90)])
    assert random_overlaps(x, x, tensors, 0.1, 20, torch.Generator()).tolist() == [1.0] * 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: overlap_interval(torch.ones(3), torch.ones(4)), "not about the same parameters"),
        (lambda: top_sides(torch.ones(2, 2), 0.1), "give a vector without NaN"),
        (lambda: top_sides(torch.tensor([1.0, float("nan")]), 0.1), "give a vector without NaN"),
        (lambda: top_sides(torch.ones(3), 0.0), "a share in"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
