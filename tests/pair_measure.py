"""`ceilings measure` on two processes, many times in one run; process 1 fails when a file called `fault` says so."""

import contextlib
import io
import os
import signal
from collections import Counter
from pathlib import Path

import torch

from ceilings import cli, console, distributed, measure_options
from ceilings.measure_command import load
from ceilings.measure_options import MeasureOptions
from pair import keep
from pair_sharded import LlamaRMSNorm, in_float64

COMMON = ("toy", "--dtype", "float64", "--batch-size", "2", "--checkpoint-seconds", "0")
ROLLOUTS = (*COMMON, "--rollouts", "rollouts.jsonl")
PROMPTS = (*COMMON, "--prompts", "prompts.jsonl", "--samples", "3", "--max-new-tokens", "5", "--reward")
CASES = {
    "rollouts": ROLLOUTS,
    "prompts": (*PROMPTS, "regex:w5|w7"),
    "next": (*COMMON, "--next-token", "w2 w3", "--options", "w5", "w7"),
    "useless": (*PROMPTS, "regex:nothing"),
    "memory": ROLLOUTS,
    "value": ROLLOUTS,
    "bug": ROLLOUTS,
    "stopped": ROLLOUTS,
    "resumed": ROLLOUTS,
    "death": ROLLOUTS,
}
FAULTS = {
    "memory": MemoryError("nothing left"),
    "value": ValueError("this sequence is wrong"),
    "bug": ZeroDivisionError("a fault of ours"),
}


def measured():
    """Every case on two processes; what each returned and printed goes into `ended.json`."""
    steps = Counter()
    plain = distributed.PooledAccumulator.add

    def add(self, *args, **kwargs):
        fault = Path("fault").read_text(encoding="utf-8") if Path("fault").exists() else ""
        steps[fault] += 1
        # Two steps of a half have a share for process 1, so this is the second step of the second half.
        if os.environ["RANK"] == "1" and steps[fault] == 4:
            if fault == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault:
                raise FAULTS[fault]
        plain(self, *args, **kwargs)

    distributed.PooledAccumulator.add = add
    opened, held = distributed.Team._on_open, []

    def open_one(self, share):
        opened(self, share)
        held.append(len(self._accumulators))
        keep(".", f"held{os.environ['RANK']}.json", held)

    distributed.Team._on_open = open_one
    LlamaRMSNorm.forward = in_float64
    options = MeasureOptions(model="toy", out="", dtype="float64")
    return distributed.run_together("cpu", lead, lambda device: load(options)[0])


def lead(device):
    """What process 0 does."""
    by_token()
    ended = {}
    asked = console.Terminal.stopping
    for name, arguments in CASES.items():
        out = "stopped" if name == "resumed" else name
        found = cli._parser().parse_args(["measure", *arguments, "--out", out])
        Path("fault").write_text(name if name in (*FAULTS, "death") else "", encoding="utf-8")
        console.Terminal.stopping = (lambda self: True) if name == "stopped" else asked
        said, complained = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            try:
                code = measure_options._measure(measure_options._options(found), console.Terminal())
            except ZeroDivisionError as error:
                code = repr(error) + str(error.__cause__)
        ended[name] = (code, said.getvalue(), complained.getvalue())
        keep(".", "ended.json", ended)
    return 0


def by_token():
    """Squares of the scores of tokens: exact, and by signs, of which each process must draw its own."""
    model, _ = load(MeasureOptions(model="toy", out="", dtype="float64"))
    rows = tokens()
    for name, draws in (("token", None), ("signs", 64), ("again", 64)):
        generator = None if draws is None else torch.Generator().manual_seed(3)
        accumulator = distributed.team().accumulator(
            model, level="token", sign_draws=draws, generator=generator
        )
        accumulator.add(*rows)
        accumulator.moments().save(f"{name}.safetensors")


def tokens():
    """The same four sequences twice: process 0 gets one copy, process 1 the other."""
    ids = torch.randint(2, 20, (4, 7), generator=torch.Generator().manual_seed(1)).repeat_interleave(2, 0)
    return ids, (torch.arange(7) >= 3).expand(8, -1), torch.arange(8) // 2
