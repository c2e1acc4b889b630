"""The work behind ``ceilings diff``: open, match, compare, say."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ceilings.adapter_delta import Adapter, open_adapter
from ceilings.checkpoint_diff import Diff, compare, count_overlap, default_threads
from ceilings.checkpoints import Checkpoint, is_adapter, open_checkpoint
from ceilings.diff_page import page
from ceilings.diff_report import VERSION, bins_entry, describe_overlap, describe_side, describe_tuned
from ceilings.diff_table import lines, overlap_lines, side_line
from ceilings.diff_words import caveats, verdict
from ceilings.matching import match
from ceilings.pretrained import built_in_model_path
from ceilings.report import package_versions, write_json

__all__ = ["Console", "DiffOptions", "diff", "report"]

_FORMATS: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BUILT_IN: Final = "smollm2"


class Console(Protocol):
    """What the command line lends to the work."""

    def say(self, text: str) -> None:
        """Print a line."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a step is."""


@dataclass(frozen=True)
class DiffOptions:
    """Options of ``ceilings diff``; its help says what they mean."""

    base: str
    tuned: tuple[str, ...]
    json: str | None = None
    html: str | None = None
    dtype: str | None = None
    min_coverage: float = 0.99
    rank: bool = True
    threads: int | None = None


def diff(options: DiffOptions, console: Console) -> None:
    """Compare checkpoints, print what was found, and write the files that were asked for.

    Parameters
    ----------
    options
        What to compare.
    console
        Where to say what was found.

    Raises
    ------
    ValueError
        If an input is wrong.
    FileNotFoundError
        If there is none.
    """
    for path in (options.json, options.html):
        if path is not None and not Path(path).parent.is_dir():
            raise ValueError(f"{path}: there is no folder {str(Path(path).parent)!r}: make it first")
    found = report(options, console)
    console.say(side_line("BASE", found["base"]))
    for tuned in found["tuned"]:
        console.say(side_line("TUNED", tuned))
        for line in lines(tuned):
            console.say(line)
    if found["overlaps"]:
        for line in overlap_lines(found["overlaps"]):
            console.say(line)
    if options.json is not None:
        write_json(Path(options.json), found)
        console.say(f"numbers: {options.json}")
    if options.html is not None:
        _write(Path(options.html), page(found))
        console.say(f"page: {options.html}")


def report(options: DiffOptions, console: Console) -> dict[str, Any]:
    """Compare checkpoints.

    Parameters
    ----------
    options
        What to compare.
    console
        Where to show how far it is.

    Returns
    -------
    dict
        The report, words included.

    Raises
    ------
    ValueError
        If an input is wrong.
    FileNotFoundError
        If there is none.
    """
    started = time.monotonic()
    base = open_checkpoint(built_in_model_path() if options.base == _BUILT_IN else options.base)
    _refuse_packed(base, "BASE")
    sides: list[Checkpoint | Adapter] = []
    for path in options.tuned:
        sides.append(open_adapter(Path(path), base) if is_adapter(path) else open_checkpoint(path))
        _refuse_packed(sides[-1], "TUNED")
    # All are matched before the first is read: a wrong one is found at once.
    matchings = [match(base, side) for side in sides]
    for path, matching in zip(options.tuned, matchings, strict=True):
        matching.check(options.min_coverage, path)
    threads = options.threads or default_threads()
    described, diffs = [], []
    base_entry = describe_side(base, options.base)
    for path, side, matching in zip(options.tuned, sides, matchings, strict=True):
        found = compare(
            base,
            side,
            matching,
            dtype=None if options.dtype is None else _FORMATS[options.dtype],
            rank=options.rank,
            threads=threads,
            describe=bins_entry,
            progress=functools.partial(_progress, console, path),
        )
        diffs.append(found)
        entry = describe_side(side, path) | describe_tuned(found, matching, base, side)
        entry["verdict"], entry["caveats"] = verdict(base_entry, entry), caveats(base_entry, entry)
        described.append(entry)
    overlaps = _overlaps(base, sides, diffs, options, console) if len(sides) > 1 else []
    return {
        "kind": "ceilings.diff",
        "version": VERSION,
        "config": {
            "dtype": options.dtype,
            "min_coverage": options.min_coverage,
            "rank": options.rank,
        },
        "versions": package_versions(),
        "wall_seconds": round(time.monotonic() - started, 3),
        "base": base_entry,
        "tuned": described,
        "overlaps": overlaps,
    }


def _overlaps(
    base: Checkpoint,
    sides: list[Checkpoint | Adapter],
    diffs: list[Diff],
    options: DiffOptions,
    console: Console,
) -> list[dict[str, Any]]:
    """What each pair of fine-tunes has in common."""
    counts = count_overlap(
        base,
        sides,
        diffs,
        threads=options.threads or default_threads(),
        progress=functools.partial(_progress, console, ""),
    )
    return [
        describe_overlap([options.tuned[k] for k in which], found, [diffs[k] for k in which])
        for which, found in counts.items()
    ]


def _progress(console: Console, path: str, what: str, done: int, total: int) -> None:
    """Show how far one step on one fine-tune is."""
    console.progress(f"{what} {path}".rstrip() + ":", done, total)


def _refuse_packed(side: Checkpoint | Adapter, word: str) -> None:
    """Refuse weights that are stored as codes which only their library can read."""
    if side.quantised is not None and side.kind != "gguf":
        raise ValueError(
            f"{word} {side.path} is quantised ({side.quantised}): what it stores are codes and no weights; de-quantise "
            "it, save that as safetensors, and compare the numbers that the trainer saw"
        )


def _write(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
