"""How far a KL budget reaches, steps under a leash, their ranks, and the experiment that asks for the sign."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from ceilings.experiments import leash
from ceilings.experiments._laws import Laws
from ceilings.experiments._start import Shape, Start
from ceilings.fisher import exact_diagonal_fisher, fisher_matrix
from ceilings.kl_budget import QuadraticLeash, joint_reach, lone_reach
from ceilings.policies import AutoregressivePolicy
from ceilings.prefix_tree import enumerate_responses, enumeration, expected_reward
from ceilings.puzzles import END
from ceilings.ranks import rank_correlation, rank_correlation_within, ranks
from ceilings.results import load
from ceilings.testing import assert_at_most, assert_equal
from ceilings.update_rules import flat_parameters

TINY = Shape(length=1, letters=4, width=8, depth=1, heads=2, pretrain_steps=40)
CONFIG = replace(
    leash.FULL, seeds=(0,), steps=3, marks=(1, 3), draws=3, rewards=2, shape=TINY, runs=(), noise=()
)


def law_of(parameters, seed=0, scales=None):
    generator = torch.Generator().manual_seed(seed)
    policy = AutoregressivePolicy.random(3, 2, parameters, generator, eos=0)
    if scales is not None:
        policy = AutoregressivePolicy(policy.features * scales, 2, eos=0)
    θ = torch.randn(parameters, generator=generator, dtype=torch.float64) / 3
    law = policy.enumerate(θ if scales is None else θ / scales)
    return law, torch.randn(len(law.probs), generator=generator, dtype=torch.float64)


def quadratic(law, reward):
    return QuadraticLeash(law.scores, reward - law.probs @ reward, law.probs)


@pytest.fixture(scope="module")
def begin():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Start(TINY, 0)
    torch.set_num_threads(before)


def test_equal_entries_share_their_places():
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0, 2.5, 1]
    with pytest.raises(ValueError, match="without NaN"):
        ranks(torch.tensor([1.0, math.nan]))


def test_rank_correlation_without_ties_is_the_formula_of_squared_differences():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(9, generator=generator) for _ in range(2))
    d = a.argsort().argsort() - b.argsort().argsort()
    assert rank_correlation(a, b) == pytest.approx(1 - 6 * float(d.square().sum()) / (9 * 80))
    assert rank_correlation(a, a.exp()) == pytest.approx(1) and rank_correlation(a, -a) == pytest.approx(-1)
    assert math.isnan(rank_correlation(a, torch.ones(9)))
    with pytest.raises(ValueError, match="two numbers"):
        rank_correlation(a, b[1:])


def test_within_tensors_what_lies_between_them_does_not_count():
    tensors = torch.tensor([0, 0, 0, 1, 1, 2])
    a, b = torch.tensor([1.0, 2, 3, 10, 11, 50]), torch.tensor([3.0, 2, 1, 20, 30, 70])
    assert rank_correlation(a, b) > 0.7
    assert rank_correlation_within(a, b, tensors) == pytest.approx((3 * -1 + 2 * 1) / 5)
    with pytest.raises(ValueError, match="name one for each"):
        rank_correlation_within(a, b, tensors[1:])
    with pytest.raises(ValueError, match="nothing can be ranked"):
        rank_correlation_within(a, b, torch.arange(6))


@pytest.mark.claim("prop-leash")
def test_no_direction_within_the_budget_goes_beyond_the_joint_reach_and_one_attains_it():
    law, _ = law_of(5)
    F, K = fisher_matrix(law.probs, law.scores), 0.02
    directions = torch.randn(20000, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inverse = torch.linalg.inv(F)
    steps = torch.cat([directions, inverse])  # the columns of the inverse attain it
    steps *= (2 * K / ((steps @ F) * steps).sum(1)).sqrt()[:, None]
    reach = joint_reach(F, K)
    assert_at_most(steps.abs().max(0).values, reach, slack=1e-9)
    assert_equal(steps[-5:].diagonal().abs(), reach)
    assert_at_most(lone_reach(F.diagonal(), K), reach)


@pytest.mark.claim("prop-leash")
def test_a_parameter_with_a_stand_in_reaches_without_limit():
    law, _ = law_of(3)
    scores = torch.cat([law.scores, law.scores[:, :1]], dim=1)  # the first parameter twice
    F = fisher_matrix(law.probs, scores)
    assert joint_reach(F, 1.0).isinf().tolist() == [True, False, False, True]
    assert_equal(joint_reach(F, 1.0)[1:3], joint_reach(fisher_matrix(law.probs, law.scores), 1.0)[1:3], 1e-7)
    assert bool(lone_reach(F.diagonal(), 1.0).isfinite().all())
    assert lone_reach(torch.tensor([0.0, 2.0]), 1.0).tolist() == [math.inf, 1.0]


def test_reaches_refuse_what_is_no_fisher_information():
    with pytest.raises(ValueError, match="budget"):
        lone_reach(torch.ones(2), 0.0)
    with pytest.raises(ValueError, match="negative"):
        lone_reach(torch.tensor([-1.0]), 1.0)
    with pytest.raises(ValueError, match="symmetric"):
        joint_reach(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), 1.0)
    with pytest.raises(ValueError, match="budget"):
        joint_reach(torch.eye(2), -1.0)


@pytest.mark.parametrize("parameters", [4, 30])
def test_steps_under_a_leash_are_those_of_the_dense_fisher_matrix(parameters):
    """Fewer and more parameters than responses."""
    law, reward = law_of(parameters)
    F, found = fisher_matrix(law.probs, law.scores), quadratic(law, reward)
    g = (law.probs * (reward - law.probs @ reward)) @ law.scores
    assert_equal(found.gradient, g)
    assert_equal(found.flow(0.0, 0.7), 0.7 * g)
    # Two thousand small steps of ascent.
    strength, t, Δ = 3.0, 0.4, torch.zeros_like(g)
    for _ in range(2000):
        Δ = Δ + t / 2000 * (g - strength * F @ Δ)
    assert_equal(found.flow(strength, t), Δ, rtol=1e-2)
    λ = 0.1 * torch.linalg.eigvalsh(F)[-1]
    damped = torch.linalg.solve(F + λ * torch.eye(parameters, dtype=torch.float64), g)
    assert_equal(found.damped(0.1), damped)
    inverse = torch.linalg.pinv(F, rtol=1e-10, hermitian=True)
    assert_equal(found.natural(), inverse @ g, rtol=1e-7)
    assert_equal(found.inside(), (inverse @ F).diagonal(), rtol=1e-7)
    rank = int(torch.linalg.matrix_rank(F, hermitian=True, rtol=1e-10))
    assert_equal(found.inside().sum(), float(rank), rtol=1e-7)


def test_a_leash_refuses_what_does_not_fit():
    law, reward = law_of(4)
    found = quadratic(law, reward)
    for call, message in (
        (partial(QuadraticLeash, law.scores[1:], reward, law.probs), "one row each"),
        (partial(QuadraticLeash, law.scores, reward, 2 * law.probs), "not 1"),
        (partial(found.aim, reward[1:]), "one each"),
        (partial(found.flow, -1.0, 1.0), "neither"),
        (partial(found.damped, 0.0), "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.claim("prop-stand-in")
@pytest.mark.parametrize("parameters", [4, 30])
def test_in_larger_units_a_step_rises_until_half_of_the_parameter_is_irreplaceable(parameters):
    """The step of one parameter, as its score is multiplied by d and nothing else changes, against A d / (1 + B d²)."""
    law, reward = law_of(parameters)
    one = quadratic(law, reward)
    B = one.inside()[0] / (1 - one.inside()[0])
    for d in (0.1, 1.0, 10.0):
        scores = torch.cat([d * law.scores[:, :1], law.scores[:, 1:]], dim=1)
        found = QuadraticLeash(scores, reward - law.probs @ reward, law.probs)
        said = one.natural()[0] / d if parameters == 4 else one.natural()[0] * d * (1 + B) / (1 + B * d**2)
        assert_equal(found.natural(1e-12)[0], said, rtol=1e-6)
        assert_equal(found.gradient[0], d * one.gradient[0])
    assert (float(one.inside()[0]) > 1 - 1e-9) == (parameters == 4)


@pytest.mark.claim("prop-stand-in")
@pytest.mark.parametrize("parameters", [4, 30])
def test_a_leashed_step_is_the_gradient_of_another_reward(parameters):
    law, reward = law_of(parameters)
    step = quadratic(law, reward).natural()
    F = fisher_matrix(law.probs, law.scores)
    # The reward: the linear function of the scores whose covariance with them is the step.
    other = law.scores @ (torch.linalg.pinv(F, rtol=1e-10, hermitian=True) @ step)
    assert_equal((law.probs * other) @ law.scores, step, rtol=1e-7)
    spread = (law.probs @ other.square()).sqrt()
    assert_at_most(step.abs(), spread * exact_diagonal_fisher(law.probs, law.scores).sqrt(), slack=1e-9)


@pytest.mark.claim("prop-stand-in")
def test_the_crossover_is_the_root_and_the_maximum():
    u = leash.CROSSOVER
    assert math.exp(u) == pytest.approx(1 + 2 * u, rel=1e-14)

    def size(x):
        return -math.expm1(-x) / math.sqrt(x)

    assert size(0.99 * u) < size(u) > size(1.01 * u)


def test_laws_are_those_of_every_prompt_and_can_be_differentiated(begin):
    laws = Laws(begin.model, begin.puzzle)
    longest = begin.puzzle.max_new_tokens
    with torch.no_grad():
        found = laws(begin.model)
    for row, prompt in enumerate(begin.puzzle.prompts):
        law = enumerate_responses(begin.model, prompt, longest, END)
        assert law.responses == laws.responses
        assert_equal(found[row].exp(), law.probs)
        assert laws.rewards[row].tolist() == [begin.puzzle.reward(row, y) for y in law.responses]
    begin.model.zero_grad()  # left from the corpus that it read
    (laws(begin.model).exp() * laws.rewards).sum().backward()
    mine = [p.grad.clone() for p in begin.model.parameters()]
    begin.model.zero_grad()
    for row, prompt in enumerate(begin.puzzle.prompts):
        expected_reward(begin.model, prompt, laws.rewards[row], longest, END).backward()
    for grad, parameter in zip(mine, begin.model.parameters(), strict=True):
        assert_equal(grad, parameter.grad)
    begin.model.zero_grad()


def test_the_second_order_at_the_start_is_that_of_all_prompts_together(begin):
    laws = Laws(begin.model, begin.puzzle)
    with torch.no_grad():
        probs = laws(begin.model).exp()
    found = leash._quadratic(begin, probs, laws.rewards)
    moments = begin.moments(begin.puzzle)
    assert_equal(found.gradient, moments.gradient)
    assert_equal(found.rows.square().sum(0), moments.fisher)


def test_random_rewards_have_the_variance_of_the_true_one(begin):
    laws = Laws(begin.model, begin.puzzle)
    with torch.no_grad():
        probs = laws(begin.model).exp()
    drawn = leash._random_rewards(CONFIG, laws.rewards, probs, 0)
    assert len(drawn) == 2 and not torch.equal(*drawn)
    for table in drawn:
        centred = table - (probs * table).sum(1, keepdim=True)
        assert_equal((probs * centred.square()).sum(1).mean(), begin.moments(begin.puzzle).variance)


def bench_of(begin):
    laws = Laws(begin.model, begin.puzzle)
    with torch.no_grad():
        first = laws(begin.model)
    second = leash._quadratic(begin, first.exp(), laws.rewards)
    return leash._Bench(begin, laws, first, second, second.rows.square().sum(0))


@pytest.mark.parametrize("kind", ["kl", "diagonal"])
def test_a_run_ascends_the_reward_less_the_leash(begin, kind):
    """Three steps by the scores of an enumeration, against the run's ranks."""
    bench, strength, rate = bench_of(begin), 0.7, 0.05
    found = leash._run(CONFIG, bench, bench.laws.rewards, "sgd", kind, strength)
    model, longest = copy.deepcopy(begin.model), begin.puzzle.max_new_tokens
    for _ in range(3):
        change = flat_parameters(model) - begin.weights
        push = torch.zeros_like(change)
        for row, prompt in enumerate(begin.puzzle.prompts):
            law = enumeration(model, prompt, longest, END)
            reward = bench.laws.rewards[row]
            if kind == "kl":
                reward = reward - strength * (law.probs.log() - bench.first[row])
            push += (law.probs * reward) @ law.scores / len(begin.puzzle.prompts)
        if kind == "diagonal":
            push -= strength * bench.diagonal * change
        torch.nn.utils.vector_to_parameters(flat_parameters(model) + rate * push, model.parameters())
    change = flat_parameters(model) - begin.weights
    assert found["all"][1] == pytest.approx(rank_correlation(change.abs(), bench.diagonal), abs=1e-6)
    with torch.no_grad():
        now = bench.laws(model)
    assert found["kl"][1] == pytest.approx(float((now.exp() * (now - bench.first)).sum(1).mean()), rel=1e-8)
    assert found["gain"] == pytest.approx(
        float(((now.exp() - bench.first.exp()) * bench.laws.rewards).sum(1).mean()), rel=1e-8
    )
    assert ("below" in found) == (kind == "diagonal")


def test_dealt_out_within_tensors_keeps_every_tensor_its_sizes(begin):
    """A change that is one number in every tensor cannot be dealt out."""
    bench = bench_of(begin)
    same = leash._dealt_out(CONFIG, begin.tensors.double() + 1, bench.diagonal, begin)
    assert same == pytest.approx([rank_correlation(begin.tensors, bench.diagonal)] * 3)
    mixed = leash._dealt_out(CONFIG, bench.diagonal, bench.diagonal, begin)
    assert max(mixed) < 0.9 and len(set(mixed)) == 3


def test_both_sides_are_ranked_apart():
    diagonal = torch.tensor([1.0, 2, 3, 10, 20, 30])
    found = leash._sides(torch.tensor([1.0, 2, 3, 9, 8, 7]), diagonal, 5.0)
    assert found == {
        "below": pytest.approx(1.0),
        "above": pytest.approx(-1.0),
        "share above": 0.5,
    }
    assert math.isnan(leash._sides(torch.ones(6), diagonal, 25.0)["above"])


@pytest.mark.claim("prop-stand-in")
def test_the_record_says_that_the_sign_follows_the_rule_and_not_the_kl_leash():
    record = load("leash", leash.FULL)

    def step(name):
        return record.tensor("step", name, "all")

    assert float(step("gradient").min()) > 0.5 and float(step("diagonal").max()) < -0.5
    for share in leash.FULL.dampings[:-1]:
        assert float(step(f"damped-{share:g}").min()) > 0
    for case in leash.FULL.runs:
        last = record.tensor("run", leash._name(*case), "all")[:, -1]
        assert bool((last > 0).all() if case[0] == "sgd" else (last < 0).all())
    assert_at_most(record.tensor("start", "rank"), record.tensor("start", "responses") - 12)
