"""The table of the comparison of checkpoints for the README, from checkpoint_diff.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoint_diff import TARGETS

__all__ = ["BEGIN", "END", "RESULT", "render", "with_table"]

RESULT = Path(__file__).parent / "checkpoint_diff.json"
BEGIN, END = "<!-- benchmark: checkpoint_diff -->", "<!-- end of checkpoint_diff -->"


def with_table(text: str) -> str:
    """A text with a fresh table between its two markers."""
    before, rest = text.split(BEGIN)
    table = render(json.loads(RESULT.read_text(encoding="utf-8")))
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def render(result: dict[str, Any]) -> str:
    """Time and memory of both sides by size, and what the numbers mean."""
    lines = [
        "| Pair in bf16 | load both whole | `ceilings diff --no-rank` | less time | scan alone | less memory |",
        "|---|---|---|---|---|---|",
    ]
    for size in result["sizes"]:
        sides = [
            f"{size[side]['wall']:.1f} s, {size[side]['memory_mb']:.0f} MB" for side in ("whole", "streamed")
        ]
        ratios = [f"{size['ratios'][key]:.1f} ×" for key in ("time", "scan", "memory")]
        lines.append(
            f"| {size['parameters'] / 1e6:.0f}M parameters | " + " | ".join((*sides, *ratios)) + " |"
        )
    last = result["sizes"][-1]
    cut = last["ties_at_top_percent"]
    missed = [key for key, least in TARGETS.items() if last["ratios"][key] < least]
    goals = ", ".join(f"{key} {least:g} ×" for key, least in TARGETS.items())
    return "\n".join(
        (
            *lines,
            "",
            "The one side does what the script of a paper does, call by call: both models loaded with transformers, "
            "differences concatenated, entries counted. The other counts the same, to four decimals, and a great deal "
            "more. Whole processes, alternating, medians of "
            f"{result['rounds']} rounds; memory is the peak of anonymous pages. Aimed at, for the largest: {goals}; "
            + (f"missed: {', '.join(missed)}. " if missed else "met. ")
            + f"At the cut of the top 1 % ({cut['size']:,} entries) {cut['tied']:,} are tied, and reported as such. "
            f"torch {result['torch']}, Python {result['python']}.",
        )
    )
