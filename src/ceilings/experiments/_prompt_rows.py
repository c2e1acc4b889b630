"""What `ceilings.experiments.prompts` measures of one prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.next_token import NextToken, matched_words
from ceilings.rollout_scores import response_scores, split_tightness
from ceilings.sampling import sample_responses
from ceilings.top_sets import concentration, sampled_overlap, stratified_sample, take

__all__ = [
    "KINDS", "REWARDS", "TABLE", "by_place", "exact_rows", "joint_row", "null_rows", "rewards_of", "rollout_rows",
    "sample", "short", "within_tensors", "words_of",
]  # fmt: skip

REWARDS: Final = ("likeliest", "stated", "contrast", "typical")
TABLE: Final = "model.embed_tokens.weight"
KINDS: Final = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# NOTE below this share of the largest, F is rounding of single precision: both sides of the bound are zero there.
_CONSTANT: Final = 1e-14


def words_of(law: NextToken, tokenizer: Any, text: str, stated: str) -> dict[str, int]:
    """Tokens that the rewards name.

    Parameters
    ----------
    law
        The next token after the prompt.
    tokenizer
        Of the model.
    text, stated
        The prompt and the continuation that stands beside it.

    Returns
    -------
    dict
        "likeliest", "second" and "stated", the first token of the continuation.

    Raises
    ------
    ValueError
        If the continuation changes the tokens of the prompt.
    """
    likeliest, second = law.probs.topk(2).indices.tolist()
    before, after = (tokenizer(whole).input_ids for whole in (text, text + stated))
    if after[: len(before)] != before:
        raise ValueError(f"the tokens of {text!r} change when {stated!r} follows: state another continuation")
    return {"likeliest": likeliest, "second": second, "stated": after[len(before)]}


def rewards_of(law: NextToken, words: Mapping[str, int]) -> dict[str, Tensor]:
    """The four rewards.

    Parameters
    ----------
    law
        The next token.
    words
        See `words_of`.

    Returns
    -------
    dict
        One number a word for each name in `REWARDS`.

    Shapes
    ------
    -> (V,) each.
    """

    def paid(name: str) -> Tensor:
        return torch.zeros_like(law.probs).index_fill_(0, torch.tensor([words[name]]), 1.0)

    return {
        "likeliest": paid("likeliest"),
        "stated": paid("stated"),
        "contrast": paid("second") - paid("likeliest"),
        "typical": law.probs.log(),
    }


def exact_rows(
    law: NextToken, words: Mapping[str, int], fisher: Mapping[str, Tensor], top_share: float
) -> dict[str, Any]:
    """What is exact and of all parameters: the policy's ceilings and the tightness of each reward.

    Parameters
    ----------
    law, words
        The next token, and the tokens that rewards name.
    fisher
        Its diagonal Fisher information.
    top_share
        Size of the top set.

    Returns
    -------
    dict
        "policy" and "reward".
    """
    total = {name: float(f.sum(dtype=torch.float64)) for name, f in fisher.items()}
    trace, parameters = sum(total.values()), sum(f.numel() for f in fisher.values())
    layers = [name for name in fisher if name != TABLE]
    dead = {name: fisher[name] <= _floor(fisher) for name in layers}
    roots = {name: (total[name] / f.numel() / (trace / parameters)) ** 0.5 for name, f in fisher.items()}
    policy = {
        **{f"p {name}": float(law.probs[word]) for name, word in words.items()},
        "entropy": float(-(law.probs * law.probs.log()).sum()),
        "without ceiling": float(sum(int(d.sum()) for d in dead.values())),  # rounding decides the last few
        "fisher top": float(concentration(list(fisher.values()), [top_share])[0]),
        "fisher table": total[TABLE] / trace,
        "ceiling": short(by_place(roots)),
    }
    alive = {name: fisher[name].numel() - int(dead[name].sum()) for name in layers}
    rewards = {}
    for name, reward in rewards_of(law, words).items():
        variance = float(law.probs @ (reward - law.probs @ reward).square())
        energy, squares, largest = 0.0, {}, 0.0
        for tensor, g in law.gradient(reward).items():
            energy += float(g.square_().sum(dtype=torch.float64))
            if tensor != TABLE:
                ratio = g.div_(fisher[tensor]).masked_fill_(dead[tensor], 0.0)
                largest = max(largest, float(ratio.max()) / variance)
                squares[tensor] = float(ratio.sum(dtype=torch.float64)) / variance
        means = {tensor: squares[tensor] / max(alive[tensor], 1) for tensor in layers}
        rewards[name] = {
            "std": variance**0.5,
            "rms": (sum(squares.values()) / sum(alive.values())) ** 0.5,
            "used": energy / (variance * trace),
            "largest": largest**0.5,
            "tensors": short(by_place({tensor: x**0.5 for tensor, x in means.items()})),
        }
    return {"policy": policy, "reward": rewards}


def sample(tensors: Mapping[str, Tensor], every: int, seed: int = 10_000) -> dict[str, Tensor]:
    """One parameter in so many, drawn at random; the same for every prompt.

    Parameters
    ----------
    tensors
        The parameters, or anything of their shapes.
    every
        In how many.
    seed
        Of the draw.

    Returns
    -------
    dict
        Flat positions by name.
    """
    generator = torch.Generator().manual_seed(seed)
    return stratified_sample({name: t.numel() for name, t in tensors.items()}, every, generator)


def null_rows(
    law: NextToken, words: Mapping[str, int], fisher: Mapping[str, Tensor], config: Any, seed: int
) -> dict[str, Any]:
    """Every reward among its null models, by the same estimator on the same sample of parameters.

    Parameters
    ----------
    law, words, fisher
        As in `exact_rows`.
    config
        The experiment's.
    seed
        Of the null models.

    Returns
    -------
    dict
        "reward" and "null".
    """
    where = sample(fisher, config.every)
    root = take(dict(fisher), where).sqrt()
    layers = torch.cat([torch.full((len(w),), name != TABLE) for name, w in where.items()])
    layers &= root.square() > _floor(fisher)

    def judged(rewards: Tensor) -> dict[str, list[float]]:
        """Overlap of the top sets and RMS tightness of the layers, one entry a reward."""
        spread = (rewards.square() @ law.probs - (rewards @ law.probs).square()).sqrt()
        g = law.gradient_at(rewards, where).abs_()
        ratio = g[:, layers].div_(root[layers]).square_().mean(1, dtype=torch.float64)
        return {
            "overlap": short(sampled_overlap(g, root, config.top_share)),
            "rms": short(ratio.sqrt() / spread),
        }

    generator = torch.Generator().manual_seed(seed)
    named = {name: r - law.probs @ r for name, r in rewards_of(law, words).items()}
    every = judged(torch.stack(list(named.values())))
    own = {name: {f"sample {key}": every[key][k] for key in every} for k, name in enumerate(named)}
    nulls: dict[str, Any] = {}
    for name, rewards in _null_rewards(law, words, named, config.draws, generator).items():
        empty = {key: [math.nan] * config.draws for key in every}
        nulls[name] = empty if rewards is None else judged(rewards)
    noise = torch.randn(config.draws, len(root), generator=generator, dtype=root.dtype).abs_()
    nulls["noise"] = {"overlap": short(sampled_overlap(noise.mul_(root), root, config.top_share))}
    for name, reward in named.items():
        ratio = law.gradient_at(reward[None], where)[0].abs_().div_(root).nan_to_num_(0.0)
        draws = within_tensors(ratio, where, noise, generator).mul_(root)
        nulls[f"{name}: within tensors"] = {"overlap": short(sampled_overlap(draws, root, config.top_share))}
    return {"reward": own, "null": nulls}


def rollout_rows(
    model: nn.Module,
    tokenizer: Any,
    law: NextToken,
    words: Mapping[str, int],
    fisher: Mapping[str, Tensor],
    check: str,
    ids: Tensor,
    config: Any,
    seed: int,
) -> dict[str, Any]:
    """Sampled answers: tightness of whole ones, and of their first tokens for which the exact value is known.

    Parameters
    ----------
    model, tokenizer
        The model.
    law, words, fisher
        As in `exact_rows`.
    check
        Pattern of a right answer; without one there is nothing to measure and every list is empty.
    ids
        The prompt.
    config
        The experiment's.
    seed
        Of the answers, the splits and the permutations.

    Returns
    -------
    dict
        For "answer" and "token" each: share of right ones, cross-fitted mean of squares, mean and in-sample mean of
        squares, the real reward first and then the permuted ones.
    """
    if not check:
        keys = ("right", "squares", "mean", "in sample")
        empty: dict[str, Any] = {part: {key: [] for key in keys} for part in ("answer", "token")}
        return {"exact": [], "distinct": [], "length": [], **empty}
    generator = torch.Generator().manual_seed(20_000 + seed)
    prompt, end = tuple(ids.tolist()), tokenizer.eos_token_id
    drawn = sample_responses(
        model, [prompt], config.rollouts, [generator], max_new_tokens=config.max_new_tokens, end_ids=(end,)
    ).response_ids
    texts = [tokenizer.decode([t for t in y if t != end]) for y in drawn]
    right = torch.tensor([float(bool(re.search(check, text, re.IGNORECASE))) for text in texts])
    where = sample(_layers(law, fisher), config.rollout_every, 30_000)
    firsts = [y[0] for y in drawn]
    distinct = sorted(set(firsts))
    # The score of one token is the gradient of a reward that pays 1/π for it.
    paid = torch.zeros(len(distinct), len(law.probs), dtype=torch.float64)
    paid[range(len(distinct)), distinct] = 1 / law.probs[distinct]
    of_token = law.gradient_at(paid, where)
    stated = torch.tensor([float(token == words["stated"]) for token in firsts])
    scores = {
        "answer": response_scores(model, prompt, drawn, where),
        "token": of_token[[distinct.index(token) for token in firsts]],
    }
    exact = rewards_of(law, words)["stated"] - law.probs[words["stated"]]
    spread = float(law.probs @ exact.square()) ** 0.5
    own = take(dict(fisher), where)
    ratio = law.gradient_at(exact[None], where)[0].square() / own / spread**2
    row: dict[str, Any] = {
        "exact": [float(ratio[own > _floor(fisher)].mean(dtype=torch.float64))],
        "distinct": [len(set(drawn))],
        "length": [sum(map(len, drawn)) / len(drawn)],
    }
    for part, reward in (("answer", right), ("token", stated)):
        order = torch.rand(config.draws, len(reward), generator=generator, dtype=torch.float64).argsort(1)
        columns = torch.cat([reward[None], reward[order]])
        found = split_tightness(scores[part], columns, config.splits, generator)
        row[part] = {
            "right": [float(reward.mean())],
            "squares": short(found.squares),
            "mean": short(found.mean),
            "in sample": short(found.in_sample),
        }
    return row


def short(values: Tensor) -> Any:
    """To five digits: more would only tell processors apart."""
    plain = values.tolist()
    return _short(plain)


def _short(value: Any) -> Any:
    return [_short(entry) for entry in value] if isinstance(value, list) else float(f"{value:.5g}")


def by_place(values: Mapping[str, float]) -> Tensor:
    """One number a kind of tensor and layer.

    Parameters
    ----------
    values
        One number a parameter tensor.

    Returns
    -------
    Tensor
        Those of the layers; the table and the last norm are left out.

    Shapes
    ------
    -> (kinds, layers).
    """
    layers = 1 + max(int(name.split(".")[2]) for name in values if name.startswith("model.layers."))
    return torch.tensor(
        [[values[f"model.layers.{layer}.{kind}.weight"] for layer in range(layers)] for kind in KINDS],
        dtype=torch.float64,
    )


def _null_rewards(
    law: NextToken,
    words: Mapping[str, int],
    named: Mapping[str, Tensor],
    draws: int,
    generator: torch.Generator,
) -> dict[str, Tensor | None]:
    """Rewards that know nothing; None where no other words are as likely in all as those that are paid for."""

    def dealt(reward: Tensor) -> Tensor:
        return torch.stack([reward[torch.randperm(len(reward), generator=generator)] for _ in range(draws)])

    found: dict[str, Tensor | None] = {
        f"{name}: dealt out": dealt(named[name]) for name in ("stated", "typical")
    }
    found["random"] = torch.randn(draws, len(law.probs), generator=generator, dtype=torch.float64)
    for name in ("likeliest", "stated"):
        found[f"{name}: matched"] = _matched(law.probs, words[name], draws, generator)
    return found


def _matched(probs: Tensor, word: int, draws: int, generator: torch.Generator) -> Tensor | None:
    """Sets of other words that are together as likely as one; None where there are none."""
    try:
        return torch.stack([matched_words(probs, [word], generator) for _ in range(draws)])
    except ValueError:
        return None


def within_tensors(
    ratio: Tensor, where: Mapping[str, Tensor], into: Tensor, generator: torch.Generator
) -> Tensor:
    """Deal values out anew among the sampled entries of each tensor.

    Parameters
    ----------
    ratio
        The values, in the order of ``where``.
    where
        Flat positions by parameter name.
    into
        Takes the draws, one a row.
    generator
        Source of randomness.

    Returns
    -------
    Tensor
        ``into``.

    Shapes
    ------
    ratio (M,), into (draws, M).
    """
    parts = ratio.split([len(w) for w in where.values()])
    for row in into:
        row.copy_(torch.cat([part[torch.randperm(len(part), generator=generator)] for part in parts]))
    return into


def _floor(fisher: Mapping[str, Tensor]) -> float:
    """What F must exceed."""
    return _CONSTANT * max(float(f.max()) for f in fisher.values())


def _layers(law: NextToken, fisher: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the table."""
    return {name: fisher[name] for name in law.names_below_head}


def joint_row(law: NextToken, fisher: Mapping[str, Tensor], every: int) -> dict[str, float]:
    """Largest RMS tightness that any reward can reach in the layers.

    Parameters
    ----------
    law, fisher
        As in `exact_rows`.
    every
        One parameter in so many is looked at.

    Returns
    -------
    dict
        "forced", and the same from either half of those parameters, which shows its error.
    """
    unit = law.fisher_factor_at(sample(_layers(law, fisher), every, 40_000)).double()
    unit = torch.nn.functional.normalize(unit, dim=0)

    def largest(u: Tensor) -> float:
        return float(torch.linalg.eigvalsh(u @ u.T / u.shape[1])[-1].sqrt())

    return {
        "forced": largest(unit),
        "forced even": largest(unit[:, ::2]),
        "forced odd": largest(unit[:, 1::2]),
    }
