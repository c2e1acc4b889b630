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
from ceilings.scores import _NARROW_SEQUENCES, ScoreAccumulator

__all__ = ["Cost", "available_memory", "sample_cost"]

_OVERHEAD: Final = 4e8  # bytes of Python, PyTorch and transformers
_BACKWARD: Final = (
    3.7  # time of a forward pass with its share of the backward one, against a forward pass alone
)
_SUMMARY: Final = 1.3e-7  # seconds of one core to read, cross-fit and write one entry of one sum
_PASS_TOKENS: Final = 512  # tokens of the pass that is timed
_SMALL: Final = 1e7  # parameters of a model that measures a batch, to be timed
_TRIAL: Final = 1.0  # seconds that such a batch may take by arithmetic


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
    processes: int = 1,
) -> Cost:
    """Cost of measuring rollouts, and of sampling them first.

    Parameters
    ----------
    model
        The model. One short forward pass is timed; a small model also measures one batch, twice.
    rollouts
        Prompts and responses; only their tokens matter.
    columns
        Number of reward columns, those of permuted rewards included.
    batch_size
        Sequences in one pass of one process; tokens where every token is a row.
    level, sign_draws
        As in `ceilings.scores.score_moments`.
    new_tokens
        Tokens to sample one after another, over all batches of ``rows`` responses; 0 if nothing is sampled.
    rows
        Responses that one process samples at once.
    exact
        Whether the response is one token of which every value counts, as in `ceilings.next_token`.
    processes
        Processes that share out the sequences.

    Returns
    -------
    Cost
        The expectation. Parameters without a fast rule make a large model slower than that.
    """
    lengths = _pass_lengths(rollouts, level, sign_draws)
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    # Past so many sequences the engine sums in float64; it sees half of them at a time.
    wide = 8 if len(rollouts) > 2 * _NARROW_SEQUENCES else max(4, *(p.element_size() for p in parameters))
    total = _measuring(model, rollouts, batch_size, level, sign_draws) * -(-len(rollouts) // processes)
    if new_tokens:
        total += 1.3 * new_tokens * _seconds(model, rows, 1) * rows
    total += _SUMMARY * count * (2 + columns)
    vocabulary, layers, width, inner = _shape(model)
    batch: float = min(batch_size, len(lengths)) * max(lengths) * max(4, parameters[0].element_size())
    batch *= 3 * vocabulary + layers * (12 * width + 4 * inner)
    if level == "next-token":
        batch += 8e8  # one pass for many directions of the head's covariance at once
    sums = count * wide * ((1 if exact else 2) + columns)
    files = (1 if exact else 2) * sums + 3 * count * wide
    return Cost(count, weights, sums, batch, total, files)


def _pass_lengths(rollouts: Rollouts, level: Level, sign_draws: int | None) -> list[int]:
    """Tokens of every row that goes through the model: a response, or each of its tokens with what precedes it."""
    if level != "token" or sign_draws is not None:
        return list(rollouts.lengths)
    ends = zip(rollouts.prompt_ids, rollouts.response_ids, strict=True)
    return [len(p) + t for p, r in ends for t in range(1, len(r) + 1)]


def _measuring(
    model: nn.Module, rollouts: Rollouts, batch_size: int, level: Level, sign_draws: int | None
) -> float:
    """Seconds of one process for one response, on average."""
    lengths = _pass_lengths(rollouts, level, sign_draws)
    typical = max(1, sum(lengths) // len(lengths))
    rows = min(batch_size, len(lengths), max(1, _PASS_TOKENS // typical))
    each = _seconds(model, rows, min(typical, _PASS_TOKENS))

    def computed(some: Rollouts) -> float:
        passes = 1 + (_BACKWARD - 1) * (1 + (sign_draws or 0))
        total = passes * each * sum(_pass_lengths(some, level, sign_draws))
        return total + (_next_tokens(model, some, batch_size) if level == "next-token" else 0.0)

    order = sorted(range(len(rollouts)), key=lambda row: rollouts.lengths[row])
    middle = rollouts.take(order[max(0, (len(order) - batch_size) // 2) :][:batch_size])
    small = sum(p.numel() for p in model.parameters()) <= _SMALL and computed(middle) <= _TRIAL
    # Where a batch takes Python longer than it takes the processor, nothing but trying tells how long.
    tried = _tried(model, middle, batch_size, level, sign_draws) / computed(middle) if small else 1.0
    return tried * computed(rollouts) / len(rollouts)


def _next_tokens(model: nn.Module, rollouts: Rollouts, batch_size: int) -> float:
    """Seconds of the exact next-token law after every prefix; a batch measures equal prefixes once."""
    order = sorted(range(len(rollouts)), key=lambda row: -rollouts.lengths[row])
    batches = (rollouts.take(order[k : k + batch_size]).padded() for k in range(0, len(order), batch_size))
    return sum(
        next_token_cost(model, b.input_ids, b.response_mask, b.attention_mask).seconds for b in batches
    )


def _tried(
    model: nn.Module, rollouts: Rollouts, batch_size: int, level: Level, sign_draws: int | None
) -> float:
    """Seconds that a batch takes: the second of two, since the first finds the rules and makes room for the sums."""
    signs = None if sign_draws is None else torch.Generator()
    accumulator = ScoreAccumulator(
        model, batch_size=batch_size, level=level, sign_draws=sign_draws, generator=signs
    )
    device = next(model.parameters()).device
    ids, mask, attention = (part.to(device) for part in rollouts.padded())
    ids = (
        ids % _shape(model)[0] if _shape(model)[0] else ids
    )  # the tokens of what is to be sampled are made up
    started = 0.0
    for _ in range(2):
        started = time.perf_counter()
        accumulator.add(ids, mask, torch.zeros(len(rollouts)), attention_mask=attention)
        float(
            accumulator.moments().scores[next(iter(accumulator.moments().names))].flatten()[0]
        )  # a GPU is done
    return time.perf_counter() - started


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
