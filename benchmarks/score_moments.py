"""How fast, how large and how right: score moments by every method that can form them.

    python benchmarks/score_moments.py                      # everything, about ten minutes on one core
    python benchmarks/score_moments.py --models toy --methods floor loop ours --no-cost --output toy.json

Times are process CPU time with one thread. A round runs every method once, one after the other, so that a busy machine
slows all of them; what counts is the ratio to the floor of the same round. Answers are compared first, in float64. The
result goes into score_moments.json, from which `tables.py` writes the table of the README.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cost_table import growth, memory_check
from methods import METHODS, Method, NotInstalled, Sums, answer
from workloads import MODELS, Workload, exact_norms, exact_toy, workload

__all__ = ["main"]

HERE = Path(__file__).parent
PACKAGES = (
    "ceilings",
    "torch",
    "transformers",
    "opacus",
    "backpack-for-pytorch",
    "nngeometry",
    "laplace-torch",
)
PARTS = ("scores", "squares", "reward_scores")
TOLERANCE = 1e-10
CHUNKS_FOR_MEMORY = {"vmap": (2, 8), "opacus": (2, 8)}


def main(arguments: list[str] | None = None) -> None:
    """Measure what is asked for and write it down."""
    options = _options(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    methods = [METHODS[name] for name in options.methods]
    result: dict[str, Any] = {"version": 1, "setting": setting(options.rounds)}
    say("answers in float64")
    result["answers"] = {method.name: compare(method) for method in methods}
    # Who refuses to answer is asked again by each model, so that the record says so of each.
    here = [m for m in methods if result["answers"][m.name]["state"] != "not installed"]
    result["models"] = {}
    for name in options.models:
        say(f"times on {name}")
        result["models"][name] = measure(workload(name), here, options.rounds)
        if options.memory and name == "smollm2":
            result["models"][name]["memory"] = memories(name, result["models"][name]["times"])
    if options.enumeration:
        say("enumeration")
        result["enumeration"] = enumeration(max(1, options.rounds - 1))
    if options.cost:
        say("cost by size")
        result["growth"] = growth()
        result["memory_check"] = memory_check()
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"written: {options.output}")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Benchmark of the score moments.")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "score_moments.json")
    for part in ("memory", "enumeration", "cost"):
        parser.add_argument(f"--no-{part}", dest=part, action="store_false")
    options = parser.parse_args(arguments)
    if not {"floor", "loop"} <= set(options.methods):
        parser.error("the methods must include floor and loop: everything is compared with them")
    return options


def say(text: str) -> None:
    """Progress, where it disturbs nothing."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def setting(rounds: int) -> dict[str, Any]:
    """Where and with what this was measured."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.date.today().isoformat(),
        "processor": cpu,
        "cores": os.cpu_count(),
        "threads": 1,
        "python": platform.python_version(),
        "versions": versions,
        "rounds": rounds,
    }


def compare(method: Method) -> dict[str, Any]:
    """Largest error of a method against the loop, relative to the largest entry of each tensor, tied and not."""
    if method.moments == "none":
        return {"state": "no answer"}
    found: dict[str, Any] = {"state": "right", "moments": method.moments}
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with exact_norms():
            for tied in (True, False):
                errors = _errors(method, exact_toy(tied))
                found["tied" if tied else "untied"] = errors
                if max(errors.values()) > TOLERANCE:
                    found["state"] = "wrong"
    except NotInstalled as error:
        return {"state": "not installed", "reason": str(error)}
    except Exception as error:
        return {"state": "refuses", "reason": _short(error)}
    finally:
        torch.set_default_dtype(default)
    return found


def _errors(method: Method, work: Workload) -> dict[str, float]:
    """Error of the worst tensor for each sum that the method forms."""
    expected, actual = answer(METHODS["loop"], work), answer(method, work)
    parts = PARTS if method.moments == "all" else ("squares",)
    return {
        part: max(
            float((getattr(actual, part)[name] - value).abs().max() / value.abs().max())
            for name, value in getattr(expected, part).items()
        )
        for part in parts
    }


def measure(work: Workload, methods: list[Method], rounds: int) -> dict[str, Any]:
    """Interleaved rounds of one model, after one round that warms up and shows who refuses."""
    shared = Sums.zeros(work.model)
    sums = {m.name: shared if m.shared_sums else Sums({}, {}, {}) for m in methods}
    refused: dict[str, str] = {}
    for method in methods:
        try:
            # The engine keeps what it allocates, so it warms up on the whole.
            method.run(work.some(2, 12) if method.shared_sums else work, sums[method.name])
        except Exception as error:
            refused[method.name] = _short(error)
    willing = [m for m in methods if m.name not in refused]
    times: dict[str, list[float]] = {m.name: [] for m in willing}
    for number in range(rounds):
        for method in willing:
            times[method.name].append(_cpu(partial(method.run, work, sums[method.name])))
        say(f"  round {number + 1}: " + ", ".join(f"{n} {t[-1]:.2f} s" for n, t in times.items()))
    return {
        "parameters": sum(p.numel() for p in work.model.parameters()),
        "sequences": len(work.ids),
        "tokens": work.ids.shape[1],
        "scored": work.ids.shape[1] - work.prompt,
        "chunk": work.chunk,
        "times": times,
        "ratios": {name: summary(t, times["floor"]) for name, t in times.items()},
        "refused": refused,
    }


def summary(times: list[float], floor: list[float]) -> dict[str, Any]:
    """Ratio to the floor of the same round."""
    ratios = [t / f for t, f in zip(times, floor, strict=True)]
    return {"median": statistics.median(ratios), "rounds": ratios}


def memories(model: str, names: Any) -> dict[str, dict[str, float]]:
    """Peak memory of every method as a fresh process."""
    found = {}
    for name in names:
        for chunk in CHUNKS_FOR_MEMORY.get(name, (0,)):
            say(f"  memory of {name} {chunk or ''}")
            found[f"{name}/{chunk}" if chunk else name] = peak(name, model, chunk)
    return found


def peak(name: str, model: str, chunk: int) -> dict[str, float]:
    """What `peak_memory.py` says, or why it says nothing."""
    command = [sys.executable, str(HERE / "peak_memory.py"), name, model, str(chunk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def enumeration(rounds: int) -> dict[str, Any]:
    """All 4096 responses of a small model with their probabilities: one backward pass each, or the engine."""
    from ceilings.scores import score_moments
    from ceilings.transformer import TinyTransformer, TransformerConfig, enumerate_responses

    config = TransformerConfig(vocab_size=16, width=32, depth=3, heads=2, mlp_width=100)
    model = TinyTransformer(config, 0)
    law = enumerate_responses(model, (1,), 3)
    ids, mask = law.batch()
    rewards = torch.randn(len(ids), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loop_sums = Sums.zeros(model)
    moments: Any = None

    def loop() -> None:
        for part in (
            *loop_sums.scores.values(),
            *loop_sums.squares.values(),
            *loop_sums.reward_scores.values(),
        ):
            part.zero_()
        for row, reward, weight in zip(ids.split(1), rewards.tolist(), law.probs.tolist(), strict=True):
            _response_log_prob(model, row).backward()
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                assert grad is not None
                loop_sums.scores[name].add_(grad, alpha=weight)
                loop_sums.squares[name].addcmul_(grad, grad, value=weight)
                loop_sums.reward_scores[name].add_(grad, alpha=weight * reward)
            model.zero_grad(set_to_none=True)

    def floor() -> None:
        for rows in ids.split(512):
            _response_log_prob(model, rows).backward()
        model.zero_grad(set_to_none=True)

    def ours() -> None:
        nonlocal moments
        moments = score_moments(model, ids, mask, rewards, weights=law.probs, batch_size=512)

    ways: dict[str, Callable[[], None]] = {"floor": floor, "loop": loop, "ours": ours}
    ours()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            times[name].append(_cpu(run))
    error = max(
        float((moments.squares[name] - square).abs().max() / square.abs().max())
        for name, square in loop_sums.squares.items()
    )
    return {
        "responses": len(ids),
        "parameters": sum(p.numel() for p in model.parameters()),
        "error": error,
        "times": times,
        "ratios": {name: summary(t, times["floor"]) for name, t in times.items()},
    }


def _response_log_prob(model: torch.nn.Module, rows: Tensor) -> Tensor:
    """Sum of the log-probabilities of responses to a prompt of one token."""
    logits = model(rows[:, :-1]).flatten(0, 1)
    return -functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")


def _cpu(run: Callable[[], None]) -> float:
    """CPU seconds of this process."""
    started = time.process_time()
    run()
    return time.process_time() - started


def _short(error: Exception) -> str:
    """What an exception says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


if __name__ == "__main__":
    main()
