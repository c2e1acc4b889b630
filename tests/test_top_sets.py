"""Order statistics over many tensors against sorting them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ceilings.testing import assert_within_standard_errors
from ceilings.top_sets import (
    chance_overlap,
    concentration,
    overlap,
    quantiles,
    sampled_overlap,
    stratified_sample,
    take,
    top_level,
    top_set,
)

SHARES = [0.0, 0.001, 0.3, 0.5, 0.9, 0.99, 1.0]


def heavy_tailed(n, seed=0):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).abs() ** 5
    x[: n // 20] = 0
    return x


def test_quantiles_are_the_sorted_entries_whatever_the_split():
    x = heavy_tailed(10_007)
    ordered = x.sort().values
    expected = torch.stack([ordered[min(max(math.ceil(q * len(x)), 1), len(x)) - 1] for q in SHARES])
    for parts in ([x], [x[:1], x[1:4999].view(-1, 2).T, x[4999:]]):
        assert torch.equal(quantiles(parts, SHARES), expected)


@given(st.lists(st.floats(0, 2.0**40, width=32), min_size=1, max_size=30), st.floats(0, 1))
def test_any_quantile_of_any_list(numbers, share):
    x = torch.tensor(numbers, dtype=torch.float32)
    rank = min(max(math.ceil(share * len(x)), 1), len(x))
    assert float(quantiles([x], [share])[0]) == float(x.sort().values[rank - 1])


def test_top_level_is_the_smallest_of_the_top():
    x = heavy_tailed(20_000)
    assert top_level([x[:7000], x[7000:]], 0.01) == float(x.topk(200).values[-1])
    assert top_level([x], 1.0) == 0.0


def test_overlap_of_equal_disjoint_and_independent_sets():
    x, y = heavy_tailed(20_000), heavy_tailed(20_000, seed=1)
    parts = top_set([x[:300], x[300:]], 0.01)
    assert overlap(parts, parts) == 1.0
    distinct = torch.rand(20_000, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    assert overlap(top_set([distinct], 0.01), top_set([1 - distinct], 0.01)) == 0.0
    expected = len(set(x.topk(200).indices.tolist()) & set(y.topk(200).indices.tolist())) / 200
    assert overlap(top_set([x], 0.01), top_set([y], 0.01)) == expected


def test_chance_keeps_the_counts_of_tensors_or_rows():
    # Ten members, all in one row of the first of two tensors.
    first = [torch.zeros(10, 20, dtype=torch.bool), torch.zeros(7, dtype=torch.bool)]
    first[0][4, :10] = True
    second = [first[0].flip(1), first[1]]
    assert overlap(first, second) == 0.0
    assert math.isclose(chance_overlap(first, second), 10 * 10 / 200 / 10)
    assert math.isclose(chance_overlap(first, second, within="row"), 10 * 10 / 20 / 10)
    # Columns: the members of the first lie in columns 0 to 9, those of the second in 10 to 19.
    assert chance_overlap(first, second, within="column") == 0.0
    swapped = [[x.T.contiguous() if x.ndim == 2 else x for x in masks] for masks in (first, second)]
    assert math.isclose(
        chance_overlap(*swapped, within="column"), chance_overlap(first, second, within="row")
    )


def test_chance_is_the_mean_over_random_sets_with_those_counts():
    generator = torch.Generator().manual_seed(4)
    first, second = ([torch.rand(6, 30, generator=generator) < p] for p in (0.2, 0.4))
    order = [torch.rand(6, 30, generator=generator).argsort(1) for _ in range(4000)]
    draws = torch.tensor([overlap([first[0].gather(1, o)], second) for o in order])
    expected = chance_overlap(first, second, within="row")
    assert_within_standard_errors(draws.mean(), expected, draws.std() / len(draws) ** 0.5, k=4)


def test_sampled_overlap_is_the_overlap_of_the_sample():
    x, y = heavy_tailed(20_000), heavy_tailed(20_000, seed=1)
    assert sampled_overlap(torch.stack([x, y]), x, 0.01).tolist() == [
        1.0,
        pytest.approx(overlap(top_set([y], 0.01), top_set([x], 0.01))),
    ]


def test_concentration_is_exact_on_the_bfloat16_grid_and_close_between():
    x = heavy_tailed(20_000)
    total = float(x.double().sum())
    for share in (0.001, 0.01, 0.1, 1.0):
        expected = float(x.topk(int(share * len(x))).values.double().sum()) / total
        assert math.isclose(float(concentration([x[:9], x[9:]], [share])[0]), expected, abs_tol=2e-3)
    coarse = x.bfloat16().float()
    expected = float(coarse.topk(200).values.double().sum() / coarse.double().sum())
    assert math.isclose(float(concentration([coarse], [0.01])[0]), expected, rel_tol=1e-9)


def test_sample_takes_one_of_every_block():
    where = stratified_sample({"a": 700, "b": 5, "c": 77}, 7, torch.Generator().manual_seed(0))
    assert [len(w) for w in where.values()] == [100, 0, 11]
    assert torch.equal(where["a"] // 7, torch.arange(100)) and len(where["a"].remainder(7).unique()) == 7
    values = {name: torch.arange(float(n)) for name, n in (("a", 700), ("b", 5), ("c", 77))}
    assert torch.equal(take(values, where), torch.cat([where["a"], where["c"]]).float())


@pytest.mark.parametrize("bad", [torch.tensor([-1.0]), torch.tensor([torch.nan])])
def test_undefined_and_negative_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="negative or NaN"):
        quantiles([bad.float()], [0.5])


def test_each_mistake_has_its_sentence():
    x = torch.rand(10, dtype=torch.float32)
    with pytest.raises(ValueError, match="need float32"):
        quantiles([x.double()], [0.5])
    with pytest.raises(ValueError, match=r"shares must lie in \[0, 1\]"):
        quantiles([x], [1.5])
    with pytest.raises(ValueError, match="no number"):
        quantiles([], [0.5])
    with pytest.raises(ValueError, match="different shapes"):
        overlap([x > 0.5], [x[:5] > 0.5])
    with pytest.raises(ValueError, match="ties"):
        top_set([torch.ones(100, dtype=torch.float32)], 0.1)
    with pytest.raises(ValueError, match="no sum to share"):
        concentration([torch.zeros(3, dtype=torch.float32)], [0.5])
    with pytest.raises(ValueError, match="every must be at least 1"):
        stratified_sample({"a": 3}, 0, torch.Generator())
