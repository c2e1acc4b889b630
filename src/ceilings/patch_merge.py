"""Two patches of one base as one: what only one of them changes is taken from it, and what both change must agree."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ceilings.patch import check_base, check_names, inspect_patch
from ceilings.patch_bytes import Reader
from ceilings.patch_coding import (
    CHUNK,
    WHOLE,
    Changes,
    Stretch,
    code_changes,
    code_stretch,
    decode_changes,
    new_words,
)
from ceilings.patch_file import PatchWriter, Source, in_order, open_patch, open_source, target
from ceilings.patch_manifest import Manifest, Tuned
from ceilings.patch_numbers import Words, code_words, decode_words, words_of
from ceilings.patch_summary import PatchSummary
from ceilings.safetensors_file import SafetensorsFile

__all__ = ["Conflict", "ConflictError", "MergeSummary", "merge_patches"]


class Conflict(NamedTuple):
    """A tensor of which two patches want different things.

    Parameters
    ----------
    name
        The tensor.
    both
        Numbers that both change.
    differing
        Numbers among them that they change differently.
    why
        What they disagree about.
    """

    name: str
    both: int
    differing: int
    why: str


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


class _Side(NamedTuple):
    """One of the two patches."""

    manifest: Manifest
    file: SafetensorsFile


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
    sides = _Side(*open_patch(first)), _Side(*open_patch(second))
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


def _check_bases(one: _Side, two: _Side) -> None:
    """Refuse patches of different bases."""
    a, b = one.manifest.base, two.manifest.base
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            raise ValueError(
                f"{one.file.path} and {two.file.path} were made for different bases, which differ in {name!r}: make "
                "both patches for one base"
            )


def _sentence(sides: tuple[_Side, _Side], conflicts: list[Conflict]) -> str:
    """Why the merge is refused."""
    worst = max(conflicts, key=lambda c: c.differing)
    return (
        f"{sides[0].file.path} and {sides[1].file.path} change {sum(c.differing for c in conflicts):,} numbers "
        f"differently, most in {worst.name!r} ({worst.differing:,}): say --prefer first or --prefer second"
    )


def _merge_tensor(
    name: str,
    sides: tuple[_Side, _Side],
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
        return _merge_numbers(name, sides, prefer, old, writer)
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


def _merge_numbers(
    name: str,
    sides: tuple[_Side, _Side],
    prefer: str | None,
    old: Source | None,
    writer: PatchWriter,
) -> tuple[Tuned, Conflict]:
    """Merge a tensor number by number."""
    one, two = (side.manifest.tuned[name] for side in sides)
    width, first = one.what.width, prefer != "second"
    changed = positions = values = both = differing = 0
    stored = writer.add(name, b"")  # an empty tensor has coded bytes too: none
    for a, b, size, before in _pairs(name, sides, old):
        merged, shared, unlike = _union(a, b, first)
        coded = _coded(merged, size, before)
        changed, both, differing = changed + coded.changed, both + shared, differing + unlike
        positions += writer.add(name, coded.positions)
        values += writer.add(name, coded.values)
        stored += writer.add(name, coded.whole)
    for rows, others in _tails(name, sides, one, width):
        both, differing = both + len(rows), differing + int((rows != others).sum())
        stored += writer.add(name, code_words(rows if first else others))
    digest = one.digest if one.digest == two.digest else None
    entry = Tuned(one.what, one.origin, one.common, changed, positions, values, stored, digest)
    return entry, Conflict(name, both, differing, "numbers")


def _pairs(
    name: str, sides: tuple[_Side, _Side], old: Source | None
) -> Generator[tuple[Changes, Changes, int, Words | None]]:
    """Changes of both patches, stretch by stretch, with the old bits where they are needed."""
    entry = sides[0].manifest.tuned[name]
    width = entry.what.width
    readers = [_reader(name, side) for side in sides]
    for at in range(0, entry.common, CHUNK * width):
        size = min(CHUNK, (entry.common - at) // width)
        a, b = (_read(name, side, reader, size, width) for side, reader in zip(sides, readers, strict=True))
        before = None
        if WHOLE in (a.mode, b.mode) or (a.mode != b.mode and len(a.positions) and len(b.positions)):
            before = _old_words(name, sides, old, at, size)
            a, b = (_as_bits(found, before) for found in (a, b))
        yield a, b, size, before


def _tails(name: str, sides: tuple[_Side, _Side], entry: Tuned, width: int) -> Generator[tuple[Words, ...]]:
    """Rows that the base does not have, as each of two patches stores them."""
    rest = (entry.what.size - entry.common) // width
    if not rest:
        return
    readers = [_reader(name, side) for side in sides]
    for at in range(0, entry.common, CHUNK * width):  # what `_pairs` has read
        for side, reader in zip(sides, readers, strict=True):
            _read(name, side, reader, min(CHUNK, (entry.common - at) // width), width)
    for at in range(0, rest, CHUNK):
        count = min(CHUNK, rest - at)
        try:
            yield tuple(decode_words(reader, count, width) for reader in readers if reader is not None)
        except ValueError as error:
            raise _damaged(name, sides, error) from error


def _reader(name: str, side: _Side) -> Reader | None:
    """Coded bytes of a tensor; None where the patch leaves it as its origin is."""
    return None if side.manifest.tuned[name].kept else Reader(side.file.raw(name))


def _read(name: str, side: _Side, reader: Reader | None, size: int, width: int) -> Changes:
    """Changes of one stretch."""
    if reader is None:
        return Changes("bits", np.zeros(0, np.int64), np.zeros(0, np.dtype(f"<u{width}")))
    try:
        return decode_changes(reader, size, width)
    except ValueError as error:
        raise _damaged(name, (side,), error) from error


def _damaged(name: str, sides: tuple[_Side, ...], error: ValueError) -> ValueError:
    """Complaint about coded bytes that cannot be read."""
    files = " or ".join(str(side.file.path) for side in sides)
    return ValueError(f"{files}: {name!r} is damaged ({error}): copy or make the patch again")


def _old_words(name: str, sides: tuple[_Side, _Side], old: Source | None, at: int, size: int) -> Words:
    """Bits of a stretch of the base."""
    if old is None:
        raise ValueError(
            f"{sides[0].file.path} and {sides[1].file.path} store {name!r} in different ways, which cannot be compared "
            "by themselves: give --base BASE"
        )
    entry = sides[0].manifest.tuned[name]
    assert entry.origin is not None
    check_base(entry.origin, old, sides[0].manifest, sides[0].file.path)
    start = old.raw(entry.origin)[: entry.common][at : at + size * entry.what.width]
    return words_of(start, entry.what.width)


def _union(a: Changes, b: Changes, first: bool) -> tuple[Changes, int, int]:
    """All changes of two; how many positions they share, and on how many of these they differ."""
    _, of_a, of_b = np.intersect1d(a.positions, b.positions, assume_unique=True, return_indices=True)
    unlike = int((a.values[of_a] != b.values[of_b]).sum())
    winner, loser, taken = (a, b, of_b) if first else (b, a, of_a)
    rest = np.ones(len(loser.positions), bool)
    rest[taken] = False
    positions = np.concatenate([winner.positions, loser.positions[rest]])
    values = np.concatenate([winner.values, loser.values[rest]])
    order = np.argsort(positions, kind="stable")
    mode = winner.mode if len(winner.positions) else loser.mode
    return Changes(mode, positions[order], values[order]), len(of_a), unlike


def _as_bits(found: Changes, before: Words) -> Changes:
    """Changes by their new bits; of a stretch that is stored whole, those that are changes."""
    after = new_words(found, before)
    moved = after != before[found.positions]
    return Changes("bits", found.positions[moved], after[moved])


def _coded(merged: Changes, size: int, before: Words | None) -> Stretch:
    """Merged changes; with the old bits at hand, in the way that is now the shortest."""
    if before is None:
        return Stretch(len(merged.positions), *code_changes(merged, size), b"", 0)
    words = before.copy()
    words[merged.positions] = new_words(merged, before)
    return code_stretch(before, words)
