"""One safetensors file: its header checked to the last byte, its tensors mapped rather than read.

The header is parsed here and not by the library `safetensors`, for three reasons: a damaged file is named with the
tensor that it lacks, every number format of the standard can be handed on byte by byte, and nothing is copied.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["BITS", "TORCH_DTYPES", "SafetensorsFile", "TensorInfo", "dtype_code"]

#: Bits of one number in each number format of the standard.
BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
#: PyTorch's name of each format that it can hold one number an element.
TORCH_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_CODES: Final = {dtype: code for code, dtype in TORCH_DTYPES.items()}
_LONGEST_HEADER: Final = 100_000_000  # the standard's own limit
_LFS: Final = b"version https://git-lfs"


class TensorInfo(NamedTuple):
    """What a file says of one tensor.

    Parameters
    ----------
    dtype
        Number format by its safetensors code; of a quantised GGUF tensor, that to which it is de-quantised.
    shape
        Its shape.
    file
        The file that holds it.
    stored
        Name of the block format of a quantised GGUF tensor, otherwise empty.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    stored: str = ""


class _Entry(NamedTuple):
    """Where a tensor lies, in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def dtype_code(dtype: torch.dtype) -> str:
    """Code that safetensors files use for a number format of PyTorch.

    Parameters
    ----------
    dtype
        The format.

    Returns
    -------
    str
        Such as ``BF16``.

    Raises
    ------
    ValueError
        If the standard has none.
    """
    if dtype not in _CODES:
        raise ValueError(f"{dtype} has no safetensors code: store the tensor in another number format")
    return _CODES[dtype]


@dataclass(frozen=True)
class SafetensorsFile:
    """Header of a file that was found whole, and access to what it describes.

    Parameters
    ----------
    path
        The file.
    entries
        Number format, shape and place by name, in the order of the file.
    metadata
        Free text by key, as the writer left it.
    ties
        Other names of stored tensors: none, a file of this format cannot say so.
    notes
        What a reader should know: nothing.
    """

    path: Path
    entries: dict[str, _Entry]
    metadata: dict[str, str]
    ties: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read and check the header.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        SafetensorsFile
            The file; nothing but its header was read.

        Raises
        ------
        ValueError
            If it is no safetensors file, or is not whole.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(32)
            if head.startswith(_LFS):
                raise ValueError(
                    f"{path} is a pointer of Git LFS and not the weights: fetch them with git lfs pull"
                )
            length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
            if not 2 <= length <= _LONGEST_HEADER or head[8:9] != b"{":
                raise ValueError(f"{path} is no safetensors file: {_what_else(head)}")
            if 8 + length > size:
                raise ValueError(
                    f"{path} is truncated inside its header ({size} of at least {8 + length} bytes): copy it again"
                )
            file.seek(8)
            header = _parse(path, file.read(length))
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(path, name, described, 8 + length) for name, described in header.items()}
        _check_layout(path, entries, 8 + length, size)
        return cls(path, dict(sorted(entries.items(), key=lambda item: item[1].start)), metadata)

    @cached_property
    def _map(self) -> mmap.mmap:
        """The file in memory, page by page as it is touched; pages belong to the system's cache, not to us."""
        with self.path.open("rb") as file:
            if not hasattr(mmap, "MAP_NORESERVE"):
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # NOTE writable because PyTorch asks for that, private so that nothing reaches the file, and without a
            # reservation: otherwise a file larger than the memory could not be mapped.
            return mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | mmap.MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )

    def infos(self) -> dict[str, TensorInfo]:
        """Number format and shape of every tensor.

        Returns
        -------
        dict
            By name.
        """
        return {name: TensorInfo(e.dtype, e.shape, self.path) for name, e in self.entries.items()}

    def raw(self, name: str) -> memoryview:
        """Stored bytes of a tensor.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        memoryview
            Little endian, row by row; a view of the file that cannot be written to.
        """
        entry = self.entries[name]
        return memoryview(self._map)[entry.start : entry.end].toreadonly()

    def tensor(self, name: str) -> Tensor:
        """Tensor as it is stored.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        Tensor
            A view of the file in the stored number format; writing to it changes no file.

        Raises
        ------
        ValueError
            If PyTorch cannot hold the format.
        """
        entry = self.entries[name]
        if entry.dtype not in TORCH_DTYPES:
            raise ValueError(
                f"{self.path}: {name!r} is stored as {entry.dtype}, several numbers to a byte, which PyTorch cannot "
                "compute with: de-quantise the checkpoint first"
            )
        dtype = TORCH_DTYPES[entry.dtype]
        buffer: Any = self._map
        offset = entry.start
        if entry.start % dtype.itemsize:  # a writer that did not align its tensors
            buffer, offset = bytearray(self.raw(name)), 0
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(entry.shape), offset=offset)
        return flat.reshape(entry.shape)


def _what_else(head: bytes) -> str:
    """What a file with these first bytes is instead, and what to do."""
    if not head:
        return "it is empty, copy it again"
    if head.startswith(b"PK") or head.startswith(b"\x80"):
        return "it looks like one of torch.save, give it the ending .bin or .pt"
    if head.startswith(b"GGUF"):
        return "it is a GGUF file, give it the ending .gguf"
    if head.lstrip().startswith(b"<"):
        return "it looks like a web page that was downloaded in its place, fetch it again"
    return "it does not begin with a header, give a file that safetensors wrote"


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """Header as a dictionary."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands in it twice")
        return found

    try:
        header = json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        raise ValueError(
            f"{path} is no safetensors file, its header cannot be read ({error}): copy it again"
        ) from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no safetensors file, its header is no table of tensors: copy it again")
    return header


def _entry(path: Path, name: str, described: Any, base: int) -> _Entry:
    """Description of one tensor, checked."""
    try:
        dtype = described["dtype"]
        shape = tuple(int(n) for n in described["shape"])
        start, end = (int(n) for n in described["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            f"{path}: the header describes {name!r} in a way that the standard does not know: write it again"
        ) from None
    if dtype not in BITS:
        raise ValueError(
            f"{path}: {name!r} has the number format {dtype!r}, which is none of the standard's: convert it first"
        )
    bits = math.prod(shape) * BITS[dtype]
    if min(shape, default=0) < 0 or 8 * (end - start) != bits:
        raise ValueError(
            f"{path}: {name!r} of shape {list(shape)} in {dtype} takes {bits / 8:g} bytes and has {end - start}: "
            "the file is damaged, copy it again"
        )
    return _Entry(dtype, shape, base + start, base + end)


def _check_layout(path: Path, entries: dict[str, _Entry], base: int, size: int) -> None:
    """Refuse a file with tensors that overlap, leave holes, or go past its end."""
    at = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise ValueError(
                f"{path}: {name!r} does not begin where the tensor before it ends: the file is damaged, copy it again"
            )
        at = entry.end
        if at > size:
            raise ValueError(
                f"{path} is truncated: it has {size} bytes, and {name!r} ends at byte {at}: copy it again"
            )
    if at != size:
        raise ValueError(
            f"{path} has {size - at} bytes that its header does not describe: the file is damaged, copy it again"
        )
