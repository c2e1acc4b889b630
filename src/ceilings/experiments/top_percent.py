"""What an overlap of the largest changes with the highest ceilings needs: rule, storage, reward, and heavy tails.

Scientific hyperparameters: the rule of the update, the storage of the weights, whether rewards mean anything, and how
heavy the tail of the ceilings is. Nuisance: the seed, which draws the weights, the corpus, the prompts and every
sample. Fixed: everything else in `Config`.

The decoder, its corpus and its reward are those of `ceilings.experiments.optimisers`, and so is the size of the first
step of every rule, which that experiment tuned; here nothing is tuned. The tail is set by writing the same model in
other coordinates, see `ceilings.rescaling`: the ceilings are raised to a power. Rules step, and weights are stored, in
these coordinates; the size of the first step is that in the model's own, so that it is the same at every power.

Every run is crossed: rule by storage by power by reward. One factor at a time leave the centre: the size of the first
step, in narrow storages; and the shape of the decoder. Where the model's own coordinates are used, every run is also
read in each way that a report might have meant: ceilings from other estimates of the Fisher information, changes of
files or of what the optimiser kept, relative to the weight, within every tensor, and beside controls.

Null models: runs whose rewards are dealt out anew within each group at every step; sets drawn at random with as many
members in every tensor; and what independent noise of one law gives for these very ceilings, by integration.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.batches import Batch, token_laws, token_log_probs
from ceilings.experiments._command import record_command
from ceilings.experiments._resume import Keep, not_kept, resumed
from ceilings.experiments._rows import append
from ceilings.experiments._start import Shape, Start, success
from ceilings.prefix_tree import enumeration
from ceilings.puzzles import END
from ceilings.rescaling import RescaledSteps, power_scales
from ceilings.results import Record
from ceilings.storage import STORAGES, Storage, StoredWeights, stored
from ceilings.tied_overlaps import overlap_interval, random_overlaps
from ceilings.top_overlap import product_overlap
from ceilings.top_readings import overlap_within_tensors, relative_change, tied_at_cut
from ceilings.update_rules import RULES, Rule, flat_parameters, load_flat, make_rule

__all__ = ["ESTIMATES", "FULL", "NAME", "SHAPES", "SMOKE", "Config", "run"]

NAME: Final = "top_percent"
#: What may have stood for the ceiling in a report, beside the exact one.
ESTIMATES: Final = ("batch squares", "answers", "tokens", "sampled sequences", "sampled tokens")
#: Other decoders, each one step away from the centre.
SHAPES: Final = {
    "width 16": Shape(width=16),
    "width 64": Shape(width=64),
    "depth 2": Shape(depth=2),
    "depth 3": Shape(depth=3),
}


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One start a seed.
    rules
        Rules of the update that are crossed with all else.
    first_steps
        Size of the first step of every rule of the full run (root mean square, in the model's own coordinates).
    storages
        Storages of the weights.
    powers
        To which the ceilings are raised; 1 is the model as it is.
    sizes
        Sizes of the first step of the sweep.
    shapes
        Which of `SHAPES`.
    shuffles
        Runs a cell whose rewards are dealt out.
    steps
        Batches of a run.
    batches
        Batches whose squared gradients are averaged.
    draws
        Draws of the null model that keeps the counts of every tensor.
    share
        Size of the top sets.
    large_epsilon
        ε of the rule of that name, over the root mean square of the first batch's gradient.
    shape
        The centre.
    """

    seeds: tuple[int, ...]
    rules: tuple[Rule, ...] = ("sgd", "momentum", "adam_large_epsilon", "adam", "sign")
    first_steps: tuple[float, ...] = (1e-4, 1e-4, 5e-4, 2.5e-3, 2.5e-3)
    storages: tuple[Storage, ...] = ("fp32", "bf16", "master")
    powers: tuple[float, ...] = (0.0, 0.5, 0.75, 1.0, 1.5, 2.0)
    sizes: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3)
    shapes: tuple[str, ...] = tuple(SHAPES)
    shuffles: int = 1
    steps: int = 40
    batches: int = 16
    draws: int = 20
    share: float = 0.01
    large_epsilon: float = 10.0
    shape: Shape = field(default_factory=Shape)


FULL: Final = Config(seeds=(0, 1, 2))
SMOKE: Final = Config(
    seeds=(0,),
    rules=("sgd", "adam"),
    first_steps=(1e-4, 2.5e-3),
    storages=("fp32", "bf16"),
    powers=(1.0,),
    sizes=(),
    shapes=(),
    shuffles=0,
)


def run(
    config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter, keep: Keep = not_kept
) -> Record:
    """Train from every seed's start, in every cell.

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
        Leaves are ``start/NAME``, ``tail/POWER/NAME``, ``RULE/STORAGE/POWER/NAME`` (of ``noise`` below them one entry
        a run), ``size/RULE/STORAGE/SIZE/NAME`` and ``shape/NAME/...``. An overlap is the least and the greatest value.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        begin = _begin(config.shape, seed)
        known = _Known(begin, config)
        append(values, keep(f"{seed}-start", partial(_start, known)), "start")
        for power in config.powers:
            append(values, keep(f"{seed}-tail-{power:g}", partial(_tail, known, power)), "tail", f"{power:g}")
            for rule, size in zip(config.rules, config.first_steps, strict=True):
                for storage in config.storages:
                    cell = partial(_cell, known, rule, storage, power, size)
                    found = keep(f"{seed}-{rule}-{storage}-{power:g}", cell)
                    append(values, found, rule, storage, f"{power:g}")
        for rule in ("sgd", "adam"):
            for storage in ("bf16", "master"):
                for size in config.sizes:
                    step = partial(_step, known, rule, storage, size)
                    found = keep(f"{seed}-{rule}-{storage}-size-{size:g}", step)
                    append(values, found, "size", rule, storage, f"{size:g}")
        for name in config.shapes:
            append(values, keep(f"{seed}-{name}", partial(_other, config, name, seed)), "shape", name)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


def _begin(shape: Shape, seed: int) -> Start:
    """The start of a seed, its weights numbers of bf16."""
    begin = Start(shape, seed)
    load_flat(begin.model, stored(begin.weights, torch.bfloat16))
    return begin


class _Known:
    """What is known before a run, in the model's own coordinates."""

    def __init__(self, begin: Start, config: Config) -> None:
        self.begin, self.config = begin, config
        moments = begin.moments(begin.puzzle)
        self.ceiling, self.tightness = moments.ceiling, moments.tightness
        self.first = begin.first_gradient()
        self.before = success(begin.model, begin.puzzle)
        self._estimates: dict[str, Tensor] = {}

    @property
    def estimates(self) -> dict[str, Tensor]:
        """Other numbers that may have stood for the ceiling, each up to a factor; made once."""
        if not self._estimates:
            values = (_batch_squares(self.begin, self.config.batches), *_squares(self.begin))
            self._estimates = {n: v.sqrt() for n, v in zip(ESTIMATES, values, strict=True)}
        return self._estimates


def _start(known: _Known) -> dict[str, Any]:
    """The model at the start, and how far the estimates are from the exact ceilings."""
    share, ceiling = known.config.share, known.ceiling
    return {
        "parameters": len(ceiling),
        "success": known.before,
        "estimates": {
            name: overlap_interval(value, ceiling, share) for name, value in known.estimates.items()
        },
        "weight": overlap_interval(known.begin.weights.abs(), ceiling, share),
    }


def _tail(known: _Known, power: float) -> dict[str, Any]:
    """The ceilings in the coordinates of a power, and what noise of one law gives there."""
    ceiling = power_scales(known.ceiling, power) * known.ceiling
    return _spread(ceiling, known.config.share) | {
        # The exact gradient, if which parameter is how tight were dealt out anew.
        "tightness": product_overlap(ceiling, _survival(known.tightness), known.config.share)
    }


def _spread(ceiling: Tensor, share: float) -> dict[str, Any]:
    """How heavy a tail is."""
    squares = ceiling.square().sort(descending=True).values
    return {
        "spread": float(ceiling.log().std()),
        "top of fisher": float(squares[: max(1, round(share * len(squares)))].sum() / squares.sum()),
        "noise": product_overlap(ceiling, share=share),
    }


def _survival(sample: Tensor) -> Callable[[Tensor], Tensor]:
    """Share of a sample that exceeds a level, linear between its members."""
    ordered = torch.cat([torch.zeros(1, dtype=sample.dtype), sample.sort().values])
    count = len(sample)

    def survival(levels: Tensor) -> Tensor:
        right = torch.searchsorted(ordered, levels).clamp(1, count)
        low, high = ordered[right - 1], ordered[right]
        part = ((levels - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
        return (1 - (right - 1 + part) / count).clamp(0, 1)

    return survival


def _cell(known: _Known, rule: Rule, storage: Storage, power: float, size: float) -> dict[str, Any]:
    """One rule in one storage and one set of coordinates: a run that may learn, and runs on noise."""
    begin, config = known.begin, known.config
    scales = power_scales(known.ceiling, power)
    go = partial(_trained, known, rule, storage, scales, size)
    found, change = _read(known, scales, storage, *go())
    place = 10 * RULES.index(rule) + STORAGES.index(storage)
    generator = torch.Generator().manual_seed(8000 + 1000 * begin.seed + place)
    found["chance"] = random_overlaps(
        change, scales * known.ceiling, begin.tensors, config.share, config.draws, generator
    ).tolist()
    noise: dict[str, Any] = {}
    for number in range(config.shuffles):
        append(noise, _read(known, scales, storage, *go(number))[0])
    if noise:
        found["noise"] = noise
    return found


def _step(known: _Known, rule: Rule, storage: Storage, size: float) -> dict[str, Any]:
    """One size of the first step: overlap, ties and changes."""
    ones = torch.ones_like(known.ceiling)
    model, files, kept = _trained(known, rule, storage, ones, size)
    of_files, of_kept = (files - known.begin.weights).abs(), (kept - known.begin.weights).abs()
    return {
        "gain": success(model, known.begin.puzzle) - known.before,
        "kept": overlap_interval(of_kept, known.ceiling, known.config.share),
        **_row(of_files, known.ceiling, known.config.share),
    }


def _other(config: Config, name: str, seed: int) -> dict[str, Any]:
    """Another decoder as it is, in fp32, by SGD and by Adam."""
    known = _Known(_begin(SHAPES[name], seed), config)
    ones = torch.ones_like(known.ceiling)
    found: dict[str, Any] = _spread(known.ceiling, config.share) | {"parameters": len(ones)}
    for rule, size in zip(config.rules, config.first_steps, strict=True):
        if rule in ("sgd", "adam"):
            for kind, shuffle in (("learning", None), ("noise", 0)):
                model, _, kept = _trained(known, rule, "fp32", ones, size, shuffle)
                row = _row((kept - known.begin.weights).abs(), known.ceiling, config.share)
                gain = success(model, known.begin.puzzle) - known.before
                found.setdefault(rule, {})[kind] = row | {"gain": gain}
    return found


def _row(change: Tensor, ceiling: Tensor, share: float) -> dict[str, Any]:
    """Overlap of changes with ceilings, how open it is, and how many changed."""
    return {
        "overlap": overlap_interval(change, ceiling, share),
        # As though the differences themselves were stored: what fp32's rounding alone tells apart ties again.
        "rounded": overlap_interval(stored(change, torch.bfloat16), ceiling, share),
        "tied": tied_at_cut(change, share),
        "changed": float((change > 0).double().mean()),
    }


def _read(
    known: _Known, scales: Tensor, storage: Storage, model: nn.Module, files: Tensor, kept: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """What is kept of one run, and its changes: those of bf16 files unless the storage is fp32."""
    share, ceiling = known.config.share, scales * known.ceiling
    start = known.begin.weights / scales
    of_files, of_kept = (files - start).abs(), (kept - start).abs()
    change, other = (of_kept, of_files) if storage == "fp32" else (of_files, of_kept)
    found = _row(change, ceiling, share)
    found["gain"] = success(model, known.begin.puzzle) - known.before
    found["otherwise stored"] = overlap_interval(other, ceiling, share)
    if bool((scales == 1).all()):
        found["reading"] = {
            **{n: overlap_interval(change, value, share) for n, value in known.estimates.items()},
            "relative": overlap_interval(relative_change(change, start), ceiling, share),
            "within tensors": overlap_within_tensors(change, ceiling, known.begin.tensors, share),
            "weight": overlap_interval(change, start.abs(), share),
        }
    return found, change


def _trained(
    known: _Known, rule: Rule, storage: Storage, scales: Tensor, size: float, shuffle: int | None = None
) -> tuple[nn.Module, Tensor, Tensor]:
    """A run: the model, and its weights in these coordinates, as a bf16 file and as the optimiser kept them."""
    begin, config = known.begin, known.config
    epsilon = None
    if rule == "adam_large_epsilon":
        epsilon = config.large_epsilon * float((scales * known.first).square().mean().sqrt())
    rate = size / _first_step(known, rule, scales, epsilon)
    built: list[StoredWeights] = []

    def build(inner: nn.Module) -> StoredWeights:
        generator = torch.Generator().manual_seed(9000 + begin.seed)
        built.append(StoredWeights(make_rule(rule, inner, rate, epsilon=epsilon), storage, generator))
        return built[-1]

    model = begin.trained(lambda copied: RescaledSteps(copied, scales, build), config.steps, shuffle=shuffle)
    kept = torch.cat([w.flatten() for w in built[-1].kept])
    return model, stored(kept, torch.bfloat16), kept


def _first_step(known: _Known, rule: Rule, scales: Tensor, epsilon: float | None) -> float:
    """Root mean square of the first step at rate 1, in the model's own coordinates."""
    probe = copy.deepcopy(known.begin.model)
    stepper = RescaledSteps(probe, scales, lambda inner: make_rule(rule, inner, 1.0, epsilon=epsilon))
    sizes = [p.numel() for p in probe.parameters()]
    for parameter, gradient in zip(probe.parameters(), known.first.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter).clone()
    stepper.step()
    return float((flat_parameters(probe) - known.begin.weights).square().mean().sqrt())


def _batch_squares(begin: Start, batches: int) -> Tensor:
    """Mean square of the gradients of so many batches, as an optimiser's second moment has it."""
    model, source, total = copy.deepcopy(begin.model), begin.source(), torch.zeros_like(begin.weights)
    generator = begin.generator(50)
    for _ in range(batches):
        rollouts = source(model, generator)
        laws, mask = token_laws(model, rollouts)
        log_probs = token_log_probs(laws, rollouts)
        loss = begin.method.loss(Batch(rollouts, model, model, mask, laws, log_probs, log_probs.detach()))
        if loss is not None:
            found = torch.autograd.grad(loss, list(model.parameters()))
            total += torch.cat([g.flatten() for g in found]).square()
    return total / batches


def _squares(begin: Start) -> tuple[Tensor, ...]:
    """Squared scores of the right answers; of tokens, each response's divided by its length; of one batch, twice."""
    puzzle, shape = begin.puzzle, begin.shape
    generator = torch.Generator().manual_seed(7000 + begin.seed)
    drawn = torch.randperm(len(puzzle.prompts), generator=generator)[: shape.prompts].tolist()
    answers, tokens, sequences, positions = (torch.zeros_like(begin.weights) for _ in range(4))
    for row, prompt in enumerate(puzzle.prompts):
        law = enumeration(begin.model, prompt, puzzle.max_new_tokens, END)
        answers += law.scores[law.responses.index(tuple(puzzle.answers[row]))].square()
        tokens += torch.einsum("y,ytd->d", law.probs / law.lengths, law.token_scores.square())
        if row in drawn:
            sample = law.probs.multinomial(shape.samples, replacement=True, generator=generator)
            sequences += law.scores[sample].square().sum(0)
            positions += law.token_scores[sample].square().sum((0, 1))
    return answers, tokens, sequences, positions


if __name__ == "__main__":
    raise SystemExit(record_command(resumed(run, FULL, NAME), FULL, SMOKE))
