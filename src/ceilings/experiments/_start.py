"""Where the runs of two experiments begin: a small decoder that sorts, its exact moments, and what a run gains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ceilings.batches import Batch, token_laws, token_log_probs
from ceilings.methods import make_method
from ceilings.prefix_tree import enumeration
from ceilings.puzzles import END, Puzzle, sorting
from ceilings.rollouts import Rollouts
from ceilings.sources import Source, own_samples
from ceilings.training import pretrained_decoder
from ceilings.transformer import TinyTransformer, TransformerConfig
from ceilings.uncertainty import with_permuted
from ceilings.update_rules import Stepper, descend, flat_parameters

__all__ = ["Moments", "Shape", "Start", "success"]


@dataclass(frozen=True)
class Shape:
    """The puzzle, the decoder, and a batch.

    Parameters
    ----------
    length, letters
        Of the puzzle `ceilings.puzzles.sorting`; half of its prompts are trained on, half are others.
    width, depth, heads
        Of the decoder.
    noise, pretrain_steps
        Of the corpus that it reads first, and batches of 64 answers.
    prompts, samples
        Of a batch.
    """

    length: int = 2
    letters: int = 5
    width: int = 32
    depth: int = 1
    heads: int = 4
    noise: float = 0.5
    pretrain_steps: int = 150
    prompts: int = 8
    samples: int = 8


@dataclass(frozen=True)
class Moments:
    r"""Exact moments over some prompts, each as likely, every response enumerated.

    Parameters
    ----------
    fisher
        :math:`F_{ii}`, mean over the prompts.
    gradient, gradient_square
        :math:`E_x g_{x,i}` and :math:`E_x g_{x,i}^2`.
    raw
        :math:`E_x E[(R - E_x R)^2 s_i^2]`.
    variance
        :math:`E_x \mathrm{Var}(R \\mid x)`.
    """

    fisher: Tensor
    gradient: Tensor
    gradient_square: Tensor
    raw: Tensor
    variance: float

    @property
    def ceiling(self) -> Tensor:
        """Ceiling of every parameter."""
        return (self.variance * self.fisher).sqrt()

    @property
    def tightness(self) -> Tensor:
        """Tightness of every parameter; 0 where the ceiling is zero."""
        return torch.where(self.ceiling > 0, self.gradient.abs() / self.ceiling, 0.0)

    def mean_step(self, prompts: int, samples: int) -> Tensor:
        """Size of Adam's mean step at rate 1, for a batch of so many prompts, and samples of each."""
        within = (self.raw - self.gradient_square) / (prompts * samples)
        between = (self.gradient_square - self.gradient.square()) / prompts
        second = self.gradient.square() + between + within
        return torch.where(second > 0, self.gradient.abs() / second.sqrt(), 0.0)


class Start:
    """What every run of one seed shares.

    Parameters
    ----------
    shape
        The puzzle, the decoder, and a batch.
    seed
        Draws the weights, the corpus, and which prompts are trained on.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        whole = sorting(shape.length, shape.letters)
        decoder = TransformerConfig(
            len(whole.words), shape.width, shape.depth, shape.heads, 2 * shape.width, init_scale=0.5
        )
        self.model: TinyTransformer = pretrained_decoder(
            whole, noise=shape.noise, steps=shape.pretrain_steps, shape=decoder, seed=seed
        )
        order = torch.randperm(len(whole.prompts), generator=torch.Generator().manual_seed(4000 + seed))
        half = len(order) // 2
        self.puzzle, self.others = (_some(whole, rows.tolist()) for rows in (order[:half], order[half:]))
        sizes = torch.tensor([p.numel() for p in self.model.parameters()])
        self.tensors = torch.arange(len(sizes)).repeat_interleave(sizes)
        self.method = make_method("rloo")

    @property
    def weights(self) -> Tensor:
        """Parameters at the start, flat."""
        return flat_parameters(self.model)

    def source(self, shuffle: int | None = None) -> Source:
        """Own samples; with a number, rewards dealt out anew within each group from that seed on."""
        own = own_samples(self.puzzle, prompts=self.shape.prompts, samples=self.shape.samples)
        if shuffle is None:
            return own
        dealer = torch.Generator().manual_seed(shuffle)

        def shuffled(model: nn.Module, generator: torch.Generator) -> Rollouts:
            rollouts = own(model, generator)
            columns, _ = with_permuted(rollouts.rewards.double(), 1, dealer, torch.tensor(rollouts.groups))
            return replace(rollouts, rewards=columns[:, 1])

        return shuffled

    def first_gradient(self) -> Tensor:
        """Gradient of the loss of the first batch of a run, flat."""
        model = copy.deepcopy(self.model)
        rollouts = self.source()(model, self.generator())
        laws, mask = token_laws(model, rollouts)
        log_probs = token_log_probs(laws, rollouts)
        loss = self.method.loss(Batch(rollouts, model, model, mask, laws, log_probs, log_probs.detach()))
        assert loss is not None
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    def generator(self, run: int = 0) -> torch.Generator:
        """Source of randomness of a run; the same number gives the same first batch."""
        return torch.Generator().manual_seed(5000 + 100 * self.seed + run)

    def trained(
        self,
        build: Callable[[nn.Module], Stepper],
        steps: int,
        *,
        shuffle: int | None = None,
        watch: Callable[[nn.Module], None] | None = None,
    ) -> TinyTransformer:
        """A copy of the model after a run, from the weights as its stepper stores them."""
        model = copy.deepcopy(self.model)
        run = 0 if shuffle is None else 1 + shuffle
        descend(
            model,
            self.method,
            self.source(None if shuffle is None else 6000 + 100 * self.seed + shuffle),
            build(model),
            steps=steps,
            generator=self.generator(run),
            watch=watch,
        )
        return model

    def moments(self, puzzle: Puzzle) -> Moments:
        """Exact moments of the model at the start over the prompts of a puzzle."""
        sums: list[Tensor] = []
        for row, prompt in enumerate(puzzle.prompts):
            law = enumeration(self.model, prompt, puzzle.max_new_tokens, END)
            reward = law.rewards(partial(puzzle.reward, row))
            centred = reward - law.probs @ reward
            gradient = (law.probs * centred) @ law.scores
            squares = law.scores.square()
            found = (
                law.probs @ squares,
                gradient,
                gradient.square(),
                (law.probs * centred.square()) @ squares,
                law.probs @ centred.square(),
            )
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else list(found)
        fisher, gradient, square, raw, variance = (value / len(puzzle.prompts) for value in sums)
        return Moments(fisher, gradient, square, raw, float(variance))


def success(model: nn.Module, puzzle: Puzzle) -> float:
    """Exact expected binary reward: the probability of the right answer, mean over the prompts."""
    rollouts = Rollouts(
        puzzle.prompts, puzzle.answers, torch.ones(len(puzzle.prompts)), tuple(range(len(puzzle.prompts)))
    )
    with torch.no_grad():
        laws, mask = token_laws(model, rollouts)
        return float((token_log_probs(laws, rollouts) * mask).sum(1).exp().mean())


def _some(puzzle: Puzzle, rows: list[int]) -> Puzzle:
    """Some of the prompts of a puzzle."""
    return replace(
        puzzle,
        prompts=tuple(puzzle.prompts[row] for row in rows),
        answers=tuple(puzzle.answers[row] for row in rows),
    )
