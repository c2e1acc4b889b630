"""Storage: every number of bf16 against a search in the list of all of them; torch's own formats as a peer."""

import math

import pytest
import torch

from ceilings.storage import (
    STORAGES,
    StoredWeights,
    half_gap,
    rounds_to_change,
    spacing,
    stochastically_stored,
    stored,
    stored_dtype,
)
from ceilings.testing import assert_within_standard_errors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def line():
    """Every finite bf16 from the most negative to the largest, and the next power of two beyond each end."""
    positive = (torch.arange(0x7F80, dtype=torch.int32) << 16).view(torch.float32).double()
    positive = torch.cat([positive, f64(2.0**128)])
    return torch.cat([-positive.flip(0)[:-1], positive]), len(positive) - 1


def nearest(values, grid, zero):
    """Place on the line of the nearest number, of two equally near the one whose pattern is even."""
    high = torch.searchsorted(grid, values).clamp(1, len(grid) - 1)
    below, above = values - grid[high - 1], grid[high] - values
    even_above = (high - zero).abs() % 2 == 0
    return torch.where((above < below) | ((above == below) & even_above), high, high - 1)


@pytest.mark.claim("prop-ulp")
@pytest.mark.parametrize("direction", [1, -1])
def test_every_finite_bf16_changes_exactly_beyond_half_the_gap_in_the_direction_of_the_step(direction):
    grid, zero = line()
    place = torch.arange(zero, len(grid) - 1)  # 2^15 − 128 numbers from 0 up
    gaps = (grid[place + direction] - grid[place]).abs()
    seen = 0
    for part in (0.25, 0.5 - 2.0**-12, 0.5, 0.5 + 2.0**-12, 0.75, 1.0):
        for sign in (1, -1):
            weights, steps = sign * grid[place], sign * direction * part * gaps
            moved = nearest(weights + steps, grid, zero) != zero + sign * (place - zero)
            assert torch.equal(rounds_to_change(weights, steps, BF16), moved)
            seen += int(moved.sum())
    odd = (place - zero) % 2 == 1
    # Beyond half: three parts of six change always, half a gap only where the last bit is odd, on both signs.
    assert seen == 2 * (3 * len(place) + int(odd.sum()))


@pytest.mark.claim("prop-ulp")
def test_half_gap_of_every_finite_bf16_is_half_the_distance_on_the_line():
    grid, zero = line()
    place = torch.arange(1, len(grid) - 1)
    for direction in (1, -1):
        steps = torch.full((len(place),), float(direction), dtype=torch.float64)
        assert torch.equal(
            half_gap(grid[place], steps, BF16), (grid[place + direction] - grid[place]).abs() / 2
        )


@pytest.mark.parametrize(
    ("weight", "step", "expected"),
    [
        (1.0, 1, 2.0**-8),
        (1.0, -1, 2.0**-9),
        (-1.0, 1, 2.0**-9),
        (1.5, -1, 2.0**-8),
        (0.0, -1, 2.0**-134),
        (2.0**-126, -1, 2.0**-134),
    ],
)
def test_half_gaps_by_hand(weight, step, expected):
    assert half_gap(f64(weight), f64(step), BF16).tolist() == [expected]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_stored_agrees_with_torch_on_every_binade(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40_000, generator=generator) * 2.0 ** torch.randint(
        -140 if dtype == BF16 else -27, 17, (40_000,), generator=generator
    )
    assert torch.equal(
        stored(values.double(), dtype), values.to(dtype).double()
    )  # float32: torch rounds once


def test_stored_in_fp32_agrees_with_torch():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(stored(values, FP32), values.float().double())


def test_one_rounding_is_not_two():
    """Just above half a gap: through float32 it becomes a tie and is lost."""
    value = f64(1 + 2.0**-8 + 2.0**-40)
    assert stored(value, BF16).tolist() == [1 + 2.0**-7]
    assert value.float().to(BF16).tolist() == [1.0]
    assert value.to(BF16).tolist() == [1.0]


def test_beyond_the_largest_number_is_infinite():
    assert stored(f64(65519.0, 65520.0, -65520.0), FP16).tolist() == [65504.0, math.inf, -math.inf]


def test_stochastic_rounding_changes_with_the_share_of_the_gap_and_keeps_the_mean():
    generator, n = torch.Generator().manual_seed(2), 40_000
    for weight, step in ((1.0, 0.3 * 2.0**-7), (1.0, -0.3 * 2.0**-8), (-1.5, 0.1 * 2.0**-7)):
        value = torch.full((n,), weight + step, dtype=torch.float64)
        drawn = stochastically_stored(value, BF16, generator)
        gap = 2 * float(half_gap(f64(weight), f64(step), BF16))
        assert set(drawn.tolist()) == {weight, weight + math.copysign(gap, step)}
        share = abs(step) / gap
        error = (share * (1 - share) / n) ** 0.5
        assert_within_standard_errors((drawn != weight).double().mean(), share, error, k=4)
        assert_within_standard_errors(drawn.mean(), weight + step, gap * error, k=4)
    grid = f64(0.0, 1.0, -1.5, 2.0**-133)
    assert torch.equal(stochastically_stored(grid, BF16, generator), grid)


def parameters(value, count=4):
    return [torch.nn.Parameter(torch.full((count,), value, dtype=torch.float64))]


def after(storage, steps=100, count=4):
    """Adam on a constant gradient: every step is the rate, 1e-4, against half a gap of 2^-9 below 1."""
    weights = parameters(1.0, count)
    stepper = StoredWeights(torch.optim.Adam(weights, lr=1e-4), storage, torch.Generator().manual_seed(3))
    for _ in range(steps):
        stepper.zero_grad()
        weights[0].grad = torch.ones(count, dtype=torch.float64)
        stepper.step()
    return weights[0].detach()


def test_weights_of_one_move_in_fp32_and_over_a_master_and_not_in_bf16():
    assert after("bf16").tolist() == [1.0] * 4  # every step is below half a gap
    assert after("master").tolist() == [0.98828125] * 4  # 0.99, on a grid of 2^-8
    # A hundred roundings, each by at most half a gap of 2^-24.
    assert after("fp32").tolist() == pytest.approx([0.99] * 4, abs=100 * 2.0**-25)
    assert after("fp16").tolist() == [1.0] * 4  # half a gap below 1 is 2^-12
    drawn = after("stochastic", count=4000)
    assert len(drawn.unique()) > 3
    assert_within_standard_errors(drawn.mean(), 0.99, drawn.std() / 4000**0.5, k=4)


def test_a_master_steps_from_the_fine_weights():
    weights = parameters(1.0)
    stepper = StoredWeights(torch.optim.SGD(weights, lr=1.0), "master")
    for _ in range(4):  # four times a quarter of a gap: the first rounds away in the copy, the sum does not
        weights[0].grad = torch.full((4,), -(2.0**-9), dtype=torch.float64)
        stepper.step()
    assert weights[0].tolist() == [1 + 2.0**-7] * 4
    assert stepper.kept[0].tolist() == [1 + 4 * 2.0**-9] * 4


def test_a_step_of_sgd_in_bf16_is_the_one_of_torch():
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(5000, generator=generator).to(BF16)
    gradient = (torch.randn(5000, generator=generator) / 50).to(BF16)
    theirs, ours = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    theirs.grad, ours.grad = gradient, gradient.double()
    torch.optim.SGD([theirs], lr=0.25).step()  # a power of two: their product rounds nothing
    StoredWeights(torch.optim.SGD([ours], lr=0.25), "bf16").step()
    assert torch.equal(ours.detach(), theirs.detach().double())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spacing(torch.ones(2), BF16), "pass finite numbers in float64"),
        (lambda: spacing(f64(math.nan), BF16), "pass finite numbers in float64"),
        (lambda: spacing(f64(1.0), torch.int8), "not a format of weights"),
        (lambda: half_gap(f64(1.0), f64(1.0, 2.0), BF16), "give one each"),
        (lambda: half_gap(f64(1.001), f64(1.0), BF16), "store the weights first"),
        (lambda: half_gap(f64(2.0**128), f64(1.0), BF16), "store the weights first"),
        (lambda: stored_dtype("int8"), "there is no storage 'int8'"),
        (lambda: StoredWeights(torch.optim.SGD(parameters(1.0), lr=1.0), "stochastic"), "pass a generator"),
        (
            lambda: StoredWeights(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0), "bf16"),
            "a parameter is not float64",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_storage_hands_out_numbers_of_its_format():
    for storage in STORAGES:
        weights = [torch.nn.Parameter(torch.randn(50, dtype=torch.float64))]
        StoredWeights(torch.optim.SGD(weights, lr=1.0), storage, torch.Generator())
        held = weights[0].detach()
        assert torch.equal(held, stored(held, stored_dtype(storage)))
