"""A comparison of two checkpoints, streamed, against loading both whole: time, memory, and the same numbers.

    python benchmarks/checkpoint_diff.py                # the built-in SmolLM2 in three depths, a few minutes
    python benchmarks/checkpoint_diff.py --pair BASE TUNED --rounds 1

One side is `density_script.py`, the other ``ceilings diff --no-rank``, which counts a great deal more beside. Each is a
process of its own, from its start to its end; rounds alternate, so that a busy machine slows both.
Memory is the peak of what the process itself allocated (anonymous pages): the pages of mapped files belong to the
system's cache. The pair is SmolLM2-135M-Instruct in bfloat16 and a copy after one small step of random size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["compare_sides", "main", "make_pair", "measure"]

HERE = Path(__file__).parent
SIDES = ("whole", "streamed")
DEPTHS = (7, 15, 30)
STEP = 3e-5
#: Targets: how many times less time and anonymous memory for whole processes, and less time for the scan alone.
TARGETS = {"time": 3.0, "memory": 10.0, "scan": 5.0}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--pair", nargs=2, metavar=("BASE", "TUNED"), help="checkpoints that are there already"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write all numbers to a file")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "rounds": options.rounds,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if options.pair is not None:
        base, tuned = map(Path, options.pair)
        result["sizes"] = [compare_sides(base, tuned, options.rounds)]
    else:
        result["sizes"] = []
        folder = Path(tempfile.mkdtemp())
        try:
            for depth in DEPTHS:
                pair = make_pair(folder, depth)
                result["sizes"].append({"layers": depth} | compare_sides(*pair, options.rounds))
        finally:
            shutil.rmtree(folder)
    for size in result["sizes"]:
        print(_line(size))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    ratios = result["sizes"][-1]["ratios"]
    missed = [
        f"{key} {ratios[key]:.1f} of {least:g}" for key, least in TARGETS.items() if ratios[key] < least
    ]
    print("targets met" if not missed else f"targets missed: {', '.join(missed)}")
    return 0


def make_pair(folder: Path, depth: int) -> tuple[Path, Path]:
    """The first layers of SmolLM2 in bfloat16, and the same after a small step."""
    from transformers import LlamaForCausalLM

    from ceilings.pretrained import load_pretrained

    source: Any
    source, _ = load_pretrained(dtype=torch.bfloat16, need_tokenizer=False)
    source.config.num_hidden_layers = depth
    generator = torch.Generator().manual_seed(0)
    paths = folder / f"base{depth}", folder / f"tuned{depth}"
    for path in paths:
        fresh: Any = LlamaForCausalLM(source.config)
        model: Any = fresh.to(torch.bfloat16)
        model.load_state_dict(source.state_dict(), strict=False)
        if path == paths[1]:
            with torch.no_grad():
                for parameter in model.parameters():
                    step = STEP * torch.randn(parameter.shape, generator=generator)
                    parameter.copy_((parameter.float() + step).bfloat16())
        model.save_pretrained(path)
    return paths


def compare_sides(base: Path, tuned: Path, rounds: int) -> dict[str, Any]:
    """Both sides on one pair, alternating; they must agree to every digit that the public script prints."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, found in runs.items():
            found.append(measure(side, base, tuned))
    first, second = (runs[side][0]["numbers"] for side in SIDES)
    _check_same(first, second)
    table = {
        side: {
            key: statistics.median(run[key] for run in found) for key in ("wall", "cpu", "scan", "memory_mb")
        }
        for side, found in runs.items()
    }
    keys = {"time": "wall", "cpu": "cpu", "scan": "scan", "memory": "memory_mb"}
    return {
        "parameters": first["parameters"],
        "zeros": first["zeros"],
        "close": first["close"],
        "ties_at_top_percent": second["top_percent"],
        **table,
        "ratios": {
            name: statistics.median(a[key] / b[key] for a, b in zip(*runs.values(), strict=True))
            for name, key in keys.items()
        },
    }


def measure(side: str, base: Path, tuned: Path) -> dict[str, Any]:
    """One process: wall and CPU seconds, seconds after its imports, peak of its anonymous memory, and its numbers."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        tempfile.TemporaryDirectory() as folder,
    ):
        report = Path(folder) / "report.json"
        if side == "whole":
            command = [sys.executable, str(HERE / "density_script.py"), str(base), str(tuned)]
        else:
            options = [str(base), str(tuned), "--no-rank", "--json", str(report)]
            command = [sys.executable, "-m", "ceilings", "diff", *options]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err)
        peak = 0
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, _anonymous(process.pid))
            time.sleep(0.01)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            err.seek(0)
            raise RuntimeError(f"{side} failed: {err.read()[-500:]}")
        out.seek(0)
        if side == "whole":
            numbers = json.loads(out.read().splitlines()[-1])
        else:
            numbers = _numbers(json.loads(report.read_text(encoding="utf-8")))
    return {
        "wall": wall,
        "cpu": usage.ru_utime + usage.ru_stime,
        "scan": numbers.pop("seconds"),
        "memory_mb": peak / 1024,
        "numbers": numbers,
    }


def _numbers(report: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the public script out of a report; the layers' means unweighted, for the comparison only."""
    (tuned,) = report["tuned"]
    layers: dict[str, list[float]] = {}
    for tensor in tuned["tensors"]:
        if tensor["layer"] is not None:
            layers.setdefault(str(tensor["layer"]), []).append(tensor["changed_share"]["equality"])
    shares = tuned["total"]["changed_share"]
    return {
        "parameters": tuned["total"]["parameters"],
        "zeros": 1 - shares["equality"],
        "close": 1 - shares["absolute"],
        "layers": {layer: sum(found) / len(found) for layer, found in layers.items()},
        "top_percent": tuned["cuts"]["0.01"],
        "seconds": report["wall_seconds"],
    }


def _check_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Refuse to compare sides that say different things."""
    for key in ("zeros", "close"):
        if f"{first[key]:.4f}" != f"{second[key]:.4f}":
            raise RuntimeError(f"{key}: {first[key]:.6f} and {second[key]:.6f} differ")
    if first["parameters"] != second["parameters"] or first["layers"].keys() != second["layers"].keys():
        raise RuntimeError("the two sides compared different tensors")
    for layer, share in first["layers"].items():
        if f"{share:.4f}" != f"{second['layers'][layer]:.4f}":
            raise RuntimeError(f"layer {layer}: {share:.6f} and {second['layers'][layer]:.6f} differ")


def _anonymous(pid: int) -> int:
    """Anonymous memory of a process, in KiB; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def _line(size: dict[str, Any]) -> str:
    """One pair in words."""
    sides = "; ".join(
        f"{side} {size[side]['wall']:.1f} s ({size[side]['scan']:.1f} s after imports, {size[side]['cpu']:.1f} s CPU), "
        f"{size[side]['memory_mb']:.0f} MB"
        for side in SIDES
    )
    ratios = ", ".join(f"{name} {value:.1f}×" for name, value in size["ratios"].items())
    cut = size["ties_at_top_percent"]
    return (
        f"{size['parameters'] / 1e6:.1f}M parameters, {100 * size['zeros']:.2f} % zeros: {sides}; {ratios}; top 1 %: "
        f"{cut['size']:,} entries, {cut['tied']:,} tied at the cut"
    )


if __name__ == "__main__":
    raise SystemExit(main())
