"""A fine-tune as a patch: what changed against a base, without loss, near the size that entropy allows.

A patch is a safetensors file. For each tensor that changed it holds where and to what, coded; for the base it holds a
digest of each tensor, so that a patch on another base is refused and not applied to nonsense.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from ceilings.patch_bytes import Reader
from ceilings.patch_coding import CHUNK, code_stretch, decode_changes, new_words
from ceilings.patch_file import (
    PatchWriter,
    Source,
    in_order,
    open_patch,
    open_source,
    target,
    write_safetensors,
)
from ceilings.patch_manifest import (
    Described,
    Manifest,
    Tuned,
    begin_digest,
    digest_of,
    end_digest,
    pieces,
)
from ceilings.patch_numbers import Words, code_words, decode_words, words_of
from ceilings.patch_summary import PatchSummary
from ceilings.safetensors_file import BITS, SafetensorsFile
from ceilings.ties import head_and_embedding

__all__ = ["apply_patch", "check_base", "check_names", "inspect_patch", "make_patch"]

Progress = Callable[[int, int], None]


def make_patch(
    base: str | os.PathLike[str],
    tuned: str | os.PathLike[str],
    out: str | os.PathLike[str],
    progress: Progress = lambda done, total: None,
) -> PatchSummary:
    """Write a patch that turns one checkpoint into another.

    Parameters
    ----------
    base, tuned
        Files of safetensors or ``torch.save``, or folders of them.
    out
        The patch; written whole or not at all.
    progress
        Told after each tensor how many are done, and of how many.

    Returns
    -------
    PatchSummary
        What was written.

    Raises
    ------
    ValueError
        If a checkpoint cannot be read or the two have no tensor in common.
    """
    old, new = open_source(base), open_source(tuned)
    out = target(out, old.files | new.files)
    described = {name: what for name, (what, _) in new.tensors.items()}
    if not described.keys() & old.tensors.keys():
        raise ValueError(
            f"no tensor of {new.path} is named as one of {old.path}, such as {next(iter(described), 'none')!r}: give "
            "the checkpoint that the training began with, with the same names"
        )
    found: dict[str, tuple[Described, str]] = {}
    for name, (what, _) in old.tensors.items():
        found[name] = (what, digest_of(what, old.raw(name)))
        progress(len(found), len(old.tensors) + len(described))
    entries: dict[str, Tuned] = {}
    compressed = 0
    with PatchWriter(out) as writer:
        for name in in_order(list(described), described):
            entries[name], alone = _make_tensor(name, old, new, found, writer)
            compressed += alone
            progress(len(found) + len(entries), len(found) + len(described))
        writer.write(Manifest(found, entries, new.metadata, compressed))
    return inspect_patch(out)


def apply_patch(
    base: str | os.PathLike[str],
    patch: str | os.PathLike[str],
    out: str | os.PathLike[str],
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the checkpoint that a patch makes of its base.

    Parameters
    ----------
    base
        What the patch was made against, in either format: the bytes of its tensors count.
    patch
        The patch.
    out
        The result, one safetensors file; written whole or not at all.
    progress
        Told after each tensor how many are done, and of how many.

    Raises
    ------
    ValueError
        If the base is another one, or a file is damaged.
    """
    old, (manifest, file) = open_source(base), open_patch(patch)
    out = target(out, old.files | {file.path})
    check_names(old, manifest, file.path)

    def data() -> Iterable[bytes | memoryview]:
        seen = set()
        for done, (name, entry) in enumerate(manifest.tuned.items(), 1):
            if entry.origin is not None and entry.origin not in seen:
                check_base(entry.origin, old, manifest, file.path)
                seen.add(entry.origin)
            yield from _apply_tensor(name, entry, old, file)
            progress(done, len(manifest.tuned))
        for name in manifest.base:
            if name not in seen:
                check_base(name, old, manifest, file.path)

    write_safetensors(out, {n: t.what for n, t in manifest.tuned.items()}, manifest.metadata, data())


def inspect_patch(path: str | os.PathLike[str]) -> PatchSummary:
    """Read what a patch is made of, without its base.

    Parameters
    ----------
    path
        The patch.

    Returns
    -------
    PatchSummary
        Its parts and sizes.

    Raises
    ------
    ValueError
        If it is no patch.
    """
    manifest, file = open_patch(path)
    return PatchSummary(file.path, file.path.stat().st_size, manifest)


def _make_tensor(
    name: str, old: Source, new: Source, found: dict[str, tuple[Described, str]], writer: PatchWriter
) -> tuple[Tuned, int]:
    """Code one tensor behind the others; how the patch gives it, and the bytes that it takes by itself."""
    what, raw = new.tensors[name][0], new.raw(name)
    digest, origin = digest_of(what, raw), _origin(name, what, old, new)
    common = 0 if origin is None else _common(old.tensors[origin][0], what)
    if origin is not None and found[origin] == (what, digest):
        kept = Tuned(what, origin, common, 0, 0, 0, 0, digest)
        return kept, sum(len(code_words(words)) for words in _stretches(raw, what.width))
    changed = positions = values = alone = 0
    stored = writer.add(name, b"")  # an empty tensor has coded bytes too: none
    if origin is not None:
        sides = (_stretches(side[:common], what.width) for side in (old.raw(origin), raw))
        for before, after in zip(*sides, strict=True):
            coded = code_stretch(before, after)
            changed += coded.changed
            positions += writer.add(name, coded.positions)
            values += writer.add(name, coded.values)
            stored += writer.add(name, coded.whole)
            alone += coded.alone
    for words in _stretches(raw[common:], what.width):
        rest = writer.add(name, code_words(words))
        stored, alone = stored + rest, alone + rest
    return Tuned(what, origin, common, changed, positions, values, stored, digest), alone


def _origin(name: str, what: Described, old: Source, new: Source) -> str | None:
    """Tensor of the base to start from: that of the same name; for a head that was tied there, the embedding."""
    if name in old.tensors:
        start = old.tensors[name][0]
        return name if start == what or _common(start, what) else None
    head, _ = head_and_embedding(new.tensors)
    _, embedding = head_and_embedding(old.tensors)
    if name == head and embedding is not None and _common(old.tensors[embedding][0], what):
        return embedding
    return None


def _common(start: Described, what: Described) -> int:
    """Bytes of the leading rows that two tensors have in common."""
    if start.dtype != what.dtype:
        return 0
    if start.shape == what.shape:
        return what.size
    if not start.shape or not what.shape or start.shape[1:] != what.shape[1:]:
        return 0
    rows = (min(start.shape[0], what.shape[0]), *what.shape[1:])
    # NOTE a row of an odd number of four-bit numbers ends inside a byte.
    return 0 if math.prod(rows) * BITS[what.dtype] % 8 else Described(what.dtype, rows).size


def _stretches(data: memoryview, width: int) -> Iterable[Words]:
    """Numbers of a tensor as they are coded: `CHUNK` of them at once."""
    return (words_of(piece, width) for piece in pieces(data, CHUNK * width))


def check_names(old: Source, manifest: Manifest, patch: Path) -> None:
    """Refuse a base with other tensors, before anything is read.

    Parameters
    ----------
    old
        The base.
    manifest
        What the patch says of its base.
    patch
        File of the patch, for the message.

    Raises
    ------
    ValueError
        If a tensor is missing, is one too many, or has another number format or shape.
    """
    for name, (what, _) in manifest.base.items():
        if name not in old.tensors:
            raise ValueError(
                f"{old.path} has no {name!r}, which the base of {patch} has: give the base that the patch was made for"
            )
        if old.tensors[name][0] != what:
            here = old.tensors[name][0]
            raise ValueError(
                f"{old.file(name)}: {name!r} is {here.dtype} {list(here.shape)} and {what.dtype} {list(what.shape)} "
                f"in the base of {patch}: give the base that the patch was made for"
            )
    for name in old.tensors:
        if name not in manifest.base:
            raise ValueError(
                f"{old.file(name)}: {name!r} is not in the base of {patch}: give the base that the patch was made for"
            )


def check_base(name: str, old: Source, manifest: Manifest, patch: Path) -> None:
    """Refuse a base that differs in one tensor.

    Parameters
    ----------
    name
        The tensor.
    old
        The base.
    manifest
        What the patch says of its base.
    patch
        File of the patch, for the message.

    Raises
    ------
    ValueError
        If its digest is another one.
    """
    what, digest = manifest.base[name]
    if digest_of(what, old.raw(name)) != digest:
        raise ValueError(
            f"{old.file(name)}: {name!r} differs from the base of {patch} (digest {digest[:8]}…): give the base that "
            "the patch was made for"
        )


def _apply_tensor(
    name: str, entry: Tuned, old: Source, file: SafetensorsFile
) -> Generator[bytes | memoryview]:
    """Bytes of one tensor of the result, in pieces."""
    start = old.raw(entry.origin)[: entry.common] if entry.origin is not None else memoryview(b"")
    if entry.kept:
        yield from pieces(start)
        return
    width, reader, digest = entry.what.width, Reader(file.raw(name)), begin_digest(entry.what)
    try:
        for before in _stretches(start, width):
            words = before.copy()
            found = decode_changes(reader, len(words), width)
            words[found.positions] = new_words(found, words)
            digest.update(words.data)
            yield words.tobytes()
        rest = (entry.what.size - entry.common) // width
        for at in range(0, rest, CHUNK):
            words = decode_words(reader, min(CHUNK, rest - at), width)
            digest.update(words.data)
            yield words.tobytes()
    except ValueError as error:
        raise ValueError(
            f"{file.path}: {name!r} is damaged ({error}): copy or make the patch again"
        ) from error
    if entry.digest not in (None, end_digest(digest)):
        raise ValueError(f"{file.path}: {name!r} does not become what it was: copy or make the patch again")
