"""``report.html``: the report of a measurement as one page that needs nothing but a browser."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ceilings.charts import concentration_chart, distribution_chart, heat_map, layer_chart
from ceilings.evidence import critical_value
from ceilings.page_parts import bullets, document, short, table, tiles
from ceilings.readable import number, percent, signed, with_error

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
        f'<div class="pair">{_layers(report)}{_distribution(report)}</div>',
        f'<div class="pair">{_concentration(report)}{_rewards(report)}</div>',
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
    if config["next_token"] is not None:
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
        if config["level"] != "sequence":
            whose = {"token": "the sampled tokens", "next-token": "every token that could stand there"}
            done += f" The Fisher information is that of {whose[config['level']]}."
    return (
        f"<header><h1>How far can this reward push <code>{model}</code>?</h1>"
        f'<p class="soft">{done} In every parameter the gradient of the expected reward is at most the ceiling '
        "σ(R)·√F; tightness is the share of the ceiling that this reward uses.</p></header>"
    )


def _tiles(report: Mapping[str, Any]) -> str:
    """Four numbers to begin with."""
    reward, tightness = report["rewards"][0], report["tightness"]
    beside = {
        "exact": "exact, no noise",
        "none": "too few responses",
        "cross-fitted": "one half tries the other",
    }
    shown = [
        (f"{report['model']['parameters']:,}", "parameters, tied ones once"),
        (f"{number(reward['mean'])} ± {number(reward['std'])}", "mean reward ± its standard deviation"),
        (
            percent(report["fisher"]["share_in_top"]["0.01"], 2),
            "of the squared ceiling is in the top 1\u00a0% of parameters",
        ),
        (
            with_error(tightness["mean"], tightness["standard_error"]),
            f"mean tightness ({beside[tightness['estimate']]})",
        ),
    ]
    return tiles(shown)


def _cells(report: Mapping[str, Any], value: str, power: int) -> dict[tuple[str, str], float]:
    """Means of a power by layer and matrix; what is outside the layers is told in words."""
    sums: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], int] = {}
    for tensor in report["tensors"]:
        if tensor["layer"] is None or tensor[value] is None:
            continue
        place = (str(tensor["layer"]), short(tensor["matrix"]))
        weight = tensor["parameters"] - (tensor["tightness_undefined"] if value != "ceiling_rms" else 0)
        sums[place] = sums.get(place, 0.0) + weight * tensor[value] ** power
        counts[place] = counts.get(place, 0) + weight
    return {place: total / counts[place] for place, total in sums.items() if counts[place]}


def _ceiling_map(report: Mapping[str, Any]) -> str:
    """Ceilings by layer and matrix."""
    cells = {place: math.sqrt(square) for place, square in _cells(report, "ceiling_rms", 2).items()}
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
    cells = {place: max(mean, 0.0) for place, mean in _cells(report, "tightness_mean", 1).items()}
    if not cells:
        return ""
    picture = heat_map(cells, "tightness", "Mean tightness by layer and matrix")
    errors = sorted(t["tightness_error"] for t in report["tensors"] if t["tightness_error"] is not None)
    beside = (
        "The expectation is exact."
        if not errors
        else f"Cross-fitted: zero, or below and shown as zero, where there is nothing to see. The standard error of a "
        f"cell is {number(errors[len(errors) // 2], 2)} in the middle: smaller differences mean nothing."
    )
    return (
        "<section><h2>Tightness by layer and matrix</h2>"
        f'<p class="soft small">Mean of |ρ|, the share of the ceiling in use. {beside} '
        f"{_outside(report, 'tightness_mean')}</p>{picture}</section>"
    )


def _outside(report: Mapping[str, Any], value: str) -> str:
    """Values of the tensors outside the layers."""
    found = [t for t in report["tensors"] if t["layer"] is None and t[value] is not None]
    if not found:
        return ""
    return (
        "Outside the layers: "
        + ", ".join(f"{html.escape(short(t['matrix']))} {signed(t[value])}" for t in found[:4])
        + "."
    )


def _layers(report: Mapping[str, Any]) -> str:
    """Tightness by layer against what chance gives."""
    layers = [
        (row["layer"], row["tightness_mean"], row["tightness_error"], row["permuted_mean"])
        for row in report["layers"]
        if row["tightness_mean"] is not None
    ]
    if not layers:
        return ""
    exact = report["tightness"]["estimate"] == "exact"
    reach = critical_value(report["tightness"]["degrees_of_freedom"])
    picture = layer_chart(layers, reach, "Mean tightness by layer, with its error")
    key = [("series", "this reward" if exact else f"this reward, ± {number(reach)} standard errors")]
    if not exact:
        key.append(("null", "permuted rewards"))
    said = (
        "Mean tightness of the parameters of each layer, exact over the vocabulary."
        if exact
        else "Mean cross-fitted tightness of the parameters of each layer. A bar that crosses zero says that chance "
        "would give as much; layers share the responses, so they go up and down together."
    )
    return (
        f'<section><h2>Tightness by layer</h2><p class="soft small">{said}</p>{picture}{_key(key)}</section>'
    )


def _distribution(report: Mapping[str, Any]) -> str:
    """Distribution of tightness."""
    uncertainty, tightness = report["uncertainty"], report["tightness"]
    if not tightness["defined"]:
        return ""
    null = uncertainty["permuted"]
    picture = distribution_chart(
        tightness["histogram"],
        None if null is None else null["histogram"],
        "Distribution of tightness over the parameters",
    )
    key = [("series", "this reward")]
    if null is not None:
        key.append(("null", "the same rewards, permuted"))
    said = (
        "The share of parameters at each tightness, exact over the vocabulary."
        if null is None
        else "The share of parameters at each tightness that one half of the responses suggests and the other half "
        "finds. Noise lies on both sides of zero; what is there lies to the right."
    )
    return (
        f'<section><h2>Tightness against noise</h2><p class="soft small">{said}</p>'
        f"{picture}{_key(key)}</section>"
    )


def _key(entries: Iterable[tuple[str, str]]) -> str:
    """Key of a picture: colour and meaning."""
    shown = "".join(f'<span><i style="background:var(--{name})"></i>{text}</span>' for name, text in entries)
    return f'<div class="key">{shown}</div>'


def _concentration(report: Mapping[str, Any]) -> str:
    """Concentration curve."""
    shares = {float(k): v for k, v in report["fisher"]["share_in_top"].items()}
    picture = concentration_chart(
        shares, "Share of the Fisher information in the top share of the parameters"
    )
    key = _key((("series", "measured"), ("null", "if all were equal")))
    return (
        "<section><h2>Concentration</h2>"
        '<p class="soft small">How much of the Fisher information, the squared ceiling, lies in the parameters with '
        f"most of it.</p>{picture}{key}</section>"
    )


def _rewards(report: Mapping[str, Any]) -> str:
    """The rewards in numbers, one a row."""
    if report["config"]["next_token"] is not None:
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
    cells = []
    for reward in report["rewards"]:
        found = reward["tightness"]
        energy = found["energy"]
        norm = "–" if energy is None else number(math.sqrt(energy)) if energy > 0 else "0"
        name = html.escape(reward["name"])
        cells.append(
            (
                name,
                number(reward["mean"]),
                number(reward["std"]),
                norm,
                with_error(found["mean"], found["standard_error"]),
            )
        )
    null = report["uncertainty"]["permuted_mean"]
    if null is not None:
        cells.append(("the first, permuted", "", "", "", signed(null)))
    many = " Pictures and files are of the first." if len(report["rewards"]) > 1 else ""
    return (
        f"<section><h2>{'The rewards' if many else 'The reward'} in numbers</h2>"
        f'<p class="soft small">Norm of the gradient and mean tightness from one half tried on the other.{many}</p>'
        f"{table(('reward', 'mean', 'σ(R)', 'gradient', 'tightness'), cells)}</section>"
    )


def _rows(report: Mapping[str, Any]) -> str:
    """Rows with the most room."""
    if not report["top_rows"]:
        return ""
    rows = []
    for row in report["top_rows"]:
        label = f" <span class='soft'>“{html.escape(row['label'])}”</span>" if row["label"] else ""
        share = row["energy_share"]
        used = "–" if share is None else percent(math.sqrt(share), 2) if share > 0 else "nothing"
        name = f"{html.escape(row['name'])} [{row['row']}]{label}"
        room = number(row["ceiling"] - row["gradient_norm"])
        rows.append((name, number(row["ceiling"]), used, room))
    return (
        "<section><h2>Neurons with the most room</h2>"
        '<p class="soft small">Rows of matrices; in an embedding, tokens. The norm of a row’s gradient is at most its '
        f"ceiling{_cross_fitted(report)}.</p>{table(('row', 'ceiling', 'in use', 'room'), rows)}</section>"
    )


def _parameters(report: Mapping[str, Any]) -> str:
    """Single parameters with the most room."""
    rows = []
    for entry in report["top_parameters"]:
        place = ", ".join(map(str, entry["index"]))
        rho = "–" if entry["tightness"] is None else signed(entry["tightness"], 2)
        room = number(entry["ceiling"] - abs(entry["gradient"]))
        rows.append((f"{html.escape(entry['name'])} [{place}]", number(entry["ceiling"]), rho, room))
    return (
        "<section><h2>Parameters with the most room</h2>"
        f'<p class="soft small">Room is the ceiling less the size of the gradient{_cross_fitted(report)}'
        f"{' (of a single parameter that is mostly noise)' if _cross_fitted(report) else ''}.</p>"
        f"{table(('parameter', 'ceiling', 'tightness', 'room'), rows)}</section>"
    )


def _cross_fitted(report: Mapping[str, Any]) -> str:
    """What the share in use is, where it is an estimate."""
    cross = report["tightness"]["estimate"] == "cross-fitted"
    return "; what is in use is what one half of the responses suggests and the other finds" if cross else ""


def _every_tensor(report: Mapping[str, Any]) -> str:
    """All tensors, folded away."""
    rows = [
        (
            html.escape(t["name"]),
            "×".join(map(str, t["shape"])),
            number(t["ceiling_rms"]),
            number(t["gradient_norm"]),
            signed(t["tightness_mean"]),
            number(t["tightness_error"], 2),
            signed(t["permuted_mean"]),
        )
        for t in report["tensors"]
    ]
    heads = ("tensor", "shape", "ceiling (rms)", "gradient norm", "tightness", "± error", "permuted")
    return f"<section><details><summary>Every tensor</summary>{table(heads, rows)}</details></section>"


def _provenance(report: Mapping[str, Any]) -> str:
    """What the report was made from."""
    config = ", ".join(
        f"{k} {' and '.join(v) if isinstance(v, list) else v}"
        for k, v in report["config"].items()
        if v is not None and v != [] and v is not False
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
        f"<code>moments{'' if report['uncertainty']['halves'] is None else '-1 and moments-2'}.safetensors</code>.</p>"
        "</section>"
    )
