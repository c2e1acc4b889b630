"""Where the runs of the replication begin: one base a family, its data, its teacher, and what a method learns from."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import nn

from ceilings.batches import token_laws, token_log_probs
from ceilings.changed_sets import cells_by_tensor
from ceilings.experiments._start import success
from ceilings.families import family_policy
from ceilings.methods import PREFERENCE, Method, make_method
from ceilings.puzzles import Puzzle, sorting
from ceilings.rollouts import Rollouts
from ceilings.sources import Source, fixed_data, own_samples, sample_puzzle
from ceilings.storage import StoredWeights, stored
from ceilings.training import TrainingConfig, train
from ceilings.uncertainty import with_permuted
from ceilings.update_rules import descend, flat_parameters, load_flat, make_rule

__all__ = ["METHODS", "NULLS", "PAPER", "Base", "Recipe"]

#: The seven of the paper that is replicated.
PAPER: Final = ("ppo", "grpo", "orpo", "kto", "dpo", "simpo", "prime")
#: All methods. ``near`` and ``foreign`` are supervised learning, on the policy's own right answers and on others.
METHODS: Final = (*PAPER, "near", "foreign", "rejection_sampling", "distillation")
#: Runs whose rewards are dealt out anew within each group.
NULLS: Final = ("grpo shuffled", "ppo shuffled")


@dataclass(frozen=True)
class Recipe:
    """How bases are made and how long every run is.

    Parameters
    ----------
    length, letters
        Of the puzzle `ceilings.puzzles.sorting`; half of its prompts are trained on, half are the other data.
    noise, pretrain_steps, pretrain_rate
        Of the corpus that a base reads first, batches of 64 answers, and the step of Adam.
    base_seed
        Draws the weights of every base, its corpus, its data, and which prompts are trained on.
    steps
        Batches of a run.
    prompts, samples
        Of a batch.
    """

    length: int = 3
    letters: int = 4
    noise: float = 0.5
    pretrain_steps: int = 150
    pretrain_rate: float = 3e-3
    base_seed: int = 0
    steps: int = 40
    prompts: int = 8
    samples: int = 8


class Base:
    """The base of one family: all runs start from its weights, which are numbers of bf16.

    Parameters
    ----------
    family
        One of `ceilings.families.FAMILIES`.
    recipe
        How it is made.
    """

    def __init__(self, family: str, recipe: Recipe) -> None:
        self.family, self.recipe = family, recipe
        whole = sorting(recipe.length, recipe.letters)
        generator = torch.Generator().manual_seed(4000 + recipe.base_seed)
        order = torch.randperm(len(whole.prompts), generator=generator).tolist()
        half = len(order) // 2
        #: The prompts that are trained on, and the others.
        self.halves = tuple(_some(whole, rows) for rows in (order[:half], order[half:]))
        self.model = self._read(whole, recipe.noise)
        load_flat(self.model, stored(flat_parameters(self.model), torch.bfloat16))
        self.weights = flat_parameters(self.model)
        self.tensors = cells_by_tensor([p.numel() for p in self.model.parameters()])
        self._whole = whole
        # NOTE what only some methods need is made when the first of them asks.
        self.teacher = cache(lambda: self._read(whole, 0.0))
        self.own = cache(self._own)
        self.demonstrations = cache(self._demonstrations)

    def puzzle(self, method: str, half: int = 0) -> Puzzle:
        """What success means for a method: sorted, but for ``foreign`` the order that its data show."""
        return _descending(self.halves[half]) if method == "foreign" else self.halves[half]

    def gain(self, method: str, model: nn.Module, half: int = 0) -> float:
        """Probability of the right answer, less that of the base; exact, mean over the prompts."""
        puzzle = self.puzzle(method, half)
        return success(model, puzzle) - success(self.model, puzzle)

    def surprise(self, method: str) -> float:
        """Mean -log probability of the demonstrations of a supervised method under the base, in nat."""
        data = self.demonstrations(method, 0)
        with torch.no_grad():
            laws, mask = token_laws(self.model, data)
            return -float((token_log_probs(laws, data) * mask).sum(1).mean())

    def trained(self, method: str, rate: float, seed: int, half: int = 0) -> nn.Module:
        """A copy of the base after a run in float64 by AdamW without decay, which is Adam."""
        model, settings = copy.deepcopy(self.model), self.recipe
        length = TrainingConfig(
            settings.steps, rate, evaluate_every=settings.steps, evaluation_samples=1, seed=seed
        )
        train(
            model,
            self._method(method),
            self._source(method, seed, half),
            self.puzzle(method, half),
            length,
            reference=self.model,
        )
        return model

    def trained_in_bf16(self, method: str, rate: float, seed: int) -> nn.Module:
        """The same run, the weights rounded to bf16 after every step and no finer ones kept."""
        model = copy.deepcopy(self.model)
        descend(
            model,
            self._method(method),
            self._source(method, seed, 0),
            StoredWeights(make_rule("adam", model, rate), "bf16"),
            steps=self.recipe.steps,
            generator=torch.Generator().manual_seed(seed),
        )
        return model

    def _method(self, name: str) -> Method:
        """The loss of a method or of a null model."""
        loss = "supervised" if name in ("near", "foreign") else name.removesuffix(" shuffled")
        teacher = self.teacher() if name == "distillation" else None
        return make_method(loss, reference=self.model, teacher=teacher)

    def _source(self, method: str, seed: int, half: int) -> Source:
        """Whose responses a method learns from."""
        shape = self.recipe
        if method in ("near", "foreign"):
            return fixed_data(self.demonstrations(method, half), groups=shape.prompts * shape.samples)
        if method in PREFERENCE:
            return fixed_data(self.own(half), groups=shape.prompts)
        own = own_samples(self.halves[half], prompts=shape.prompts, samples=shape.samples)
        return _shuffled(own, 6000 + seed) if method in NULLS else own

    def _read(self, puzzle: Puzzle, noise: float) -> nn.Module:
        """A policy of the family after reading a corpus."""
        shape = self.recipe
        model = family_policy(self.family, len(puzzle.words), shape.base_seed)
        corpus = puzzle.corpus(
            64 * shape.pretrain_steps, torch.Generator().manual_seed(shape.base_seed), noise=noise
        )
        settings = TrainingConfig(
            shape.pretrain_steps,
            shape.pretrain_rate,
            evaluate_every=shape.pretrain_steps,
            evaluation_samples=1,
            seed=shape.base_seed,
        )
        train(model, make_method("supervised"), fixed_data(corpus, groups=64), puzzle, settings)
        return model

    def _own(self, half: int) -> Rollouts:
        """Groups of the base's responses, as many as the batches of a run have: the data of the preference methods."""
        shape, puzzle = self.recipe, self.halves[half]
        generator = torch.Generator().manual_seed(2000 + shape.base_seed)
        rows = torch.randint(len(puzzle.prompts), (shape.prompts * shape.steps,), generator=generator)
        return sample_puzzle(self.model, puzzle, rows.tolist(), shape.samples, generator)

    def _demonstrations(self, method: str, half: int) -> Rollouts:
        """The base's own right answers; or as many in descending order, to prompts drawn uniformly."""
        own = self.own(half)
        kept = own.take((own.rewards == 1).nonzero()[:, 0].tolist())
        if method == "near":
            return replace(kept, groups=tuple(range(len(kept))))
        generator = torch.Generator().manual_seed(1000 + self.recipe.base_seed)
        return self.puzzle(method, half).corpus(len(kept), generator, noise=0.0)


def _some(puzzle: Puzzle, rows: list[int]) -> Puzzle:
    """Some of the prompts of a puzzle."""
    prompts, answers = (tuple(x[row] for row in rows) for x in (puzzle.prompts, puzzle.answers))
    return replace(puzzle, prompts=prompts, answers=answers)


def _descending(puzzle: Puzzle) -> Puzzle:
    """The same prompts, the answers from the last letter to the first."""
    return replace(puzzle, answers=tuple((*answer[-2::-1], answer[-1]) for answer in puzzle.answers))


def _shuffled(source: Source, seed: int) -> Source:
    """The same responses, the rewards dealt out anew within each group."""
    dealer = torch.Generator().manual_seed(seed)

    def draw(model: nn.Module, generator: torch.Generator) -> Rollouts:
        rollouts = source(model, generator)
        columns, _ = with_permuted(rollouts.rewards.double(), 1, dealer, torch.tensor(rollouts.groups))
        return replace(rollouts, rewards=columns[:, 1])

    return draw
