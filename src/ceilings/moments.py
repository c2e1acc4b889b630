r"""`ScoreMoments`: the sums over responses from which Fisher diagonals, gradients and ceilings follow.

The one data type that the engine, the records, the files and the command line agree on. It is apart from the
engine (`ceilings.scores`, which exports it too) because reading a file of moments needs no model.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from ceilings.moments_file import read_tensors, write_tensors

__all__ = ["VERSION", "Level", "ScoreMoments", "Weighting", "flatten"]

Level = Literal["sequence", "token", "next-token"]
Weighting = Literal["samples", "probabilities"]

VERSION: Final = 1
_UNKNOWN_VERSION: Final = (
    f"these score moments have version {{}}, this library reads version {VERSION}: "
    "measure again, or use the library that wrote them"
)
_HEADER: Final = (
    "version",
    "level",
    "weighting",
    "count",
    "weight_sum",
    "reward_names",
    "slow_parameters",
    "names",
)
_PARTS: Final = ("scores", "squares", "reward_scores")
_REWARD_PARTS: Final = ("reward_shift", "reward_sum", "reward_squares")
# Probabilities computed in float32 over a whole vocabulary still sum to 1 within this.
_WEIGHT_TOLERANCE: Final = 1e-6
# A variance below this share of the second moment is rounding of the two sums it is the difference of.
_RESOLUTION: Final = 16.0


@dataclass(frozen=True, eq=False)
class ScoreMoments:
    r"""Weighted sums of scores s, their squares, and their products with rewards R, one tensor a parameter.

    Everything stored is a *plain sum* over responses, neither divided nor centred (rewards are shifted by a
    constant c, below): that is what makes `merge` exact. Everything derived divides by the total weight W (N,
    never N − 1).

    Parameters
    ----------
    scores
        :math:`\sum_n w_n s_n` by parameter name. Names are those of ``named_parameters()``; a matrix used
        twice (a tied head) appears once, under its first name, with both uses added *before* squaring.
    squares
        :math:`\sum_n w_n s_n^2`.
    reward_scores
        :math:`\sum_n w_n (R_n - c) s_n`, one leading row a reward.
    reward_shift
        The constants c. They lose no information and save the digits of rewards with a large mean.
    reward_sum, reward_squares
        :math:`\sum_n w_n (R_n - c)` and :math:`\sum_n w_n (R_n - c)^2`.
    reward_names
        What the rewards are called.
    count
        Number of responses summed over.
    weight_sum
        W = :math:`\sum_n w_n`; equals ``count`` for samples, 1 for a whole law.
    level
        Whose squares ``squares`` sums: ``"sequence"`` (:math:`\nabla \log \pi(y)`), ``"token"``
        (:math:`\nabla \log \pi(y_t \mid y_{<t})` of the tokens that were drawn), ``"next-token"`` (the same,
        in exact expectation over the next token). Every sum is over responses, a response's squares being
        those of its tokens together, so all levels estimate one Fisher diagonal (``thm-tokens``).
    weighting
        ``"samples"``: every w is 1, means are sample means. ``"probabilities"``: w is the probability of the
        response, means are exact expectations.
    slow_parameters
        Names of the parameters that had no fast rule; their values are as exact as the others.
    version
        Version of this layout.

    Shapes
    ------
    scores and squares as the parameter; reward_scores ``(K, *parameter)``; reward_shift,
    reward_sum, reward_squares (K,).

    Units
    -----
    scores 1/[θ], squares 1/[θ]², reward_scores [R]/[θ].

    Raises
    ------
    ValueError
        If version, level or weighting is unknown, or names and shapes disagree.
    """

    scores: dict[str, Tensor]
    squares: dict[str, Tensor]
    reward_scores: dict[str, Tensor]
    reward_shift: Tensor
    reward_sum: Tensor
    reward_squares: Tensor
    reward_names: tuple[str, ...]
    count: int
    weight_sum: float
    level: Level = "sequence"
    weighting: Weighting = "samples"
    slow_parameters: tuple[str, ...] = ()
    version: int = VERSION

    def __post_init__(self) -> None:
        """Refuse what later code could misread."""
        if self.version != VERSION:
            raise ValueError(_UNKNOWN_VERSION.format(self.version))
        for field, allowed in (("level", Level), ("weighting", Weighting)):
            if getattr(self, field) not in get_args(allowed):
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}; it must be one of {get_args(allowed)}"
                )
        if not self.scores or self.count < 1 or not self.weight_sum > 0:
            raise ValueError("score moments need at least one parameter, one response and a positive weight")
        rewards = len(self.reward_names)
        for part in _REWARD_PARTS:
            if getattr(self, part).shape != (rewards,):
                raise ValueError(
                    f"{part} has shape {tuple(getattr(self, part).shape)} for {rewards} reward names"
                )
        for part, lead in zip(_PARTS, ((), (), (rewards,)), strict=True):
            _check_part(part, getattr(self, part), self.scores, lead)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, in the order of ``named_parameters()``."""
        return tuple(self.scores)

    @property
    def num_parameters(self) -> int:
        """D, each tied matrix counted once."""
        return sum(t.numel() for t in self.scores.values())

    def mean_score(self) -> dict[str, Tensor]:
        r"""Mean score :math:`\sum w s / W`; zero for a policy's own whole law (``thm-zero-mean``).

        Returns
        -------
        dict
            One tensor a parameter.

        Shapes
        ------
        As the parameter.

        Units
        -----
        1/[θ].
        """
        self._check_whole()
        return {name: t / self.weight_sum for name, t in self.scores.items()}

    def mean_reward(self, reward: str | None = None) -> float:
        """Mean of one reward.

        Parameters
        ----------
        reward
            Its name; None where there is only one.

        Returns
        -------
        float
            The weighted mean.

        Units
        -----
        [R].
        """
        self._check_whole()
        k = self._row(reward)
        return float(self.reward_shift[k] + self.reward_sum[k] / self.weight_sum)

    def reward_std(self, reward: str | None = None) -> float:
        r"""Standard deviation of one reward, :math:`\sigma(R)`.

        Parameters
        ----------
        reward
            Its name; None where there is only one.

        Returns
        -------
        float
            Divides by W, as the covariance does.

        Units
        -----
        [R].
        """
        self._check_whole()
        k = self._row(reward)
        mean = float(self.reward_sum[k]) / self.weight_sum
        return math.sqrt(max(float(self.reward_squares[k]) / self.weight_sum - mean * mean, 0.0))

    def gradient(self, reward: str | None = None) -> dict[str, Tensor]:
        r"""Policy gradient :math:`g = \operatorname{Cov}(R, s)`.

        Parameters
        ----------
        reward
            Its name; None where there is only one.

        Returns
        -------
        dict
            One tensor a parameter: :math:`\sum w (R - c) s / W - E[R - c]\, E[s]`, which does not depend on
            c.

        Shapes
        ------
        As the parameter.

        Units
        -----
        [R]/[θ].

        Notes
        -----
        Both means come from the responses summed over, so the baseline is their own mean: for N
        samples this is (N − 1)/N of an unbiased estimate, and Cauchy-Schwarz holds exactly.

        References
        ----------
        Claim ``thm-covariance``.
        """
        self._check_whole()
        k = self._row(reward)
        mean = float(self.reward_sum[k]) / self.weight_sum
        return {
            name: (self.reward_scores[name][k] - mean * self.scores[name]) / self.weight_sum
            for name in self.names
        }

    def diagonal_fisher(self, centred: bool = True) -> dict[str, Tensor]:
        r"""Variance of every score, or its second moment.

        Parameters
        ----------
        centred
            True: :math:`E[s^2] - E[s]^2`, the variance that belongs to `gradient`. False: :math:`E[s^2]`.
            They agree for a policy's own whole law; for samples the second has less noise. A token's score
            has mean zero after every prefix: at the other levels there is nothing to centre.

        Returns
        -------
        dict
            One tensor a parameter. Exact Fisher for a whole law, Monte-Carlo for responses drawn from the
            policy, empirical for responses from elsewhere: the moments cannot know which.

        Shapes
        ------
        As the parameter.

        Units
        -----
        1/[θ]².
        """
        self._check_whole()
        second = {name: t / self.weight_sum for name, t in self.squares.items()}
        if not centred or self.level != "sequence":
            return second
        mean = self.mean_score()
        return {name: (second[name] - mean[name].square()).clamp_min(0) for name in self.names}

    def ceiling(self, reward: str | None = None) -> dict[str, Tensor]:
        r"""Ceiling :math:`\sigma(R) \sqrt{F_{ii}}`, with the centred F.

        At level ``"sequence"`` no sampled :math:`|g_i|` exceeds it, which proves nothing; at the other levels
        F and g come from different scores, and one may.

        Parameters
        ----------
        reward
            Its name; None where there is only one.

        Returns
        -------
        dict
            One tensor a parameter.

        Shapes
        ------
        As the parameter.

        Units
        -----
        [R]/[θ].

        References
        ----------
        Claim ``thm-ceiling``.
        """
        std = self.reward_std(reward)
        return {name: std * f.sqrt() for name, f in self.diagonal_fisher().items()}

    def alone(self, name: str) -> ScoreMoments:
        """Moments of one parameter.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        ScoreMoments
            With the same rewards; shares its tensors.
        """
        parts: dict[str, Any] = {part: {name: getattr(self, part)[name]} for part in _PARTS}
        return dataclasses.replace(self, **parts)

    def for_rewards(self, names: tuple[str, ...]) -> ScoreMoments:
        """Moments with some of the rewards.

        Parameters
        ----------
        names
            Their names.

        Returns
        -------
        ScoreMoments
            Of the same parameters; shares its other tensors.

        Raises
        ------
        ValueError
            If there is no such reward.
        """
        rows = [self._row(name) for name in names]
        sums: dict[str, Any] = {part: getattr(self, part)[rows] for part in _REWARD_PARTS}
        chosen = {name: t[rows] for name, t in self.reward_scores.items()}
        return dataclasses.replace(self, reward_scores=chosen, reward_names=names, **sums)

    def tightness(self, reward: str | None = None) -> dict[str, Tensor]:
        r"""Share of the ceiling in use, :math:`|\operatorname{Corr}(R, s_i)|`.

        Parameters
        ----------
        reward
            Its name; None where there is only one.

        Returns
        -------
        dict
            Values in [0, 1]; NaN where the reward or the score does not vary by more than rounding. Samples at
            another level than ``"sequence"`` may exceed 1: g and F then come from different scores, and only
            their expectations obey the ceiling.

        Shapes
        ------
        As the parameter.

        Units
        -----
        1.

        References
        ----------
        Claims ``thm-ceiling``, ``prop-vacuous``.
        """
        gradient, ceiling, fisher = self.gradient(reward), self.ceiling(reward), self.diagonal_fisher()
        result = {}
        for name in self.names:
            rounding = (
                _RESOLUTION * torch.finfo(fisher[name].dtype).eps * self.squares[name] / self.weight_sum
            )
            varies = (fisher[name] > rounding) & self.reward_varies(reward)
            ratio = gradient[name].abs() / ceiling[name]
            # Where one law gives both moments, what exceeds 1 is rounding. Elsewhere it is not to be hidden.
            one_law = self.level == "sequence" or (self.level, self.weighting) == (
                "next-token",
                "probabilities",
            )
            ratio = ratio.clamp_max(1) if one_law else ratio
            result[name] = torch.where(varies, ratio, torch.nan)
        return result

    def merge(self, other: ScoreMoments) -> ScoreMoments:
        """Moments of both sets of responses together, as if summed in one go.

        Parameters
        ----------
        other
            Moments of other responses under the same parameters.

        Returns
        -------
        ScoreMoments
            Their sum; rewards are shifted as in ``self``, whatever the shift of ``other``.

        Raises
        ------
        ValueError
            If level, weighting, reward names, parameter names or shapes differ.
        """
        for field in ("level", "weighting", "reward_names", "names"):
            if getattr(self, field) != getattr(other, field):
                difference = _difference(getattr(self, field), getattr(other, field))
                raise ValueError(f"cannot merge: {field} differs ({difference})")
        for name in self.names:
            if self.scores[name].shape != other.scores[name].shape:
                shapes = tuple(self.scores[name].shape), tuple(other.scores[name].shape)
                raise ValueError(f"cannot merge: {name} has shape {shapes[0]} here and {shapes[1]} there")
        other = other.shifted(self.reward_shift)
        return dataclasses.replace(
            self,
            scores=_add(self.scores, other.scores),
            squares=_add(self.squares, other.squares),
            reward_scores=_add(self.reward_scores, other.reward_scores),
            reward_sum=self.reward_sum + other.reward_sum,
            reward_squares=self.reward_squares + other.reward_squares,
            count=self.count + other.count,
            weight_sum=self.weight_sum + other.weight_sum,
            slow_parameters=tuple(sorted({*self.slow_parameters, *other.slow_parameters})),
        )

    def shifted(self, reward_shift: Tensor) -> ScoreMoments:
        """Return the same moments about another constant.

        Parameters
        ----------
        reward_shift
            The new c.

        Returns
        -------
        ScoreMoments
            Equal in every derived quantity.

        Shapes
        ------
        reward_shift (K,).
        """
        move = self.reward_shift - reward_shift
        if not bool(move.any()):
            return self
        reward_scores = {
            name: t + move.to(t).view(-1, *[1] * (t.dim() - 1)) * self.scores[name]
            for name, t in self.reward_scores.items()
        }
        return dataclasses.replace(
            self,
            reward_scores=reward_scores,
            reward_shift=reward_shift,
            reward_sum=self.reward_sum + move * self.weight_sum,
            reward_squares=self.reward_squares + 2 * move * self.reward_sum + move.square() * self.weight_sum,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all.

        Parameters
        ----------
        path
            Where to. An existing file is replaced only once the new one is complete.

        Notes
        -----
        Tensors are ``scores/NAME``, ``squares/NAME``, ``reward_scores/NAME`` and the reward sums;
        the rest is JSON in the file's metadata under ``ceilings``.
        """
        tensors = {f"{part}/{name}": t for part in _PARTS for name, t in getattr(self, part).items()}
        tensors |= {part: getattr(self, part) for part in _REWARD_PARTS}
        write_tensors(path, tensors, {field: getattr(self, field) for field in _HEADER})

    @classmethod
    def load(cls, path: str | os.PathLike[str], name: str | None = None) -> ScoreMoments:
        """Read what `save` wrote.

        Parameters
        ----------
        path
            The file.
        name
            The one parameter to read, where all of them would need too much memory; None for all.

        Returns
        -------
        ScoreMoments
            Equal to what was saved, bit for bit.

        Raises
        ------
        ValueError
            If the file does not hold score moments, or those of another version, or none of that parameter.
        """
        header, tensors = read_tensors(path, lambda key: name in (None, key.partition("/")[2] or name))
        if header.get("version") != VERSION:
            raise ValueError(f"{path}: {_UNKNOWN_VERSION.format(header.get('version'))}")
        names = header["names"] if name is None else [name]
        if not set(names) <= set(header["names"]):
            raise ValueError(f"{path} holds no parameter called {name!r}: it has {header['names'][0]!r}, …")
        fields: dict[str, Any] = {part: tensors[part] for part in _REWARD_PARTS}
        fields |= {part: {key: tensors[f"{part}/{key}"] for key in names} for part in _PARTS}
        fields |= {f: tuple(v) if isinstance(v := header[f], list) else v for f in _HEADER if f != "names"}
        return cls(**fields)

    @staticmethod
    def stored_header(path: str | os.PathLike[str]) -> dict[str, Any]:
        """What a file of moments holds, without reading its tensors.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        dict
            ``names``, ``count``, ``reward_names`` and the other plain fields.

        Raises
        ------
        ValueError
            If the file does not hold score moments.
        """
        return read_tensors(path, lambda key: False)[0]

    def _row(self, reward: str | None) -> int:
        """Index of one reward."""
        if reward is None and len(self.reward_names) == 1:
            return 0
        if reward not in self.reward_names:
            raise ValueError(f"no reward is called {reward!r}: name one of {self.reward_names}")
        return self.reward_names.index(reward)

    def reward_varies(self, reward: str | None = None) -> bool:
        """Whether a reward's variance exceeds the rounding of its sums.

        Parameters
        ----------
        reward
            Its name; None where there is only one.

        Returns
        -------
        bool
            Whether it does.
        """
        second = float(self.reward_squares[self._row(reward)]) / self.weight_sum
        return self.reward_std(reward) ** 2 > _RESOLUTION * torch.finfo(torch.float64).eps * second

    def _check_whole(self) -> None:
        """Refuse to take an expectation over part of a law."""
        if self.weighting == "probabilities" and abs(self.weight_sum - 1) > _WEIGHT_TOLERANCE:
            raise ValueError(
                f"the probabilities of these responses sum to {self.weight_sum:.9g}, not 1: merge the "
                "moments of the remaining responses first"
            )


def flatten(tensors: dict[str, Tensor]) -> Tensor:
    """One vector over all parameters, in the order of their names in the dictionary.

    Parameters
    ----------
    tensors
        One tensor a parameter, as the methods of `ScoreMoments` return.

    Returns
    -------
    Tensor
        Their entries in a row.

    Shapes
    ------
    -> (D,).
    """
    return torch.cat([t.flatten() for t in tensors.values()])


def _check_part(
    part: str, tensors: dict[str, Tensor], scores: dict[str, Tensor], lead: tuple[int, ...]
) -> None:
    """Compare the names and shapes of one dictionary with those of the scores."""
    if tuple(tensors) != tuple(scores):
        raise ValueError(
            f"{part} and scores name different parameters ({_difference(tuple(tensors), tuple(scores))})"
        )
    for name, tensor in tensors.items():
        expected = (*lead, *scores[name].shape)
        if tensor.shape != expected:
            raise ValueError(f"{part} of {name} has shape {tuple(tensor.shape)}, expected {expected}")


def _difference(here: Any, there: Any) -> str:
    """Say shortly how two fields differ."""
    if isinstance(here, tuple) and set(here) != set(there):
        only = [f"{sorted(a - b)[0]!r} only {where}" for a, b, where in _sides(here, there) if a - b]
        return ", ".join(only)
    return (
        f"{here!r} here, {there!r} there"
        if not isinstance(here, tuple)
        else "the same names in another order"
    )


def _sides(here: tuple[str, ...], there: tuple[str, ...]) -> tuple[tuple[set[str], set[str], str], ...]:
    """Both directions of a comparison of names."""
    return (set(here), set(there), "here"), (set(there), set(here), "there")


def _add(here: dict[str, Tensor], there: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum two dictionaries of tensors name by name."""
    return {name: t + there[name] for name, t in here.items()}
