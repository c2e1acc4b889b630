"""Ten families, seven algorithms and four more methods: how much of the weights is unchanged, and do seeds agree where?

The questions of a published study of ten pairs of large checkpoints, asked of policies with about 20,000 parameters.

Scientific hyperparameters: the architecture family, the method, the storage of the weights. Nuisance: the seed, which
draws prompts, samples and the order of the data, but not the start: two runs of one family share their base, as in
the study. Fixed: all else in `Config`.

Every base reads the same noisy corpus of sorted letters; its weights are then rounded to bf16, as published weights
are, and half of the prompts are trained on. PPO, GRPO, PRIME, rejection sampling and distillation learn from the
present policy's samples; DPO, KTO, ORPO and SimPO from the base's, drawn once; ``near`` is supervised learning on
the base's right answers, ``foreign`` on as many answers in descending order, which the base seldom gives. A run is
AdamW without decay in float64. From its end two changes are measured against the base: the end rounded to fp32, and
the end rounded to bf16. The second is what a trainer with an fp32 master publishes; it is not training in bf16, which
rounds after every step. ``stored`` holds runs that do that.

Tuning, the same for every method: three rates on two families with held-out seeds. The smallest rate at which the mean
gain reaches the threshold of learning on both families is frozen in ``rates``; if none does, the largest. The
smallest, because a change is the sparser the smaller the rate: the choice favours the finding that is replicated.

Null models: runs whose rewards are dealt out anew within each group; and, for every overlap, sets that keep only how
many members they have in all, in every tensor, or among the weights of one tensor and one binade.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.changed_sets import cells_by_binade, change_spectra, overlap_by_cells
from ceilings.experiments._bases import METHODS, NULLS, Base, Recipe
from ceilings.experiments._command import record_command
from ceilings.experiments._resume import Keep, not_kept, resumed
from ceilings.experiments._rows import append
from ceilings.experiments._start import success
from ceilings.experiments.precision import unchanged
from ceilings.families import FAMILIES, embedding_share, inner_matrices
from ceilings.results import Record
from ceilings.storage import spacing, stored
from ceilings.update_rules import flat_parameters

__all__ = ["FULL", "LEARNS", "NAME", "SETS", "SMOKE", "Config", "frozen_rate", "run"]

NAME: Final = "replication"
#: A run that gains less in success probability counts as one that did not learn: the threshold of "precision", kept.
LEARNS: Final = 0.1
#: Sets of weights whose overlaps are measured: changed and unchanged in bf16; as many as the study's runs changed,
#: taken by change over distance to the next number of bf16, which is what a coarser format would show; and the largest
#: changes.
SETS: Final = ("changed", "unchanged", "matched", "top")

#: Outcome of the tuning, in the order of `METHODS`.
RATES: Final = (3e-5, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-3, 1e-4, 1e-4)


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        Runs of every cell.
    families, methods
        Which.
    rates
        Learning rate of each method of `METHODS`: the outcome of the tuning, frozen. A null model has that of its
        method.
    tuning_rates, tuning_families
        Among which rates, and on which families; every seed has a held-out one, larger by 100.
    nulls
        Runs on rewards that are dealt out.
    stored
        Methods that are also run with weights kept in bf16.
    other_families, other_methods
        Which are also trained on the other half of the prompts.
    pairs
        Methods whose changes are compared, the second with another seed.
    density
        Share of the weights in the sets that are as large as those of the study, its Table 4.
    share
        Size of the top sets.
    recipe
        The bases and the length of a run.
    """

    seeds: tuple[int, ...]
    families: tuple[str, ...] = FAMILIES
    methods: tuple[str, ...] = METHODS
    rates: tuple[float, ...] = RATES
    tuning_rates: tuple[float, ...] = (3e-5, 1e-4, 1e-3)
    tuning_families: tuple[str, ...] = ("Llama", "GPT2")
    nulls: tuple[str, ...] = NULLS
    stored: tuple[str, ...] = ("grpo", "dpo")
    other_families: tuple[str, ...] = ("Llama", "GPT2", "Falcon")
    other_methods: tuple[str, ...] = ("grpo", "dpo", "near")
    pairs: tuple[tuple[str, str], ...] = (
        ("dpo", "prime"),
        ("grpo", "dpo"),
        ("grpo", "ppo"),
        ("grpo", "near"),
        ("grpo", "foreign"),
        ("grpo", "grpo shuffled"),
    )
    density: float = 0.367
    share: float = 0.01
    recipe: Recipe = field(default_factory=Recipe)


FULL: Final = Config(seeds=(0, 1, 2))
SMOKE: Final = Config(
    seeds=(0, 1, 2),
    families=("Llama",),
    methods=("grpo",),
    tuning_families=(),
    nulls=(),
    stored=(),
    other_families=(),
    pairs=(),
)


def run(
    config: Config, progress: Callable[[Iterable[str]], Iterable[str]] = iter, keep: Keep = not_kept
) -> Record:
    """Train every family's base by every method.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the families.
    keep
        Keeps the values of a family, see `ceilings.experiments._resume`.

    Returns
    -------
    Record
        Leaves are ``base/FAMILY/NAME``, ``runs/FAMILY/METHOD/NAME``, ``runs/FAMILY/METHOD/STORAGE/NAME``,
        ``runs/FAMILY/METHOD/seeds/SET``, ``stored/FAMILY/METHOD/NAME``, ``data/FAMILY/METHOD/SET``,
        ``pairs/FAMILY/FIRST, SECOND/SET`` and ``tuning/FAMILY/METHOD/RATE/NAME``. A leaf of a set holds, for every
        seed and the next one, the share of the first's members that the second has, and what chance gives
        by the number of members, per tensor, and per tensor and binade.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for family in progress(config.families):
        _merge(values, keep(f"family-{family}", partial(_family, config, family)))
    for family in config.tuning_families:
        _merge(values, {"tuning": {family: keep(f"tuning-{family}", partial(_tuning, config, family))}})
    return Record.of_run(
        config,
        values,
        time.perf_counter() - start,
        name=NAME,
        dtype=torch.float64,
        packages=("transformers",),
    )


def frozen_rate(gains: Mapping[str, Mapping[float, float]]) -> float:
    """The rate that a method gets.

    Parameters
    ----------
    gains
        Mean gain by family and rate.

    Returns
    -------
    float
        The smallest at which every family learns, or the largest if at none.
    """
    rates = sorted(next(iter(gains.values())))
    return next((r for r in rates if all(found[r] >= LEARNS for found in gains.values())), rates[-1])


def _merge(values: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add leaves to a tree that has others."""
    for key, value in found.items():
        if isinstance(value, Mapping):
            _merge(values.setdefault(key, {}), value)
        else:
            values[key] = value


def _family(config: Config, family: str) -> dict[str, Any]:
    """Everything of one family but the tuning."""
    base = Base(family, config.recipe)
    values: dict[str, Any] = {}
    changes: dict[str, list[Tensor]] = {}
    for method in (*config.methods, *config.nulls):
        models = [base.trained(method, _rate(config, method), seed) for seed in config.seeds]
        for model in models:
            append(values, _row(base, method, model), "runs", family, method)
        changes[method] = [flat_parameters(model) - base.weights for model in models]
        sets = _overlaps(config, base, changes[method], changes[method])
        _merge(values, {"runs": {family: {method: {"seeds": sets}}}})
    known = _of_base(base)
    for seed in config.seeds:
        append(values, known, "base", family)
        for method in config.stored:
            model = base.trained_in_bf16(method, _rate(config, method), seed)
            append(values, _row_in_bf16(base, method, model), "stored", family, method)
    for method in config.other_methods if family in config.other_families else ():
        others = [base.trained(method, _rate(config, method), seed, half=1) for seed in config.seeds]
        moved = [flat_parameters(model) - base.weights for model in others]
        sets = _overlaps(config, base, changes[method], moved)
        gains = [base.gain(method, model, half=1) for model in others]
        _merge(values, {"data": {family: {method: sets | {"gain": gains}}}})
    for first, second in config.pairs:
        sets = _overlaps(config, base, changes[first], changes[second])
        _merge(values, {"pairs": {family: {f"{first}, {second}": sets}}})
    return values


def _rate(config: Config, method: str) -> float:
    """Learning rate of a method or of a null model."""
    return config.rates[METHODS.index(method.removesuffix(" shuffled"))]


def _of_base(base: Base) -> dict[str, Any]:
    """What is known of a base; the same for every seed."""
    size = base.weights.abs()
    return {
        "parameters": len(size),
        "embedding share": embedding_share(base.model),
        "success": success(base.model, base.halves[0]),
        "median": float(size.median()),
        "surprise": {method: base.surprise(method) for method in ("near", "foreign")},
    }


def _row(base: Base, method: str, model: nn.Module) -> dict[str, Any]:
    """What is kept of one run."""
    end = flat_parameters(model)
    found: dict[str, Any] = {
        "gain": base.gain(method, model),
        "moved": float((end - base.weights).square().mean().sqrt()),
    }
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        kept = stored(end, dtype)
        rules = {rule: float(mask.double().mean()) for rule, mask in unchanged(base.weights, kept).items()}
        found[name] = rules | change_spectra(_matrices(base, kept - base.weights))
        found[name]["exact in vectors"] = _exact_in_vectors(base, kept)
    return found


def _row_in_bf16(base: Base, method: str, model: nn.Module) -> dict[str, Any]:
    """What is kept of a run whose weights lived in bf16."""
    rules = unchanged(base.weights, flat_parameters(model))
    return {"gain": base.gain(method, model)} | {
        rule: float(mask.double().mean()) for rule, mask in rules.items()
    }


def _matrices(base: Base, change: Tensor) -> list[Tensor]:
    """The parts of a flat change that are matrices inside the layers."""
    wanted = set(inner_matrices(base.model))
    named = list(base.model.named_parameters())
    parts = change.split([p.numel() for _, p in named])
    return [part.view_as(p) for part, (name, p) in zip(parts, named, strict=True) if name in wanted]


def _exact_in_vectors(base: Base, kept: Tensor) -> float:
    """Share unchanged among norms and biases."""
    vectors = torch.tensor([p.ndim == 1 for p in base.model.parameters()])[base.tensors]
    return float((kept == base.weights)[vectors].double().mean())


def _sets(config: Config, base: Base, change: Tensor) -> dict[str, Tensor]:
    """Masks of one run, by the names of `SETS`."""
    same = unchanged(base.weights, stored(base.weights + change, torch.bfloat16))["exact"]
    steps = change.abs() / spacing(base.weights, torch.bfloat16)
    masks = (~same, same, _largest(steps, config.density), _largest(change.abs(), config.share))
    return dict(zip(SETS, masks, strict=True))


def _largest(values: Tensor, share: float) -> Tensor:
    """Mask of the largest entries."""
    mask = torch.zeros(len(values), dtype=torch.bool)
    mask[values.topk(round(share * len(values))).indices] = True
    return mask


def _overlaps(
    config: Config, base: Base, first: list[Tensor], second: list[Tensor]
) -> dict[str, list[list[float]]]:
    """Overlap of every seed's sets of the first with the next seed's of the second, and what chance gives."""
    everything = torch.zeros_like(base.tensors)
    cells = (everything, base.tensors, cells_by_binade(base.weights, base.tensors))
    ours, theirs = ([_sets(config, base, change) for change in changes] for changes in (first, second))
    following = [*theirs[1:], theirs[0]]
    found: dict[str, list[list[float]]] = {name: [] for name in SETS}
    for (a, b), name in itertools.product(zip(ours, following, strict=True), SETS):
        shares = [overlap_by_cells(a[name], b[name], cell) for cell in cells]
        found[name].append([shares[0][0], *(chance for _, chance in shares)])
    return found


def _tuning(config: Config, family: str) -> dict[str, Any]:
    """Gain and share unchanged in bf16 of every method at every rate, by seeds that do nothing else."""
    base = Base(family, config.recipe)
    found: dict[str, Any] = {}
    for method, rate, seed in itertools.product(config.methods, config.tuning_rates, config.seeds):
        model = base.trained(method, rate, 100 + seed)
        same = unchanged(base.weights, stored(flat_parameters(model), torch.bfloat16))["exact"]
        row = {"gain": base.gain(method, model), "bf16 exact": float(same.double().mean())}
        append(found, row, method, f"{rate:g}")
    return found


if __name__ == "__main__":
    raise SystemExit(record_command(resumed(run, FULL, NAME), FULL, SMOKE))
