"""Data from another law, and signals given token by token: against autograd, loops over prefixes and hand formulas."""

from __future__ import annotations

import pytest
import torch

from ceilings.batches import enumerated_batch
from ceilings.ceiling import gradient_ceiling, nested_ceiling, score_reward_covariance, tightness
from ceilings.data_laws import tempered_law, token_ceiling, token_covariance
from ceilings.losses.distillation import token_reverse_kl
from ceilings.losses.rejection_sampling import rejection_sampling_loss
from ceilings.losses.supervised import supervised_loss
from ceilings.off_policy import chi_square_divergence
from ceilings.policies import AutoregressivePolicy
from ceilings.testing import assert_at_most, assert_differs, assert_equal

F64 = torch.float64
SEEDS = range(6)


def pair(seed):
    """A policy with its parameters, its law, and the next-token laws of another policy of the same responses."""
    generator = torch.Generator().manual_seed(seed)
    policies = [AutoregressivePolicy.random(3, 3, 7, generator, eos=0) for _ in range(2)]
    theta, other = torch.randn(2, 7, generator=generator, dtype=F64)
    return policies[0], theta, policies[0].enumerate(theta), enumerated_batch(policies[1], other)


def by_prefix(law):
    """Rows of the responses that are still open at each prefix."""
    found = {}
    for row, response in enumerate(law.responses):
        for t in range(len(response)):
            found.setdefault(response[:t], []).append(row)
    return found


@pytest.mark.claim("thm-supervised")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_of_the_supervised_loss_is_a_covariance_with_the_ratio_of_the_laws(seed):
    policy, theta, law, data = pair(seed)
    q = data.sequence_log_probs.exp()
    point = theta.clone().requires_grad_()
    batch = enumerated_batch(policy, point)
    losses = [supervised_loss(batch.log_probs[n : n + 1], batch.mask[n : n + 1]) for n in range(len(q))]
    (gradient,) = torch.autograd.grad(-(q @ torch.stack(losses)), point)
    reward = q / law.probs
    assert_equal(score_reward_covariance(law.scores, reward, law.probs), gradient)
    price = chi_square_divergence(q, law.probs).sqrt()
    assert_equal(gradient_ceiling(law.scores, reward, law.probs), price * (law.probs @ law.scores**2).sqrt())
    assert_at_most(gradient.abs(), nested_ceiling(law, reward))
    assert_at_most(nested_ceiling(law, reward), gradient_ceiling(law.scores, reward, law.probs))


@pytest.mark.claim("thm-supervised")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_form_token_by_token_is_the_nested_ceiling_of_the_ratio(seed):
    policy, theta, law, data = pair(seed)
    own = enumerated_batch(policy, theta)
    q, total = data.sequence_log_probs.exp(), torch.zeros(7, dtype=F64)
    for prefix, rows in by_prefix(law).items():
        t, row = len(prefix), rows[0]
        price = chi_square_divergence(data.laws[row, t].exp(), own.laws[row, t].exp()).sqrt()
        given = law.probs[rows] / law.probs[rows].sum()
        total += q[rows].sum() * price * (given @ law.token_scores[rows, t] ** 2).sqrt()
    assert_equal(nested_ceiling(law, q / law.probs), total)


@pytest.mark.claim("thm-supervised")
def test_rejection_sampling_has_the_tightness_of_its_reward():
    policy, theta, law, _ = pair(1)
    accepted = torch.tensor([sum(y) == 2 for y in law.responses])
    p = law.probs[accepted].sum()
    q = torch.where(accepted, law.probs / p, 0)
    assert_equal(chi_square_divergence(q, law.probs), (1 - p) / p)
    reward = accepted.to(F64)
    assert_equal(*(tightness(law.scores, r, law.probs) for r in (q / law.probs, reward)))
    point = theta.clone().requires_grad_()
    batch = enumerated_batch(policy, point)
    losses = [
        rejection_sampling_loss(batch.log_probs[[n]], batch.mask[[n]], accepted[[n]])
        for n in accepted.nonzero()[:, 0].tolist()
    ]
    (gradient,) = torch.autograd.grad(-(q[accepted] @ torch.stack(losses)), point)
    assert_equal(gradient, score_reward_covariance(law.scores, reward, law.probs) / p)


@pytest.mark.claim("thm-distillation")
@pytest.mark.parametrize("seed", SEEDS)
def test_per_token_distillation_is_a_sum_of_covariances_and_not_the_gradient_of_the_divergence(seed):
    policy, theta, law, teacher = pair(seed)
    point = theta.clone().requires_grad_()
    batch = enumerated_batch(policy, point)
    stopped = law.probs @ token_reverse_kl(batch.laws, teacher.laws, batch.mask).sum(1)
    (update,) = torch.autograd.grad(stopped, point, retain_graph=True)
    log_ratio = batch.sequence_log_probs - teacher.sequence_log_probs
    (gradient,) = torch.autograd.grad(batch.sequence_log_probs.exp() @ log_ratio, point)
    assert_equal(score_reward_covariance(law.scores, log_ratio.detach(), law.probs), gradient)
    signals = (batch.log_probs - teacher.log_probs).detach()
    assert_equal(token_covariance(law, signals), update)
    assert_at_most(update.abs(), token_ceiling(law, signals))
    assert_differs(update, gradient, by_at_least=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_whole_reward_or_its_value_as_signal_gives_the_policy_gradient_and_the_nested_ceiling(seed):
    *_, law, _ = pair(seed)
    reward = torch.randn(len(law.probs), generator=torch.Generator().manual_seed(seed), dtype=F64)
    whole = reward[:, None].expand(-1, 3).contiguous()
    value = whole.clone()  # Q_t = E[R | y_<=t], by a loop over prefixes
    for prefix, rows in by_prefix(law).items():
        if prefix:
            value[rows, len(prefix) - 1] = law.probs[rows] @ reward[rows] / law.probs[rows].sum()
    gradient = score_reward_covariance(law.scores, reward, law.probs)
    assert_equal(token_covariance(law, whole), gradient)
    assert_equal(token_covariance(law, value), gradient)
    assert_equal(token_ceiling(law, value), nested_ceiling(law, reward))
    assert_at_most(token_ceiling(law, value), token_ceiling(law, whole))  # noise of later tokens only adds


def test_a_tempered_law_lies_between_two_laws():
    half, biased = torch.tensor([0.5, 0.5], dtype=F64), torch.tensor([0.8, 0.2], dtype=F64)
    assert_equal(tempered_law(half, biased, 0), half)
    assert_equal(tempered_law(half, biased, 1), biased)
    assert_equal(tempered_law(half, biased, 0.5), torch.tensor([2 / 3, 1 / 3], dtype=F64))  # roots 2 : 1
    assert_equal(tempered_law(half, biased, 2), torch.tensor([16 / 17, 1 / 17], dtype=F64))  # squares 16 : 1


@pytest.mark.parametrize(
    ("probs", "data", "weight", "message"),
    [
        ([0.5, 0.5], [1.0, 0.0], 0.5, "data_probs gives response 1 probability zero"),
        ([0.0, 1.0], [0.5, 0.5], 0.5, "probs gives response 0 probability zero"),
        ([0.5, 0.5], [0.2, 0.3, 0.5], 0.5, "2 probs but 3 data_probs"),
        ([0.5, 0.6], [0.5, 0.5], 0.5, "probs sums to 1.1"),
        ([0.5, 0.5], [0.5, 0.5], -0.1, "weight is -0.1"),
        ([0.5, 0.5], [0.5, 0.5], float("inf"), "weight is inf"),
        ([0.5, 0.5], [0.5, 0.5], float("nan"), "weight is nan"),
    ],
)
def test_what_has_no_power_is_refused(probs, data, weight, message):
    with pytest.raises(ValueError, match=message):
        tempered_law(torch.tensor(probs, dtype=F64), torch.tensor(data, dtype=F64), weight)


@pytest.mark.parametrize("measure", [token_covariance, token_ceiling])
def test_signals_need_one_number_a_response_and_step(measure):
    *_, law, _ = pair(0)
    with pytest.raises(ValueError, match="values has shape"):
        measure(law, torch.zeros(len(law.probs), 2, dtype=F64))
