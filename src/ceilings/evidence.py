r"""Cross-fitted tightness added up over parameters, with an error that chance alone would give.

Parameters share the responses, so an average over millions of them is no average over millions of independent
numbers: its error cannot be read off their spread. It can be read off directions in which there is nothing to find.
Two halves of N₁ and N₂ responses hold several, all with the correlations of the scores in them:

* the *disagreement* of the halves about the real reward, :math:`(a - b) / \sqrt{1/N_1 + 1/N_2}`, from which whatever
  is true has dropped out;
* for every permuted reward, :math:`(a \sqrt{N_1} \pm b \sqrt{N_2}) / \sqrt 2`.

Cross-fitting any two of them as if they were the two halves of a reward gives one draw of what chance does to the
average. With P permuted rewards there are P(2P + 1) such pairs, and the root of the mean square of their averages is
the standard error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.moments import ScoreMoments

__all__ = ["Estimate", "Evidence", "critical_value", "tensor_evidence"]

_CHUNK: Final = 1 << 19  # entries handled at once: temporaries of a large embedding would cost a gigabyte
_CRITICAL: Final = {1: 12.7, 3: 3.18, 10: 2.23, 21: 2.08, 36: 2.03}  # Student's t: 95 % lie within ±t


def critical_value(degrees_of_freedom: int) -> float:
    """How many standard errors chance exceeds, upwards or downwards, in one sample of twenty: upwards in one of forty.

    Parameters
    ----------
    degrees_of_freedom
        Number of pairs that the standard error was taken from.

    Returns
    -------
    float
        Student's t at 95 %, both sides together; 2 for many degrees of freedom. Only what lies above is called a
        finding.
    """
    return next((t for n, t in _CRITICAL.items() if n >= degrees_of_freedom), 2.0)


@dataclass(frozen=True)
class Estimate:
    """Tightness of one reward, averaged over some parameters.

    Parameters
    ----------
    mean
        Mean of `ceilings.uncertainty.cross_fitted_tightness`; None where nothing varies.
    standard_error
        Root mean square of what chance gives in its place; None without a permuted reward.
    degrees_of_freedom
        Number of draws that the standard error was taken from.
    mean_square
        Mean of `ceilings.uncertainty.cross_fitted_squares`: it may be negative by chance.
    energy
        Squared norm of the gradient without bias: it may be negative by chance.
    effective_size
        Number of independent responses that the sample is worth, by the disagreement of the halves. By chance it may
        exceed N.

    Units
    -----
    energy [R]²/[θ]², all others 1.
    """

    mean: float | None
    standard_error: float | None
    degrees_of_freedom: int
    mean_square: float | None
    energy: float
    effective_size: float | None


@dataclass(frozen=True, eq=False)
class Evidence:
    """Sums over parameters of what two halves say; evidence of several tensors is added with ``+``.

    Parameters
    ----------
    rewards
        Number of rewards, K; every further column is a permuted reward.
    counts
        Number of responses in each half.
    defined
        Number of parameters whose score varies.
    tightness, squares, energy, in_sample
        Sums of the cross-fitted estimates and of the in-sample :math:`|ρ̂|`, a column each.
    crossed
        ``crossed[i, j]`` sums the sign of null direction i times direction j.
    spread
        Sums of the squares of the null directions.

    Shapes
    ------
    tightness, squares, energy, in_sample (K + P,), crossed (M, M) and spread (M,) with M = K + 2P.
    """

    rewards: int
    counts: tuple[int, int]
    defined: int
    tightness: Tensor
    squares: Tensor
    energy: Tensor
    in_sample: Tensor
    crossed: Tensor
    spread: Tensor

    def __add__(self, other: Evidence) -> Evidence:
        """Evidence of both sets of parameters."""
        parts: dict[str, Any] = {
            field: getattr(self, field) + getattr(other, field)
            for field in ("defined", "tightness", "squares", "energy", "in_sample", "crossed", "spread")
        }
        return dataclasses.replace(self, **parts)

    @property
    def permuted(self) -> float | None:
        """Mean cross-fitted tightness of the permuted rewards: zero but for noise; None without any."""
        return self._mean(self.tightness[self.rewards :])

    @property
    def permutation_floor(self) -> float | None:
        r"""Mean in-sample :math:`|ρ̂|` of the permuted rewards; None without any."""
        return self._mean(self.in_sample[self.rewards :])

    def in_sample_mean(self, reward: int = 0) -> float | None:
        r"""Mean in-sample :math:`|ρ̂|`, which means nothing but beside the floors.

        Parameters
        ----------
        reward
            Its column.

        Returns
        -------
        float
            The mean; None where nothing varies.

        Units
        -----
        1.
        """
        return self._mean(self.in_sample[reward : reward + 1])

    def estimate(self, reward: int = 0) -> Estimate:
        """Tightness of one reward.

        Parameters
        ----------
        reward
            Its column.

        Returns
        -------
        Estimate
            Averages over the parameters whose score varies.
        """
        draws = self._draws(reward)
        n1, n2 = self.counts
        kurtosis = float(self.spread[reward]) / self.defined if self.defined else 0.0
        return Estimate(
            mean=self._mean(self.tightness[reward : reward + 1]),
            standard_error=math.sqrt(sum(t * t for t in draws) / len(draws)) if draws else None,
            degrees_of_freedom=len(draws),
            mean_square=self._mean(self.squares[reward : reward + 1]),
            energy=0.0 if math.isnan(float(self.energy[reward])) else float(self.energy[reward]),
            effective_size=(n1 + n2) / kurtosis if kurtosis > 0 else None,
        )

    def _mean(self, sums: Tensor) -> float | None:
        """Mean over columns and parameters; None where a reward does not vary."""
        found = float(sums.mean()) / self.defined if len(sums) and self.defined else math.nan
        return None if math.isnan(found) else found

    def _draws(self, reward: int) -> list[float]:
        """What chance gives in place of the mean, a number for each pair of null directions."""
        nulls = [reward, *range(self.rewards, len(self.spread))]
        if not self.defined or math.isnan(float(self.spread[reward])):
            return []
        n1, n2 = self.counts
        return [
            float(self.crossed[i, j] / math.sqrt(n2) + self.crossed[j, i] / math.sqrt(n1))
            / (2 * self.defined)
            for k, i in enumerate(nulls)
            for j in nulls[k + 1 :]
        ]


def tensor_evidence(
    first: ScoreMoments, second: ScoreMoments, rewards: int = 1
) -> tuple[Evidence, list[Tensor]]:
    """Evidence of one parameter tensor.

    Parameters
    ----------
    first, second
        Moments of one parameter over the two halves; their first ``rewards`` columns are real, the others permuted.
    rewards
        Number of real rewards, K.

    Returns
    -------
    tuple
        The sums, and `ceilings.uncertainty.cross_fitted_tightness` of every column.

    Shapes
    ------
    K + P tensors as the parameter.

    Raises
    ------
    ValueError
        If the moments do not belong together, or hold more than one parameter.
    """
    if len(first.names) != 1:
        raise ValueError(f"{len(first.names)} parameters: give the moments of one, as `alone` does")
    found: list[tuple[Evidence, list[Tensor]]] = [
        _chunk_evidence(a, b, rewards) for a, b in zip(_chunks(first), _chunks(second), strict=True)
    ]
    total = found[0][0]
    for more, _ in found[1:]:
        total = total + more
    shape = first.scores[first.names[0]].shape
    return total, [torch.cat(parts).view(shape) for parts in zip(*(t for _, t in found), strict=True)]


def _chunks(moments: ScoreMoments) -> Iterator[ScoreMoments]:
    """Moments of some entries of a tensor after another."""
    (name,) = moments.names
    scores, squares = moments.scores[name].flatten(), moments.squares[name].flatten()
    reward_scores = moments.reward_scores[name].flatten(1)
    for start in range(0, len(scores), _CHUNK):
        some = slice(start, start + _CHUNK)
        parts: dict[str, Any] = {
            "scores": {name: scores[some]},
            "squares": {name: squares[some]},
            "reward_scores": {name: reward_scores[:, some]},
        }
        yield dataclasses.replace(moments, **parts)


def _chunk_evidence(first: ScoreMoments, second: ScoreMoments, rewards: int) -> tuple[Evidence, list[Tensor]]:
    """Evidence of some entries."""
    (name,) = first.names
    n1, n2 = first.count, second.count
    together = first.merge(second)
    # As `standardised_covariances` does for one reward, with what all of them share taken once.
    fisher = together.diagonal_fisher()[name]
    defined = ~together.tightness(first.reward_names[0])[name].isnan()
    root = torch.where(defined, fisher.sqrt(), torch.nan)
    correction = (together.count / (together.count - 1)) ** (1.0 if together.level == "sequence" else 0.5)
    kept = slice(None) if bool(defined.all()) else defined
    sums: dict[str, list[float]] = {"tightness": [], "squares": [], "energy": [], "in_sample": []}
    nulls: list[Tensor] = []
    fitted: list[Tensor] = []
    for k, reward in enumerate(first.reward_names):
        std = together.reward_std(reward) if together.reward_varies(reward) else math.nan
        roof = root * std
        g1 = first.gradient(reward)[name] * (n1 / (n1 - 1))
        g2 = second.gradient(reward)[name] * (n2 / (n2 - 1))
        a, b = g1.div(roof).div_(correction), g2.div(roof).div_(correction)
        tightness = (a.sign() * b).add_(b.sign() * a).div_(2)
        fitted.append(tightness)
        a, b = a[kept], b[kept]
        sums["tightness"].append(_total(tightness[kept]))
        sums["squares"].append(_total(a * b))
        sums["energy"].append(_total((g1 * g2)[kept]) + 0 * std)
        sums["in_sample"].append(_total(together.gradient(reward)[name].abs_().div_(roof)[kept]))
        if k < rewards:
            nulls.append((a - b).div_(math.sqrt(1 / n1 + 1 / n2)))
        else:
            a, b = a * math.sqrt(n1 / 2), b * math.sqrt(n2 / 2)
            nulls += [a + b, a - b]
    evidence = Evidence(
        rewards=rewards,
        counts=(n1, n2),
        defined=int(defined.sum()),
        crossed=_crossed(nulls),
        spread=torch.tensor([_total(u.square()) for u in nulls], dtype=torch.float64),
        **{field: torch.tensor(values, dtype=torch.float64) for field, values in sums.items()},
    )
    return evidence, fitted


def _crossed(nulls: Sequence[Tensor]) -> Tensor:
    """Sums of the sign of one null direction times another."""
    rows = []
    for u in nulls:
        sign = u.sign()
        rows.append([_total(sign * v) for v in nulls])
    return torch.tensor(rows, dtype=torch.float64)


def _total(values: Tensor) -> float:
    """Sum in float64, without a float64 copy."""
    return float(values.sum(dtype=torch.float64))
