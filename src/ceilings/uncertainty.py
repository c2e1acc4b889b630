r"""How much of a measured tightness is noise: two halves, permuted rewards, effective sample size.

The tightness of a sample, :math:`|\hat\rho_i|`, is between 0 and 1 whatever the truth, and about
:math:`\sqrt{2/(\pi N)}` where the truth is 0. Reported on its own it is no evidence. Here the responses are split
into two halves, and what one half suggests is tried on the other:

* `cross_fitted_tightness` takes the sign of a covariance from one half and its value from the other;
* `cross_fitted_squares` multiplies the covariances of both halves;
* `cross_fitted_energy` does so without dividing by anything, and so without any bias.

The first two divide by the standard deviations over all responses.

Permuted rewards pass through the engine as further reward columns beside the real one, in the same pass, and show
what a reward of the same law has to offer that knows nothing of the responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ceilings.moments import ScoreMoments
from ceilings.scores import ScoreAccumulator

__all__ = [
    "CrossFit",
    "cross_fit",
    "cross_fitted_energy",
    "cross_fitted_squares",
    "cross_fitted_tightness",
    "effective_sample_size",
    "halves",
    "is_permuted",
    "noise_floor",
    "permutation_floor",
    "score_halves",
    "standardised_covariances",
    "weights_sample_size",
    "with_permuted",
]

_PERMUTED: Final = "permuted-"


def noise_floor(count: float, kurtosis: float = 1.0) -> float:
    r"""Mean of :math:`|\hat\rho|` over samples of N responses when the true :math:`\rho` is 0, for large N.

    Parameters
    ----------
    count
        N, or an effective number.
    kurtosis
        :math:`\kappa = E[(R - E R)^2 s^2] / (\sigma^2 F)`: 1 where reward and score are independent. Rare
        rewards on rare scores lie far from what any such constant gives: see `permutation_floor`.

    Returns
    -------
    float
        :math:`\sqrt{2 \kappa / (\pi N)}`.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If an argument is not positive.

    References
    ----------
    Claim ``prop-vacuous``.
    """
    if not (count > 0 and kurtosis > 0):
        raise ValueError(f"count is {count} and kurtosis {kurtosis}: both must be positive")
    return math.sqrt(2 * kurtosis / (math.pi * count))


def halves(count: int, generator: torch.Generator, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Random halves of the responses, for estimates that must not see the same response twice.

    Parameters
    ----------
    count
        Number of responses, N.
    generator
        Source of randomness.
    groups
        Group, such as the prompt, of each response. Each group goes whole to one half: then the halves are
        independent even though the responses to one prompt have something in common.

    Returns
    -------
    tuple
        Indices of the two halves, in order.

    Shapes
    ------
    groups (N,).

    Raises
    ------
    ValueError
        If there are fewer than four responses or two groups, or one label a response is not given.
    """
    labels = torch.arange(count) if groups is None else groups
    if labels.shape != (count,):
        raise ValueError(f"groups have shape {tuple(labels.shape)} for {count} responses: give one each")
    members, index = labels.unique(return_inverse=True)
    if count < 4 or len(members) < 2:
        raise ValueError(
            f"{count} responses in {len(members)} groups make no two halves: sample at least four responses, "
            "and at least two groups"
        )
    first = torch.zeros(len(members), dtype=torch.bool)
    first[torch.randperm(len(members), generator=generator)[: len(members) // 2]] = True
    where = first[index.cpu()]
    return where.nonzero()[:, 0], (~where).nonzero()[:, 0]


def is_permuted(reward: str) -> bool:
    """Whether a reward is a permuted copy, by its name.

    Parameters
    ----------
    reward
        Its name.

    Returns
    -------
    bool
        Whether `with_permuted` made it.
    """
    return reward.startswith(_PERMUTED)


def with_permuted(
    rewards: Tensor, permutations: int, generator: torch.Generator, groups: Tensor | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Rewards with permuted copies of themselves as further columns.

    Parameters
    ----------
    rewards
        One a response.
    permutations
        Number of copies, P.
    generator
        Source of randomness.
    groups
        Group, such as the prompt, of each response; rewards are then permuted within groups only, which
        keeps what is common to a group on both sides.

    Returns
    -------
    tuple
        The columns and their names, "reward" first.

    Shapes
    ------
    rewards (N,), groups (N,) -> (N, 1 + P).

    Raises
    ------
    ValueError
        If rewards or groups are no vectors of equal length, or ``permutations`` is negative.
    """
    labels = torch.zeros(len(rewards)) if groups is None else groups
    if rewards.dim() != 1 or labels.shape != rewards.shape or permutations < 0:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}, groups {tuple(labels.shape)}, permutations is "
            f"{permutations}: give one reward and one group a response, and no negative number"
        )
    home = labels.argsort(stable=True)
    columns = [rewards]
    for _ in range(permutations):
        # Sorting by a random number within each group is a uniform permutation of it.
        mixed = torch.rand(len(rewards), generator=generator, dtype=torch.float64).argsort()
        mixed = mixed[labels[mixed].argsort(stable=True)]
        columns.append(torch.empty_like(rewards).index_copy_(0, home, rewards[mixed]))
    return torch.stack(columns, 1), ("reward", *(f"{_PERMUTED}{k}" for k in range(permutations)))


def score_halves(
    model: nn.Module,
    input_ids: Tensor,
    response_mask: Tensor,
    rewards: Tensor,
    *,
    generator: torch.Generator,
    groups: Tensor | None = None,
    permutations: int = 1,
    attention_mask: Tensor | None = None,
    **engine: Any,
) -> tuple[ScoreMoments, ScoreMoments]:
    """Score moments of two random halves of the responses, with permuted rewards beside the real one.

    Parameters
    ----------
    model, input_ids, response_mask, attention_mask
        As in `ceilings.scores.score_moments`; the responses are samples.
    rewards
        One a response.
    generator
        Source of the halves and the permutations.
    groups
        Prompt of each response: see `halves` and `with_permuted`.
    permutations
        Permuted copies of the reward.
    **engine
        Further arguments of `ceilings.scores.ScoreAccumulator`, such as ``batch_size`` or ``level``.

    Returns
    -------
    tuple
        Two sets of moments with rewards "reward", "permuted-0" and so on; ``merge`` gives those of all.

    Shapes
    ------
    input_ids, response_mask, attention_mask (N, T), rewards and groups (N,).

    Raises
    ------
    ValueError
        As in those functions.
    """
    found = []
    for some in halves(len(input_ids), generator, groups):
        here = None if groups is None else groups[some]
        columns, names = with_permuted(rewards[some], permutations, generator, here)
        accumulator = ScoreAccumulator(model, names, **engine)
        attention = None if attention_mask is None else attention_mask[some]
        accumulator.add(input_ids[some], response_mask[some], columns, attention_mask=attention)
        found.append(accumulator.moments())
    return found[0], found[1]


def standardised_covariances(
    first: ScoreMoments, second: ScoreMoments, reward: str | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    r"""Covariances of both halves over the standard deviations of all responses.

    Parameters
    ----------
    first, second, reward
        As in `cross_fitted_tightness`.

    Returns
    -------
    dict
        :math:`\hat g_1 / (\hat\sigma \hat F^{1/2})` and :math:`\hat g_2 / (\hat\sigma \hat F^{1/2})` a parameter;
        NaN where nothing varies.

    Shapes
    ------
    As the parameter.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the moments do not belong together.
    """
    here, there = (_unbiased_gradient(half, reward) for half in _check_halves(first, second))
    together = first.merge(second)
    ceiling, varies = together.ceiling(reward), together.tightness(reward)
    # Variances that divide by N − 1, the reward's and that of a centred score.
    scale = (together.count / (together.count - 1)) ** (1.0 if together.level == "sequence" else 0.5)
    found = {}
    for name in together.names:
        roof = torch.where(varies[name].isnan(), torch.nan, scale * ceiling[name])
        found[name] = here[name] / roof, there[name] / roof
    return found


def cross_fitted_tightness(
    first: ScoreMoments, second: ScoreMoments, reward: str | None = None
) -> dict[str, Tensor]:
    r"""Tightness whose sign comes from one half of the responses and whose value comes from the other.

    Parameters
    ----------
    first, second
        Moments of independent responses.
    reward
        Name of the reward; None where there is only one.

    Returns
    -------
    dict
        :math:`(\operatorname{sgn}\hat g_{1}\, \hat g_{2} + \operatorname{sgn}\hat g_{2}\, \hat g_{1})
        / (2 \hat\sigma \hat F^{1/2})` a parameter; NaN where nothing varies. Single entries may be negative:
        they are noise around something that is not, so average them, and never their absolute values.

    Shapes
    ------
    As the parameter.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the moments do not belong together.

    Notes
    -----
    The mean is :math:`|\rho_i| (1 - 2 P_i)`, with :math:`P_i` the probability that half the responses get the
    sign wrong, up to the bias of the deviations below, of relative order 1/N. So it is exactly 0 for a reward
    that is independent of the score, right where :math:`|\rho_i| \sqrt{N}` is large, and too small between: it
    does not invent tightness. The deviations are those of all responses: those of the half that gave the
    sign would be independent of the value, but a rare score may be missing there, and the quotient has no mean.

    References
    ----------
    Claim ``prop-vacuous``.
    """
    pairs = standardised_covariances(first, second, reward)
    return {name: (a.sign() * b + b.sign() * a) / 2 for name, (a, b) in pairs.items()}


def cross_fitted_squares(
    first: ScoreMoments, second: ScoreMoments, reward: str | None = None
) -> dict[str, Tensor]:
    r"""Squared tightness from the product of the covariances in two halves.

    Parameters
    ----------
    first, second, reward
        As in `cross_fitted_tightness`.

    Returns
    -------
    dict
        :math:`\hat g_1 \hat g_2 / (\hat\sigma^2 \hat F)`, one tensor a parameter. Average before taking a root.

    Shapes
    ------
    As the parameter.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If the moments do not belong together.

    Notes
    -----
    The numerator has the mean :math:`g_i^2` exactly, the deviations are those of all responses, and the quotient
    has the mean :math:`\rho_i^2` up to a relative error of order 1/N: upwards for heavy-tailed scores, whose
    variance a sample mostly underestimates.

    References
    ----------
    Claims ``thm-ceiling``, ``prop-vacuous``.
    """
    return {name: a * b for name, (a, b) in standardised_covariances(first, second, reward).items()}


def cross_fitted_energy(
    first: ScoreMoments, second: ScoreMoments, reward: str | None = None
) -> dict[str, Tensor]:
    r"""Squared policy gradient, unbiased: the product of the unbiased gradients of two halves.

    Parameters
    ----------
    first, second, reward
        As in `cross_fitted_tightness`.

    Returns
    -------
    dict
        One tensor a parameter, with mean :math:`g_i^2` exactly. The square of one estimate has the mean
        :math:`g_i^2 + \operatorname{Var} \hat g_i`.

    Shapes
    ------
    As the parameter.

    Units
    -----
    [R]²/[θ]².

    Raises
    ------
    ValueError
        If the moments do not belong together, or a half has one response.

    References
    ----------
    Claim ``thm-covariance``.
    """
    here, there = (_unbiased_gradient(half, reward) for half in _check_halves(first, second))
    return {name: here[name] * there[name] for name in first.names}


def permutation_floor(moments: ScoreMoments) -> dict[str, Tensor]:
    r"""Mean :math:`|\hat\rho_i|` of the permuted rewards: what the sample shows of a reward that knows nothing.

    Parameters
    ----------
    moments
        With reward columns "permuted-0" and so on, as `with_permuted` makes them.

    Returns
    -------
    dict
        One tensor a parameter, to be held against `ScoreMoments.tightness` of the same responses; NaN where
        nothing varies. Over a few permutations an entry is a rough value; its mean over a tensor is not.

    Shapes
    ------
    As the parameter.

    Units
    -----
    1.

    Raises
    ------
    ValueError
        If there is no permuted reward.

    References
    ----------
    Claim ``prop-vacuous``.
    """
    permuted = [name for name in moments.reward_names if is_permuted(name)]
    if not permuted:
        raise ValueError(f"no reward among {moments.reward_names} is permuted: add some with `with_permuted`")
    found = [moments.tightness(name) for name in permuted]
    return {name: torch.stack([f[name] for f in found]).mean(0) for name in moments.names}


def effective_sample_size(
    first: ScoreMoments, second: ScoreMoments, reward: str | None = None
) -> dict[str, float]:
    r"""Number of responses that a tensor's correlations are worth, from how much two halves disagree.

    Parameters
    ----------
    first, second, reward
        As in `cross_fitted_tightness`.

    Returns
    -------
    dict
        One number a tensor: :math:`\hat\rho` over all responses has a standard error of about one over its
        root. Equal to N where reward and score are independent; less where large scores and unusual rewards
        come together, or where the responses of a half are alike. NaN where nothing varies.

    Raises
    ------
    ValueError
        If the moments do not belong together.

    Notes
    -----
    With :math:`\operatorname{Var} \hat\rho = \kappa / n` in a half of n responses, the difference of two
    halves has the variance :math:`\kappa (1/n_1 + 1/n_2)`, and :math:`N / \kappa` is what is returned. The mean
    square is taken over the entries of the tensor: a single entry has one degree of freedom, and a small
    tensor not many more.

    References
    ----------
    Claim ``prop-vacuous``.
    """
    pairs = standardised_covariances(first, second, reward)
    total = first.count + second.count
    expected = 1 / first.count + 1 / second.count
    found = {}
    for name, (a, b) in pairs.items():
        kurtosis = float((a - b).square().nanmean()) / expected
        found[name] = total / kurtosis if kurtosis > 0 else math.nan
    return found


def weights_sample_size(weights: Tensor) -> float:
    r"""Effective number of weighted responses, :math:`(\sum w)^2 / \sum w^2`.

    Parameters
    ----------
    weights
        Importance weights, up to a factor.

    Returns
    -------
    float
        N for equal weights, 1 where one response has all the weight.

    Shapes
    ------
    weights (N,).

    Raises
    ------
    ValueError
        If a weight is negative or not finite, or all are zero.
    """
    w = weights.double()
    if not bool((w.isfinite() & (w >= 0)).all()) or not bool(w.any()):
        raise ValueError("weights must be finite and not negative, and not all zero")
    w = w / w.max()
    return float(w.sum().square() / w.square().sum())


@dataclass(frozen=True)
class CrossFit:
    """Tightness of one reward with its uncertainty; the in-sample value is left out on purpose.

    Parameters
    ----------
    tightness
        `cross_fitted_tightness`.
    squares
        `cross_fitted_squares`.
    permuted
        `cross_fitted_tightness` of the permuted rewards, averaged over them: zero but for noise.
    floor
        `permutation_floor` of all responses together.
    noise_floor
        `noise_floor` of all responses together.
    effective_size
        `effective_sample_size` by tensor.
    count
        Number of responses.

    Shapes
    ------
    Tensors as the parameter.

    Units
    -----
    1.
    """

    tightness: dict[str, Tensor]
    squares: dict[str, Tensor]
    permuted: dict[str, Tensor]
    floor: dict[str, Tensor]
    noise_floor: float
    effective_size: dict[str, float]
    count: int


def cross_fit(first: ScoreMoments, second: ScoreMoments, reward: str = "reward") -> CrossFit:
    """Tightness of one reward with everything that says how far to trust it.

    Parameters
    ----------
    first, second
        Moments as `score_halves` returns them.
    reward
        Name of the reward.

    Returns
    -------
    CrossFit
        All its parts.

    Raises
    ------
    ValueError
        If the moments do not belong together, or hold no permuted reward.
    """
    together = first.merge(second)
    floor = permutation_floor(together)
    names = [name for name in first.reward_names if is_permuted(name)]
    permuted = [cross_fitted_tightness(first, second, name) for name in names]
    return CrossFit(
        tightness=cross_fitted_tightness(first, second, reward),
        squares=cross_fitted_squares(first, second, reward),
        permuted={name: torch.stack([p[name] for p in permuted]).mean(0) for name in first.names},
        floor=floor,
        noise_floor=noise_floor(together.count),
        effective_size=effective_sample_size(first, second, reward),
        count=together.count,
    )


def _check_halves(first: ScoreMoments, second: ScoreMoments) -> tuple[ScoreMoments, ScoreMoments]:
    """Refuse what is not two samples of the same kind."""
    for field in ("level", "weighting", "names", "reward_names"):
        if getattr(first, field) != getattr(second, field):
            raise ValueError(f"the two halves differ in their {field}: measure both in the same way")
    if first.weighting != "samples":
        raise ValueError("these moments are exact expectations: there is no noise to estimate")
    if min(first.count, second.count) < 2:
        raise ValueError("a half has one response, which has no covariance: sample more")
    return first, second


def _unbiased_gradient(half: ScoreMoments, reward: str | None) -> dict[str, Tensor]:
    """Covariance that divides by N − 1."""
    scale = half.count / (half.count - 1)
    return {name: scale * g for name, g in half.gradient(reward).items()}
