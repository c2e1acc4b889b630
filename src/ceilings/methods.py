r"""The thirteen methods, each as a loss of a `ceilings.batches.Batch`; the loop is the same for all.

What a method needs beside the batch (a teacher, a reward model) it holds itself. A method that finds nothing to learn
in a batch (no pair that differs, no response accepted) returns None, and the loop makes no step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from ceilings import losses
from ceilings.advantages import advantages
from ceilings.batches import Batch, preference_pairs, token_laws, token_log_probs
from ceilings.losses.ppo import clip_share
from ceilings.losses.prime import implicit_rewards, prime_advantages
from ceilings.losses.sequences import sequence_log_probs
from ceilings.rollouts import Rollouts

__all__ = ["METHODS", "ON_POLICY", "PREFERENCE", "Method", "make_method"]

#: Every method, in the order of the table of the book.
METHODS: Final = (
    "reinforce",
    "rloo",
    "grpo",
    "dr_grpo",
    "ppo",
    "dpo",
    "kto",
    "orpo",
    "simpo",
    "prime",
    "rejection_sampling",
    "supervised",
    "distillation",
)
#: Those that compare responses of one prompt, from whatever source.
PREFERENCE: Final = ("dpo", "kto", "orpo", "simpo")
#: Those whose theory wants the policy's own samples.
ON_POLICY: Final = tuple(name for name in METHODS if name not in (*PREFERENCE, "supervised"))


@dataclass(frozen=True)
class Method:
    """A loss, and how it is used.

    Parameters
    ----------
    name
        One of `METHODS`.
    loss
        From a batch to a scalar, or None where the batch teaches nothing.
    updates
        Updates a batch: how often it is used again.
    signal
        From a batch to the advantages that a clip acts on; None where nothing is clipped.
    epsilon
        Half-width of that clip.
    """

    name: str
    loss: Callable[[Batch], Tensor | None]
    updates: int = 1
    signal: Callable[[Batch], Tensor] | None = None
    epsilon: float = 0.2

    def clip_share(self, batch: Batch) -> float:
        """Share of the tokens whose gradient the clip removes.

        Parameters
        ----------
        batch
            The batch.

        Returns
        -------
        float
            0 where nothing is clipped; 1 means that no gradient is left.
        """
        if self.signal is None:
            return 0.0
        signal = self.signal(batch)
        return float(
            clip_share(batch.log_probs, batch.mask, signal, batch.behaviour_log_probs, epsilon=self.epsilon)
        )


def make_method(
    name: str,
    *,
    reference: nn.Module | None = None,
    teacher: nn.Module | None = None,
    max_length: int | None = None,
    updates: int | None = None,
    beta: float | None = None,
) -> Method:
    """Build a method.

    Parameters
    ----------
    name
        One of `METHODS`.
    reference
        The policy at the start; ``prime`` trains its reward model from a copy of it.
    teacher
        Whose law ``distillation`` approaches.
    max_length
        Longest response, by which ``dr_grpo`` divides.
    updates
        Updates a batch; by default 4 for ``ppo``, which is made for it, and 1 for the others.
    beta
        ``beta`` of ``dpo``, ``kto``, ``simpo`` and ``prime``; ``odds_weight`` of ``orpo``; by default that of the loss.

    Returns
    -------
    Method
        The method.

    Raises
    ------
    ValueError
        If there is no such method, what it needs is missing, or ``updates`` is not positive.

    Notes
    -----
    1. ``reinforce`` takes off the mean reward of the whole batch; ``ppo``, ``grpo`` and ``dr_grpo`` that of the group.
    2. The preference methods take the best and the worst response of each group. ``kto`` calls a response desirable if
       its reward is above its group's mean, and leaves out the ties.
    3. ``rejection_sampling`` accepts reward 1.
    4. ``distillation`` is the one over the whole vocabulary.
    """
    if updates is not None and updates < 1:
        raise ValueError(f"updates is {updates}: a batch is used once or more")
    strength = {} if beta is None else {"odds_weight" if name == "orpo" else "beta": beta}
    if name in ("reinforce", "rloo", "grpo", "dr_grpo", "ppo"):
        return _with_advantages(name, max_length, 4 if updates is None and name == "ppo" else updates or 1)
    once = updates or 1
    if name in PREFERENCE:
        maker = _kto if name == "kto" else _pairs(name)
        return Method(name, lambda batch: maker(batch, strength), once)
    if name == "prime":
        if reference is None:
            raise ValueError("prime needs the reference policy: its reward model starts as a copy")
        prime = _Prime(reference, strength)
        return Method(name, prime.loss, once, prime.signal)
    if name == "rejection_sampling":
        return Method(name, _rejection_sampling, once)
    if name == "supervised":
        return Method(name, lambda batch: losses.supervised_loss(batch.log_probs, batch.mask), once)
    if name == "distillation":
        if teacher is None:
            raise ValueError("distillation needs a teacher")
        return Method(name, lambda batch: _distillation(batch, teacher), once)
    raise ValueError(f"there is no method {name!r}: use one of {', '.join(METHODS)}")


def _with_advantages(name: str, max_length: int | None, updates: int) -> Method:
    """Methods that weight log-probabilities by advantages."""

    def centred(batch: Batch) -> Tensor:
        return advantages(batch.rewards, batch.groups)

    def whole(batch: Batch) -> Tensor:
        return advantages(batch.rewards, [0] * len(batch.rewards))

    if name == "reinforce":
        return Method(name, lambda b: losses.reinforce_loss(b.log_probs, b.mask, whole(b)), updates)
    if name == "rloo":
        return Method(name, lambda b: losses.rloo_loss(b.log_probs, b.mask, b.rewards, b.groups), updates)
    if name == "ppo":
        return Method(
            name,
            lambda b: losses.ppo_loss(b.log_probs, b.mask, centred(b), b.behaviour_log_probs),
            updates,
            centred,
        )
    if name == "grpo":
        return Method(
            name,
            lambda b: losses.grpo_loss(
                b.log_probs, b.mask, b.rewards, b.groups, behaviour_log_probs=b.behaviour_log_probs
            ),
            updates,
            centred,
        )
    if max_length is None:
        raise ValueError("dr_grpo needs max_length: it divides by it")
    return Method(
        name,
        lambda b: losses.dr_grpo_loss(
            b.log_probs,
            b.mask,
            b.rewards,
            b.groups,
            max_length=max_length,
            behaviour_log_probs=b.behaviour_log_probs,
        ),
        updates,
        centred,
    )


def _pairs(name: str) -> Callable[[Batch, dict[str, float]], Tensor | None]:
    """DPO, SimPO and ORPO, on the best and the worst of each group."""

    def loss(batch: Batch, strength: dict[str, float]) -> Tensor | None:
        chosen, rejected = preference_pairs(batch.rewards, batch.groups)
        if len(chosen) == 0:
            return None
        log_probs = sequence_log_probs(batch.log_probs, batch.mask)
        if name == "dpo":
            reference = sequence_log_probs(batch.reference_log_probs, batch.mask)
            return losses.dpo_loss(
                log_probs[chosen], log_probs[rejected], reference[chosen], reference[rejected], **strength
            )
        function = losses.simpo_loss if name == "simpo" else losses.orpo_loss
        lengths = batch.lengths
        return function(
            log_probs[chosen], log_probs[rejected], lengths[chosen], lengths[rejected], **strength
        )

    return loss


def _kto(batch: Batch, strength: dict[str, float]) -> Tensor | None:
    """KTO on the responses that are better or worse than their group."""
    signal = advantages(batch.rewards, batch.groups)
    kept = signal != 0
    if not bool(kept.any()):
        return None
    log_probs = sequence_log_probs(batch.log_probs, batch.mask)
    reference = sequence_log_probs(batch.reference_log_probs, batch.mask)
    point = losses.kto_reference_point(*_mismatched(batch))
    return losses.kto_loss(log_probs[kept], reference[kept], signal[kept] > 0, point, **strength)


def _mismatched(batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the responses to the next group's prompt, given this one's, under policy and reference."""
    rollouts, n = batch.rollouts, len(batch.rollouts)
    size = sum(group == rollouts.groups[0] for group in rollouts.groups)
    rolled = tuple(rollouts.response_ids[(row + size) % n] for row in range(n))
    other = Rollouts(rollouts.prompt_ids, rolled, rollouts.rewards, rollouts.groups)
    with torch.no_grad():
        scored = [
            sequence_log_probs(token_log_probs(laws, other), mask)
            for laws, mask in (token_laws(model, other) for model in (batch.model, batch.reference))
        ]
    return scored[0], scored[1]


def _rejection_sampling(batch: Batch) -> Tensor | None:
    """Likelihood of the responses with reward 1."""
    accepted = batch.rewards == 1
    if not bool(accepted.any()):
        return None
    return losses.rejection_sampling_loss(batch.log_probs, batch.mask, accepted)


def _distillation(batch: Batch, teacher: nn.Module) -> Tensor:
    """Reverse KL to the teacher along the policy's own responses."""
    with torch.no_grad():
        laws, _ = token_laws(teacher, batch.rollouts)
    return losses.reverse_kl_loss(batch.laws, laws, batch.mask)


class _Prime:
    """PRIME, with the reward model that it trains before every update of the policy."""

    def __init__(self, reference: nn.Module, strength: dict[str, float], learning_rate: float = 1e-3) -> None:
        self.reward_model, self.strength = copy.deepcopy(reference), strength
        self.optimiser = torch.optim.Adam(self.reward_model.parameters(), lr=learning_rate)
        self.token_rewards: Tensor | None = None

    def loss(self, batch: Batch) -> Tensor:
        """One update of the reward model, then the loss of the policy."""
        self.optimiser.zero_grad()
        outcomes = batch.rewards
        losses.prime_reward_loss(
            self._scored(batch), batch.reference_log_probs, batch.mask, outcomes, **self.strength
        ).backward()
        self.optimiser.step()
        with torch.no_grad():
            self.token_rewards = implicit_rewards(
                self._scored(batch), batch.reference_log_probs, batch.mask, **self.strength
            )
        return losses.prime_loss(
            batch.log_probs,
            batch.mask,
            self.token_rewards,
            outcomes,
            batch.groups,
            batch.behaviour_log_probs,
        )

    def signal(self, batch: Batch) -> Tensor:
        """Advantages of the last call of `loss`."""
        if self.token_rewards is None:
            raise ValueError("prime has advantages only after its loss was called")
        return prime_advantages(self.token_rewards, batch.mask, batch.rewards, batch.groups)

    def _scored(self, batch: Batch) -> Tensor:
        """Log-probabilities of the tokens under the reward model."""
        return token_log_probs(token_laws(self.reward_model, batch.rollouts)[0], batch.rollouts)
