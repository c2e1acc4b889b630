"""What a patch says of itself: of every tensor its number format, shape and digest, and how the patch gives it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ceilings.safetensors_file import BITS

__all__ = [
    "VERSION",
    "Described",
    "Manifest",
    "Tuned",
    "begin_digest",
    "digest_of",
    "end_digest",
    "pieces",
]

#: Written into each patch; a reader refuses what it does not know. In version 1 no stretch was stored whole.
VERSION: Final = 2
_READABLE: Final = (1, 2)
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
        Bytes that positions, values and what is stored whole take in the patch.
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
        Bytes of the whole result coded by itself, as a patch codes what the base does not have; None where nobody has
        seen the result. Of a patch of version 1, an estimate by byte entropies.
    version
        Version of the format.
    """

    base: dict[str, tuple[Described, str]]
    tuned: dict[str, Tuned]
    metadata: dict[str, str]
    compressed: int | None
    version: int = VERSION

    @property
    def base_digest(self) -> str:
        """Digest of the base as a whole."""
        lines = (f"{name}\0{digest}\n" for name, (_, digest) in sorted(self.base.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_json(self) -> str:
        """Text that `Manifest.from_json` reads, once its own digest has been compared."""
        return json.dumps(
            {
                "kind": _KIND,
                "version": self.version,
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
        if found["version"] not in _READABLE:
            known = " and ".join(map(str, _READABLE))
            raise ValueError(f"its format has the version {found['version']}, and {known} are known here")
        base = {n: (Described(d, tuple(shape)), digest) for n, (d, shape, digest) in found["base"].items()}
        tuned = {
            n: Tuned(base[n][0], n, base[n][0].size, 0, 0, 0, 0, base[n][1])
            if line == 0
            else Tuned(Described(line[0], tuple(line[1])), *line[2:])
            for n, line in found["tuned"].items()
        }
        return cls(base, tuned, found["metadata"], found["compressed"], found["version"])

    def _plain(self, name: str, tuned: Tuned) -> bool:
        """Whether a tensor is that of the base under its own name."""
        return tuned.kept and tuned.origin == name


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
