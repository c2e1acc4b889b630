"""Shared top sets: every count against loops over Python sets, and chance against all possible draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ceilings.shared_tops import SharedTops, packed
from ceilings.testing import assert_equal
from ceilings.top_sets import chance_overlap, overlap

SHAPES = [(7, 5), (11,), (3, 4), (1,)]


def some_sets(count=4, seed=0):
    """Masks tensor by tensor, crowded in the first rows so that chance depends on what is kept."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for _ in range(count):
        masks = [torch.rand(shape, generator=generator) < 0.25 for shape in SHAPES]
        masks[0][:2] |= torch.rand(2, 5, generator=generator) < 0.6
        sets.append(masks)
    return sets


def shared(sets):
    return SharedTops(torch.stack([packed(masks) for masks in sets]), SHAPES)


def members(masks):
    return set(torch.cat([m.flatten() for m in masks]).nonzero()[:, 0].tolist())


def test_overlaps_are_those_of_the_masks():
    sets = some_sets()
    found = shared(sets).overlaps()
    for i, j in itertools.product(range(4), repeat=2):
        a, b = members(sets[i]), members(sets[j])
        assert_equal(found[i, j], 2 * len(a & b) / (len(a) + len(b)))
        assert_equal(found[i, j], overlap(sets[i], sets[j]))


@pytest.mark.claim("prop-shared-tops")
@pytest.mark.parametrize("within", ["tensor", "row", "column"])
def test_chance_keeps_the_counts_of_each_part(within):
    sets = some_sets()
    found = shared(sets).chance(within)
    for i, j in itertools.combinations(range(4), 2):
        assert_equal(found[i, j], chance_overlap(sets[i], sets[j], within=within))
        assert_equal(found[j, i], found[i, j])


def test_chance_of_all_knows_only_the_sizes():
    sets = some_sets()
    a, b = len(members(sets[0])), len(members(sets[1]))
    assert_equal(shared(sets).chance("all")[0, 1], 2 * a * b / 59 / (a + b))


@pytest.mark.claim("prop-shared-tops")
def test_drawn_sets_have_the_expected_overlap_and_no_more_spread_than_is_possible():
    sets = some_sets()
    tops = shared(sets)
    drawn = tops.drawn_overlaps(4000, np.random.default_rng(0))
    error = drawn.std(0) / math.sqrt(4000)
    counts, pair = tops.tensor_counts(), (0, 1)
    a, b = (counts[k] for k in pair)
    n = torch.tensor([35.0, 11, 12, 1], dtype=torch.float64)
    variance = torch.where(n > 1, a * b * (n - a) * (n - b) / (n.square() * (n - 1).clamp_min(1)), 0).sum()
    scale = 2 / (float(tops.sizes[0]) + float(tops.sizes[1]))
    assert abs(float(drawn[:, 0, 1].var() / (variance * scale**2)) - 1) < 0.15
    away = ((drawn.mean(0) - tops.chance("tensor")).abs() - 5 * error)[~torch.eye(4, dtype=torch.bool)]
    assert float(away.max()) < 0
    assert torch.equal(drawn, drawn.transpose(1, 2)) and bool((drawn.diagonal(dim1=1, dim2=2) == 1).all())


def test_companions_count_the_other_sets():
    sets = some_sets()
    found = shared(sets).companions()
    every = [members(masks) for masks in sets]
    for own in range(4):
        for k in range(4):
            held = [i for i in every[own] if sum(i in other for other in every) - 1 == k]
            assert_equal(found[own, k], len(held) / len(every[own]))


def test_chance_companions_are_an_average_over_every_way_to_draw():
    """Three sets in tensors of 3 and 2 entries: all placements, equally likely, one tensor at a time."""
    sizes, counts = (3, 2), ((1, 2), (2, 1), (1, 1))
    sets = [[torch.arange(n) < c for n, c in zip(sizes, row, strict=True)] for row in counts]
    found = SharedTops(torch.stack([packed(m) for m in sets]), [(3,), (2,)]).chance_companions()
    for own in range(3):
        expected = [0.0, 0.0, 0.0]
        for tensor, n in enumerate(sizes):
            ways = [list(itertools.combinations(range(n), counts[s][tensor])) for s in range(3)]
            draws = list(itertools.product(*ways))
            for draw in draws:
                for place in draw[own]:
                    k = sum(place in draw[other] for other in range(3) if other != own)
                    expected[k] += 1 / len(draws)
        assert_equal(found[own], torch.tensor(expected, dtype=torch.float64) / sum(counts[own]))


def test_errors_say_what_is_wrong():
    sets = some_sets(2)
    with pytest.raises(ValueError, match="two sets or more"):
        SharedTops(packed(sets[0])[None], SHAPES)
    with pytest.raises(ValueError, match="for 58 parameters"):
        SharedTops(torch.zeros(2, 7, dtype=torch.uint8), SHAPES[:3])
    with pytest.raises(ValueError, match="a top set is empty"):
        shared([[torch.zeros(shape, dtype=torch.bool) for shape in SHAPES], sets[0]])
