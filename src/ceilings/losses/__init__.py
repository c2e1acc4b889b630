"""Post-training losses: pure functions of log-probabilities, to be minimised; one file a method.

No optimiser, model or logging is in here. Each function says the formula, the paper, and at the head of its file
every departure from it.
"""

from ceilings.losses.distillation import reverse_kl_loss, sampled_reverse_kl_loss
from ceilings.losses.dpo import dpo_loss
from ceilings.losses.dr_grpo import dr_grpo_loss
from ceilings.losses.grpo import grpo_loss
from ceilings.losses.kto import kto_loss, kto_reference_point
from ceilings.losses.orpo import orpo_loss
from ceilings.losses.ppo import ppo_loss
from ceilings.losses.prime import prime_loss, prime_reward_loss
from ceilings.losses.reinforce import reinforce_loss
from ceilings.losses.rejection_sampling import rejection_sampling_loss
from ceilings.losses.rloo import rloo_loss
from ceilings.losses.simpo import simpo_loss
from ceilings.losses.supervised import supervised_loss

__all__ = [
    "dpo_loss",
    "dr_grpo_loss",
    "grpo_loss",
    "kto_loss",
    "kto_reference_point",
    "orpo_loss",
    "ppo_loss",
    "prime_loss",
    "prime_reward_loss",
    "reinforce_loss",
    "rejection_sampling_loss",
    "reverse_kl_loss",
    "rloo_loss",
    "sampled_reverse_kl_loss",
    "simpo_loss",
    "supervised_loss",
]
