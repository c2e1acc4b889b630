"""Bytes under a codec that will be readable for long: DEFLATE, plain bits, and numbers of variable length."""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Reader", "block", "byte_entropy", "number", "pack", "unpack"]

_SAMPLE: Final = 2**15
_PLAIN, _DEFLATED, _NARROW = range(3)


class Reader:
    """Bytes that are taken from the front.

    Parameters
    ----------
    data
        The bytes.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = memoryview(data), 0

    def take(self, count: int) -> memoryview:
        """The next bytes; a ValueError if there are fewer."""
        if count > len(self._data) - self._at:
            raise ValueError("the coded bytes end too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self) -> int:
        """The next number, as `number` wrote it."""
        found = shift = 0
        while True:
            byte = self.take(1)[0]
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    def block(self, size: int) -> bytes:
        """The next bytes as `block` wrote them; ``size`` is their number before coding."""
        head = self.number()
        if head & 3 == _NARROW:
            return self._narrow(head >> 2, size)
        return self._plain(head, size)

    def _plain(self, head: int, size: int) -> bytes:
        """Bytes as they are or deflated."""
        if head & 3 not in (_PLAIN, _DEFLATED):
            raise ValueError("a way of coding that is unknown")
        data = self.take(head >> 2)
        if head & 3 == _PLAIN:
            plain = bytes(data)
        else:
            try:
                # NOTE the limit keeps a damaged file from filling the memory.
                plain = zlib.decompressobj(-15).decompress(data, size + 1)
            except zlib.error as error:
                raise ValueError(f"the coded bytes cannot be read ({error})") from error
        if len(plain) != size:
            raise ValueError(f"{len(plain)} bytes where {size} should be")
        return plain

    def _narrow(self, kinds: int, size: int) -> bytes:
        """Bytes of few kinds, of which each was packed into a few bits."""
        table = np.frombuffer(self.take(kinds), np.uint8)
        bits = _bits(kinds)
        chosen = (
            unpack(self._plain(self.number(), (size * bits + 7) // 8), size, bits)
            if bits
            else np.zeros(size, np.uint64)
        )
        if not kinds or (size and chosen.max() >= kinds):
            raise ValueError("a byte of a kind that is not listed")
        return table[chosen.astype(np.intp)].tobytes()


def number(value: int) -> bytes:
    """Whole number in as few bytes as it needs, seven bits a byte.

    Parameters
    ----------
    value
        At least 0.

    Returns
    -------
    bytes
        What `Reader.number` reads.
    """
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def byte_entropy(symbols: NDArray[np.uint8]) -> float:
    r"""Bits of bytes that are coded by their frequencies, :math:`-\sum_s n_s \log_2 (n_s / n)`.

    Parameters
    ----------
    symbols
        The bytes.

    Returns
    -------
    float
        The bits of all of them together.

    Units
    -----
    bits.
    """
    counts = np.bincount(symbols, minlength=256)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / max(1, len(symbols)))).sum())


def block(data: bytes) -> bytes:
    """Bytes in the shortest of a few ways, behind what is needed to read them.

    Parameters
    ----------
    data
        The bytes.

    Returns
    -------
    bytes
        What `Reader.block` reads.
    """
    kinds = np.flatnonzero(np.bincount(np.frombuffer(data, np.uint8), minlength=256))
    if data and len(kinds) <= 16:
        # NOTE a code of whole bits, with one for the end, wastes much on few kinds: several to a byte waste less.
        bits = _bits(len(kinds))
        packed = pack(np.searchsorted(kinds, np.frombuffer(data, np.uint8)), bits)
        rest = _plain_block(packed) if bits else b""
        narrow = number(4 * len(kinds) + _NARROW) + kinds.astype(np.uint8).tobytes() + rest
        return min(narrow, _plain_block(data), key=len)
    return _plain_block(data)


def _bits(kinds: int) -> int:
    """Bits, a divisor of 8, that tell so many kinds apart."""
    return 0 if kinds <= 1 else 1 if kinds == 2 else 2 if kinds <= 4 else 4


def _plain_block(data: bytes) -> bytes:
    """Bytes as they are, or deflated by frequency alone, or by repetition too."""
    best = min(data, _deflate(data, zlib.Z_HUFFMAN_ONLY), key=len)
    # NOTE looking for repetitions is slow where there are none, as in most masks: a sample says whether to look.
    third = len(data) // 3
    sample = data if len(data) <= 4 * _SAMPLE else b"".join(data[k * third :][:_SAMPLE] for k in range(3))
    if 50 * len(_deflate(sample)) < 49 * min(len(sample), len(_deflate(sample, zlib.Z_HUFFMAN_ONLY))):
        best = min(best, _deflate(data), key=len)
    return number(4 * len(best) + (_PLAIN if best is data else _DEFLATED)) + best


def _deflate(data: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    """Raw DEFLATE stream."""
    codec = zlib.compressobj(6, zlib.DEFLATED, -15, 9, strategy)
    return codec.compress(data) + codec.flush()


def pack(values: NDArray[Any], bits: int) -> bytes:
    """The low bits of each value, one after the other.

    Parameters
    ----------
    values
        Whole numbers.
    bits
        How many bits of each.

    Returns
    -------
    bytes
        What `unpack` reads.
    """
    table = np.empty((len(values), bits), np.uint8)
    for k in range(bits):
        table[:, k] = (values >> k) & 1
    return np.packbits(table).tobytes()


def unpack(packed: bytes | memoryview, count: int, bits: int) -> NDArray[np.uint64]:
    """Values as `pack` packed them.

    Parameters
    ----------
    packed
        The bytes.
    count
        How many values there are.
    bits
        How many bits of each.

    Returns
    -------
    array
        The values.
    """
    table = np.unpackbits(np.frombuffer(packed, np.uint8), count=count * bits).reshape(count, bits)
    values = np.zeros(count, np.uint64)
    for k in range(bits):
        values |= table[:, k].astype(np.uint64) << np.uint64(k)
    return values
