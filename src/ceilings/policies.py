r"""Policies small enough to enumerate: every expectation is a finite sum.

Two kinds. A `SoftmaxPolicy` answers with one of :math:`|Y|` options whose logits are any differentiable
function of the parameters. An `AutoregressivePolicy` answers with a sequence of tokens that may stop early.
Both turn a parameter vector into an `Enumeration`: all responses with their probabilities and scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

__all__ = ["AutoregressivePolicy", "Enumeration", "SoftmaxPolicy", "check_probs"]

_SUM_TOLERANCE: Final = 1e-9


def check_probs(probs: Tensor, name: str = "probs") -> None:
    """Refuse anything that is not the full law of a finite set of responses.

    Parameters
    ----------
    probs
        The candidate probabilities.
    name
        What to call them in the error.

    Shapes
    ------
    probs (Y,).

    Raises
    ------
    ValueError
        If ``probs`` is empty, not one-dimensional, not floating point, has an entry that is NaN or negative,
        or does not sum to 1 (a truncated support).
    """
    if probs.ndim != 1 or not probs.is_floating_point():
        raise ValueError(
            f"{name} must be a floating-point vector (Y,), got {probs.dtype} of shape {tuple(probs.shape)}"
        )
    if len(probs) == 0:
        raise ValueError(f"{name} is empty: a policy needs at least one response")
    if bool(torch.isnan(probs).any()) or bool((probs < 0).any()):
        raise ValueError(f"{name} has a NaN or negative entry: probabilities lie in [0, 1]")
    total = float(probs.sum())
    tolerance = _SUM_TOLERANCE if probs.dtype == torch.float64 else 1e-4
    if abs(total - 1) > tolerance:
        raise ValueError(
            f"{name} sums to {total:.9g}, not 1: the support is truncated or the weights are not normalised; "
            "pass every response, or renormalise and say so"
        )


@dataclass(frozen=True)
class Enumeration:
    r"""Every response of a policy at one parameter vector, with probabilities and scores.

    Parameters
    ----------
    responses
        The responses, each a tuple of token ids.
    probs
        :math:`\pi_\theta(y)`.
    scores
        :math:`s(y) = \nabla_\theta \log \pi_\theta(y)`.
    token_scores
        :math:`s_t(y) = \nabla_\theta \log \pi_\theta(y_t \mid y_{<t})`, zero after the response has ended.
    token_log_probs
        :math:`\log \pi_\theta(y_t \mid y_{<t})`, zero after the response has ended.
    lengths
        Number of tokens of each response, the end token included.

    Shapes
    ------
    responses Y tuples, probs (Y,), scores (Y, D), token_scores (Y, T, D), token_log_probs (Y, T),
    lengths (Y,).

    Units
    -----
    scores and token_scores 1/[θ].

    Raises
    ------
    ValueError
        If the shapes disagree or ``probs`` is not the full law of the responses.
    """

    responses: tuple[tuple[int, ...], ...]
    probs: Tensor
    scores: Tensor
    token_scores: Tensor
    token_log_probs: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        """Check that the six fields describe one set of responses."""
        check_probs(self.probs)
        if bool((self.probs == 0).any()):
            zero = int((self.probs == 0).nonzero()[0])
            raise ValueError(
                f"response {zero} has probability zero, hence no score: leave it out of the support"
            )
        n = len(self.probs)
        if self.scores.ndim != 2:
            raise ValueError(f"scores must have shape (Y, D), got {tuple(self.scores.shape)}")
        sizes = {
            "responses": len(self.responses),
            "scores": len(self.scores),
            "token_scores": len(self.token_scores),
            "token_log_probs": len(self.token_log_probs),
            "lengths": len(self.lengths),
        }
        for name, size in sizes.items():
            if size != n:
                raise ValueError(f"{n} probabilities but {size} rows in {name}: give one row a response")
        if self.token_scores.ndim != 3 or self.token_scores.shape[2] != self.scores.shape[1]:
            raise ValueError(
                f"token_scores has shape {tuple(self.token_scores.shape)}; "
                f"expected (Y, T, D) with D = {self.scores.shape[1]}"
            )
        if self.token_log_probs.shape != self.token_scores.shape[:2]:
            raise ValueError(
                f"token_log_probs has shape {tuple(self.token_log_probs.shape)}; "
                f"expected (Y, T) = {tuple(self.token_scores.shape[:2])} as in token_scores"
            )
        if self.lengths.tolist() != [len(y) for y in self.responses]:
            raise ValueError(
                "lengths must hold the number of tokens of each response, the end token included"
            )
        if len(set(self.responses)) != n:
            raise ValueError(
                "a response is listed twice: add the probabilities of equal responses, one row a response"
            )

    def rewards(self, reward: Callable[[tuple[int, ...]], float]) -> Tensor:
        """Reward of every response.

        Parameters
        ----------
        reward
            Maps a response to a number; it must not depend on θ.

        Returns
        -------
        Tensor
            ``reward(y)`` for each response, in the dtype of ``probs``.

        Shapes
        ------
        -> (Y,).

        Units
        -----
        [R].
        """
        return torch.tensor([float(reward(y)) for y in self.responses], dtype=self.probs.dtype)


class SoftmaxPolicy:
    r"""One choice among :math:`|Y|` options, :math:`\pi_\theta = \mathrm{softmax}(z(\theta))`.

    Parameters
    ----------
    logits
        Differentiable map from the parameters to the logits.

    Shapes
    ------
    logits (D,) -> (Y,).

    Examples
    --------
    >>> import torch
    >>> policy = SoftmaxPolicy(lambda theta: theta)
    >>> policy.probs(torch.zeros(4, dtype=torch.float64)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self.logits = logits

    def log_probs(self, theta: Tensor) -> Tensor:
        """Log-probability of every option.

        Parameters
        ----------
        theta
            The parameters.

        Returns
        -------
        Tensor
            Log-probabilities.

        Shapes
        ------
        theta (D,) -> (Y,).

        Raises
        ------
        ValueError
            If the logits are not a finite vector.
        """
        z = self.logits(theta)
        if z.ndim != 1 or len(z) == 0:
            raise ValueError(f"logits must be a non-empty vector (Y,), got shape {tuple(z.shape)}")
        # NOTE a -inf logit is a response of probability zero: its log-probability has no derivative.
        if not bool(torch.isfinite(z).all()):
            raise ValueError(
                "a logit is infinite or NaN: an option of probability zero has no score; "
                "leave it out of the support"
            )
        return torch.log_softmax(z, dim=0)

    def probs(self, theta: Tensor) -> Tensor:
        """Probability of every option.

        Parameters
        ----------
        theta
            The parameters.

        Returns
        -------
        Tensor
            Probabilities, summing to 1.

        Shapes
        ------
        theta (D,) -> (Y,).
        """
        return self.log_probs(theta).exp()

    def scores(self, theta: Tensor) -> Tensor:
        r"""Score of every option, :math:`\nabla_\theta \log \pi_\theta(y)`, by automatic differentiation.

        Parameters
        ----------
        theta
            The parameters.

        Returns
        -------
        Tensor
            One score a row.

        Shapes
        ------
        theta (D,) -> (Y, D).

        Units
        -----
        1/[θ].
        """
        self.log_probs(theta)  # refuses infinite logits, which the transform below cannot inspect
        return torch.func.jacrev(lambda point: torch.log_softmax(self.logits(point), dim=0))(theta)

    def enumerate(self, theta: Tensor) -> Enumeration:
        """All options as responses of one token.

        Parameters
        ----------
        theta
            The parameters.

        Returns
        -------
        Enumeration
            Responses ``(0,), (1,), …``.

        Shapes
        ------
        theta (D,).
        """
        log_probs, scores = self.log_probs(theta).detach(), self.scores(theta).detach()
        n = len(log_probs)
        return Enumeration(
            responses=tuple((a,) for a in range(n)),
            probs=log_probs.exp(),
            scores=scores,
            token_scores=scores[:, None, :],
            token_log_probs=log_probs[:, None],
            lengths=torch.ones(n, dtype=torch.long),
        )


class AutoregressivePolicy:
    r"""Sequences of tokens, one softmax a prefix: :math:`z_v(y_{<t}) = \phi(y_{<t}, v)^\top \theta`.

    A response ends with the token ``eos`` or at ``max_len`` tokens, so that the responses are the leaves of a
    finite tree and their probabilities sum to 1. Prefixes share parameters through their features.

    Parameters
    ----------
    features
        Feature vector of every token at every open prefix, in the order of `prefixes`.
    max_len
        Longest response, in tokens.
    eos
        Token that ends a response, or None: then every response has ``max_len`` tokens.

    Shapes
    ------
    features (P, V, D) with P the number of open prefixes.

    Raises
    ------
    ValueError
        If ``features`` does not have one row an open prefix, or ``eos`` is not one of its V tokens.
    """

    def __init__(self, features: Tensor, max_len: int, eos: int | None = None) -> None:
        if features.ndim != 3:
            raise ValueError(f"features must have shape (P, V, D), got {tuple(features.shape)}")
        if max_len < 1:
            raise ValueError(f"max_len is {max_len}: a response needs at least one token")
        # NOTE an end token outside the vocabulary would never be drawn: every response would run to max_len.
        if eos is not None and not 0 <= eos < features.shape[1]:
            raise ValueError(
                f"eos is {eos}, but the {features.shape[1]} tokens are 0 to {features.shape[1] - 1}"
            )
        self.features, self.max_len, self.eos = features, max_len, eos
        self.prefixes = self.open_prefixes(features.shape[1], max_len, eos)
        if len(features) != len(self.prefixes):
            raise ValueError(
                f"features for {len(features)} prefixes, but V = {features.shape[1]}, max_len = {max_len}, "
                f"eos = {eos} has {len(self.prefixes)} open prefixes"
            )

    @staticmethod
    def open_prefixes(vocab_size: int, max_len: int, eos: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Prefixes after which the policy still chooses a token, shortest first.

        Parameters
        ----------
        vocab_size
            Number of tokens V.
        max_len
            Longest response, in tokens.
        eos
            Token that ends a response, or None.

        Returns
        -------
        tuple
            The prefixes, each a tuple of token ids.
        """
        tokens = [v for v in range(vocab_size) if v != eos]
        return tuple(p for t in range(max_len) for p in itertools.product(tokens, repeat=t))

    @classmethod
    def random(
        cls,
        vocab_size: int,
        max_len: int,
        num_parameters: int,
        generator: torch.Generator,
        eos: int | None = None,
    ) -> AutoregressivePolicy:
        """Policy with standard normal features, in float64.

        Parameters
        ----------
        vocab_size
            Number of tokens V.
        max_len
            Longest response, in tokens.
        num_parameters
            Number of parameters D.
        generator
            Source of the features.
        eos
            Token that ends a response, or None.

        Returns
        -------
        AutoregressivePolicy
            The policy.
        """
        prefixes = len(cls.open_prefixes(vocab_size, max_len, eos))
        features = torch.randn(prefixes, vocab_size, num_parameters, generator=generator, dtype=torch.float64)
        return cls(features, max_len, eos)

    def enumerate(self, theta: Tensor) -> Enumeration:
        """All responses with probabilities, scores and token scores.

        Parameters
        ----------
        theta
            The parameters.

        Returns
        -------
        Enumeration
            Responses in lexicographic order of the tree.

        Shapes
        ------
        theta (D,).

        Raises
        ------
        ValueError
            If ``theta`` does not match the features in shape or dtype.
        """
        if theta.shape != self.features.shape[2:]:
            raise ValueError(
                f"theta has shape {tuple(theta.shape)}; the features expect {tuple(self.features.shape[2:])}"
            )
        if theta.dtype != self.features.dtype:
            raise ValueError(
                f"theta is {theta.dtype} and the features {self.features.dtype}: cast one of them on purpose"
            )
        log_probs = torch.log_softmax(self.features @ theta, dim=1)
        mean_features = torch.einsum("pv,pvd->pd", log_probs.exp(), self.features)
        token_scores = self.features - mean_features[:, None, :]  # thm-logits: ∂z_v − E ∂z
        return self.assemble(log_probs, token_scores)

    def assemble(self, log_probs: Tensor, token_scores: Tensor) -> Enumeration:
        """Law of the responses, given the law of the next token at every open prefix.

        `enumerate` passes the policy's own; a sampler that bends the next-token law passes another.

        Parameters
        ----------
        log_probs
            Log-probability of every token at every open prefix; −inf for a token that is never drawn there.
        token_scores
            Derivative of ``log_probs`` in the parameters; ignored where a token is never drawn.

        Returns
        -------
        Enumeration
            Responses of positive probability, in lexicographic order of the tree.

        Shapes
        ------
        log_probs (P, V), token_scores (P, V, D).

        Raises
        ------
        ValueError
            If the shapes do not fit the tree.
        """
        if log_probs.shape != self.features.shape[:2] or token_scores.shape[:2] != log_probs.shape:
            raise ValueError(
                f"log_probs has shape {tuple(log_probs.shape)} and token_scores {tuple(token_scores.shape)}; "
                f"the tree needs (P, V) = {tuple(self.features.shape[:2])} and (P, V, D)"
            )
        prefix, token, taken = self._steps
        rows = (log_probs[prefix, token].masked_fill(~taken, 0).sum(1) > -torch.inf).nonzero()[:, 0]
        prefix, token, taken = prefix[rows], token[rows], taken[rows]
        step_log_probs = log_probs[prefix, token].masked_fill(~taken, 0)
        step_scores = token_scores[prefix, token].masked_fill(~taken[:, :, None], 0)
        return Enumeration(
            responses=tuple(self._responses[int(row)] for row in rows),
            probs=step_log_probs.sum(1).exp(),
            scores=step_scores.sum(1),
            token_scores=step_scores,
            token_log_probs=step_log_probs,
            lengths=taken.sum(1),
        )

    @cached_property
    def _responses(self) -> tuple[tuple[int, ...], ...]:
        """Leaves of the tree: prefixes closed by ``eos`` or by length."""
        vocab_size = self.features.shape[1]
        closed = [
            (*prefix, v)
            for prefix in self.prefixes
            for v in range(vocab_size)
            if v == self.eos or len(prefix) + 1 == self.max_len
        ]
        return tuple(sorted(closed))

    @cached_property
    def _steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Prefix row and token id of every step of every response, and whether the step is taken."""
        index = {prefix: p for p, prefix in enumerate(self.prefixes)}
        shape = (len(self._responses), self.max_len)
        prefix, token = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        taken = torch.zeros(shape, dtype=torch.bool)
        for row, response in enumerate(self._responses):
            steps = len(response)
            prefix[row, :steps] = torch.tensor([index[response[:t]] for t in range(steps)])
            token[row, :steps] = torch.tensor(response)
            taken[row, :steps] = True
        return prefix, token, taken
