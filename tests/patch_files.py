"""Safetensors files written and read by hand for the tests of patches: an independent view of the format."""

import json
import struct
from pathlib import Path

import numpy as np

#: Bits of one number, by code.
WIDTHS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

Tensor = tuple[str, tuple[int, ...], bytes]  # number format, shape, bytes


def size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; an AssertionError if they are not whole."""
    bits = WIDTHS[dtype] * int(np.prod(shape, dtype=np.int64))
    assert bits % 8 == 0
    return bits // 8


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Write a file."""
    header, data = {"__metadata__": metadata or {"format": "pt"}}, b""
    for name, (dtype, shape, raw) in tensors.items():
        assert len(raw) == size(dtype, shape), (name, dtype, shape)
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def load(path: Path) -> dict[str, Tensor]:
    """Read a file."""
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            e["dtype"],
            tuple(e["shape"]),
            raw[start + e["data_offsets"][0] : start + e["data_offsets"][1]],
        )
        for name, e in header.items()
    }


def bf16(values: np.ndarray) -> bytes:
    """Numbers as the upper halves of float32, rounded toward zero."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
