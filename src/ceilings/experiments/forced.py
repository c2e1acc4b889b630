"""How much looseness is forced on enumerated policies (claims ``thm-joint`` and ``thm-energy``).

Scientific hyperparameters: the family of the policy and the kind of reward. Nuisance: the seed, which draws the
weights, the target and the shuffle. Fixed: everything else in `Config`. Nothing is sampled: each policy has 85
responses and every number is a finite sum in float64.

The four families are a decoder at initialisation, the same decoder after a short exact ascent of the graded
reward, and log-linear policies with fewer and with more features than there are responses. The three rewards are
a *binary* one (the response contains a target token), a *graded* one (share of positions that match a target),
and the null model: the graded values *shuffled* over the responses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.ceiling import score_reward_covariance, score_variance, tightness
from ceilings.experiments._command import record_command
from ceilings.experiments._rows import append
from ceilings.looseness import (
    direction_tightness,
    fisher_concentration,
    fisher_spectrum,
    fisher_weighted_tightness,
    forced_rms,
    outside_share,
    outside_share_bound,
    rms_tightness,
    top_ceilings,
    varying_scores,
)
from ceilings.policies import AutoregressivePolicy, Enumeration
from ceilings.prefix_tree import enumeration, expected_reward
from ceilings.results import Record
from ceilings.transformer import TinyTransformer, TransformerConfig

__all__ = ["FAMILIES", "FULL", "NAME", "REWARDS", "SMOKE", "Config", "policies", "rewards", "run"]

NAME: Final = "forced"
FAMILIES: Final = ("decoder", "trained decoder", "few features", "many features")
REWARDS: Final = ("binary", "graded", "shuffled")

_EOS: Final = 0
# NOTE the prompt must be a token that no response repeats. After the prompt (1,) the prefixes 1, 1 1 and 1 1 1
# look alike to rotary attention, which averages equal values: the next-token laws coincide and F loses rank.
_PROMPT: Final = (_EOS,)


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One policy of each family a seed.
    vocab_size, max_len
        Alphabet, whose token 0 ends a response, and longest response.
    width, depth, heads, mlp_width
        Shape of the decoder.
    few, many
        Number of features of the two log-linear families.
    train_steps, learning_rate
        Adam steps on the exact expected graded reward, and their size.
    top_share
        Share of the parameters in the set S of ``thm-energy``.
    """

    seeds: tuple[int, ...]
    vocab_size: int = 5
    max_len: int = 3
    width: int = 12
    depth: int = 2
    heads: int = 2
    mlp_width: int = 24
    few: int = 20
    many: int = 400
    train_steps: int = 40
    learning_rate: float = 0.01
    top_share: float = 0.01


FULL: Final = Config(seeds=tuple(range(24)))
SMOKE: Final = Config(seeds=(0, 1))


def rewards(responses: tuple[tuple[int, ...], ...], config: Config, seed: int) -> dict[str, Tensor]:
    """Draw the three rewards of one seed.

    Parameters
    ----------
    responses
        Every response.
    config
        The experiment.
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
    target = torch.randint(1, config.vocab_size, (config.max_len,), generator=generator).tolist()
    graded = torch.tensor(
        [sum(a == b for a, b in zip(y, target, strict=False)) / config.max_len for y in responses],
        dtype=torch.float64,
    )
    binary = torch.tensor([float(target[0] in y) for y in responses], dtype=torch.float64)
    shuffled = graded[torch.randperm(len(graded), generator=generator)]
    return {"binary": binary, "graded": graded, "shuffled": shuffled}


def policies(config: Config, seed: int) -> dict[str, Enumeration]:
    """Draw one policy of each family, and enumerate it.

    Parameters
    ----------
    config
        The experiment.
    seed
        Draws the weights.

    Returns
    -------
    dict
        An enumeration for each name in `FAMILIES`; all have the same responses in the same order.
    """
    shape = TransformerConfig(config.vocab_size, config.width, config.depth, config.heads, config.mlp_width)
    model = TinyTransformer(shape, seed)
    tree = (model, _PROMPT, config.max_len, _EOS)
    laws = {"decoder": enumeration(*tree)}
    _ascend(model, rewards(laws["decoder"].responses, config, seed)["graded"], config)
    laws["trained decoder"] = enumeration(*tree)
    generator = torch.Generator().manual_seed(seed)
    for family, size in (("few features", config.few), ("many features", config.many)):
        policy = AutoregressivePolicy.random(config.vocab_size, config.max_len, size, generator, _EOS)
        theta = (
            torch.randn(size, generator=generator, dtype=torch.float64) / size**0.5
        )  # logits of variance 1
        laws[family] = policy.enumerate(theta)
    return laws


def run(config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Record:
    """Measure every family and reward at every seed.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.

    Returns
    -------
    Record
        Leaves are ``family/policy/NAME`` for what the policy alone fixes, ``family/reward/NAME`` for the rest.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        for family, law in policies(config, seed).items():
            append(values, _policy_row(law, config.top_share), family, "policy")
            for reward, value in rewards(law.responses, config, seed).items():
                append(values, _reward_row(law, value, config.top_share), family, reward)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


def _ascend(model: TinyTransformer, reward: Tensor, config: Config) -> None:
    """Raise the exact expected reward by a few Adam steps."""
    optimiser = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    for _ in range(config.train_steps):
        optimiser.zero_grad()
        (-expected_reward(model, _PROMPT, reward, config.max_len, _EOS)).backward()
        optimiser.step()


def _policy_row(law: Enumeration, top_share: float) -> dict[str, float | int]:
    """Collect what no reward changes."""
    top = top_ceilings(law.scores, top_share, law.probs)
    fisher = law.probs @ law.scores.square()
    return {
        "parameters": int(varying_scores(law.scores, law.probs).sum()),
        "rank": len(fisher_spectrum(law.scores, law.probs)),
        "forced_rms": float(forced_rms(law.scores, law.probs)),
        "fisher_concentration": float(fisher_concentration(law.scores, law.probs)),
        "tail_share": float(outside_share(fisher, top)),
        "likeliest": float(law.probs.max()),
    }


def _reward_row(law: Enumeration, reward: Tensor, top_share: float) -> dict[str, float | int]:
    """Collect what one reward makes of the ceilings."""
    batch = (law.scores, reward, law.probs)
    top = top_ceilings(law.scores, top_share, law.probs)
    directions, _ = direction_tightness(*batch)
    every = tightness(*batch)[varying_scores(law.scores, law.probs)]
    return {
        "explained_share": float(directions.square().sum()),
        "rms_tightness": float(rms_tightness(*batch)),
        "median_tightness": float(every.nanmedian()),
        "max_tightness": float(every[~every.isnan()].max()),
        "weighted_tightness": float(fisher_weighted_tightness(*batch)),
        "outside_bound": float(outside_share_bound(*batch[:2], top, law.probs)),
        "outside_share": float(outside_share(score_reward_covariance(*batch).square(), top)),
        "reward_std": float(score_variance(reward[:, None], reward, law.probs).sqrt()),
    }


if __name__ == "__main__":
    raise SystemExit(record_command(run, FULL, SMOKE))
