"""What the exact next-token level costs, before anyone waits for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.score_inputs import check_sequences, scored_prefixes

__all__ = ["NextTokenCost", "next_token_cost"]

_PROBE_SIZE: Final = 512  # a matrix product large enough to run at full speed, and over in a moment
_EFFICIENCY: Final = 1 / 3


@dataclass(frozen=True)
class NextTokenCost:
    """Size of an exact next-token measurement.

    Parameters
    ----------
    positions
        Scored tokens.
    prefixes
        Different prefixes before them; each is measured once.
    cotangents
        Backward passes a prefix: the width of the model, where the vocabulary would be the obvious number.
    operations
        Floating-point operations in all.
    seconds
        Time for them at a third of the speed of a matrix product on this machine, which is what a model of
        135 million parameters reaches after a short prompt. A rough figure, and far too low for a small model,
        where Python takes the time: `ceilings.expected_cost.sample_cost` tries a batch of such a model.
    """

    positions: int
    prefixes: int
    cotangents: int
    operations: float
    seconds: float


def next_token_cost(
    model: nn.Module, input_ids: Tensor, response_mask: Tensor, attention_mask: Tensor | None = None
) -> NextTokenCost:
    r"""Cost of `ceilings.scores.score_moments` at level ``"next-token"``, without doing it.

    Parameters
    ----------
    model, input_ids, response_mask, attention_mask
        As there.

    Returns
    -------
    NextTokenCost
        Counted from the shapes; only the speed of the machine is measured, in a fraction of a second.

    Shapes
    ------
    input_ids, response_mask, attention_mask (N, T).

    Raises
    ------
    ValueError
        If the sequences are not valid or the model has no linear head.

    Notes
    -----
    A prefix of T tokens under a model of width K, vocabulary V and P entries in matrices of O rows in all
    takes :math:`2 T P` a forward pass, twice that a backward pass to check the rules, :math:`2 K T P` for the
    cotangents, :math:`2 T^2 (K O + P)` for the sums over pairs of positions and :math:`2 V K^2` for the
    covariance of the head's rows.
    """
    check_sequences(input_ids, response_mask, attention_mask)
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    if not isinstance(head, nn.Linear):
        raise ValueError("the model has no linear output head, so its next-token scores have no such form")
    vocabulary, width = head.weight.shape
    tables = {id(head.weight)} | {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in tables]
    entries, rows = sum(p.numel() for p in matrices), sum(p.numel() // p.shape[-1] for p in matrices)
    attention = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prefixes = scored_prefixes(input_ids, response_mask, attention, torch.ones(len(input_ids)))
    operations = 0.0
    for length in map(len, prefixes):
        operations += 2 * length * (entries * (3 + width) + vocabulary * width)
        operations += 2 * length**2 * (width * rows + entries) + 2 * vocabulary * width**2
    seconds = operations / (_EFFICIENCY * _speed(head.weight.dtype, head.weight.device))
    return NextTokenCost(int(response_mask.sum()), len(prefixes), width, operations, seconds)


@cache
def _speed(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of a matrix product."""
    square = torch.zeros(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        float((square @ square)[0, 0])  # reading a number waits for an accelerator
        best = min(best, time.perf_counter() - started)
    return 2 * _PROBE_SIZE**3 / best
