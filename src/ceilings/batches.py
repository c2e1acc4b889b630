r"""Rollouts as a loss needs them: log-probabilities under each law that has a say, and pairs.

Position t of every tensor is the prediction of token t + 1 of the rows, so there is one position less than tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ceilings.advantages import group_sizes
from ceilings.policies import AutoregressivePolicy
from ceilings.rollouts import Rollouts

__all__ = [
    "Batch",
    "EnumeratedBatch",
    "enumerated_batch",
    "preference_pairs",
    "token_laws",
    "token_log_probs",
]


@dataclass(frozen=True, eq=False)
class Batch:
    r"""One batch of rollouts at the present parameters.

    Parameters
    ----------
    rollouts
        Prompts, responses, rewards and groups.
    model, reference
        The policy that is trained and the one it started from, for methods that score further responses.
    mask
        True where a token of the response is predicted.
    laws
        Log-probabilities of all tokens under the policy, with their graph.
    log_probs
        Those of the chosen tokens, with their graph.
    behaviour_log_probs
        Those of the chosen tokens when the batch was drawn; constants. For responses of another policy they are this
        policy's too: the ratio corrects for the reuse of the batch, not for its source.

    Shapes
    ------
    mask, log_probs, behaviour_log_probs (N, T), laws (N, T, V).
    """

    rollouts: Rollouts
    model: nn.Module
    reference: nn.Module
    mask: Tensor
    laws: Tensor
    log_probs: Tensor
    behaviour_log_probs: Tensor

    @cached_property
    def reference_log_probs(self) -> Tensor:
        """Log-probabilities of the chosen tokens under the reference; constants, computed when first asked for."""
        with torch.no_grad():
            return token_log_probs(token_laws(self.reference, self.rollouts)[0], self.rollouts)

    @property
    def rewards(self) -> Tensor:
        """Reward of every response, in the dtype of the log-probabilities."""
        return self.rollouts.rewards.to(self.log_probs)

    @property
    def groups(self) -> tuple[int, ...]:
        """Group of every response."""
        return self.rollouts.groups

    @property
    def lengths(self) -> Tensor:
        """Tokens of every response."""
        return self.mask.sum(1)


def token_laws(model: nn.Module, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    r"""Next-token law at every position, and where a response is predicted.

    Parameters
    ----------
    model
        A causal language model.
    rollouts
        What to score.

    Returns
    -------
    tuple
        Log-probabilities of all tokens, and a mask that is True where the next token belongs to the response.

    Shapes
    ------
    -> (N, T, V), (N, T).
    """
    padded = rollouts.padded()
    output = model(padded.input_ids[:, :-1], attention_mask=padded.attention_mask[:, :-1])
    return getattr(output, "logits", output).log_softmax(-1), padded.response_mask[:, 1:]


def token_log_probs(laws: Tensor, rollouts: Rollouts) -> Tensor:
    """Log-probability of every chosen token.

    Parameters
    ----------
    laws
        As `token_laws` gives them.
    rollouts
        What they belong to.

    Returns
    -------
    Tensor
        What stands outside the mask is the log-probability of a prompt or of padding.

    Shapes
    ------
    laws (N, T, V) -> (N, T).
    """
    return laws.gather(2, rollouts.padded().input_ids[:, 1:, None])[:, :, 0]


def preference_pairs(rewards: Tensor, groups: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Best and worst response of every group in which they differ.

    Parameters
    ----------
    rewards
        Reward of every response.
    groups
        Responses with the same number answer the same prompt.

    Returns
    -------
    tuple
        Rows of the chosen and of the rejected responses; empty where every group is tied. Of equals the first is taken.

    Shapes
    ------
    rewards (N,), groups (N,) -> (pairs,), (pairs,).

    Raises
    ------
    ValueError
        If the lengths differ.

    Notes
    -----
    Dropping ties and keeping extremes changes the law of the pairs: they are not independent samples of the policy.
    """
    index, size = group_sizes(groups)
    if len(index) != len(rewards):
        raise ValueError(f"{len(index)} groups for {len(rewards)} rewards: give one each")
    chosen, rejected = [], []
    for group in range(len(size)):
        rows = (index == group).nonzero()[:, 0]
        best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
        if rewards[best] > rewards[worst]:
            chosen.append(int(best))
            rejected.append(int(worst))
    return torch.tensor(chosen, dtype=torch.long), torch.tensor(rejected, dtype=torch.long)


class EnumeratedBatch(NamedTuple):
    r"""Every response of an `AutoregressivePolicy` as a loss needs it, with the graph to the parameters.

    Parameters
    ----------
    responses
        The responses, in the order of `AutoregressivePolicy.enumerate`.
    log_probs
        Log-probability of every chosen token; 0 after the response has ended.
    laws
        Log-probabilities of all tokens at every step; those of the empty prefix after the response has ended.
    mask
        True until the response has ended.

    Shapes
    ------
    responses Y tuples, log_probs and mask (Y, T), laws (Y, T, V).
    """

    responses: tuple[tuple[int, ...], ...]
    log_probs: Tensor
    laws: Tensor
    mask: Tensor

    def take(self, rows: Sequence[int] | Tensor) -> EnumeratedBatch:
        """Some of the responses, each as often as it is asked for.

        Parameters
        ----------
        rows
            Which, in the order wanted.

        Returns
        -------
        EnumeratedBatch
            They, in the same graph.
        """
        picked = torch.as_tensor(rows, dtype=torch.long)
        responses = tuple(self.responses[row] for row in picked.tolist())
        return EnumeratedBatch(responses, self.log_probs[picked], self.laws[picked], self.mask[picked])

    @property
    def sequence_log_probs(self) -> Tensor:
        """Log-probability of every response, (Y,)."""
        return self.log_probs.sum(1)

    @property
    def lengths(self) -> Tensor:
        """Tokens of every response, (Y,)."""
        return self.mask.sum(1)


def enumerated_batch(policy: AutoregressivePolicy, theta: Tensor) -> EnumeratedBatch:
    """Every response of a small policy, ready for any loss.

    Parameters
    ----------
    policy
        The policy.
    theta
        Its parameters; if they require a gradient, so does what is returned.

    Returns
    -------
    EnumeratedBatch
        One row a response. A loss averages over rows: for an expectation under a law, repeat rows in proportion to it
        (`EnumeratedBatch.take`), or weight the losses of single rows.

    Shapes
    ------
    theta (D,).
    """
    responses = policy.enumerate(theta.detach()).responses
    index = {prefix: p for p, prefix in enumerate(policy.prefixes)}
    steps = range(policy.max_len)
    prefix = torch.tensor([[index[y[:t]] if t < len(y) else 0 for t in steps] for y in responses])
    token = torch.tensor([[y[t] if t < len(y) else 0 for t in steps] for y in responses])
    mask = torch.tensor([[t < len(y) for t in steps] for y in responses])
    laws = (policy.features @ theta).log_softmax(1)[prefix]
    chosen = laws.gather(2, token[:, :, None])[:, :, 0]
    return EnumeratedBatch(responses, torch.where(mask, chosen, 0), laws, mask)
