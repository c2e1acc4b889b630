"""Peak memory of one method as a fresh process, above the loaded model: python peak_memory.py METHOD MODEL CHUNK.

MODEL may also be ``llama:LAYERS:WIDTH:DTYPE``, a random Llama for the arithmetic of the cost table.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from methods import METHODS, Sums
from workloads import Workload, llama, workload

__all__ = ["main"]


def main(name: str, model: str, chunk: int) -> dict[str, float]:
    """Run the method once and say how far memory rose."""
    torch.set_num_threads(1)
    work = _work(model)
    work = replace(work, chunk=chunk or work.chunk)
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what loading left behind would hide what the method takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    method = METHODS[name]
    method.run(
        work, Sums.zeros(work.model) if method.shared_sums and method.moments != "none" else _no_sums()
    )
    weights = sum(p.numel() * p.element_size() for p in work.model.parameters())
    parameters = sum(p.numel() for p in work.model.parameters())
    peak = _status("VmHWM") - before
    return {"peak_mb": peak / 1024, "weights_mb": weights / 2**20, "parameters": parameters}


def _work(model: str) -> Workload:
    """The workload by its name."""
    if not model.startswith("llama:"):
        return workload(model)
    _, depth, size, dtype = model.split(":")
    layers, width = int(depth), int(size)
    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 3 * width,
    }
    random = llama(
        vocab_size=32000, num_attention_heads=width // 64, num_key_value_heads=width // 64, **shape
    )
    random = random.to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(32000, (2, 17), generator=generator)
    return Workload("random", random, ids, 8, torch.randn(2, generator=generator), 2)


def _no_sums() -> Sums:
    """Sums of a method that needs none, or has its own."""
    return Sums({}, {}, {})


def _status(field: str) -> int:
    """A line of the process status, in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
