r"""Many rewards of one enumerated policy at once, so that a result and its null models cost about the same.

What does not depend on the reward (the Fisher information, the spread of every token's score after every prefix,
the directions of the scores) is computed once; a reward then costs a few products of matrices. The functions of
`ceilings.ceiling` and `ceilings.looseness` define what is computed here, and the tests compare the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ceilings.policies import Enumeration

__all__ = ["Panel", "top_overlap"]

# Below this share of its second moment a score's variance is rounding: no reward can push the parameter.
_CONSTANT = 1e-24


class Panel:
    r"""One enumerated policy, ready for many rewards.

    Parameters
    ----------
    law
        Every response of one prompt, with token scores.

    Notes
    -----
    Rewards are given as K rows, one column a response, and centred here. Parameters whose score does not vary are
    left out of every result; ``varies`` says which are kept.

    References
    ----------
    Claims ``thm-ceiling``, ``thm-nested``, ``thm-joint``.
    """

    def __init__(self, law: Enumeration) -> None:
        self.probs = law.probs
        scores = law.scores - law.probs @ law.scores
        fisher = law.probs @ scores.square()
        self.varies = fisher > _CONSTANT * fisher.max()
        self.root_fisher = fisher[self.varies].sqrt()
        self._scores = scores[:, self.varies]
        self._steps = [_step(law, t, self.varies) for t in range(law.token_scores.shape[1])]
        self._directions: Tensor | None = None

    def spread(self, rewards: Tensor) -> Tensor:
        r"""Standard deviation of every reward.

        Parameters
        ----------
        rewards
            One row a reward.

        Returns
        -------
        Tensor
            :math:`\sigma(R)`.

        Shapes
        ------
        rewards (K, Y) -> (K,).

        Units
        -----
        [R].
        """
        return (self._centred(rewards).square() @ self.probs).sqrt()

    def gradient(self, rewards: Tensor) -> Tensor:
        """Policy gradient of every reward.

        Parameters
        ----------
        rewards
            One row a reward.

        Returns
        -------
        Tensor
            Covariance of reward and score.

        Shapes
        ------
        rewards (K, Y) -> (K, D) with D the number of parameters that vary.

        Units
        -----
        [R]/[θ].
        """
        return (self.probs * self._centred(rewards)) @ self._scores

    def ceiling(self, rewards: Tensor) -> Tensor:
        r"""Ceiling of every parameter under every reward, :math:`\sigma(R) \sqrt{F_{ii}}`.

        Parameters
        ----------
        rewards
            One row a reward.

        Returns
        -------
        Tensor
            Upper bound of the gradient's absolute value.

        Shapes
        ------
        rewards (K, Y) -> (K, D).

        Units
        -----
        [R]/[θ].
        """
        return self.spread(rewards)[:, None] * self.root_fisher

    def nested(self, rewards: Tensor) -> Tensor:
        """Nested ceiling of every parameter under every reward, see `ceilings.ceiling.nested_ceiling`.

        Parameters
        ----------
        rewards
            One row a reward.

        Returns
        -------
        Tensor
            Between the gradient's absolute value and the ceiling.

        Shapes
        ------
        rewards (K, Y) -> (K, D).

        Units
        -----
        [R]/[θ].
        """
        centred = self._centred(rewards)
        total = torch.zeros(len(rewards), len(self.root_fisher), dtype=rewards.dtype)
        for rows, node, prefix, mass, weight, deviation in self._steps:
            nodes = torch.zeros(len(rewards), len(mass), dtype=rewards.dtype)
            value = nodes.index_add(1, node, centred[:, rows] * self.probs[rows]) / mass  # Q_t
            prefixes = torch.zeros(len(rewards), len(weight), dtype=rewards.dtype)
            mean = prefixes.index_add(1, prefix, value * mass) / weight
            variance = prefixes.index_add(1, prefix, (value - mean[:, prefix]).square() * mass) / weight
            total += (variance.sqrt() * weight) @ deviation
        return total

    def directions(self, rewards: Tensor) -> Tensor:
        r"""Squared correlation of every reward with the score along every eigenvector of the Fisher matrix.

        Parameters
        ----------
        rewards
            One row a reward.

        Returns
        -------
        Tensor
            :math:`\rho_k^2`, largest eigenvalue first; a row sums to the share of the reward's variance that the
            scores explain.

        Shapes
        ------
        rewards (K, Y) -> (K, r) with r the rank of the Fisher matrix.

        Units
        -----
        1.
        """
        root = self.probs.sqrt()
        if self._directions is None:
            design = root[:, None] * self._scores
            left, singular, _ = torch.linalg.svd(design, full_matrices=False)
            noise = max(design.shape) * torch.finfo(design.dtype).eps
            self._directions = left[:, singular > noise * singular.max()]
        target = root * self._centred(rewards) / self.spread(rewards)[:, None]
        return (target @ self._directions).square()

    def forced_rms(self) -> Tensor:
        r"""Largest root-mean-square tightness that any reward can reach, see `ceilings.looseness.forced_rms`.

        Returns
        -------
        Tensor
            :math:`\sqrt{\lambda_{\max}(C) / D}`.

        Shapes
        ------
        -> ().

        Units
        -----
        1.

        Notes
        -----
        From the smaller of the two Gram matrices: only its largest eigenvalue is needed.
        """
        unit = self.probs.sqrt()[:, None] * self._scores / self.root_fisher
        gram = unit @ unit.T if unit.shape[0] <= unit.shape[1] else unit.T @ unit
        return (torch.linalg.eigvalsh(gram)[-1] / unit.shape[1]).sqrt()

    def along(self, directions: Tensor) -> Tensor:
        """Scores along directions of the parameter space, for use as rewards.

        Parameters
        ----------
        directions
            One row a direction.

        Returns
        -------
        Tensor
            One reward a direction.

        Shapes
        ------
        directions (K, D) -> (K, Y).
        """
        return directions @ self._scores.T

    def _centred(self, rewards: Tensor) -> Tensor:
        return rewards - (rewards @ self.probs)[:, None]


def top_overlap(gradient: Tensor, ceiling: Tensor, share: float = 0.01) -> Tensor:
    """Share of the largest gradients that lie under the highest ceilings.

    Parameters
    ----------
    gradient, ceiling
        One row a reward.
    share
        Size of both top sets, as a share of the parameters; at least one.

    Returns
    -------
    Tensor
        1 where both top sets are the same; two sets drawn at random would share ``share`` of their members.

    Shapes
    ------
    gradient, ceiling (K, D) -> (K,).

    Units
    -----
    1.
    """
    size = max(1, round(share * gradient.shape[1]))
    first = gradient.abs().topk(size, dim=1).indices
    second = torch.zeros_like(ceiling).scatter(1, ceiling.topk(size, dim=1).indices, 1.0)
    return second.gather(1, first).mean(1)


def _index(keys: list[tuple[int, ...]]) -> tuple[Tensor, int]:
    """Number of each key among the distinct keys, in order of appearance, and how many there are."""
    seen: dict[tuple[int, ...], int] = {}
    return torch.tensor([seen.setdefault(key, len(seen)) for key in keys]), len(seen)


def _step(law: Enumeration, t: int, varies: Tensor) -> tuple[Tensor, ...]:
    """Rows that are open at token t, their nodes, the nodes' prefixes, both masses, and the scores' deviations."""
    rows = (law.lengths > t).nonzero()[:, 0]
    open_ones = [law.responses[int(r)] for r in rows]
    node, nodes = _index([y[: t + 1] for y in open_ones])
    mass = torch.zeros(nodes, dtype=law.probs.dtype).index_add_(0, node, law.probs[rows])
    first = torch.zeros(nodes, dtype=torch.long).index_copy_(0, node, torch.arange(len(rows)))
    prefix, prefixes = _index([open_ones[int(r)][:t] for r in first])
    weight = torch.zeros(prefixes, dtype=mass.dtype).index_add_(0, prefix, mass)
    scores = law.token_scores[rows[first], t][:, varies]
    square = torch.zeros(prefixes, scores.shape[1], dtype=mass.dtype)
    square.index_add_(
        0, prefix, mass[:, None] * scores.square()
    )  # token scores have mean zero given the prefix
    return rows, node, prefix, mass, weight, (square / weight[:, None]).sqrt()
