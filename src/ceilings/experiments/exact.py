"""How tight the ceilings of small decoders are, every response enumerated (claims ``thm-ceiling``, ``thm-nested``).

One factor at a time from a centre. Scientific hyperparameters: width, depth, vocabulary, response length, stage of
pretraining, and the kind of reward. Nuisance: the seed, which draws the weights, the teacher, the target and the
null models. Fixed: everything else in `Config`. Nothing is sampled: every number is a finite sum in float64.

A decoder is pretrained on all responses at once, by Adam on the exact cross-entropy to a *teacher*, a random law of
each token given the last. Rewards: *graded* (share of positions that match a target), *binary* (the first token of
the target occurs), *sparse* (the response is the target), *indifferent* (the response begins with one of the two
likeliest first tokens), *shuffled* (the graded values dealt out at random). Beside each stand null models: the same
values dealt out anew among the responses; a reward without preference, isotropic under the policy's law; the score
along a random direction of the parameters; and, for the overlap of top sets, tightness dealt out anew within each
tensor.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.experiments._command import record_command
from ceilings.experiments._rows import append
from ceilings.panel import Panel, top_overlap
from ceilings.policies import Enumeration
from ceilings.prefix_tree import enumeration
from ceilings.results import Record
from ceilings.transformer import TinyTransformer, TransformerConfig

__all__ = [
    "CENTRE", "FACTORS", "FULL", "HELD_OUT", "NAME", "NARROW", "REWARDS", "SMOKE",
    "Cell", "Config", "cells", "pretrained", "rewards", "run",
]  # fmt: skip

NAME: Final = "exact"
REWARDS: Final = ("graded", "binary", "sparse", "indifferent", "shuffled")
FACTORS: Final = ("width", "depth", "vocab_size", "max_len", "steps", "reward")

_EOS: Final = 0
# NOTE the prompt must be a token that no response repeats, see `ceilings.experiments.forced`.
_PROMPT: Final = (_EOS,)


@dataclass(frozen=True)
class Cell:
    """One policy family and one reward.

    Parameters
    ----------
    width, depth, vocab_size, max_len
        Shape of the decoder and of its responses.
    steps
        Steps of pretraining.
    reward
        Kind of reward.
    """

    width: int = 12
    depth: int = 2
    vocab_size: int = 5
    max_len: int = 3
    steps: int = 100
    reward: str = "graded"


CENTRE: Final = Cell()
# Fewer parameters than responses, so that the scores cannot explain every reward.
NARROW: Final = Cell(width=4, depth=1, vocab_size=8)
#: Sizes that no fit sees.
HELD_OUT: Final = {"width": (32, 48), "depth": (6, 8), "vocab_size": (10, 12), "max_len": (5,)}


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One decoder of each cell a seed.
    width, depth, vocab_size, max_len, steps, reward
        Levels of each factor; the others are those of the centre.
    narrow
        Whether the cell with fewer parameters than responses is run too.
    draws
        Draws of each null model.
    heads
        Attention heads.
    mlp_ratio
        Hidden width of the MLP over the width.
    learning_rate
        Of Adam.
    teacher_scale
        Standard deviation of the teacher's logits.
    top_share
        Size of the top sets.
    """

    seeds: tuple[int, ...]
    width: tuple[int, ...] = (4, 8, 12, 16, 24, 32, 48)
    depth: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    vocab_size: tuple[int, ...] = (3, 4, 5, 6, 8, 10, 12)
    max_len: tuple[int, ...] = (1, 2, 3, 4, 5)
    steps: tuple[int, ...] = (0, 10, 30, 100, 300)
    reward: tuple[str, ...] = REWARDS
    narrow: bool = True
    draws: int = 20
    heads: int = 2
    mlp_ratio: int = 2
    learning_rate: float = 0.01
    teacher_scale: float = 1.5
    top_share: float = 0.01


FULL: Final = Config(seeds=tuple(range(6)))
SMOKE: Final = Config(
    seeds=(0,),
    width=(8, 12),
    depth=(1,),
    vocab_size=(4,),
    max_len=(2,),
    steps=(0,),
    reward=REWARDS,
    narrow=False,
)


def cells(config: Config) -> Iterator[tuple[str, str, Cell]]:
    """Every cell with the factor and the level it is filed under; the centre is a level of each factor.

    Parameters
    ----------
    config
        The experiment.

    Yields
    ------
    tuple
        Factor, level, cell.
    """
    for factor in FACTORS:
        for level in getattr(config, factor):
            yield factor, str(level), replace(CENTRE, **{factor: level})
    if config.narrow:
        yield "narrow", "graded", NARROW


def pretrained(cell: Cell, config: Config, seed: int) -> tuple[TinyTransformer, float]:
    """A decoder after the pretraining of its cell.

    Parameters
    ----------
    cell
        Its shape and the number of steps.
    config
        The experiment.
    seed
        Draws the weights and the teacher.

    Returns
    -------
    tuple
        The decoder, and its divergence KL(teacher‖decoder) in nats.
    """
    shape = TransformerConfig(
        cell.vocab_size, cell.width, cell.depth, config.heads, config.mlp_ratio * cell.width
    )
    model = TinyTransformer(shape, seed)
    ids, mass, step = _teacher(cell, config, seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    for _ in range(cell.steps):
        optimiser.zero_grad()
        _divergence(model, ids, mass, step).backward()
        optimiser.step()
    with torch.no_grad():
        return model, float(_divergence(model, ids, mass, step))


def rewards(law: Enumeration, cell: Cell, seed: int) -> dict[str, Tensor]:
    """Draw the rewards of one seed.

    Parameters
    ----------
    law
        The policy, every response enumerated.
    cell
        Its shape.
    seed
        Draws the target and the shuffle.

    Returns
    -------
    dict
        A reward for each name in `REWARDS`.

    Shapes
    ------
    -> (Y,) each.

    Units
    -----
    [R].
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    target = tuple(torch.randint(1, cell.vocab_size, (cell.max_len,), generator=generator).tolist())
    first = torch.zeros(cell.vocab_size, dtype=torch.float64)
    for y, p in zip(law.responses, law.probs, strict=True):
        first[y[0]] += p
    likeliest = first.topk(min(2, cell.vocab_size - 1)).indices.tolist()
    found = {
        "graded": law.rewards(lambda y: sum(a == b for a, b in zip(y, target, strict=False)) / cell.max_len),
        "binary": law.rewards(lambda y: float(target[0] in y)),
        "sparse": law.rewards(lambda y: float(y == target)),
        "indifferent": law.rewards(lambda y: float(y[0] in likeliest)),
    }
    order = torch.randperm(len(law.probs), generator=generator)
    return {**found, "shuffled": found["graded"][order]}


def run(config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Record:
    """Measure every cell at every seed.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.

    Returns
    -------
    Record
        Leaves are ``factor/level/policy/NAME``, ``factor/level/reward/NAME`` and, with one entry a draw,
        ``factor/level/NULL/NAME``.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        done: dict[Cell, dict[str, dict[str, Any]]] = {}
        for factor, level, cell in cells(config):
            if cell not in done:
                done[cell] = _measure(cell, config, seed)
            for part, row in done[cell].items():
                append(values, row, factor, level, part)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


def _teacher(cell: Cell, config: Config, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that hold every open prefix, the probability of each, and the log law of a token given the last."""
    generator = torch.Generator().manual_seed(2000 + seed)
    logits = torch.randn(cell.vocab_size, cell.vocab_size, generator=generator, dtype=torch.float64)
    step = (config.teacher_scale * logits).log_softmax(-1)
    rows = list(itertools.product(range(1, cell.vocab_size), repeat=cell.max_len - 1))
    ids = torch.tensor([_PROMPT + row for row in rows])
    mass = torch.cat([torch.zeros(len(rows), 1), step[ids[:, :-1], ids[:, 1:]].cumsum(1)], dim=1).exp()
    counts = torch.tensor(
        [[all(token == 1 for token in row[t:]) for t in range(cell.max_len)] for row in rows]
    )
    return ids, mass * counts, step


def _divergence(model: TinyTransformer, ids: Tensor, mass: Tensor, step: Tensor) -> Tensor:
    """KL(teacher‖decoder) over whole responses, differentiable: the sum over prefixes of that over the next token."""
    teacher = step[ids]
    return (mass[..., None] * teacher.exp() * (teacher - model(ids).log_softmax(-1))).sum()


def _measure(cell: Cell, config: Config, seed: int) -> dict[str, dict[str, Any]]:
    """Collect what one cell shows at one seed: of the policy, of its reward, and of the null models."""
    model, divergence = pretrained(cell, config, seed)
    law = enumeration(model, _PROMPT, cell.max_len, _EOS)
    panel, reward = Panel(law), rewards(law, cell, seed)[cell.reward]
    generator = torch.Generator().manual_seed(3000 + seed)
    shape = (config.draws, len(law.probs))
    order = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(1)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    along = torch.randn(config.draws, int(panel.varies.sum()), generator=generator, dtype=torch.float64)
    policy = {
        "parameters": int(panel.varies.sum()),
        "responses": len(law.probs),
        "rank": panel.directions(reward[None]).shape[1],
        "forced_rms": float(panel.forced_rms()),
        "entropy": float(-(law.probs @ law.probs.log())),
        "divergence": divergence,
    }
    nulls = {
        "dealt out": reward[order],
        "no preference": noise / law.probs.sqrt(),
        "along a direction": panel.along(along),
    }
    found: dict[str, dict[str, Any]] = {"policy": policy, "reward": _reward_row(panel, reward, config)}
    for name, draws in nulls.items():
        found[name] = {key: _short(value) for key, value in _statistics(panel, draws, config).items()}
    found["within tensors"] = {"overlap": _short(_tensor_null(model, panel, reward, config, generator))}
    return found


def _statistics(panel: Panel, draws: Tensor, config: Config) -> dict[str, Tensor]:
    """Statistics that a result and its null models share, one entry a reward."""
    gradient, ceiling, nested = panel.gradient(draws).abs(), panel.ceiling(draws), panel.nested(draws)
    ratio, along = gradient / ceiling, panel.directions(draws)
    top = max(1, round(along.shape[1] / 10))
    return {
        "rms": ratio.square().mean(1).sqrt(),
        "median": ratio.median(1).values,
        "removed": (ceiling - nested).sum(1) / (ceiling - gradient).sum(1),
        "nested": (nested / ceiling).median(1).values,
        "explained": along.sum(1),
        "explained by a tenth": along[:, :top].sum(1),
        "overlap": top_overlap(gradient, ceiling, config.top_share),
    }


def _reward_row(panel: Panel, reward: Tensor, config: Config) -> dict[str, Any]:
    """Collect what the reward itself shows, its distribution of tightness included."""
    row = {name: float(value) for name, value in _statistics(panel, reward[None], config).items()}
    ratio = (panel.gradient(reward[None]).abs() / panel.ceiling(reward[None]))[0]
    shares = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0], dtype=torch.float64)
    return {**row, "quantiles": ratio.quantile(shares), "spread": float(panel.spread(reward[None]))}


def _tensor_null(
    model: TinyTransformer, panel: Panel, reward: Tensor, config: Config, generator: torch.Generator
) -> Tensor:
    """Overlap of top sets when each tensor keeps its values of tightness, but not their places."""
    sizes = [p.numel() for p in model.parameters()]
    tensor = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[panel.varies]
    ceiling = panel.ceiling(reward[None])
    ratio = panel.gradient(reward[None]).abs() / ceiling
    random = torch.rand(config.draws, len(tensor), generator=generator, dtype=torch.float64)
    order = (random + tensor).argsort(1)  # a permutation within each tensor
    return top_overlap(ratio[0][order] * ceiling, ceiling.expand(config.draws, -1), config.top_share)


def _short(draws: Tensor) -> list[float]:
    """Null models to six digits: their spread is what counts."""
    return [float(f"{x:.6g}") for x in draws.tolist()]


if __name__ == "__main__":
    raise SystemExit(record_command(run, FULL, SMOKE))
