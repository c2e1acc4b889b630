"""``report.html``: the report of a measurement as one page that needs nothing but a browser."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

from ceilings.charts import concentration_chart, distribution_chart, heat_map, number, percent
from ceilings.page_parts import bullets, document, short, table, tiles

__all__ = ["page"]


def page(report: Mapping[str, Any]) -> str:
    """Report as one HTML page.

    Parameters
    ----------
    report
        What ``report.json`` holds.

    Returns
    -------
    str
        HTML with its style and pictures inside: no script, and no request to anywhere.
    """
    parts = [
        _head(report),
        _tiles(report),
        f"<section><h2>What this says</h2>{bullets(report['conclusions'])}</section>",
        f'<div class="pair">{_ceiling_map(report)}{_tightness_map(report)}</div>',
        f'<div class="pair">{_distribution(report)}{_concentration(report)}</div>',
        _options(report),
        f'<div class="pair">{_rows(report)}{_parameters(report)}</div>',
        f"<section><h2>What this does not say</h2>{bullets(report['caveats'])}</section>",
        _every_tensor(report),
        _provenance(report),
    ]
    return document(f"Reward ceilings of {report['config']['model']}", parts)


def _head(report: Mapping[str, Any]) -> str:
    """Title and one sentence on what was measured."""
    sample, config = report["sample"], report["config"]
    model = html.escape(str(config["model"]))
    if config["level"] == "next-token":
        done = (
            f"Every next token after “{html.escape(config['next_token'])}”, with its probability; the reward is 1 for "
            f"“{html.escape(config['options'][0])}” and 0 for all else."
        )
    else:
        came = {"sampled": "sampled here at temperature 1", "rollouts": "read from a file"}[sample["source"]]
        done = (
            f"{sample['responses']:,} responses to {sample['groups']:,} prompts "
            f"({sample['response_tokens']:,} tokens), {came}."
        )
    return (
        f"<header><h1>How far can this reward push <code>{model}</code>?</h1>"
        f'<p class="soft">{done} In every parameter the gradient of the expected reward is at most the ceiling '
        "σ(R)·√F; tightness is the share of the ceiling that this reward uses.</p></header>"
    )


def _tiles(report: Mapping[str, Any]) -> str:
    """Four numbers to begin with."""
    reward, tightness = report["rewards"][0], report["tightness"]
    floor = report["uncertainty"]["noise_floor"]
    beside = "exact, no noise" if floor is None else f"noise alone: {number(floor)}"
    shown = [
        (f"{report['model']['parameters']:,}", "parameters, tied ones once"),
        (f"{number(reward['mean'])} ± {number(reward['std'])}", "mean reward ± its standard deviation"),
        (
            percent(report["fisher"]["share_in_top"]["0.01"], 2),
            "of the squared ceiling is in the top 1\u00a0% of parameters",
        ),
        (number(tightness["mean"]), f"mean tightness ({beside})"),
    ]
    return tiles(shown)


def _cells(report: Mapping[str, Any], value: str) -> dict[tuple[str, str], float]:
    """Root mean squares by layer and matrix; what is outside the layers has a row of its own."""
    squares: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], int] = {}
    # Columns in the order of the model, the layers before what surrounds them.
    for tensor in sorted(report["tensors"], key=lambda t: t["layer"] is None):
        if tensor["layer"] is None or tensor[value] is None:
            continue
        place = (str(tensor["layer"]), short(tensor["matrix"]))
        weight = tensor["parameters"] - (tensor["tightness_undefined"] if value != "ceiling_rms" else 0)
        squares[place] = squares.get(place, 0.0) + weight * tensor[value] ** 2
        counts[place] = counts.get(place, 0) + weight
    return {place: math.sqrt(total / counts[place]) for place, total in squares.items() if counts[place]}


def _ceiling_map(report: Mapping[str, Any]) -> str:
    """Ceilings by layer and matrix."""
    cells = _cells(report, "ceiling_rms")
    if not cells:
        return ""
    picture = heat_map(
        cells, "ceiling, logarithmic", "Root mean square ceiling by layer and matrix", logarithmic=True
    )
    return (
        "<section><h2>Ceiling by layer and matrix</h2>"
        '<p class="soft small">Root mean square of σ(R)·√F over the entries of each matrix. Darker on white, brighter '
        f"on black: this reward could push harder here. {_outside(report, 'ceiling_rms')}</p>{picture}</section>"
    )


def _tightness_map(report: Mapping[str, Any]) -> str:
    """Tightness by layer and matrix."""
    cells = _cells(report, "tightness_rms")
    if not cells:
        return ""
    picture = heat_map(cells, "tightness", "Root mean square tightness by layer and matrix")
    floor = report["uncertainty"]["noise_floor"]
    effective = report["uncertainty"]["effective_size"]
    beside = (
        "The expectation is exact."
        if floor is None
        else f"Noise alone gives about {number(1 / math.sqrt(effective))} everywhere: such differences mean nothing."
    )
    return (
        "<section><h2>Tightness by layer and matrix</h2>"
        f'<p class="soft small">Root mean square of |ρ|, the share of the ceiling in use. {beside} '
        f"{_outside(report, 'tightness_rms')}</p>{picture}</section>"
    )


def _outside(report: Mapping[str, Any], value: str) -> str:
    """Values of the tensors outside the layers."""
    found = [t for t in report["tensors"] if t["layer"] is None and t[value] is not None]
    if not found:
        return ""
    return (
        "Outside the layers: "
        + ", ".join(f"{html.escape(short(t['matrix']))} {number(t[value])}" for t in found[:4])
        + "."
    )


def _distribution(report: Mapping[str, Any]) -> str:
    """Distribution of tightness."""
    uncertainty, tightness = report["uncertainty"], report["tightness"]
    if not tightness["defined"]:
        return ""
    null, floor = uncertainty["shuffled_tightness"], uncertainty["noise_floor"]
    picture = distribution_chart(
        tightness["histogram"],
        None if null is None else null["histogram"],
        floor,
        "Distribution of tightness over the parameters",
    )
    key = [("series", "this reward")]
    if null is not None:
        key.append(("null", "the same rewards, shuffled"))
    if floor is not None:
        key.append(("floor", f"mean of noise, √(2/(πN)) = {number(floor)}"))
    entries = "".join(f'<span><i style="background:var(--{name})"></i>{text}</span>' for name, text in key)
    said = (
        "The share of parameters at each tightness, exact over the vocabulary."
        if floor is None
        else "The share of parameters at each tightness. Only what exceeds the shuffled rewards can be signal."
    )
    return (
        f'<section><h2>Tightness against noise</h2><p class="soft small">{said}</p>'
        f'{picture}<div class="key">{entries}</div></section>'
    )


def _concentration(report: Mapping[str, Any]) -> str:
    """Concentration curve."""
    shares = {float(k): v for k, v in report["fisher"]["share_in_top"].items()}
    picture = concentration_chart(
        shares, "Share of the Fisher information in the top share of the parameters"
    )
    key = '<span><i style="background:var(--series)"></i>measured</span>'
    key += '<span><i style="background:var(--null)"></i>if all were equal</span>'
    return (
        "<section><h2>Concentration</h2>"
        '<p class="soft small">How much of the Fisher information, the squared ceiling, lies in the parameters with '
        f'most of it.</p>{picture}<div class="key">{key}</div></section>'
    )


def _options(report: Mapping[str, Any]) -> str:
    """Comparison of the options of a next-token measurement."""
    if report["config"]["level"] != "next-token":
        return ""
    rows = [
        (html.escape(r["name"]), number(r["mean"]), number(r["std"]), number(r["gradient_norm"]))
        for r in report["rewards"]
    ]
    shown = table(("option", "probability", "σ(R)", "norm of the gradient"), rows)
    return (
        "<section><h2>The options compared</h2>"
        '<p class="soft small">Each option is a reward of 1 for its token and 0 for all others. Pictures and '
        f"files are of the first.</p>{shown}</section>"
    )


def _rows(report: Mapping[str, Any]) -> str:
    """Rows with the most room."""
    if not report["top_rows"]:
        return ""
    rows = []
    for row in report["top_rows"]:
        label = f" <span class='soft'>“{html.escape(row['label'])}”</span>" if row["label"] else ""
        used = row["gradient_norm"] / row["ceiling"] if row["ceiling"] else 0.0
        name = f"{html.escape(row['name'])} [{row['row']}]{label}"
        room = number(row["ceiling"] - row["gradient_norm"])
        rows.append((name, number(row["ceiling"]), percent(used, 2), room))
    return (
        "<section><h2>Neurons with the most room</h2>"
        '<p class="soft small">Rows of matrices; in an embedding, tokens. The norm of a row’s gradient is at most its '
        f"ceiling.</p>{table(('row', 'ceiling', 'in use', 'room'), rows)}</section>"
    )


def _parameters(report: Mapping[str, Any]) -> str:
    """Single parameters with the most room."""
    rows = []
    for entry in report["top_parameters"]:
        place = ", ".join(map(str, entry["index"]))
        rho = "–" if entry["tightness"] is None else percent(entry["tightness"], 2)
        room = number(entry["ceiling"] - abs(entry["gradient"]))
        rows.append((f"{html.escape(entry['name'])} [{place}]", number(entry["ceiling"]), rho, room))
    return (
        "<section><h2>Parameters with the most room</h2>"
        '<p class="soft small">Room is the ceiling less the size of the gradient.</p>'
        f"{table(('parameter', 'ceiling', 'in use', 'room'), rows)}</section>"
    )


def _every_tensor(report: Mapping[str, Any]) -> str:
    """All tensors, folded away."""
    rows = [
        (
            html.escape(t["name"]),
            "×".join(map(str, t["shape"])),
            number(t["ceiling_rms"]),
            number(t["gradient_norm"]),
            number(t["tightness_mean"]),
            number(t["shuffled_tightness_mean"]),
        )
        for t in report["tensors"]
    ]
    heads = ("tensor", "shape", "ceiling (rms)", "gradient norm", "tightness (mean)", "shuffled")
    return f"<section><details><summary>Every tensor</summary>{table(heads, rows)}</details></section>"


def _provenance(report: Mapping[str, Any]) -> str:
    """What the report was made from."""
    config = ", ".join(
        f"{k} {v}" for k, v in report["config"].items() if v is not None and v != [] and v is not False
    )
    made = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    model = report["model"]
    tied = "".join(f" {a} is also {', '.join(b)}." for a, b in model["tied"].items())
    return (
        '<section class="small"><h2>How it was made</h2>'
        f"<p>{html.escape(model['class'])}, {model['tensors']} tensors, vocabulary {model['vocabulary']:,}, weights in "
        f"{html.escape(report['dtype'])} on {html.escape(report['device'])}; Fisher information "
        f"{html.escape(report['fisher']['kind'])}; {report['wall_seconds']:g} seconds.{html.escape(tied)}</p>"
        f'<p class="soft">{html.escape(config)}</p><p class="soft">{html.escape(made)}</p>'
        '<p class="soft">All numbers: <code>report.json</code>. Tensors: <code>gradient.safetensors</code>, '
        "<code>fisher.safetensors</code>, <code>tightness.safetensors</code>; sums to merge with other runs: "
        "<code>moments.safetensors</code>.</p></section>"
    )
