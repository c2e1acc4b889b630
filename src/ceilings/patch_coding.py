"""How the changed numbers of a tensor are coded: where they are, and what they became, both near their entropy.

The codec is DEFLATE (RFC 1951), as ``zlib`` has it: in every Python, on every platform, and readable without this
library. What is ours is only what it is fed. Positions become gaps, each cut into a byte, which the codec shortens to
its entropy, and low bits, which are as good as random. Values become the step from the old bit pattern to the new one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ceilings.patch_bytes import Reader, block, byte_entropy, number, pack, unpack

__all__ = [
    "CHUNK",
    "MODES",
    "Changes",
    "changes",
    "code_changes",
    "code_words",
    "decode_changes",
    "decode_words",
    "entropy_bits",
    "new_words",
    "words_of",
]

#: Numbers that are coded at once: enough for the codec's own tables to weigh nothing, few enough for the memory.
CHUNK: Final = 2**22
#: What is stored of a changed number: its new bits, the bits that flipped, or the difference of the bit patterns.
MODES: Final = ("bits", "xor", "step")

_DIRECT: Final = (
    192  # values below are bytes of their own, larger ones a byte for their length and their low bits
)
_ESCAPE: Final = 15
_SHORT: Final = 128  # gaps of this mean fit into a byte
_TOP: Final = 255  # the byte that says: the gap goes on
_POWERS: Final = np.array([2**k for k in range(8, 64)], dtype=np.uint64)

Words = NDArray[Any]


@dataclass(frozen=True)
class Changes:
    """Changed numbers of one stretch of a tensor.

    Parameters
    ----------
    mode
        One of `MODES`.
    positions
        Where they are, ascending.
    values
        What is stored of each, as unsigned integers.
    """

    mode: str
    positions: NDArray[np.int64]
    values: Words


def entropy_bits(size: int, count: int) -> float:
    r"""Bits that a set of positions costs at least, :math:`n H(d)`, when every set of that size is as likely.

    Parameters
    ----------
    size
        Number of positions, n.
    count
        How many of them changed, n·d.

    Returns
    -------
    float
        The bound, up to the few bits by which :math:`\log_2 \binom{n}{nd}` is smaller.

    Units
    -----
    bits.

    References
    ----------
    Claim ``prop-patch``.
    """
    if count in (0, size):
        return 0.0
    d = count / size
    return float(-size * (d * np.log2(d) + (1 - d) * np.log2(1 - d)))


def words_of(data: bytes | memoryview, width: int) -> Words:
    """Bytes as unsigned integers, little endian.

    Parameters
    ----------
    data
        Bytes of a tensor.
    width
        Bytes of one number: 1, 2, 4 or 8.

    Returns
    -------
    array
        One integer a number; nothing is copied.
    """
    return np.frombuffer(data, dtype=np.dtype(f"<u{width}"))


def changes(old: Words, new: Words) -> Changes:
    """Changed numbers of a stretch, stored in the way that codes smallest.

    Parameters
    ----------
    old, new
        Bit patterns before and after.

    Returns
    -------
    Changes
        Numbers whose bits differ; so −0 and +0 differ, and so do two kinds of NaN.
    """
    positions = np.flatnonzero(old != new)
    before, after = old[positions], new[positions]
    ways = {
        "step": _fold(after - before),
        "xor": after ^ before,
        "bits": after,
    }
    mode = min(ways, key=lambda way: _cost(way, ways[way]))
    return Changes(mode, positions, ways[mode])


def new_words(found: Changes, old: Words) -> Words:
    """New bits of the changed numbers.

    Parameters
    ----------
    found
        The changes.
    old
        All bit patterns of the stretch before.

    Returns
    -------
    array
        One integer a change.
    """
    if found.mode == "bits":
        return found.values
    before = old[found.positions]
    return before ^ found.values if found.mode == "xor" else before + _unfold(found.values)


def code_changes(found: Changes, size: int) -> tuple[bytes, bytes]:
    """Coded positions and values of a stretch.

    Parameters
    ----------
    found
        The changes.
    size
        Numbers of the stretch, changed or not.

    Returns
    -------
    tuple
        Bytes of the positions and of the values, to be stored one after the other.
    """
    where = _code_positions(found.positions, size)
    body = code_words(found.values) if found.mode == "bits" else _code_numbers(found.values)
    return where, bytes([MODES.index(found.mode)]) + body + _check(found)


def decode_changes(reader: Reader, size: int, width: int) -> Changes:
    """Changes as `code_changes` coded them.

    Parameters
    ----------
    reader
        Where they stand.
    size
        Numbers of the stretch.
    width
        Bytes of one number.

    Returns
    -------
    Changes
        The changes.

    Raises
    ------
    ValueError
        If the bytes are damaged.
    """
    positions = _decode_positions(reader, size)
    code = reader.take(1)[0]
    if code >= len(MODES):
        raise ValueError("the way in which values are stored is unknown")
    mode = MODES[code]
    values = (decode_words if mode == "bits" else _decode_numbers)(reader, len(positions), width)
    found = Changes(mode, positions, values)
    if bytes(reader.take(4)) != _check(found):
        raise ValueError("the check sum of a stretch is wrong")
    return found


def code_words(words: Words) -> bytes:
    """Numbers by themselves, byte by byte of equal place, each place coded alone.

    Parameters
    ----------
    words
        The numbers.

    Returns
    -------
    bytes
        What `decode_words` reads. Exponents of weights are alike and shrink, the last bits of a mantissa do not.
    """
    planes = words.view(np.uint8).reshape(len(words), words.dtype.itemsize)
    return b"".join(block(np.ascontiguousarray(plane).tobytes()) for plane in planes.T)


def decode_words(reader: Reader, count: int, width: int) -> Words:
    """Numbers as `code_words` coded them.

    Parameters
    ----------
    reader
        Where they stand.
    count
        How many there are.
    width
        Bytes of one number.

    Returns
    -------
    array
        The numbers.

    Raises
    ------
    ValueError
        If the bytes are damaged.
    """
    planes = np.empty((count, width), np.uint8)
    for place in range(width):
        planes[:, place] = np.frombuffer(reader.block(count), np.uint8)
    return words_of(planes.tobytes(), width)


def _code_positions(positions: NDArray[np.int64], size: int) -> bytes:
    """How many there are, and the gaps between them, or between the others if these are fewer."""
    count = len(positions)
    head = number(count)
    if count in (0, size):
        return head
    if 2 * count > size:
        unchanged = np.ones(size, bool)
        unchanged[positions] = False
        positions = np.flatnonzero(unchanged)
    gaps = np.diff(positions, prepend=-1) - 1
    low = _low_bits(size, len(positions))
    runs, rest = np.divmod(gaps >> low, _TOP)
    symbols = np.full(int(runs.sum()) + len(gaps), _TOP, np.uint8)
    symbols[np.cumsum(runs + 1) - 1] = rest
    return head + number(len(symbols)) + block(symbols.tobytes()) + block(pack(gaps, low))


def _decode_positions(reader: Reader, size: int) -> NDArray[np.int64]:
    """Positions as `_code_positions` coded them."""
    count = reader.number()
    if count > size:
        raise ValueError(f"{count} changes among {size} numbers")
    if count in (0, size):
        return np.arange(count, dtype=np.int64)
    listed = min(count, size - count)
    low = _low_bits(size, listed)
    length = reader.number()
    if length > listed + size // _TOP:
        raise ValueError("gaps longer than the tensor")
    symbols = np.frombuffer(reader.block(length), np.uint8).astype(np.int64)
    ends = np.flatnonzero(symbols != _TOP)
    if len(ends) != listed or (length and ends[-1] != length - 1):
        raise ValueError("gaps that do not end")
    high = np.diff(np.cumsum(symbols)[ends], prepend=0)
    positions = (
        np.cumsum(
            (high << low | unpack(reader.block((listed * low + 7) // 8), listed, low).astype(np.int64)) + 1
        )
        - 1
    )
    if positions[-1] >= size:
        raise ValueError("a position outside of the tensor")
    if 2 * count <= size:
        return positions
    changed = np.ones(size, bool)
    changed[positions] = False
    return np.flatnonzero(changed)


def _low_bits(size: int, count: int) -> int:
    """Bits of a gap that are as good as random, for gaps of about ``size / count``."""
    mean = size // count
    return 0 if mean < _SHORT else mean.bit_length() - 4


def _fold(steps: Words) -> Words:
    """Steps in either direction as numbers: 0, −1, 1, −2, … become 0, 1, 2, 3 and so on."""
    sign = steps >> (8 * steps.dtype.itemsize - 1)
    return (steps << 1) ^ (0 - sign).astype(steps.dtype)


def _unfold(folded: Words) -> Words:
    """The steps."""
    return (folded >> 1) ^ (0 - (folded & 1)).astype(folded.dtype)


def _symbols(values: Words) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Byte of each value, and the number of low bits that it does not tell."""
    low = np.searchsorted(_POWERS, values.astype(np.uint64), side="right") + 7
    low[values < _DIRECT] = 0
    return np.where(low == 0, values, _DIRECT + low - 7).astype(np.uint8), low


def _code_numbers(values: Words) -> bytes:
    """Numbers of which small ones are frequent."""
    symbols, low = _symbols(values)
    small = np.minimum(symbols, _ESCAPE)
    pairs = np.append(small, np.zeros(len(small) % 2, np.uint8)).reshape(-1, 2)
    both = block((pairs[:, 0] << 4 | pairs[:, 1]).tobytes()) + block(symbols[symbols >= _ESCAPE].tobytes())
    # NOTE two to a byte: a code of whole bits loses up to one bit a byte, most where one symbol is frequent.
    parts = [min(b"\1" + both, b"\0" + block(symbols.tobytes()), key=len)]
    parts += [
        pack(values[low == bits].astype(np.uint64), bits) for bits in range(7, 64) if (low == bits).any()
    ]
    return b"".join(parts)


def _decode_numbers(reader: Reader, count: int, width: int) -> Words:
    """Numbers as `_code_numbers` coded them."""
    symbols = _decode_symbols(reader, count)
    values = symbols.astype(np.uint64)
    for code in np.unique(symbols[symbols >= _DIRECT]):
        bits = int(code) - _DIRECT + 7
        if bits >= 8 * width:
            raise ValueError(f"a number of {bits + 1} bits among numbers of {8 * width}")
        chosen = symbols == code
        values[chosen] = unpack(
            reader.take((int(chosen.sum()) * bits + 7) // 8), int(chosen.sum()), bits
        ) | np.uint64(1 << bits)
    return values.astype(np.dtype(f"<u{width}"))


def _decode_symbols(reader: Reader, count: int) -> NDArray[np.uint8]:
    """Symbols one or two to a byte."""
    way = reader.take(1)[0]
    if way > 1:
        raise ValueError("a way of pairing that is unknown")
    if way == 0:
        return np.frombuffer(reader.block(count), np.uint8)
    pairs = np.frombuffer(reader.block((count + 1) // 2), np.uint8)
    symbols = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)[:count]
    large = symbols == _ESCAPE
    symbols[large] = np.frombuffer(reader.block(int(large.sum())), np.uint8)
    return symbols


def _cost(mode: str, values: Words) -> float:
    """Bits that values are expected to take."""
    if mode == "bits":
        planes = values.view(np.uint8).reshape(len(values), values.dtype.itemsize).T
        return sum(byte_entropy(plane) for plane in planes)
    symbols, low = _symbols(values)
    return byte_entropy(symbols) + float(low.sum())


def _check(found: Changes) -> bytes:
    """Check sum of changes."""
    total = zlib.crc32(found.values.tobytes(), zlib.crc32(found.positions.astype("<i8").tobytes()))
    return total.to_bytes(4, "little")
