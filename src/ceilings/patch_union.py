"""Two ways of changing one tensor as one, number by number."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from ceilings.patch import check_base
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
from ceilings.patch_file import PatchWriter, Source
from ceilings.patch_manifest import Manifest, Tuned
from ceilings.patch_numbers import Words, code_words, decode_words, words_of
from ceilings.safetensors_file import SafetensorsFile

__all__ = ["Conflict", "Side", "merge_numbers"]


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


class Side(NamedTuple):
    """One of two patches.

    Parameters
    ----------
    manifest
        What it says of itself.
    file
        Its coded bytes.
    """

    manifest: Manifest
    file: SafetensorsFile


def merge_numbers(
    name: str,
    sides: tuple[Side, Side],
    prefer: str | None,
    old: Source | None,
    writer: PatchWriter,
) -> tuple[Tuned, Conflict]:
    """Merge a tensor number by number.

    Parameters
    ----------
    name
        The tensor, which both patches give in comparable ways.
    sides
        The two patches.
    prefer
        Which of them decides where both set a number; the first unless it is ``second``.
    old
        Their base, if it is at hand.
    writer
        Where the merged bytes go.

    Returns
    -------
    tuple
        How the merged patch gives the tensor, and how far the two agree.

    Raises
    ------
    ValueError
        If coded bytes are damaged, or the base is needed and not there.
    """
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
    name: str, sides: tuple[Side, Side], old: Source | None
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


def _tails(name: str, sides: tuple[Side, Side], entry: Tuned, width: int) -> Generator[tuple[Words, ...]]:
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


def _reader(name: str, side: Side) -> Reader | None:
    """Coded bytes of a tensor; None where the patch leaves it as its origin is."""
    return None if side.manifest.tuned[name].kept else Reader(side.file.raw(name))


def _read(name: str, side: Side, reader: Reader | None, size: int, width: int) -> Changes:
    """Changes of one stretch."""
    if reader is None:
        return Changes("bits", np.zeros(0, np.int64), np.zeros(0, np.dtype(f"<u{width}")))
    try:
        return decode_changes(reader, size, width)
    except ValueError as error:
        raise _damaged(name, (side,), error) from error


def _damaged(name: str, sides: tuple[Side, ...], error: ValueError) -> ValueError:
    """Complaint about coded bytes that cannot be read."""
    files = " or ".join(str(side.file.path) for side in sides)
    return ValueError(f"{files}: {name!r} is damaged ({error}): copy or make the patch again")


def _old_words(name: str, sides: tuple[Side, Side], old: Source | None, at: int, size: int) -> Words:
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
