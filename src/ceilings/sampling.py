r"""Sampling responses from a model's own law: temperature 1, nothing cut off.

The theorems are about the policy itself. Any other temperature, top-k or top-p is another law, whose scores under
this one do not have mean zero (``prop-assumptions``); so there are no such options here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["Sampled", "sample_responses"]

_CACHE_METHODS: Final = ("batch_repeat_interleave", "batch_select_indices")


@dataclass(frozen=True, eq=False)
class Sampled:
    r"""Responses drawn to some prompts.

    Parameters
    ----------
    response_ids
        Tokens, prompt by prompt, each ending with an end token unless it ran out of room.
    log_probs
        :math:`\log \pi(y_t \mid y_{<t})` of the tokens that were drawn.
    laws
        The whole laws, as log-probabilities; None unless asked for.

    Shapes
    ------
    log_probs: one tensor (T,) a response; laws: one tensor (T, V).
    """

    response_ids: tuple[tuple[int, ...], ...]
    log_probs: tuple[Tensor, ...]
    laws: tuple[Tensor, ...] | None


@torch.no_grad()
def sample_responses(
    model: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    samples: int,
    generators: Sequence[torch.Generator],
    *,
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    keep_laws: bool = False,
) -> Sampled:
    r"""Draw responses to a few prompts in one batch, at temperature 1.

    Parameters
    ----------
    model
        A causal language model, such as `load_pretrained` returns. It is switched to evaluation mode and back.
    prompts
        Their tokens.
    samples
        Responses a prompt, G.
    generators
        Source of randomness of each prompt: what is drawn for one does not depend on the others.
    max_new_tokens
        Where a response is stopped. Such a response is scored without an end token, which is the law of the
        stopped response.
    end_ids
        Tokens that end a response.
    keep_laws
        Whether to keep every next-token law: V numbers a token.

    Returns
    -------
    Sampled
        G responses to the first prompt, then to the second, and so on.

    Raises
    ------
    ValueError
        If there is nothing to sample, or not one generator a prompt.

    Notes
    -----
    A token is drawn by inverting the distribution function, in float64. Prompts of unequal length are padded on the
    left; a model that takes no positions gets them one at a time instead.
    """
    if not prompts or samples < 1 or max_new_tokens < 1:
        raise ValueError(
            f"{len(prompts)} prompts, {samples} samples, {max_new_tokens} new tokens: each must be at least 1"
        )
    if len(generators) != len(prompts):
        raise ValueError(f"{len(generators)} generators for {len(prompts)} prompts: give one each")
    accepted = inspect.signature(model.forward).parameters
    padded = len({len(prompt) for prompt in prompts}) > 1
    if padded and not {"attention_mask", "position_ids"} <= accepted.keys():
        parts = [
            sample_responses(
                model,
                [prompt],
                samples,
                [generator],
                max_new_tokens=max_new_tokens,
                end_ids=end_ids,
                keep_laws=keep_laws,
            )
            for prompt, generator in zip(prompts, generators, strict=True)
        ]
        return _joined(parts)
    training = model.training
    model.eval()
    try:
        return _drawn(
            _Decoder(model, prompts, samples), generators, max_new_tokens, tuple(end_ids), keep_laws
        )
    finally:
        model.train(training)


class _Decoder:
    """The forward passes: the prompts once, then one token a row at a time."""

    def __init__(self, model: nn.Module, prompts: Sequence[tuple[int, ...]], samples: int) -> None:
        self._model, self.samples, self.rows = model, samples, len(prompts) * samples
        self._accepts = inspect.signature(model.forward).parameters
        # What the cache is called depends on the version of `transformers`.
        self._cache_name = next(
            (name for name in ("cache", "past_key_values") if name in self._accepts), None
        )
        self._caches = self._cache_name is not None
        self._cache: Any = None
        device = next(model.parameters()).device
        width = max(len(prompt) for prompt in prompts)
        self._ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
        self._attention = torch.zeros_like(self._ids)
        for row, prompt in enumerate(prompts):
            self._ids[row, width - len(prompt) :] = torch.tensor(prompt)
            self._attention[row, width - len(prompt) :] = 1

    def first(self) -> Tensor:
        """Logits after the prompts, one row a response."""
        logits = self._run(self._ids)
        self._caches = all(hasattr(self._cache, name) for name in _CACHE_METHODS)
        if self._caches:
            self._cache.batch_repeat_interleave(self.samples)
        self._ids = self._ids.repeat_interleave(self.samples, 0)
        self._attention = self._attention.repeat_interleave(self.samples, 0)
        return logits.repeat_interleave(self.samples, 0)

    def next(self, tokens: Tensor) -> Tensor:
        """Logits after one more token a row."""
        tokens = tokens.to(self._ids)[:, None]
        self._ids = torch.cat([self._ids, tokens], 1)
        self._attention = torch.cat([self._attention, torch.ones_like(tokens)], 1)
        return self._run(tokens if self._caches else self._ids)

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the rows only."""
        rows = rows.to(self._ids.device)
        self._ids, self._attention = self._ids[rows], self._attention[rows]
        if self._caches:
            self._cache.batch_select_indices(rows)

    def _run(self, ids: Tensor) -> Tensor:
        """One forward pass; logits of the last position."""
        positions = (self._attention.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        extra: dict[str, Any] = {
            "attention_mask": self._attention,
            "position_ids": positions,
            "use_cache": self._caches,
            "logits_to_keep": 1,
        }
        if self._caches:
            extra[str(self._cache_name)] = self._cache
        output = self._model(ids, **{name: value for name, value in extra.items() if name in self._accepts})
        if self._caches:
            self._cache = getattr(output, str(self._cache_name), None)
        logits: Tensor = getattr(output, "logits", output)
        return logits[:, -1]


def _drawn(
    decoder: _Decoder,
    generators: Sequence[torch.Generator],
    max_new_tokens: int,
    end_ids: tuple[int, ...],
    keep_laws: bool,
) -> Sampled:
    """Draw until every row has ended or run out of room."""
    tokens: list[list[int]] = [[] for _ in range(decoder.rows)]
    chosen: list[list[float]] = [[] for _ in range(decoder.rows)]
    laws: list[list[Tensor]] = [[] for _ in range(decoder.rows)]
    alive = torch.arange(decoder.rows)
    logits = decoder.first()
    for step in range(max_new_tokens):
        law = logits.double().log_softmax(-1).cpu()
        # NOTE every row takes a number at every step, ended or not: so no row's draws depend on another's.
        uniform = torch.cat(
            [torch.rand(decoder.samples, generator=g, dtype=torch.float64) for g in generators]
        )
        drawn = _inverted(law, uniform[alive])
        for place, row in enumerate(alive.tolist()):
            token = int(drawn[place])
            tokens[row].append(token)
            chosen[row].append(float(law[place, token]))
            if keep_laws:
                laws[row].append(law[place].float())
        going = torch.tensor([int(token) not in end_ids for token in drawn], dtype=torch.bool)
        if not bool(going.any()) or step == max_new_tokens - 1:
            break
        if not bool(going.all()):
            decoder.keep(going.nonzero()[:, 0])
            alive, drawn = alive[going], drawn[going]
        logits = decoder.next(drawn)
    return Sampled(
        tuple(map(tuple, tokens)),
        tuple(torch.tensor(row, dtype=torch.float32) for row in chosen),
        tuple(torch.stack(rows) for rows in laws) if keep_laws else None,
    )


def _inverted(law: Tensor, uniform: Tensor) -> Tensor:
    """Token in whose interval of the distribution function each number falls."""
    cumulated = law.exp().cumsum(-1)
    target = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp_max(law.shape[-1] - 1)


def _joined(parts: list[Sampled]) -> Sampled:
    """Several draws as one."""
    return Sampled(
        tuple(ids for part in parts for ids in part.response_ids),
        tuple(row for part in parts for row in part.log_probs),
        None if parts[0].laws is None else tuple(law for part in parts for law in part.laws or ()),
    )
