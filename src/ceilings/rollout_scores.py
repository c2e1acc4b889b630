r"""Scores of sampled responses at chosen parameters, kept as a matrix: many null models then cost one product each.

The moments of `ceilings.scores` need one sum a parameter for every reward. Where twenty permuted rewards stand beside
the real one, it is cheaper to keep the scores of some parameters, drawn at random beforehand, response by response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

__all__ = ["SplitTightness", "response_scores", "split_tightness"]

# Below this share of the largest a variance is rounding: the parameter does not move the law.
_CONSTANT: Final = 1e-24


def response_scores(
    model: nn.Module, prompt: tuple[int, ...], responses: Sequence[tuple[int, ...]], where: dict[str, Tensor]
) -> Tensor:
    r"""Scores :math:`\sum_t \partial_i \log \pi(y_t \mid x, y_{<t})` of responses to one prompt.

    Parameters
    ----------
    model
        A causal language model: token ids to an object with logits. Its gradients are left alone.
    prompt
        x.
    responses
        The y; equal ones are differentiated once.
    where
        Flat positions by parameter name.

    Returns
    -------
    Tensor
        One row a response, columns in the order of ``where``.

    Shapes
    ------
    N responses, M positions in all -> (N, M).

    Units
    -----
    1/[θ].

    Raises
    ------
    ValueError
        If the prompt or a response has no token, or a name is unknown.
    """
    parameters = dict(model.named_parameters())
    if unknown := set(where) - set(parameters):
        raise ValueError(f"{sorted(unknown)[0]!r} is no parameter of this model; see `named_parameters`")
    if not prompt or not all(responses):
        raise ValueError("the prompt or a response has no token: there is nothing to score")
    wanted = [parameters[name] for name in where]
    rows: dict[tuple[int, ...], Tensor] = {}
    for response in responses:
        if response in rows:
            continue
        ids = torch.tensor([prompt + response])
        with torch.enable_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            log_prob = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).sum()
        found = torch.autograd.grad(log_prob, wanted, materialize_grads=True)
        rows[response] = torch.cat([g.flatten()[w] for g, w in zip(found, where.values(), strict=True)])
    return torch.stack([rows[response] for response in responses])


@dataclass(frozen=True)
class SplitTightness:
    r"""Tightness of several rewards from one sample, averaged over parameters; NaN for a reward that is constant.

    Parameters
    ----------
    squares
        Mean of `ceilings.uncertainty.cross_fitted_squares`: unbiased for the mean of :math:`\rho_i^2` up to a relative
        error of order 1/N, and negative by chance where that is zero.
    mean
        Mean of `ceilings.uncertainty.cross_fitted_tightness`.
    in_sample
        Mean of :math:`\hat\rho_i^2` from the same responses that it judges.
    parameters
        How many parameters vary.

    Shapes
    ------
    squares, mean, in_sample (K,).

    Units
    -----
    1.
    """

    squares: Tensor
    mean: Tensor
    in_sample: Tensor
    parameters: int


def split_tightness(
    scores: Tensor, rewards: Tensor, splits: int, generator: torch.Generator
) -> SplitTightness:
    """Cross-fitted tightness of many rewards, averaged over random splits of one sample into halves.

    Parameters
    ----------
    scores
        One row a response.
    rewards
        One row a reward, such as a real one and permuted copies.
    splits
        Number of splits.
    generator
        Source of the splits, which are the same for all rewards.

    Returns
    -------
    SplitTightness
        Averages over the parameters that vary.

    Shapes
    ------
    scores (N, M), rewards (K, N).

    Raises
    ------
    ValueError
        If there are fewer than four responses, rewards do not fit them, or no score varies.
    """
    count = len(scores)
    if count < 4 or rewards.ndim != 2 or rewards.shape[1] != count or splits < 1:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)} for {count} responses, splits is {splits}: "
            "give at least four responses, one row a reward and at least one split"
        )
    s = scores.double() - scores.double().mean(0)
    fisher = s.square().mean(0)
    varies = fisher > _CONSTANT * fisher.max()
    if not bool(varies.any()):
        raise ValueError("no score varies: all responses are alike, so sample more or another prompt")
    s = s[:, varies] / fisher[varies].sqrt()
    r = rewards.double() - rewards.double().mean(1, keepdim=True)
    spread = r.square().mean(1, keepdim=True).sqrt()
    constant = (rewards == rewards[:, :1]).all(1, keepdim=True)
    r = torch.where(constant, torch.nan, r / spread)
    squares = mean = torch.zeros(len(r), dtype=torch.float64)
    for _ in range(splits):
        order = torch.randperm(count, generator=generator)
        two = order[: count // 2], order[count // 2 :]
        a, b = ((count - 1) / count * _covariance(s[half], r[:, half]) for half in two)
        squares = squares + (a * b).mean(1) / splits
        mean = mean + (a.sign() * b + b.sign() * a).mean(1) / (2 * splits)
    in_sample = (r @ s / count).square().mean(1)
    return SplitTightness(squares, mean, in_sample, int(varies.sum()))


def _covariance(scores: Tensor, rewards: Tensor) -> Tensor:
    """Covariance that divides by N − 1."""
    return (rewards - rewards.mean(1, keepdim=True)) @ scores / (len(scores) - 1)
