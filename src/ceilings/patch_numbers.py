"""Positions and numbers of a stretch as bytes: gaps, small numbers, and bit patterns place by place."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ceilings.patch_bytes import Reader, block, number, pack, unpack

__all__ = [
    "Words",
    "code_numbers",
    "code_positions",
    "code_words",
    "decode_numbers",
    "decode_positions",
    "decode_words",
    "symbols_of",
    "words_of",
]

#: Bit patterns of numbers, as unsigned integers.
Words = NDArray[Any]

_DIRECT: Final = (
    192  # values below are bytes of their own, larger ones a byte for their length and their low bits
)
_ESCAPE: Final = 15
_SHORT: Final = 128  # gaps of this mean fit into a byte
_TOP: Final = 255  # the byte that says: the gap goes on
_POWERS: Final = np.array([2**k for k in range(8, 64)], dtype=np.uint64)


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


def code_positions(positions: NDArray[np.int64], size: int) -> bytes:
    """Gaps between positions, or between the others if these are fewer.

    Parameters
    ----------
    positions
        Ascending.
    size
        Numbers of the stretch in which they lie.

    Returns
    -------
    bytes
        What `decode_positions` reads; not how many positions there are.
    """
    count = len(positions)
    if count in (0, size):
        return b""
    if 2 * count > size:
        unchanged = np.ones(size, bool)
        unchanged[positions] = False
        positions = np.flatnonzero(unchanged)
    gaps = np.diff(positions, prepend=-1) - 1
    low = _low_bits(size, len(positions))
    runs, rest = np.divmod(gaps >> low, _TOP)
    symbols = np.full(int(runs.sum()) + len(gaps), _TOP, np.uint8)
    symbols[np.cumsum(runs + 1) - 1] = rest
    return number(len(symbols)) + block(symbols.tobytes()) + block(pack(gaps, low))


def decode_positions(reader: Reader, count: int, size: int) -> NDArray[np.int64]:
    """Positions as `code_positions` coded them.

    Parameters
    ----------
    reader
        Where they stand, behind their number.
    count
        Their number.
    size
        Numbers of the stretch.

    Returns
    -------
    array
        The positions, ascending.

    Raises
    ------
    ValueError
        If the bytes are damaged.
    """
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


def symbols_of(values: Words) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Byte of each value, and the number of low bits that it does not tell.

    Parameters
    ----------
    values
        Unsigned integers.

    Returns
    -------
    tuple
        The bytes, and the numbers of bits.
    """
    low = np.searchsorted(_POWERS, values.astype(np.uint64), side="right") + 7
    low[values < _DIRECT] = 0
    return np.where(low == 0, values, _DIRECT + low - 7).astype(np.uint8), low


def code_numbers(values: Words) -> bytes:
    """Numbers of which small ones are frequent.

    Parameters
    ----------
    values
        Unsigned integers.

    Returns
    -------
    bytes
        What `decode_numbers` reads.
    """
    symbols, low = symbols_of(values)
    small = np.minimum(symbols, _ESCAPE)
    pairs = np.append(small, np.zeros(len(small) % 2, np.uint8)).reshape(-1, 2)
    both = block((pairs[:, 0] << 4 | pairs[:, 1]).tobytes()) + block(symbols[symbols >= _ESCAPE].tobytes())
    # NOTE two to a byte: a code of whole bits loses up to one bit a byte, most where one symbol is frequent.
    parts = [min(b"\1" + both, b"\0" + block(symbols.tobytes()), key=len)]
    parts += [
        pack(values[low == bits].astype(np.uint64), bits) for bits in range(7, 64) if (low == bits).any()
    ]
    return b"".join(parts)


def decode_numbers(reader: Reader, count: int, width: int) -> Words:
    """Numbers as `code_numbers` coded them.

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
