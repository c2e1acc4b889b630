"""Slow, obvious oracles: what the fast code must agree with. For tests and chapters only.

Nothing here shares code with what it checks, beyond the data types.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ceilings.moments import ScoreMoments

__all__ = [
    "brute_force_enumeration",
    "finite_difference_gradient",
    "logit_derivative",
    "loop_score_moments",
    "per_sequence_scores",
]


def per_sequence_scores(
    model: nn.Module, input_ids: Tensor, response_mask: Tensor, attention_mask: Tensor | None = None
) -> dict[str, Tensor]:
    r"""Score of every response: real tokens alone, one forward and one backward pass a sequence.

    Parameters
    ----------
    model
        Maps token ids (1, T) to logits (1, T, V), or to an object with such ``logits``.
    input_ids, response_mask, attention_mask
        As in `ceilings.scores.score_moments`. Padding is cut out, not masked.

    Returns
    -------
    dict
        :math:`\nabla \log \pi(y_n)` by parameter name, stacked over sequences.

    Shapes
    ------
    input_ids, response_mask, attention_mask (N, T) -> ``(N, *parameter)``.

    Units
    -----
    1/[θ].
    """
    padding = {m: m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding)}
    for embedding in padding:
        embedding.padding_idx = (
            None  # autograd would drop that row's gradient although the policy depends on it
        )
    rows: list[tuple[Tensor, ...]] = []
    names, parameters = zip(*model.named_parameters(), strict=True)
    for n in range(len(input_ids)):
        real = torch.ones_like(response_mask[n]) if attention_mask is None else attention_mask[n].bool()
        ids, scored = input_ids[n][real], response_mask[n][real]
        output = model(ids[None])
        log_probs = getattr(output, "logits", output)[0].log_softmax(-1)
        log_prob = sum((log_probs[t - 1, ids[t]] for t in range(len(ids)) if scored[t]), torch.zeros(()))
        # An expert that a sequence is not routed to has the score zero.
        rows.append(torch.autograd.grad(log_prob, parameters, materialize_grads=True))
    for embedding, index in padding.items():
        embedding.padding_idx = index
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def loop_score_moments(
    model: nn.Module,
    input_ids: Tensor,
    response_mask: Tensor,
    rewards: Tensor,
    weights: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> ScoreMoments:
    r"""`ceilings.scores.score_moments`, written out: store every score, then sum.

    Parameters
    ----------
    model, input_ids, response_mask, rewards, weights, attention_mask
        As there. The reward shift is 0.

    Returns
    -------
    ScoreMoments
        The same sums, with memory proportional to the number of sequences.

    Shapes
    ------
    rewards (N,) or (N, K), weights (N,).
    """
    scores = per_sequence_scores(model, input_ids, response_mask, attention_mask)
    rewards = rewards.double() if rewards.dim() == 2 else rewards.double()[:, None]
    w = torch.ones(len(rewards), dtype=torch.float64) if weights is None else weights.double()
    columns = rewards.shape[1]
    return ScoreMoments(
        scores={name: torch.einsum("n,n...->...", w.to(s), s) for name, s in scores.items()},
        squares={name: torch.einsum("n,n...->...", w.to(s), s * s) for name, s in scores.items()},
        reward_scores={
            name: torch.einsum("n,nk,n...->k...", w.to(s), rewards.to(s), s) for name, s in scores.items()
        },
        reward_shift=torch.zeros(columns, dtype=torch.float64),
        reward_sum=w @ rewards,
        reward_squares=w @ rewards.square(),
        reward_names=("reward",) if columns == 1 else tuple(f"reward_{k}" for k in range(columns)),
        count=len(rewards),
        weight_sum=float(w.sum()),
        weighting="samples" if weights is None else "probabilities",
    )


def finite_difference_gradient(f: Callable[[Tensor], Tensor], theta: Tensor, step: float = 1e-5) -> Tensor:
    """Gradient of a scalar function by central differences.

    Parameters
    ----------
    f
        The function.
    theta
        Where.
    step
        Half the distance between the two points; the error is of order ``step ** 2``, plus rounding over
        ``step``.

    Returns
    -------
    Tensor
        The gradient.

    Shapes
    ------
    theta (D,) -> (D,).
    """
    gradient = torch.zeros_like(theta)
    for i in range(len(theta)):
        move = torch.zeros_like(theta)
        move[i] = step
        gradient[i] = (f(theta + move) - f(theta - move)) / (2 * step)
    return gradient


def brute_force_enumeration(
    next_token_probs: Callable[[tuple[int, ...]], Tensor],
    vocab_size: int,
    max_len: int,
    eos: int | None = None,
) -> dict[tuple[int, ...], float]:
    """Law of all responses: try every string, keep those that end where they should.

    Parameters
    ----------
    next_token_probs
        Law of the next token after a prefix of the response.
    vocab_size
        Number of tokens, V.
    max_len
        Longest response.
    eos
        Token that ends a response, or None.

    Returns
    -------
    dict
        Probability of each response.

    Shapes
    ------
    next_token_probs -> (V,).
    """
    law: dict[tuple[int, ...], float] = {}
    for length in range(1, max_len + 1):
        for y in itertools.product(range(vocab_size), repeat=length):
            ends_well = y[-1] == eos or length == max_len
            if eos in y[:-1] or not ends_well:
                continue
            probability = 1.0
            for t, token in enumerate(y):
                probability *= float(next_token_probs(y[:t])[token])
            law[y] = probability
    return law


def logit_derivative(model: nn.Module, input_ids: Tensor, name: str, place: tuple[int, ...]) -> Tensor:
    r"""Derivative of every next-token logit in one parameter, by forward-mode differentiation.

    Parameters
    ----------
    model
        A causal language model of `transformers`.
    input_ids
        The prompt.
    name, place
        The parameter: its tensor's name and its index there.

    Returns
    -------
    Tensor
        :math:`\partial_i z`, float64.

    Shapes
    ------
    input_ids (T,) -> (V,).

    Units
    -----
    1/[θ].

    Notes
    -----
    No backward pass and no score is involved; with :math:`F_{ii} = \operatorname{Var}_\pi(\partial_i z)` it gives one
    entry of the Fisher diagonal over the whole vocabulary.

    References
    ----------
    Claim ``thm-logits``.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    weight = dict(model.named_parameters())[name].detach()
    direction = torch.zeros_like(weight)
    direction[place] = 1

    def logits(w: Tensor) -> Tensor:
        keywords = {"input_ids": input_ids[None], "use_cache": False}
        return torch.func.functional_call(model, {name: w}, (), keywords).logits[0, -1]

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward mode
        return torch.func.jvp(logits, (weight,), (direction,))[1].double()
