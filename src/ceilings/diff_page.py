"""The report of a comparison as one page that needs nothing but a browser."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, Final

from ceilings.charts import concentration_chart, heat_map, magnitude_chart
from ceilings.page_parts import bullets, document, short, table, tiles
from ceilings.readable import number, percent

__all__ = ["page"]

_WIDE: Final = 20.0  # a heat map whose values span a larger factor is logarithmic
_HEADS: Final = (
    "parameters",
    "changed",
    "> 1e-5",
    "> 1e-3 rel.",
    "‖τ‖/‖θ‖",
    "‖τ‖² in top 1\u00a0%",
    "on smallest 10\u00a0%",
    "stable rank",
    "‖τ‖² in 8 directions",
)


def page(report: Mapping[str, Any]) -> str:
    """Report as one HTML page.

    Parameters
    ----------
    report
        The report.

    Returns
    -------
    str
        HTML with its style and pictures inside: no script, and no request to anywhere.
    """
    parts = [_head(report)]
    for tuned in report["tuned"]:
        if len(report["tuned"]) > 1:
            parts.append(f"<header><h1><code>{html.escape(tuned['path'])}</code></h1></header>")
        parts += [
            _tiles(tuned),
            f"<section><h2>Small? Sparse? Low-rank?</h2>{bullets(tuned['verdict'])}</section>",
            f'<div class="pair">{_map(tuned)}{_kinds(tuned)}</div>',
            f'<div class="pair">{_curve(tuned)}{_magnitudes(tuned)}</div>',
            f"<section><h2>Before you use these numbers</h2>{bullets(tuned['caveats'])}</section>",
            _unmatched(tuned),
            _layers(tuned),
            _every_tensor(tuned),
        ]
    return document(
        f"What changed from {report['base']['path']}", [*parts, _overlaps(report), _provenance(report)]
    )


def _head(report: Mapping[str, Any]) -> str:
    """Title, and what was compared."""
    base = html.escape(report["base"]["path"])
    tuned = ", ".join(f"<code>{html.escape(t['path'])}</code>" for t in report["tuned"])
    return (
        f"<header><h1>What changed from <code>{base}</code>?</h1>"
        f'<p class="soft">Compared with {tuned}. <em>Small</em> is a norm, <em>sparse</em> counts entries in a number '
        "format, <em>low-rank</em> looks at singular values: no one of them implies another.</p></header>"
    )


def _tiles(tuned: Mapping[str, Any]) -> str:
    """Four numbers to begin with."""
    total, spectrum = tuned["total"], tuned["total"]["spectrum"]
    energy = total["energy_share"]["0.01"]
    size = total["relative_size"]
    return tiles(
        [
            (_share(size), "size of the change, ‖τ‖/‖θ‖"),
            (
                _share(total["changed_share"]["equality"]),
                f"of the numbers changed in {html.escape(' and '.join(tuned['compared_in']))}",
            ),
            (_middle(energy), "of the squared change in the top 1\u00a0% of the entries"),
            (
                _share(spectrum["top_energy"]["8"]) if spectrum else "–",
                "of the squared change in 8 directions a matrix",
            ),
        ]
    )


def _map(tuned: Mapping[str, Any]) -> str:
    """Changed share by layer and matrix."""
    sums: dict[tuple[str, str], list[int]] = {}
    for tensor in sorted(tuned["tensors"], key=lambda t: t["layer"] or 0):
        if tensor["layer"] is not None:
            cell = sums.setdefault((str(tensor["layer"]), short(tensor["kind"])), [0, 0])
            cell[0] += tensor["changed"]["equality"]
            cell[1] += tensor["parameters"]
    cells = {where: changed / count for where, (changed, count) in sums.items()}
    if not cells:
        return ""
    shown = [value for value in cells.values() if value > 0]
    wide = bool(shown) and max(shown) > _WIDE * min(shown)
    picture = heat_map(cells, "changed share", "Changed share by layer and matrix", logarithmic=wide)
    scale = "logarithmic scale, none changed where a cell is empty" if wide else "1 means every number"
    outside = ", ".join(
        f"{html.escape(short(t['kind']))} {_share(t['changed_share']['equality'])}"
        for t in tuned["tensors"]
        if t["layer"] is None
    )
    return (
        "<section><h2>Changed share by layer and matrix</h2>"
        f'<p class="soft small">Share of the numbers that are not equal; {scale}. '
        f"{'Outside the layers: ' + outside + '.' if outside else ''}</p>{picture}</section>"
    )


def _kinds(tuned: Mapping[str, Any]) -> str:
    """Numbers by kind of matrix."""
    rows = [
        (
            html.escape(short(entry["kind"])),
            _share(entry["changed_share"]["equality"]),
            _share(entry["relative_size"]),
            _middle(entry["energy_share"]["0.01"]),
        )
        for entry in tuned["kinds"]
    ]
    heads = ("kind of matrix", "changed", "‖τ‖/‖θ‖", "‖τ‖² in top 1\u00a0%")
    return f"<section><h2>By kind of matrix</h2>{table(heads, rows)}</section>"


def _curve(tuned: Mapping[str, Any]) -> str:
    """How concentrated the squared change is."""
    if not tuned["energy_curve"]:
        return ""
    shares = {float(key): value for key, value in tuned["energy_curve"].items()}
    picture = concentration_chart(shares, "Share of the squared change in the entries that changed most")
    key = '<span><i style="background:var(--series)"></i>measured</span>'
    key += '<span><i style="background:var(--null)"></i>if all had changed alike</span>'
    cut = tuned["cuts"]["0.01"]
    ties = (
        f" The top 1\u00a0% is left open by ties: {cut['tied']:,} entries changed by just {number(cut['value'])}, and "
        f"{cut['to_choose']:,} of them belong."
        if cut["to_choose"] < cut["tied"]
        else ""
    )
    return (
        "<section><h2>Concentration of the change</h2>"
        f'<p class="soft small">Share of ‖τ‖² in the entries that changed most.{ties}</p>{picture}'
        f'<div class="key">{key}</div></section>'
    )


def _magnitudes(tuned: Mapping[str, Any]) -> str:
    """Which weights changed, by their magnitude."""
    total = tuned["total"]
    # Magnitudes of next to no weights are left out.
    found = [
        (row["exponent"], row["changed"] / row["weights"], row["weights"] / total["parameters"])
        for row in tuned["by_magnitude"]
        if row["exponent"] is not None and row["weights"] > 1e-6 * total["parameters"]
    ]
    if not found:
        return ""
    key = '<span><i style="background:var(--series)"></i>changed, of the weights of this magnitude</span>'
    key += '<span><i style="background:var(--null)"></i>weights of this magnitude, of all</span>'
    smallest = total["smallest_decile_share"]
    said = (
        f"{_share(smallest)} of the changes fall on the tenth of the weights of smallest magnitude, where chance gives "
        f"10\u00a0%. {_share(total['could_not_show'] / total['unchanged']) if total['unchanged'] else 'None'} of the "
        f"unchanged weights could not have shown a step of the median size seen, {number(tuned['median_step'], 2)}."
        if tuned["median_step"] is not None
        else "No weight changed by a finite size."
    )
    picture = magnitude_chart(found, "Share of the weights that changed, by their magnitude")
    return (
        f'<section><h2>Which weights changed</h2><p class="soft small">{said}</p>{picture}'
        f'<div class="key">{key}</div></section>'
    )


def _unmatched(tuned: Mapping[str, Any]) -> str:
    """What was not compared."""
    matching = tuned["matching"]
    said = [f"{e['name']}, {_shape(e['shape'])}: only in TUNED" for e in matching["added"]]
    said += [f"{e['name']}, {_shape(e['shape'])}: only in BASE" for e in matching["removed"]]
    said += [
        f"{e['name']}: {_shape(e['base'])} in BASE, {_shape(e['tuned'])} in TUNED, not compared"
        for e in matching["other_shape"]
    ]
    said += [
        f"{e['name']}: {e['common']:,} rows compared, {e['added']:,} added, {e['removed']:,} removed"
        for e in matching["rows"]
    ]
    return f"<section><h2>Not compared</h2>{bullets(said)}</section>" if said else ""


def _layers(tuned: Mapping[str, Any]) -> str:
    """All layers, folded away."""
    rows = [
        ("outside" if entry["layer"] is None else str(entry["layer"]), *_numbers(entry))
        for entry in tuned["layers"]
    ]
    rows.append(("all", *_numbers(tuned["total"])))
    return f"<section><details><summary>Every layer</summary>{table(('layer', *_HEADS), rows)}</details></section>"


def _every_tensor(tuned: Mapping[str, Any]) -> str:
    """All tensors, folded away."""
    rows = [(html.escape(entry["name"]), *_numbers(entry)) for entry in tuned["tensors"]]
    return f"<section><details><summary>Every tensor</summary>{table(('tensor', *_HEADS), rows)}</details></section>"


def _numbers(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The numbers of a table's row."""
    shares, spectrum = entry["changed_share"], entry["spectrum"]
    return (
        f"{entry['parameters']:,}",
        _share(shares["equality"]),
        _share(shares["absolute"]),
        _share(shares["relative"]),
        _share(entry["relative_size"]),
        _middle(entry["energy_share"]["0.01"]),
        _share(entry["smallest_decile_share"]),
        number(spectrum["stable_rank"]) if spectrum else "–",
        _share(spectrum["top_energy"]["8"]) if spectrum else "–",
    )


def _overlaps(report: Mapping[str, Any]) -> str:
    """What several fine-tunes have in common."""
    if not report["overlaps"]:
        return ""
    rows = []
    for entry in report["overlaps"]:
        pair = " and ".join(html.escape(name) for name in entry["of"])
        sets, top = entry["changed"], entry["top_percent"]
        rows.append(
            (f"{pair}: changed", *(_both(sets[k]) for k in ("shares", "chance", "chance_per_tensor")))
        )
        low, high = top["share"]
        shown = _share(low) if low == high else f"{_share(low)} to {_share(high)}"
        rows.append((f"{pair}: top 1\u00a0%", shown, _share(top["chance"]), _share(top["chance_per_tensor"])))
    heads = ("sets", "overlap", "by chance", "by chance, each tensor’s counts kept")
    return (
        "<section><h2>Overlaps</h2>"
        '<p class="soft small">Of the first set and of the second. An interval is what ties leave open: each end is '
        f"attained by some way of breaking them.</p>{table(heads, rows)}</section>"
    )


def _provenance(report: Mapping[str, Any]) -> str:
    """What the report was made from."""
    said = []
    for word, side in (("BASE", report["base"]), *(("TUNED", tuned) for tuned in report["tuned"])):
        formats = ", ".join(
            f"{code} {e['parameters']:,} in {e['tensors']}" for code, e in side["formats"].items()
        )
        tied = "".join(f"; {other} is {kept}" for other, kept in side["tied"].items())
        quantised = f"; quantised: {side['quantised']}" if side["quantised"] else ""
        said.append(f"{word} {side['path']}: {side['kind']}; {formats}{quantised}{tied}")
    made = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    return (
        f'<section class="small"><h2>How it was made</h2>{bullets(said)}'
        f'<p class="soft">{report["wall_seconds"]:.1f} seconds. {html.escape(made)}</p></section>'
    )


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value, 3)


def _middle(bounds: list[float] | None) -> str:
    return "–" if bounds is None else percent(sum(bounds) / 2, 3)


def _both(shares: list[float | None]) -> str:
    return ", ".join(_share(share) for share in shares)


def _shape(shape: list[int]) -> str:
    return "×".join(map(str, shape)) or "one number"
