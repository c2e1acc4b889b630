r"""Expected updates of a loss on a policy that is small enough to list every batch.

A `Case` is one such policy with everything that a method may ask for; `batches` lists what a sampling law can draw, and
`expected_update` averages the loss over it and differentiates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ceilings.batches import EnumeratedBatch, enumerated_batch
from ceilings.off_policy import kl_divergence
from ceilings.policies import AutoregressivePolicy, Enumeration

__all__ = ["Case", "Draw", "Loss", "batches", "expected_update", "random_case"]


class Draw(NamedTuple):
    """One batch of a sampling law.

    Parameters
    ----------
    rows
        Which responses it holds.
    rewards
        Their rewards.
    mass
        Its probability.
    """

    rows: list[int]
    rewards: Tensor
    mass: float


@dataclass(frozen=True)
class Case:
    r"""A small policy with everything that a method may ask for.

    Parameters
    ----------
    policy
        One prompt.
    theta
        Parameters of the policy that is trained.
    old_theta
        Those of the behaviour policy μ, which is the reference too.
    teacher_theta
        Those of the teacher, which serves as PRIME's reward model too.
    rewards
        Reward of every response; 1 or more is a success.
    size
        Responses a group, G.

    Shapes
    ------
    theta, old_theta, teacher_theta (D,), rewards (Y,).
    """

    policy: AutoregressivePolicy
    theta: Tensor
    old_theta: Tensor
    teacher_theta: Tensor
    rewards: Tensor
    size: int = 3

    @cached_property
    def law(self) -> Enumeration:
        """The policy that is trained, π."""
        return self.policy.enumerate(self.theta)

    @cached_property
    def old(self) -> Enumeration:
        """The behaviour and reference policy, μ."""
        return self.policy.enumerate(self.old_theta)

    @cached_property
    def teacher(self) -> Enumeration:
        """The teacher."""
        return self.policy.enumerate(self.teacher_theta)

    @property
    def log_ratios(self) -> Tensor:
        """Log-ratio h = log(π/π_ref) of every response."""
        return (self.law.token_log_probs - self.old.token_log_probs).sum(1)

    @property
    def token_rewards(self) -> Tensor:
        """Implicit rewards of PRIME."""
        return 0.5 * (self.teacher.token_log_probs - self.old.token_log_probs)

    @property
    def point(self) -> float:
        """KTO's reference point: the divergence from the reference."""
        return float(kl_divergence(self.law.probs, self.old.probs))


#: From a case, the responses of a batch and the batch to a scalar.
Loss = Callable[[Case, EnumeratedBatch, Draw], Tensor]


def random_case(seed: int = 0, parameters: int = 24, size: int = 3) -> Case:
    """Three words, at most three steps, early stops: 15 responses of length 1 to 3, and uneven parameters.

    Parameters
    ----------
    seed
        Draws the features and all parameters.
    parameters
        D; their scales run over two decades.
    size
        Responses a group.

    Returns
    -------
    Case
        The reward is half a point for each 1, so that responses tie.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-1, 1, parameters, dtype=torch.float64)
    features = AutoregressivePolicy.random(3, 3, parameters, generator, eos=0).features * scales
    draw = torch.randn(3, parameters, generator=generator, dtype=torch.float64) / scales / parameters**0.5
    policy = AutoregressivePolicy(features, 3, eos=0)
    rewards = policy.enumerate(draw[0]).rewards(lambda y: y.count(1) / 2)
    return Case(policy, draw[0], draw[0] + 0.5 * draw[1], draw[0] + draw[2], rewards, size)


def batches(case: Case, source: str, count: int | None = None, *, coin: bool = False) -> list[Draw]:
    """Every batch of a sampling law with its probability.

    Parameters
    ----------
    case
        The policy.
    source, count
        As in `Row`.
    coin
        True to grade each response by a fair coin of its own, 0 or 1, instead of `Case.rewards`.

    Returns
    -------
    list
        Batches that differ in order only are listed once: no loss sees the order. Pairs have the better response first.

    Raises
    ------
    ValueError
        If there is no such source.
    """
    laws = {"policy": case.law, "successes": case.law, "behaviour": case.old, "pairs": case.old}
    if source not in (*laws, "data"):
        raise ValueError(f"there is no source {source!r}: use one of {', '.join((*laws, 'data'))}")
    law = laws.get(source, case.teacher)
    grades = [(0.0, 1.0)] * len(law.probs) if coin else [(float(r),) for r in case.rewards]
    items = [(row, grade, float(law.probs[row]) / len(g)) for row, g in enumerate(grades) for grade in g]
    size = 2 if source == "pairs" else count or case.size
    drawn = []
    for group in itertools.combinations_with_replacement(range(len(items)), size):
        orders = math.factorial(size)
        for repeats in (group.count(k) for k in set(group)):
            orders //= math.factorial(repeats)
        chosen = sorted((items[k] for k in group), key=lambda item: -item[1])
        rewards = law.probs.new_tensor([grade for _, grade, _ in chosen])
        mass = orders * math.prod(p for _, _, p in chosen)
        if source == "pairs" and rewards[0] == rewards[1] or source == "successes" and rewards[0] < 1:
            continue
        drawn.append(Draw([row for row, _, _ in chosen], rewards, mass))
    total = sum(draw.mass for draw in drawn)
    return [draw._replace(mass=draw.mass / total) for draw in drawn]


def expected_update(case: Case, loss: Loss, draws: Iterable[Draw]) -> Tensor:
    """Minus the expected gradient of a loss: every batch by its probability, then automatic differentiation.

    Parameters
    ----------
    case
        The policy.
    loss
        The loss of one batch.
    draws
        The batches, as `batches` lists them.

    Returns
    -------
    Tensor
        The expected update.

    Shapes
    ------
    -> (D,).
    """
    leaf = case.theta.clone().requires_grad_()
    everything = enumerated_batch(case.policy, leaf)
    total = leaf.new_zeros(())
    for draw in draws:
        total = total + draw.mass * loss(case, everything.take(draw.rows), draw)
    return -torch.autograd.grad(total, leaf)[0]
