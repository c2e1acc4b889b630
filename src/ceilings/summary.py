r"""What score moments say, in a few hundred numbers: the body of ``report.json``.

Everything is read off the moments one parameter tensor at a time, so a summary needs little memory beyond the largest
of them. Quantiles over all parameters come from histograms (a thousandth in tightness, a fortieth of a decade of
Fisher information); totals, means and norms are exact.

NOTE :math:`|\hat g_i| \le \hat\sigma \sqrt{\hat F_{ii}}` holds in every sample by arithmetic (``prop-vacuous``), so
nothing here counts it as a finding. Tightness is cross-fitted: one half of the responses tries what the other suggests.
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

from ceilings.evidence import Estimate, Evidence, tensor_evidence
from ceilings.folds import Folds
from ceilings.moments import ScoreMoments
from ceilings.moments_file import write_tensors
from ceilings.places import place
from ceilings.uncertainty import cross_fitted_energy, is_permuted, noise_floor

__all__ = ["SHARES", "derived_tensors", "estimate_kind", "summarise", "write_derived"]

_BINS: Final = 2000  # of [-1, 1]
_COARSE: Final = 100
_PER_DECADE: Final = 40
_DECADES: Final = (-46, 40)  # float32 from its smallest subnormal to its largest number
_TOP: Final = 12

#: Shares of the parameters at which the concentration curve is reported.
SHARES: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_ESTIMATE: Final = tuple(f.name for f in dataclasses.fields(Estimate))
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


RowLabel = Callable[[str, int], str | None]


def estimate_kind(folds: Folds) -> str:
    """How tightness can be had from moments.

    Parameters
    ----------
    folds
        The moments.

    Returns
    -------
    str
        ``"exact"`` for a whole law, ``"cross-fitted"`` for two halves of a sample, ``"none"`` for a sample that was not
        split: its in-sample values are no evidence.
    """
    if folds.first.weighting == "probabilities":
        return "exact"
    return "cross-fitted" if len(folds) == 2 else "none"


def derived_tensors(folds: Folds, what: str, reward: str | None = None) -> dict[str, Tensor]:
    """Gradient, Fisher diagonal, ceiling or tightness of every parameter, computed one tensor at a time.

    Parameters
    ----------
    folds
        The moments.
    what
        ``"gradient"``, ``"fisher"`` (the variance of the score), ``"ceiling"`` or ``"tightness"``, which is
        cross-fitted where there are two halves: single entries may then be negative.
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
    reward = folds.first.reward_names[0] if reward is None else reward
    if what not in ("gradient", "fisher", "ceiling", "tightness"):
        raise ValueError(f"{what!r} is not derived from moments: name gradient, fisher, ceiling or tightness")
    found: dict[str, Tensor] = {}
    for name in folds.names:
        if what == "tightness" and estimate_kind(folds) == "cross-fitted":
            first, second = (part.for_rewards((reward,)) for part in folds.of(name))
            found[name] = tensor_evidence(first, second)[1][0]
            continue
        one = folds.together(name)
        found |= one.diagonal_fisher() if what == "fisher" else getattr(one, what)(reward)
    return found


def summarise(
    folds: Folds, halves: str | None = None, row_label: RowLabel = lambda name, row: None
) -> dict[str, Any]:
    """Statistics of score moments, as plain JSON values.

    Parameters
    ----------
    folds
        Moments whose first reward is the one of interest; those called ``permuted-0`` and so on are its null.
    halves
        What was kept whole when the sample was split: ``"groups"``, ``"responses"``, or None.
    row_label
        A word for a row of a parameter, such as the token of a row of the embedding, or None.

    Returns
    -------
    dict
        ``rewards``, ``fisher``, ``ceiling``, ``gradient``, ``tightness``, ``uncertainty``, ``layers``, ``tensors``,
        ``top_parameters`` and ``top_rows``, as the schema ``report_schema.json`` describes them.
    """
    first = folds.together(folds.names[0])
    totals = _Totals(first, estimate_kind(folds))
    tensors = [_tensor_summary(folds, name, totals, row_label) for name in folds.names]
    real = [name for name in first.reward_names if not is_permuted(name)]
    permuted = [name for name in first.reward_names if is_permuted(name)]
    rewards = [
        {
            "name": reward,
            "mean": first.mean_reward(reward),
            "std": first.reward_std(reward),
            "gradient_norm": math.sqrt(totals.energy[reward]),
            "tightness": totals.estimate(k),
        }
        for k, reward in enumerate(real)
    ]
    energy = totals.estimate(0)["energy"]
    noise = [totals.energy[name] for name in permuted]
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
        "gradient": {
            "norm": math.sqrt(totals.energy[real[0]]),
            "norm_cross_fitted": None if energy is None else math.sqrt(max(energy, 0.0)),
            "norm_permuted": math.sqrt(sum(noise) / len(noise)) if noise else None,
        },
        "tightness": {"estimate": totals.kind, **totals.estimate(0), **totals.tightness.summary()},
        "uncertainty": _uncertainty(first, folds, totals, halves),
        "layers": totals.layer_summaries(),
        "tensors": tensors,
        "top_parameters": totals.top_entries(),
        "top_rows": totals.top_rows(),
    }


def _uncertainty(first: ScoreMoments, folds: Folds, totals: _Totals, halves: str | None) -> dict[str, Any]:
    """How far the sample can be trusted."""
    sampled = totals.kind != "exact"
    evidence, found = totals.evidence, totals.estimate(0)
    return {
        "kind": "sampled" if sampled else "exact",
        "halves": halves,
        "half_sizes": [part.count for part in folds.of(folds.names[0])] if evidence else None,
        "permutations": sum(map(is_permuted, first.reward_names)),
        "effective_size": found["effective_size"],
        "noise_floor": noise_floor(first.count) if sampled else None,
        "permutation_floor": evidence.permutation_floor if evidence else None,
        "in_sample_mean": totals.in_sample_mean if sampled else None,
        "above_one": totals.above_one,
        "permuted_mean": evidence.permuted if evidence else None,
        "permuted": totals.permuted.summary() if totals.permuted.defined else None,
        # N |mean score|² / E|s|²: 1 in expectation for responses drawn from the policy itself.
        "mean_score_ratio": totals.score_sum_squares / totals.second_moment
        if sampled and totals.second_moment
        else None,
    }


@dataclass
class _Histogram:
    """Values in [-1, 1]: counts in narrow bins, and exact sums. What lies beyond is counted in the last bin."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))
    defined: int = 0
    undefined: int = 0

    def add(self, values: Tensor) -> None:
        """Add a tensor."""
        real = values[~values.isnan()].float()
        # NOTE not `histc`: its counts are float32 and stop at 2²⁴, less than one embedding has entries.
        place = ((real + 1) * (_BINS / 2)).floor_().long().clamp_(0, _BINS - 1)
        self.counts += torch.bincount(place, minlength=_BINS).cpu()
        self.defined += real.numel()
        self.undefined += values.numel() - real.numel()

    def summary(self) -> dict[str, Any]:
        """Quantiles and a coarse histogram."""
        cumulated = self.counts.cumsum(0) / max(self.defined, 1)
        quantiles = {
            f"{q:g}": (2 * int(torch.searchsorted(cumulated, q)) + 1) / _BINS - 1 if self.defined else None
            for q in _QUANTILES
        }
        coarse = self.counts.view(_COARSE, -1).sum(1) / max(self.defined, 1)
        return {
            "defined": self.defined,
            "undefined": self.undefined,
            "quantiles": quantiles,
            "histogram": coarse.tolist(),
        }


class _Totals:
    """What is summed over all parameters."""

    def __init__(self, first: ScoreMoments, kind: str) -> None:
        self.kind, self.names = kind, first.reward_names
        self.std = float(first.reward_std(first.reward_names[0]))
        self.tightness, self.permuted = _Histogram(), _Histogram()
        self.evidence: Evidence | None = None
        self.layers: dict[int, list[tuple[int, float, Evidence | None, float]]] = {}
        size = (_DECADES[1] - _DECADES[0]) * _PER_DECADE
        self._counts, self._mass = (
            torch.zeros(size, dtype=torch.float64),
            torch.zeros(size, dtype=torch.float64),
        )
        self.energy = dict.fromkeys(first.reward_names, 0.0)
        self.inside, self.inside_squares = ([0.0] * len(first.reward_names) for _ in range(2))
        self.parameters = self.fisher_zero = self.above_one = self.varying = 0
        self.fisher_sum = self.score_sum_squares = self.second_moment = 0.0
        self._entries: list[tuple[float, int, dict[str, Any]]] = []
        self._rows: list[tuple[float, int, dict[str, Any]]] = []

    @property
    def in_sample_mean(self) -> float | None:
        """Mean of the first reward's in-sample tightness."""
        return self.inside[0] / self.varying if self.varying else None

    def add_inside(self, one: ScoreMoments, inside: list[Tensor]) -> None:
        """Add the in-sample sums of one tensor."""
        (name,) = one.names
        for reward in self.names:
            self.energy[reward] += _square(one.gradient(reward)[name])
        for k in range(len(inside)):
            self.inside[k] += float(inside[k].nansum(dtype=torch.float64))
            self.inside_squares[k] += float(inside[k].square().nansum(dtype=torch.float64))
        self.varying += int((~inside[0].isnan()).sum())
        self.above_one += int((inside[0] > 1).sum())
        self.score_sum_squares += _square(one.scores[name]) / one.weight_sum
        self.second_moment += float(one.squares[name].sum(dtype=torch.float64)) / one.weight_sum

    def estimate(self, reward: int) -> dict[str, Any]:
        """Tightness of one reward over all parameters."""
        if self.evidence is not None:
            return dataclasses.asdict(self.evidence.estimate(reward))
        if self.kind == "none":
            return dict.fromkeys(_ESTIMATE)
        exact = {"energy": self.energy[self.names[reward]], "degrees_of_freedom": 0}
        if self.varying:
            exact |= {"mean": self.inside[reward] / self.varying}
            exact |= {"mean_square": self.inside_squares[reward] / self.varying}
        return dict.fromkeys(_ESTIMATE) | exact

    def layer_summaries(self) -> list[dict[str, Any]]:
        """Tightness by layer."""
        found = []
        for layer, tensors in sorted(self.layers.items()):
            evidence = [e for _, _, e, _ in tensors if e is not None]
            mean = error = null = None
            if evidence:
                total = evidence[0]
                for more in evidence[1:]:
                    total = total + more
                estimate = total.estimate()
                mean, error, null = estimate.mean, estimate.standard_error, total.permuted
            elif self.kind == "exact" and (varying := sum(n for n, *_ in tensors)):
                mean = sum(t for *_, t in tensors) / varying
            found.append(
                {
                    "layer": layer,
                    "tightness_mean": mean,
                    "tightness_error": error,
                    "permuted_mean": null,
                    "fisher_sum": sum(f for _, f, _, _ in tensors),
                }
            )
        return found

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


def _tensor_summary(folds: Folds, name: str, totals: _Totals, row_label: RowLabel) -> dict[str, Any]:
    """Statistics of one parameter tensor; adds to the totals."""
    one = folds.together(name)
    primary = one.reward_names[0]
    gradient, fisher = one.gradient(primary)[name], one.diagonal_fisher()[name]
    fisher_sum = totals.add_fisher(fisher)
    # Of a sample only the first is needed here: `tensor_evidence` sums up the others.
    looked_at = one.reward_names if totals.kind == "exact" else one.reward_names[:1]
    inside = [one.tightness(reward)[name] for reward in looked_at]
    totals.add_inside(one, inside)
    evidence, fitted, energy = _evidence(folds, name, totals, inside)
    mean = error = square = null = size = None
    if evidence is not None:
        estimate = evidence.estimate()
        mean, error, square = estimate.mean, estimate.standard_error, estimate.mean_square
        null, size = evidence.permuted, estimate.effective_size
    elif totals.kind == "exact" and bool((~fitted.isnan()).any()):
        mean, square = float(fitted.nanmean()), float(fitted.square().nanmean())
    layer, matrix = place(name)
    if layer is not None:
        varying = int((~inside[0].isnan()).sum())
        totals.layers.setdefault(layer, []).append(
            (varying, fisher_sum, evidence, float(inside[0].nansum(dtype=torch.float64)))
        )
    _offer_entries(name, totals, fisher, gradient, fitted)
    _offer_rows(name, totals, fisher, gradient, energy, row_label)
    return {
        "name": name,
        "layer": layer,
        "matrix": matrix,
        "shape": list(gradient.shape),
        "parameters": gradient.numel(),
        "fisher_sum": fisher_sum,
        "ceiling_rms": totals.std * math.sqrt(fisher_sum / gradient.numel()),
        "gradient_norm": math.sqrt(_square(gradient)),
        "tightness_mean": mean,
        "tightness_error": error,
        "tightness_mean_square": square,
        "tightness_undefined": int(inside[0].isnan().sum()),
        "permuted_mean": null,
        "effective_size": size,
    }


def _evidence(
    folds: Folds, name: str, totals: _Totals, inside: list[Tensor]
) -> tuple[Evidence | None, Tensor, Tensor | None]:
    """What counts as tightness of one tensor, and the squares of its gradient without the bias of one sample."""
    if totals.kind != "cross-fitted":
        fitted = inside[0] if totals.kind == "exact" else torch.full_like(inside[0], torch.nan)
        totals.tightness.add(fitted)
        energy = folds.together(name).gradient(totals.names[0])[name].double().square()
        return None, fitted, energy if totals.kind == "exact" else None
    first, second = folds.of(name)
    real = sum(not is_permuted(reward) for reward in totals.names)
    evidence, found = tensor_evidence(first, second, real)
    totals.evidence = evidence if totals.evidence is None else totals.evidence + evidence
    totals.tightness.add(found[0])
    for null in found[real:]:
        totals.permuted.add(null)
    return evidence, found[0], cross_fitted_energy(first, second, totals.names[0])[name].double()


def _offer_entries(name: str, totals: _Totals, fisher: Tensor, gradient: Tensor, fitted: Tensor) -> None:
    """Offer the entries of a tensor with the most room, ceiling minus gradient."""
    room = (totals.std * fisher.sqrt() - gradient.abs()).flatten()
    for value, at in zip(*(t.tolist() for t in room.topk(min(_TOP, len(room)))), strict=True):
        index = [int(i) for i in torch.unravel_index(torch.tensor(at), gradient.shape)]
        rho = float(fitted.flatten()[at])
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
    energy: Tensor | None,
    row_label: RowLabel,
) -> None:
    """Offer the rows of a matrix with the most room; a row's ceiling bounds the norm of its gradient."""
    if fisher.dim() < 2:
        return
    squared = totals.std**2 * fisher.flatten(1).sum(1, dtype=torch.float64)
    norm = gradient.flatten(1).square().sum(1, dtype=torch.float64).sqrt()
    share = None if energy is None else energy.flatten(1).sum(1) / squared
    room = squared.sqrt() - norm
    for value, row in zip(*(t.tolist() for t in room.topk(min(_TOP, len(room)))), strict=True):
        used = None if share is None or bool(share[row].isnan()) else float(share[row])
        entry = {
            "name": name,
            "row": row,
            "label": row_label(name, row),
            "ceiling": math.sqrt(float(squared[row])),
            "gradient_norm": float(norm[row]),
            "energy_share": used,
        }
        totals.offer("row", value, entry)


def _square(values: Tensor) -> float:
    """Squared norm."""
    return float(values.double().square().sum())


def write_derived(folds: Folds, folder: Path) -> None:
    """Write gradient, Fisher diagonal and tightness, a file each, keyed by parameter name.

    Parameters
    ----------
    folds
        The moments; the first reward is written.
    folder
        Where to. Each file is whole or absent.

    Notes
    -----
    The JSON in the files' metadata under ``ceilings`` names the quantity, reward, level and count; for tightness
    also the estimate, which is in-sample and no evidence where the responses were too few for two halves.
    """
    kind = estimate_kind(folds)
    for what in ("gradient", "fisher", "tightness"):
        header = {
            "kind": f"ceilings.{what}",
            "reward": None if what == "fisher" else folds.first.reward_names[0],
            "level": folds.first.level,
            "count": folds.count,
        }
        if what == "tightness":
            header["estimate"] = "in-sample" if kind == "none" else kind
        write_tensors(folder / f"{what}.safetensors", derived_tensors(folds, what), header)
