r"""Score moments of any causal language model: exact, streamed, at little more than one backward pass.

One forward and one backward pass a batch carry gradients to *activations* only; the gradients of the weights
are formed afterwards, one sequence and one tile of rows at a time, and go straight into the sums of
`ScoreMoments`. No gradient of a sequence is ever stored, so memory does not grow with the number of
sequences.

Which modules have such a rule is the business of `ceilings.score_rules`. Before the first batch a five-token
forward pass counts how often the graph reads each parameter and how often through a module with a rule; where
the two differ (a matrix read outside its module, say) the parameter takes the slow path: one backward pass a
sequence.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.moments import ScoreMoments, Weighting, flatten
from ceilings.score_capture import Capture, activations_only, find_rules
from ceilings.score_inputs import Batch, check_law, check_rewards, check_sequences, trimmed
from ceilings.score_rules import Rule, Term
from ceilings.score_sums import ParameterSums

__all__ = ["ScoreAccumulator", "ScoreMoments", "flatten", "score_moments"]

_PROBE_SEQUENCES: Final = 3  # different from the number of tokens, so that the two axes cannot be confused
_PROBE_TOKENS: Final = 5


def score_moments(
    model: nn.Module,
    input_ids: Tensor,
    response_mask: Tensor,
    rewards: Tensor,
    *,
    weights: Tensor | None = None,
    attention_mask: Tensor | None = None,
    batch_size: int = 16,
    reward_names: tuple[str, ...] | None = None,
) -> ScoreMoments:
    r"""Moments of the scores of whole responses, :math:`s = \sum_t \nabla \log \pi(y_t \mid y_{<t})`.

    Parameters
    ----------
    model
        A causal language model: token ids to logits (N, T, V), or to an object with such ``logits``.
        Parameters with ``requires_grad`` are measured.
    input_ids
        Prompt and response of each sequence, padded on either side.
    response_mask
        True at the tokens that are scored, each under the logits of the position before it.
    rewards
        One reward a sequence, or K of them.
    weights
        Probabilities of an enumeration, summing to 1: expectations are then exact. None for sampled
        sequences.
    attention_mask
        True (or 1) at real tokens. May be None where padding, if any, is on the right.
    batch_size
        Sequences in one pass; changes time and memory, not the result.
    reward_names
        What the K rewards are called.

    Returns
    -------
    ScoreMoments
        Level ``"sequence"``. Sums are float64 for float64 parameters and float32 for all others.

    Shapes
    ------
    input_ids, response_mask, attention_mask (N, T), rewards (N,) or (N, K), weights (N,).

    Units
    -----
    As in `ScoreMoments`.

    Raises
    ------
    ValueError
        If shapes disagree, a reward or weight is not finite, weights do not sum to 1, a sequence has no
        scored token, or a scored token is padding or has nothing before it.

    Notes
    -----
    The model is measured in evaluation mode (dropout is not part of the policy) and left as it was found. The
    embedding's ``padding_idx`` is not honoured, because the derivative of the policy does not know it.

    References
    ----------
    Claims ``thm-zero-mean``, ``thm-covariance``, ``thm-ceiling``; Goodfellow (2015) for the outer products.
    """
    check_law(weights)
    columns = rewards.shape[1] if rewards.dim() == 2 else 1
    if reward_names is None:
        reward_names = ("reward",) if columns == 1 else tuple(f"reward_{k}" for k in range(columns))
    accumulator = ScoreAccumulator(model, reward_names, batch_size)
    accumulator.add(input_ids, response_mask, rewards, weights=weights, attention_mask=attention_mask)
    return accumulator.moments()


class ScoreAccumulator:
    """Score moments of sequences that arrive in portions: allocate once, add as often as needed.

    Parameters
    ----------
    model
        As in `score_moments`; its weights must not change between portions.
    reward_names
        What the rewards are called; their number is K.
    batch_size
        Sequences in one pass.

    Raises
    ------
    ValueError
        If no parameter requires a gradient, or ``batch_size`` is not positive.
    """

    def __init__(
        self, model: nn.Module, reward_names: tuple[str, ...] = ("reward",), batch_size: int = 16
    ) -> None:
        self.model, self.reward_names, self.batch_size = model, reward_names, batch_size
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError(
                "no parameter requires a gradient: call `requires_grad_(True)` on those to measure"
            )
        if batch_size < 1 or not reward_names:
            raise ValueError(
                f"batch_size {batch_size} with {len(reward_names)} reward names: both must be at least 1"
            )
        accepted = inspect.signature(model.forward).parameters
        self._accepts = {name for name in ("attention_mask", "position_ids", "use_cache") if name in accepted}
        self._sums: dict[str, ParameterSums] = {}
        self._rules: dict[nn.Module, Rule] = {}
        self._fast: set[str] = set()
        self._ready = False
        self._count, self._weight_sum = 0, 0.0
        self._weighting: Weighting | None = None
        self._shift = self._reward_sum = self._reward_squares = torch.zeros(0)

    def add(
        self,
        input_ids: Tensor,
        response_mask: Tensor,
        rewards: Tensor,
        *,
        weights: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        """Add a portion of sequences.

        Parameters
        ----------
        input_ids, response_mask, rewards, weights, attention_mask
            As in `score_moments`, except that the weights of a portion need not sum to 1.

        Raises
        ------
        ValueError
            As in `score_moments`, or if some portions have weights and others none.
        """
        rewards = rewards.double().cpu()
        rewards = rewards[:, None] if rewards.dim() == 1 else rewards
        check_sequences(input_ids, response_mask, attention_mask)
        check_rewards(rewards, weights, len(input_ids), self.reward_names)
        weighting: Weighting = "samples" if weights is None else "probabilities"
        if self._weighting not in (None, weighting):
            raise ValueError(
                f"earlier sequences were {self._weighting}, these are {weighting}: keep them apart"
            )
        attention = (
            torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.dtype)
        )
        w = torch.ones(len(rewards), dtype=torch.float64) if weights is None else weights.double().cpu()
        with activations_only(self.model):
            if self._weighting is None or not self._ready:
                self._weighting = weighting
                self._allocate(rewards.mean(0), input_ids)
            centred = rewards - self._shift
            for start in range(0, len(rewards), self.batch_size):
                part = slice(start, start + self.batch_size)
                batch = trimmed(input_ids[part], response_mask[part], attention[part])
                self._add_batch(batch, w[part].sqrt(), w[part].sqrt() * centred[part].T)
        self._count, self._weight_sum = self._count + len(rewards), self._weight_sum + float(w.sum())
        self._reward_sum = self._reward_sum + w @ centred
        self._reward_squares = self._reward_squares + w @ centred.square()

    def restore(self, moments: ScoreMoments) -> None:
        """Go on from moments that were saved, as if their sequences had been added here.

        Parameters
        ----------
        moments
            Of the same model and rewards. Their tensors are taken over, not copied.

        Raises
        ------
        ValueError
            If something was added already, or the moments belong to other parameters, rewards or level.
        """
        if self._weighting is not None:
            raise ValueError("this accumulator holds sequences already: restore before the first `add`")
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        if (moments.level, moments.reward_names) != ("sequence", self.reward_names) or shapes != {
            name: tuple(t.shape) for name, t in moments.scores.items()
        }:
            raise ValueError("these moments belong to another model, level or reward: measure again")
        for name, parameter in self._parameters.items():
            self._sums[name] = ParameterSums.of(
                moments.scores[name], moments.squares[name], moments.reward_scores[name], parameter.device
            )
        self._fast = set(self._parameters) - set(moments.slow_parameters)
        self._weighting, self._shift = moments.weighting, moments.reward_shift
        self._reward_sum, self._reward_squares = moments.reward_sum, moments.reward_squares
        self._count, self._weight_sum = moments.count, moments.weight_sum

    def moments(self) -> ScoreMoments:
        """Moments of everything added so far.

        Returns
        -------
        ScoreMoments
            Shares its tensors with the accumulator: add nothing more while it is in use.

        Raises
        ------
        ValueError
            If nothing was added.
        """
        if self._weighting is None:
            raise ValueError("no sequence was added: there are no moments yet")
        return ScoreMoments(
            scores={
                name: sums.scores.view(self._parameters[name].shape) for name, sums in self._sums.items()
            },
            squares={
                name: sums.squares.view(self._parameters[name].shape) for name, sums in self._sums.items()
            },
            reward_scores={
                name: sums.reward_scores.view(-1, *self._parameters[name].shape)
                for name, sums in self._sums.items()
            },
            reward_shift=self._shift,
            reward_sum=self._reward_sum,
            reward_squares=self._reward_squares,
            reward_names=self.reward_names,
            count=self._count,
            weight_sum=self._weight_sum,
            weighting=self._weighting,
            slow_parameters=tuple(name for name in self._parameters if name not in self._fast),
        )

    def _allocate(self, shift: Tensor, input_ids: Tensor) -> None:
        """Find out which parameters have a rule; make room for the sums."""
        row = input_ids[0].repeat(_PROBE_TOKENS)[:_PROBE_TOKENS].expand(_PROBE_SEQUENCES, -1)
        self._rules, self._fast = find_rules(
            self.model, self._parameters, lambda: self._logits(row, torch.ones_like(row))
        )
        self._ready = True
        if self._sums:
            return  # restored: the sums are there
        self._shift = shift
        self._reward_sum = self._reward_squares = torch.zeros_like(shift)
        self._sums = {name: ParameterSums(p, len(shift)) for name, p in self._parameters.items()}

    def _logits(self, input_ids: Tensor, attention: Tensor) -> Tensor:
        """Run the model; positions come from the attention mask, so padding on the left shifts nothing."""
        positions = (attention.cumsum(1) - 1).clamp_min(0)
        extra: dict[str, Any] = {"attention_mask": attention, "position_ids": positions, "use_cache": False}
        output = self.model(input_ids, **{name: v for name, v in extra.items() if name in self._accepts})
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def _add_batch(self, batch: Batch, root_weights: Tensor, rewards: Tensor) -> None:
        """One forward and backward pass, then the slow parameters."""

        def consume(name: str, terms: list[Term]) -> None:
            self._sums[name].add(terms, root_weights, rewards)

        with Capture(self._rules, {name: self._parameters[name] for name in self._fast}, consume) as capture:
            logits = self._logits(batch.inputs, batch.attention)
            cotangent = _log_prob_cotangent(logits, batch, root_weights)
            edge = torch.autograd.graph.get_gradient_edge(logits)
            del logits  # as large as everything the backward pass keeps of a layer or two
            capture.backward(edge, cotangent)
        slow = [name for name in self._parameters if name not in self._fast]
        for n in range(len(root_weights) if slow else 0):
            for name, score in self._slow_scores(slow, Batch(*(t[n : n + 1] for t in batch))).items():
                self._sums[name].add_one(score, float(root_weights[n]), rewards[:, n])

    def _slow_scores(self, slow: list[str], batch: Batch) -> dict[str, Tensor]:
        """Score of one sequence in the parameters without a rule."""
        parameters = [self._parameters[name].requires_grad_(True) for name in slow]
        logits = self._logits(batch.inputs, batch.attention)
        grads: tuple[Tensor | None, ...] = (None,) * len(slow)
        if logits.requires_grad:
            cotangent = _log_prob_cotangent(logits, batch, torch.ones(1))
            grads = torch.autograd.grad(logits, parameters, cotangent, allow_unused=True)
        for parameter in parameters:
            parameter.requires_grad_(False)
        return {
            name: torch.zeros_like(parameter) if grad is None else grad
            for name, parameter, grad in zip(slow, parameters, grads, strict=True)
        }


def _log_prob_cotangent(logits: Tensor, batch: Batch, root_weights: Tensor) -> Tensor:
    r"""Gradient of :math:`\sum_n \sqrt{w_n} \log \pi(y_n)` in the logits: :math:`\sqrt{w_n}(e_y - \pi)`."""
    # NOTE the square root: every block of the engine is then √w s, whose square carries w.
    wide = torch.promote_types(logits.dtype, torch.float32)
    cotangent = logits.detach().softmax(-1, dtype=wide).neg_()
    cotangent.scatter_add_(-1, batch.targets[..., None], torch.ones_like(cotangent[..., :1]))
    cotangent *= (batch.scored * root_weights.to(cotangent)[:, None])[..., None]
    return cotangent.to(logits.dtype)
