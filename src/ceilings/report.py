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

from ceilings.charts import number, percent

__all__ = ["VERSION", "caveats", "conclusions", "package_versions", "schema", "write_json"]

#: Version of the layout of ``report.json``.
VERSION: Final = 1

# How far mean tightness must exceed its nulls before the words call it a finding. Parameters share the responses, so
# their tightness rises and falls together: if all were one, |ρ̂| would exceed twice its root mean square in one
# sample of 22 by chance.
_SIGNAL: Final = 2.0
_OFF_POLICY: Final = 10.0  # a mean score this far from zero is no accident even if one direction carries all


def schema() -> dict[str, Any]:
    """JSON schema of ``report.json``.

    Returns
    -------
    dict
        The schema; every field has a description.
    """
    text = files("ceilings").joinpath("report_schema.json").read_text(encoding="utf-8")
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
        temporary.write_text(
            json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
        used = row["gradient_norm"] / row["ceiling"] if row["ceiling"] else 0.0
        sentences.append(
            f"The row with the most room is row {row['row']}{called} of {row['name']}: the norm of its gradient "
            f"can reach {number(row['ceiling'])}, and this reward uses {percent(used, 2)} of that."
        )
    return sentences


def _signal(report: Mapping[str, Any]) -> str:
    """What tightness says beside its nulls."""
    tightness, uncertainty = report["tightness"], report["uncertainty"]
    if tightness["mean"] is None:
        return "Tightness is undefined everywhere: neither the reward nor any score varies beyond rounding."
    if uncertainty["kind"] == "exact":
        return (
            f"How much of the ceiling this reward uses: half of the parameters use at most "
            f"{percent(tightness['quantiles']['0.5'], 2)} of theirs, one in a hundred more than "
            f"{percent(tightness['quantiles']['0.99'], 2)}. The expectation is exact, so this is no sampling noise."
        )
    nulls = [uncertainty["noise_floor"]]
    shuffled = uncertainty["shuffled_tightness"]
    if shuffled and shuffled["mean"] is not None:
        nulls.append(shuffled["mean"])
    said = f"{tightness['mean']:.3f} on average; √(2/(πN)) = {nulls[0]:.3f} is what no relation at all would give"
    if len(nulls) > 1:
        said += f", and {nulls[1]:.3f} is what the same rewards gave after shuffling"
    if tightness["mean"] < _SIGNAL * max(nulls):
        return (
            f"How much of the ceiling this reward uses cannot be told from noise here: tightness is {said}. Parameters "
            "share the responses and their tightness rises and falls together, so less than twice the noise says "
            "nothing. Read no single parameter's tightness or gradient as a finding; take more responses."
        )
    return (
        f"This reward uses more of the ceiling than noise would: tightness is {said}. "
        "The excess belongs to the parameters together; single ones still carry the noise."
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
        sentences.append(
            "No estimated gradient exceeds its estimated ceiling. That holds in every sample by arithmetic "
            "(Cauchy–Schwarz with one mean and one divisor) and is no evidence for anything."
        )
        sentences.append(
            f"{sample['responses']} responses to {sample['groups']} prompts: responses to one prompt share what the "
            "prompt does, so the floor √(2/(πN)) is optimistic, and so it is for heavy-tailed scores. The shuffled "
            "rewards are one shuffle, not a test of each parameter."
        )
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
        sentences.append(
            f"{len(slow)} parameter tensors had no fast rule and took one backward pass a response; their values are "
            f"as exact as the others: {', '.join(slow[:4])}{', …' if len(slow) > 4 else ''}."
        )
    return sentences
