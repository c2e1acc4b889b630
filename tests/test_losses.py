"""Every loss against a form derived by enumeration, in float64; limits, repeatability, and what is refused.

The policy is a tree of three tokens and at most three steps, at parameters where every next-token law is uniform:
27 equally weighted rows hold its law exactly, and all pairs of them the law of two independent responses. So an
average over rows *is* an expectation, and no sampling error stands between a loss and its theorem.
"""

import itertools
import math

import pytest
import torch

from ceilings import losses
from ceilings.advantages import advantages
from ceilings.losses.distillation import check_laws, token_reverse_kl
from ceilings.losses.grpo import k3_divergence
from ceilings.losses.orpo import log_odds, odds_ratio_loss
from ceilings.losses.ppo import clip_share
from ceilings.losses.prime import implicit_rewards, prime_advantages
from ceilings.losses.sequences import masked_mean, mean_log_probs, response_mask, sequence_log_probs
from ceilings.policies import AutoregressivePolicy
from ceilings.testing import assert_differs, assert_equal

D = 5
POLICY = AutoregressivePolicy.random(3, 3, D, torch.Generator().manual_seed(0), eos=0)
ZERO = torch.zeros(D, dtype=torch.float64)
LAW = POLICY.enumerate(ZERO)
#: One row for each twenty-seventh of probability.
ROWS = [row for row, p in enumerate(LAW.probs) for _ in range(round(27 * float(p)))]
PAIRS = list(itertools.product(ROWS, ROWS))
REWARDS = torch.tensor([hash_ / 10 for hash_ in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9)]).double()
BINARY = (REWARDS > 0.45).double()
MASK = response_mask(LAW.lengths, 3)
S = LAW.scores


def token_laws(theta):
    """Log-law after every open prefix, with its graph."""
    return (POLICY.features @ theta).log_softmax(1)


def rows_at(theta, rows=None):
    """Token log-probabilities of the given responses, with their graph, and the mask."""
    rows = list(range(len(LAW.responses))) if rows is None else rows
    laws = token_laws(theta)
    index = {prefix: p for p, prefix in enumerate(POLICY.prefixes)}
    table = [
        [laws[index[LAW.responses[row][:t]], LAW.responses[row][t]] for t in range(LAW.lengths[row])]
        for row in rows
    ]
    # NaN where nothing stands: a loss that reads it shows.
    filled = [torch.stack([*row, *[ZERO.new_tensor(torch.nan)] * (3 - len(row))]) for row in table]
    return torch.stack(filled), MASK[rows]


def gradient(loss, theta=ZERO):
    """Gradient in θ of a function of θ."""
    leaf = theta.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def sums(theta, rows):
    """Log-probability of each response."""
    return sequence_log_probs(*rows_at(theta, rows))


def policy_gradient(rewards):
    """∇E[R] with no score in sight: the derivative of a sum over the tree."""
    return gradient(lambda theta: sums(theta, list(range(len(REWARDS)))).exp() @ rewards)


def test_the_rows_are_the_law():
    assert len(LAW.responses) == len(REWARDS) and len(ROWS) == 27 and set(LAW.lengths.tolist()) == {1, 2, 3}


# --- each loss against its form


def test_reinforce_is_minus_the_covariance():
    for baseline in (0.0, 5.0):
        found = gradient(
            lambda theta, b=baseline: losses.reinforce_loss(*rows_at(theta, ROWS), REWARDS[ROWS] - b)
        )
        assert_equal(-found, policy_gradient(REWARDS))


def test_reinforce_takes_an_advantage_a_token():
    signal = torch.rand(15, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = gradient(lambda theta: losses.reinforce_loss(*rows_at(theta), signal))
    expected = -torch.einsum("yt,ytd->d", signal, LAW.token_scores) / 15
    assert_equal(found, expected)


def test_rloo_is_unbiased_and_dr_grpo_short_by_its_two_factors():
    flat = [row for pair in PAIRS for row in pair]
    groups = torch.arange(len(PAIRS)).repeat_interleave(2)
    rloo = gradient(lambda theta: losses.rloo_loss(*rows_at(theta, flat), REWARDS[flat], groups))
    assert_equal(-rloo, policy_gradient(REWARDS))
    dr = gradient(
        lambda theta: losses.dr_grpo_loss(*rows_at(theta, flat), REWARDS[flat], groups, max_length=4)
    )
    assert_equal(-dr, policy_gradient(REWARDS) / (2 * 4))  # (G − 1)/G over L


def test_grpo_of_two_is_the_sign_over_the_length():
    flat = [row for pair in PAIRS for row in pair]
    groups = torch.arange(len(PAIRS)).repeat_interleave(2)
    expected = torch.zeros(D, dtype=torch.float64)
    for a, b in PAIRS:
        sign = torch.sign(REWARDS[a] - REWARDS[b])
        expected += sign * (S[a] / LAW.lengths[a] - S[b] / LAW.lengths[b]) / (2 * len(PAIRS))
    for scale, factor in (("population_std", 1.0), ("sample_std", 0.5**0.5)):
        found = gradient(
            lambda theta, s=scale: losses.grpo_loss(*rows_at(theta, flat), REWARDS[flat], groups, scale=s)
        )
        assert_equal(-found, factor * expected)


def test_the_leash_of_grpo_is_its_formula():
    theta, reference = ZERO + 0.3, ZERO - 0.2
    reference_log_probs = rows_at(reference)[0]
    groups = [0] * 8 + [1] * 7

    def with_beta(point, beta):
        return losses.grpo_loss(
            *rows_at(point), REWARDS, groups, reference_log_probs=reference_log_probs, beta=beta
        )

    found = gradient(lambda point: with_beta(point, 0.7) - with_beta(point, 0), theta)
    here, there = POLICY.enumerate(theta), POLICY.enumerate(reference)
    d = here.token_log_probs - there.token_log_probs
    slope = (1 - (-d).exp()) / LAW.lengths[:, None]  # of e^{-d} + d − 1
    assert_equal(found, 0.7 * torch.einsum("yt,ytd->d", slope, here.token_scores) / 15)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "prime"])
def test_clipped_surrogates_are_a_loop_over_tokens(name):
    theta, old = ZERO + 0.25, ZERO - 0.15
    behaviour = rows_at(old)[0].detach()
    groups, epsilon = [0] * 8 + [1] * 7, 0.1
    here, there = POLICY.enumerate(theta), POLICY.enumerate(old)
    signal, weight, loss = clipped_case(name, behaviour, groups, epsilon)
    value, slope, clipped = 0.0, torch.zeros(D, dtype=torch.float64), 0
    for y in range(15):
        for t in range(LAW.lengths[y]):
            ratio = math.exp(here.token_log_probs[y, t] - there.token_log_probs[y, t])
            a = float(signal[y, t])
            stopped = (a > 0 and ratio > 1 + epsilon) or (a < 0 and ratio < 1 - epsilon)
            inside = min(max(ratio, 1 - epsilon), 1 + epsilon)
            value -= weight(y) * (inside * a if stopped else ratio * a)
            slope -= 0 if stopped else weight(y) * ratio * a * here.token_scores[y, t]
            clipped += stopped
    assert 5 < clipped < 25  # both branches are really taken
    assert_equal(loss(theta), value)
    assert_equal(gradient(loss, theta), slope)
    share = clip_share(*rows_at(theta), signal, behaviour, epsilon=epsilon)
    assert_equal(share, clipped / int(LAW.lengths.sum()), rtol=1e-14)


def clipped_case(name, behaviour, groups, epsilon):
    """Advantage of each token by loops, weight of a token of a response, and the loss as a function of θ."""
    steps = int(LAW.lengths.sum())
    settings = {"behaviour_log_probs": behaviour, "epsilon": epsilon}
    members = {g: [y for y in range(15) if groups[y] == g] for g in (0, 1)}
    means = {g: sum(float(REWARDS[y]) for y in members[g]) / len(members[g]) for g in members}
    centred = REWARDS.new_tensor([float(REWARDS[y]) - means[groups[y]] for y in range(15)])
    centred = centred[:, None].expand(15, 3)
    if name == "ppo":
        return (
            centred,
            lambda y: 1 / steps,
            lambda theta: losses.ppo_loss(*rows_at(theta), centred, **settings),
        )
    if name == "dr_grpo":
        return (
            centred,
            lambda y: 1 / (15 * 3),
            lambda theta: losses.dr_grpo_loss(*rows_at(theta), REWARDS, groups, max_length=3, **settings),
        )
    if name == "grpo":
        std = [
            (sum(float(centred[m, 0]) ** 2 for m in members[g]) / (len(members[g]) - 1)) ** 0.5
            for g in groups
        ]
        scaled = centred / torch.tensor(std, dtype=torch.float64)[:, None]
        return (
            scaled,
            lambda y: 1 / (15 * float(LAW.lengths[y])),
            lambda theta: losses.grpo_loss(*rows_at(theta), REWARDS, groups, **settings),
        )
    process = torch.randn(15, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64) / 10
    signal = prime_by_hand(process, members, groups)
    return (
        signal,
        lambda y: 1 / steps,
        lambda theta: losses.prime_loss(*rows_at(theta), process, BINARY, groups, discount=0.9, **settings),
    )


def prime_by_hand(process, members, groups, discount=0.9):
    """The equation of the paper, token by token."""
    signal = torch.zeros(15, 3, dtype=torch.float64)
    mean = [float(process[y, : LAW.lengths[y]].mean()) for y in range(15)]
    for y in range(15):
        others = [m for m in members[groups[y]] if m != y]
        base = sum(mean[m] for m in others) / len(others)
        outcome = float(BINARY[y]) - sum(float(BINARY[m]) for m in others) / len(others)
        for t in range(LAW.lengths[y]):
            later = range(t, LAW.lengths[y])
            signal[y, t] = sum(discount ** (u - t) * (float(process[y, u]) - base) for u in later) + outcome
    return signal


PREFERRED = [(a, b) for a in range(15) for b in range(15) if REWARDS[a] > REWARDS[b]]
CHOSEN, REJECTED = [a for a, _ in PREFERRED], [b for _, b in PREFERRED]


def test_dpo_is_a_weighted_difference_of_scores():
    theta, reference, beta = ZERO + 0.2, ZERO - 0.3, 0.8
    here = POLICY.enumerate(theta)
    log_ratio = here.probs.log() - POLICY.enumerate(reference).probs.log()
    held = [sums(reference, CHOSEN), sums(reference, REJECTED)]
    found = gradient(
        lambda point: losses.dpo_loss(sums(point, CHOSEN), sums(point, REJECTED), *held, beta=beta), theta
    )
    expected = torch.zeros(D, dtype=torch.float64)
    for a, b in PREFERRED:
        weight = 1 / (1 + torch.exp(beta * (log_ratio[a] - log_ratio[b])))
        expected -= beta * weight * (here.scores[a] - here.scores[b]) / len(PREFERRED)
    assert_equal(found, expected)


def test_dpo_at_the_reference_is_half_beta_times_a_covariance():
    # At ratio 1 every weight is ½; over all ordered pairs of independent responses the mean is taken by enumeration.
    pairs = [(a, b) if REWARDS[a] > REWARDS[b] else (b, a) for a, b in PAIRS if REWARDS[a] != REWARDS[b]]
    chosen, rejected = [a for a, _ in pairs], [b for _, b in pairs]
    held = [sums(ZERO, chosen), sums(ZERO, rejected)]
    found = gradient(
        lambda theta: losses.dpo_loss(sums(theta, chosen), sums(theta, rejected), *held, beta=2.0)
    )
    kept = len(pairs) / len(PAIRS)
    above = torch.stack([LAW.probs @ torch.sign(r - REWARDS).double() for r in REWARDS])  # E sign(R − R')
    assert_equal(-found, 2 * (LAW.probs * above) @ S / kept)  # β/2 · 2 Cov(E sign, s) / P(kept)


@pytest.mark.parametrize("point", [0.0, 0.7])
def test_kto_pushes_each_response_by_the_slope_of_a_sigmoid(point):
    theta, reference, beta = ZERO + 0.2, ZERO - 0.3, 0.8
    here, desirable, rows = POLICY.enumerate(theta), BINARY.bool(), list(range(15))
    h = here.probs.log() - POLICY.enumerate(reference).probs.log()
    found = gradient(
        lambda at: losses.kto_loss(
            sums(at, rows),
            sums(reference, rows),
            desirable,
            point,
            beta=beta,
            desirable_weight=1.3,
            undesirable_weight=0.6,
        ),
        theta,
    )
    v = 1 / (1 + torch.exp(-beta * (h - point)))
    signed = (0.6 - 1.9 * desirable.double()) * beta * v * (1 - v)
    assert_equal(found, signed @ here.scores / 15)


def test_the_reference_point_of_kto_is_a_mean_held_above_zero():
    a, b = torch.tensor([-1.0, -3.0], requires_grad=True), torch.tensor([-2.0, -3.0])
    assert float(losses.kto_reference_point(a, b)) == 0.5 and float(losses.kto_reference_point(b, a)) == 0
    assert not losses.kto_reference_point(a, b).requires_grad


def test_simpo_compares_scores_over_lengths():
    theta, beta, margin = ZERO + 0.2, 1.7, 0.4
    here, lengths = POLICY.enumerate(theta), LAW.lengths
    sizes = [lengths[CHOSEN], lengths[REJECTED]]
    found = gradient(
        lambda at: losses.simpo_loss(sums(at, CHOSEN), sums(at, REJECTED), *sizes, beta=beta, margin=margin),
        theta,
    )
    mean, expected = here.probs.log() / lengths, torch.zeros(D, dtype=torch.float64)
    for a, b in PREFERRED:
        weight = 1 / (1 + torch.exp(beta * (mean[a] - mean[b]) - margin))
        direction = here.scores[a] / lengths[a] - here.scores[b] / lengths[b]
        expected -= beta * weight * direction / len(PREFERRED)
    assert_equal(found, expected)


def test_orpo_is_likelihood_plus_odds():
    theta, lam = ZERO + 0.2, 0.6
    here, lengths = POLICY.enumerate(theta), LAW.lengths
    sizes = [lengths[CHOSEN], lengths[REJECTED]]

    def loss(at):
        return losses.orpo_loss(sums(at, CHOSEN), sums(at, REJECTED), *sizes, odds_weight=lam)

    p = here.probs ** (1 / lengths.double())  # geometric mean of the token probabilities
    odds, value, expected = p / (1 - p), 0.0, torch.zeros(D, dtype=torch.float64)
    for a, b in PREFERRED:
        weight = odds[b] / (odds[a] + odds[b])  # σ(−(o⁺ − o⁻))
        up, down = here.scores[a] / lengths[a], here.scores[b] / lengths[b]
        expected -= (up + lam * weight * (up / (1 - p[a]) - down / (1 - p[b]))) / len(PREFERRED)
        value -= float(p[a].log() + lam * (1 - weight).log()) / len(PREFERRED)
    assert_equal(gradient(loss, theta), expected)
    assert_equal(loss(theta), value)


def test_rejection_sampling_is_the_policy_gradient_over_the_success_rate():
    accepted = BINARY[ROWS].bool()
    found = gradient(lambda theta: losses.rejection_sampling_loss(*rows_at(theta, ROWS), accepted))
    assert_equal(-found, policy_gradient(BINARY) / (LAW.probs @ BINARY))


def test_supervised_is_the_covariance_with_the_ratio_of_the_laws():
    theta, data = ZERO + 0.4, [0, 0, 3, 7, 7, 7, 12, 14]
    found = gradient(lambda at: losses.supervised_loss(*rows_at(at, data)), theta)
    here = POLICY.enumerate(theta)
    q = torch.bincount(torch.tensor(data), minlength=15) / len(data)
    ratio = q / here.probs
    centred = here.scores - here.probs @ here.scores
    assert_equal(-found, (here.probs * (ratio - here.probs @ ratio)) @ centred)
    by_token = gradient(lambda at: losses.supervised_loss(*rows_at(at, data), average="tokens"), theta)
    assert_equal(by_token, found * len(data) / int(LAW.lengths[data].sum()))


TEACHER = ZERO + 0.5


def whole_laws(theta, rows):
    """Next-token laws along each response, NaN after its end."""
    laws, index = token_laws(theta), {prefix: p for p, prefix in enumerate(POLICY.prefixes)}
    nothing = torch.full((3,), torch.nan, dtype=torch.float64)
    table = [
        [laws[index[LAW.responses[r][:t]]] if t < LAW.lengths[r] else nothing for t in range(3)] for r in rows
    ]
    return torch.stack([torch.stack(row) for row in table])


def test_sampled_distillation_is_the_gradient_of_its_divergence():
    teacher = rows_at(TEACHER, ROWS)[0]
    responses = list(range(15))

    def divergence(theta):
        logs = sums(theta, responses)
        return logs.exp() @ (logs - sums(TEACHER, responses))

    to_go = gradient(
        lambda theta: losses.sampled_reverse_kl_loss(
            rows_at(theta, ROWS)[0], teacher, MASK[ROWS], credit="to_go"
        )
    )
    assert_equal(to_go, gradient(divergence))
    token = gradient(
        lambda theta: losses.sampled_reverse_kl_loss(rows_at(theta, ROWS)[0], teacher, MASK[ROWS])
    )
    full = gradient(
        lambda theta: losses.reverse_kl_loss(whole_laws(theta, ROWS), whole_laws(TEACHER, ROWS), MASK[ROWS])
    )
    assert_equal(token, full)
    assert_differs(token, to_go, by_at_least=0.05)


def test_a_teacher_is_a_constant():
    log_probs, mask = rows_at(ZERO)
    teacher = torch.where(mask, rows_at(TEACHER)[0], -1).detach().requires_grad_()
    assert not losses.sampled_reverse_kl_loss(log_probs, teacher, mask).requires_grad
    laws = whole_laws(TEACHER, range(15)).detach().requires_grad_()
    assert not losses.reverse_kl_loss(whole_laws(ZERO, range(15)), laws, mask).requires_grad


def test_full_distillation_is_a_sum_of_divergences():
    theta = ZERO + 0.2
    here, there = token_laws(theta), token_laws(TEACHER)
    per_prefix = (here.exp() * (here - there)).sum(1)
    index = {prefix: p for p, prefix in enumerate(POLICY.prefixes)}
    total = sum(float(per_prefix[index[y[:t]]]) for y in LAW.responses for t in range(len(y)))
    pair = whole_laws(theta, range(15)), whole_laws(TEACHER, range(15))
    assert_equal(losses.reverse_kl_loss(*pair, MASK), total / 15)
    by_token = losses.reverse_kl_loss(*pair, MASK, average="tokens")
    assert_equal(by_token, total / int(LAW.lengths.sum()))


def test_a_teacher_may_know_tokens_that_the_policy_never_gives():
    laws = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[[0.25, 0.75]]], dtype=torch.float64).log()
    found = token_reverse_kl(laws, teacher, torch.ones(1, 1, dtype=torch.bool))
    assert_equal(found.detach(), math.log(4))
    (slope,) = torch.autograd.grad(found.sum(), laws)
    assert bool(slope.isfinite().all())


def test_the_reward_model_of_prime_learns_by_cross_entropy():
    theta, reference, beta = ZERO + 0.2, ZERO - 0.3, 0.8
    here = POLICY.enumerate(theta)
    logit = beta * (here.probs.log() - POLICY.enumerate(reference).probs.log())
    held = rows_at(reference)[0]

    def loss(at):
        return losses.prime_reward_loss(rows_at(at)[0], held, MASK, BINARY, beta=beta)

    p = 1 / (1 + torch.exp(-logit))
    assert_equal(gradient(loss, theta), beta * (p - BINARY) @ here.scores / 15)
    assert_equal(loss(theta), -(BINARY * p.log() + (1 - BINARY) * (1 - p).log()).mean())
    rewards = implicit_rewards(rows_at(theta)[0], held, MASK, beta=beta)
    assert_equal(rewards.sum(1), logit)


# --- limits


def everything(theta, rewards, groups=None):
    """Every loss on one batch at θ, as (name, scalar)."""
    groups = [0] * len(rewards) if groups is None else groups
    rows = list(range(len(rewards)))
    log_probs, mask = rows_at(theta, rows)
    held, lengths = rows_at(TEACHER, rows)[0], LAW.lengths[rows]
    half = len(rows) // 2
    pair = sums(theta, rows[:half]), sums(theta, rows[half : 2 * half])
    reference = sums(TEACHER, rows[:half]), sums(TEACHER, rows[half : 2 * half])
    sizes = lengths[:half], lengths[half : 2 * half]
    behaviour = {"behaviour_log_probs": rows_at(ZERO + 0.1, rows)[0]}
    centred = advantages(rewards, groups)
    return {
        "reinforce": losses.reinforce_loss(log_probs, mask, centred),
        "rloo": losses.rloo_loss(log_probs, mask, rewards, groups),
        "grpo": losses.grpo_loss(log_probs, mask, rewards, groups, **behaviour),
        "dr_grpo": losses.dr_grpo_loss(log_probs, mask, rewards, groups, max_length=3, **behaviour),
        "ppo": losses.ppo_loss(log_probs, mask, centred, **behaviour),
        "dpo": losses.dpo_loss(*pair, *reference),
        "kto": losses.kto_loss(sums(theta, rows), sums(TEACHER, rows), rewards > 0.4, 0.1),
        "orpo": losses.orpo_loss(*pair, *sizes),
        "simpo": losses.simpo_loss(*pair, *sizes),
        "prime": losses.prime_loss(log_probs, mask, held / 10, rewards.clamp(0, 1), groups),
        "rejection_sampling": losses.rejection_sampling_loss(log_probs, mask, rewards >= rewards.max()),
        "supervised": losses.supervised_loss(log_probs, mask),
        "reverse_kl": losses.reverse_kl_loss(whole_laws(theta, rows), whole_laws(TEACHER, rows), mask),
        "sampled_reverse_kl": losses.sampled_reverse_kl_loss(log_probs, held, mask),
    }


NAMES = list(everything(ZERO, REWARDS))


@pytest.mark.parametrize("name", NAMES)
def test_twice_the_same_is_bitwise_the_same(name):
    first, second = (gradient(lambda at: everything(at, REWARDS)[name], ZERO + 0.2) for _ in range(2))
    assert bool(first.isfinite().all()) and torch.equal(first, second) and float(first.abs().max()) > 0


def token_losses(log_probs, other, laws, other_laws, signal):
    """Losses of tokens, whose other inputs may hold anything outside the mask."""
    groups = [0] * 8 + [1] * 7
    old = {"behaviour_log_probs": other}
    return {
        "supervised": losses.supervised_loss(log_probs, MASK),
        "reinforce": losses.reinforce_loss(log_probs, MASK, signal),
        "ppo": losses.ppo_loss(log_probs, MASK, signal, other),
        "grpo": losses.grpo_loss(
            log_probs, MASK, REWARDS, groups, **old, reference_log_probs=other, beta=0.5
        ),
        "dr_grpo": losses.dr_grpo_loss(log_probs, MASK, REWARDS, groups, max_length=3, **old),
        "prime": losses.prime_loss(log_probs, MASK, signal, BINARY, groups, other),
        "prime_reward": losses.prime_reward_loss(log_probs, other, MASK, BINARY),
        "sampled_reverse_kl": losses.sampled_reverse_kl_loss(log_probs, other, MASK, credit="to_go"),
        "reverse_kl": losses.reverse_kl_loss(laws, other_laws, MASK) + 0 * log_probs[MASK].sum(),
    }


@pytest.mark.parametrize("filler", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_what_stands_outside_the_mask_is_never_read_not_even_times_zero(filler):
    inputs = [
        POLICY.enumerate(ZERO + 0.2).token_log_probs,
        POLICY.enumerate(TEACHER).token_log_probs,
        whole_laws(ZERO + 0.2, range(15)).nan_to_num(-1),
        whole_laws(TEACHER, range(15)).nan_to_num(-1),
        torch.randn(15, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
    ]
    for name in token_losses(*inputs):
        slopes = []
        for fill in (None, filler):
            filled = [x.clone() for x in inputs]
            for x in filled if fill is not None else []:
                x[~MASK] = fill
            leaves = [filled[0].requires_grad_(), filled[2].requires_grad_()]
            value = token_losses(*filled)[name]
            slopes.append([value, *torch.autograd.grad(value, leaves, materialize_grads=True)])
        for clean, filled_in in zip(*slopes, strict=True):
            assert torch.equal(clean, filled_in), name


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce", "ppo"])
def test_equal_rewards_teach_nothing(name):
    equal = torch.full((6,), 0.1, dtype=torch.float64)
    assert float(gradient(lambda at: everything(at, equal)[name]).abs().max()) == 0


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "prime"])
def test_a_group_of_one(name):
    groups = [0] * 14 + [1]
    if name == "dr_grpo":  # its own mean leaves nothing, which is a number
        assert bool(everything(ZERO, REWARDS, [0] * 15)[name].isfinite())
        alone = losses.dr_grpo_loss(*rows_at(ZERO, [4]), REWARDS[4:5], [0], max_length=3)
        assert float(alone) == 0
        return
    calls = {
        "rloo": lambda: losses.rloo_loss(*rows_at(ZERO), REWARDS, groups),
        "grpo": lambda: losses.grpo_loss(*rows_at(ZERO), REWARDS, groups),
        "prime": lambda: losses.prime_loss(*rows_at(ZERO), rows_at(ZERO)[0] / 10, BINARY, groups),
    }
    with pytest.raises(ValueError, match="response 14 is the only one of its group"):
        calls[name]()


def test_at_ratio_one_the_clip_does_nothing():
    groups, present = [0] * 15, rows_at(ZERO)[0].detach()
    for loss in (
        lambda at, b: losses.ppo_loss(*rows_at(at), REWARDS, b),
        lambda at, b: losses.grpo_loss(*rows_at(at), REWARDS, groups, behaviour_log_probs=b),
    ):
        with_it, without = (gradient(lambda at, b=b, f=loss: f(at, b)) for b in (present, None))
        assert torch.equal(with_it, without)
    assert float(clip_share(*rows_at(ZERO), REWARDS, present)) == 0
    by_token = gradient(lambda at: losses.ppo_loss(*rows_at(at), REWARDS))
    plain = gradient(lambda at: losses.reinforce_loss(*rows_at(at), REWARDS))
    assert_equal(by_token, plain * 15 / int(LAW.lengths.sum()))


def test_k3_is_never_negative_and_its_mean_is_the_divergence():
    found = k3_divergence(*[rows_at(at, ROWS)[0] for at in (ZERO, TEACHER)], MASK[ROWS])
    assert bool((found >= 0).all())
    expected = losses.reverse_kl_loss(whole_laws(ZERO, ROWS), whole_laws(TEACHER, ROWS), MASK[ROWS])
    assert_equal(masked_mean(found, MASK[ROWS], "responses"), expected)


# --- what is refused

TOKENS = torch.full((2, 2), -1.0)
FULL = torch.ones(2, 2, dtype=torch.bool)
HALF = torch.tensor([[True, True], [False, False]])
ONE = torch.tensor([1.0, 2.0])
FIRST = torch.tensor([-1.0, -2.0])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: losses.supervised_loss(TOKENS, HALF), "response 1 is empty: .* leave it out"),
        (lambda: losses.supervised_loss(TOKENS, FULL & False), "every token is masked out"),
        (lambda: losses.supervised_loss(TOKENS, FULL[:1]), r"mask is torch.bool of shape \(1, 2\)"),
        (lambda: losses.supervised_loss(TOKENS, FULL.long()), "mask is torch.int64"),
        (lambda: losses.supervised_loss(TOKENS[0], FULL[0]), r"floating point of shape \(N, T\)"),
        (lambda: losses.supervised_loss(TOKENS + 3, FULL), "has the entry 2: .* were logits passed"),
        (lambda: losses.supervised_loss(TOKENS * torch.inf, FULL), "an entry that is not finite"),
        (lambda: losses.supervised_loss(TOKENS, FULL, average="words"), "there is no average 'words'"),
        (lambda: losses.reinforce_loss(TOKENS, FULL, torch.ones(3)), r"advantages of shape \(3,\)"),
        (
            lambda: losses.reinforce_loss(TOKENS, FULL, ONE.clone().requires_grad_()),
            "advantages carry a gradient",
        ),
        (lambda: losses.reinforce_loss(TOKENS, FULL, ONE * torch.nan), "an advantage is not finite"),
        (lambda: losses.rloo_loss(TOKENS, FULL, ONE, (0, 0, 0)), "3 groups for 2 rewards"),
        (
            lambda: losses.ppo_loss(TOKENS, FULL, ONE, TOKENS * torch.inf),
            "behaviour_log_probs has an entry that is not finite",
        ),
        (lambda: losses.ppo_loss(TOKENS, FULL, ONE, TOKENS[:1]), "shape of behaviour_log_probs"),
        (lambda: losses.ppo_loss(TOKENS, FULL, ONE, epsilon=0.0), "epsilon is 0.0: it must be positive"),
        (lambda: losses.grpo_loss(TOKENS, FULL, ONE, (0, 0), beta=0.1), "there are no reference_log_probs"),
        (
            lambda: losses.dr_grpo_loss(TOKENS, FULL, ONE, (0, 0), max_length=1),
            "max_length is 1 but a response has 2",
        ),
        (
            lambda: losses.dpo_loss(FIRST, FIRST[:1], FIRST, FIRST),
            "1 rejected_log_probs for 2 responses",
        ),
        (lambda: losses.dpo_loss(FIRST, FIRST, FIRST, FIRST, beta=0.0), "beta is 0.0"),
        (lambda: losses.dpo_loss(*[FIRST[:0]] * 4), "chosen_log_probs must be a non-empty"),
        (
            lambda: losses.dpo_loss(FIRST, FIRST, FIRST, -FIRST),
            "rejected_reference_log_probs has the entry 2",
        ),
        (lambda: losses.kto_loss(FIRST, FIRST, ONE, 0.0), "desirable must be boolean"),
        (lambda: losses.kto_loss(FIRST, FIRST, ONE > 1, -1.0), "reference point must be one finite number"),
        (lambda: losses.kto_loss(FIRST, FIRST, ONE > 1, 0.0, desirable_weight=0.0), "desirable_weight is 0"),
        (
            lambda: losses.simpo_loss(FIRST, FIRST, torch.tensor([1, 0]), torch.tensor([1, 1])),
            "response 1 of chosen_lengths is empty",
        ),
        (lambda: losses.simpo_loss(FIRST, FIRST, ONE, ONE), "chosen_lengths must hold one whole number"),
        (lambda: losses.orpo_loss(FIRST, FIRST * 0, *[torch.tensor([1, 1])] * 2), "its odds are infinite"),
        (
            lambda: losses.orpo_loss(FIRST, FIRST, *[torch.tensor([1, 1])] * 2, odds_weight=0.0),
            "odds_weight is 0.0",
        ),
        (lambda: losses.rejection_sampling_loss(TOKENS, FULL, ONE > 9), "no response was accepted"),
        (lambda: losses.rejection_sampling_loss(TOKENS, FULL, ONE), "accepted must be boolean"),
        (
            lambda: losses.prime_reward_loss(TOKENS, TOKENS, FULL, ONE),
            r"an outcome lies outside \[0, 1\]",
        ),
        (lambda: losses.prime_reward_loss(TOKENS, TOKENS, FULL, ONE[:1]), r"outcomes of shape \(1,\)"),
        (
            lambda: losses.sampled_reverse_kl_loss(TOKENS, TOKENS, FULL, credit="all"),
            "there is no credit 'all'",
        ),
        (
            lambda: losses.sampled_reverse_kl_loss(TOKENS, TOKENS * torch.inf, FULL),
            "teacher_log_probs has an entry that is not finite",
        ),
        (lambda: response_mask(torch.tensor([3]), 2), "at most 2"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_laws_must_be_whole_and_the_teacher_s_support_wide_enough():
    law = torch.tensor([0.5, 0.25, 0.25]).double().log().expand(2, 2, 3)
    with pytest.raises(
        ValueError, match="a law of laws sums to 0.75, not 1: .* neither logits nor the top few"
    ):
        losses.reverse_kl_loss(law[:, :, :2], law[:, :, :2], FULL)
    with pytest.raises(ValueError, match=r"laws must be floating point of shape \(N, T, V\)"):
        check_laws("laws", law[0], FULL)
    certain = torch.tensor([0.0, 0.5, 0.5]).double().log().expand(2, 2, 3)
    with pytest.raises(
        ValueError, match="the teacher gives token 0 probability zero at position 0 of response 0"
    ):
        losses.reverse_kl_loss(law, certain, FULL)
    fewer = torch.tensor([0.5, 0.5]).double().log().expand(2, 2, 2)
    with pytest.raises(ValueError, match="the same tokens and vocabulary"):
        losses.reverse_kl_loss(law, fewer, FULL)
    with pytest.raises(ValueError, match="a law of laws sums to nan"):
        losses.reverse_kl_loss(law * torch.nan, law, FULL)


def test_length_averages_are_sums_over_lengths():
    log_probs, mask = rows_at(ZERO + 0.2)
    assert_equal(mean_log_probs(log_probs, mask), POLICY.enumerate(ZERO + 0.2).probs.log() / LAW.lengths)


def test_log_odds_survive_probabilities_near_one():
    # p = 1 − 1e-14: log(1 − e^l) would have lost every digit but two.
    assert_equal(log_odds(torch.tensor([-1e-14], dtype=torch.float64)), -math.log(1e-14), rtol=1e-10)
    assert odds_ratio_loss(FIRST, FIRST, *[torch.tensor([1, 1])] * 2) == pytest.approx(math.log(2))


def test_prime_advantages_are_constants():
    rewards = (rows_at(ZERO)[0] / 10).detach().requires_grad_()
    assert not prime_advantages(rewards, MASK, BINARY, [0] * 15).requires_grad
