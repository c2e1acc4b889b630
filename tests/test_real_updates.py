"""The runs of the real model: rounding, the order of pairs, and the record against its own arithmetic."""

import pytest
import torch
from torch import nn

from ceilings.experiments import real_updates
from ceilings.experiments.real_updates import FULL, WAYS, Config, _by_seed, _Rounded
from ceilings.results import load


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_weights_of_a_bf16_run_are_numbers_of_bf16_after_every_step(weights):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 4, generator=generator, dtype=torch.float32).bfloat16().float()
    slopes = [torch.randn(5, 4, generator=generator, dtype=torch.float32) for _ in range(3)]
    model = nn.Linear(4, 5, bias=False, dtype=torch.float32)
    model.weight.data.copy_(start)
    stepper = _Rounded(model, 1e-3, weights)
    plain = nn.Parameter(start.clone())
    adam = torch.optim.Adam([plain], lr=1e-3)
    for slope in slopes:
        for parameter in (model.weight, plain):
            parameter.grad = slope.clone()
        stepper.step()
        adam.step()
        if weights == "bf16":
            plain.data = plain.data.bfloat16().float()
        assert torch.equal(model.weight, plain)
    assert torch.equal(model.weight, model.weight.bfloat16().float()) == (weights == "bf16")
    stepper.zero_grad()
    assert model.weight.grad is None


def test_each_seed_is_laid_beside_the_next():
    pairs = [(0, 1), (0, 2), (1, 2)]
    rows = [
        {
            "changed": [10 * i + j, 10 * j + i],
            "changed by chance": [i, j],
            "changed by chance in each tensor": [i, j],
            "tied": [i, j],
            "top percent": [i, j],
        }
        for i, j in pairs
    ]
    found = _by_seed(Config(seeds=(5, 6, 7)), rows)
    assert [row["changed"] for row in found] == [1, 12, 20]  # 0 with 1, 1 with 2, 2 with 0
    assert [row["tied"] for row in found] == [0, 1, 2]
    assert [row["top percent"] for row in found] == [[0, 1], [1, 2], [0, 2]]
    assert _by_seed(Config(seeds=(5,)), []) == []


def test_the_record_is_its_own_arithmetic():
    record = load("real_updates", FULL)
    for rate in FULL.rates:
        for way in WAYS:
            same = {
                rule: record.tensor(f"{rate:g}", way, "unchanged", rule) for rule in ("exact", "relative")
            }
            if way != "fp32":  # the least relative step of bf16 is above a thousandth
                assert torch.equal(same["exact"], same["relative"])
            assert bool((same["exact"] <= same["relative"]).all())
            shared = {
                key: record.tensor("overlap", f"{rate:g}", way, key)
                for key in ("changed", "changed by chance", "top percent")
            }
            # By chance the next seed has of a set what it has of all weights.
            torch.testing.assert_close(
                shared["changed by chance"], 1 - same["exact"].roll(-1), rtol=1e-9, atol=1e-9
            )
            # What two sets share is one number, whichever of them it is a share of.
            both = shared["changed"] * (1 - same["exact"])
            torch.testing.assert_close(both, both.roll(-1), rtol=1e-9, atol=1e-9)
            assert bool((shared["top percent"][:, 0] <= shared["top percent"][:, 1]).all())


def test_the_ways_of_comparing_are_runs_that_were_made():
    assert {weights for weights, _ in WAYS.values()} == set(FULL.weights)
    assert real_updates.NAME == "real_updates"
