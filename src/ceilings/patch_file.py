"""What patches are made of and written to: checkpoints by their stored bytes, and files that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from ceilings.checkpoints import open_checkpoint
from ceilings.safetensors_file import BITS, SafetensorsFile

__all__ = [
    "Described",
    "Manifest",
    "PatchWriter",
    "Source",
    "Tuned",
    "begin_digest",
    "digest_of",
    "end_digest",
    "in_order",
    "open_patch",
    "open_source",
    "pieces",
    "target",
    "write_safetensors",
]

#: Written into each patch; a reader refuses what it does not know.
VERSION: Final = 1
_KIND: Final = "ceilings.patch"
_PIECE: Final = 2**24


class Described(NamedTuple):
    """Number format and shape of a tensor.

    Parameters
    ----------
    dtype
        Code of the standard, such as ``BF16``.
    shape
        Its shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def width(self) -> int:
        """Bytes of what counts as one number: half a complex number, and two numbers of four bits."""
        return 4 if self.dtype == "C64" else max(8, BITS[self.dtype] & ~7) // 8


class Tuned(NamedTuple):
    """How a patch gives one tensor.

    Parameters
    ----------
    what
        Number format and shape.
    origin
        Name of the tensor of the base that it starts from; None where it starts from nothing.
    common
        Bytes that it has in common with that tensor; the rest is stored.
    changed
        Numbers of these that changed.
    positions, values, stored
        Bytes that positions, values and all the rest take in the patch.
    digest
        Digest of the tensor; None where a merge made it and nobody has seen it yet.
    """

    what: Described
    origin: str | None
    common: int
    changed: int
    positions: int
    values: int
    stored: int
    digest: str | None

    @property
    def kept(self) -> bool:
        """Whether it is the tensor of the base, byte for byte."""
        return self.origin is not None and not (self.positions or self.stored)


@dataclass(frozen=True)
class Manifest:
    """What a patch says of itself.

    Parameters
    ----------
    base
        Number format, shape and digest of every tensor of the base.
    tuned
        Every tensor of the result, in the order of its file.
    metadata
        Free text of the result's file.
    compressed
        Bytes of the whole result under the same codec; None where nobody has seen the result.
    """

    base: dict[str, tuple[Described, str]]
    tuned: dict[str, Tuned]
    metadata: dict[str, str]
    compressed: int | None

    @property
    def base_digest(self) -> str:
        """Digest of the base as a whole."""
        lines = (f"{name}\0{digest}\n" for name, (_, digest) in sorted(self.base.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_json(self) -> str:
        """Text that `Manifest.from_json` reads."""
        return json.dumps(
            {
                "kind": _KIND,
                "version": VERSION,
                "base_digest": self.base_digest,
                "base": {n: [w.dtype, w.shape, digest] for n, (w, digest) in self.base.items()},
                # What did not change is said in one word.
                "tuned": {n: 0 if self._plain(n, t) else [*t.what, *t[1:]] for n, t in self.tuned.items()},
                "metadata": self.metadata,
                "compressed": self.compressed,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Manifest of a text; a ValueError with the reason, or a KeyError and the like, if it is none."""
        found = json.loads(text)
        if found["kind"] != _KIND:
            raise ValueError("it holds something else")
        if found["version"] != VERSION:
            raise ValueError(f"its format has the version {found['version']}, and {VERSION} is known here")
        base = {n: (Described(d, tuple(shape)), digest) for n, (d, shape, digest) in found["base"].items()}
        tuned = {
            n: Tuned(base[n][0], n, base[n][0].size, 0, 0, 0, 0, base[n][1])
            if line == 0
            else Tuned(Described(line[0], tuple(line[1])), *line[2:])
            for n, line in found["tuned"].items()
        }
        manifest = cls(base, tuned, found["metadata"], found["compressed"])
        if manifest.base_digest != found["base_digest"]:
            raise ValueError("its list of the base's tensors is damaged")
        return manifest

    def _plain(self, name: str, tuned: Tuned) -> bool:
        """Whether a tensor is that of the base under its own name."""
        return tuned.kept and tuned.origin == name


@dataclass(frozen=True)
class Source:
    """A safetensors checkpoint by its stored bytes.

    Parameters
    ----------
    path
        What was opened.
    tensors
        Every stored tensor with its file, in the order of the files.
    metadata
        Free text.
    """

    path: Path
    tensors: dict[str, tuple[Described, SafetensorsFile]]
    metadata: dict[str, str]

    def raw(self, name: str) -> memoryview:
        """Bytes of a tensor.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        memoryview
            A view of the file.
        """
        return self.tensors[name][1].raw(name)

    @property
    def files(self) -> set[Path]:
        """All files."""
        return {file.path for _, file in self.tensors.values()}

    def file(self, name: str) -> Path:
        """File of a tensor.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        Path
            The file.
        """
        return self.tensors[name][1].path


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint whose stored bytes count.

    Parameters
    ----------
    path
        A ``.safetensors`` file, or a Hugging Face folder or index of such files.

    Returns
    -------
    Source
        The checkpoint; only headers were read.

    Raises
    ------
    ValueError
        If it is no checkpoint, is damaged, or has another format than safetensors.
    """
    path = Path(path)
    if path.is_file() and path.suffix.lower() == ".safetensors":
        files = [SafetensorsFile.open(path)]
        chosen = {name: path for name in files[0].infos()}
    else:
        checkpoint = open_checkpoint(path)
        if checkpoint.kind != "safetensors":
            raise ValueError(
                f"{path} is a {checkpoint.kind} checkpoint, and a patch keeps the bytes of safetensors files: save it "
                "as safetensors first"
            )
        files = [SafetensorsFile.open(file) for file in checkpoint.files]
        chosen = {n: file.path for file in files for n in file.infos()}
        chosen |= {n: checkpoint.info(n).file for n in checkpoint.names}
    tensors = {
        name: (Described(info.dtype, info.shape), file)
        for file in files
        for name, info in file.infos().items()
        if chosen[name] == file.path
    }
    return Source(path, tensors, {k: v for file in files for k, v in file.metadata.items()})


def open_patch(path: str | os.PathLike[str]) -> tuple[Manifest, SafetensorsFile]:
    """Open a patch.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    tuple
        What it says of itself, and the file with the coded bytes under the names of the tensors.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is no patch.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no patch {str(path)!r}: give a file that ceilings patch make wrote"
        )
    file = SafetensorsFile.open(path)
    if "ceilings" not in file.metadata:
        raise ValueError(
            f"{path} is a safetensors file but no patch: give one that ceilings patch make wrote"
        )
    try:
        manifest = Manifest.from_json(file.metadata["ceilings"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is no patch that can be read here ({error}): make it again") from error
    missing = next((n for n, t in manifest.tuned.items() if not t.kept and n not in file.entries), None)
    if missing is not None:
        raise ValueError(f"{path} lacks the coded bytes of {missing!r}: make it again")
    return manifest, file


def begin_digest(what: Described) -> Any:
    """Digest of a tensor to which its bytes are still to be added.

    Parameters
    ----------
    what
        Number format and shape, which count as well.

    Returns
    -------
    hash
        An object with ``update``; `end_digest` reads it.
    """
    return hashlib.sha256(f"{what.dtype} {list(what.shape)}\n".encode())


def end_digest(found: Any) -> str:
    """Digest as patches hold it.

    Parameters
    ----------
    found
        What `begin_digest` began.

    Returns
    -------
    str
        The first half of a SHA-256 digest.
    """
    return str(found.hexdigest()[:32])


def digest_of(what: Described, data: memoryview) -> str:
    """Digest of a tensor: its number format, its shape and its bytes.

    Parameters
    ----------
    what
        Number format and shape.
    data
        Its bytes.

    Returns
    -------
    str
        The first half of a SHA-256 digest.
    """
    found = begin_digest(what)
    for piece in pieces(data):
        found.update(piece)
    return end_digest(found)


class PatchWriter:
    """Coded bytes that are collected on disk, because in the file their sizes come first.

    Parameters
    ----------
    out
        The patch to write.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._spool: IO[bytes] = tempfile.TemporaryFile(dir=out.parent)
        self._lengths: dict[str, int] = {}

    def __enter__(self) -> PatchWriter:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Forget what was collected."""
        self._spool.close()

    def add(self, name: str, data: bytes) -> int:
        """Add coded bytes to those of a tensor; returns how many. Tensors come one after the other."""
        self._lengths[name] = self._lengths.get(name, 0) + len(data)
        return self._spool.write(data)

    def write(self, manifest: Manifest) -> None:
        """Write the patch, whole or not at all."""
        self._spool.seek(0)
        tensors = {name: Described("U8", (length,)) for name, length in self._lengths.items()}
        data = iter(lambda: self._spool.read(_PIECE), b"")
        write_safetensors(self._out, tensors, {"ceilings": manifest.to_json()}, data)


@contextmanager
def _whole(path: Path) -> Generator[IO[bytes]]:
    """A file that appears under its name once it is complete, and not before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # same folder, so that replacing is atomic
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: dict[str, Described],
    metadata: dict[str, str],
    data: Iterable[bytes | memoryview],
) -> None:
    """Write a safetensors file piece by piece; it is there whole or not at all.

    Parameters
    ----------
    path
        Where to. An existing file is replaced once the new one is complete.
    tensors
        Number formats and shapes by name, in the order of ``data``.
    metadata
        Free text.
    data
        All bytes.

    Raises
    ------
    ValueError
        If there are more or fewer bytes than the tensors take.
    """
    at, header = 0, {"__metadata__": metadata} if metadata else {}
    table: dict[str, Any] = dict(header)
    for name, what in tensors.items():
        table[name] = {"dtype": what.dtype, "shape": what.shape, "data_offsets": [at, at + what.size]}
        at += what.size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with _whole(Path(path)) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        written = sum(file.write(piece) for piece in data)
        if written != at:
            raise ValueError(f"{written} bytes for tensors of {at}")


def pieces(data: memoryview, size: int = _PIECE) -> Iterable[memoryview]:
    """Bytes in pieces that fit into memory.

    Parameters
    ----------
    data
        The bytes.
    size
        Longest piece.

    Returns
    -------
    iterable
        Views of the bytes.
    """
    return (data[at : at + size] for at in range(0, len(data), size))


def in_order(names: Sequence[str], tensors: dict[str, Described]) -> list[str]:
    """Names in the order in which a file should hold them: wide numbers first, so that all are aligned.

    Parameters
    ----------
    names
        The names, in the order that they have.
    tensors
        Number formats by name.

    Returns
    -------
    list
        The names.
    """
    return sorted(names, key=lambda name: -BITS[tensors[name].dtype])


def target(out: str | os.PathLike[str], inputs: Iterable[Path]) -> Path:
    """Where to write; never onto what is being read.

    Parameters
    ----------
    out
        The file as the caller named it.
    inputs
        Files that are being read.

    Returns
    -------
    Path
        The file to write.

    Raises
    ------
    ValueError
        If it is a folder, lies in none, or is one of the inputs.
    """
    path = Path(out)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file to write")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to write {path.name} in: make it first")
    if path.exists() and any(path.samefile(file) for file in inputs):
        raise ValueError(
            f"{path} is being read and cannot be written at the same time: give OUT another name"
        )
    return path
