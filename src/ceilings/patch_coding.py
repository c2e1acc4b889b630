"""How the changed numbers of a tensor are coded: where they are, and what they became, both near their entropy.

The codec is DEFLATE (RFC 1951), as ``zlib`` has it: in every Python, on every platform, and readable without this
library. What is ours is only what it is fed. Positions become gaps, each cut into a byte, which the codec shortens to
its entropy, and low bits, which are as good as random. Values become the step from the old bit pattern to the new one.
Where all numbers by themselves take less, as where a fine-tune is constant, they are stored instead.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ceilings.patch_bytes import Reader, byte_entropy, number
from ceilings.patch_numbers import (
    Words,
    code_numbers,
    code_positions,
    code_words,
    decode_numbers,
    decode_positions,
    decode_words,
    symbols_of,
)

__all__ = [
    "CHUNK",
    "MODES",
    "WHOLE",
    "Changes",
    "Stretch",
    "changes",
    "code_changes",
    "code_stretch",
    "decode_changes",
    "entropy_bits",
    "new_words",
]

#: Numbers that are coded at once: enough for the codec's own tables to weigh nothing, few enough for the memory.
CHUNK: Final = 2**22
#: What is stored of a changed number: its new bits, the bits that flipped, or the difference of the bit patterns.
MODES: Final = ("bits", "xor", "step")

#: Not the changes but all numbers of a stretch are stored, where that is shorter.
WHOLE: Final = "whole"


@dataclass(frozen=True)
class Changes:
    """Changed numbers of one stretch of a tensor.

    Parameters
    ----------
    mode
        One of `MODES`, or `WHOLE`: then the positions are all there are, and what did not change is among them.
    positions
        Where they are, ascending.
    values
        What is stored of each, as unsigned integers.
    """

    mode: str
    positions: NDArray[np.int64]
    values: Words


class Stretch(NamedTuple):
    """One coded stretch of a tensor: its changes, or all of it.

    Parameters
    ----------
    changed
        Numbers that changed.
    positions, values
        Coded changes; both empty where all numbers are stored.
    whole
        All numbers coded by themselves; empty where the changes are stored.
    alone
        Bytes that all numbers take by themselves, whichever was stored.
    """

    changed: int
    positions: bytes
    values: bytes
    whole: bytes
    alone: int


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
    if found.mode in ("bits", WHOLE):
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
    where = number(len(found.positions)) + code_positions(found.positions, size)
    body = code_words(found.values) if found.mode == "bits" else code_numbers(found.values)
    return where, bytes([MODES.index(found.mode)]) + body + _check(found)


def code_stretch(old: Words, new: Words) -> Stretch:
    """Stretch of a tensor, by its changes or whole, whichever is shorter.

    Parameters
    ----------
    old, new
        Bit patterns before and after.

    Returns
    -------
    Stretch
        Never longer than all numbers by themselves and, in front and behind, their number and a check sum.
    """
    found = changes(old, new)
    where, which = code_changes(found, len(new))
    alone = code_words(new)
    # NOTE one change more than there are numbers says: here they all are.
    whole = number(len(new) + 1) + alone + _check(_all(new))
    if len(whole) < len(where) + len(which):
        return Stretch(len(found.positions), b"", b"", whole, len(alone))
    return Stretch(len(found.positions), where, which, b"", len(alone))


def decode_changes(reader: Reader, size: int, width: int) -> Changes:
    """Changes as `code_changes` coded them, or all numbers of a stretch as `code_stretch` did.

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
    count = reader.number()
    if count == size + 1:
        found = _all(decode_words(reader, size, width))
    else:
        positions = decode_positions(reader, count, size)
        code = reader.take(1)[0]
        if code >= len(MODES):
            raise ValueError("the way in which values are stored is unknown")
        decode = decode_words if MODES[code] == "bits" else decode_numbers
        found = Changes(MODES[code], positions, decode(reader, count, width))
    if bytes(reader.take(4)) != _check(found):
        raise ValueError("the check sum of a stretch is wrong")
    return found


def _all(words: Words) -> Changes:
    """Every number of a stretch as if it had changed."""
    return Changes(WHOLE, np.arange(len(words), dtype=np.int64), words)


def _fold(steps: Words) -> Words:
    """Steps in either direction as numbers: 0, −1, 1, −2, … become 0, 1, 2, 3 and so on."""
    sign = steps >> (8 * steps.dtype.itemsize - 1)
    return (steps << 1) ^ (0 - sign).astype(steps.dtype)


def _unfold(folded: Words) -> Words:
    """The steps."""
    return (folded >> 1) ^ (0 - (folded & 1)).astype(folded.dtype)


def _cost(mode: str, values: Words) -> float:
    """Bits that values are expected to take."""
    if mode == "bits":
        planes = values.view(np.uint8).reshape(len(values), values.dtype.itemsize).T
        return sum(byte_entropy(plane) for plane in planes)
    symbols, low = symbols_of(values)
    return byte_entropy(symbols) + float(low.sum())


def _check(found: Changes) -> bytes:
    """Check sum of changes."""
    total = zlib.crc32(found.values.tobytes(), zlib.crc32(found.positions.astype("<i8").tobytes()))
    return total.to_bytes(4, "little")
