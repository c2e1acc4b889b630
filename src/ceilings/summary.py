r"""What score moments say, in a few hundred numbers: the body of ``report.json``.

Everything is read off the moments one parameter tensor at a time, so a summary needs little memory beyond them.
Quantiles over all parameters come from histograms (a thousandth of the range of tightness, a fortieth of a decade of
Fisher information); totals, means and norms are exact.

NOTE :math:`|\hat g_i| \le \hat\sigma \sqrt{\hat F_{ii}}` holds in every sample by arithmetic (``prop-vacuous``), so
nothing here counts it as a finding. What a sample can show is tightness *above* its noise floor.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.measurement import SHUFFLED
from ceilings.moments import ScoreMoments
from ceilings.moments_file import write_tensors
from ceilings.places import place

__all__ = ["SHARES", "derived_tensors", "noise_floor", "summarise", "write_derived"]

_BINS: Final = 1000
_PER_DECADE: Final = 40
_DECADES: Final = (-46, 40)  # float32 from its smallest subnormal to its largest number
_TOP: Final = 12

#: Shares of the parameters at which the concentration curve is reported.
SHARES: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def noise_floor(effective_size: float) -> float:
    r"""Mean of :math:`|\hat\rho|` where reward and score have nothing to do with each other.

    Parameters
    ----------
    effective_size
        Number of independent responses, N.

    Returns
    -------
    float
        :math:`\sqrt{2 / (\pi N)}`: asymptotic, for finite fourth moments and independence.

    Units
    -----
    1.

    References
    ----------
    Claim ``prop-vacuous``.
    """
    return math.sqrt(2 / (math.pi * effective_size))


def derived_tensors(moments: ScoreMoments, what: str, reward: str | None = None) -> dict[str, Tensor]:
    """Gradient, Fisher diagonal, ceiling or tightness of every parameter, computed one tensor at a time.

    Parameters
    ----------
    moments
        The moments.
    what
        ``"gradient"``, ``"fisher"`` (the variance of the score), ``"ceiling"`` or ``"tightness"``.
    reward
        Name of the reward; None for the first.

    Returns
    -------
    dict
        One tensor a parameter.

    Shapes
    ------
    As the parameter.

    Raises
    ------
    ValueError
        If ``what`` is none of the four.
    """
    reward = moments.reward_names[0] if reward is None else reward
    if what not in ("gradient", "fisher", "ceiling", "tightness"):
        raise ValueError(f"{what!r} is not derived from moments: name gradient, fisher, ceiling or tightness")
    found: dict[str, Tensor] = {}
    for name in moments.names:
        one = _only(moments, name)
        found |= one.diagonal_fisher() if what == "fisher" else getattr(one, what)(reward)
    return found


def summarise(
    moments: ScoreMoments, row_label: Callable[[str, int], str | None] = lambda name, row: None
) -> dict[str, Any]:
    """Statistics of score moments, as plain JSON values.

    Parameters
    ----------
    moments
        Moments whose first reward is the one of interest. A reward called ``shuffled`` is taken as the null.
    row_label
        A word for a row of a parameter, such as the token of a row of the embedding, or None.

    Returns
    -------
    dict
        ``rewards``, ``fisher``, ``ceiling``, ``gradient``, ``tightness``, ``uncertainty``, ``tensors``,
        ``top_parameters`` and ``top_rows``, as the schema ``report_schema.json`` describes them.
    """
    primary, shuffled = moments.reward_names[0], SHUFFLED in moments.reward_names
    totals = _Totals(float(moments.reward_std(primary)))
    tensors = []
    for name in moments.names:
        tensors.append(_tensor_summary(_only(moments, name), name, shuffled, totals, row_label))
    gradients = {
        reward: math.sqrt(
            sum(
                float(_only(moments, name).gradient(reward)[name].double().square().sum())
                for name in moments.names
            )
        )
        for reward in moments.reward_names
    }
    rewards = [
        {
            "name": reward,
            "mean": moments.mean_reward(reward),
            "std": moments.reward_std(reward),
            "gradient_norm": gradients[reward],
        }
        for reward in moments.reward_names
    ]
    return {
        "rewards": rewards,
        "fisher": {
            "total": totals.fisher_sum,
            "zero": totals.fisher_zero,
            "share_in_top": {f"{share:g}": totals.share_in_top(share) for share in SHARES},
        },
        "ceiling": {
            "norm": totals.std * math.sqrt(totals.fisher_sum),
            "quantiles": {f"{q:g}": totals.std * math.sqrt(totals.fisher_quantile(q)) for q in _QUANTILES},
        },
        "gradient": {"norm": gradients[primary], "norm_shuffled": gradients.get(SHUFFLED)},
        "tightness": totals.tightness.summary(),
        "uncertainty": _uncertainty(moments, totals),
        "tensors": tensors,
        "top_parameters": totals.top_entries(),
        "top_rows": totals.top_rows(),
    }


def _uncertainty(moments: ScoreMoments, totals: _Totals) -> dict[str, Any]:
    """How far the sample can be trusted. The one place where further measures of error join the report."""
    if moments.weighting == "probabilities":
        exact = dict.fromkeys(("effective_size", "noise_floor", "shuffled_tightness", "mean_score_ratio"))
        return {"kind": "exact", **exact}
    return {
        "kind": "sampled",
        "effective_size": moments.weight_sum,
        "noise_floor": noise_floor(moments.weight_sum),
        "shuffled_tightness": totals.shuffled.summary() if totals.shuffled.defined else None,
        # N |mean score|² / E|s|²: 1 in expectation for responses drawn from the policy itself.
        "mean_score_ratio": totals.score_sum_squares / totals.second_moment if totals.second_moment else None,
    }


@dataclass
class _Histogram:
    """Values in [0, 1]: counts in narrow bins, and exact sums."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))
    defined: int = 0
    undefined: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor) -> tuple[Tensor, int]:
        """Add a tensor; the values of it that are defined, and their number."""
        real = values[~values.isnan()].float()
        # NOTE not `histc`: its counts are float32 and stop at 2²⁴, less than one embedding has entries.
        place = (real * _BINS).long().clamp_(0, _BINS - 1)
        self.counts += torch.bincount(place, minlength=_BINS).cpu()
        self.defined += real.numel()
        self.undefined += values.numel() - real.numel()
        self.total += float(real.double().sum())
        self.squares += float(real.double().square().sum())
        return real, real.numel()

    def summary(self) -> dict[str, Any]:
        """Mean, quantiles and a coarse histogram."""
        cumulated = self.counts.cumsum(0) / max(self.defined, 1)
        quantiles = {
            f"{q:g}": (int(torch.searchsorted(cumulated, q)) + 0.5) / _BINS if self.defined else None
            for q in _QUANTILES
        }
        coarse = self.counts.view(50, -1).sum(1) / max(self.defined, 1)
        return {
            "defined": self.defined,
            "undefined": self.undefined,
            "mean": self.total / self.defined if self.defined else None,
            "rms": math.sqrt(self.squares / self.defined) if self.defined else None,
            "quantiles": quantiles,
            "histogram": coarse.tolist(),
        }


class _Totals:
    """What is summed over all parameters."""

    def __init__(self, std: float) -> None:
        self.std = std
        self.tightness, self.shuffled = _Histogram(), _Histogram()
        size = (_DECADES[1] - _DECADES[0]) * _PER_DECADE
        self._counts, self._mass = (
            torch.zeros(size, dtype=torch.float64),
            torch.zeros(size, dtype=torch.float64),
        )
        self.parameters = self.fisher_zero = 0
        self.fisher_sum = self.score_sum_squares = self.second_moment = 0.0
        self._entries: list[tuple[float, int, dict[str, Any]]] = []
        self._rows: list[tuple[float, int, dict[str, Any]]] = []

    def add_fisher(self, fisher: Tensor) -> float:
        """Add a Fisher diagonal; its sum."""
        flat = fisher.flatten()
        positive = flat[flat > 0]
        index = ((positive.log10() - _DECADES[0]) * _PER_DECADE).long().clamp(0, len(self._counts) - 1).cpu()
        self._counts += torch.bincount(index, minlength=len(self._counts))
        self._mass += torch.bincount(index, positive.cpu().double(), minlength=len(self._counts))
        self.parameters += flat.numel()
        self.fisher_zero += flat.numel() - positive.numel()
        total = float(positive.double().sum())
        self.fisher_sum += total
        return total

    def share_in_top(self, share: float) -> float:
        """Share of the Fisher information in the parameters that have most of it."""
        wanted, mass = share * self.parameters, 0.0
        for count, part in zip(self._counts.flip(0).tolist(), self._mass.flip(0).tolist(), strict=True):
            if count >= wanted:
                return min(1.0, (mass + (part * wanted / count if count else 0.0)) / (self.fisher_sum or 1.0))
            wanted, mass = wanted - count, mass + part
        return min(1.0, mass / (self.fisher_sum or 1.0))

    def fisher_quantile(self, q: float) -> float:
        """Quantile of the Fisher diagonal: geometric middle of its bin, 0 among the zeros."""
        rank = q * self.parameters - self.fisher_zero
        if rank <= 0:
            return 0.0
        place = min(int(torch.searchsorted(self._counts.cumsum(0), rank)), len(self._counts) - 1)
        return float(10 ** ((place + 0.5) / _PER_DECADE + _DECADES[0]))

    def offer(self, kind: str, room: float, entry: dict[str, Any]) -> None:
        """Keep an entry if it is among those with the most room."""
        heap = self._entries if kind == "entry" else self._rows
        item = (room, -len(heap) - self.parameters, entry)
        if len(heap) < _TOP:
            heapq.heappush(heap, item)
        elif room > heap[0][0]:
            heapq.heapreplace(heap, item)

    def top_entries(self) -> list[dict[str, Any]]:
        """Single parameters with the most room, most first."""
        return [entry for *_, entry in sorted(self._entries, key=lambda item: -item[0])]

    def top_rows(self) -> list[dict[str, Any]]:
        """Rows with the most room, most first."""
        return [entry for *_, entry in sorted(self._rows, key=lambda item: -item[0])]


def _tensor_summary(
    one: ScoreMoments,
    name: str,
    shuffled: bool,
    totals: _Totals,
    row_label: Callable[[str, int], str | None],
) -> dict[str, Any]:
    """Statistics of one parameter tensor; adds to the totals."""
    primary = one.reward_names[0]
    gradient, fisher = one.gradient(primary)[name], one.diagonal_fisher()[name]
    totals.score_sum_squares += float(one.scores[name].double().square().sum()) / one.weight_sum
    totals.second_moment += float(one.squares[name].double().sum()) / one.weight_sum
    fisher_sum = totals.add_fisher(fisher)
    tightness = one.tightness(primary)[name]
    real, defined = totals.tightness.add(tightness)
    null, _ = totals.shuffled.add(one.tightness(SHUFFLED)[name]) if shuffled else (real[:0], 0)
    layer, matrix = place(name)
    squares = float(gradient.double().square().sum())
    _offer_entries(name, totals, fisher, gradient, tightness)
    _offer_rows(name, totals, fisher, gradient, row_label)
    return {
        "name": name,
        "layer": layer,
        "matrix": matrix,
        "shape": list(gradient.shape),
        "parameters": gradient.numel(),
        "fisher_sum": fisher_sum,
        "ceiling_rms": totals.std * math.sqrt(fisher_sum / gradient.numel()),
        "gradient_norm": math.sqrt(squares),
        "tightness_mean": float(real.double().mean()) if defined else None,
        "tightness_rms": float(real.double().square().mean().sqrt()) if defined else None,
        "tightness_undefined": gradient.numel() - defined,
        "shuffled_tightness_mean": float(null.double().mean()) if len(null) else None,
    }


def _offer_entries(name: str, totals: _Totals, fisher: Tensor, gradient: Tensor, tightness: Tensor) -> None:
    """Offer the entries of a tensor with the most room, ceiling minus gradient."""
    room = (totals.std * fisher.sqrt() - gradient.abs()).flatten()
    for value, at in zip(*(t.tolist() for t in room.topk(min(_TOP, len(room)))), strict=True):
        index = [int(i) for i in torch.unravel_index(torch.tensor(at), gradient.shape)]
        rho = float(tightness.flatten()[at])
        entry = {
            "name": name,
            "index": index,
            "ceiling": totals.std * math.sqrt(float(fisher.flatten()[at])),
            "gradient": float(gradient.flatten()[at]),
            "tightness": None if math.isnan(rho) else rho,
        }
        totals.offer("entry", value, entry)


def _offer_rows(
    name: str,
    totals: _Totals,
    fisher: Tensor,
    gradient: Tensor,
    row_label: Callable[[str, int], str | None],
) -> None:
    """Offer the rows of a matrix with the most room; a row's ceiling bounds the norm of its gradient."""
    if fisher.dim() < 2:
        return
    ceiling = totals.std * fisher.flatten(1).double().sum(1).sqrt()
    norm = gradient.flatten(1).double().square().sum(1).sqrt()
    room = ceiling - norm
    for value, row in zip(*(t.tolist() for t in room.topk(min(_TOP, len(room)))), strict=True):
        entry = {
            "name": name,
            "row": row,
            "label": row_label(name, row),
            "ceiling": float(ceiling[row]),
            "gradient_norm": float(norm[row]),
        }
        totals.offer("row", value, entry)


def _only(moments: ScoreMoments, name: str) -> ScoreMoments:
    """Moments of one parameter."""
    parts: dict[str, Any] = {
        part: {name: getattr(moments, part)[name]} for part in ("scores", "squares", "reward_scores")
    }
    return dataclasses.replace(moments, **parts)


def write_derived(moments: ScoreMoments, folder: Path) -> None:
    """Write gradient, Fisher diagonal and tightness, a file each, keyed by parameter name.

    Parameters
    ----------
    moments
        The moments; the first reward is written.
    folder
        Where to. Each file is whole or absent.

    Notes
    -----
    The JSON in the files' metadata under ``ceilings`` names the quantity, reward, level and count.
    """
    for what in ("gradient", "fisher", "tightness"):
        header = {
            "kind": f"ceilings.{what}",
            "reward": None if what == "fisher" else moments.reward_names[0],
            "level": moments.level,
            "count": moments.count,
        }
        write_tensors(folder / f"{what}.safetensors", derived_tensors(moments, what), header)
