r"""Score moments of a model that no process can hold: weights sharded by FSDP2, sums sharded by rows.

The gradient of a matrix for one sequence is :math:`G_n^\top A_n`, what came back to the module's output times what
went into it: no weight occurs in it. So each process runs the forward and backward pass of its own sequences through
whatever shards the weights, and owns some *rows* of every sum. When a module's gradient comes back, all processes
exchange :math:`A_n`, whole, and of :math:`G_n` the columns that belong to each one's rows; then every process adds
all sequences to its rows with the same code as one process would.

Rows are cut as FSDP2 cuts them: process r of W has the r-th block of ⌈rows/W⌉. Vectors are cut too. What a process
holds is therefore a `ceilings.moments.ScoreMoments` of its rows: gradients, Fisher information, ceilings and
tightness follow from it there, entry by entry, beside the shard of the parameter that they belong to.

Bytes a process, for P parameters, K rewards, weights of b bytes and sums of s::

    P (b + (2 + K) s) / W  +  the weights of one block  +  two activations and two gradients of the widest module,
                              of all W processes' sequences  +  what a backward pass keeps of its own sequences

Only level ``"sequence"``. A parameter without a fast rule (see `ceilings.score_rules`) is refused, since the slow path
needs its whole gradient.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ceilings.moments import ScoreMoments
from ceilings.score_capture import Capture, Found, find_rules
from ceilings.score_inputs import Batch
from ceilings.score_rules import FullTerm, OuterTerm, RowsTerm, Term
from ceilings.score_sums import ParameterSums
from ceilings.scores import ScoreAccumulator, _log_prob_cotangent

__all__ = ["ShardedAccumulator", "load_rows", "row_block", "save_rows"]

_INDEX: Final = "moments.index.json"
_KIND: Final = "ceilings.sharded_moments"


def row_block(rows: int, rank: int, size: int) -> slice:
    """Rows of a process.

    Parameters
    ----------
    rows
        Number of rows of a matrix, or of entries of a vector.
    rank, size
        Which process, of how many.

    Returns
    -------
    slice
        As FSDP2 cuts the first axis; empty for the last processes of a matrix with few rows.
    """
    height = -(-rows // size)
    return slice(min(rank * height, rows), min((rank + 1) * height, rows))


class ShardedAccumulator(ScoreAccumulator):
    """A `ceilings.scores.ScoreAccumulator` of which each process holds some rows of every sum.

    Every process makes one and gives it the *same* sequences, in the same order: each runs its share of them.

    Parameters
    ----------
    model
        A causal language model on this process. Its weights may be sharded by ``fully_shard``, in whatever units;
        or whole.
    reward_names
        As in `ceilings.scores.ScoreAccumulator`.
    batch_size
        Sequences in one pass of one process.

    Raises
    ------
    ValueError
        As in `ceilings.scores.ScoreAccumulator`, or if weights are sharded in another way.
    """

    def __init__(
        self, model: nn.Module, reward_names: tuple[str, ...] = ("reward",), batch_size: int = 16
    ) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # NOTE a group of its own: FSDP2 may have an all-gather under way when ours begins.
        self._group = dist.new_group()
        for unit in _units(model):
            unit.reshard()  # the root may have been left whole, and the names below go by shards
        super().__init__(model, reward_names, batch_size * self._size)
        self._whole = _whole_parameters(model, self._parameters)

    def add(
        self,
        input_ids: Tensor,
        response_mask: Tensor,
        rewards: Tensor,
        *,
        weights: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        """Add a portion of sequences, the same on every process. Collective.

        Parameters
        ----------
        input_ids, response_mask, rewards, weights, attention_mask
            As in `ceilings.scores.ScoreAccumulator.add`.

        Raises
        ------
        ValueError
            As there, or if a parameter has no fast rule.
        """
        with _requiring_grad(self._whole, False), warnings.catch_warnings():
            # A module's output passes on as a view of itself; nothing here writes into it.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            super().add(input_ids, response_mask, rewards, weights=weights, attention_mask=attention_mask)

    def restore(self, moments: ScoreMoments) -> None:
        """Go on from the rows that were saved.

        Parameters
        ----------
        moments
            What `moments` returned on the same process of as many.

        Raises
        ------
        ValueError
            If something was added already, or the moments belong to other rows, parameters or rewards.
        """
        if self._weighting is not None:
            raise ValueError("this accumulator holds sequences already: restore before the first `add`")
        shapes = {name: tuple(t.shape) for name, t in moments.scores.items()}
        expected = {name: self._block_shape(name) for name in self._parameters}
        if (moments.level, moments.reward_names, shapes) != (self.level, self.reward_names, expected):
            raise ValueError(
                "these moments belong to another model, reward or number of processes: measure again"
            )
        for name in self._filled():
            self._sums[name] = ParameterSums.of(
                moments.scores[name], moments.squares[name], moments.reward_scores[name], self._device
            )
        self._weighting, self._shift = moments.weighting, moments.reward_shift
        self._reward_sum, self._reward_squares = moments.reward_sum, moments.reward_squares
        self._count, self._weight_sum = moments.count, moments.weight_sum

    def moments(self) -> ScoreMoments:
        """Moments of everything added so far, in the rows of this process.

        Returns
        -------
        ScoreMoments
            Shares its tensors with the accumulator. The sums of rewards are those of all sequences.

        Raises
        ------
        ValueError
            If nothing was added.
        """
        if self._weighting is None:
            raise ValueError("no sequence was added: there are no moments yet")
        rewards = len(self.reward_names)
        parts: dict[str, Any] = {"scores": {}, "squares": {}, "reward_scores": {}}
        for name in self._parameters:
            shape, sums = self._block_shape(name), self._sums.get(name)
            for part, tensors in parts.items():
                whole = (rewards, *shape) if part == "reward_scores" else shape
                tensors[name] = torch.zeros(whole) if sums is None else getattr(sums, part).view(whole)
        return ScoreMoments(
            **parts,
            reward_shift=self._shift,
            reward_sum=self._reward_sum,
            reward_squares=self._reward_squares,
            reward_names=self.reward_names,
            count=self._count,
            weight_sum=self._weight_sum,
            weighting=self._weighting,
        )

    @property
    def _device(self) -> torch.device:
        """Where the sums are."""
        return next(iter(self._whole.values())).device

    def _block(self, name: str) -> slice:
        """Rows of this process."""
        return row_block(self._parameters[name].shape[0], self._rank, self._size)

    def _block_shape(self, name: str) -> tuple[int, ...]:
        """Shape of what this process holds of a parameter."""
        rows = self._block(name)
        return (rows.stop - rows.start, *self._parameters[name].shape[1:])

    def _filled(self) -> list[str]:
        """Parameters of which this process has any rows."""
        return [name for name in self._parameters if self._block_shape(name)[0]]

    def _allocate(self, shift: Tensor, input_ids: Tensor) -> None:
        """Find the rules; make room for the rows of this process."""
        # NOTE FSDP2 gives a whole parameter the `requires_grad` of its shard, whenever it gathers it.
        with _requiring_grad(self._parameters, True), _own_classes(self.model):
            self._found = find_rules(
                self.model, self._whole, lambda ids: self._logits(ids, torch.ones_like(ids)), input_ids[0]
            )
        self._fast, self._ready = self._found.fast, True
        slow = [name for name in self._parameters if name not in self._found.fast - self._found.idle]
        if slow:
            self._weighting = None
            raise ValueError(
                f"{slow[0]} has no fast rule here, or is not used by every sequence: freeze it with "
                "`requires_grad_(False)`, or measure on processes that hold the whole model"
            )
        if self._sums:
            return  # restored
        self._shift = shift
        self._reward_sum = self._reward_squares = torch.zeros_like(shift)
        for name in self._filled():
            dtype = torch.promote_types(self._whole[name].dtype, torch.float32)
            zeros = torch.zeros(self._block_shape(name), dtype=dtype, device=self._device)
            several = torch.zeros((len(shift), *zeros.shape), dtype=dtype, device=self._device)
            self._sums[name] = ParameterSums.of(zeros, zeros.clone(), several, self._device)

    def _add_batch(self, batch: Batch, root_weights: Tensor, rewards: Tensor) -> None:
        """Run the share of this process, then add all shares to its rows."""
        count = len(root_weights)
        share = -(-count // self._size)
        # Every process runs as many: what is missing at the end is a sequence of weight zero.
        row = torch.arange(share * self._size)
        present = (row < count).to(root_weights)
        row = row.clamp_max(count - 1)
        root_weights, rewards = root_weights[row] * present, rewards[:, row] * present
        own = slice(self._rank * share, (self._rank + 1) * share)
        mine = Batch(*(t[row[own].to(t.device)] for t in batch))
        with _ShardedCapture(self._found, self._whole, self._parameters, share) as capture:
            logits = self._logits(mine.inputs, mine.attention)
            if capture.refused:
                raise ValueError(f"{sorted(capture.refused)[0]} is not used sequence by sequence: freeze it")
            cotangent = _log_prob_cotangent(logits, mine, root_weights[own])
            edge = torch.autograd.graph.get_gradient_edge(logits)
            del logits

            def consume(name: str, terms: list[Term]) -> None:
                rows = self._parameters[name].shape[0]
                blocks = [self._exchanged(term, rows) for term in terms]
                if name in self._sums:
                    self._sums[name].add(blocks, root_weights, rewards)

            capture.backward(edge, cotangent, consume)

    def _exchanged(self, term: Term, rows: int) -> Term:
        """What all processes have found, in the rows of this one."""
        block = row_block(rows, self._rank, self._size)
        if isinstance(term, OuterTerm):
            return OuterTerm(self._columns(term.left), self._gathered(term.right))
        if isinstance(term, FullTerm):
            return FullTerm(self._gathered(term.values)[:, block])
        assert isinstance(term, RowsTerm)
        ids, values = self._gathered(term._ids), self._gathered(term._values)
        inside = (ids >= block.start) & (ids < block.stop)
        # Zeros in its first row stand for what belongs to another process.
        return RowsTerm((ids - block.start) * inside, values * inside[..., None])

    def _gathered(self, mine: Tensor) -> Tensor:
        """Sequences of all processes."""
        every = mine.new_empty(self._size * len(mine), *mine.shape[1:])
        dist.all_gather_single(every, mine.contiguous(), group=self._group)
        return every

    def _columns(self, mine: Tensor) -> Tensor:
        """Columns of this process, of the sequences of all."""
        count, length, width = mine.shape
        blocks = [row_block(width, rank, self._size) for rank in range(self._size)]
        heights = [block.stop - block.start for block in blocks]
        height = heights[self._rank]
        sent = mine.permute(2, 0, 1).contiguous()
        found = mine.new_empty(self._size * height, count, length)
        dist.all_to_all_single(found, sent, [height] * self._size, heights, group=self._group)
        return found.view(self._size, height, count, length).permute(0, 2, 3, 1).flatten(0, 1)


class _ShardedCapture(Capture):
    """Capture that knows a parameter by its shard, too: that is what a module holds between passes."""

    def __init__(
        self,
        found: Found,
        whole: dict[str, nn.Parameter],
        parameters: dict[str, nn.Parameter],
        sequences: int,
    ) -> None:
        super().__init__(found, whole, sequences)
        self._names |= {id(p): name for name, p in parameters.items()}


def _units(model: nn.Module) -> list[Any]:
    """Modules that `fully_shard` was called on."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def _whole_parameters(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The tensors that stand in for the shards while a module runs: empty between passes, the same in each."""
    names = {id(p): name for name, p in parameters.items()}
    places = [
        (module, key, names[id(p)])
        for module in model.modules()
        for key, p in module._parameters.items()
        if id(p) in names
    ]
    found: dict[str, nn.Parameter] = {}

    def look() -> None:
        for module, key, name in places:
            parameter = module._parameters[key]
            if parameter is not None and not isinstance(parameter, DTensor):
                found[name] = parameter

    look()
    for unit in _units(model):
        unit.unshard()
        look()
        unit.reshard()
    for name in parameters:
        if name not in found:
            raise ValueError(
                f"{name} is sharded by something other than `fully_shard`: shard the weights with that alone"
            )
    return {name: found[name] for name in parameters}


@contextmanager
def _requiring_grad(parameters: dict[str, nn.Parameter], flag: bool) -> Iterator[None]:
    """Let gradients reach the parameters, or not, for a while."""
    required = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(flag)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(required[name])


@contextmanager
def _own_classes(model: nn.Module) -> Iterator[None]:
    """Give modules that `fully_shard` was called on the class they had before: rules go by class."""
    units = [(m, type(m)) for m in _units(model)]
    try:
        for module, kind in units:
            module.__class__ = kind.__mro__[2]  # (its own, FSDPModule, what it was, …)
        yield
    finally:
        for module, kind in units:
            module.__class__ = kind


def save_rows(moments: ScoreMoments, folder: str | os.PathLike[str]) -> None:
    """Write the rows of every process, one file each, and an index. Collective.

    Parameters
    ----------
    moments
        Rows of this process.
    folder
        Where to; every process must see it. What was saved there before is replaced once the new files are complete.
    """
    path, rank, size = Path(folder), dist.get_rank(), dist.get_world_size()
    names = [f"moments-{moments.count}-{k + 1:05d}-of-{size:05d}.safetensors" for k in range(size)]
    path.mkdir(parents=True, exist_ok=True)
    moments.save(path / names[rank])
    dist.barrier()
    if rank == 0:
        temporary = path / f".{_INDEX}.part"
        temporary.write_text(json.dumps({"kind": _KIND, "version": 1, "files": names}), encoding="utf-8")
        temporary.replace(path / _INDEX)
        for old in path.glob("moments-*-of-*.safetensors"):
            if old.name not in names:
                old.unlink()
    dist.barrier()


def load_rows(folder: str | os.PathLike[str], rank: int | None = None) -> ScoreMoments:
    """Read what `save_rows` wrote.

    Parameters
    ----------
    folder
        The folder.
    rank
        Process whose rows are wanted; None for all rows together.

    Returns
    -------
    ScoreMoments
        Rows of one process, or the moments as one process would have them.

    Raises
    ------
    ValueError
        If there is no index, or a file is missing.
    """
    path = Path(folder)
    try:
        index: dict[str, Any] = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        files = index["files"] if index["kind"] == _KIND else []
        missing = next((name for name in files if not (path / name).is_file()), None)
    except (OSError, ValueError, KeyError, TypeError):
        files, missing = [], None
    if not files or missing is not None:
        raise ValueError(
            f"{path} holds no complete moments of several processes: {missing or _INDEX} is missing"
        )
    if rank is not None:
        return ScoreMoments.load(path / files[rank])
    parts = [ScoreMoments.load(path / name) for name in files]
    fields: dict[str, Any] = {"scores": {}, "squares": {}, "reward_scores": {}}
    for part, tensors in fields.items():
        for name in parts[0].names:
            blocks = [getattr(p, part)[name] for p in parts]
            axis = int(part == "reward_scores")
            tensors[name] = torch.cat([b for b in blocks if b.numel()], axis)
    first = parts[0]
    return ScoreMoments(
        **fields,
        reward_shift=first.reward_shift,
        reward_sum=first.reward_sum,
        reward_squares=first.reward_squares,
        reward_names=first.reward_names,
        count=first.count,
        weight_sum=first.weight_sum,
        weighting=first.weighting,
    )
