"""Value and gradient of every loss that TRL has too, on one batch.

TRL computes a loss inside a trainer, from a model. Here the trainer's method is called with a stand-in for the trainer
that hands it log-probabilities, so that both sides differentiate in the same numbers.
"""

import os
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from ceilings import losses
from ceilings.advantages import advantages
from ceilings.losses.orpo import odds_ratio_loss
from ceilings.testing import assert_differs, assert_equal

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(autouse=True)
def needs_trl():
    """Skip here, not on import: a skipped test fails in CI, a skipped module does not."""
    pytest.importorskip("trl", reason="needs TRL: pip install -r requirements.txt")


N, T, V = 6, 4, 7
GROUPS = (0, 0, 0, 1, 1, 1)
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.tensor([4, 1, 3, 2, 4, 2])
MASK = torch.arange(T) < LENGTHS[:, None]
REWARDS = torch.rand(N, generator=GENERATOR, dtype=torch.float64)


def token_log_probs():
    """Random log-probabilities of tokens, 0 outside the mask as TRL has them."""
    values = -torch.rand(N, T, generator=GENERATOR, dtype=torch.float64) - 0.1
    return values.masked_fill(~MASK, 0)


HERE, OLD, REFERENCE = token_log_probs(), token_log_probs(), token_log_probs()


def value_and_gradient(loss, point):
    """Of a function of one tensor."""
    leaf = point.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def assert_same(ours, theirs, point, rtol=1e-12):
    """The two losses agree in value and gradient, and the gradient is not zero."""
    (value, slope), (their_value, their_slope) = (value_and_gradient(f, point) for f in (ours, theirs))
    assert float(their_slope.abs().max()) > 1e-3
    assert_equal(value, their_value, rtol=rtol)
    assert_equal(slope, their_slope, rtol=rtol)


def trainer(**settings):
    """What the methods of a trainer read from it, beside the settings of the loss."""
    same = SimpleNamespace(
        gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
    )
    return SimpleNamespace(
        accelerator=same,
        model=SimpleNamespace(training=False),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        aux_loss_enabled=False,
        label_smoothing=0.0,
        **settings,
    )


def group_trainer(log_probs, loss_type, beta=0.0, epsilon=0.1):
    """A stand-in for the trainers that sample, whose model gives these log-probabilities."""
    return trainer(
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.zeros_like(log_probs), None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        loss_type=loss_type,
        beta=beta,
        epsilon_low=epsilon,
        epsilon_high=epsilon,
        max_completion_length=T,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )


def trl_group_loss(log_probs, signal, loss_type, beta=0.0):
    """TRL's GRPO trainer, whose types differ in how they average."""
    from trl import GRPOTrainer

    inputs = {
        "prompt_ids": torch.zeros(N, 1, dtype=torch.long),
        "prompt_mask": torch.ones(N, 1, dtype=torch.long),
        "completion_ids": torch.zeros(N, T, dtype=torch.long),
        "completion_mask": MASK.long(),
        "advantages": signal,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REFERENCE,
    }
    return GRPOTrainer._compute_loss(group_trainer(log_probs, loss_type, beta), None, inputs)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_grpo(beta):
    signal = advantages(REWARDS, GROUPS, scale="sample_std")
    assert_same(
        lambda at: losses.grpo_loss(
            at,
            MASK,
            REWARDS,
            GROUPS,
            behaviour_log_probs=OLD,
            reference_log_probs=REFERENCE,
            epsilon=0.1,
            beta=beta,
        ),
        lambda at: trl_group_loss(at, signal, "grpo", beta),
        HERE,
    )


def test_dr_grpo():
    signal = advantages(REWARDS, GROUPS)
    assert_same(
        lambda at: losses.dr_grpo_loss(
            at, MASK, REWARDS, GROUPS, max_length=T, behaviour_log_probs=OLD, epsilon=0.1
        ),
        lambda at: trl_group_loss(at, signal, "dr_grpo"),
        HERE,
    )


def test_ppo_is_the_token_average_of_the_same_surrogate():
    signal = torch.randn(N, T, generator=GENERATOR, dtype=torch.float64)
    assert_same(
        lambda at: losses.ppo_loss(at, MASK, signal, OLD, epsilon=0.1),
        lambda at: trl_group_loss(at, signal, "bnpo"),
        HERE,
    )


def test_rloo_has_the_gradient_at_ratio_one_and_another_value():
    from trl import RLOOTrainer

    signal = advantages(REWARDS, GROUPS, baseline="leave_one_out")

    def theirs(at):
        inputs = {
            "prompt_ids": torch.zeros(N, 1, dtype=torch.long),
            "prompt_mask": torch.ones(N, 1, dtype=torch.long),
            "completion_ids": torch.zeros(N, T, dtype=torch.long),
            "completion_mask": MASK.long(),
            "advantages": signal,
            "old_logps": HERE.sum(1),
        }
        return RLOOTrainer._compute_loss(group_trainer(at, None), None, inputs)

    value, slope = value_and_gradient(lambda at: losses.rloo_loss(at, MASK, REWARDS, GROUPS), HERE)
    their_value, their_slope = value_and_gradient(theirs, HERE)
    assert_equal(slope, their_slope, rtol=1e-12)
    # Both values by hand: theirs is a mean of advantages, always 0; ours weights them by log-probabilities.
    assert_equal(their_value, -signal.mean(), atol=1e-15)
    assert_equal(value, -(signal * HERE.sum(1)).mean(), rtol=1e-12)
    assert_differs(value, their_value, by_at_least=0.001)


def outputs(log_probs):
    """What a model of TRL returns beside log-probabilities, for its metrics."""
    nothing = torch.zeros_like(log_probs)
    return SimpleNamespace(
        log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), aux_loss=None
    )


def test_dpo():
    from trl import DPOTrainer

    stand_in = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=0.7,
        use_weighting=False,
    )
    stand_in.accelerator.device = "cpu"
    reference = REFERENCE.sum(1).chunk(2)

    def theirs(at):
        # One more position in front: the first token of a row is predicted from nothing.
        inputs = {
            "input_ids": torch.zeros(N, T + 1, dtype=torch.long),
            "attention_mask": torch.ones(N, T + 1, dtype=torch.long),
            "completion_mask": torch.cat([torch.zeros(N, 1), MASK], 1).long(),
            "ref_chosen_logps": reference[0],
            "ref_rejected_logps": reference[1],
        }
        return DPOTrainer._compute_loss(stand_in, lambda **_: outputs(at * MASK), inputs, False)

    assert_same(
        lambda at: losses.dpo_loss(
            *losses.sequences.sequence_log_probs(at, MASK).chunk(2), *reference, beta=0.7
        ),
        theirs,
        HERE,
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_kto_with_its_reference_point_above_and_at_zero(sign):
    from trl import KTOTrainer

    mismatched, mismatched_reference = -torch.arange(1.0, 7).double(), -torch.arange(1.0, 7).double() - sign
    desirable = torch.tensor([True, False, True, True, False, False])
    stand_in = trainer(
        _compute_kl_logps=lambda model, batch: mismatched,
        calculate_KL=True,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.7,
        desirable_weight=1.3,
        undesirable_weight=0.6,
    )
    stand_in.accelerator.device = "cpu"

    def theirs(at):
        inputs = {
            "input_ids": torch.zeros(N, T + 1, dtype=torch.long),
            "attention_mask": torch.ones(N, T + 1, dtype=torch.long),
            "completion_mask": torch.cat([torch.zeros(N, 1), MASK], 1).long(),
            "label": desirable,
            "ref_logps": REFERENCE.sum(1),
            "ref_KL_logps": mismatched_reference,
        }
        return KTOTrainer._compute_loss(stand_in, lambda **_: outputs(at * MASK), inputs, False)

    point = losses.kto_reference_point(mismatched, mismatched_reference)
    assert float(point) == max(sign, 0)
    assert_same(
        lambda at: losses.kto_loss(
            (at * MASK).sum(1),
            REFERENCE.sum(1),
            desirable,
            point,
            beta=0.7,
            desirable_weight=1.3,
            undesirable_weight=0.6,
        ),
        theirs,
        HERE,
    )


CHOSEN, REJECTED = HERE.sum(1).chunk(2)
SIZES = LENGTHS.chunk(2)


def test_simpo():
    from trl.experimental.cpo import CPOTrainer

    stand_in = trainer(loss_type="simpo", simpo_gamma=0.4, beta=1.7, alpha=0.0)
    stand_in.accelerator.device = "cpu"
    assert_same(
        lambda at: losses.simpo_loss(*at, *SIZES, beta=1.7, margin=0.4),
        lambda at: CPOTrainer.cpo_loss(stand_in, at[0] / SIZES[0], at[1] / SIZES[1])[0].mean(),
        torch.stack([CHOSEN, REJECTED]),
    )


def test_the_odds_of_orpo():
    from trl.experimental.orpo import ORPOTrainer

    stand_in = trainer(beta=0.6)
    stand_in.accelerator.device = "cpu"

    def theirs(at):
        return -ORPOTrainer.odds_ratio_loss(stand_in, at[0] / SIZES[0], at[1] / SIZES[1])[0].mean()

    # NOTE TRL casts to float32 here; its likelihood term covers the prompt, so the terms are compared one by one.
    point = torch.stack([CHOSEN, REJECTED])
    assert_same(lambda at: 0.6 * odds_ratio_loss(*at, *SIZES), theirs, point, rtol=1e-5)
    likelihood = -(CHOSEN / SIZES[0]).mean()
    whole = losses.orpo_loss(CHOSEN, REJECTED, *SIZES, odds_weight=0.6)
    assert_equal(whole, likelihood + theirs(point), rtol=1e-5)


def test_reverse_kl_over_the_vocabulary():
    from trl.experimental.gkd import GKDTrainer

    teacher = torch.randn(N, T, V, generator=GENERATOR, dtype=torch.float64)
    labels = torch.zeros(N, T, dtype=torch.long).masked_fill(~MASK, -100)
    assert_same(
        lambda at: losses.reverse_kl_loss(
            at.log_softmax(-1), teacher.log_softmax(-1), MASK, average="tokens"
        ),
        lambda at: GKDTrainer.generalized_jsd_loss(at, teacher, labels, beta=1),
        torch.randn(N, T, V, generator=GENERATOR, dtype=torch.float64),
    )


def test_supervised_is_the_loss_of_the_models():
    # TRL leaves this loss to transformers, which casts to float32.
    from transformers.loss.loss_utils import ForCausalLMLoss

    ids = torch.randint(0, V, (N, T), generator=GENERATOR)
    labels = torch.cat([torch.full((N, 1), -100), ids.masked_fill(~MASK, -100)], 1)

    def ours(at):
        log_probs = at[:, :-1].log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
        return losses.supervised_loss(log_probs, MASK, average="tokens")

    assert_same(
        ours,
        lambda at: ForCausalLMLoss(at, labels, V).double(),
        torch.randn(N, T + 1, V, generator=GENERATOR, dtype=torch.float64),
        rtol=1e-6,
    )
