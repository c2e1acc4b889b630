"""What a number format leaves of an update: which stored weights change, and how much of that the format alone says.

Scientific hyperparameters: the storage, the learning rate, the rule of the update. Nuisance: the seed. Fixed: all
else in `Config`, the start and the reward those of `ceilings.experiments.optimisers`. Every run of a seed starts from
the same weights, rounded to bf16 first, and its changes are counted from what the trainer saw. Only the stored weight
is rounded; gradients and moments are float64. Rates are given by the size of the first step (root mean square over
the parameters), so that SGD and Adam can be laid side by side. None is tuned: the rate is what varies.

For SGD and Adam every storage is crossed with every rate. For the other rules, and for the length of a run, one factor
at a time moves away from the centre.

The prediction takes the fp32 run's steps and the weights at the start, and nothing else. *Step gate*: a weight stays
if none of its steps exceeds half the gap to its neighbour. *Total gate*: it stays if its whole change does not. Null
models deal the fp32 run's changes out anew, among all weights, or within every tensor.
"""

from __future__ import annotations

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
from ceilings.results import Record
from ceilings.storage import STORAGES, Storage, StoredWeights, half_gap, stored, stored_dtype
from ceilings.update_rules import RULES, Rule, first_step_size, flat_parameters, load_flat, make_rule

__all__ = ["BINADES", "FULL", "NAME", "SMOKE", "Config", "run", "unchanged"]

NAME: Final = "precision"
#: Exponents by which weights are binned; the first bin holds all that is smaller, the last all that is larger.
BINADES: Final = tuple(range(-12, 1))


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One start a seed.
    crossed
        Rules that are crossed with every storage and rate.
    sizes
        Sizes of the first step.
    centre
        Size of the first step where one factor moves at a time.
    others
        Rules that are run at the centre only.
    lengths
        Lengths of a run of Adam at the centre.
    steps
        Batches of every other run.
    draws
        Draws of each null model.
    large_epsilon
        As in `ceilings.experiments.optimisers`.
    shape
        The puzzle, the decoder, and a batch.
    """

    seeds: tuple[int, ...]
    crossed: tuple[Rule, ...] = ("sgd", "adam")
    sizes: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    centre: float = 1e-4
    others: tuple[Rule, ...] = tuple(rule for rule in RULES if rule not in ("sgd", "adam"))
    lengths: tuple[int, ...] = (10, 120)
    steps: int = 40
    draws: int = 20
    large_epsilon: float = 10.0
    shape: Shape = field(default_factory=Shape)


FULL: Final = Config(seeds=(0, 1, 2))
SMOKE: Final = Config(seeds=(0,), crossed=("adam",), sizes=(1e-4,), others=(), lengths=())


def run(
    config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter, keep: Keep = not_kept
) -> Record:
    """Train from every seed's start in every storage.

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
        Leaves are ``weights/NAME``, ``RULE/SIZE/STORAGE/NAME``, ``length/STEPS/STORAGE/NAME`` and, beside the storages,
        ``predicted/NAME``.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        begin = _begin(config, seed)
        first = begin.first_gradient()
        append(values, _weights(begin), "weights")
        for names, rule, size, steps in _cells(config):
            measure = partial(_cell, config, begin, first, rule, size, steps)
            found = keep(f"{seed}-{'-'.join(names)}", measure)
            append(values, found, *names)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


def unchanged(base: Tensor, tuned: Tensor) -> dict[str, Tensor]:
    """Which stored weights count as unchanged, by three rules.

    Parameters
    ----------
    base, tuned
        Stored weights before and after, in float64.

    Returns
    -------
    dict
        ``exact``: the same number. ``absolute``: differs by at most 1e-5. ``relative``: by at most a thousandth of the
        larger.

    Shapes
    ------
    base, tuned (D,) -> (D,) each.
    """
    change = (tuned - base).abs()
    return {
        "exact": change == 0,
        "absolute": change <= 1e-5,
        "relative": change <= 1e-3 * torch.maximum(base.abs(), tuned.abs()),
    }


def _cells(config: Config) -> Iterable[tuple[tuple[str, ...], Rule, float, int]]:
    """Every cell: its names, rule, size of the first step and length."""
    for rule in config.crossed:
        for size in config.sizes:
            yield (rule, f"{size:g}"), rule, size, config.steps
    for rule in config.others:
        yield (rule, f"{config.centre:g}"), rule, config.centre, config.steps
    for steps in config.lengths:
        yield ("length", str(steps)), "adam", config.centre, steps


def _begin(config: Config, seed: int) -> Start:
    """The start of a seed, its weights numbers of bf16."""
    begin = Start(config.shape, seed)
    load_flat(begin.model, stored(begin.weights, torch.bfloat16))
    return begin


def _weights(begin: Start) -> dict[str, Any]:
    """The weights at the start."""
    size = begin.weights.abs()
    return {
        "parameters": len(size),
        "median": float(size.median()),
        "zero": float((size == 0).double().mean()),
        "in binade": (torch.bincount(_binade(size), minlength=len(BINADES)) / len(size)).tolist(),
        "success": success(begin.model, begin.puzzle),
    }


def _cell(
    config: Config, begin: Start, first: Tensor, rule: Rule, size: float, steps: int
) -> dict[str, dict[str, Any]]:
    """One rule at one rate, in every storage, and what is predicted from the run in fp32."""
    scale = float(first.square().mean().sqrt())
    epsilon = config.large_epsilon * scale if rule == "adam_large_epsilon" else None
    rate = size / first_step_size(rule, begin.model, first, epsilon=epsilon)
    found: dict[str, dict[str, Any]] = {}
    same: dict[str, Tensor] = {}
    change = largest = begin.weights
    for storage in STORAGES:
        trace = _Trace(begin.weights)
        model = begin.trained(_builder(rule, rate, epsilon, storage, begin.seed), steps, watch=trace)
        base = stored(begin.weights, stored_dtype(storage))
        rules = unchanged(base, flat_parameters(model))
        same[storage] = rules["exact"]
        found[storage] = _row(begin, model, rules)
        if storage == "fp32":
            change, largest = flat_parameters(model) - base, trace.largest
    found["predicted"] = _predicted(config, begin, change, largest, same)
    return found


def _builder(
    rule: Rule, rate: float, epsilon: float | None, storage: Storage, seed: int
) -> Callable[[nn.Module], StoredWeights]:
    """The optimiser of a run."""

    def build(model: nn.Module) -> StoredWeights:
        generator = torch.Generator().manual_seed(9000 + seed)
        return StoredWeights(make_rule(rule, model, rate, epsilon=epsilon), storage, generator)

    return build


class _Trace:
    """The largest step of every weight along a run, with its sign."""

    def __init__(self, start: Tensor) -> None:
        self.last, self.largest = start.clone(), torch.zeros_like(start)

    def __call__(self, model: nn.Module) -> None:
        now = flat_parameters(model)
        step = now - self.last
        self.largest = torch.where(step.abs() > self.largest.abs(), step, self.largest)
        self.last = now


def _row(begin: Start, model: nn.Module, rules: dict[str, Tensor]) -> dict[str, Any]:
    """What is kept of one run."""
    size, exact = begin.weights.abs(), rules["exact"]
    smallest = size <= size.kthvalue(len(size) // 10).values
    changed = ~exact
    return {
        "gain": success(model, begin.puzzle) - success(begin.model, begin.puzzle),
        "moved": float((flat_parameters(model) - begin.weights).square().mean().sqrt()),
        **{name: float(mask.double().mean()) for name, mask in rules.items()},
        "by binade": _by_binade(size, exact),
        # How many of the changes fall on the tenth of the weights that is smallest; NaN where nothing changed.
        "changed among smallest": float((changed & smallest).sum() / changed.sum())
        if bool(changed.any())
        else math.nan,
    }


def _predicted(
    config: Config, begin: Start, change: Tensor, largest: Tensor, same: dict[str, Tensor]
) -> dict[str, Any]:
    """Both gates of bf16, how well each says which weights stay, and the null models."""
    weights, generator = begin.weights, torch.Generator().manual_seed(9500 + begin.seed)
    gates = {"step": _stays(weights, largest), "total": _stays(weights, change)}
    found: dict[str, Any] = {}
    for name, gate in gates.items():
        found[name] = {"exact": float(gate.double().mean()), "by binade": _by_binade(weights.abs(), gate)}
        for storage in ("bf16", "master", "stochastic"):
            found[name][f"agrees with {storage}"] = float((gate == same[storage]).double().mean())
            # Chance: two independent sets of these two sizes.
            a, b = gate.double().mean(), same[storage].double().mean()
            found[name][f"chance with {storage}"] = float(a * b + (1 - a) * (1 - b))
    for name, steps in (("step", largest), ("total", change)):
        mixed, within = [], []
        for _ in range(config.draws):
            random = torch.rand(len(steps), generator=generator, dtype=torch.float64)
            mixed.append(float(_stays(weights, steps[random.argsort()]).double().mean()))
            # Positions sorted by tensor, and within each at random: a permutation inside every tensor.
            order = (random + begin.tensors).argsort()
            within.append(float(_stays(weights, steps[order]).double().mean()))
        found[name] |= {"dealt out": mixed, "dealt out within tensors": within}
    return found


def _stays(weights: Tensor, steps: Tensor) -> Tensor:
    """Weights of bf16 that a step does not change, by the size of half a gap alone."""
    return steps.abs() <= half_gap(weights, steps, torch.bfloat16)


def _binade(size: Tensor) -> Tensor:
    """Number of the bin of every weight."""
    exponent = torch.where(size == 0, BINADES[0], torch.frexp(size).exponent - 1)
    return exponent.clamp(BINADES[0], BINADES[-1]) - BINADES[0]


def _by_binade(size: Tensor, mask: Tensor) -> list[float]:
    """Share of every bin that a mask holds; NaN for an empty bin."""
    bins = _binade(size)
    total = torch.bincount(bins, minlength=len(BINADES))
    inside = torch.bincount(bins[mask], minlength=len(BINADES))
    return (inside.double() / total).tolist()


if __name__ == "__main__":
    raise SystemExit(record_command(resumed(run, FULL, NAME), FULL, SMOKE))
