"""What an optimiser leaves of the ceiling: the largest changes of a run against what was known before it.

Scientific hyperparameter: the rule of the update, and ε of Adam. Nuisance: the seed, which draws the weights, the
corpus, the prompts that are trained on and every sample. Fixed: everything else in `Config`.

A decoder reads a noisy corpus of sorted letters and is then trained by group-relative policy gradients (each reward
less the mean of the others of its prompt), a binary reward, on half of the prompts. Everything known beforehand is
exact, every response enumerated: ceiling, tightness, gradient, Adam's mean step, the Fisher information of the other
prompts. Gains are exact too.

Tuning, the same for every rule: three sizes of the first step (root mean square over the parameters). The first seed
is held out and does nothing else; the size with its largest gain is frozen in ``chosen`` and used for the other seeds.
Beside these runs stand *slow* ones, whose first step is so small that the policy stays where it is: the regime of the
theory.

Null models: runs whose rewards are dealt out anew within each group at every step, so that their updates are gradient
noise and nothing else; sets drawn at random with as many members in every tensor; and the ceilings each times a normal
number.
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
from ceilings.tied_overlaps import overlap_interval, random_overlaps
from ceilings.update_rules import RULES, Rule, Stepper, first_step_size, flat_parameters, make_rule

__all__ = ["FULL", "HELD_OUT", "KNOWN", "NAME", "SMOKE", "Config", "run"]

NAME: Final = "optimisers"
#: The seed that tunes.
HELD_OUT: Final = 9
#: What is known before a run, and ranked against its changes.
KNOWN: Final = ("ceiling", "tightness", "mean step", "gradient", "weight", "first batch", "other prompts")

#: Outcome of the tuning, in the order of `RULES`.
CHOSEN: Final = (1e-4, 1e-4, 5e-4, 2.5e-3, 2.5e-3, 2.5e-3, 2.5e-3, 5e-4)


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        `HELD_OUT` comes first, if at all.
    rules
        Which rules.
    first_steps
        Sizes of the first step among which each rule is tuned.
    chosen
        Which of them each rule of `RULES` uses: the outcome of the tuning, frozen.
    slow
        Size of the first step of the slow runs.
    steps
        Batches of a run.
    marks
        Batches after which the changes are ranked.
    shuffles
        Runs a seed and rule whose rewards are dealt out.
    draws
        Draws a seed of the other null models.
    share
        Size of the top sets.
    large_epsilon
        ε of the rule of that name, over the root mean square of the first batch's gradient.
    epsilons
        The same for a sweep of Adam, in slow runs.
    shape
        The puzzle, the decoder, and a batch.
    """

    seeds: tuple[int, ...]
    rules: tuple[Rule, ...] = RULES
    first_steps: tuple[float, ...] = (1e-4, 5e-4, 2.5e-3)
    chosen: tuple[float, ...] = CHOSEN
    slow: float = 1e-5
    steps: int = 40
    marks: tuple[int, ...] = (2, 5, 10, 20, 40)
    shuffles: int = 4
    draws: int = 20
    share: float = 0.01
    large_epsilon: float = 10.0
    epsilons: tuple[float, ...] = (1e-6, 1e-2, 1e-1, 1.0, 1e1)
    shape: Shape = field(default_factory=Shape)


FULL: Final = Config(seeds=(9, 0, 1, 2, 3, 4))
SMOKE: Final = Config(seeds=(0,), rules=("sgd", "adam"), shuffles=0, epsilons=())


def run(
    config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter, keep: Keep = not_kept
) -> Record:
    """Train from every seed's start by every rule.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.
    keep
        Keeps the values of a seed, see `ceilings.experiments._resume`.

    Returns
    -------
    Record
        Leaves are ``start/NAME``, ``start/related/KNOWN``, ``tuning/RULE/SIZE``, ``RULE/NAME``, ``RULE/overlap/KNOWN``
        (least and greatest), ``RULE/chance/KNOWN``, ``RULE/along/KNOWN`` (least and greatest after each mark), the same
        under ``RULE/slow`` and ``RULE/noise`` (of the last, one entry a run), and ``epsilon/NAME``. What the held-out
        seed did not run is NaN.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        append(values, keep(f"seed-{seed}", partial(_measured, config, seed)))
    values = _filled(values, len(config.seeds), held_out=True)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


def _filled(values: dict[str, Any], seeds: int, held_out: bool) -> dict[str, Any]:
    """NaN, in the shape of what the others have, where the held-out seed, or all but it, have nothing."""
    filled: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            filled[key] = _filled(value, seeds, held_out and key != "tuning")
        elif len(value) == seeds:
            filled[key] = value
        else:
            blank = [_blank(value[0])] * (seeds - len(value))
            filled[key] = [*blank, *value] if held_out else [*value, *blank]
    return filled


def _blank(value: Any) -> Any:
    """NaN in the shape of a value."""
    return [_blank(entry) for entry in value] if isinstance(value, list | tuple) else math.nan


def _measured(config: Config, seed: int) -> dict[str, Any]:
    """Everything of one seed; of the held-out one the tuning alone."""
    begin = Start(config.shape, seed)
    first = begin.first_gradient()
    if seed == HELD_OUT:
        return {"tuning": {rule: _tuning(config, begin, first, rule) for rule in config.rules}}
    known, generator = _known(begin, first), torch.Generator().manual_seed(7000 + seed)
    normal = torch.randn(config.draws, len(first), generator=generator, dtype=torch.float64).abs()
    ceiling = known["ceiling"]
    top = ceiling.square().topk(round(config.share * len(first))).values
    found: dict[str, Any] = {
        "start": {
            "success": success(begin.model, begin.puzzle),
            "success of others": success(begin.model, begin.others),
            "parameters": len(first),
            "gradient scale": float(first.square().mean().sqrt()),
            "top of fisher": float(top.sum() / ceiling.square().sum()),
            "heavy tails": [overlap_interval(row * ceiling, ceiling, config.share)[0] for row in normal],
            "related": {
                name: overlap_interval(value, ceiling, config.share) for name, value in known.items()
            },
        }
    }
    for rule in config.rules:
        found[rule] = _rule(config, begin, first, known, rule)
    if config.epsilons:
        found["epsilon"] = _epsilons(config, begin, first, known)
    return found


def _known(begin: Start, first: Tensor) -> dict[str, Tensor]:
    """What is known before a run, by the names of `KNOWN`."""
    moments = begin.moments(begin.puzzle)
    mean_step = moments.mean_step(begin.shape.prompts, begin.shape.samples)
    values = (
        moments.ceiling,
        moments.tightness,
        mean_step,
        moments.gradient.abs(),
        begin.weights.abs(),
        first.abs(),
        begin.moments(begin.others).fisher.sqrt(),
    )
    return dict(zip(KNOWN, values, strict=True))


def _builder(
    config: Config, begin: Start, first: Tensor, rule: Rule, size: float, factor: float | None = None
) -> Callable[[nn.Module], Stepper]:
    """A rule whose first step has a given size; ε in units of the first gradient, if it is not the usual one."""
    if rule == "adam_large_epsilon":
        factor = config.large_epsilon
    epsilon = None if factor is None else factor * float(first.square().mean().sqrt())
    rate = size / first_step_size(rule, begin.model, first, epsilon=epsilon)
    return lambda model: make_rule(rule, model, rate, epsilon=epsilon)


def _tuning(config: Config, begin: Start, first: Tensor, rule: Rule) -> dict[str, float]:
    """Gain of a rule at every size of the first step."""
    before = success(begin.model, begin.puzzle)
    gains = {}
    for size in config.first_steps:
        model = begin.trained(_builder(config, begin, first, rule, size), config.steps)
        gains[f"{size:g}"] = success(model, begin.puzzle) - before
    return gains


def _rule(
    config: Config, begin: Start, first: Tensor, known: dict[str, Tensor], rule: Rule
) -> dict[str, Any]:
    """One rule: a run that learns, a slow one, runs on rewards that mean nothing, and sets drawn at random."""
    place = RULES.index(rule)
    generator = torch.Generator().manual_seed(8000 + 100 * begin.seed + place)
    build = _builder(config, begin, first, rule, config.chosen[place])
    found, change = _ranked(config, begin, known, build)
    found["chance"] = {
        name: random_overlaps(change, value, begin.tensors, config.share, config.draws, generator).tolist()
        for name, value in known.items()
    }
    found["slow"], slow = _ranked(config, begin, known, _builder(config, begin, first, rule, config.slow))
    found["slow"]["chance"] = random_overlaps(
        slow, known["ceiling"], begin.tensors, config.share, config.draws, generator
    ).tolist()
    noise: dict[str, Any] = {}
    for number in range(config.shuffles):
        row, other = _ranked(config, begin, known, build, number)
        append(noise, row | {"run": overlap_interval(change, other, config.share)})
    if noise:
        found["noise"] = noise
    return found


def _ranked(
    config: Config,
    begin: Start,
    known: dict[str, Tensor],
    build: Callable[[nn.Module], Stepper],
    shuffle: int | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """One run: its gain, and its changes ranked against what was known; and the changes."""
    along: dict[str, list[tuple[float, float]]] = {name: [] for name in KNOWN[:3]}
    batches = iter(range(1, config.steps + 1))

    def watch(model: nn.Module) -> None:
        if next(batches) in config.marks:
            for name, ranks in along.items():
                ranks.append(overlap_interval(_moved(begin, model), known[name], config.share))

    model = begin.trained(build, config.steps, shuffle=shuffle, watch=watch)
    change = _moved(begin, model)
    return {
        "gain": success(model, begin.puzzle) - success(begin.model, begin.puzzle),
        "gain of others": success(model, begin.others) - success(begin.model, begin.others),
        "moved": float(change.square().mean().sqrt()),
        "overlap": {name: overlap_interval(change, value, config.share) for name, value in known.items()},
        "along": along,
    }, change


def _epsilons(config: Config, begin: Start, first: Tensor, known: dict[str, Tensor]) -> dict[str, Any]:
    """Slow runs of Adam by ε, each with the same first step."""
    found: dict[str, Any] = {name: [] for name in KNOWN[:3]}
    for factor in config.epsilons:
        build = _builder(config, begin, first, "adam", config.slow, factor)
        change = _moved(begin, begin.trained(build, config.steps))
        for name, ranks in found.items():
            ranks.append(overlap_interval(change, known[name], config.share)[0])
    return found


def _moved(begin: Start, model: nn.Module) -> Tensor:
    """Size of every change."""
    return (flat_parameters(model) - begin.weights).abs()


if __name__ == "__main__":
    raise SystemExit(record_command(resumed(run, FULL, NAME), FULL, SMOKE))
