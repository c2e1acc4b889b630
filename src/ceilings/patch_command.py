"""The words of ``ceilings patch``: what it prints of patches that were made, inspected or merged."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final, Protocol

from ceilings.patch import apply_patch, inspect_patch, make_patch
from ceilings.patch_merge import ConflictError, merge_patches
from ceilings.patch_summary import PatchSummary
from ceilings.patch_union import Conflict

__all__ = ["Console", "as_json", "patch", "table"]

_RANKS: Final = (8, 64)


class Console(Protocol):
    """What the command line lends to the work."""

    def say(self, text: str) -> None:
        """Print a line."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a step is."""


def patch(options: argparse.Namespace, console: Console) -> None:
    """Do what one of the actions of ``ceilings patch`` asks for.

    Parameters
    ----------
    options
        The options as typed; ``action`` names the action.
    console
        Where to say what is going on.

    Raises
    ------
    ValueError
        If an input is wrong.
    ConflictError
        If two patches are in conflict and no option decides; the conflicts have been listed.
    """
    if options.action == "make":
        made = make_patch(options.base, options.tuned, options.out, _shown(console, "coding tensor"))
        console.say("\n".join(table(made)))
    elif options.action == "apply":
        apply_patch(options.base, options.patch, options.out, _shown(console, "writing tensor"))
        console.say(_applied(inspect_patch(options.patch), options.out))
    elif options.action == "inspect":
        found = inspect_patch(options.patch)
        console.say(json.dumps(as_json(found), indent=1) if options.json else "\n".join(_inspected(found)))
    else:
        _merge(options, console)


def table(made: PatchSummary) -> list[str]:
    """Lines that say what a patch weighs, and what else its result could be stored as.

    Parameters
    ----------
    made
        The patch.

    Returns
    -------
    list
        The lines.
    """
    touched, tuned = made.touched, made.manifest.tuned
    value_bits = f"{8 * made.value_bytes / made.changed:.1f} bits a change" if made.changed else ""
    packed = made.manifest.compressed
    lines = [
        f"{made.path}: {_size(made.size)}; {made.changed:,} of {made.common:,} numbers changed "
        f"({100 * made.density:.3g} %), in {len(touched)} of {len(tuned)} tensors",
        _line("positions", made.position_bytes, f"random ones need {_size(made.position_bound)}, n·H(d)"),
        _line("values", made.value_bytes, value_bits),
    ]
    if made.stored_bytes:
        lines.append(_line("stored whole", made.stored_bytes, "new rows, and where changes would take more"))
    if made.removed:
        lines.append(f"  {len(made.removed)} tensors of the base are not in the result")
    lines += [
        _line(
            "names, digests, check sums",
            made.size - made.position_bytes - made.value_bytes - made.stored_bytes,
        ),
        "stored in another way:",
        _line("as it is", made.dense_bytes),
        "  compressed by itself: not known of a merged patch"
        if packed is None
        else _line("compressed by itself", packed, "estimate: byte entropies"),
    ]
    for rank in _RANKS:
        lines.append(
            _line(
                f"LoRA of rank {rank}",
                made.adapter_bytes(rank),
                "another model: holds only a change of that rank",
            )
        )
    return lines


def as_json(found: PatchSummary) -> dict[str, Any]:
    """What ``inspect --json`` prints.

    Parameters
    ----------
    found
        The patch.

    Returns
    -------
    dict
        Sizes in bytes, and one entry for each tensor that the patch touches.
    """
    tuned = found.manifest.tuned
    return {
        "kind": "ceilings.patch",
        "version": found.manifest.version,
        "base_digest": found.manifest.base_digest,
        "bytes": found.size,
        "numbers": found.common,
        "changed": found.changed,
        "position_bytes": found.position_bytes,
        "position_bound_bytes": round(found.position_bound, 1),
        "value_bytes": found.value_bytes,
        "stored_bytes": found.stored_bytes,
        "dense_bytes": found.dense_bytes,
        "dense_compressed_bytes": found.manifest.compressed,
        "lora_bytes": {str(rank): found.adapter_bytes(rank) for rank in _RANKS},
        "removed": found.removed,
        "tensors": {
            name: {
                "dtype": tuned[name].what.dtype,
                "shape": list(tuned[name].what.shape),
                "starts_from": tuned[name].origin,
                "numbers": tuned[name].common // tuned[name].what.width,
                "changed": tuned[name].changed,
                "bytes": tuned[name].positions + tuned[name].values + tuned[name].stored,
            }
            for name in found.touched
        },
    }


def _merge(options: argparse.Namespace, console: Console) -> None:
    """Merge two patches and list what they disagree about."""
    try:
        merged = merge_patches(
            options.patch_1, options.patch_2, options.out, prefer=options.prefer, base=options.base
        )
    except ConflictError as error:
        console.say("\n".join(_conflicts(error.conflicts)))
        raise
    if merged.conflicts:
        console.say("\n".join(_conflicts(merged.conflicts)))
        console.say(f"decided by the {options.prefer} patch")
    console.say(f"{merged.both:,} numbers are changed by both patches")
    console.say("\n".join(table(merged.patch)))


def _conflicts(conflicts: tuple[Conflict, ...]) -> list[str]:
    """A line for each tensor in conflict."""
    lines = ["in conflict:"]
    for found in conflicts:
        lines.append(
            f"  {found.name}: {found.differing:,} of {found.both:,} numbers that both set; {found.why}"
        )
    return lines


def _inspected(found: PatchSummary) -> list[str]:
    """What ``inspect`` prints."""
    lines = [
        f"base {found.manifest.base_digest[:16]}… of {len(found.manifest.base)} tensors, format "
        f"{found.manifest.version}"
    ]
    lines += table(found)
    lines.append("tensors:")
    for name in found.touched:
        tuned = found.manifest.tuned[name]
        numbers = tuned.common // tuned.what.width
        share = f"{100 * tuned.changed / numbers:.3g} % of {numbers:,} changed" if numbers else "new"
        where = "" if tuned.origin in (None, name) else f", starting from {tuned.origin}"
        size = _size(tuned.positions + tuned.values + tuned.stored)
        lines.append(f"  {name} {tuned.what.dtype} {list(tuned.what.shape)}: {share}{where}, {size}")
    return lines + [f"  {name}: not in the result" for name in found.removed]


def _applied(found: PatchSummary, out: str) -> str:
    """What ``apply`` prints."""
    tuned = found.manifest.tuned
    seen = all(t.digest is not None for t in tuned.values())
    checked = "all as they were when the patch was made" if seen else "of a merged patch"
    return f"{out}: {len(tuned)} tensors, {_size(found.dense_bytes)}, {checked}"


def _shown(console: Console, what: str) -> Any:
    """Progress of tensors."""
    return lambda done, total: console.progress(what, done, total)


def _how_packed(version: int) -> str:
    """How the size of the compressed result is known."""
    return "estimate: byte entropies" if version == 1 else "by the same codec"


def _line(what: str, size: float, note: str = "") -> str:
    """One line of a table of sizes."""
    return f"  {what:<27} {_size(size):>9}" + (f"   {note}" if note else "")


def _size(size: float) -> str:
    """Size in words."""
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * length:
            return f"{size / length:.3g} {unit}"
    return f"{size:.0f} B"
