"""The report of a measurement: provenance, statistics, and what they do and do not say, in plain words."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from ceilings.evidence import critical_value
from ceilings.readable import number, percent, signed, with_error

__all__ = ["VERSION", "caveats", "conclusions", "package_versions", "schema", "write_json"]

#: Version of the layout of ``report.json``.
VERSION: Final = 2

_TABLE: Final = 8  # a longer list of objects is written a line each
_OFF_POLICY: Final = 10.0  # a mean score this far from zero is no accident even if one direction carries all


def schema(name: str = "report") -> dict[str, Any]:
    """JSON schema of a file that a command writes.

    Parameters
    ----------
    name
        ``"report"``, of ``report.json``; ``"diff"``, of what ``ceilings diff --json`` writes.

    Returns
    -------
    dict
        The schema; every field has a description.
    """
    text = files("ceilings").joinpath(f"{name}_schema.json").read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute.

    Returns
    -------
    dict
        Version by name; a package that is not installed is left out.
    """
    found = {"python": platform.python_version()}
    for package in ("ceilings", "torch", "transformers", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all.

    Parameters
    ----------
    path
        Where to.
    values
        What; NaN and infinity are refused.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(_json(values) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _json(values: Any, indent: str = "") -> str:
    """JSON with a line for whatever holds no other object or list of objects, and for each row of a table."""
    if not _deep(values):
        return _flat(values)
    deeper = indent + " "
    if isinstance(values, Mapping):
        rows = [f"{_flat(key)}: {_json(child, deeper)}" for key, child in values.items()]
        ends = "{}"
    else:
        # A long list is a table: a line each.
        rows = [_flat(child) if len(values) > _TABLE else _json(child, deeper) for child in values]
        ends = "[]"
    inner = f",\n{indent} ".join(rows)
    return f"{ends[0]}\n{indent} {inner}\n{indent}{ends[1]}"


def _deep(values: Any) -> bool:
    """Whether an object holds objects or lists, or a list holds objects."""
    if isinstance(values, Mapping):
        return any(isinstance(child, Mapping | list | tuple) for child in values.values())
    return isinstance(values, list | tuple) and any(isinstance(child, Mapping) for child in values)


def _flat(values: Any) -> str:
    """JSON on one line."""
    # NOTE with an indent Python's own encoder works, which takes forty times as long as that in C.
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def conclusions(report: Mapping[str, Any]) -> list[str]:
    """What the numbers say, a sentence or two each.

    Parameters
    ----------
    report
        The report without its words.

    Returns
    -------
    list
        Sentences in the order of importance.
    """
    top = report["fisher"]["share_in_top"]["0.01"]
    sentences = [
        f"Where a reward can push: the top 1\u00a0% of the parameters carry {percent(top, 2)} of the Fisher "
        "information, and with it of the squared ceiling. In these coordinates a reward can move them far more than "
        "the rest.",
        _signal(report),
    ]
    layers = [t for t in report["tensors"] if t["layer"] is not None]
    if layers:
        most, least = (f(layers, key=lambda t: t["ceiling_rms"]) for f in (max, min))
        ratio = most["ceiling_rms"] / least["ceiling_rms"] if least["ceiling_rms"] else None
        spread = f", {number(ratio)} times those of {least['name']}" if ratio else ""
        sentences.append(
            f"By tensor: the highest ceilings in the layers are in {most['name']} (root mean square "
            f"{number(most['ceiling_rms'])}){spread}."
        )
    if report["top_rows"]:
        row = report["top_rows"][0]
        called = f" ({row['label']!r})" if row["label"] else ""
        sentences.append(
            f"The row with the most room is row {row['row']}{called} of {row['name']}: the norm of its gradient "
            f"can reach {number(row['ceiling'])}{_in_use(row['energy_share'], report['tightness'])}."
        )
    for reward in report["rewards"][1:] if report["tightness"]["estimate"] == "cross-fitted" else ():
        sentences.append(f"The reward {reward['name']}: {_verdict(reward['tightness'])}.")
    return sentences


def _signal(report: Mapping[str, Any]) -> str:
    """What tightness says beside what chance gives."""
    tightness, uncertainty = report["tightness"], report["uncertainty"]
    if tightness["estimate"] == "none":
        return (
            f"How much of the ceiling this reward uses cannot be said from {report['sample']['responses']} responses: "
            "what one half suggests must be tried on the other, and that takes at least four."
        )
    if tightness["mean"] is None:
        return "Tightness is undefined everywhere: neither the reward nor any score varies beyond rounding."
    if tightness["estimate"] == "exact":
        return (
            f"How much of the ceiling this reward uses: half of the parameters use at most "
            f"{percent(tightness['quantiles']['0.5'], 2)} of theirs, one in a hundred more than "
            f"{percent(tightness['quantiles']['0.99'], 2)}. The expectation is exact, so this is no sampling noise."
        )
    size = uncertainty["effective_size"]
    count = report["sample"]["responses"]
    worth = (
        ""
        if size is None
        else f" The sample is worth about {number(min(size, count))} independent responses."
    )
    null = signed(uncertainty["permuted_mean"], 2)
    return (
        f"How much of the ceiling this reward uses: {_verdict(tightness)}. One half of the responses tried what the "
        f"other suggested; rewards dealt out anew gave {null} in the same way.{worth}"
    )


def _in_use(share: float | None, tightness: Mapping[str, Any]) -> str:
    """What a reward uses of the ceiling of one row; a single row is no better known than all of them."""
    if share is None:
        return ""
    if tightness["estimate"] == "cross-fitted" and (share <= 0 or not _exceeds_chance(tightness)):
        return ", of which this sample shows no use beyond noise"
    return f", and this reward uses {percent(share**0.5, 2)} of that"


def _exceeds_chance(tightness: Mapping[str, Any]) -> bool:
    """Whether a cross-fitted mean lies above what chance gives in 39 samples of 40."""
    mean, error = tightness["mean"], tightness["standard_error"]
    if mean is None or error is None:
        return False
    return bool(mean > critical_value(tightness["degrees_of_freedom"]) * error)


def _verdict(tightness: Mapping[str, Any]) -> str:
    """Whether a cross-fitted mean is more than chance."""
    mean, error = tightness["mean"], tightness["standard_error"]
    if mean is None or error is None:
        return "undefined, the reward does not vary"
    said = f"mean tightness {with_error(mean, error, ', standard error ')}"
    if _exceeds_chance(tightness):
        return (
            f"{said}, which is more than chance gives in 39 samples of 40. That belongs to the parameters "
            "together; single ones still carry the noise"
        )
    return (
        f"{said}, which cannot be told from noise. Read no single parameter's tightness or gradient as a finding; "
        "take more responses"
    )


def caveats(report: Mapping[str, Any]) -> list[str]:
    """What the numbers do not say.

    Parameters
    ----------
    report
        The report without its words.

    Returns
    -------
    list
        Sentences.
    """
    sample, uncertainty = report["sample"], report["uncertainty"]
    sentences = []
    if uncertainty["kind"] == "sampled":
        sentences.append(_on_the_bound(report))
        sentences.append(_on_halves(report))
        ratio = uncertainty["mean_score_ratio"]
        if ratio is not None and ratio > _OFF_POLICY:
            sentences.append(
                f"The mean score is far from zero (N‖mean‖²/E‖s‖² = {ratio:.3g}; 1 is expected): these responses do "
                "not look like samples of this model at temperature 1. The Fisher information is then the empirical "
                "one, and ceiling and gradient are those of the law that made the responses."
            )
        elif sample["source"] == "rollouts":
            said = "" if ratio is None else f" (N‖mean score‖²/E‖s‖² = {ratio:.3g}; 1 is expected)"
            sentences.append(
                "The ceiling is about this model only if it drew the responses itself, at temperature 1 with nothing "
                f"cut off{said}; the file cannot prove that."
            )
        if sample["from_text"]:
            sentences.append(
                "Responses were given as text and encoded again, which need not give back the tokens that were "
                "sampled; log token ids to be sure."
            )
        if report["config"]["centre_by_group"]:
            sentences.append(
                "Rewards were centred by group; the mean includes the response itself, which shrinks gradients by "
                "(G − 1)/G for groups of G."
            )
    else:
        sentences.append(
            "The response is one token after one prompt; longer responses and other prompts have other ceilings."
        )
    sentences.append(
        "A small ceiling is not a zero: small is not sparse. Ceilings belong to these coordinates, and an optimiser "
        "such as Adam divides by about as much, so they do not predict by themselves which stored weights change."
    )
    slow = report["model"]["slow_parameters"]
    if slow:
        model = report["model"]
        sentences.append(
            f"{len(slow)} parameter tensors had no fast rule and took one backward pass a response, "
            f"{number(model['slow_seconds'])} seconds or {percent(model['slow_share'], 2)} of the measuring; their "
            f"values are as exact as the others: {', '.join(slow[:4])}{', …' if len(slow) > 4 else ''}."
        )
    return sentences


def _on_the_bound(report: Mapping[str, Any]) -> str:
    """Why the bound is not tested here."""
    if report["config"]["level"] == "sequence":
        return (
            "No estimated gradient exceeds its estimated ceiling. That holds in every sample by arithmetic "
            "(Cauchy–Schwarz with one mean and one divisor) and is no evidence for anything."
        )
    above, count = report["uncertainty"]["above_one"], report["model"]["parameters"]
    return (
        "The ceiling comes from the scores of tokens and the gradient from those of whole responses: only their "
        f"expectations obey the bound, and in this sample {above:,} of {count:,} estimated gradients exceed it. "
        "Neither that number nor a smaller one is evidence."
    )


def _on_halves(report: Mapping[str, Any]) -> str:
    """What the error of tightness stands for."""
    sample, uncertainty = report["sample"], report["uncertainty"]
    of = f"{sample['responses']} responses to {sample['groups']} prompts"
    if uncertainty["halves"] is None:
        return f"{of} are too few for two halves, so no tightness is reported."
    kept = {
        "groups": "Prompts went whole to one half, so the error covers other responses and other prompts",
        "responses": "Responses were dealt out one by one, so the error covers other responses to these prompts only",
    }[uncertainty["halves"]]
    inside, floors = (
        uncertainty["in_sample_mean"],
        [uncertainty["noise_floor"], uncertainty["permutation_floor"]],
    )
    without = "" if floors[1] is None else f", and the permuted rewards give {number(floors[1])}"
    return (
        f"{of}, split at random. {kept}; it comes from few draws itself. Without the split the mean |ρ̂| would read "
        f"{number(inside)}, of which √(2/(πN)) = {number(floors[0])} is what no relation at all gives{without}: it is "
        "reported for comparison and is no evidence."
    )
