"""What a measurement will need, before it starts: parameters, memory, time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ceilings.moments import Level
from ceilings.next_token_cost import next_token_cost
from ceilings.rollouts import Rollouts
from ceilings.scores import _NARROW_SEQUENCES

__all__ = ["Cost", "available_memory", "sample_cost"]

_OVERHEAD: Final = 4e8  # bytes of Python, PyTorch and transformers
_BACKWARD: Final = (
    3.7  # time of a forward pass with its share of the backward one, against a forward pass alone
)
_SUMMARY: Final = 1.3e-7  # seconds of one core to read, cross-fit and write one entry of one sum
_PASS_TOKENS: Final = 512  # tokens of the pass that is timed


@dataclass(frozen=True)
class Cost:
    """Expected cost.

    Parameters
    ----------
    parameters
        D.
    weight_bytes, moment_bytes, batch_bytes
        Memory of the weights, of the sums, and of one batch.
    seconds
        Time, by a forward pass that was timed; half or double is no surprise.
    file_bytes
        What the report's folder will hold.

    Units
    -----
    bytes, seconds.
    """

    parameters: int
    weight_bytes: float
    moment_bytes: float
    batch_bytes: float
    seconds: float
    file_bytes: float

    @property
    def bytes(self) -> float:
        """Memory of the whole process."""
        return self.weight_bytes + self.moment_bytes + self.batch_bytes + _OVERHEAD


def sample_cost(
    model: nn.Module,
    rollouts: Rollouts,
    columns: int,
    batch_size: int,
    *,
    level: Level = "sequence",
    sign_draws: int | None = None,
    new_tokens: int = 0,
    rows: int = 1,
    exact: bool = False,
) -> Cost:
    """Cost of measuring rollouts, and of sampling them first.

    Parameters
    ----------
    model
        The model; one short forward pass is timed.
    rollouts
        Prompts and responses; only their tokens matter.
    columns
        Number of reward columns, those of permuted rewards included.
    batch_size
        Sequences in one pass; tokens where every token is a row.
    level, sign_draws
        As in `ceilings.scores.score_moments`.
    new_tokens
        Tokens to sample one after another, over all batches of ``rows`` responses; 0 if nothing is sampled.
    rows
        Responses that are sampled at once.
    exact
        Whether the response is one token of which every value counts, as in `ceilings.next_token`.

    Returns
    -------
    Cost
        The expectation.
    """
    lengths = list(rollouts.lengths)
    by_token = level == "token" and sign_draws is None
    if by_token:
        ends = zip(rollouts.prompt_ids, rollouts.response_ids, strict=True)
        lengths = [len(p) + t for p, r in ends for t in range(1, len(r) + 1)]
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    # Past so many sequences the engine sums in float64; it sees half of them at a time.
    wide = 8 if len(rollouts) > 2 * _NARROW_SEQUENCES else max(4, *(p.element_size() for p in parameters))
    longest = max(lengths)
    tokens = min(batch_size, len(lengths)) * longest
    each = _seconds(model, max(1, min(len(lengths), _PASS_TOKENS // longest)), min(longest, _PASS_TOKENS))
    total = (1 + (_BACKWARD - 1) * (1 + (sign_draws or 0))) * each * sum(lengths)
    if new_tokens:
        total += 1.3 * new_tokens * _seconds(model, rows, 1) * rows
    vocabulary, layers, width, inner = _shape(model)
    batch: float = (
        tokens * max(4, parameters[0].element_size()) * (3 * vocabulary + layers * (12 * width + 4 * inner))
    )
    if level == "next-token":
        padded = rollouts.padded()
        total += next_token_cost(model, padded.input_ids, padded.response_mask, padded.attention_mask).seconds
        batch += 8e8  # one pass for many directions of the head's covariance at once
    total += _SUMMARY * count * (2 + columns)
    sums = count * wide * ((1 if exact else 2) + columns)
    files = (1 if exact else 2) * sums + 3 * count * wide
    return Cost(count, weights, sums, batch, total, files)


@torch.no_grad()
def _seconds(model: nn.Module, rows: int, length: int) -> float:
    """Seconds of a forward pass for each token in it: the better of two passes."""
    ids = torch.zeros(rows, length, dtype=torch.long, device=next(model.parameters()).device)
    found = []
    for _ in range(2):
        started = time.perf_counter()
        output = model(ids)
        float(getattr(output, "logits", output)[0, 0, 0])  # a GPU is asked to finish
        found.append(time.perf_counter() - started)
    return min(found) / ids.numel()


def _shape(model: nn.Module) -> tuple[int, int, int, int]:
    """Vocabulary, layers, width and inner width, as far as the configuration tells."""
    config: Any = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or 0
    return (
        getattr(config, "vocab_size", None) or 0,
        getattr(config, "num_hidden_layers", None) or 0,
        width,
        getattr(config, "intermediate_size", None) or 4 * width,
    )


def available_memory(device: torch.device) -> float | None:
    """Memory that can still be had on a device.

    Parameters
    ----------
    device
        The device.

    Returns
    -------
    float
        Bytes, the limit of the process's control group included; None where the system does not say.

    Units
    -----
    bytes.
    """
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(float(line.split()[1]) * 1024)
    except (OSError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = float((group / "memory.current").read_text(encoding="ascii"))
            stat = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            cached = sum(float(line.split()[1]) for line in stat if line.startswith("inactive_file "))
            found.append(float(limit) - used + cached)
    except (OSError, ValueError):
        pass
    return min(found) if found else None
