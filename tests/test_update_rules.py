"""Update rules: one step by hand, and the loop against the one of `ceilings.training`."""

import copy

import pytest
import torch

from ceilings.methods import make_method
from ceilings.puzzles import sorting
from ceilings.sources import own_samples
from ceilings.testing import assert_equal
from ceilings.training import TrainingConfig, train
from ceilings.transformer import TinyTransformer, TransformerConfig
from ceilings.update_rules import (
    RULES,
    SignDescent,
    descend,
    first_step_size,
    flat_parameters,
    load_flat,
    make_rule,
)

PUZZLE = sorting(2, 2)
SOURCE = own_samples(PUZZLE, prompts=4, samples=4, graded=True)


def toy(seed=0):
    return TinyTransformer(TransformerConfig(len(PUZZLE.words), 8, 1, 2, 8), seed)


def random_gradient(model, seed=0):
    return torch.randn(
        len(flat_parameters(model)), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def stepped(rule, gradients, rate=0.01, epsilon=None):
    """Change of every parameter after the gradients were followed, and the model before."""
    model = toy()
    before = flat_parameters(model)
    optimiser = make_rule(rule, model, rate, epsilon=epsilon)
    for gradient in gradients:
        start = 0
        for parameter in model.parameters():
            parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).clone()
            start += parameter.numel()
        optimiser.step()
    return flat_parameters(model) - before, before


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_the_loop_is_the_one_of_training_bit_by_bit(rule):
    ours, theirs = toy(), toy()
    config = TrainingConfig(5, 0.01, optimiser=rule, evaluate_every=5, evaluation_samples=1, seed=3)
    train(theirs, make_method("rloo"), SOURCE, PUZZLE, config)
    descend(
        ours,
        make_method("rloo"),
        SOURCE,
        make_rule(rule, ours, 0.01),
        steps=5,
        generator=torch.Generator().manual_seed(3),
    )
    assert torch.equal(flat_parameters(ours), flat_parameters(theirs))
    assert not torch.equal(flat_parameters(ours), flat_parameters(toy()))


def test_watch_sees_every_step():
    seen, model = [], toy()
    descend(
        model,
        make_method("rloo"),
        SOURCE,
        make_rule("sgd", model, 0.1),
        steps=3,
        generator=torch.Generator(),
        watch=lambda m: seen.append(flat_parameters(m)),
    )
    assert len(seen) == 3 and torch.equal(seen[-1], flat_parameters(model))


def test_two_steps_of_each_simple_rule_by_hand():
    a, b = random_gradient(toy(), 1), random_gradient(toy(), 2)
    assert_equal(stepped("sgd", [a, b])[0], -0.01 * (a + b))
    assert_equal(stepped("momentum", [a, b])[0], -0.01 * (a + b + 0.9 * a))
    assert_equal(stepped("sign", [a, b])[0], -0.01 * (a.sign() + b.sign()))
    v = 0.01 * a.square()
    expected = a / (v.sqrt() + 1e-8) + b / ((0.99 * v + 0.01 * b.square()).sqrt() + 1e-8)
    assert_equal(stepped("rmsprop", [a, b])[0], -0.01 * expected)


def test_adam_decays_only_as_adamw_and_a_large_epsilon_makes_it_proportional():
    a = random_gradient(toy(), 3)
    change, before = stepped("adam", [a])
    assert_equal(change, -0.01 * a / (a.abs() + 1e-8), rtol=1e-8)
    assert_equal(stepped("adamw", [a])[0], change - 0.01 * 0.1 * before, rtol=1e-8)
    assert_equal(stepped("adam_large_epsilon", [a], epsilon=1e6)[0], -0.01 * a / 1e6, rtol=1e-4)


def test_muon_makes_singular_values_alike_and_leaves_the_table_to_adam():
    a = random_gradient(toy(), 4)
    change, _ = stepped("muon", [a])
    start = 0
    for name, parameter in toy().named_parameters():
        part = change[start : start + parameter.numel()].view_as(parameter)
        if ".layers." in name and parameter.ndim == 2:
            values = torch.linalg.svdvals(part) / 0.01
            assert float(values.min()) > 0.5 and float(values.max()) < 1.5, name
        else:
            assert_equal(part.abs(), 0.01, rtol=1e-5)
        start += parameter.numel()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_starts_with_a_step_of_the_size_that_was_asked_for(rule):
    model, a = toy(), random_gradient(toy(), 5)
    epsilon = 10.0 if rule == "adam_large_epsilon" else None
    before = flat_parameters(model)
    size = first_step_size(rule, model, a, epsilon=epsilon)
    assert torch.equal(flat_parameters(model), before)
    change, _ = stepped(rule, [a], 1e-3 / size, epsilon)
    assert float(change.square().mean().sqrt()) == pytest.approx(1e-3, rel=1e-6)


def test_a_zero_gradient_moves_no_sign():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.tensor([0.0, -3.0], dtype=torch.float64)
    SignDescent([weight], lr=0.5).step()
    assert weight.tolist() == [1.0, 1.5]


def test_flat_and_back():
    model = toy()
    values = flat_parameters(model) + 1
    load_flat(model, values)
    assert torch.equal(flat_parameters(model), values)
    load_flat(copy.deepcopy(model), values * 0)
    assert torch.equal(flat_parameters(model), values)


def test_what_makes_no_run_is_refused():
    model = toy()
    with pytest.raises(ValueError, match="there is no update rule 'lion'"):
        make_rule("lion", model, 0.1)
    with pytest.raises(ValueError, match="adam_large_epsilon has no ε"):
        make_rule("adam_large_epsilon", model, 0.1)
    with pytest.raises(ValueError, match="the first step of sgd is zero"):
        first_step_size("sgd", model, torch.zeros(len(flat_parameters(model)), dtype=torch.float64))
    with pytest.raises(ValueError, match="ppo uses a batch 4 times"):
        descend(
            model,
            make_method("ppo"),
            SOURCE,
            make_rule("sgd", model, 0.1),
            steps=1,
            generator=torch.Generator(),
        )
