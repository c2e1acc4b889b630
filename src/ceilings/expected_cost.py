"""What a measurement will need, before it starts: parameters, memory, time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

__all__ = ["Cost", "available_memory", "measured_cost"]

_OVERHEAD: Final = 4e8  # bytes of Python, PyTorch and transformers
_BACKWARD: Final = (
    3.7  # time of a forward pass with its share of the backward one, against a forward pass alone
)
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

    Units
    -----
    bytes, seconds.
    """

    parameters: int
    weight_bytes: float
    moment_bytes: float
    batch_bytes: float
    seconds: float

    @property
    def bytes(self) -> float:
        """Memory of the whole process."""
        return self.weight_bytes + self.moment_bytes + self.batch_bytes + _OVERHEAD


def measured_cost(
    model: nn.Module,
    lengths: Sequence[int],
    rewards: int,
    batch_size: int,
    new_tokens: int = 0,
    rows: int = 1,
) -> Cost:
    """Cost of measuring sequences, and of sampling them first.

    Parameters
    ----------
    model
        The model; one short forward pass is timed.
    lengths
        Tokens of each sequence.
    rewards
        Number of reward columns, K.
    batch_size
        Sequences in one pass.
    new_tokens
        Tokens to sample one after another, over all batches of ``rows`` responses; 0 if nothing is sampled.
    rows
        Responses that are sampled at once.

    Returns
    -------
    Cost
        The expectation.
    """
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    wide = max(4, *(p.element_size() for p in parameters))
    longest = max(lengths)
    tokens = min(batch_size, len(lengths)) * longest
    seconds = _seconds(model, max(1, min(len(lengths), _PASS_TOKENS // longest)), min(longest, _PASS_TOKENS))
    total = _BACKWARD * seconds * sum(lengths)
    if new_tokens:
        total += 1.3 * new_tokens * _seconds(model, rows, 1) * rows
    vocabulary, layers, width, inner = _shape(model)
    activations = tokens * wide * (3 * vocabulary + layers * (12 * width + 4 * inner))
    return Cost(count, weights, count * wide * (2 + rewards), activations, total)


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
