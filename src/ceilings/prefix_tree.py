r"""All responses of a causal language model, from its prefix tree.

A response ends with the token ``eos`` or at ``max_len`` tokens, so the responses are the leaves of a finite
tree and their probabilities sum to 1. A causal model gives the next-token law after *every* prefix of a row
at once: one forward pass over the open prefixes of length ``max_len - 1`` holds the whole tree, V times fewer
rows than there are responses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ceilings.policies import Enumeration

__all__ = ["ResponseLaw", "enumerate_responses", "enumeration", "expected_reward"]


@dataclass(frozen=True)
class ResponseLaw:
    r"""Every response to one prompt with its probability; an `Enumeration` without the scores.

    Parameters
    ----------
    prompt
        The tokens before the response.
    responses
        The responses in lexicographic order, each a tuple of token ids.
    probs
        :math:`\pi_\theta(y)`; they sum to 1.
    token_log_probs
        :math:`\log \pi_\theta(y_t \mid y_{<t})`, zero after the response has ended.
    lengths
        Number of tokens of each response, the end token included.

    Shapes
    ------
    responses Y tuples, probs (Y,), token_log_probs (Y, T), lengths (Y,).
    """

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    probs: Tensor
    token_log_probs: Tensor
    lengths: Tensor

    def batch(self) -> tuple[Tensor, Tensor]:
        """Token rows as `ceilings.scores.score_moments` takes them.

        Returns
        -------
        tuple
            ``input_ids``: prompt and response, padded on the right with token 0; ``response_mask``: True at
            the tokens of the response.

        Shapes
        ------
        -> (Y, P + T), (Y, P + T) with P the length of the prompt.
        """
        steps = torch.arange(self.token_log_probs.shape[1])
        mask = steps < self.lengths[:, None]
        prompt = torch.tensor(self.prompt).expand(len(self.responses), -1)
        ids = torch.cat([prompt, _padded(self.responses, len(steps))], dim=1)
        return ids, torch.cat([torch.zeros_like(prompt, dtype=torch.bool), mask], dim=1)


def enumerate_responses(
    model: nn.Module, prompt: tuple[int, ...], max_len: int, eos: int | None = None
) -> ResponseLaw:
    r"""Every response of a causal model to one prompt, with its probability.

    Parameters
    ----------
    model
        Maps token ids (N, T) to logits (N, T, V), or to an object with such ``logits``.
    prompt
        At least one token.
    max_len
        Longest response, in tokens.
    eos
        Token that ends a response, or None: then every response has ``max_len`` tokens.

    Returns
    -------
    ResponseLaw
        Responses in lexicographic order, detached from the graph.

    Raises
    ------
    ValueError
        If the prompt is empty, ``max_len`` is not positive, or ``eos`` is not a token.

    Notes
    -----
    Costs one forward pass over :math:`V^{L-1}` rows for :math:`V^L` responses.
    """
    with torch.no_grad():
        return _response_law(model, prompt, max_len, eos)


def expected_reward(
    model: nn.Module,
    prompt: tuple[int, ...],
    rewards: Tensor | Callable[[tuple[int, ...]], float],
    max_len: int,
    eos: int | None = None,
) -> Tensor:
    r"""Exact :math:`E_\pi[R]`, differentiable in the parameters of the model.

    Parameters
    ----------
    model, prompt, max_len, eos
        As in `enumerate_responses`.
    rewards
        Reward of every response in the order of `enumerate_responses`, or a function of the response.

    Returns
    -------
    Tensor
        A scalar. Its ``backward()`` is one pass through the tree and gives the exact policy gradient.

    Shapes
    ------
    rewards (Y,) -> ().

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If the number of rewards is not the number of responses.

    References
    ----------
    Claim ``thm-covariance``.
    """
    law = _response_law(model, prompt, max_len, eos)
    if callable(rewards):
        rewards = torch.tensor([float(rewards(y)) for y in law.responses], dtype=law.probs.dtype)
    if rewards.shape != law.probs.shape:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} for {len(law.probs)} responses: give one each"
        )
    return law.probs @ rewards.to(law.probs)


def enumeration(
    model: nn.Module, prompt: tuple[int, ...], max_len: int, eos: int | None = None, chunk: int = 64
) -> Enumeration:
    r"""Every response of a small model with its scores.

    Parameters
    ----------
    model, prompt, max_len, eos
        As in `enumerate_responses`.
    chunk
        Token scores formed at once; bounds the memory of the work, not of the result.

    Returns
    -------
    Enumeration
        Scores are flat, in the order of ``named_parameters()``; a tied matrix appears once.

    Shapes
    ------
    scores (Y, D), token_scores (Y, T, D).

    Units
    -----
    scores 1/[θ].

    Notes
    -----
    Stores Y (T + 1) D numbers: for small models. `ceilings.scores.score_moments` sums what a claim needs of a
    larger one without storing a score. Each distinct (prefix, token) is differentiated once, however many
    responses pass through it.
    """
    law = enumerate_responses(model, prompt, max_len, eos)
    index: dict[tuple[int, ...], int] = {}
    edges = [[index.setdefault(y[: t + 1], len(index)) for t in range(len(y))] for y in law.responses]
    edge_scores = _edge_scores(model, prompt, list(index), max_len, chunk)
    token_scores = torch.zeros(*law.token_log_probs.shape, edge_scores.shape[1], dtype=edge_scores.dtype)
    for row, path in enumerate(edges):
        token_scores[row, : len(path)] = edge_scores[path]
    return Enumeration(
        responses=law.responses,
        probs=law.probs,
        scores=token_scores.sum(1),
        token_scores=token_scores,
        token_log_probs=law.token_log_probs,
        lengths=law.lengths,
    )


def _response_law(model: nn.Module, prompt: tuple[int, ...], max_len: int, eos: int | None) -> ResponseLaw:
    """Law of the responses, still attached to the graph."""
    if not prompt or max_len < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens and max_len {max_len}: both must be at least 1")
    vocab_size = _next_token_log_probs(model, torch.tensor([prompt])).shape[-1]
    if eos is not None and not 0 <= eos < vocab_size:
        raise ValueError(f"eos is {eos}, not one of the {vocab_size} tokens")
    open_tokens = [v for v in range(vocab_size) if v != eos]
    prefixes = list(itertools.product(open_tokens, repeat=max_len - 1))
    rows = torch.tensor([prompt + p for p in prefixes])
    log_probs = _next_token_log_probs(model, rows)[:, len(prompt) - 1 :]
    responses, row_of = _leaves(prefixes, vocab_size, eos)
    lengths = torch.tensor([len(y) for y in responses])
    steps = torch.arange(max_len)
    picked = log_probs[torch.tensor(row_of)[:, None], steps, _padded(responses, max_len)]
    token_log_probs = picked.masked_fill(steps >= lengths[:, None], 0.0)
    return ResponseLaw(prompt, responses, token_log_probs.sum(1).exp(), token_log_probs, lengths)


def _leaves(
    prefixes: list[tuple[int, ...]], vocab_size: int, eos: int | None
) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Responses in order, and for each a row of ``prefixes`` that starts with all but its last token."""
    leaves: dict[tuple[int, ...], int] = {}
    for row, prefix in enumerate(prefixes):
        leaves.update({(*prefix, v): row for v in range(vocab_size)})
        if eos is not None:
            for t in range(len(prefix)):
                leaves.setdefault((*prefix[:t], eos), row)
    responses = tuple(sorted(leaves))
    return responses, [leaves[y] for y in responses]


def _edge_scores(
    model: nn.Module, prompt: tuple[int, ...], edges: list[tuple[int, ...]], max_len: int, chunk: int
) -> Tensor:
    """Score of the last token of each edge (prefix, token), flat."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    names = list(parameters)

    def log_prob(values: dict[str, Tensor], row: Tensor, last: Tensor) -> Tensor:
        output = torch.func.functional_call(model, values, (row[None],))
        log_probs = getattr(output, "logits", output)[0].log_softmax(-1)
        token_log_probs = log_probs[:-1].gather(1, row[1:, None])[:, 0]
        return token_log_probs.gather(0, (last - 1)[None])[0]

    rows = torch.cat([torch.tensor(prompt).expand(len(edges), -1), _padded(tuple(edges), max_len)], dim=1)
    last = torch.tensor([len(prompt) + len(e) - 1 for e in edges])
    per_row = torch.func.vmap(torch.func.grad(log_prob), in_dims=(None, 0, 0), chunk_size=chunk)
    scores = per_row(parameters, rows, last)
    return torch.cat([scores[name].flatten(1) for name in names], dim=1)


def _next_token_log_probs(model: nn.Module, rows: Tensor) -> Tensor:
    """Log of the next-token law at every position."""
    output = model(rows)
    return getattr(output, "logits", output).log_softmax(-1)


def _padded(responses: tuple[tuple[int, ...], ...], length: int) -> Tensor:
    """Token ids, padded on the right with token 0: later positions do not reach earlier ones."""
    return torch.tensor([y + (0,) * (length - len(y)) for y in responses])
