r"""What becomes of the ceilings while a policy learns, every response enumerated (claim ``prop-sharpening``).

Scientific hyperparameters: the kind of reward, and how the policy is trained: *exact*, Adam on the exact gradient of
the expected reward, or *sampled*, group-relative from 32 rollouts a step. Nuisance: the seed, which draws the weights,
the teacher, the target and every null model. Fixed: everything else in `Config`, and the start, which is the centre of
`ceilings.experiments.exact`. What is trained on may be sampled; what is reported never is.

Null models: *dealt out*, the same training towards the reward's own values dealt out anew
among the responses; *random direction*, the start moved as far as the exact run has moved, along one random direction;
*sampled, dealt out*, the sampled run with the rewards of every batch dealt out anew within their groups; and
*bystander*, the trained policy with the values dealt out anew, to which it was not trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.ceiling_change import ceiling_change
from ceilings.experiments import exact
from ceilings.experiments._command import record_command
from ceilings.experiments._rows import append
from ceilings.methods import make_method
from ceilings.panel import top_overlap
from ceilings.policies import Enumeration
from ceilings.prefix_tree import enumerate_responses, enumeration
from ceilings.puzzles import END, Puzzle
from ceilings.results import Record
from ceilings.rollouts import Rollouts
from ceilings.sources import own_samples
from ceilings.training import TrainingConfig, train
from ceilings.transformer import TinyTransformer
from ceilings.uncertainty import with_permuted

__all__ = ["FULL", "KINDS", "NAME", "NULLS", "REWARDS", "SMOKE", "Config", "run"]

NAME: Final = "sharpening"
REWARDS: Final = ("binary", "graded", "sparse")
NULLS: Final = ("dealt out", "random direction", "sampled, dealt out")
#: Kinds of parameters, by the part of the name that tells.
KINDS: Final = ("embed", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")

_CELL: Final = exact.CENTRE
_PROMPT: Final = (END,)
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One start a seed, from which every run is made.
    rewards
        Kinds of reward.
    checkpoints, null_checkpoints
        Numbers of steps after which the policy is measured, from 0; and those of them at which null models are.
    learning_rate
        Of Adam, in all runs.
    nulls
        Whether the runs of the null models are made.
    bystanders, draws
        Draws a seed: rewards to which nothing is trained, and of the null models.
    sampled_null
        Rewards for which the sampled run has its null model.
    groups, samples
        Groups of a batch of the sampled run, all of the one prompt, and responses a group.
    top_share
        Size of the top sets.
    """

    seeds: tuple[int, ...]
    rewards: tuple[str, ...] = REWARDS
    checkpoints: tuple[int, ...] = (0, 2, 5, 10, 20, 40)
    null_checkpoints: tuple[int, ...] = (5, 40)
    learning_rate: float = 0.01
    nulls: bool = True
    bystanders: int = 20
    draws: int = 4
    sampled_null: tuple[str, ...] = ("graded",)
    groups: int = 4
    samples: int = 8
    top_share: float = 0.1


FULL: Final = Config(seeds=tuple(range(6)))
SMOKE: Final = Config(seeds=(0,), rewards=("graded",), nulls=False)


def run(config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Record:
    """Train and measure at every seed.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.

    Returns
    -------
    Record
        Leaves are ``reward/exact/NAME`` and ``reward/sampled/NAME``, a curve over the checkpoints a seed, and for each
        of `NULLS` ``reward/NULL/NAME`` with one curve a draw, over the null checkpoints.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        model, _ = exact.pretrained(_CELL, exact.FULL, seed)
        every = exact.rewards(_enumerated(model), _CELL, seed)
        drawn = {kind: every[kind] for kind in config.rewards}
        for kind, parts in _runs(model, drawn, config, seed).items():
            for part, row in parts.items():
                append(values, row, kind, part)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


class _Ruler:
    """Measures policies of one shape against the start of their run."""

    def __init__(self, model: TinyTransformer, config: Config) -> None:
        self.model, self.config = model, config
        self.weights = _flat(model)
        start = _enumerated(model)
        self.responses, self.probs = start.responses, start.probs
        fisher = start.probs @ start.scores.square()
        self.kept = fisher > 1e-24 * fisher.max()
        self.fisher = fisher[self.kept]
        named = [(name, p.numel()) for name, p in model.named_parameters()]
        kinds = [next(k for k, word in enumerate(KINDS) if word in name) for name, _ in named]
        sizes = torch.tensor([size for _, size in named])
        self.kind = torch.tensor(kinds).repeat_interleave(sizes)[self.kept]

    def curve(
        self, path: Iterable[Tensor], reward: Tensor, dealt: Tensor, full: bool = True
    ) -> dict[str, Any]:
        """What is measured at each point of a path; of a null model only single numbers."""
        rows = []
        for weights in path:
            _put(self.model, weights)
            rows.append(self._row(_enumerated(self.model), reward, dealt, full))
        _put(self.model, self.weights)
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _row(self, law: Enumeration, reward: Tensor, dealt: Tensor, full: bool) -> dict[str, Any]:
        """One policy."""
        scores, p = law.scores[:, self.kept], law.probs
        fisher, std = p @ scores.square(), _deviation(reward, p)
        change = ceiling_change((_deviation(reward, self.probs), self.fisher), (std, fisher))
        ratio = _covariance(reward, p, scores) / (std * fisher.sqrt())
        found: dict[str, Any] = {
            "reward": float(p @ reward),
            "entropy": float(torch.special.entr(p).sum()),
            "sigma": float(change.reward),
            "fisher": float(change.fisher.mean()),
            "trace": float((fisher.sum().log() - self.fisher.sum().log()) / 2),
            "fell": float((change.fisher < 0).double().mean()),
            "led by reward": float(change.led_by_reward),
            "rms": float(ratio.square().mean().sqrt()),
            "overlap": float(top_overlap(fisher[None], self.fisher[None], self.config.top_share)),
        }
        members = [self.kind == k for k in range(len(KINDS))]
        by_kind = [float(change.fisher[some].mean()) for some in members]
        if not full:
            found["fisher by kind"] = [_short(value) for value in by_kind]
            return {name: _short(v) if isinstance(v, float) else v for name, v in found.items()}
        tight_by_kind = [float(ratio[some].square().mean().sqrt()) for some in members]
        quantiles = torch.tensor(_QUANTILES, dtype=torch.float64)
        return found | {
            "likeliest": float(p.max()),
            "median": float(ratio.abs().median()),
            "spread of fisher": change.fisher.quantile(quantiles).tolist(),
            "fisher by kind": by_kind,
            "rms by kind": tight_by_kind,
            "bystander": [_short(self._rms(row, p, scores, fisher)) for row in dealt],
        }

    @staticmethod
    def _rms(reward: Tensor, p: Tensor, scores: Tensor, fisher: Tensor) -> float:
        """Root mean square of the tightness of a reward."""
        return float((_covariance(reward, p, scores).square() / fisher).mean().sqrt() / _deviation(reward, p))


def _runs(
    model: TinyTransformer, drawn: dict[str, Tensor], config: Config, seed: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Every run from one start, measured."""
    generator = torch.Generator().manual_seed(4000 + seed)
    ruler = _Ruler(model, config)
    shape = (config.bystanders, len(ruler.probs))
    order = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(1)
    directions = torch.randn(config.draws, len(ruler.weights), generator=generator, dtype=torch.float64)
    directions = directions / directions.norm(dim=1, keepdim=True)
    dealt = {kind: reward[order] for kind, reward in drawn.items()}
    trained = [dealt[kind][: config.draws if config.nulls else 0] for kind in drawn]
    paths = _ascents(ruler, torch.cat([torch.stack(list(drawn.values())), *trained]))
    late = [config.checkpoints.index(step) for step in config.null_checkpoints]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for k, (kind, reward) in enumerate(drawn.items()):
        path, others = paths[k], paths[len(drawn) + k * config.draws :][: config.draws]
        found[kind] = {
            "exact": ruler.curve(path, reward, dealt[kind]),
            "sampled": ruler.curve(_sampled(ruler, reward, seed, False), reward, dealt[kind]),
        }
        if not config.nulls:
            continue
        length = (path - path[0]).norm(dim=1)[late, None]
        nulls = {
            "dealt out": [(p[late], row) for p, row in zip(others, dealt[kind], strict=False)],
            "random direction": [(path[0] + length * u, reward) for u in directions],
        }
        if kind in config.sampled_null:
            seeds = [1000 + 100 * seed + draw for draw in range(config.draws)]
            nulls["sampled, dealt out"] = [(_sampled(ruler, reward, s, True)[late], reward) for s in seeds]
        for null, draws in nulls.items():
            curves = [ruler.curve(p, row, dealt[kind], False) for p, row in draws]
            found[kind][null] = {name: [curve[name] for curve in curves] for name in curves[0]}
    return found


def _ascents(ruler: _Ruler, rewards: Tensor) -> Tensor:
    """Weights at the checkpoints of runs on the exact gradient, one run a reward."""
    # Adam acts on every weight alone: a stack of models under the sum of their losses trains each as if by itself.
    model, config = ruler.model, ruler.config
    _put(model, ruler.weights)
    ids, mask = enumerate_responses(model, _PROMPT, _CELL.max_len, END).batch()
    stack = {n: p.detach().expand(len(rewards), *p.shape).clone() for n, p in model.named_parameters()}
    weights = [p.requires_grad_() for p in stack.values()]

    def probabilities(values: dict[str, Tensor]) -> Tensor:
        log_probs = torch.func.functional_call(model, values, (ids[:, :-1],)).log_softmax(-1)
        chosen = log_probs.gather(2, ids[:, 1:, None])[..., 0]
        return torch.where(mask[:, 1:], chosen, 0).sum(1).exp()

    optimiser = torch.optim.Adam(weights, lr=config.learning_rate)
    taken = []
    for step in range(config.checkpoints[-1] + 1):
        if step in config.checkpoints:
            taken.append(torch.cat([p.detach().flatten(1) for p in weights], 1))
        optimiser.zero_grad()
        (-(torch.func.vmap(probabilities)(stack) * rewards).sum()).backward()
        optimiser.step()
    return torch.stack(taken, 1)


def _sampled(ruler: _Ruler, reward: Tensor, seed: int, deal: bool) -> Tensor:
    """Weights at the checkpoints of a group-relative run from samples."""
    model, config = ruler.model, ruler.config
    _put(model, ruler.weights)
    puzzle = _puzzle(dict(zip(ruler.responses, reward.tolist(), strict=True)))
    own = own_samples(puzzle, prompts=config.groups, samples=config.samples, graded=True)
    taken: list[Tensor] = []

    def source(policy: nn.Module, generator: torch.Generator) -> Rollouts:
        taken.append(_flat(policy))  # before every step
        rollouts = own(policy, generator)
        if not deal:
            return rollouts
        columns, _ = with_permuted(rollouts.rewards, 1, generator, torch.tensor(rollouts.groups))
        return replace(rollouts, rewards=columns[:, 1])

    last = config.checkpoints[-1]
    settings = TrainingConfig(
        last, config.learning_rate, evaluate_every=last, evaluation_samples=1, graded=True, seed=seed
    )
    train(model, make_method("grpo"), source, puzzle, settings)
    taken.append(_flat(model))
    return torch.stack([taken[step] for step in config.checkpoints])


def _puzzle(table: dict[tuple[int, ...], float]) -> Puzzle:
    """Return the one prompt, with a reward that is looked up."""
    answer = (1,) * (_CELL.max_len - 1) + (END,)  # gives the length only
    words = tuple(str(token) for token in range(_CELL.vocab_size))
    return Puzzle("table", words, (_PROMPT,), (answer,), lambda _, response: table[response])


def _enumerated(model: TinyTransformer) -> Enumeration:
    return enumeration(model, _PROMPT, _CELL.max_len, END, chunk=128)


def _flat(model: nn.Module) -> Tensor:
    """Copy of all weights in a row."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _put(model: nn.Module, weights: Tensor) -> None:
    """Set all weights; copies them, since parameters that were views of ``weights`` would train it."""
    nn.utils.vector_to_parameters(weights.clone(), model.parameters())


def _short(value: float) -> float:
    """A number of a null model to six digits: its spread is what counts."""
    return float(f"{value:.6g}")


def _deviation(reward: Tensor, p: Tensor) -> Tensor:
    return (p @ (reward - p @ reward).square()).sqrt()


def _covariance(reward: Tensor, p: Tensor, scores: Tensor) -> Tensor:
    return (p * (reward - p @ reward)) @ scores


if __name__ == "__main__":
    raise SystemExit(record_command(run, FULL, SMOKE))
