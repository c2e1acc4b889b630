r"""The next token of a real language model: exact ceilings and gradients over its whole vocabulary.

The response is *one* token after a fixed prompt, so every expectation is a finite sum over V words. Let h be the last
hidden state (after the final norm), :math:`z = W h + b` the logits and :math:`\pi` their softmax.

*Below the head* a score is :math:`s_i(v) = (w_v - \bar w)^\top \partial_i h` with :math:`\bar w = E_\pi w`
(``thm-logits``). Hence, with :math:`\mathrm{Cov}_\pi(w) = \sum_k a_k a_k^\top`,

.. math:: F_{ii} = \sum_k (a_k^\top \partial_i h)^2, \qquad
          g_i = \mathrm{Cov}_\pi(R, w)^\top \partial_i h:

as many cotangents as h has entries instead of V, and one for a gradient.

*In the head* :math:`\partial z_v / \partial W_{uj} = 1[v = u] h_j`, so :math:`F = \pi_u (1 - \pi_u) h_j^2` and
:math:`g = \pi_u (R_u - E R) h_j`.

*A tied matrix* is both: the two derivatives are added before they are squared. Row u of a token of the prompt has
:math:`s_{uj}(v) = (1[v = u] - \pi_u) h_j + (w_v - \bar w)^\top \partial_{uj} h`, and the cross term is
:math:`2 h_j \pi_u (w_u - \bar w)^\top \partial_{uj} h`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ceilings.moments import ScoreMoments
from ceilings.pullback import PullBack

__all__ = ["NextToken", "matched_words", "next_token_moments"]


class NextToken:
    r"""Law of the next token after one prompt, with every derivative that a reward can use.

    Parameters
    ----------
    model
        A causal language model with a linear head, such as `load_pretrained` returns.
    input_ids
        The prompt.

    Attributes
    ----------
    probs
        :math:`\pi`, in float64.
    hidden
        Last hidden state h, after the final norm.
    slow_names
        Parameters without a fast rule; their values are as exact.
    dropped_variance
        Share of :math:`\operatorname{tr} \operatorname{Cov}_\pi(w)` in the directions that were left out because they
        are zero up to rounding. It bounds what is lost of F: at most that trace times
        :math:`\lVert \partial_i h \rVert^2`.

    Shapes
    ------
    input_ids (T,), probs (V,), hidden (I,).

    Raises
    ------
    ValueError
        If the model or the prompt does not allow it.
    """

    def __init__(self, model: nn.Module, input_ids: Tensor) -> None:
        self._below = PullBack(model, input_ids)
        self.hidden = self._below.hidden.detach()
        self.probs = self._below.logits.double().softmax(0)
        self.slow_names = self._below.slow_names
        self._weight = self._below.head.weight.detach()
        self._mean = _weighted_sum(self._weight, self.probs)
        self._names = {id(p): name for name, p in self._below.parameters.items()}
        self._head_name = self._names[id(self._below.head.weight)]
        bias = self._below.head.bias
        self._bias_name = self._names[id(bias)] if bias is not None else None
        self._factor: Tensor | None = None
        self.dropped_variance = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, each tied matrix once."""
        return tuple(self._below.parameters)

    @property
    def names_below_head(self) -> tuple[str, ...]:
        """Names of the parameters that move the last hidden state, without a tied matrix."""
        return tuple(name for name in self._below.names if name != self._head_name)

    def diagonal_fisher(self) -> dict[str, Tensor]:
        r"""Exact diagonal Fisher information of the next token, :math:`F_{ii} = \operatorname{Var}_\pi(\partial_i z)`.

        Returns
        -------
        dict
            One tensor a parameter.

        Shapes
        ------
        As the parameter.

        Units
        -----
        1/[θ]².

        References
        ----------
        Claim ``thm-logits``.
        """
        found = self._below.sum_of_squares(self._square_root())
        spread = self.probs * (1 - self.probs)
        head = torch.outer(spread.to(self.hidden), self.hidden.square())
        if self._head_name in found:
            head += found[self._head_name]
            for word in self._tied_rows():
                head[word] += 2 * self.cross_term(word)
        found[self._head_name] = head.clamp_min_(0)
        if self._bias_name is not None:
            found[self._bias_name] = spread.to(self.hidden)
        return self._complete(found)

    def gradient(self, rewards: Tensor) -> dict[str, Tensor]:
        r"""Exact gradient of the expected reward, :math:`g = \operatorname{Cov}_\pi(R, s)`.

        Parameters
        ----------
        rewards
            One number a word of the vocabulary.

        Returns
        -------
        dict
            One tensor a parameter.

        Shapes
        ------
        rewards (V,) -> as the parameter.

        Units
        -----
        [R]/[θ].

        Raises
        ------
        ValueError
            If there is not one finite reward a word.

        References
        ----------
        Claims ``thm-covariance``, ``thm-logits``.
        """
        push = self._push(rewards[None] if rewards.ndim == 1 else rewards)
        found = self._below.gradient(_cotangents(push, self._weight, self._mean)[0])
        head = torch.outer(push[0].to(self.hidden), self.hidden)
        found[self._head_name] = head.add_(found[self._head_name]) if self._head_name in found else head
        if self._bias_name is not None:
            found[self._bias_name] = push[0].to(self.hidden)
        return self._complete(found)

    def gradient_at(self, rewards: Tensor, where: dict[str, Tensor]) -> Tensor:
        """Chosen entries of the gradients of many rewards.

        Parameters
        ----------
        rewards
            One reward function a row.
        where
            Flat positions by parameter name.

        Returns
        -------
        Tensor
            Entries of `gradient`, in the order of ``where``.

        Shapes
        ------
        rewards (K, V), where M positions in all -> (K, M).

        Units
        -----
        [R]/[θ].

        Raises
        ------
        ValueError
            If there is not one finite reward a word, or a name is unknown.
        """
        push = self._push(rewards)
        below = {name: w for name, w in where.items() if name in self._below.names}
        found = self._below.gradient_at(_cotangents(push, self._weight, self._mean), below)
        parts = dict(zip(below, found.split([len(w) for w in below.values()], 1), strict=True))
        push = push.to(self.hidden)
        for name, w in where.items():
            if name == self._head_name:
                head = push[:, w // len(self.hidden)] * self.hidden[w % len(self.hidden)]
                parts[name] = head + parts[name] if name in parts else head
            elif name == self._bias_name:
                parts[name] = push[:, w]
            elif name not in parts and name in self.names:
                parts[name] = push.new_zeros(len(push), len(w))
            elif name not in parts:
                raise ValueError(f"{name!r} is no parameter of this model; see `names`")
        return torch.cat([parts[name] for name in where], 1)

    def fisher_factor_at(self, where: dict[str, Tensor]) -> Tensor:
        r"""Matrix B with :math:`B^\top B` the Fisher matrix of chosen parameters below the head.

        Parameters
        ----------
        where
            Flat positions by parameter name; see `names_below_head`.

        Returns
        -------
        Tensor
            Row k holds :math:`a_k^\top \partial_i h`; the column of a parameter has the squared length F_ii.

        Shapes
        ------
        where M positions in all -> (K, M), K at most the width of the model.

        Units
        -----
        1/[θ].

        Raises
        ------
        ValueError
            If a name is not one of `names_below_head`.

        References
        ----------
        Claim ``thm-joint``.
        """
        if self._head_name in where:
            raise ValueError(
                f"{self._head_name!r} is the head's matrix too: its scores have V directions, not these"
            )
        return self._below.gradient_at(self._square_root(), where)

    def _complete(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """All parameters in order; one that no logit depends on has derivative zero."""
        parameters = self._below.parameters
        return {
            name: found[name] if name in found else torch.zeros_like(p.detach())
            for name, p in parameters.items()
        }

    def _square_root(self) -> Tensor:
        r"""Rows :math:`a_k` with :math:`\sum_k a_k a_k^T` = Cov_π(w), largest first; null directions left out."""
        if self._factor is None:
            width = self._weight.shape[1]
            covariance = torch.zeros(width, width, dtype=torch.float64)
            for rows in torch.arange(len(self._weight)).split(8192):
                w = self._weight[rows].double() - self._mean
                covariance.addmm_(w.T * self.probs[rows], w)
            values, vectors = torch.linalg.eigh(covariance)
            # NOTE float64 resolves an eigenvalue to about this; below it there is only rounding.
            kept = values > values[-1] * width * torch.finfo(torch.float64).eps
            self.dropped_variance = float(values[~kept].clamp_min(0).sum() / values.sum())
            self._factor = (vectors[:, kept] * values[kept].sqrt()).T.flip(0)
        return self._factor

    def word_features(self) -> Tensor:
        r"""Functions of the word in which every score below the head is linear, of mean 0, variance 1, uncorrelated.

        Returns
        -------
        Tensor
            :math:`\varphi_k(v) = q_k^\top (w_v - \bar w) / \sqrt{\lambda_k}` with
            :math:`a_k = \sqrt{\lambda_k}\, q_k`, in float64.
            The score of parameter i is :math:`\sum_k (a_k^\top \partial_i h)\, \varphi_k`.

        Shapes
        ------
        (V, K).
        """
        root = self._square_root()
        return (self._weight.double() - self._mean) @ (root / root.square().sum(1, keepdim=True)).T

    def cross_term(self, word: int) -> Tensor:
        r"""Covariance of the two parts of the score of one word's row in a tied matrix.

        Parameters
        ----------
        word
            Token id u.

        Returns
        -------
        Tensor
            :math:`h_j\, \pi_u (w_u - \bar w)^\top \partial_{uj} h`; it counts twice in F.
            Zero if the word is not in the prompt.

        Shapes
        ------
        (I,).

        Raises
        ------
        ValueError
            If the head's matrix is not used below the head too.
        """
        if self._head_name not in self._below.names:
            raise ValueError(f"{self._head_name!r} is not tied to the embeddings: its scores have one part")
        width = len(self.hidden)
        push = self.probs[word] * (self._weight[word].double() - self._mean)
        row = {self._head_name: torch.arange(word * width, (word + 1) * width)}
        return self.hidden * self._below.gradient_at(push[None], row)[0]

    def _tied_rows(self) -> list[int]:
        """Rows of a tied matrix that are used below the head; all of them where no rule says which."""
        use = self._below.uses.get(self._head_name)
        if use is None:
            return list(range(len(self._weight)))
        return use.activations[use.activations >= 0].unique().tolist()

    def _push(self, rewards: Tensor) -> Tensor:
        r""":math:`\pi_v (R_v - E R)`, one reward function a row."""
        if rewards.ndim != 2 or rewards.shape[1] != len(self.probs):
            raise ValueError(
                f"rewards must hold one number a word, {len(self.probs)}, got {tuple(rewards.shape)}"
            )
        rewards = rewards.double()
        if not bool(torch.isfinite(rewards).all()):
            raise ValueError("a reward is NaN or infinite: its expectation is not defined")
        return self.probs * (rewards - (rewards @ self.probs)[:, None])


def next_token_moments(
    model: nn.Module, input_ids: Tensor, rewards: Tensor, reward_names: tuple[str, ...] = ()
) -> ScoreMoments:
    r"""Score moments of the next token after one prompt, exact over the whole vocabulary.

    Parameters
    ----------
    model
        A causal language model with a linear head, such as `load_pretrained` returns.
    input_ids
        The prompt.
    rewards
        One number a word, or one row a reward function.
    reward_names
        Names of the rows; "reward", or "reward-0" and so on, if not given.

    Returns
    -------
    ScoreMoments
        At level "next-token", weighted by probabilities; the sums of the scores are exactly zero.

    Shapes
    ------
    input_ids (T,), rewards (V,) or (K, V).

    Raises
    ------
    ValueError
        If the model, the prompt, the rewards or their names do not fit together.

    Notes
    -----
    Holds one gradient a reward and one Fisher diagonal: 4(K + 1) bytes a parameter in float32.

    References
    ----------
    Claims ``thm-covariance``, ``thm-ceiling``, ``thm-logits``.
    """
    rows = rewards[None] if rewards.ndim == 1 else rewards
    names = reward_names or (
        ("reward",) if len(rows) == 1 else tuple(f"reward-{k}" for k in range(len(rows)))
    )
    if len(names) != len(rows):
        raise ValueError(f"{len(names)} reward names for {len(rows)} rewards")
    law = NextToken(model, input_ids)
    gradients = [law.gradient(row) for row in rows]
    shift = rows.double() @ law.probs
    centred = rows.double() - shift[:, None]
    fisher = law.diagonal_fisher()
    return ScoreMoments(
        scores={name: f.new_zeros(()).expand_as(f) for name, f in fisher.items()},
        squares=fisher,
        reward_scores={name: torch.stack([g.pop(name) for g in gradients]) for name in fisher},
        reward_shift=shift,
        reward_sum=centred @ law.probs,
        reward_squares=centred.square() @ law.probs,
        reward_names=tuple(names),
        count=len(law.probs),
        weight_sum=1.0,
        level="next-token",
        weighting="probabilities",
        slow_parameters=law.slow_names,
    )


def matched_words(
    probs: Tensor, words: Sequence[int], generator: torch.Generator, tolerance: float = 0.02
) -> Tensor:
    """Reward of 1 on a random set of other words that is about as likely as given ones.

    Parameters
    ----------
    probs
        Law of the next token.
    words
        The words to match; they are not in the set.
    generator
        Source of randomness. Words are drawn without replacement by their probability and kept where they fit.
    tolerance
        By which share the probability of the set may differ from that of the words.

    Returns
    -------
    Tensor
        1 on the set, 0 elsewhere: a binary reward with nearly the same mean and standard deviation.

    Shapes
    ------
    probs (V,) -> (V,).

    Raises
    ------
    ValueError
        If the set that was drawn does not come that close.
    """
    given = torch.as_tensor(words)
    target = float(probs[given].sum())
    others = probs.index_fill(0, given, 0.0)
    order = torch.multinomial(others, min(2000, int((others > 0).sum())), generator=generator)
    reward, mass = torch.zeros_like(probs), 0.0
    for other in order.tolist():
        if mass + float(probs[other]) <= (1 + tolerance) * target:
            reward[other], mass = 1.0, mass + float(probs[other])
    if mass < (1 - tolerance) * target:
        raise ValueError(f"no set of other words has a probability near {target:.3g}; raise the tolerance")
    return reward


def _weighted_sum(matrix: Tensor, weights: Tensor) -> Tensor:
    """Rows of ``matrix`` summed with float64 ``weights``, without a float64 copy of the whole."""
    total = torch.zeros(matrix.shape[1], dtype=torch.float64)
    for rows in torch.arange(len(matrix)).split(8192):
        total += weights[rows] @ matrix[rows].double()
    return total


def _cotangents(push: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    r""":math:`\sum_v push_v (w_v - \bar w)`, in float64: the differences may cancel."""
    total = torch.zeros(len(push), weight.shape[1], dtype=torch.float64)
    for rows in torch.arange(len(weight)).split(8192):
        total.addmm_(push[:, rows], weight[rows].double() - mean)
    return total
