r"""The single loop that every method shares: draw, score, step; only the loss and the source differ.

Everything random comes from one generator, so two runs with one seed are equal bit by bit on one thread.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ceilings.batches import Batch, token_laws, token_log_probs
from ceilings.losses.distillation import token_reverse_kl
from ceilings.methods import Method, make_method
from ceilings.puzzles import Puzzle
from ceilings.rollouts import Rollouts
from ceilings.sources import Source, fixed_data, sample_puzzle
from ceilings.transformer import TinyTransformer, TransformerConfig

__all__ = ["Evaluation", "History", "Step", "TrainingConfig", "evaluate", "pretrained_decoder", "train"]


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how fast.

    Parameters
    ----------
    steps
        Batches.
    learning_rate
        Constant throughout.
    optimiser
        ``"adam"`` with its usual constants, or ``"sgd"`` without momentum. No weight decay in either.
    max_gradient_norm
        Longer gradients are shortened to this length; None leaves them.
    evaluate_every
        Steps between evaluations; the first is before the first step, the last after the last.
    evaluation_samples
        Responses a prompt in an evaluation.
    graded
        Which reward an evaluation reports.
    seed
        Seed of the only generator.

    Raises
    ------
    ValueError
        If a number is not positive or the optimiser is unknown.
    """

    steps: int = 100
    learning_rate: float = 1e-3
    optimiser: Literal["adam", "sgd"] = "adam"
    max_gradient_norm: float | None = None
    evaluate_every: int = 10
    evaluation_samples: int = 8
    graded: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that make no run."""
        for name in ("steps", "learning_rate", "evaluate_every", "evaluation_samples"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive")
        if self.optimiser not in ("adam", "sgd"):
            raise ValueError(f"there is no optimiser {self.optimiser!r}: use adam or sgd")
        if self.max_gradient_norm is not None and not self.max_gradient_norm > 0:
            raise ValueError(f"max_gradient_norm is {self.max_gradient_norm}: it must be positive, or None")


@dataclass(frozen=True)
class Step:
    r"""What one batch did.

    Parameters
    ----------
    step
        Number of the batch, from 1.
    reward
        Mean reward of the batch, whoever drew it.
    loss
        Value of the loss at the first update; NaN if the batch taught nothing.
    gradient_norm
        Length of the gradient before it is shortened, mean over the updates; 0 if the batch taught nothing.
    clip_share
        Share of the tokens whose gradient the clip removes, at the last update; 1 means all.
    taught
        False where the method found nothing to learn, and no step was made.
    """

    step: int
    reward: float
    loss: float
    gradient_norm: float
    clip_share: float
    taught: bool


@dataclass(frozen=True)
class Evaluation:
    r"""Where the policy stands, from its own samples.

    Parameters
    ----------
    step
        Batches so far.
    reward
        Mean reward.
    reward_error
        Standard error of it, from the spread between prompts.
    kl
        Estimate of :math:`\mathrm{KL}(\pi_\theta \| \pi_{\mathrm{ref}})` of whole responses, in nat: the sum over the
        tokens of a response of the exact divergence of its next-token laws, mean over responses.
    entropy
        Mean exact entropy of a next-token law along the responses, in nat.
    length
        Mean tokens a response.
    """

    step: int
    reward: float
    reward_error: float
    kl: float
    entropy: float
    length: float


@dataclass(frozen=True)
class History:
    """A run.

    Parameters
    ----------
    steps
        One a batch.
    evaluations
        The first before any step, the last after all.
    """

    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]

    def curve(self, name: str) -> tuple[Tensor, Tensor]:
        """One quantity of the evaluations against the number of batches.

        Parameters
        ----------
        name
            A field of `Evaluation`.

        Returns
        -------
        tuple
            Batches, and the quantity.

        Shapes
        ------
        -> (E,), (E,) with E evaluations.
        """
        points = [(e.step, float(getattr(e, name))) for e in self.evaluations]
        steps, values = zip(*points, strict=True)
        return torch.tensor(steps), torch.tensor(values, dtype=torch.float64)


def train(
    model: nn.Module,
    method: Method,
    source: Source,
    puzzle: Puzzle,
    config: TrainingConfig,
    *,
    reference: nn.Module | None = None,
) -> History:
    """Train a model in place.

    Parameters
    ----------
    model
        The policy.
    method
        From `ceilings.methods.make_method`.
    source
        From `ceilings.sources`.
    puzzle
        What evaluations ask.
    config
        How long and how fast.
    reference
        What the leash and the divergence refer to; by default a copy of the model as it is.

    Returns
    -------
    History
        Metrics of every batch, and evaluations.

    Raises
    ------
    ValueError
        If a loss is not finite.

    Notes
    -----
    1. Evaluations draw from their own generator, with the same seed each time: they do not change what is trained on,
       and their differences have less noise than their values.
    2. The model is in evaluation mode throughout, then as it was: with dropout the law that is scored would not be the
       law that was sampled.
    """
    was_training = model.training
    model.eval()
    try:
        return _trained(model, method, source, puzzle, config, reference)
    finally:
        model.train(was_training)


def _trained(
    model: nn.Module,
    method: Method,
    source: Source,
    puzzle: Puzzle,
    config: TrainingConfig,
    reference: nn.Module | None,
) -> History:
    """Run the loop itself."""
    reference = copy.deepcopy(model) if reference is None else reference
    generator = torch.Generator().manual_seed(config.seed)
    kind = torch.optim.Adam if config.optimiser == "adam" else torch.optim.SGD
    optimiser = kind(model.parameters(), lr=config.learning_rate)
    steps: list[Step] = []
    evaluations = [_evaluated(model, reference, puzzle, config, 0)]
    for number in range(1, config.steps + 1):
        rollouts = source(model, generator)
        steps.append(_step(model, reference, method, rollouts, optimiser, config, number))
        if number % config.evaluate_every == 0 or number == config.steps:
            evaluations.append(_evaluated(model, reference, puzzle, config, number))
    return History(tuple(steps), tuple(evaluations))


def _step(
    model: nn.Module,
    reference: nn.Module,
    method: Method,
    rollouts: Rollouts,
    optimiser: torch.optim.Optimizer,
    config: TrainingConfig,
    number: int,
) -> Step:
    """All updates from one batch."""
    behaviour, values, norms, share = None, [], [], 0.0
    limit = math.inf if config.max_gradient_norm is None else config.max_gradient_norm
    for _ in range(method.updates):
        laws, mask = token_laws(model, rollouts)
        log_probs = token_log_probs(laws, rollouts)
        behaviour = log_probs.detach() if behaviour is None else behaviour
        batch = Batch(rollouts, model, reference, mask, laws, log_probs, behaviour)
        loss = method.loss(batch)
        if loss is None:
            break
        if not bool(loss.isfinite()):
            raise ValueError(f"the loss of {method.name} is {float(loss.detach())} at batch {number}")
        share = method.clip_share(batch)
        optimiser.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimiser.step()
        values.append(float(loss.detach()))
    reward = float(rollouts.rewards.double().mean())
    if not values:
        return Step(number, reward, math.nan, 0.0, 0.0, False)
    return Step(number, reward, values[0], sum(norms) / len(norms), share, True)


def evaluate(
    model: nn.Module,
    reference: nn.Module,
    puzzle: Puzzle,
    *,
    samples: int = 8,
    graded: bool = False,
    most_prompts: int = 128,
    seed: int = 0,
    step: int = 0,
) -> Evaluation:
    """Reward, divergence and entropy of a policy, from its own samples.

    Parameters
    ----------
    model
        The policy.
    reference
        What the divergence refers to.
    puzzle
        The prompts, all of them or evenly spaced ones.
    samples
        Responses a prompt.
    graded
        Which reward.
    most_prompts
        Most prompts that are asked.
    seed
        Seed of the samples.
    step
        Batches so far, to be noted.

    Returns
    -------
    Evaluation
        The metrics.
    """
    total = len(puzzle.prompts)
    count = min(total, most_prompts)
    prompts = [row * total // count for row in range(count)]
    generator = torch.Generator().manual_seed(seed)
    rollouts = sample_puzzle(model, puzzle, prompts, samples, generator, graded=graded)
    with torch.no_grad():
        laws, mask = token_laws(model, rollouts)
        divergence = token_reverse_kl(laws, token_laws(reference, rollouts)[0], mask)
        # entr(0) = 0, where p log p would be 0 · −inf
        entropy = torch.special.entr(laws.exp()).sum(2)[mask].mean()
    by_prompt = rollouts.rewards.view(count, samples).mean(1)
    return Evaluation(
        step,
        float(by_prompt.mean()),
        float(by_prompt.std() / count**0.5) if count > 1 else math.nan,
        float(divergence.sum(1).mean()),
        float(entropy),
        float(mask.sum(1).double().mean()),
    )


def _evaluated(
    model: nn.Module, reference: nn.Module, puzzle: Puzzle, config: TrainingConfig, step: int
) -> Evaluation:
    """Evaluation as the configuration asks for it."""
    return evaluate(
        model,
        reference,
        puzzle,
        samples=config.evaluation_samples,
        graded=config.graded,
        seed=config.seed + 1,
        step=step,
    )


def pretrained_decoder(
    puzzle: Puzzle,
    *,
    noise: float = 0.5,
    steps: int = 300,
    learning_rate: float = 3e-3,
    shape: TransformerConfig | None = None,
    seed: int = 0,
) -> TinyTransformer:
    """Return a small decoder that has read a noisy corpus of a puzzle, so that it answers well some of the time.

    Parameters
    ----------
    puzzle
        The puzzle.
    noise
        Of the corpus, as in `ceilings.puzzles.Puzzle.corpus`; with 0 the decoder makes a teacher.
    steps
        Batches of 64 answers.
    learning_rate
        Of Adam.
    shape
        Of the decoder; by default width 32, two layers, four heads.
    seed
        Seed of weights, corpus and batches.

    Returns
    -------
    TinyTransformer
        The decoder, in float64.
    """
    if shape is None:
        shape = TransformerConfig(len(puzzle.words), 32, 2, 4, 64, init_scale=0.5)
    model = TinyTransformer(shape, seed)
    corpus = puzzle.corpus(64 * steps, torch.Generator().manual_seed(seed), noise=noise)
    config = TrainingConfig(steps, learning_rate, evaluate_every=steps, evaluation_samples=1, seed=seed)
    train(model, make_method("supervised"), fixed_data(corpus, groups=64), puzzle, config)
    return model
