"""The report of a comparison: the same numbers for a tensor, a kind of matrix, a layer and the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from ceilings.checkpoint_diff import SHARES, Diff, Group, TensorDiff
from ceilings.checkpoints import Checkpoint
from ceilings.matching import Matching, Source
from ceilings.overlaps import Cut, OverlapCounts, open_overlap
from ceilings.spectrum import DIRECTIONS, Spectrum, random_share, random_stable_rank
from ceilings.tally import Tally

__all__ = ["VERSION", "bins_entry", "describe_overlap", "describe_side", "describe_tuned"]

#: Version of the layout of the report.
VERSION: Final = 1
_RULES: Final = ("equality", "absolute", "relative")
_CURVE: Final = tuple(10 ** (k / 3) for k in range(-18, 1))


def describe_side(checkpoint: Checkpoint | Source, given: str) -> dict[str, Any]:
    """What one side of a comparison is.

    Parameters
    ----------
    checkpoint
        The checkpoint, or an adapter on top of one.
    given
        How the user named it.

    Returns
    -------
    dict
        Its kind, its number formats, and what is tied in it.
    """
    formats: dict[str, dict[str, int]] = {}
    for name in checkpoint.names:
        info = checkpoint.info(name)
        entry = formats.setdefault(info.stored or info.dtype, {"tensors": 0, "parameters": 0})
        entry["tensors"] += 1
        entry["parameters"] += math.prod(info.shape)
    found: Any = checkpoint
    return {
        "path": given,
        "kind": found.kind,
        "files": len(found.files),
        "parameters": sum(entry["parameters"] for entry in formats.values()),
        "formats": formats,
        "quantised": found.quantised,
        "tied": dict(checkpoint.ties),
        "notes": list(found.notes),
    }


def bins_entry(tally: Tally) -> dict[str, Any]:
    """What the bins of a tally say.

    Parameters
    ----------
    tally
        Counts and sums with their bins.

    Returns
    -------
    dict
        Energy shares as intervals, and the share of the changes on the smallest tenth of the weights.
    """
    shares = {f"{share:g}": tally.energy_share(share) for share in SHARES}
    return {
        "energy_share": {key: None if found is None else list(found) for key, found in shares.items()},
        "smallest_decile_share": tally.smallest_decile(),
    }


def describe_tuned(diff: Diff, matching: Matching, base: Source, tuned: Source) -> dict[str, Any]:
    """What one fine-tune did.

    Parameters
    ----------
    diff
        What was counted.
    matching
        Which tensors were compared.
    base, tuned
        The checkpoints.

    Returns
    -------
    dict
        All numbers of the report about it.
    """
    step = diff.total.tally.median_step()
    total = _group(diff.total, step)
    total["energy_share"] = {
        f"{share:g}": [value, value] for share, value in diff.top_energy.items()
    } or total["energy_share"]
    compared: dict[str, int] = {}
    for tensor in diff.tensors:
        compared[tensor.dtypes[2]] = compared.get(tensor.dtypes[2], 0) + tensor.tally.parameters
    return {
        "compared_in": compared,
        "matching": _matching(matching, base, tuned),
        "integers": diff.integers,
        "median_step": step,
        "total": total,
        "kinds": [{"kind": kind} | _group(group, step) for kind, group in diff.kinds.items()],
        "layers": [
            {"layer": layer} | _group(diff.layers[layer], step)
            for layer in sorted(diff.layers, key=lambda n: (n is None, n or 0))
        ],
        "tensors": [
            _tensor(tensor, entry, step) for tensor, entry in zip(diff.tensors, diff.entries, strict=True)
        ],
        "cuts": {f"{share:g}": _cut(cut) for share, cut in diff.cuts.items()},
        "energy_curve": _curve(diff.total.tally),
        "by_magnitude": _by_magnitude(diff.total.tally),
    }


def describe_overlap(names: Sequence[str], counts: OverlapCounts, diffs: Sequence[Diff]) -> dict[str, Any]:
    """What two fine-tunes have in common.

    Parameters
    ----------
    names
        How the user named the two.
    counts
        What was counted.
    diffs
        What was found for each.

    Returns
    -------
    dict
        Overlaps as shares of each set, with what chance gives.
    """
    sizes = [diff.total.tally.equality for diff in diffs]
    both, entries = counts.changed[2], counts.parameters
    cuts = [diff.cuts[0.01] for diff in diffs]
    low, high = open_overlap(counts.sides, *(cut.size - cut.above for cut in cuts))
    smaller = min(cut.size for cut in cuts)
    union = sum(sizes) - both

    def of_first(value: float) -> float | None:
        return value / sizes[0] if sizes[0] else None

    return {
        "of": list(names),
        "parameters": entries,
        "changed": {
            "sizes": sizes,
            "both": both,
            "shares": [both / size if size else None for size in sizes],
            "jaccard": both / union if union else None,
            "chance": [size / entries for size in sizes[::-1]],
            "chance_per_tensor": [counts.changed_by_chance / size if size else None for size in sizes],
        },
        "top_percent": {
            "size": smaller,
            "tied": [cut.tied for cut in cuts],
            "to_choose": [cut.size - cut.above for cut in cuts],
            "share": [low / smaller, high / smaller],
            "chance": max(cut.size for cut in cuts) / entries,
            "chance_per_tensor": counts.top_by_chance / smaller,
        },
    }


def _group(group: Group, step: float | None) -> dict[str, Any]:
    """Numbers of a sum over tensors."""
    spectrum = None
    if group.matrices:
        spectrum = {
            "matrices": group.matrices,
            "stable_rank": group.weighted_rank / group.ranked,
            "random_stable_rank": group.weighted_random_rank / group.ranked,
            "top_energy": {str(k): min(1.0, group.top[k] / group.energy) for k in DIRECTIONS},
            "top_error": {str(k): group.top_error[k] / group.energy for k in DIRECTIONS},
            "random_top_energy": {str(k): group.random_top[k] / group.energy for k in DIRECTIONS},
        }
    return _sums(group.tally, step) | bins_entry(group.tally) | {"spectrum": spectrum}


def _tensor(tensor: TensorDiff, entry: dict[str, Any], step: float | None) -> dict[str, Any]:
    """Numbers of one tensor."""
    head = {
        "name": tensor.pair.name,
        "shape": list(tensor.pair.shape),
        "formats": list(tensor.dtypes),
        "layer": tensor.layer,
        "kind": tensor.kind,
    }
    return (
        head | _sums(tensor.tally, step) | entry | {"spectrum": _spectrum(tensor.spectrum, tensor.pair.shape)}
    )


def _spectrum(found: Spectrum | None, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Numbers of one spectrum."""
    if found is None:
        return None
    rows, columns = shape
    return {
        "exact": found.exact,
        "stable_rank": found.stable_rank,
        "random_stable_rank": random_stable_rank(rows, columns),
        "top_energy": {str(k): min(1.0, found.top[k] / found.energy) for k in DIRECTIONS},
        "top_error": {str(k): found.error[k] / found.energy for k in DIRECTIONS},
        "random_top_energy": {str(k): random_share(rows, columns, k) for k in DIRECTIONS},
    }


def _sums(tally: Tally, step: float | None) -> dict[str, Any]:
    """Numbers that need no bins."""
    unchanged = tally.parameters - tally.equality
    participation = tally.participation()
    return {
        "parameters": tally.parameters,
        "changed": {rule: getattr(tally, rule) for rule in _RULES},
        "changed_share": {rule: getattr(tally, rule) / tally.parameters for rule in _RULES},
        "bits_only": tally.bits_only,
        "non_finite": tally.non_finite,
        "base_norm": math.sqrt(tally.base_square),
        "change_norm": math.sqrt(tally.square),
        "relative_size": tally.relative_size(),
        "participation_ratio": participation,
        "participation_share": None if participation is None else participation / tally.parameters,
        "unchanged": unchanged,
        "could_not_show": 0 if step is None else tally.hidden(step),
    }


def _cut(cut: Cut) -> dict[str, Any]:
    """A cut, and how far ties leave it open."""
    return {
        "size": cut.size,
        "value": cut.value,
        "above": cut.above,
        "tied": cut.tied,
        "to_choose": cut.size - cut.above,
    }


def _curve(tally: Tally) -> dict[str, float]:
    """Concentration of the squared change: middle of the bounds, by share of the entries."""
    found = {f"{share:.3g}": tally.energy_share(share) for share in _CURVE if share * tally.parameters >= 1}
    return {key: sum(bounds) / 2 for key, bounds in found.items() if bounds is not None}


def _by_magnitude(tally: Tally) -> list[dict[str, Any]]:
    """Weights and changes by the power of two below a weight's magnitude."""
    parts = [
        bins.dense().reshape(-1, 128).sum(1)
        for bins in (tally.weights, tally.changed_weights, tally.weight_energy)
    ]
    return [
        {
            "exponent": k - 127 if k else None,
            "weights": int(parts[0][k]),
            "changed": int(parts[1][k]),
            "rms_change": math.sqrt(float(parts[2][k] / parts[1][k])) if parts[1][k] else None,
        }
        for k in parts[0][:-1].nonzero()[0].tolist()
    ]


def _matching(matching: Matching, base: Source, tuned: Source) -> dict[str, Any]:
    """What was compared with what."""
    return {
        "coverage": matching.coverage,
        "tensors": len(matching.pairs),
        "renamed": matching.renamed,
        "added": [{"name": n, "shape": list(tuned.info(n).shape)} for n in matching.added],
        "removed": [{"name": n, "shape": list(base.info(n).shape)} for n in matching.removed],
        "other_shape": [
            {"name": name, "base": list(first), "tuned": list(second)}
            for name, (first, second) in matching.other_shape.items()
        ],
        "rows": [
            {"name": p.name, "common": p.shape[0], "added": p.added_rows, "removed": p.removed_rows}
            for p in matching.pairs
            if p.added_rows or p.removed_rows
        ],
        "notes": list(matching.notes),
    }
