"""Two patches trained for two rewards, merged: what is in conflict, and what becomes of either reward.

A decoder that adds digits is trained for one of two rewards: the last digit is right (*units*), or the first (*tens*).
Fine-tunes are stored in bfloat16 and in float32, turned into patches of one base, and merged with the first deciding
conflicts. Scientific hyperparameters: the number format and the learning rate, which decides how dense a fine-tune is.
Nuisance: the seed, which draws base and samples. Fixed: everything else in `Config`. Rewards are exact expectations
over every response; nothing about them is sampled.

Null models: *again* is a second training for the units from another seed; *shuffled* is the training for the tens with
the changes of each tensor dealt out to random places of it.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ceilings.experiments._command import record_command
from ceilings.experiments._rows import append
from ceilings.methods import make_method
from ceilings.patch import apply_patch, inspect_patch, make_patch
from ceilings.patch_merge import merge_patches
from ceilings.puzzles import END, Puzzle, addition
from ceilings.results import Record
from ceilings.sources import own_samples
from ceilings.training import TrainingConfig, pretrained_decoder, train
from ceilings.transformer import TinyTransformer

__all__ = [
    "FORMATS",
    "FULL",
    "NAME",
    "PAIRS",
    "REWARDS",
    "SMOKE",
    "Config",
    "expected_rewards",
    "reward_of",
    "run",
]

NAME: Final = "merging"
#: Position of the digit that each reward asks for; the last digit is written first.
REWARDS: Final = {"units": 0, "tens": 1}
FORMATS: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: What the training for the units is merged with.
PAIRS: Final = ("tens", "again", "shuffled")

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One base and its fine-tunes a seed.
    rates
        Learning rates of Adam.
    steps
        Batches of each training.
    pretraining_steps
        Batches of 64 noisy sums that the base has read.
    prompts, samples
        Prompts a batch, and responses to each.
    """

    seeds: tuple[int, ...]
    rates: tuple[float, ...] = (1e-5, 1e-3)
    steps: int = 20
    pretraining_steps: int = 300
    prompts: int = 16
    samples: int = 8


FULL: Final = Config(seeds=tuple(range(6)))
SMOKE: Final = Config(seeds=(0,))


def reward_of(name: str) -> Puzzle:
    """Sums of two digits, of which one digit of the answer counts.

    Parameters
    ----------
    name
        One of `REWARDS`.

    Returns
    -------
    Puzzle
        Reward 1 where that digit is right, whatever the other is.
    """
    place = REWARDS[name]

    def grade(answer: tuple[int, ...], response: tuple[int, ...]) -> float:
        return float(response[place : place + 1] == answer[place : place + 1])

    return dataclasses.replace(addition(), name=name, grade=grade)


@torch.no_grad()
def expected_rewards(model: TinyTransformer) -> dict[str, float]:
    """Both rewards in expectation over all prompts and responses, exactly.

    Parameters
    ----------
    model
        The decoder.

    Returns
    -------
    dict
        A number for each of `REWARDS`.

    Units
    -----
    [R].
    """
    puzzle = addition()
    prompts, answers = torch.tensor(puzzle.prompts), torch.tensor(puzzle.answers)
    first = model(prompts)[:, -1].softmax(-1)
    size = first.shape[1]
    follow = torch.arange(size).repeat(len(prompts))[:, None]
    second = model(torch.cat([prompts.repeat_interleave(size, 0), follow], 1))[:, -1].softmax(-1)
    right = second.view(-1, size, size).gather(2, answers[:, 1].view(-1, 1, 1).expand(-1, size, 1))[..., 0]
    going_on = first.clone()
    going_on[:, END] = 0.0  # a response that has ended has no second digit
    return {
        "units": float(first.gather(1, answers[:, :1]).mean()),
        "tens": float((going_on * right).sum(1).mean()),
    }


def run(config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Record:
    """Train, store, merge and evaluate at every seed.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.

    Returns
    -------
    Record
        Leaves are ``base/REWARD``, ``RATE/FORMAT/tuned/MODEL/REWARD`` and ``RATE/FORMAT/PAIR/NAME``.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        base = pretrained_decoder(addition(), steps=config.pretraining_steps, seed=seed)
        _set(
            base, {k: p.detach().bfloat16() for k, p in base.named_parameters()}
        )  # what both formats can hold
        append(values, expected_rewards(base), "base")
        for rate in config.rates:
            tuned = _fine_tunes(base, rate, config, seed)
            for word, dtype in FORMATS.items():
                _measure(values, (f"{rate:g}", word), base, tuned, dtype)
    return Record.of_run(
        config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64, packages=("safetensors",)
    )


def _fine_tunes(base: TinyTransformer, rate: float, config: Config, seed: int) -> dict[str, Weights]:
    """Weights after each training, in float64, and the shuffled ones."""
    found: dict[str, Weights] = {}
    for name, reward, draw in (("units", "units", 0), ("tens", "tens", 1), ("again", "units", 2)):
        model, puzzle = copy.deepcopy(base), reward_of(reward)
        settings = TrainingConfig(
            config.steps, rate, evaluate_every=config.steps, evaluation_samples=1, seed=1000 * seed + draw
        )
        source = own_samples(puzzle, prompts=config.prompts, samples=config.samples)
        train(model, make_method("rloo"), source, puzzle, settings)
        found[name] = {k: p.detach() for k, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    found["shuffled"] = {}
    for k, p in base.named_parameters():
        moved = (found["tens"][k] - p.detach()).flatten()
        found["shuffled"][k] = p.detach() + moved[torch.randperm(len(moved), generator=generator)].view(
            p.shape
        )
    return found


def _measure(
    values: dict[str, Any],
    path: tuple[str, str],
    base: TinyTransformer,
    tuned: dict[str, Weights],
    dtype: torch.dtype,
) -> None:
    """Store, merge and evaluate in one number format."""
    start = {k: p.detach().to(dtype) for k, p in base.named_parameters()}
    stored = {name: {k: p.to(dtype) for k, p in weights.items()} for name, weights in tuned.items()}
    for name, weights in stored.items():
        append(values, _rewards(base, weights), *path, "tuned", name)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for name, weights in {"base": start, **stored}.items():
            save_file({k: p.contiguous() for k, p in weights.items()}, here / f"{name}.safetensors")
        for name in stored:
            make_patch(here / "base.safetensors", here / f"{name}.safetensors", here / f"{name}.patch")
        for other in PAIRS:
            append(values, _merged(base, here, other), *path, other)
    summed = {
        k: (tuned["units"][k] + tuned["tens"][k] - p.detach()).to(dtype) for k, p in base.named_parameters()
    }
    append(values, _rewards(base, summed), *path, "tuned", "sum")


def _merged(base: TinyTransformer, here: Path, other: str) -> dict[str, float]:
    """Conflicts of one pair, chance, and rewards after the merge, with either of the two deciding."""
    first, second, both = (here / f"{name}.patch" for name in ("units", other, "merged"))
    row: dict[str, float] = {}
    sides: tuple[Literal["first", "second"], ...] = ("first", "second")
    for prefer in sides:
        found = merge_patches(first, second, both, prefer=prefer, base=here / "base.safetensors")
        apply_patch(here / "base.safetensors", both, here / "merged.safetensors")
        rewards = _rewards(base, load_file(here / "merged.safetensors"))
        row |= {f"{name}, {prefer} decides": value for name, value in rewards.items()}
    one, two = (_counts(path) for path in (first, second))
    row["numbers"] = sum(size for _, size in one.values())
    row["changed by the first"] = sum(count for count, _ in one.values())
    row["changed by the second"] = sum(count for count, _ in two.values())
    row["both"] = found.both
    row["in conflict"] = sum(c.differing for c in found.conflicts)
    pairs = [(one[k][0], two[k][0], one[k][1]) for k in one]
    row["both by chance"] = sum(a * b / n for a, b, n in pairs)
    # Variance of the size of the common part of two random sets, of each tensor: the hypergeometric law.
    row["variance by chance"] = sum(a * b * (n - a) * (n - b) / (n * n * (n - 1)) for a, b, n in pairs)
    return row


def _counts(patch: Path) -> dict[str, tuple[int, int]]:
    """Changed numbers and all numbers of each tensor."""
    tuned = inspect_patch(patch).manifest.tuned
    return {name: (t.changed, t.common // t.what.width) for name, t in tuned.items()}


def _rewards(base: TinyTransformer, weights: Weights) -> dict[str, float]:
    """Rewards of the decoder with these weights, computed in float64."""
    model = copy.deepcopy(base)
    _set(model, weights)
    return expected_rewards(model)


def _set(model: TinyTransformer, weights: Weights) -> None:
    """Give a model other weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


if __name__ == "__main__":
    raise SystemExit(record_command(run, FULL, SMOKE))
