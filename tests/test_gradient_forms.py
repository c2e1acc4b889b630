"""The forms of the thirteen against their losses, and against derivations that use neither."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from ceilings import gradient_forms as forms
from ceilings import losses, method_forms
from ceilings.algorithms import ROWS, entries, row_of, table
from ceilings.batches import enumerated_batch
from ceilings.exact_updates import Case, Draw, batches, expected_update, random_case
from ceilings.methods import METHODS
from ceilings.policies import AutoregressivePolicy
from ceilings.reference import finite_difference_gradient
from ceilings.testing import assert_at_most, assert_differs, assert_equal

CASE = random_case(seed=1, parameters=6)
PAIR = replace(CASE, size=2)
NAMES = [row.key for row in ROWS]


def small_case(size):
    """Two words and at most three steps: four responses, of length 1, 2, 3 and 3."""
    generator = torch.Generator().manual_seed(5)
    policy = AutoregressivePolicy.random(2, 3, 3, generator, eos=0)
    draw = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    return Case(policy, *draw, torch.tensor([0.0, 1.0, 0.5, 1.0], dtype=torch.float64), size)


def test_the_table_has_the_thirteen_in_their_order():
    assert tuple(NAMES) == METHODS


def test_the_table_is_one_line_a_method_with_nothing_left_out():
    fields = ("name", "sampled", "signal", "direction", "centred", "update", "ceiling", "voided")
    listed = entries("what", "update", {"Ceiling": "ceiling", "Voided": "voided"}).splitlines()
    assert (
        listed[0] == "```{list-table}"
        and listed[-1] == "```"
        and sum("* - " in line for line in listed) == 14
    )
    for row in ROWS:
        at = listed.index(f"* - {row.name}")
        assert listed[at + 1] == f"  - {row.update}" and listed[at + 3] == f"    *Ceiling:* {row.ceiling}"
        assert (
            listed[at + 5] == f"    *Voided:* {row.voided}" and row.drawn == f"{row.name}, from {row.sampled}"
        )
    lines = table({field: field for field in fields}).splitlines()
    assert len(lines) == 2 + 13
    for row, line in zip(ROWS, lines[2:], strict=True):
        cells = [getattr(row, field) for field in fields]
        assert all(cells) and not any("|" in cell for cell in cells), row.key
        assert line == "| " + " | ".join(cells) + " |"


@pytest.mark.claim("prop-algorithms")
@pytest.mark.parametrize("name", NAMES)
def test_every_loss_has_the_expected_gradient_of_its_form(name):
    row = row_of(name)
    for case in (CASE, small_case(2), small_case(4)):
        found = expected_update(case, row.loss, batches(case, row.source, row.count))
        assert_equal(found, row.form(case).update, rtol=1e-10)


@pytest.mark.claim("prop-algorithms")
@pytest.mark.parametrize("name", NAMES)
def test_no_covariance_exceeds_its_ceiling_and_the_words_say_which_are_not_one(name):
    row = row_of(name)
    form = row.form(random_case(seed=2))
    assert_at_most(form.covariance.abs(), form.ceiling)
    left = float(form.remainder.norm() / form.update.norm())
    partly = "not a covariance" in row.update
    assert (left > 0.01) if partly else (left < 1e-12)
    assert partly == (name in ("kto", "orpo")) == ("**" in row.centred)


def written_out(case, epsilon):
    """PPO in groups of two from its definition: the covariance at every prefix, the sum of its roofs, the mean of d."""
    mu, pi, r = case.old, case.law, case.rewards
    ratio = (pi.token_log_probs - mu.token_log_probs).exp()
    signal = torch.zeros_like(ratio)
    for y, z in itertools.product(range(len(mu.probs)), repeat=2):
        advantage = float(r[y] - r[z]) / 2
        for t in range(int(mu.lengths[y])):
            moved = float(ratio[y, t]) - 1
            clipped = moved > epsilon if advantage > 0 else moved < -epsilon
            if not clipped:  # y is one of two
                signal[y, t] += 2 * mu.probs[z] * advantage / (mu.lengths[y] + mu.lengths[z])
    covariance = roof = drift = torch.zeros_like(case.theta)
    for t in range(ratio.shape[1]):
        for prefix in {y[:t] for y in mu.responses if len(y) > t}:
            here = [k for k, y in enumerate(mu.responses) if len(y) > t and y[:t] == prefix]
            mass = mu.probs[here].sum()
            p, c, d = mu.probs[here] / mass, signal[here, t], ratio[here, t, None] * pi.token_scores[here, t]
            drift = torch.maximum(drift, (p @ d).abs())
            covariance = covariance + mass * (p @ (c[:, None] * d) - (p @ c) * (p @ d))
            roof = roof + mass * ((p @ c.square() - (p @ c) ** 2) * (p @ d.square() - (p @ d) ** 2)).sqrt()
    return covariance, roof, drift


@pytest.mark.claim("prop-algorithms")
@pytest.mark.parametrize("epsilon", [0.05, 0.2, 50.0])
def test_the_clipped_update_is_a_covariance_of_the_signal_that_is_left(epsilon):
    """By the loss, and without `token_form`: the clip takes no covariance away, it changes the signal."""

    def loss(case, batch, draw):
        signal = draw.rewards - draw.rewards.mean()
        held = case.old.token_log_probs[draw.rows]
        return losses.ppo_loss(batch.log_probs, batch.mask, signal, held, epsilon=epsilon)

    for case in (PAIR, small_case(2)):
        covariance, roof, drift = written_out(case, epsilon)
        assert float(drift.max()) < 1e-12
        assert_equal(expected_update(case, loss, batches(case, "behaviour")), covariance, rtol=1e-10)
        assert_at_most(covariance.abs(), roof)
        form = method_forms.ppo_form(case.old, case.law, case.rewards, 2, epsilon=epsilon)
        assert_equal(form.covariance, covariance, rtol=1e-10)
        assert_at_most(form.ceiling, roof)
        free = method_forms.ppo_form(case.old, case.law, case.rewards, 2, epsilon=math.inf)
        if epsilon == 50:
            assert_equal(form.covariance, free.covariance, rtol=1e-14)
        else:
            assert_differs(form.covariance, free.covariance, by_at_least=0.01)


@pytest.mark.claim("prop-algorithms")
def test_under_the_law_of_the_policy_even_kto_is_a_covariance():
    """Why the law is named: with the signal c μ/π every mean of a signal times the score is one."""
    row, case = row_of("kto"), CASE
    slope = 0.5 / 4 / (0.25 * (case.log_ratios - case.point)).cosh().square()
    signal = torch.where(case.rewards >= 1, slope, -slope) * case.old.probs / case.law.probs
    form = forms.response_form(case.law.probs, signal, case.law.scores)
    assert_equal(form.covariance, row.form(case).update, rtol=1e-10)
    assert_differs(row.form(case).covariance, row.form(case).update, by_at_least=0.01)


@pytest.mark.claim("prop-algorithms")
@pytest.mark.parametrize("name", NAMES)
def test_a_coin_for_a_reward_leaves_what_the_row_says(name):
    row = row_of(name)
    found = expected_update(PAIR, row.loss, batches(PAIR, row.source, row.count, coin=True))
    scale = float(row.form(PAIR).update.norm())
    assert (float(found.norm()) > 0.01 * scale) if row.blind else (float(found.norm()) < 1e-12 * scale)


@pytest.mark.claim("prop-algorithms")
def test_ceilings_that_the_table_gives_in_closed_form():
    law, reward = CASE.law, CASE.rewards
    fisher = law.probs @ law.scores.square()
    spread = (law.probs @ reward.square() - (law.probs @ reward) ** 2).sqrt()
    p = float(law.probs @ (reward >= 1).double())
    distance = law.probs @ (CASE.teacher.probs / law.probs - 1).square()
    words = {
        "reinforce": 2 / 3 * spread,
        "rloo": spread,
        "dr_grpo": 2 / 9 * spread,
        "rejection_sampling": ((1 - p) / p) ** 0.5,
        "supervised": distance.sqrt(),
    }
    for name, factor in words.items():
        assert_equal(row_of(name).form(CASE).ceiling, factor * fisher.sqrt(), rtol=1e-10)


@pytest.mark.claim("prop-algorithms")
def test_reinforce_with_a_fixed_baseline_is_the_covariance():
    def loss(_, batch, draw):
        return losses.reinforce_loss(batch.log_probs, batch.mask, draw.rewards - 0.7)

    assert_equal(expected_update(PAIR, loss, batches(PAIR, "policy")), row_of("rloo").form(PAIR).update)


@pytest.mark.claim("prop-algorithms")
def test_a_token_that_the_sampler_leaves_out_is_missing_from_the_mean():
    """After b the policy gives c, d and e a third each, the sampler c and d a half each; at the logit of e."""
    answers = {"a": 0.5, "bc": 0.25, "bd": 0.25}
    direction = (1 / 3) / (1 / 2) * (-1 / 3)  # of c and of d alike: no covariance
    theta = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    second = (torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64) * theta).log_softmax(0)
    total = by_hand = 0.0
    for y, z in itertools.product(answers, repeat=2):
        mask = torch.tensor([[True, len(x) == 2] for x in (y, z)])
        logs = torch.stack(
            [
                torch.stack(
                    [-math.log(2) + 0 * theta, second["cd".find(x[-1])] if len(x) == 2 else 0 * theta]
                )
                for x in (y, z)
            ]
        )
        held = -math.log(2) * mask.double()
        won = torch.tensor([float(x == "bd") for x in (y, z)], dtype=torch.float64)
        loss = losses.ppo_loss(logs, mask, won - won.mean(), held, epsilon=0.5)
        total = total + answers[y] * answers[z] * loss
        signal = float(won[0] - won[1]) / 2 / (len(y) + len(z))
        by_hand += 2 * answers[y] * answers[z] * signal * direction * (len(y) == 2)
    (slope,) = torch.autograd.grad(total, theta)
    assert -float(slope) == pytest.approx(by_hand, rel=1e-12) and by_hand == pytest.approx(
        -1 / 108, rel=1e-12
    )


def test_reinforce_rloo_and_dr_grpo_follow_the_gradient_of_the_expected_reward():
    slope = finite_difference_gradient(lambda at: CASE.policy.enumerate(at).probs @ CASE.rewards, CASE.theta)
    for name, factor in (("reinforce", 2 / 3), ("rloo", 1.0), ("dr_grpo", 2 / 9)):
        assert_equal(row_of(name).form(CASE).update, factor * slope, rtol=1e-7)


def test_rejection_sampling_follows_the_gradient_of_the_log_of_the_success_rate():
    wins = (CASE.rewards >= 1).double()
    slope = finite_difference_gradient(lambda at: (CASE.policy.enumerate(at).probs @ wins).log(), CASE.theta)
    assert_equal(row_of("rejection_sampling").form(CASE).update, slope, rtol=1e-7)


def test_supervised_follows_the_expected_log_probability():
    def likelihood(at):
        return CASE.teacher.probs @ CASE.policy.enumerate(at).token_log_probs.sum(1)

    assert_equal(
        row_of("supervised").form(CASE).update, finite_difference_gradient(likelihood, CASE.theta), rtol=1e-7
    )


def test_dpo_simpo_and_orpo_follow_their_losses_written_out():
    p, lengths, held = CASE.old.probs, CASE.law.lengths, CASE.old.token_log_probs.sum(1)
    better = (CASE.rewards[:, None] > CASE.rewards).double()
    mass = 2 * p[:, None] * p * better / (2 * p[:, None] * p * better).sum()

    def objective(name):
        def value(at):
            logs = CASE.policy.enumerate(at).token_log_probs.sum(1)
            mean = logs / lengths
            if name == "dpo":
                h = logs - held
                return (mass * torch.sigmoid(0.5 * (h[:, None] - h)).log()).sum()
            if name == "simpo":
                return (mass * torch.sigmoid(2 * (mean[:, None] - mean) - 1).log()).sum()
            odds = mean - (1 - mean.exp()).log()
            gain = 0.5 * torch.sigmoid(odds[:, None] - odds).log() + mean[:, None]
            return (mass * gain).sum()

        return value

    for name in ("dpo", "simpo", "orpo"):
        slope = finite_difference_gradient(objective(name), CASE.theta)
        assert_equal(row_of(name).form(CASE).update, slope, rtol=1e-6)


def test_a_batch_in_another_order_is_the_same_batch():
    case = small_case(3)
    for name in ("rloo", "grpo", "prime", "ppo"):
        row = row_of(name)
        law = case.old if row.source == "behaviour" else case.law
        draws = [
            Draw(list(group), case.rewards[list(group)], math.prod(float(law.probs[k]) for k in group))
            for group in itertools.product(range(4), repeat=3)
        ]
        ordered = expected_update(case, row.loss, draws)
        assert_equal(expected_update(case, row.loss, batches(case, row.source)), ordered, rtol=1e-12)


@pytest.mark.parametrize("source", ["policy", "behaviour", "pairs", "successes", "data"])
@pytest.mark.parametrize("coin", [False, True])
def test_the_batches_of_a_law_have_its_probabilities(source, coin):
    case = small_case(2)
    draws = batches(case, source, coin=coin)
    assert sum(draw.mass for draw in draws) == pytest.approx(1, rel=1e-12)
    expected = {"pairs": lambda r: r[0] > r[1], "successes": lambda r: bool((r >= 1).any())}
    assert all(expected.get(source, lambda r: True)(draw.rewards) for draw in draws)
    if source in ("policy", "behaviour", "data"):
        law = {"policy": case.law, "behaviour": case.old, "data": case.teacher}[source]
        first = torch.zeros(4, dtype=torch.float64)
        for draw in draws:
            for row in draw.rows:
                first[row] += draw.mass / 2
        assert_equal(first, law.probs, rtol=1e-12)


def test_pairs_and_successes_are_conditional_laws():
    case = small_case(2)
    p, r = case.old.probs, case.rewards
    kept = sum(float(p[a] * p[b]) for a in range(4) for b in range(4) if r[a] != r[b])
    for draw in batches(case, "pairs"):
        a, b = draw.rows
        assert draw.mass == pytest.approx(2 * float(p[a] * p[b]) / kept, rel=1e-12)
    success = float(case.law.probs @ (r >= 1).double())
    whole = 1 - (1 - success) ** 2
    pair = next(draw for draw in batches(case, "successes") if draw.rows == [1, 1])
    assert pair.mass == pytest.approx(float(case.law.probs[1]) ** 2 / whole, rel=1e-12)


@pytest.mark.claim("prop-signal")
def test_a_form_is_a_mean_of_products_and_touches_its_ceiling_where_it_is_affine():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    d = torch.tensor([[1.0, 2.0], [-1.0, 0.0], [3.0, 5.0]], dtype=torch.float64)
    c = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    form = forms.response_form(p, c, d)
    by_hand = [sum(float(p[y] * c[y] * d[y, i]) for y in range(3)) for i in range(2)]
    assert_equal(form.update, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-14)
    affine = forms.response_form(p, 3 - 2 * d[:, 0], d)
    assert_equal(affine.covariance[0].abs(), affine.ceiling[0], rtol=1e-14)
    assert_differs(affine.covariance[1].abs(), affine.ceiling[1], by_at_least=0.04)


@pytest.mark.claim("prop-signal")
def test_the_form_of_tokens_is_the_mean_of_the_sum_and_lies_under_the_plain_ceiling():
    law = CASE.law
    signals = torch.randn(15, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    form = forms.token_form(law, signals, law.token_scores)
    whole = torch.einsum("y,yt,ytd->d", law.probs, signals, law.token_scores)
    assert_equal(form.update, whole, rtol=1e-10)
    assert float(form.remainder.abs().max()) < 1e-12 * float(form.ceiling.max())
    shifted = forms.token_form(law, signals, law.token_scores + 1.0)
    assert_equal(shifted.covariance, form.covariance, rtol=1e-10)
    assert_differs(shifted.remainder, form.remainder, by_at_least=0.01)


def test_a_response_of_one_token_has_one_form():
    policy = AutoregressivePolicy.random(4, 1, 3, torch.Generator().manual_seed(2))
    law = policy.enumerate(torch.zeros(3, dtype=torch.float64))
    c = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.float64)
    whole, token = (
        forms.response_form(law.probs, c, law.scores),
        forms.token_form(law, c[:, None], law.token_scores),
    )
    assert_equal(token.covariance, whole.covariance, rtol=1e-12)
    assert_equal(token.ceiling, whole.ceiling, rtol=1e-12)


def test_signals_of_members_are_conditional_means():
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    groups, mass = forms.group_law(p, 2)
    assert len(groups) == 9 and float(mass.sum()) == pytest.approx(1, rel=1e-14)
    values = groups.double() @ torch.tensor([[1.0, 2.0], [10.0, 20.0]], dtype=torch.float64)
    found = forms.member_signals(p, groups, mass, values)
    mean = float(p @ torch.arange(3.0, dtype=torch.float64))
    by_hand = [(y + 10 * mean) + (2 * mean + 20 * y) for y in range(3)]  # as the first, and as the second
    assert_equal(found, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-13)


@pytest.mark.claim("prop-algorithms")
def test_the_roofs_of_grpo_stand_in_their_order():
    for seed in range(3):
        case = random_case(seed=seed)
        form, law = row_of("grpo").form(case), case.law
        groups, mass = forms.group_law(law.probs, 3)
        r = case.rewards[groups]
        alive = mass @ (r != r[:, :1]).any(1).double()
        short = law.probs @ (law.scores / law.lengths[:, None]).square()
        assert_at_most(form.ceiling, (2 / 3 * alive * short).sqrt())
        assert_at_most(short, law.probs @ law.scores.square())


@pytest.mark.claim("prop-algorithms")
def test_the_roof_of_dpo_needs_the_share_of_kept_pairs():
    for seed in range(3):
        case = random_case(seed=seed)
        form, p, h, r = row_of("dpo").form(case), case.old.probs, case.log_ratios, case.rewards
        sign = torch.sign(r[:, None] - r)
        pairs = p[:, None] * p * sign.abs()
        weight = torch.sigmoid(-0.5 * sign * (h[:, None] - h))
        spread = p @ (case.law.scores - p @ case.law.scores).square()
        roof = (
            0.5 * ((pairs * weight.square()).sum() / pairs.sum()).sqrt() * (2 * spread / pairs.sum()).sqrt()
        )
        assert_at_most(form.ceiling, roof)


def test_the_reference_point_of_kto_that_moves_adds_its_own_gradient():
    case, p = CASE, CASE.old.probs
    held, wins = case.old.token_log_probs.sum(1), case.rewards >= 1

    def loss(at, live):
        law = case.policy.enumerate(at)
        h = law.token_log_probs.sum(1) - held
        point = law.probs @ h if live else case.point
        return p @ torch.where(wins, torch.sigmoid(0.5 * (point - h)), torch.sigmoid(0.5 * (h - point)))

    form = row_of("kto").form(case)
    assert_equal(form.update, -finite_difference_gradient(lambda at: loss(at, False), case.theta), rtol=1e-6)
    v = torch.sigmoid(0.5 * (case.log_ratios - case.point))
    push = float(p @ ((2 * wins.double() - 1) * 0.5 * v * (1 - v)))
    moved = -finite_difference_gradient(lambda at: loss(at, True), case.theta)
    slope = finite_difference_gradient(
        lambda at: (
            case.policy.enumerate(at).probs @ (case.policy.enumerate(at).token_log_probs.sum(1) - held)
        ),
        case.theta,
    )
    assert_equal(moved, form.update - push * slope, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: row_of("adam"), "no row 'adam': use one of reinforce"),
        (lambda: batches(CASE, "memory"), "no source 'memory': use one of policy"),
        (
            lambda: forms.response_form(CASE.law.probs, CASE.rewards[:-1], CASE.law.scores),
            "15 responses, signals of shape",
        ),
        (
            lambda: forms.token_form(CASE.law, CASE.rewards, CASE.law.token_scores),
            r"the law has \(Y, T\) = \(15, 3\)",
        ),
        (
            lambda: method_forms.dpo_form(
                CASE.old.probs, CASE.law.scores, CASE.log_ratios, 0 * CASE.rewards, beta=1.0
            ),
            "every pair is a tie",
        ),
        (lambda: method_forms.supervised_form(CASE.law, CASE.law.probs / 2), "data_probs sums to 0.5"),
    ],
)
def test_what_has_no_form_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_case_is_what_it_says():
    assert len(CASE.law.responses) == 15 and set(CASE.law.lengths.tolist()) == {1, 2, 3}
    assert enumerated_batch(CASE.policy, CASE.theta).responses == CASE.law.responses
    kl = sum(float(p * h) for p, h in zip(CASE.law.probs, CASE.log_ratios, strict=True))
    assert CASE.point == pytest.approx(kl, rel=1e-12) and kl > 0
