"""Two checkpoints, tensor by tensor: how much changed, how far, where, and in how many directions.

One pass counts and sums; a second finds the cuts of the largest changes exactly, where the first did not; a third
compares several fine-tunes.
Tensors are worked on by several threads, each in small blocks; nothing is concatenated.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from ceilings.delta_scan import (
    blocks,
    changed,
    coarser,
    cut_to,
    difference,
    differs,
    positions,
    scan,
    size_patterns,
)
from ceilings.matching import Matching, Pair, Source
from ceilings.overlaps import Cut, CutFinder, OverlapCounts
from ceilings.places import place
from ceilings.spectrum import DIRECTIONS, Spectrum, random_share, random_stable_rank, spectrum
from ceilings.tally import GRIDS, Tally

__all__ = ["SHARES", "Diff", "Group", "TensorDiff", "compare", "count_overlap", "default_threads"]

#: Sizes of the sets of the largest changes, as shares of all entries.
SHARES: Final = (0.001, 0.01, 0.1)
_GROUP_SUMS: Final = ("tally", "matrices", "energy", "weighted_rank", "weighted_random_rank", "ranked")
_INTEGERS: Final = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")

Progress = Callable[[str, int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Group:
    """Sums over the tensors of a layer, of a kind, or of all.

    Parameters
    ----------
    tally
        Counts and sums.
    matrices
        Changed matrices whose spectrum was taken.
    energy, top, top_error, random_top
        Their squared changes: in all, in the leading directions, what the latter may lack, and what random changes
        of the same shapes and energies would have there.
    weighted_rank, weighted_random_rank, ranked
        Sums of stable rank, and of that of a random matrix, weighted by parameters; sum of the weights.
    """

    tally: Tally = field(default_factory=Tally)
    matrices: int = 0
    energy: float = 0.0
    top: dict[int, float] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0.0))
    top_error: dict[int, float] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0.0))
    random_top: dict[int, float] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0.0))
    weighted_rank: float = 0.0
    weighted_random_rank: float = 0.0
    ranked: int = 0

    def add(self, tally: Tally, found: Spectrum | None, shape: tuple[int, ...]) -> None:
        """Add a tensor.

        Parameters
        ----------
        tally
            Its counts.
        found
            Its spectrum; None if it is no matrix, or nothing changed.
        shape
            Its shape.
        """
        self.tally += tally
        if found is None:
            return
        rows, columns = shape
        self.matrices += 1
        self.energy += found.energy
        for k in DIRECTIONS:
            self.top[k] += found.top[k]
            self.top_error[k] += found.error[k]
            self.random_top[k] += found.energy * random_share(rows, columns, k)
        self.ranked += tally.parameters
        self.weighted_rank += tally.parameters * found.stable_rank
        self.weighted_random_rank += tally.parameters * random_stable_rank(rows, columns)

    def __iadd__(self, other: Group) -> Group:
        for name in _GROUP_SUMS:
            total = getattr(self, name)
            total += getattr(other, name)
            setattr(self, name, total)
        for table, more in zip(self._by_directions(), other._by_directions(), strict=True):
            for k in DIRECTIONS:
                table[k] += more[k]
        return self

    def _by_directions(self) -> tuple[dict[int, float], ...]:
        return self.top, self.top_error, self.random_top


@dataclass(frozen=True)
class TensorDiff:
    """One tensor of two checkpoints.

    Parameters
    ----------
    pair
        Its names and shape.
    dtypes
        Number format in the base, in the tuned checkpoint, and in the comparison.
    layer, kind
        Where it sits.
    tally
        Counts and sums.
    spectrum
        Leading singular values of its change; None if it is no matrix, nothing changed, or nobody asked.
    """

    pair: Pair
    dtypes: tuple[str, str, str]
    layer: int | None
    kind: str
    tally: Tally
    spectrum: Spectrum | None


@dataclass
class Diff:
    """Two checkpoints.

    Parameters
    ----------
    tensors
        Every compared tensor, in the order of the base; the bins of its tally are dropped once they are summed.
    entries
        What a report says of each tensor from the bins, in the same order.
    total, kinds, layers
        Sums; the layer None holds what is outside of the layers.
    cuts
        Cut of each set of the largest changes, by share.
    top_energy
        Share of the squared change that each of these sets holds.
    integers
        Tensors that are no floating numbers: how many of their entries differ.
    """

    tensors: list[TensorDiff] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    total: Group = field(default_factory=Group)
    kinds: dict[str, Group] = field(default_factory=dict)
    layers: dict[int | None, Group] = field(default_factory=dict)
    cuts: dict[float, Cut] = field(default_factory=dict)
    top_energy: dict[float, float] = field(default_factory=dict)
    integers: dict[str, int] = field(default_factory=dict)


def default_threads() -> int:
    """Number of tensors to work on at once.

    Returns
    -------
    int
        Cores that this process may use, at most 8.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


def compare(
    base: Source,
    tuned: Source,
    matching: Matching,
    *,
    dtype: str | None = None,
    rank: bool = True,
    threads: int = 1,
    describe: Callable[[Tally], dict[str, Any]] = lambda tally: {},
    progress: Progress = lambda what, done, total: None,
) -> Diff:
    """Compare two checkpoints.

    Parameters
    ----------
    base, tuned
        The checkpoints.
    matching
        Which tensors are which.
    dtype
        Number format in which to compare; None takes, tensor by tensor, the coarser of the two that are stored.
    rank
        Whether to take singular values, which costs more than all the rest.
    threads
        Tensors to work on at once.
    describe
        What to keep of the bins of each tensor's tally; they are too large to be kept for all.
    progress
        Told what is being done, how many tensors are done, and of how many.

    Returns
    -------
    Diff
        Everything that was counted.

    Raises
    ------
    ValueError
        If a tensor is in a number format that cannot be compared.
    """
    diff = Diff()
    compared = {pair.name: _formats(base, tuned, pair, dtype) for pair in matching.pairs}
    floats = [pair for pair in matching.pairs if compared[pair.name][2] in GRIDS]
    for pair in matching.pairs:
        if compared[pair.name][2] not in GRIDS:
            a, b = _pair_tensors(base, tuned, pair)
            diff.integers[pair.name] = int((a.long() != b.long()).count_nonzero())
    if not floats:
        raise ValueError(
            "no tensor with floating numbers is in both checkpoints: give two checkpoints of a model"
        )

    def work(pair: Pair) -> tuple[TensorDiff, dict[str, Any]]:
        tensor = _tensor(base, tuned, pair, compared[pair.name], rank)
        return tensor, describe(tensor.tally)

    found: dict[str, tuple[TensorDiff, dict[str, Any]]] = {}
    # The largest first: no thread is left alone with one at the end.
    order = sorted(floats, key=lambda pair: (-pair.parameters, pair.name))
    for done, (tensor, entry) in enumerate(_threaded(work, order, threads)):
        _sum_up(diff, tensor)
        found[tensor.pair.name] = _light(tensor), entry
        progress("comparing", done + 1, len(order))
    for pair in floats:
        tensor, entry = found[pair.name]
        diff.tensors.append(tensor)
        diff.entries.append(entry)
    diff.kinds = {tensor.kind: diff.kinds[tensor.kind] for tensor in diff.tensors}
    for group in diff.kinds.values():
        diff.total += group
    finders = _finders(diff.total.tally)

    def count(pair: Pair) -> list[CutFinder]:
        return _count_sizes(base, tuned, pair, compared[pair.name][2], finders)

    # NOTE changes of 16-bit numbers tie in masses; the cut then lies among equal ones and nothing is read again.
    again = [] if all(finder.settled for finder in finders) else order
    for done, counted in enumerate(_threaded(count, again, threads)):
        for finder, more in zip(finders, counted, strict=True):
            finder += more
        progress("ordering", done + 1, len(order))
    _take_cuts(diff, finders)
    return diff


def count_overlap(
    base: Source,
    tuned: Sequence[Source],
    diffs: Sequence[Diff],
    *,
    threads: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> dict[tuple[int, int], OverlapCounts]:
    """Count what several fine-tunes of one base have in common.

    Parameters
    ----------
    base
        The base.
    tuned
        The fine-tunes.
    diffs
        What `compare` found for each.
    threads
        Tensors to work on at once.
    progress
        Told what is being done, how many tensors are done, and of how many.

    Returns
    -------
    dict
        Counts for each pair of fine-tunes, over the entries that both share with the base. The sides are those of
        the cut of the top 1 %; of members that only one of the two could have, the other has none.
    """
    tables = [{t.pair.name: t for t in diff.tensors} for diff in diffs]
    cuts = [diff.cuts[0.01] for diff in diffs]
    names = [n for n in base.names if sum(n in table for table in tables) > 1]

    def work(name: str) -> dict[tuple[int, int], OverlapCounts]:
        return _overlap_of_tensor(base, tuned, name, [table.get(name) for table in tables], cuts)

    totals = {(i, j): OverlapCounts() for j in range(len(diffs)) for i in range(j)}
    for done, counted in enumerate(_threaded(work, names, threads)):
        for which, counts in counted.items():
            totals[which] += counts
        progress("overlaps", done + 1, len(names))
    for (i, j), counts in totals.items():
        for axis, cut in ((1, cuts[i]), (0, cuts[j])):
            inside = counts.sides.sum(axis)
            for side, everywhere in ((1, cut.tied), (2, cut.above)):
                outside = everywhere - int(inside[side])
                counts.sides[(side, 0) if axis else (0, side)] += outside
    return totals


def _formats(base: Source, tuned: Source, pair: Pair, dtype: str | None) -> tuple[str, str, str]:
    """Stored number formats, and that of the comparison."""
    infos = base.info(pair.name), tuned.info(pair.tuned_name)
    first, second = (info.dtype for info in infos)
    if first in _INTEGERS and second in _INTEGERS:
        return first, second, first
    for info, name in zip(infos, (pair.name, pair.tuned_name), strict=True):
        if info.dtype not in GRIDS:
            raise ValueError(
                f"{info.file}: {name!r} is stored as {info.dtype}, which is not compared with "
                f"{second if info is infos[0] else first}: de-quantise or convert the checkpoint first"
            )
    return first, second, dtype or coarser(first, second)


def _pair_tensors(base: Source, tuned: Source, pair: Pair) -> tuple[Tensor, Tensor]:
    """Both tensors, cut to the rows that they share."""
    a, b = base.tensor(pair.name), tuned.tensor(pair.tuned_name)
    return (a[: pair.shape[0]], b[: pair.shape[0]]) if pair.shape else (a, b)


def _tensor(base: Source, tuned: Source, pair: Pair, formats: tuple[str, str, str], rank: bool) -> TensorDiff:
    """One tensor."""
    a, b = _pair_tensors(base, tuned, pair)
    tally = scan(a, b, formats[2])
    found = None
    if rank and len(pair.shape) == 2 and min(pair.shape) > 1 and tally.square:

        def piece(rows: slice, columns: slice) -> Tensor:
            return difference(*(cut_to(t[rows, columns].contiguous(), formats[2]) for t in (a, b)))

        found = spectrum(piece, *pair.shape)
    return TensorDiff(pair, formats, *place(pair.name), tally, found)


def _sum_up(diff: Diff, tensor: TensorDiff) -> None:
    """Add a tensor to its kind and to its layer; the total is the sum of the kinds."""
    for group in (diff.kinds.setdefault(tensor.kind, Group()), diff.layers.setdefault(tensor.layer, Group())):
        group.add(tensor.tally, tensor.spectrum, tensor.pair.shape)


def _light(tensor: TensorDiff) -> TensorDiff:
    """A tensor without its bins."""
    t = tensor.tally
    light = Tally(
        t.parameters,
        t.equality,
        t.absolute,
        t.relative,
        t.bits_only,
        t.non_finite,
        t.base_square,
        t.square,
        t.fourth,
        gaps=t.gaps,
    )
    return TensorDiff(tensor.pair, tensor.dtypes, tensor.layer, tensor.kind, light, tensor.spectrum)


def _finders(total: Tally) -> list[CutFinder]:
    """One finder for each set of the largest changes."""
    counts = torch.from_numpy(total.sizes.dense())
    counts[0] += total.parameters - int(counts.sum())
    mixed = torch.from_numpy(total.mixed.dense())
    sizes = [max(1, round(share * total.parameters)) for share in SHARES]
    return [CutFinder(counts, size, mixed, total.finer) for size in sizes]


def _count_sizes(
    base: Source, tuned: Source, pair: Pair, dtype: str, finders: list[CutFinder]
) -> list[CutFinder]:
    """What the finders have to know of one tensor."""
    mine = [finder.empty() for finder in finders]
    for a, b in blocks(*_pair_tensors(base, tuned, pair), dtype):
        at = positions(differs(a, b))
        patterns = size_patterns(difference(a.index_select(0, at), b.index_select(0, at)))
        for finder in mine:
            finder.add(patterns)
            finder.add_zeros(len(a) - len(patterns))
    return mine


def _take_cuts(diff: Diff, finders: list[CutFinder]) -> None:
    """Cuts, and the energy above them, from finders that saw everything."""
    tally = diff.total.tally
    energy = tally.size_energy.dense()
    for share, finder in zip(SHARES, finders, strict=True):
        diff.cuts[share] = finder.cut()
        if tally.square:
            held = float(energy[finder.bucket + 1 :].sum()) + finder.energy_inside()
            diff.top_energy[share] = min(1.0, held / tally.square)


def _overlap_of_tensor(
    base: Source, tuned: Sequence[Source], name: str, found: list[TensorDiff | None], cuts: list[Cut]
) -> dict[tuple[int, int], OverlapCounts]:
    """Counts of one tensor for every pair of fine-tunes that share it."""
    present = {k: t for k, t in enumerate(found) if t is not None}
    tensors = {k: (*_pair_tensors(base, tuned[k], t.pair), t.dtypes[2]) for k, t in present.items()}
    entries = {k: math.prod(t.pair.shape) for k, t in present.items()}
    counts = {(i, j): OverlapCounts() for j in present for i in present if i < j}
    parts = {k: blocks(*tensors[k]) for k in present}
    at = 0
    while parts:
        sides: dict[int, tuple[Tensor, Tensor]] = {}
        for k in list(parts):
            piece = next(parts[k], None)
            if piece is None:
                del parts[k]
                continue
            size = size_patterns(difference(*piece))
            sides[k] = changed(*piece), (size > cuts[k].pattern).int() + (size >= cuts[k].pattern).int()
        for (i, j), pair in counts.items():
            if i in sides and j in sides:
                rest = min(entries[i], entries[j]) - at
                _count_pair(pair, *((mask[:rest], side[:rest]) for mask, side in (sides[i], sides[j])))
        at += max((len(mask) for mask, _ in sides.values()), default=0)
    return {(i, j): pair.finish_tensor(cuts[i], cuts[j]) for (i, j), pair in counts.items()}


def _count_pair(pair: OverlapCounts, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    """Count over one block."""
    masks, sides = zip(first, second, strict=True)
    pair.parameters += len(masks[0])
    for k, mask in enumerate((*masks, masks[0] & masks[1])):
        pair.changed[k] += int(mask.count_nonzero())
    pair.sides += torch.bincount(3 * sides[0] + sides[1], minlength=9).view(3, 3)


def _threaded(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Results in the order of the items, so that sums do not depend on which thread was faster; few wait at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # each thread is one core's work
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
