r"""Score moments of any causal language model: exact, streamed, at little more than one backward pass.

One forward and one backward pass a batch carry gradients to *activations* only; the gradients of the weights
are formed afterwards, one sequence and one tile of rows at a time, and go straight into the sums of
`ScoreMoments`. No gradient of a sequence is ever stored, so memory does not grow with the number of
sequences.

Which modules have such a rule is the business of `ceilings.score_rules`. Before the first batch two forward
passes over a few tokens count how often the graph reads each parameter and how often through a module with a
rule; where the two differ (a matrix read outside its module, say) the parameter takes the slow path: one
backward pass a sequence. So does a parameter of which a later batch shows what the probes did not, such as an
expert that they were not routed to.

Sums of the first thousand sequences have the dtype of the scores, at least float32; with more they go on in
float64, because float32 would forget small terms.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ceilings.moments import Level, ScoreMoments, Weighting, flatten
from ceilings.next_token import NextToken
from ceilings.score_capture import Capture, Found, activations_only, find_rules, graph_reads
from ceilings.score_inputs import (
    Batch,
    check_law,
    check_level,
    check_rewards,
    check_sequences,
    portions,
    scored_prefixes,
    trimmed,
)
from ceilings.score_rules import Term
from ceilings.score_sums import ParameterSums

__all__ = ["ScoreAccumulator", "ScoreMoments", "flatten", "score_moments"]

_KEYWORDS: Final = ("attention_mask", "position_ids", "use_cache", "logits_to_keep")
_NARROW_SEQUENCES: Final = 1024  # float32 sums of so many terms are off by at most 6e-5 of their size


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
    level: Level = "sequence",
    sign_draws: int | None = None,
    generator: torch.Generator | None = None,
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
    level
        Whose squares are summed. ``"sequence"``: those of the scores of whole responses. ``"token"``: those
        of the scores of the sampled tokens. ``"next-token"``: those of every possible token at the position
        of every sampled one, weighted by its probability. The three have the same mean under the policy and
        ever less variance; see `ceilings.next_token_cost` before asking for the last.
    sign_draws
        At level ``"token"``, None gives the exact sum, every scored token as a row of its own. A number gives
        an unbiased estimate from that many backward passes more a batch, with a random sign for every token.
    generator
        Source of the signs.

    Returns
    -------
    ScoreMoments
        At the level asked for; only its ``squares`` depend on it. Sums are float64 for float64 parameters
        and for more than 1024 sequences, float32 otherwise.

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
        scored token, or a scored token is padding or has nothing before it; if sign draws and generator do
        not fit the level, or the model has no linear head at level ``"next-token"``.

    Notes
    -----
    With signs :math:`\epsilon_t = \pm 1`, :math:`E_\epsilon (\sum_t \epsilon_t s_t)^2 = \sum_t s_t^2`. Squaring
    what single *positions* of a module contribute is not the same: a token's score flows through attention
    into all earlier positions, whose contributions add up before they are squared.

    The model is measured in evaluation mode (dropout is not part of the policy) and left as it was found. The
    embedding's ``padding_idx`` is not honoured, because the derivative of the policy does not know it.

    References
    ----------
    Claims ``thm-zero-mean``, ``thm-covariance``, ``thm-ceiling``, ``thm-tokens``; Goodfellow (2015) for the
    outer products.
    """
    check_law(weights)
    columns = rewards.shape[1] if rewards.dim() == 2 else 1
    if reward_names is None:
        reward_names = ("reward",) if columns == 1 else tuple(f"reward_{k}" for k in range(columns))
    accumulator = ScoreAccumulator(
        model, reward_names, batch_size, level=level, sign_draws=sign_draws, generator=generator
    )
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
        Sequences in one pass; tokens where every token is a row.
    level, sign_draws, generator
        As in `score_moments`.

    Attributes
    ----------
    slow_seconds
        Time that the parameters without a fast rule have cost so far.

    Raises
    ------
    ValueError
        If no parameter requires a gradient, ``batch_size`` is not positive, or the last three do not fit
        together.
    """

    def __init__(
        self,
        model: nn.Module,
        reward_names: tuple[str, ...] = ("reward",),
        batch_size: int = 16,
        *,
        level: Level = "sequence",
        sign_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check_level(level, sign_draws, generator)
        self.model, self.reward_names, self.batch_size = model, reward_names, batch_size
        self.level, self._draws, self._generator = level, sign_draws or 0, generator
        self.slow_seconds = 0.0
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
        self._accepts = {name for name in _KEYWORDS if name in accepted}
        self._sums: dict[str, ParameterSums] = {}
        self._found = Found({}, set(), set(), set())
        self._fast: set[str] = set()
        self._idle: set[str] = set()
        self._slow_next_token: set[str] = set()
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
            if self._count + len(rewards) > _NARROW_SEQUENCES:
                for sums in self._sums.values():
                    sums.widen()
            signs = self._signs(input_ids)
            by_token = self.level == "token" and not self._draws
            for some, scored in portions(response_mask, self.batch_size, by_token):
                batch = trimmed(input_ids[some], scored, attention[some], signs[some])
                self._add_batch(batch, w[some].sqrt(), w[some].sqrt() * centred[some].T)
            if self.level == "next-token":
                self._add_next_tokens(scored_prefixes(input_ids, response_mask, attention, w))
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
        if (moments.level, moments.reward_names) != (self.level, self.reward_names) or shapes != {
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
            level=self.level,
            weighting=self._weighting,
            slow_parameters=tuple(
                name for name in self._parameters if name not in self._fast or name in self._slow_next_token
            ),
        )

    def _allocate(self, shift: Tensor, input_ids: Tensor) -> None:
        """Find out which parameters have a rule; make room for the sums."""
        self._found = find_rules(
            self.model, self._parameters, lambda ids: self._logits(ids, torch.ones_like(ids)), input_ids[0]
        )
        self._fast, self._idle = self._found.fast, self._found.idle
        self._ready = True
        if self._sums:
            return  # restored: the sums are there
        self._shift = shift
        self._reward_sum = self._reward_squares = torch.zeros_like(shift)
        self._sums = {name: ParameterSums(p, len(shift)) for name, p in self._parameters.items()}

    def _logits(self, input_ids: Tensor, attention: Tensor, last: int = 0) -> Tensor:
        """Run the model; all logits, or no more than the last ones where it can leave out the others."""
        # Positions come from the attention mask, so padding on the left shifts nothing.
        positions = (attention.cumsum(1) - 1).clamp_min(0)
        values = (attention, positions, False, last)
        extra: dict[str, Any] = dict(zip(_KEYWORDS, values, strict=True))
        output = self.model(input_ids, **{name: v for name, v in extra.items() if name in self._accepts})
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def _signs(self, input_ids: Tensor) -> Tensor:
        """Signs for every token of every sequence: drawn at once, so that batches do not matter."""
        shape = (len(input_ids), self._draws, input_ids.shape[1])
        if not self._draws:
            return torch.zeros(shape, dtype=torch.int8, device=input_ids.device)
        drawn = torch.randint(2, shape, generator=self._generator, dtype=torch.int8)
        return (2 * drawn - 1).to(input_ids.device)

    def _passes(self, batch: Batch) -> list[_Pass]:
        """Backward passes that one forward pass serves; the last one has no signs."""
        drawn = [_Pass(signs, 1 / self._draws, False) for signs in batch.signs.unbind(1)]
        alone = self.level == "sequence" or (self.level == "token" and not drawn)
        return [*drawn, _Pass(None, 1.0 if alone else 0.0, True)]

    def _add_batch(self, batch: Batch, root_weights: Tensor, rewards: Tensor) -> None:
        """One forward pass and its backward passes, then the slow parameters."""
        fast = {name: self._parameters[name] for name in self._fast}
        passes = self._passes(batch)
        with Capture(self._found, fast, len(root_weights)) as capture, self._watched():
            logits = self._logits(batch.inputs, batch.attention, batch.last)
        surprises = capture.refused | self._awakened(logits)
        if surprises:
            self._fast, self._idle = self._fast - surprises, self._idle - surprises
            self._add_batch(batch, root_weights, rewards)
            return
        cotangent = _log_prob_cotangent(logits, batch, root_weights)
        edge = torch.autograd.graph.get_gradient_edge(logits)
        del logits  # as large as everything the backward pass keeps of a layer or two
        for number, each in enumerate(passes):

            def consume(name: str, terms: list[Term], each: _Pass = each) -> None:
                self._sums[name].add(terms, root_weights, rewards, each.squares, each.linear)

            capture.backward(edge, each.signed(cotangent), consume, keep=number + 1 < len(passes))
        slow = [name for name in self._parameters if name not in self._fast]
        if slow:
            started = time.perf_counter()
            for n in range(len(root_weights)):
                self._add_slow(slow, batch.one(n), float(root_weights[n]), rewards[:, n])
            self.slow_seconds += time.perf_counter() - started

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Let the graph show whether it reads a parameter that the probes did not."""
        for name in self._idle:
            self._parameters[name].requires_grad_(True)
        try:
            yield
        finally:
            for name in self._idle:
                self._parameters[name].requires_grad_(False)

    def _awakened(self, logits: Tensor) -> set[str]:
        """Idle parameters that this forward pass used."""
        if not self._idle:
            return set()
        return set(graph_reads(logits, {id(self._parameters[name]): name for name in self._idle})) - {""}

    def _add_slow(self, slow: list[str], sequence: Batch, root_weight: float, rewards: Tensor) -> None:
        """Score of one sequence in the parameters without a rule."""
        parameters = [self._parameters[name].requires_grad_(True) for name in slow]
        try:
            logits = self._logits(sequence.inputs, sequence.attention, sequence.last)
            if not logits.requires_grad:
                return
            cotangent = _log_prob_cotangent(logits, sequence, torch.ones(1))
            for each in self._passes(sequence):
                grads = torch.autograd.grad(
                    logits, parameters, each.signed(cotangent), retain_graph=True, allow_unused=True
                )
                for name, grad in zip(slow, grads, strict=True):
                    if grad is not None:
                        self._sums[name].add_one(grad, root_weight, rewards, each.squares, each.linear)
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    def _add_next_tokens(self, prefixes: dict[tuple[int, ...], float]) -> None:
        """Add the exact second moments of the next token after every prefix."""
        device = next(iter(self._parameters.values())).device
        for prefix, weight in prefixes.items():
            law = NextToken(self.model, torch.tensor(prefix, device=device))
            self._slow_next_token.update(law.slow_names)
            fisher = law.diagonal_fisher()
            for name, sums in self._sums.items():
                sums.squares.add_(fisher.pop(name).view_as(sums.squares), alpha=weight)


class _Pass(NamedTuple):
    """One backward pass: the sign of every target, the share of its squares, and whether it is the score."""

    signs: Tensor | None
    squares: float
    linear: bool

    def signed(self, cotangent: Tensor) -> Tensor:
        """Cotangent of this pass."""
        return cotangent if self.signs is None else cotangent * self.signs[:, -cotangent.shape[1] :, None]


def _log_prob_cotangent(logits: Tensor, batch: Batch, root_weights: Tensor) -> Tensor:
    r"""Gradient of :math:`\sum_n \sqrt{w_n} \log \pi(y_n)` in the logits: :math:`\sqrt{w_n}(e_y - \pi)`."""
    # NOTE the square root: every block of the engine is then √w s, whose square carries w.
    last = slice(-logits.shape[1], None)  # the model may have left out positions before the first scored one
    wide = torch.promote_types(logits.dtype, torch.float32)
    cotangent = logits.detach().softmax(-1, dtype=wide).neg_()
    cotangent.scatter_add_(-1, batch.targets[:, last, None], torch.ones_like(cotangent[..., :1]))
    cotangent *= (batch.scored[:, last] * root_weights.to(cotangent)[:, None])[..., None]
    return cotangent.to(logits.dtype)
