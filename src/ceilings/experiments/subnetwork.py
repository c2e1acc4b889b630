"""Does training the weights that changed give the same model, and is that a finding or the arithmetic of the mask?

Scientific hyperparameters: the mask, the storage, whether the batches are those of the full run. Nuisance: the seed,
and the draws of the random mask. Fixed: all else in `Config`, the start, the reward and the rates those of
`ceilings.experiments.precision`; none is tuned.

A full run is made; the weights whose stored number changed are the *hindsight* mask. Then the same start is trained
again with the gradient of everything outside of a mask set to zero, for this mask and for others of exactly its
density, which are known before the full run: the highest ceilings, the largest gradients of the first batch, the
smallest weights; and, as null models, random masks. Beside them stands a second full run on other batches: what two
runs share that know nothing of one another.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.experiments._command import record_command
from ceilings.experiments._resume import Keep, not_kept, resumed
from ceilings.experiments._rows import append
from ceilings.experiments._start import Shape, Start, success
from ceilings.masking import MaskedStepper, densest
from ceilings.results import Record
from ceilings.storage import Storage, StoredWeights, stored, stored_dtype
from ceilings.update_rules import (
    Rule,
    Stepper,
    descend,
    first_step_size,
    flat_parameters,
    load_flat,
    make_rule,
)

__all__ = ["BATCHES", "FULL", "MASKS", "NAME", "SMOKE", "Config", "run"]

NAME: Final = "subnetwork"
#: Masks of one density; ``random`` is drawn several times.
MASKS: Final = ("hindsight", "ceiling", "first gradient", "smallest weights", "random")
#: Batches of a masked run: those of the full run, or others.
BATCHES: Final = ("same", "other")


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One start a seed.
    cells
        Rule of the update, and size of the first step.
    storages
        Storages of the weights.
    batches
        Some of `BATCHES`.
    draws
        Random masks.
    steps
        Batches of a run.
    shape
        The puzzle, the decoder, and a batch.
    """

    seeds: tuple[int, ...]
    cells: tuple[tuple[Rule, float], ...] = (("sgd", 1e-4), ("sgd", 3e-4), ("adam", 1e-4), ("adam", 3e-4))
    storages: tuple[Storage, ...] = ("bf16", "master")
    batches: tuple[str, ...] = BATCHES
    draws: int = 3
    steps: int = 40
    shape: Shape = field(default_factory=Shape)


FULL: Final = Config(seeds=(0, 1, 2, 3))
SMOKE: Final = Config(seeds=(0,), cells=(("sgd", 1e-4),), storages=("bf16",), batches=("same",))


def run(
    config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter, keep: Keep = not_kept
) -> Record:
    """Train in full, and with every mask.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.
    keep
        Keeps the values of a cell, see `ceilings.experiments._resume`.

    Returns
    -------
    Record
        Leaves are ``RULE/SIZE/STORAGE/full/NAME``, ``…/second/NAME`` for the full run on other batches, and
        ``…/MASK/BATCHES/NAME``; of ``random`` each leaf is a list over the draws.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        begin = Start(config.shape, seed)
        load_flat(begin.model, stored(begin.weights, torch.bfloat16))
        ranks = {
            "ceiling": begin.moments(begin.puzzle).ceiling,
            "first gradient": begin.first_gradient().abs(),
            "smallest weights": -begin.weights.abs(),
        }
        for rule, size in config.cells:
            for storage in config.storages:
                measure = partial(_cell, config, begin, ranks, rule, size, storage)
                found = keep(f"{seed}-{rule}-{size:g}-{storage}", measure)
                append(values, found, rule, f"{size:g}", storage)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


def _cell(
    config: Config, begin: Start, ranks: dict[str, Tensor], rule: Rule, size: float, storage: Storage
) -> dict[str, Any]:
    """A full run, a second one, and a run with every mask."""
    rate = size / first_step_size(rule, begin.model, begin.first_gradient())
    base = stored(begin.weights, stored_dtype(storage))
    train = partial(_trained, config, begin, rule, rate, storage)
    moved = _Moved(base)
    full = train(watch=moved)
    theirs = flat_parameters(full)
    changed = theirs != base
    found: dict[str, Any] = {
        "full": {
            "gain": _gain(begin, full),
            "density": float(changed.double().mean()),
            "ever moved": float(moved.mask.double().mean()),
        },
        "second": _agreement(begin, base, theirs, changed, train(batches="other")),
    }
    generator = torch.Generator().manual_seed(9700 + begin.seed)
    count = int(changed.sum())
    masks = {
        "hindsight": [changed],
        **{name: [densest(values, count, generator)] for name, values in ranks.items()},
        "random": [
            densest(torch.zeros(len(base)), count, generator) for _ in range(config.draws)
        ],  # all tied: drawn
    }
    for name, several in masks.items():
        for batches in config.batches:
            rows = [
                _agreement(begin, base, theirs, changed, train(mask=mask, batches=batches))
                for mask in several
            ]
            values = {key: [row[key] for row in rows] for key in rows[0]}
            found.setdefault(name, {})[batches] = (
                values if name == "random" else {key: value[0] for key, value in values.items()}
            )
    return found


def _trained(
    config: Config,
    begin: Start,
    rule: Rule,
    rate: float,
    storage: Storage,
    *,
    mask: Tensor | None = None,
    batches: str = "same",
    watch: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """The model after a run, in full or with a mask."""
    model = copy.deepcopy(begin.model)
    stepper: Stepper = StoredWeights(make_rule(rule, model, rate), storage)
    if mask is not None:
        stepper = MaskedStepper(stepper, model, mask)
    generator = begin.generator(0 if batches == "same" else 50)
    descend(
        model, begin.method, begin.source(), stepper, steps=config.steps, generator=generator, watch=watch
    )
    return model


class _Moved:
    """Which weights differed from their start after any step."""

    def __init__(self, base: Tensor) -> None:
        self.base, self.mask = base, torch.zeros_like(base, dtype=torch.bool)

    def __call__(self, model: nn.Module) -> None:
        self.mask |= flat_parameters(model) != self.base


def _agreement(
    begin: Start, base: Tensor, theirs: Tensor, changed: Tensor, model: nn.Module
) -> dict[str, float]:
    """How near a run came to the full run: in all weights, in those that the full run changed, and in reward."""
    mine = flat_parameters(model)
    equal = mine == theirs
    close = (mine - theirs).abs() <= 1e-5
    way = (theirs - base).square().sum()
    return {
        "gain": _gain(begin, model),
        "equal": float(equal.double().mean()),
        "close": float(close.double().mean()),
        "equal where changed": float(equal[changed].double().mean()) if bool(changed.any()) else math.nan,
        "close where changed": float(close[changed].double().mean()) if bool(changed.any()) else math.nan,
        # Distance from the full run over the way that the full run went: 1 for a run that does not move.
        "distance": float(((mine - theirs).square().sum() / way).sqrt()),
        "overlap of changed": float((changed & (mine != base)).sum() / (mine != base).sum().clamp_min(1)),
        "density": float((mine != base).double().mean()),
    }


def _gain(begin: Start, model: nn.Module) -> float:
    """Success probability gained since the start."""
    return success(model, begin.puzzle) - success(begin.model, begin.puzzle)


if __name__ == "__main__":
    raise SystemExit(record_command(resumed(run, FULL, NAME), FULL, SMOKE))
