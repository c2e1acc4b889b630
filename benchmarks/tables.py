"""The tables of the README, from score_moments.json and checkpoint_diff.json: python benchmarks/tables.py [--check]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cost_table import MEMORIES, RESERVE, bytes_per_parameter, largest_model
from diff_table import with_table
from methods import METHODS

__all__ = ["README", "RESULT", "render", "with_tables"]

RESULT = Path(__file__).parent / "score_moments.json"
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- benchmark: make benchmark -->", "<!-- end of benchmark -->"
MODEL_LABELS = {"toy": "random Llama", "smollm2": "SmolLM2-135M"}
CHUNK_SEPARATOR = "/"


def main(arguments: list[str]) -> int:
    """Write the tables into the README, or say whether they are those of the record."""
    text = README.read_text(encoding="utf-8")
    wanted = with_table(with_tables(text, json.loads(RESULT.read_text(encoding="utf-8"))))
    if arguments == ["--check"]:
        if text != wanted:
            print("the tables of the README are not those of the record: python benchmarks/tables.py")
        return int(text != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


def with_tables(text: str, result: dict[str, Any]) -> str:
    """A text with fresh tables between its two markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{render(result)}\n\n{END}{rest.split(END)[1]}"


def render(result: dict[str, Any]) -> str:
    """All tables with what was measured where."""
    parts = [_times(result), _remarks(result)]
    if "enumeration" in result:
        parts.append(_enumeration(result["enumeration"]))
    if "growth" in result:
        parts += [_growth(result["growth"]), _sizes(result)]
    return "\n\n".join((*parts, _setting(result["setting"])))


def _times(result: dict[str, Any]) -> str:
    """Time of each method on each model, memory, and whether it is right."""
    models = result["models"]
    has_memory = any("memory" in model for model in models.values())
    head = ["Score moments by", *(_model(name, model) for name, model in models.items())]
    head += ["Peak memory"] * has_memory + ["Answer"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, answer in result["answers"].items():
        cells = [METHODS[name].label, *(_ratio(model, name, answer["state"]) for model in models.values())]
        cells += [_memory(models, name)] * has_memory + [_answer(answer)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _model(name: str, model: dict[str, Any]) -> str:
    """Head of a column."""
    size = f"{model['parameters'] / 1e6:.3g}M"
    return f"{MODEL_LABELS[name]}, {size}, {model['sequences']} × {model['tokens']} tokens"


def _ratio(model: dict[str, Any], name: str, state: str) -> str:
    """Median of the ratios to the floor, with the smallest and the largest; or why there is none."""
    if name not in model["ratios"]:
        return state if state == "not installed" else "refuses"
    found = model["ratios"][name]
    if name == "floor":
        return f"1 ({min(model['times'][name]):.2g} s)"
    return f"{found['median']:.2f} ({min(found['rounds']):.2f}–{max(found['rounds']):.2f})"


def _memory(models: dict[str, Any], name: str) -> str:
    """Peaks of a method above the loaded model, by how many sequences it takes at once."""
    shown = []
    for model in models.values():
        for key, peak in model.get("memory", {}).items():
            method, _, chunk = key.partition(CHUNK_SEPARATOR)
            if method == name:
                size = f"{peak['peak_mb'] / 1024:.1f} GiB" if "peak_mb" in peak else "out of memory"
                shown.append(f"{size} ({chunk} at once)" if chunk else size)
    return ", ".join(shown) or "–"


def _answer(answer: dict[str, Any]) -> str:
    """What a method gets right."""
    if answer["state"] in ("refuses", "not installed", "no answer"):
        return {"no answer": "none"}.get(answer["state"], answer["state"])
    worst = {kind: max(answer[kind].values()) for kind in ("tied", "untied")}
    if answer["state"] == "right":
        return "exact" if answer["moments"] == "all" else "exact, squares only"
    return f"**wrong** by {worst['tied']:.0%} on tied embeddings, {worst['untied']:.0e} on others"


def _remarks(result: dict[str, Any]) -> str:
    """What the table means, and why some refuse."""
    lines = [
        "CPU time of one thread as a multiple of the plain backward pass in the same round: median (smallest–largest). "
        "Peak memory is that of a fresh process on SmolLM2-135M above the loaded model; 1.5 GiB of it are the three "
        "sums. Answers are compared with the loop in float64.",
    ]
    for name, answer in result["answers"].items():
        if answer["state"] == "refuses":
            lines.append(f"{METHODS[name].label} refuses: `{answer['reason']}`")
    for key, model in result["models"].items():
        for name, reason in model["refused"].items():
            # A method that gives no answer at all has said why.
            if result["answers"][name]["state"] != "refuses":
                lines.append(f"{METHODS[name].label} refuses {MODEL_LABELS[key]}: `{reason}`")
    return "\n".join(f"- {line}" for line in lines)


def _enumeration(found: dict[str, Any]) -> str:
    """Speed of an exact enumeration."""
    ratios = found["ratios"]
    times = ratios["loop"]["median"] / ratios["ours"]["median"]
    return (
        f"All {found['responses']} responses of a model of {found['parameters']} parameters, enumerated in float64: "
        f"{ratios['ours']['median']:.2g} plain backward passes, the loop {ratios['loop']['median']:.2g}; "
        f"{times:.0f} times faster."
    )


def _growth(found: dict[str, Any]) -> str:
    """How the ratios move with each size."""
    labels = {"N": "sequences", "parameters": "parameters", "T": "tokens"}
    lines = ["| Varied | Value | ceilings | loop |", "|---|---|---|---|"]
    for axis, rows in found.items():
        lines += [
            f"| {labels[axis]} | {row['value']:,} | {row['ours']:.2f} | {row['loop']:.2f} |" for row in rows
        ]
    lines += [
        "",
        "Otherwise 32 sequences of 32 tokens and 0.9M parameters. Memory does not depend on the sequences.",
    ]
    return "\n".join(lines)


def _sizes(result: dict[str, Any]) -> str:
    """Largest models, and how far the arithmetic is from a process."""
    lines = ["| Weights | Bytes a parameter | " + " | ".join(f"Largest model, {m}" for m in MEMORIES) + " |"]
    lines.append("|---" * (2 + len(MEMORIES)) + "|")
    for label, width in (("float32", 4), ("bfloat16", 2)):
        sizes = " | ".join(f"{largest_model(m, width) / 1e9:.1f}B" for m in MEMORIES.values())
        lines.append(f"| {label} | {bytes_per_parameter(width)} | {sizes} |")
    checks = [
        f"{c['parameters'] / 1e6:.0f}M with {8 * c['weight_bytes']:.0f}-bit weights: computed "
        f"{c['computed_mb'] / 1024:.2f} GiB, measured {c['measured_mb'] / 1024:.2f} GiB"
        for c in result["memory_check"]
        if "failed" not in c
    ]
    lines += [
        "",
        "Computed: the weights and three float32 sums; no gradient and no score is stored. "
        f"{RESERVE:.0%} of the memory is left to the activations and logits of a batch. "
        f"Peak of a process with its batch: {'; '.join(checks)}.",
    ]
    return "\n".join(lines)


def _setting(setting: dict[str, Any]) -> str:
    """Where, when and with what."""
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    return (
        f"Measured on {setting['date']}: {setting['processor']}, one thread of {setting['cores']} cores, "
        f"{setting['rounds']} rounds; {versions}. To measure again: [benchmarks/README.md](benchmarks/README.md)."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
