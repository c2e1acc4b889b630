"""Which tensor of one checkpoint is which of the other: by exact names, never by resemblance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from ceilings.safetensors_file import TensorInfo
from ceilings.ties import is_vocabulary

__all__ = ["WRAPPERS", "Matching", "Pair", "Source", "match"]

#: Prefixes that wrappers put in front of every name; they are taken off both sides, as often as they occur.
WRAPPERS: Final = ("base_model.model.", "_orig_mod.", "module.", "model.")
_SHOWN: Final = 3


class Source(Protocol):
    """What has named tensors: a checkpoint, or an adapter on top of one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names, each storage once."""

    @property
    def ties(self) -> dict[str, str]:
        """Stored name by other name."""

    def info(self, name: str) -> TensorInfo:
        """Number format and shape of a tensor."""

    def tensor(self, name: str) -> Tensor:
        """One tensor."""


@dataclass(frozen=True)
class Pair:
    """Two tensors that are one parameter.

    Parameters
    ----------
    name
        Name in the base.
    tuned_name
        Name in the tuned checkpoint.
    shape
        Shape of what both have.
    added_rows, removed_rows
        Rows that only the tuned checkpoint, or only the base has: a vocabulary that grew or shrank.
    """

    name: str
    tuned_name: str
    shape: tuple[int, ...]
    added_rows: int = 0
    removed_rows: int = 0

    @property
    def parameters(self) -> int:
        """Number of entries that are compared."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Matching:
    """All pairs, and what has no partner.

    Parameters
    ----------
    pairs
        Pairs in the order of the base.
    added
        Names that only the tuned checkpoint has.
    removed
        Names that only the base has.
    other_shape
        Names that both have in shapes that cannot be compared, with the shapes.
    renamed
        Number of pairs that match only without the prefixes of wrappers.
    coverage
        Share of the base's parameters that are compared; 1 means all.
    notes
        What a reader should know about ties.
    """

    pairs: tuple[Pair, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    other_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    renamed: int
    coverage: float
    notes: tuple[str, ...]

    def check(self, least: float, where: str) -> None:
        """Refuse a matching that leaves too much of the base out.

        Parameters
        ----------
        least
            Least coverage.
        where
            What was matched, for the message.

        Raises
        ------
        ValueError
            If the coverage is lower.
        """
        if self.coverage >= least:
            return
        lost = [*self.removed, *self.other_shape]
        shown = ", ".join(repr(name) for name in lost[:_SHOWN]) + (", …" if len(lost) > _SHOWN else "")
        beside = f"; {self.added[0]!r} is only in TUNED" if self.added else ""
        raise ValueError(
            f"{where}: only {100 * self.coverage:.4g} % of the base's parameters have a partner of the same name and "
            f"shape, {least:.4g} of them are asked for; without one are {shown or 'rows of the vocabulary'}{beside}: "
            "give two checkpoints of one model, or lower --min-coverage"
        )


def match(base: Source, tuned: Source) -> Matching:
    """Match the tensors of two checkpoints.

    Parameters
    ----------
    base, tuned
        The checkpoints.

    Returns
    -------
    Matching
        The pairs; nothing is decided by resemblance.

    Raises
    ------
    ValueError
        If two names of one checkpoint become one without their prefixes.

    Notes
    -----
    Exact names first, ties included; then names without the prefixes of `WRAPPERS`. Rows may differ in number only
    where they are the tokens of a vocabulary: there the leading rows that both have are compared.
    """
    partners = _partners(base, tuned)
    pairs, other_shape, covered, total = [], {}, 0, 0
    for name in base.names:
        shape = base.info(name).shape
        total += math.prod(shape)
        if name not in partners:
            continue
        pair = _pair(name, shape, partners[name], tuned.info(partners[name]).shape)
        if pair is None:
            other_shape[name] = (shape, tuned.info(partners[name]).shape)
        else:
            pairs.append(pair)
            covered += pair.parameters
    if not pairs:
        raise ValueError(
            "the two checkpoints share no tensor of the same name and shape: give two of one model "
            f"(BASE begins with {base.names[0]!r}, TUNED with {tuned.names[0]!r})"
        )
    used = {tuned.ties.get(name, name) for name in partners.values()}
    added = tuple(name for name in tuned.names if name not in used)
    return Matching(
        tuple(pairs),
        added,
        tuple(name for name in base.names if name not in partners),
        other_shape,
        sum(pair.name != pair.tuned_name for pair in pairs),
        covered / total,
        _tie_notes(base, tuned, pairs, added),
    )


def _partners(base: Source, tuned: Source) -> dict[str, str]:
    """Name in the tuned checkpoint by name in the base."""
    offered = {*tuned.names, *tuned.ties}
    partners = {name: name for name in base.names if name in offered}
    taken = {*partners.values(), *base.ties}
    left = [name for name in base.names if name not in partners]
    bare = _bare((name for name in offered if name not in taken), "TUNED")
    for short, name in _bare(left, "BASE").items():
        if short in bare:
            partners[name] = bare[short]
    return partners


def _bare(names: Iterable[str], side: str) -> dict[str, str]:
    """Names by what remains of them without wrappers."""
    found: dict[str, str] = {}
    for name in sorted(names):
        short = name
        while any(short.startswith(prefix) for prefix in WRAPPERS):
            short = next(short.removeprefix(p) for p in WRAPPERS if short.startswith(p))
        if short in found:
            raise ValueError(
                f"{side}: {found[short]!r} and {name!r} have the same name without the prefixes of wrappers: rename "
                "one of them"
            )
        found[short] = name
    return found


def _pair(name: str, base: tuple[int, ...], tuned_name: str, tuned: tuple[int, ...]) -> Pair | None:
    """A pair, or None where the shapes do not go together."""
    if base == tuned:
        return Pair(name, tuned_name, base)
    if not base or len(base) != len(tuned) or base[1:] != tuned[1:] or not is_vocabulary(name):
        return None
    rows = min(base[0], tuned[0])
    return Pair(name, tuned_name, (rows, *base[1:]), tuned[0] - rows, base[0] - rows)


def _tie_notes(base: Source, tuned: Source, pairs: list[Pair], added: tuple[str, ...]) -> tuple[str, ...]:
    """What ties on one side only mean for the comparison."""
    notes = [
        f"{other} is tied to {kept} in BASE and a matrix of its own in TUNED; it is listed as added and not compared"
        for other, kept in base.ties.items()
        if other in added
    ]
    partners = Counter(tuned.ties.get(pair.tuned_name, pair.tuned_name) for pair in pairs)
    notes += [
        f"{name} of TUNED is compared with {count} tensors of BASE, which TUNED ties to it"
        for name, count in partners.items()
        if count > 1
    ]
    return tuple(notes)
