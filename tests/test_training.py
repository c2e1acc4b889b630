"""The loop: one step by hand, all methods twice, metrics against enumeration."""

import copy
import math

import pytest
import torch

from ceilings.batches import Batch, enumerated_batch, preference_pairs, token_laws, token_log_probs
from ceilings.methods import METHODS, PREFERENCE, _mismatched, make_method
from ceilings.policies import AutoregressivePolicy
from ceilings.puzzles import END, Puzzle, tea_or_coffee
from ceilings.reference import per_sequence_scores
from ceilings.rollouts import Rollouts
from ceilings.sources import fixed_data, own_samples, policy_samples, sample_puzzle
from ceilings.testing import assert_equal, assert_within_standard_errors
from ceilings.training import TrainingConfig, evaluate, pretrained_decoder, train
from ceilings.transformer import TinyTransformer, TransformerConfig, enumerate_responses


def grade(answer, response):
    return (response[0] == answer[0]) / 2 + (response == answer) / 2


TOY = Puzzle("toy", ("end", "a", "b"), ((1,), (2,), (1, 2)), ((1, END), (2, END), (2, 1, END)), grade)


def toy_model(seed=0):
    return TinyTransformer(TransformerConfig(3, 8, 1, 2, 8), seed)


def build(name, model):
    """A method with all that it may need."""
    return make_method(name, reference=model, teacher=toy_model(9), max_length=TOY.max_new_tokens)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def toy_rollouts():
    return Rollouts(
        ((1,), (1,), (2, 1), (2, 1)),
        ((1, 0), (2, 2, 0), (1, 1), (0,)),
        torch.tensor([1.0, 0.0, 0.25, 0.75], dtype=torch.float64),
        (0, 0, 1, 1),
    )


def short(**changes):
    return TrainingConfig(**({"steps": 3, "evaluate_every": 3, "evaluation_samples": 2} | changes))


def test_one_step_of_rloo_is_the_rate_times_advantages_times_scores():
    model, data = toy_model(), toy_rollouts()
    before = flat(model)
    padded = data.padded()
    scores = per_sequence_scores(model, padded.input_ids, padded.response_mask, padded.attention_mask)
    s = torch.cat([value.flatten(1) for value in scores.values()], 1)
    advantages = torch.tensor([1.0, -1.0, -0.5, 0.5], dtype=torch.float64)
    history = train(
        model,
        make_method("rloo"),
        fixed_data(data, groups=2),
        TOY,
        short(steps=1, optimiser="sgd", learning_rate=0.3),
    )
    assert_equal(flat(model) - before, 0.3 * advantages @ s / 4, rtol=1e-9)
    assert history.steps[0].gradient_norm == pytest.approx(float((advantages @ s / 4).norm()))
    assert history.steps[0].reward == 0.5 and history.steps[0].clip_share == 0


@pytest.mark.parametrize("name", METHODS)
def test_two_runs_are_equal_bit_by_bit(name):
    runs = []
    for _ in range(2):
        model = toy_model()
        source = own_samples(TOY, prompts=4, samples=6)
        history = train(model, build(name, model), source, TOY, short(learning_rate=0.01))
        runs.append((flat(model), repr(history)))
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert not torch.equal(runs[0][0], flat(toy_model()))  # it moved
    last = history.steps[-1]
    assert last.taught and math.isfinite(last.loss) and last.gradient_norm > 0


def test_another_seed_is_another_run():
    ends = []
    for seed in (0, 1):
        model = toy_model()
        train(model, make_method("rloo"), own_samples(TOY, prompts=4), TOY, short(seed=seed))
        ends.append(flat(model))
    assert not torch.equal(*ends)


def test_evaluations_do_not_change_what_is_trained_on():
    ends = []
    for every in (1, 3):
        model = toy_model()
        history = train(
            model, make_method("rloo"), own_samples(TOY, prompts=4), TOY, short(evaluate_every=every)
        )
        ends.append(flat(model))
        assert history.curve("reward")[0].tolist() == list(range(0, 4, every))
    assert torch.equal(*ends)


def test_metrics_are_those_of_the_enumerated_law():
    model, reference, samples = toy_model(0), toy_model(1), 3000
    found = evaluate(model, reference, TOY, samples=samples, graded=True)
    expected = {"reward": 0.0, "kl": 0.0, "entropy": 0.0, "length": 0.0}
    spread = dict.fromkeys(expected, 0.0)
    for prompt, answer in zip(TOY.prompts, TOY.answers, strict=True):
        law, other = (enumerate_responses(m, prompt, TOY.max_new_tokens, END) for m in (model, reference))
        values = {
            "reward": torch.tensor([grade(answer, y) for y in law.responses], dtype=torch.float64),
            "kl": (law.probs / other.probs).log(),
            "length": law.lengths.double(),
        }
        for name, value in values.items():
            mean = law.probs @ value
            expected[name] += float(mean) / 3
            spread[name] += float(law.probs @ (value - mean).square()) / samples / 9
    for name in ("reward", "kl", "length"):
        # The divergence has less variance than the log-ratio itself: four errors are generous there.
        assert_within_standard_errors(getattr(found, name), expected[name], spread[name] ** 0.5, k=4)
    assert evaluate(model, copy.deepcopy(model), TOY).kl == 0
    assert 0 < found.entropy < math.log(3)


def test_the_entropy_is_that_of_the_next_token():
    model = toy_model()
    one = Puzzle("one", TOY.words, ((1,),), ((END,),), grade)  # responses of one token
    law = enumerate_responses(model, (1,), 1, END)
    assert_equal(evaluate(model, model, one).entropy, -float(law.probs @ law.probs.log()), rtol=1e-12)


def test_reuse_of_a_batch_is_what_clips():
    for updates in (1, 4):
        model = toy_model()
        method = make_method("ppo", updates=updates)
        history = train(model, method, own_samples(TOY, prompts=4), TOY, short(learning_rate=0.1))
        clipped = max(step.clip_share for step in history.steps)
        assert (clipped > 0.1) if updates == 4 else (clipped == 0)


def test_models_of_transformers_train_too_without_their_dropout():
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2():
        torch.manual_seed(0)
        sizes = {"vocab_size": 3, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=0)).train()

    ends = []
    for _ in range(2):
        model = gpt2()
        history = train(
            model, make_method("ppo"), own_samples(TOY, prompts=4), TOY, short(learning_rate=1e-9)
        )
        ends.append(flat(model))
        # At ratio 1 nothing is clipped; dropout (a tenth, by default) would move every ratio.
        assert model.training and history.steps[0].clip_share == 0
        assert history.evaluations[0].kl == 0
    assert torch.equal(*ends) and not torch.equal(ends[0], flat(gpt2()))


def test_an_enumerated_batch_is_the_enumeration_with_its_graph():
    policy = AutoregressivePolicy.random(3, 3, 4, torch.Generator().manual_seed(0), eos=0)
    theta = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    law, batch = policy.enumerate(theta.detach()), enumerated_batch(policy, theta)
    assert batch.responses == law.responses and torch.equal(batch.lengths, law.lengths)
    assert_equal(batch.log_probs.detach(), law.token_log_probs, rtol=1e-14)
    rows = [3, 3, 0]
    taken = batch.take(rows)
    assert taken.responses == tuple(law.responses[row] for row in rows)
    (slope,) = torch.autograd.grad(taken.sequence_log_probs.sum(), theta, retain_graph=True)
    assert_equal(slope, 2 * law.scores[3] + law.scores[0], rtol=1e-12)
    chosen = taken.laws.gather(2, torch.tensor([[y[0]] for y in taken.responses])[:, :, None])[:, 0, 0]
    assert torch.equal(chosen, taken.log_probs[:, 0])
    assert_equal(taken.laws.exp().sum(2).detach(), 1.0, rtol=1e-14)


def test_long_gradients_are_shortened():
    moved = []
    for limit in (None, 0.01):
        model = toy_model()
        history = train(
            model,
            make_method("rloo"),
            fixed_data(toy_rollouts(), groups=2),
            TOY,
            short(steps=1, optimiser="sgd", learning_rate=1.0, max_gradient_norm=limit),
        )
        moved.append(float((flat(model) - flat(toy_model())).norm()))
    assert moved[0] == pytest.approx(history.steps[0].gradient_norm) and moved[0] > 0.02
    assert moved[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("name", [*PREFERENCE, "rejection_sampling"])
def test_a_batch_that_teaches_nothing_makes_no_step(name):
    model, data = toy_model(), toy_rollouts()
    equal = Rollouts(data.prompt_ids, data.response_ids, torch.full((4,), 0.5).double(), data.groups)
    history = train(model, build(name, model), fixed_data(equal, groups=2), TOY, short())
    assert torch.equal(flat(model), flat(toy_model()))
    assert not any(step.taught for step in history.steps) and math.isnan(history.steps[0].loss)


@pytest.mark.parametrize("name", PREFERENCE)
def test_preferences_raise_the_better_response_over_the_worse(name):
    # One pair of equal lengths: SimPO and ORPO compare means, and two pairs share parameters.
    model, rewards = toy_model(), torch.tensor([0.0, 1.0], dtype=torch.float64)
    data = Rollouts(((1,), (1,)), ((2, 0), (1, 0)), rewards, (0, 0))

    def gap():
        laws, mask = token_laws(model, data)
        total = (token_log_probs(laws, data) * mask).sum(1).detach()
        return float(total[1] - total[0])

    before = gap()
    settings = short(steps=1, optimiser="sgd", learning_rate=1e-3)
    train(model, build(name, model), fixed_data(data, groups=1), TOY, settings)
    assert gap() > before


def batch_of(model, reference, data):
    laws, mask = token_laws(model, data)
    log_probs = token_log_probs(laws, data)
    return Batch(data, model, reference, mask, laws, log_probs, log_probs.detach())


def test_the_reference_point_of_kto_scores_the_next_group_s_responses():
    model, reference, data = toy_model(0), toy_model(1), toy_rollouts()
    swapped = [(p, data.response_ids[(n + 2) % 4]) for n, p in enumerate(data.prompt_ids)]
    found = _mismatched(batch_of(model, reference, data))
    for policy, log_probs in zip((model, reference), found, strict=True):
        for (prompt, response), value in zip(swapped, log_probs, strict=True):
            law = policy(torch.tensor([prompt + response]))[0].log_softmax(-1).detach()
            steps = range(len(prompt) - 1, len(prompt) + len(response) - 1)
            assert_equal(value, law[steps, list(response)].sum(), rtol=1e-12)


def test_the_reward_model_of_prime_learns_before_the_policy_does():
    model, data = toy_model(), toy_rollouts()
    method = build("prime", model)
    # The reward model starts as the reference: without a step of its own every implicit reward would be 0.
    assert bool(method.loss(batch_of(model, model, data)).isfinite())
    signal = method.signal(batch_of(model, model, data))
    outcome = torch.tensor([1.0, -1.0, -0.5, 0.5], dtype=torch.float64)  # each less the other of its group
    implicit = (signal - outcome[:, None])[:, -3:]
    assert float(implicit.abs().max()) > 1e-5
    # Of the first group the better response has come to look better to it.
    laws, mask = token_laws(model, data)
    first = mask.double().argmax(1)
    assert float(implicit[0].max()) > 0 > float(signal[1, first[1]] + 1)


def test_evaluations_draw_the_same_numbers_each_time():
    still = short(learning_rate=1e-14)
    history = train(toy_model(), make_method("rloo"), own_samples(TOY, prompts=4), TOY, still)
    assert len({e.reward for e in history.evaluations}) == 1


def test_sources_draw_from_whom_they_say():
    present, other = toy_model(0), toy_model(1)

    def drawn(source, model):
        return source(model, torch.Generator().manual_seed(3)).response_ids

    own, foreign = own_samples(TOY, prompts=6), policy_samples(other, TOY, prompts=6)
    assert drawn(own, present) != drawn(own, other) == drawn(foreign, present)
    fixed = fixed_data(toy_rollouts(), groups=1)
    assert set(drawn(fixed, present)) in ({(1, 0), (2, 2, 0)}, {(1, 1), (0,)})
    with pytest.raises(ValueError, match="a batch of 3 groups from data with 2"):
        fixed_data(toy_rollouts(), groups=3)


def test_sampled_rollouts_carry_the_rewards_of_their_prompts():
    rollouts = sample_puzzle(toy_model(), TOY, [2, 0, 2], 5, torch.Generator().manual_seed(0), graded=True)
    assert rollouts.groups == (0,) * 5 + (1,) * 5 + (2,) * 5
    for prompt, response, reward in zip(
        rollouts.prompt_ids, rollouts.response_ids, rollouts.rewards, strict=True
    ):
        assert float(reward) == grade(TOY.answers[TOY.prompts.index(prompt)], response)
    assert rollouts.response_ids[:5] != rollouts.response_ids[10:]  # the same prompt twice: other responses


def test_a_batch_scores_the_responses_and_only_them():
    model, data = toy_model(), toy_rollouts()
    laws, mask = token_laws(model, data)
    log_probs = token_log_probs(laws, data)
    for n, (prompt, response) in enumerate(zip(data.prompt_ids, data.response_ids, strict=True)):
        law = model(torch.tensor([prompt + response]))[0].log_softmax(-1)
        expected = law[range(len(prompt) - 1, len(prompt) + len(response) - 1), list(response)]
        assert_equal(log_probs[n][mask[n]].detach(), expected.detach(), rtol=1e-12)
    batch = Batch(data, model, toy_model(1), mask, laws, log_probs, log_probs.detach())
    expected = token_log_probs(token_laws(toy_model(1), data)[0], data)
    assert torch.equal(batch.reference_log_probs, expected) and not batch.reference_log_probs.requires_grad
    assert batch.lengths.tolist() == [2, 3, 2, 1]


def test_pairs_are_the_best_and_the_worst_of_each_group():
    rewards = torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0, 0.0, 0.0, 4.0])
    chosen, rejected = preference_pairs(rewards, (7, 7, 7, 1, 1, 4, 4, 4))
    # Group 1 is tied; the groups come in the order of their numbers.
    assert [(int(a), int(b)) for a, b in zip(chosen, rejected, strict=True)] == [(7, 5), (1, 0)]
    with pytest.raises(ValueError, match="2 groups for 8 rewards"):
        preference_pairs(rewards, (0, 0))


def test_what_a_method_needs_is_asked_for():
    for name, message in (
        ("prime", "prime needs the reference policy"),
        ("distillation", "distillation needs a teacher"),
        ("dr_grpo", "dr_grpo needs max_length"),
        ("a2c", "there is no method 'a2c': use one of reinforce"),
    ):
        with pytest.raises(ValueError, match=message):
            make_method(name)
    with pytest.raises(ValueError, match="updates is 0: a batch is used once or more"):
        make_method("ppo", updates=0)
    with pytest.raises(ValueError, match="prime has advantages only after its loss was called"):
        make_method("prime", reference=toy_model()).signal(None)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps is 0: it must be positive"),
        ({"optimiser": "lion"}, "there is no optimiser 'lion'"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm is 0.0: it must be positive, or None"),
    ],
)
def test_settings_that_make_no_run_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**changes)


def test_a_loss_that_is_not_finite_stops_the_run():
    method = make_method("rloo")
    broken = type(method)("rloo", lambda batch: batch.log_probs.sum() * torch.inf)
    with pytest.raises(ValueError, match="the loss of rloo is -inf at batch 1"):
        train(toy_model(), broken, own_samples(TOY, prompts=4), TOY, short())


def test_a_pretrained_decoder_knows_some_answers_and_rewards_teach_it_more():
    puzzle = tea_or_coffee()
    shape = TransformerConfig(len(puzzle.words), 16, 1, 2, 16, init_scale=0.5)
    model = pretrained_decoder(puzzle, steps=60, shape=shape)
    config = TrainingConfig(15, 0.01, evaluate_every=15, evaluation_samples=32)
    history = train(model, make_method("rloo"), own_samples(puzzle, prompts=8), puzzle, config)
    first, last = history.evaluations
    assert 0.2 < first.reward < 0.8 and first.kl == 0
    assert last.reward - first.reward > 3 * math.hypot(first.reward_error, last.reward_error)
    assert last.kl > 0.01
