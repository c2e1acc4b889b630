"""What the moments cost by sequences, parameters and length, and the largest model that fits.

Time is measured on random Llamas against the floor of the same round. Memory is arithmetic, and `memory_check` holds
it against real processes of three sizes.

    python benchmarks/cost_table.py     # only these processes again, into the record; a busy machine does not matter
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from methods import METHODS, Sums
from workloads import Workload, llama

__all__ = ["MEMORIES", "bytes_per_parameter", "growth", "largest_model", "memory_check"]

MOMENTS = 3 * 4  # S₁, S₂ and S_R in float32, bytes a parameter
MEMORIES = {"24 GiB": 24 * 2**30, "80 GiB": 80 * 2**30}
RESERVE = 0.10  # of the memory, for activations, logits of a small batch and the program itself
CHECKED = ("llama:12:512:float32", "smollm2", "llama:18:1024:float32", "llama:18:1024:bfloat16")
RESULT = Path(__file__).parent / "score_moments.json"
SHAPES = {
    "N": [{"sequences": n} for n in (16, 64, 256)],
    "parameters": [{"width": w} for w in (64, 128, 256, 512)],
    "T": [{"tokens": t} for t in (8, 16, 32, 64, 128)],
}
ROUNDS = 3


def bytes_per_parameter(weight_bytes: int) -> int:
    """Bytes that a parameter takes while its moments are summed: weight and three sums, no gradient."""
    return weight_bytes + MOMENTS


def largest_model(memory: int, weight_bytes: int) -> float:
    """Parameters of the largest model whose weights and moments fit one memory."""
    return (1 - RESERVE) * memory / bytes_per_parameter(weight_bytes)


def growth() -> dict[str, list[dict[str, Any]]]:
    """Ratio to the floor as one size changes and the others stay: 32 sequences of 32 tokens, 0.9M parameters."""
    return {axis: [_ratio(axis, **shape) for shape in shapes] for axis, shapes in SHAPES.items()}


def _ratio(axis: str, sequences: int = 32, width: int = 128, tokens: int = 32) -> dict[str, Any]:
    """Median ratio of the engine and of the loop to the floor."""
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": 3 * width}
    model = llama(vocab_size=512, num_attention_heads=4, num_key_value_heads=4, **shape)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (sequences, tokens + 1), generator=generator)
    work = Workload("random", model, ids, 1, torch.randn(sequences, generator=generator), 16)
    sums = {name: Sums.zeros(model) for name in ("floor", "loop", "ours")}
    METHODS["ours"].run(work, sums["ours"])
    times: dict[str, list[float]] = {name: [] for name in sums}
    for _ in range(ROUNDS):
        for name, own in sums.items():
            started = time.process_time()
            METHODS[name].run(work, own)
            times[name].append(time.process_time() - started)
    parameters = sum(p.numel() for p in model.parameters())
    value = {"N": sequences, "parameters": parameters, "T": tokens}[axis]
    medians = {
        name: statistics.median(t / f for t, f in zip(times[name], times["floor"], strict=True))
        for name in ("loop", "ours")
    }
    return {"value": value, **medians}


def memory_check() -> list[dict[str, float]]:
    """Peak of the engine in a fresh process, weights included, against the arithmetic."""
    found: list[dict[str, float]] = []
    for model in CHECKED:
        command = [sys.executable, str(Path(__file__).parent / "peak_memory.py"), "ours", model, "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            found.append({"failed": done.returncode})
            continue
        seen = json.loads(done.stdout.splitlines()[-1])
        width = round(seen["weights_mb"] * 2**20 / seen["parameters"])
        found.append(
            {
                "parameters": seen["parameters"],
                "weight_bytes": width,
                "measured_mb": seen["peak_mb"] + seen["weights_mb"],
                "computed_mb": seen["parameters"] * bytes_per_parameter(width) / 2**20,
            }
        )
    return found


def main() -> None:
    """Measure memory again, and nothing else of the record."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    result["memory_check"] = memory_check()
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
