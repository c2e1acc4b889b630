"""Overlaps of changed sets against chance by cells, and spectra of changes, against enumeration and closed forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ceilings.changed_sets import cells_by_binade, cells_by_tensor, change_spectra, overlap_by_cells
from ceilings.testing import assert_equal
from ceilings.updates import singular_energy_share, stable_rank

F64 = torch.float64


def mask(*members, size):
    result = torch.zeros(size, dtype=torch.bool)
    result[list(members)] = True
    return result


def test_chance_is_the_mean_over_every_way_to_deal_the_members_out():
    first, second, cells = (
        mask(0, 1, 4, size=7),
        mask(1, 2, 4, 6, size=7),
        torch.tensor([0, 0, 0, 0, 1, 1, 1]),
    )
    found, chance = overlap_by_cells(first, second, cells)
    assert found == 2 / 3
    ways = [
        (*a, *b)
        for a in itertools.combinations(range(4), 2)  # the second has two of the first cell
        for b in itertools.combinations(range(4, 7), 2)
    ]
    mean = sum(len({0, 1, 4} & set(way)) for way in ways) / len(ways) / 3
    assert_equal(torch.tensor(chance, dtype=F64), torch.tensor(mean, dtype=F64))
    # One cell: the density of the second.
    assert_equal(torch.tensor(overlap_by_cells(first, second, cells * 0)[1]), torch.tensor(4 / 7))


def test_a_set_shares_all_of_itself_and_nothing_with_its_complement():
    first = mask(0, 3, size=5)
    alone = torch.arange(5)
    assert overlap_by_cells(first, first, alone) == (1.0, 1.0)
    assert overlap_by_cells(first, ~first, alone) == (0.0, 0.0)
    assert all(math.isnan(x) for x in overlap_by_cells(mask(size=5), first, alone))


def test_sets_about_other_entries_and_numbers_are_refused():
    with pytest.raises(ValueError, match="two masks and one cell an entry"):
        overlap_by_cells(mask(0, size=3), mask(0, size=4), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="two masks and one cell an entry"):
        overlap_by_cells(torch.ones(3), mask(0, size=3), torch.zeros(3, dtype=torch.long))


def test_cells_hold_one_tensor_and_one_binade():
    tensors = cells_by_tensor([2, 6])
    assert tensors.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    weights = torch.tensor([1.0, 1.9, 1.0, -1.5, 0.99, 0.0, 1e-9, 2.0], dtype=F64)
    cells = cells_by_binade(weights, tensors).tolist()
    assert cells[0] == cells[1] != cells[2] == cells[3]
    assert len({cells[2], cells[4], cells[5], cells[7]}) == 4
    assert cells[5] == cells[6]


def test_spectra_of_rank_one_and_of_the_identity():
    one = torch.outer(torch.arange(1.0, 5.0), torch.arange(1.0, 9.0)).double()
    found = change_spectra([one, torch.zeros(3, 3)])
    assert_equal(
        torch.tensor([found["rank"], found["stable rank"], found["energy 1"]]), torch.tensor([0.25, 0.25, 1])
    )
    both = change_spectra([one, torch.eye(4)])
    expected = torch.tensor([(0.25 + 1) / 2, (0.25 + 1) / 2, (1 + 0.25) / 2, 1.0])
    assert_equal(torch.tensor([both[k] for k in ("rank", "stable rank", "energy 1", "energy 4")]), expected)
    assert all(math.isnan(x) for x in change_spectra([torch.zeros(2, 2)]).values())


def test_spectra_agree_with_the_measures_of_one_matrix():
    change = torch.randn(12, 30, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = change_spectra([change], directions=(3,))
    assert_equal(torch.tensor(found["stable rank"]), torch.tensor(stable_rank(change) / 12))
    assert_equal(torch.tensor(found["energy 3"]), torch.tensor(singular_energy_share(change, 3)))
    assert found["rank"] == int(torch.linalg.matrix_rank(change.float())) / 12 == 1.0


def test_the_random_stable_rank_is_that_of_a_large_random_matrix():
    change = torch.randn(400, 300, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = change_spectra([change])
    assert abs(found["stable rank"] / found["random"] - 1) < 0.03
