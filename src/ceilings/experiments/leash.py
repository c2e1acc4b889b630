r"""Does a leash of KL divergence turn the ceiling's ranking round? Changes of a small decoder against √F_ii, signed.

Scientific hyperparameters: the leash (none, the KL divergence from the start, or a diagonal one, ½ Σ F_ii Δ_i²), its
strength, and the rule of the update. Nuisance: the seed. Fixed: all else in `Config`; the start is that of
`ceilings.experiments.optimisers`. Nothing is sampled: reward and KL divergence are exact means over every response to
every prompt that is trained on, so that what is ranked is the objective and not its noise. Rates are not tuned; both
rules learn at theirs without a leash.

*Steps* are computed at the start, to second order: the gradient (ceiling times tightness), the tightness (what Adam
keeps), g_i/F_ii (the best step under a diagonal leash), natural-gradient steps by their damping, and gradient ascent
under a KL leash by its time. *Runs* are real ones.

Null models: rewards that are normal numbers, one a response and prompt, with the variance of the true one; and the
changes dealt out anew within every tensor.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from ceilings.experiments._command import record_command
from ceilings.experiments._laws import Laws
from ceilings.experiments._resume import Keep, not_kept, resumed
from ceilings.experiments._rows import append
from ceilings.experiments._start import Shape, Start
from ceilings.kl_budget import QuadraticLeash
from ceilings.prefix_tree import enumeration
from ceilings.puzzles import END
from ceilings.ranks import rank_correlation, rank_correlation_within
from ceilings.results import Record
from ceilings.update_rules import flat_parameters, make_rule

__all__ = ["CROSSOVER", "FULL", "NAME", "SMOKE", "Config", "run"]

NAME: Final = "leash"
#: Root of e^u = 1 + 2u: under a diagonal leash changes rise with F_ii below u/(β t) and fall above.
CROSSOVER: Final = 1.2564312086261696

Kind = Literal["kl", "diagonal"]
Ruled = Literal["sgd", "adam"]


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One start a seed.
    runs
        Rule, kind and strength of the leash of every run.
    noise
        Those that are run on random rewards too.
    rates
        Of SGD and Adam.
    steps
        Of a run.
    marks
        Steps after which changes are ranked; the last is ``steps``.
    dampings
        Of the natural gradient, as shares of the largest eigenvalue.
    times
        Strength times rate times steps of ascent under a KL leash, in units of the largest eigenvalue's inverse.
    rewards
        Random rewards a seed for the steps; the first of them for the runs.
    draws
        Draws of the changes dealt out.
    shape
        The puzzle, and the decoder.
    """

    seeds: tuple[int, ...]
    runs: tuple[tuple[Ruled, Kind, float], ...] = (
        ("sgd", "kl", 0.0),
        ("sgd", "kl", 0.1),
        ("sgd", "kl", 1.0),
        ("sgd", "diagonal", 10.0),
        ("adam", "kl", 0.0),
        ("adam", "kl", 1.0),
        ("adam", "kl", 10.0),
        ("adam", "diagonal", 10.0),
    )
    noise: tuple[tuple[Ruled, Kind, float], ...] = (
        ("sgd", "kl", 0.0),
        ("sgd", "kl", 1.0),
        ("adam", "kl", 0.0),
        ("adam", "kl", 10.0),
    )
    rates: tuple[float, float] = (0.05, 5e-4)
    steps: int = 120
    marks: tuple[int, ...] = (2, 10, 40, 120)
    dampings: tuple[float, ...] = (1.0, 1e-2, 1e-4, 1e-6, 1e-8)
    times: tuple[float, ...] = (1.0, 1e2, 1e4, 1e6)
    rewards: int = 5
    draws: int = 20
    shape: Shape = field(default_factory=Shape)


FULL: Final = Config(seeds=(0, 1, 2, 3))
SMOKE: Final = Config(seeds=(0,), runs=(("sgd", "kl", 1.0),), noise=(), dampings=(1e-4,), times=())


def run(
    config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter, keep: Keep = not_kept
) -> Record:
    """Rank the steps and the runs of every seed.

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
        Leaves are ``start/NAME``, ``step/NAME/MEASURE`` (with ``noise``, an entry a random reward, for the true one's
        ``all``), ``run/RULE-KIND-STRENGTH/MEASURE`` and the same under ``noise``.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        append(values, keep(f"seed-{seed}", partial(_measured, config, seed)))
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


@dataclass(frozen=True)
class _Bench:
    """What the steps and the runs of a seed share: log-probabilities at the start, and the second order there."""

    begin: Start
    laws: Laws
    first: Tensor
    leash: QuadraticLeash
    diagonal: Tensor


def _measured(config: Config, seed: int) -> dict[str, Any]:
    """Everything of one seed."""
    begin = Start(config.shape, seed)
    laws = Laws(begin.model, begin.puzzle)
    with torch.no_grad():
        first = laws(begin.model)
    rewards = [laws.rewards, *_random_rewards(config, laws.rewards, first.exp(), seed)]
    leash = _quadratic(begin, first.exp(), rewards[0])
    bench = _Bench(begin, laws, first, leash, leash.rows.square().sum(0))
    found: dict[str, Any] = {
        "start": _start(bench, rewards[0]),
        "step": _steps(config, bench, rewards),
        "run": {_name(*case): _run(config, bench, rewards[0], *case) for case in config.runs},
    }
    if config.noise:
        found["noise"] = {_name(*case): _run(config, bench, rewards[1], *case) for case in config.noise}
    return found


def _name(rule: str, kind: str, strength: float) -> str:
    """Name of a run."""
    return f"{rule}-{kind}-{strength:g}"


def _centred(rewards: Tensor, probs: Tensor) -> Tensor:
    """Rewards less their mean at every prompt, flat."""
    return (rewards - (probs * rewards).sum(1, keepdim=True)).flatten()


def _random_rewards(config: Config, rewards: Tensor, probs: Tensor, seed: int) -> list[Tensor]:
    """Normal numbers whose variance within prompts, on average over them, is that of the true rewards."""
    generator = torch.Generator().manual_seed(9700 + seed)
    weights = (probs / len(probs)).flatten()
    wanted = weights @ _centred(rewards, probs).square()
    drawn = torch.randn(config.rewards, *rewards.shape, generator=generator, dtype=torch.float64)
    return [row * (wanted / (weights @ _centred(row, probs).square())).sqrt() for row in drawn]


def _quadratic(begin: Start, probs: Tensor, rewards: Tensor) -> QuadraticLeash:
    """The second-order picture at the start, all prompts together."""
    longest = begin.puzzle.max_new_tokens
    scores = [enumeration(begin.model, prompt, longest, END).scores for prompt in begin.puzzle.prompts]
    return QuadraticLeash(torch.cat(scores), _centred(rewards, probs), (probs / len(probs)).flatten())


def _start(bench: _Bench, rewards: Tensor) -> dict[str, Any]:
    """The start: how much room is redundant, and how far the Fisher information spreads."""
    leash, inside = bench.leash, bench.leash.inside()
    return {
        "success": float((bench.first.exp() * rewards).sum(1).mean()),
        "parameters": len(bench.diagonal),
        "responses": len(leash.values),
        "rank": int((leash.values > 1e-10 * leash.values[-1]).sum()),
        "largest eigenvalue": float(leash.values[-1]),
        "fisher": bench.diagonal.quantile(
            torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
        ).tolist(),
        # 1 = no others can stand in for this parameter, and its joint reach is finite.
        "at least half inside": float((inside >= 0.5).double().mean()),
        "inside": inside.quantile(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist(),
    }


def _steps(config: Config, bench: _Bench, rewards: list[Tensor]) -> dict[str, Any]:
    """The steps at the start, ranked for the true reward and for random ones."""
    leash, diagonal = bench.leash, bench.diagonal
    found: dict[str, Any] = {}
    for number, table in enumerate(rewards):
        leash.aim(_centred(table, bench.first.exp()))
        g = leash.gradient
        steps = {"gradient": g, "tightness": g / diagonal.sqrt(), "diagonal": g / diagonal}
        steps |= {f"damped-{share:g}": leash.damped(share) for share in config.dampings}
        steps |= {f"flow-{t:g}": leash.flow(1.0, t / float(leash.values[-1])) for t in config.times}
        for name, step in steps.items():
            if number == 0:
                found[name] = {**_sign(step, diagonal, bench.begin.tensors), "noise": []}
            else:
                found[name]["noise"].append(rank_correlation(step.abs(), diagonal))
    return found


def _sign(step: Tensor, diagonal: Tensor, tensors: Tensor) -> dict[str, float]:
    """Rank correlation of the sizes of a step with √F_ii, over all parameters and within tensors."""
    return {
        "all": rank_correlation(step.abs(), diagonal),
        "within": rank_correlation_within(step.abs(), diagonal, tensors),
    }


def _run(
    config: Config, bench: _Bench, rewards: Tensor, rule: Ruled, kind: Kind, strength: float
) -> dict[str, Any]:
    """One run, ranked along its way."""
    begin, first, diagonal = bench.begin, bench.first, bench.diagonal
    model, rate = copy.deepcopy(begin.model), config.rates[("sgd", "adam").index(rule)]
    optimiser, change = make_rule(rule, model, rate), torch.zeros_like(begin.weights)
    found: dict[str, Any] = {}
    for step in range(1, config.steps + 1):
        optimiser.zero_grad()
        _objective(bench.laws(model), first, rewards, strength if kind == "kl" else 0.0).neg().backward()
        if kind == "diagonal":
            _pull(model, strength * diagonal * change)
        optimiser.step()
        change = flat_parameters(model) - begin.weights
        if step in config.marks:
            with torch.no_grad():
                now = bench.laws(model)
            kl = float((now.exp() * (now - first)).sum(1).mean())
            append(found, {**_sign(change, diagonal, begin.tensors), "kl": kl})
    found["gain"] = float(((now.exp() - first.exp()) * rewards).sum(1).mean())
    found["dealt out"] = _dealt_out(config, change, diagonal, begin)
    if rule == "sgd":
        bench.leash.aim(_centred(rewards, first.exp()))
        found |= _predicted(bench, change, kind, strength, rate * config.steps)
    return found


def _predicted(bench: _Bench, change: Tensor, kind: Kind, strength: float, duration: float) -> dict[str, Any]:
    """What the second order says of a run of SGD."""
    diagonal = bench.diagonal
    if kind == "kl":
        said = bench.leash.flow(strength, duration)
        sides = {}
    else:
        said = -torch.expm1(-strength * duration * diagonal) / (strength * diagonal) * bench.leash.gradient
        sides = _sides(change, diagonal, CROSSOVER / (strength * duration))
    return {
        "predicted": rank_correlation(said.abs(), diagonal),
        "agreement": rank_correlation(said.abs(), change.abs()),
        **sides,
    }


def _pull(model: nn.Module, pull: Tensor) -> None:
    """Add to the gradient of a model that is to be descended."""
    start = 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += pull[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def _objective(now: Tensor, first: Tensor, rewards: Tensor, strength: float) -> Tensor:
    """Expected reward less β times the KL divergence from the start, mean over the prompts."""
    return (now.exp() * (rewards - strength * (now - first))).sum(1).mean()


def _dealt_out(config: Config, change: Tensor, diagonal: Tensor, begin: Start) -> list[float]:
    """Rank correlations of the changes, dealt out anew within every tensor."""
    generator = torch.Generator().manual_seed(9800 + begin.seed)
    found = []
    for _ in range(config.draws):
        random = torch.rand(len(change), generator=generator, dtype=torch.float64)
        order = (random + begin.tensors).argsort()  # positions by tensor, and within each at random
        found.append(rank_correlation(change[order].abs(), diagonal))
    return found


def _sides(change: Tensor, diagonal: Tensor, where: float) -> dict[str, float]:
    """Rank correlations below and above a Fisher information, and the share of the parameters above."""
    above = diagonal > where
    sides = {"below": ~above, "above": above}
    found = {
        name: rank_correlation(change[mask].abs(), diagonal[mask]) if int(mask.sum()) > 1 else math.nan
        for name, mask in sides.items()
    }
    return {**found, "share above": float(above.double().mean())}


if __name__ == "__main__":
    raise SystemExit(record_command(resumed(run, FULL, NAME), FULL, SMOKE))
