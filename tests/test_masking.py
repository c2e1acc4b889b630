"""Masked training against plain training, and the record on the subnetwork against its own arithmetic."""

import copy

import pytest
import torch

from ceilings.experiments import subnetwork
from ceilings.experiments._start import Shape, Start
from ceilings.masking import MaskedStepper, densest
from ceilings.results import load
from ceilings.storage import StoredWeights, stored
from ceilings.update_rules import descend, first_step_size, flat_parameters, load_flat, make_rule

TINY = Shape(length=1, letters=4, width=8, depth=1, heads=2, pretrain_steps=40, prompts=3, samples=4)


@pytest.fixture(scope="module")
def begin():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = Start(TINY, 0)
    load_flat(found.model, stored(found.weights, torch.bfloat16))
    yield found
    torch.set_num_threads(before)


def trained(begin, rule, mask=None, size=1e-3, steps=12, watch=None):
    model = copy.deepcopy(begin.model)
    rate = size / first_step_size(rule, model, begin.first_gradient())
    stepper = StoredWeights(make_rule(rule, model, rate), "bf16")
    stepper = stepper if mask is None else MaskedStepper(stepper, model, mask)
    descend(
        model, begin.method, begin.source(), stepper, steps=steps, generator=begin.generator(), watch=watch
    )
    return flat_parameters(model)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam", "rmsprop", "sign"])
def test_only_the_weights_of_the_mask_move(begin, rule):
    mask = torch.rand(len(begin.weights), generator=torch.Generator().manual_seed(1)) < 0.3
    after = trained(begin, rule, mask)
    assert torch.equal(after[~mask], begin.weights[~mask])
    assert bool((after[mask] != begin.weights[mask]).any())


@pytest.mark.claim("prop-subnetwork")
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam", "rmsprop", "sign"])
def test_a_mask_of_all_that_ever_moved_gives_the_full_run_bit_by_bit(begin, rule):
    moved = torch.zeros(len(begin.weights), dtype=torch.bool)

    def watch(model):
        moved.logical_or_(flat_parameters(model) != begin.weights)

    full = trained(begin, rule, size=3e-4, watch=watch)
    assert 0 < int(moved.sum()) < len(moved)
    assert torch.equal(trained(begin, rule, moved, size=3e-4), full)
    fewer = moved.clone()
    fewer[moved.nonzero()[: int(moved.sum()) // 2]] = False
    assert not torch.equal(trained(begin, rule, fewer, size=3e-4), full)


@pytest.mark.claim("prop-subnetwork")
def test_weight_decay_moves_what_the_mask_hides(begin):
    mask = torch.zeros(len(begin.weights), dtype=torch.bool)
    after = trained(begin, "adamw", mask, size=0.05)
    assert not torch.equal(after, begin.weights)


def test_a_mask_of_another_size_is_refused(begin):
    with pytest.raises(ValueError, match=r"the mask has shape \(3,\) and the model \d+ parameters"):
        MaskedStepper(make_rule("sgd", begin.model, 1.0), begin.model, torch.ones(3))


def test_the_largest_are_members_and_ties_are_drawn():
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([5.0, 1.0, 3.0, 3.0, 3.0, 3.0, 0.0])
    seen = set()
    for _ in range(200):
        mask = densest(values, 3, generator)
        assert int(mask.sum()) == 3 and bool(mask[0]) and not bool(mask[1] | mask[6])
        seen.add(tuple(mask.nonzero().flatten().tolist()))
    assert len(seen) == 6  # every pair of the four that tie
    assert int(densest(values, 0, generator).sum()) == 0 and bool(densest(values, 7, generator).all())


@pytest.mark.parametrize(
    ("values", "count", "says"),
    [
        (torch.ones(3), 4, "a mask of 4 of 3 weights cannot be made"),
        (torch.ones(3), -1, "a mask of -1 of 3 weights"),
        (torch.tensor([1.0, torch.nan]), 1, "a value is NaN"),
    ],
)
def test_a_mask_that_cannot_be_made_is_refused(values, count, says):
    with pytest.raises(ValueError, match=says):
        densest(values, count, torch.Generator())


@pytest.mark.claim("prop-subnetwork")
def test_the_record_is_its_own_arithmetic():
    record = load("subnetwork", subnetwork.FULL)
    for rule, size in subnetwork.FULL.cells:
        for storage in subnetwork.FULL.storages:

            def leaf(*names, at=(rule, f"{size:g}", storage)):
                return record.tensor(*at, *names)

            density = leaf("full", "density")
            for batches in subnetwork.BATCHES:
                equal, inside = (
                    leaf("hindsight", batches, name) for name in ("equal", "equal where changed")
                )
                torch.testing.assert_close(equal, 1 - density + density * inside, rtol=1e-9, atol=1e-9)
                # What changed in a masked run lies in the mask, and the mask is what changed in the full run.
                assert bool((leaf("hindsight", batches, "overlap of changed") == 1).all())
                for mask in subnetwork.MASKS:
                    assert bool((leaf(mask, batches, "density") <= density.max() + 1e-12).all())
            assert bool((leaf("full", "ever moved") >= density).all())
