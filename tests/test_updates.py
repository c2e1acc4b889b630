"""`ceilings.updates` against closed forms: masks that are counted, singular values that are prescribed."""

import math

import pytest
import torch

from ceilings.updates import energy_share, relative_size, singular_energy_share, stable_rank, update_sparsity

GENERATOR = torch.Generator().manual_seed(0)


def matrix_with(values: list[float], size: int = 8) -> torch.Tensor:
    """Matrix of the given singular values, between random orthogonal factors."""
    left, right = (
        torch.linalg.qr(torch.randn(size, size, generator=GENERATOR, dtype=torch.float64)).Q for _ in range(2)
    )
    k = len(values)
    return left[:, :k] @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right[:, :k].T


def test_relative_size_is_the_ratio_of_lengths() -> None:
    base = torch.tensor([3.0, 4.0])
    assert relative_size(base, base + torch.tensor([0.0, 0.5])) == pytest.approx(0.1)


def test_sparsity_counts_equal_entries_in_the_named_format() -> None:
    base = torch.ones(1000)
    step = 2.0**-8  # half the gap above 1 in bfloat16: a tie, which goes to the even neighbour, 1 itself
    tuned = base.clone()
    tuned[:100] += step  # invisible in bfloat16
    tuned[100:130] += 1.01 * step  # visible
    assert update_sparsity(base, tuned, torch.float32) == pytest.approx(0.870)
    assert update_sparsity(base, tuned, torch.bfloat16) == pytest.approx(0.970)


def test_signed_zeros_are_equal() -> None:
    assert update_sparsity(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), torch.float32) == 1.0


def test_rank_measures_follow_prescribed_singular_values() -> None:
    matrix = matrix_with([4.0, 2.0, 2.0])
    assert stable_rank(matrix) == pytest.approx((16 + 4 + 4) / 16)
    assert singular_energy_share(matrix, 1) == pytest.approx(16 / 24)
    assert singular_energy_share(matrix, 3) == pytest.approx(1.0)


def test_stable_rank_ignores_rounding_that_makes_the_rank_full() -> None:
    update = matrix_with([1.0], size=64).float()
    rounded = update.bfloat16().double()
    assert torch.linalg.matrix_rank(rounded) > 32
    assert stable_rank(rounded) == pytest.approx(1.0, abs=1e-3)


def test_energy_share_of_a_flat_change_is_the_share_itself() -> None:
    assert energy_share(torch.ones(1000), 0.01) == pytest.approx(0.01)
    assert energy_share(torch.tensor([3.0, 0.0, 0.0, 4.0]), 0.25) == pytest.approx(16 / 25)
    assert energy_share(torch.tensor([1.0, 2.0]), 1e-9) == pytest.approx(0.8)  # at least one coordinate


@pytest.mark.parametrize("measure", [relative_size, lambda a, b: update_sparsity(a, b, torch.float32)])
@pytest.mark.parametrize(
    ("base", "tuned", "message"),
    [
        (torch.ones(2), torch.ones(3), "nothing to compare"),
        (torch.ones(0), torch.ones(0), "empty"),
        (torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.long), "floating point"),
        (torch.ones(2), torch.tensor([1.0, math.nan]), "tuned has an entry that is NaN"),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(measure, base, tuned, message) -> None:
    with pytest.raises(ValueError, match=message):
        measure(base, tuned)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: relative_size(torch.zeros(2), torch.ones(2)), "no meaning"),
        (lambda: stable_rank(torch.zeros(2, 2)), "all zeros"),
        (lambda: stable_rank(torch.ones(4)), "property of a matrix"),
        (lambda: singular_energy_share(torch.ones(2, 2), 0), "at least one"),
        (lambda: energy_share(torch.zeros(3), 0.5), "nothing moved"),
        (lambda: energy_share(torch.ones(3), 1.5), "must lie in"),
    ],
)
def test_measures_say_what_is_wrong(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
