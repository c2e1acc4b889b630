"""Two patches of one base as one: what only one of them changes is taken from it, and what both change must agree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from ceilings.patch import check_names, inspect_patch
from ceilings.patch_file import PatchWriter, Source, in_order, open_patch, open_source, target
from ceilings.patch_manifest import Manifest, Tuned
from ceilings.patch_summary import PatchSummary
from ceilings.patch_union import Conflict, Side, merge_numbers

__all__ = ["ConflictError", "MergeSummary", "merge_patches"]


class ConflictError(ValueError):
    """Two patches want different things, and nobody said which goes first.

    Parameters
    ----------
    message
        One sentence.
    conflicts
        All of them.
    """

    def __init__(self, message: str, conflicts: tuple[Conflict, ...]) -> None:
        super().__init__(message)
        self.conflicts = conflicts


@dataclass(frozen=True)
class MergeSummary:
    """What a merge did.

    Parameters
    ----------
    patch
        The patch that was written.
    both
        Numbers that both patches changed.
    conflicts
        Tensors of which they wanted different things, and which were decided as asked.
    """

    patch: PatchSummary
    both: int
    conflicts: tuple[Conflict, ...]


def merge_patches(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    out: str | os.PathLike[str],
    prefer: Literal["first", "second"] | None = None,
    base: str | os.PathLike[str] | None = None,
) -> MergeSummary:
    """Write one patch that does what two patches of the same base do.

    Parameters
    ----------
    first, second
        The patches.
    out
        The merged patch; written whole or not at all.
    prefer
        Which patch decides where both change one number and not to the same bits; None refuses such a merge.
    base
        Their base. It is needed only where the two store the values of a tensor in different ways, or one of them
        stores it whole: then they cannot be compared without it.

    Returns
    -------
    MergeSummary
        What was written, and what was in conflict.

    Raises
    ------
    ConflictError
        If the patches are in conflict and ``prefer`` is None; nothing is written then.
    ValueError
        If they were made for different bases, or a file is damaged.

    Notes
    -----
    Merging is lossless bookkeeping: every number of the result is one of the base, of the first or of the second
    checkpoint. Whether a model of such numbers is any good is not for a patch to say.
    """
    sides = Side(*open_patch(first)), Side(*open_patch(second))
    old = None if base is None else open_source(base)
    out = target(out, {side.file.path for side in sides} | (set() if old is None else old.files))
    _check_bases(*sides)
    if old is not None:
        check_names(old, sides[0].manifest, sides[0].file.path)
    one, two = (side.manifest for side in sides)
    tuned: dict[str, Tuned] = {}
    conflicts: list[Conflict] = []
    names = list(dict.fromkeys([*one.tuned, *two.tuned]))
    described = {n: (one.tuned.get(n) or two.tuned[n]).what for n in names}
    both = 0
    with PatchWriter(out) as writer:
        for name in in_order(names, described):
            entry, found = _merge_tensor(name, sides, prefer, old, writer)
            if entry is not None:
                tuned[name] = entry
            both += found.both
            conflicts += [found] if found.differing else []
        if conflicts and prefer is None:
            raise ConflictError(_sentence(sides, conflicts), tuple(conflicts))
        texts = (two.metadata | one.metadata) if prefer != "second" else (one.metadata | two.metadata)
        writer.write(Manifest(one.base, {n: tuned[n] for n in in_order(list(tuned), described)}, texts, None))
    return MergeSummary(inspect_patch(out), both, tuple(conflicts))


def _check_bases(one: Side, two: Side) -> None:
    """Refuse patches of different bases."""
    a, b = one.manifest.base, two.manifest.base
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            raise ValueError(
                f"{one.file.path} and {two.file.path} were made for different bases, which differ in {name!r}: make "
                "both patches for one base"
            )


def _sentence(sides: tuple[Side, Side], conflicts: list[Conflict]) -> str:
    """Why the merge is refused."""
    worst = max(conflicts, key=lambda c: c.differing)
    return (
        f"{sides[0].file.path} and {sides[1].file.path} change {sum(c.differing for c in conflicts):,} numbers "
        f"differently, most in {worst.name!r} ({worst.differing:,}): say --prefer first or --prefer second"
    )


def _merge_tensor(
    name: str,
    sides: tuple[Side, Side],
    prefer: str | None,
    old: Source | None,
    writer: PatchWriter,
) -> tuple[Tuned | None, Conflict]:
    """How the merged patch gives one tensor, None for not at all; and how far the two agree."""
    entries = [side.manifest.tuned.get(name) for side in sides]
    one, two = entries
    touched = [not _untouched(name, entry, sides[0].manifest) for entry in entries]
    chosen = int(prefer == "second")
    none = Conflict(name, 0, 0, "")
    if not all(touched):
        chosen = int(touched[1])
    elif one is not None and one == two and one.digest is not None:  # they become the same
        rest = (one.what.size - one.common) // one.what.width
        none = Conflict(name, one.changed + rest, 0, "")
    elif one is not None and two is not None and _alike(one, two):
        return merge_numbers(name, sides, prefer, old, writer)
    elif one != two:
        numbers = max(_numbers(entry) for entry in entries)
        none = Conflict(name, numbers, numbers, _difference(one, two))
    entry = entries[chosen]
    if entry is not None and not entry.kept:
        writer.add(name, bytes(sides[chosen].file.raw(name)))
    return entry, none


def _untouched(name: str, entry: Tuned | None, manifest: Manifest) -> bool:
    """Whether a patch leaves a tensor as the base has it; not there, if it has none."""
    if name not in manifest.base:
        return entry is None
    return entry is not None and entry.kept and entry.origin == name


def _alike(one: Tuned, two: Tuned) -> bool:
    """Whether two ways of giving a tensor can be compared number by number."""
    return (one.what, one.origin, one.common) == (two.what, two.origin, two.common)


def _numbers(entry: Tuned | None) -> int:
    """Numbers that a patch sets in a tensor; at least 1, so that no conflict goes uncounted."""
    if entry is None:
        return 1
    return max(1, entry.changed + (entry.what.size - entry.common) // entry.what.width)


def _difference(one: Tuned | None, two: Tuned | None) -> str:
    """What two patches disagree about, if it is more than numbers."""
    if one is None or two is None:
        return "one removes it, one changes it"
    if one.what != two.what:
        sides = (f"{t.what.dtype} {list(t.what.shape)}" for t in (one, two))
        return f"it becomes {' and '.join(sides)}"
    return "they start from different tensors"
