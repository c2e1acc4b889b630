"""Does each of the thirteen methods learn, and does the loop not learn by itself?

Scientific hyperparameter: the method. Nuisance: the seed, which draws the weights, the corpora and every sample. Fixed:
everything else in `Config`, the learning rate included: nothing is tuned, for any method. So a curve says that a method
learns here, not which method is better; and they do not see the same: ``supervised`` reads right answers and
``distillation`` asks a teacher that knows them.

A decoder reads a corpus of sorted letters of which half are replaced at random, and is then trained by each method from
that state. Every method but ``supervised`` learns from the present policy's own samples; the preference methods pair
the best and the worst of each group. The null model ``shuffled`` is RLOO with the rewards dealt out anew within each
group: what it gains, the loop gains without a signal.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ceilings.experiments._command import record_command
from ceilings.experiments._rows import append
from ceilings.methods import METHODS, make_method
from ceilings.puzzles import Puzzle, sorting
from ceilings.results import Record
from ceilings.sources import Source, fixed_data, own_samples
from ceilings.training import History, TrainingConfig, pretrained_decoder, train
from ceilings.transformer import TinyTransformer, TransformerConfig
from ceilings.uncertainty import with_permuted

__all__ = ["FULL", "NAME", "NULL", "SMOKE", "Config", "gains", "run"]

NAME: Final = "methods"
#: The null model.
NULL: Final = "shuffled"


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One start a seed, from which every method is trained.
    methods
        Which methods, the null model included.
    length, letters
        Of the puzzle `ceilings.puzzles.sorting`.
    width, depth, heads
        Shape of the decoder.
    noise, pretrain_steps
        Share of tokens drawn anew in the corpus that the decoder reads first, and batches of 64 answers of it.
    steps, learning_rate
        Batches, and the step of Adam.
    prompts, samples
        Of a batch.
    evaluate_every, evaluation_samples
        Batches between evaluations, which ask every prompt, and responses a prompt.
    """

    seeds: tuple[int, ...]
    methods: tuple[str, ...] = (*METHODS, NULL)
    length: int = 3
    letters: int = 4
    width: int = 24
    depth: int = 1
    heads: int = 4
    noise: float = 0.5
    pretrain_steps: int = 150
    steps: int = 40
    learning_rate: float = 3e-3
    prompts: int = 16
    samples: int = 8
    evaluate_every: int = 5
    evaluation_samples: int = 4


FULL: Final = Config(seeds=(0, 1, 2, 3, 4))
SMOKE: Final = Config(seeds=(0,), methods=("rloo", "dpo"))


def run(config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Record:
    """Train from every seed's start by every method.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.

    Returns
    -------
    Record
        Leaves are ``method/reward``, ``kl`` and ``entropy``, a curve a seed over the batches ``method/step``; and
        ``method/clip_share``, ``gradient_norm`` and ``taught``, means over the batches.
    """
    start = time.perf_counter()
    puzzle = sorting(config.length, config.letters)
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        base, teacher = (_decoder(puzzle, config, seed, noise) for noise in (config.noise, 0.0))
        for name in config.methods:
            history = _trained(name, puzzle, base, teacher, config, seed)
            append(values, _row(history), name)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


def gains(record: Record) -> dict[str, tuple[float, float]]:
    """What every method gained, from the first evaluation to the last.

    Parameters
    ----------
    record
        Of `run`.

    Returns
    -------
    dict
        For each method the mean over the seeds, and the standard error of that mean.

    Raises
    ------
    ValueError
        If there is only one seed.
    """
    if len(record.seeds) < 2:
        raise ValueError("one seed has no standard error: record two or more")
    result = {}
    for name in record.values:
        curves = record.tensor(name, "reward")
        gained = curves[:, -1] - curves[:, 0]
        result[name] = (float(gained.mean()), float(gained.std() / len(gained) ** 0.5))
    return result


def _decoder(puzzle: Puzzle, config: Config, seed: int, noise: float) -> TinyTransformer:
    """Start of a seed, or with noise 0 its teacher."""
    shape = TransformerConfig(
        len(puzzle.words), config.width, config.depth, config.heads, 2 * config.width, init_scale=0.5
    )
    return pretrained_decoder(puzzle, noise=noise, steps=config.pretrain_steps, shape=shape, seed=seed)


def _trained(
    name: str, puzzle: Puzzle, base: TinyTransformer, teacher: TinyTransformer, config: Config, seed: int
) -> History:
    """One run."""
    method = make_method(
        "rloo" if name == NULL else name,
        reference=base,
        teacher=teacher,
        max_length=puzzle.max_new_tokens,
    )
    settings = TrainingConfig(
        config.steps,
        config.learning_rate,
        evaluate_every=config.evaluate_every,
        evaluation_samples=config.evaluation_samples,
        seed=seed,
    )
    return train(
        copy.deepcopy(base), method, _source(name, puzzle, config, seed), puzzle, settings, reference=base
    )


def _source(name: str, puzzle: Puzzle, config: Config, seed: int) -> Source:
    """Whose responses a method learns from."""
    batch = config.prompts * config.samples
    if name == "supervised":
        demonstrations = puzzle.corpus(
            batch * config.steps, torch.Generator().manual_seed(1000 + seed), noise=0.0
        )
        return fixed_data(demonstrations, groups=batch)
    own = own_samples(puzzle, prompts=config.prompts, samples=config.samples)
    if name != NULL:
        return own

    def shuffled(model: torch.nn.Module, generator: torch.Generator) -> Any:
        rollouts = own(model, generator)
        columns, _ = with_permuted(rollouts.rewards.double(), 1, generator, torch.tensor(rollouts.groups))
        return replace(rollouts, rewards=columns[:, 1])

    return shuffled


def _row(history: History) -> dict[str, Any]:
    """What is kept of a run."""
    curves = {name: history.curve(name)[1].tolist() for name in ("reward", "kl", "entropy")}
    count = len(history.steps)
    means = {
        name: sum(float(getattr(step, name)) for step in history.steps) / count
        for name in ("clip_share", "gradient_norm", "taught")
    }
    return {"step": history.curve("reward")[0].tolist(), **curves, **means}


if __name__ == "__main__":
    raise SystemExit(record_command(run, FULL, SMOKE))
