r"""Supervised learning as the data move away from the policy (claim ``thm-supervised``).

Do gradients follow their ceilings, and do updates get less sparse?

Scientific hyperparameters: the path on which the data leave the policy and how far they are on it, the optimiser, and
whether it sees the law of the data or batches of it. Nuisance: the seed, which draws the policy, the foreign law and
the batches. Fixed: everything else in `Config`. Every response is enumerated in float64; only batches are sampled.

The policy is a pretrained decoder of `ceilings.experiments.exact`. The *foreign* law is that of another random teacher.
Five paths lead to it or past it:

* *mixture*, :math:`(1 - w) \pi + w f`, and *tempered*, :math:`\propto \pi^{1-w} f^w`;
* *sharpened*, :math:`\propto f^w`, from the foreign law towards its likeliest response;
* *accepted*: the policy's own responses, of which a share of about w is kept, those that f favours most;
* *text*: one response, at the quantile w of the responses in the order of their probability, likeliest first.

Beside the gradients and updates stand null models: random signs (*sign*), normal numbers of one scale (*flat*), with
the ceilings as scales (*ceiling*), and with the root mean square of each tensor as its scale (*by tensor*).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.data_laws import tempered_law
from ceilings.experiments import exact
from ceilings.experiments._command import record_command
from ceilings.experiments._rows import append
from ceilings.off_policy import chi_square_divergence, kl_divergence
from ceilings.panel import Panel, top_overlap
from ceilings.policies import Enumeration
from ceilings.prefix_tree import enumerate_responses, enumeration
from ceilings.results import Record
from ceilings.transformer import TinyTransformer
from ceilings.updates import energy_share, relative_size, stable_rank, update_sparsity

__all__ = ["FULL", "NAME", "PATHS", "RUNS", "SMOKE", "Config", "data_laws", "policy", "run"]

NAME: Final = "foreign"
PATHS: Final = ("mixture", "tempered", "sharpened", "accepted", "text")
#: How to train: SGD or Adam on the law of the data, Adam with a rate in proportion to the root of the divergence at
#: the start, and both on batches.
RUNS: Final = ("sgd", "adam", "adam matched", "sgd batch", "adam batch")

_EOS: Final = 0
_PROMPT: Final = (_EOS,)


@dataclass(frozen=True)
class Config:
    """Parameters of the experiment.

    Parameters
    ----------
    seeds
        One policy and one foreign law a seed.
    mixture, tempered, sharpened, accepted, text
        Levels w of each path.
    batch
        Responses a batch.
    steps
        Steps at which runs are compared at equal steps.
    most_steps
        Steps after which a run that has not halved its divergence is given up.
    sgd_rate
        Learning rate of SGD, times the trace of the Fisher matrix: 1 is stable for every policy.
    adam_rate
        Learning rate of Adam.
    length
        Relative size to which updates are brought where they are compared at equal length.
    top_share
        Size of the top sets.
    draws
        Draws of each null model.
    """

    seeds: tuple[int, ...]
    mixture: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)
    tempered: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    sharpened: tuple[float, ...] = (2.0, 8.0)
    accepted: tuple[float, ...] = (0.8, 0.3, 0.1, 0.03)
    text: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    batch: int = 64
    steps: int = 10
    most_steps: int = 60
    sgd_rate: float = 1.0
    adam_rate: float = 0.0003
    length: float = 0.003
    top_share: float = 0.01
    draws: int = 20


FULL: Final = Config(seeds=tuple(range(8)))
SMOKE: Final = Config(
    seeds=(0,), mixture=(0.1,), tempered=(0.3,), sharpened=(2.0,), accepted=(0.3,), text=(0.5,)
)


def policy(seed: int) -> TinyTransformer:
    """The policy of one seed.

    Parameters
    ----------
    seed
        Draws the weights, and the teacher of the pretraining.

    Returns
    -------
    TinyTransformer
        The decoder at the centre of `ceilings.experiments.exact`.
    """
    return exact.pretrained(exact.CENTRE, exact.FULL, seed)[0]


def data_laws(law: Enumeration, config: Config, seed: int) -> dict[str, dict[str, Tensor]]:
    """Every law of the data, by path and level.

    Parameters
    ----------
    law
        The policy, every response enumerated.
    config
        The experiment.
    seed
        Draws the foreign law.

    Returns
    -------
    dict
        Probabilities of the responses.

    Shapes
    ------
    -> (Y,) each.
    """
    pi, foreign = law.probs, _foreign(law, seed)
    favoured = (foreign / pi).argsort(descending=True)
    mass = pi[favoured].cumsum(0)
    likeliest_first = pi.argsort(descending=True)

    def accepted(share: float) -> Tensor:
        kept = favoured[: int((mass < share).sum()) + 1]
        return torch.zeros_like(pi).index_copy(0, kept, pi[kept] / pi[kept].sum())

    def text(quantile: float) -> Tensor:
        return torch.zeros_like(pi).index_fill(0, likeliest_first[round(quantile * (len(pi) - 1))], 1.0)

    makers: dict[str, Callable[[float], Tensor]] = {
        "mixture": lambda w: (1 - w) * pi + w * foreign,
        "tempered": lambda w: tempered_law(pi, foreign, w),
        "sharpened": lambda w: (w * foreign.log()).softmax(0),
        "accepted": accepted,
        "text": text,
    }
    return {path: {f"{w:g}": make(w) for w in getattr(config, path)} for path, make in makers.items()}


def run(config: Config, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Record:
    """Measure every law of the data at every seed.

    Parameters
    ----------
    config
        The experiment.
    progress
        Wraps the loop over the seeds.

    Returns
    -------
    Record
        Leaves are ``path/level/gradient/NAME`` and, for each of `RUNS`, ``path/level/RUN/NAME`` at equal steps,
        ``… halved/NAME`` when half of the divergence is learnt; ``policy/NAME`` for what no data change.
    """
    start = time.perf_counter()
    values: dict[str, Any] = {}
    for seed in progress(config.seeds):
        model = policy(seed)
        law = enumeration(model, _PROMPT, exact.CENTRE.max_len, _EOS)
        panel = Panel(law)
        append(values, _policy_row(model, panel, config, seed), "policy")
        for path, levels in data_laws(law, config, seed).items():
            for level, q in levels.items():
                append(values, _gradient_row(model, law, panel, q, config), path, level, "gradient")
                rates = _rates(panel, law.probs, q, config)
                for name, rate in rates.items():
                    for when, row in _trained(model, q, config, name, rate, seed).items():
                        append(values, row, path, level, name + when)
    return Record.of_run(config, values, time.perf_counter() - start, name=NAME, dtype=torch.float64)


def _foreign(law: Enumeration, seed: int) -> Tensor:
    """Law of another teacher: each token given the last, like the one that the policy has read."""
    generator = torch.Generator().manual_seed(5000 + seed)
    size = exact.CENTRE.vocab_size
    logits = torch.randn(size, size, generator=generator, dtype=torch.float64)
    step = (exact.FULL.teacher_scale * logits).log_softmax(-1)
    return torch.stack(
        # NOTE sum() starts at 0, hence the type; no response is empty.
        [sum(step[a, b] for a, b in zip(_PROMPT + y, y, strict=False)) for y in law.responses]  # type: ignore[misc]
    ).exp()


def _policy_row(model: TinyTransformer, panel: Panel, config: Config, seed: int) -> dict[str, float]:
    """Collect what no data change: the null models of gradients and updates."""
    generator = torch.Generator().manual_seed(6000 + seed)
    flat = torch.randn(config.draws, len(panel.root_fisher), generator=generator, dtype=torch.float64)
    row = {
        "entropy": float(-(panel.probs @ panel.probs.log())),
        "fisher": float(panel.root_fisher.square().sum()),
        "fisher top": energy_share(panel.root_fisher, config.top_share),
    }
    base = torch.cat([p.detach().flatten() for p in model.parameters()])
    for name, noise in (("sign", flat.sign()), ("flat", flat), ("ceiling", flat * panel.root_fisher)):
        moved = torch.zeros(config.draws, len(base), dtype=torch.float64)
        moved[:, panel.varies] = noise
        moved *= config.length * base.norm() / moved.norm(dim=1, keepdim=True)
        kept = [update_sparsity(base, base + change, torch.bfloat16) for change in moved]
        row[f"{name} top"] = sum(energy_share(change, config.top_share) for change in noise) / config.draws
        row[f"{name} bf16 at one length"] = sum(kept) / config.draws
    overlap = top_overlap(flat * panel.root_fisher, panel.root_fisher.expand_as(flat), config.top_share)
    row["ceiling overlap"] = float(overlap.mean())
    return row


def _gradient_row(
    model: TinyTransformer, law: Enumeration, panel: Panel, q: Tensor, config: Config
) -> dict[str, float]:
    """Collect what one law of the data makes of the gradient and of its ceilings."""
    reward = (q / law.probs)[None]
    gradient, ceiling, nested = panel.gradient(reward)[0], panel.ceiling(reward)[0], panel.nested(reward)[0]
    second = q @ law.scores.square()
    noise = (second.sum() - (q @ law.scores).square().sum()) / config.batch
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    tensor = torch.arange(len(sizes)).repeat_interleave(sizes)[panel.varies]
    return {
        "chi_square": float(chi_square_divergence(q, law.probs)),
        "kl": float(kl_divergence(q, law.probs)),
        "norm": float(gradient.norm()),
        "ceiling": float(ceiling.norm()),
        "nested": float(nested.norm()),
        "noise": float(noise.sqrt()),
        "median tightness": float((gradient.abs() / ceiling).median()),
        "rms tightness": float((gradient / ceiling).square().mean().sqrt()),
        "top": energy_share(gradient, config.top_share),
        "top by tensor": _tensor_top(gradient, tensor, config),
        "overlap": float(top_overlap(gradient[None], ceiling[None], config.top_share)),
    }


def _tensor_top(vector: Tensor, tensor: Tensor, config: Config) -> float:
    """Energy share of normal numbers that have the root mean square of each tensor, mean over the draws."""
    energy = torch.zeros(int(tensor.max()) + 1, dtype=torch.float64).index_add(0, tensor, vector.square())
    scale = (energy / tensor.bincount(minlength=len(energy)).clamp_min(1)).sqrt()[tensor]
    generator = torch.Generator().manual_seed(7000)
    noise = torch.randn(config.draws, len(vector), generator=generator, dtype=torch.float64) * scale
    return sum(energy_share(row, config.top_share) for row in noise) / config.draws


def _trained(
    start: TinyTransformer, q: Tensor, config: Config, name: str, rate: float, seed: int
) -> dict[str, dict[str, float | int]]:
    """Train a copy; what the update is after ``steps``, and when half of the divergence is gone."""
    model = copy.deepcopy(start)
    ids, mask = enumerate_responses(model, _PROMPT, exact.CENTRE.max_len, _EOS).batch()
    generator = torch.Generator().manual_seed(8000 + seed)
    entropy = float(torch.special.entr(q).sum())
    first = float(-(q @ _log_probs(model, ids, mask).detach())) - entropy
    kind = torch.optim.SGD if name.startswith("sgd") else torch.optim.Adam
    optimiser = kind(model.parameters(), lr=rate)
    points: dict[str, dict[str, float | int]] = {}
    for step in range(config.most_steps + 1):
        log_probs = _log_probs(model, ids, mask)
        left = (float(-(q @ log_probs.detach())) - entropy) / first
        if step == config.steps:
            points[""] = _update_row(start, model, left, step, config)
        if " halved" not in points and (left <= 0.5 or step == config.most_steps):
            points[" halved"] = _update_row(start, model, left, step, config)
        if len(points) == 2:
            break
        weights = q
        if name.endswith("batch"):
            drawn = torch.multinomial(q, config.batch, replacement=True, generator=generator)
            weights = drawn.bincount(minlength=len(q)).to(q) / config.batch
        optimiser.zero_grad()
        (-(weights @ log_probs)).backward()
        optimiser.step()
    return points


def _rates(panel: Panel, probs: Tensor, q: Tensor, config: Config) -> dict[str, float]:
    """Learning rate of each run."""
    sgd = config.sgd_rate / float(panel.root_fisher.square().sum())
    matched = config.adam_rate * float(kl_divergence(q, probs)) ** 0.5
    return dict(zip(RUNS, (sgd, config.adam_rate, matched, sgd, config.adam_rate), strict=True))


def _log_probs(model: TinyTransformer, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of every response, differentiable."""
    chosen = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    return (chosen * mask[:, 1:]).sum(1)


def _update_row(
    start: TinyTransformer, end: TinyTransformer, left: float, step: int, config: Config
) -> dict[str, float | int]:
    """Collect what an update is by every rule."""
    with torch.no_grad():
        base, tuned = (torch.cat([p.flatten() for p in model.parameters()]) for model in (start, end))
        matrices = [
            stable_rank(b - a)
            for a, b in zip(start.parameters(), end.parameters(), strict=True)
            if a.ndim == 2 and bool((a != b).any())
        ]
    change, size = tuned - base, relative_size(base, tuned)
    stored = tuned.bfloat16().double() - base.bfloat16().double()
    return {
        "step": step,
        "left": left,
        "size": size,
        "bf16": update_sparsity(base, tuned, torch.bfloat16),
        "absolute": float((stored.abs() <= 1e-5).double().mean()),
        "relative": float((change.abs() <= 1e-3 * base.abs()).double().mean()),
        "bf16 at one length": update_sparsity(base, base + change * (config.length / size), torch.bfloat16),
        "top": energy_share(change, config.top_share),
        "stable rank": sum(matrices) / len(matrices),
    }


if __name__ == "__main__":
    raise SystemExit(record_command(run, FULL, SMOKE))
