"""Files that patches are made of and written to: checkpoints by their stored bytes, and files whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

from ceilings.checkpoints import open_checkpoint
from ceilings.patch_manifest import Described, Manifest
from ceilings.pytorch_file import ENDINGS, PytorchFile
from ceilings.safetensors_file import BITS, SafetensorsFile, TensorInfo

__all__ = [
    "PatchWriter",
    "Source",
    "in_order",
    "open_patch",
    "open_source",
    "target",
    "write_safetensors",
]

_PIECE: Final = 2**24


class _File(Protocol):
    """One file of a checkpoint, by the bytes of its tensors."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def metadata(self) -> dict[str, str]:
        """Free text."""

    @property
    def ties(self) -> dict[str, str]:
        """Other names of stored tensors."""

    def infos(self) -> dict[str, TensorInfo]:
        """What it holds."""

    def raw(self, name: str) -> memoryview:
        """Bytes of one tensor."""


@dataclass(frozen=True)
class Source:
    """A checkpoint by its stored bytes.

    Parameters
    ----------
    path
        What was opened.
    tensors
        Every stored tensor with its file, in the order of the files.
    metadata
        Free text; of files of ``torch.save`` the names that share a tensor, as `safetensors` writes them.
    """

    path: Path
    tensors: dict[str, tuple[Described, _File]]
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
            It cannot be written to.
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
        A ``.safetensors`` or ``torch.save`` file, or a Hugging Face folder or index of such files.

    Returns
    -------
    Source
        The checkpoint; of safetensors files only headers were read.

    Raises
    ------
    FileNotFoundError
        If there is nothing at ``path``, or a shard is missing.
    ValueError
        If it is no checkpoint, is damaged, or holds numbers that no safetensors file can hold as they are.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if path.is_file() and ending in (".safetensors", *ENDINGS):
        files = [_opened(path, ending == ".safetensors")]
        chosen = {name: path for name in files[0].infos()}
    else:
        checkpoint = None if ending == ".gguf" and path.is_file() else open_checkpoint(path)
        if checkpoint is None or checkpoint.kind == "gguf":
            raise ValueError(
                f"{path} is a GGUF file, whose blocks hold several numbers together, and a patch is made of single "
                "ones: save the de-quantised tensors that the trainer saw as safetensors, and give that file"
            )
        files = [_opened(file, checkpoint.kind == "safetensors") for file in checkpoint.files]
        chosen = {n: file.path for file in files for n in file.infos()}
        chosen |= {n: checkpoint.info(n).file for n in checkpoint.names}
    tensors = {
        name: (Described(info.dtype, info.shape), file)
        for file in files
        for name, info in file.infos().items()
        if chosen[name] == file.path
    }
    return Source(path, tensors, {k: v for file in files for k, v in _free_text(file).items()})


def _opened(path: Path, safe: bool) -> _File:
    """One file of a checkpoint."""
    return SafetensorsFile.open(path) if safe else PytorchFile.open(path)


def _free_text(file: _File) -> dict[str, str]:
    """Free text of a file; of one of ``torch.save``, what a loader of its tensors as safetensors has to know."""
    return {"format": "pt", **file.ties} if isinstance(file, PytorchFile) else file.metadata


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
        if file.metadata["ceilings_sha256"] != _sha256(file.metadata["ceilings"]):
            raise ValueError("what it says of itself is damaged")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is no patch that can be read here ({error}): make it again") from error
    missing = next((n for n, t in manifest.tuned.items() if not t.kept and n not in file.entries), None)
    if missing is not None:
        raise ValueError(f"{path} lacks the coded bytes of {missing!r}: make it again")
    return manifest, file


class PatchWriter:
    """Coded bytes that are collected on disk, because in the file their sizes come first.

    Parameters
    ----------
    out
        The patch to write.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._spool: IO[bytes] = tempfile.TemporaryFile(dir=out.parent)  # noqa: SIM115 (closed in __exit__)
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
        text = manifest.to_json()
        write_safetensors(self._out, tensors, {"ceilings": text, "ceilings_sha256": _sha256(text)}, data)


def _sha256(text: str) -> str:
    """Digest of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


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
