"""A PEFT LoRA adapter on top of a base: what merging would store, one tensor at a time and never on disk.

The change of a matrix is scaling · B A. Kinds of adapters whose change is something else are refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.adapter_settings import PREFIX, read_settings, scaling, unknown_settings
from ceilings.checkpoints import Checkpoint, open_checkpoint
from ceilings.safetensors_file import TensorInfo

__all__ = ["Adapter", "open_adapter"]

_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_PARTS: Final = re.compile(r"^(.*)\.lora_(embedding_)?([AB])(?:\.weight)?$")
_BLOCK: Final = 2**20


@dataclass(frozen=True)
class Adapter:
    """A base with an adapter on top, tensor by tensor.

    Parameters
    ----------
    path
        Folder of the adapter.
    base
        What it is put on.
    notes
        What a reader should know.
    scalings
        Factor in front of B A, by name of the tensor in the base.
    ranks
        Number of rows of A, by name of the tensor in the base.
    """

    path: Path
    base: Checkpoint
    notes: tuple[str, ...]
    scalings: dict[str, float]
    ranks: dict[str, int]
    _weights: Checkpoint = field(repr=False)
    _places: dict[str, dict[str, str]] = field(repr=False)
    _whole: dict[str, str] = field(repr=False)
    _turned: bool = field(repr=False)

    kind: str = "adapter"
    quantised: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the base."""
        return self.base.names

    @property
    def ties(self) -> dict[str, str]:
        """Ties of the base."""
        return self.base.ties

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the adapter."""
        return self._weights.files

    def info(self, name: str) -> TensorInfo:
        """Number format and shape of a tensor.

        Parameters
        ----------
        name
            Its name in the base.

        Returns
        -------
        TensorInfo
            That of the base; where the adapter changes it, float32.
        """
        name = self.ties.get(name, name)
        found = self._weights.info(self._whole[name]) if name in self._whole else self.base.info(name)
        return found._replace(dtype="F32", file=self.files[0]) if name in self._places else found

    def tensor(self, name: str) -> Tensor:
        """Tensor of the base with the change of the adapter.

        Parameters
        ----------
        name
            Its name in the base.

        Returns
        -------
        Tensor
            float32 where the adapter changes it, with sums in float64; otherwise that of the base.
        """
        name = self.ties.get(name, name)
        whole = self._whole.get(name)
        base = self.base.tensor(name) if whole is None else self._weights.tensor(whole)
        if name not in self._places:
            return base
        first, second = (self._weights.tensor(self._places[name][part]).double() for part in "AB")
        left, right = (second, first) if not self._is_turned(name) else (first.T, second.T)
        merged = torch.empty(base.shape, dtype=torch.float32)
        step = max(1, _BLOCK // base.shape[1])
        for start in range(0, len(base), step):
            rows = slice(start, start + step)
            merged[rows] = (base[rows].double() + self.scalings[name] * (left[rows] @ right)).float()
        return merged

    def _is_turned(self, name: str) -> bool:
        """Whether the base stores this matrix with inputs as rows: embeddings, and the old Conv1D layers."""
        return self._turned or "embedding" in self._places[name]


def open_adapter(path: Path, base: Checkpoint) -> Adapter:
    """Open an adapter on top of a base.

    Parameters
    ----------
    path
        Folder with ``adapter_config.json`` and the adapter's weights.
    base
        The base.

    Returns
    -------
    Adapter
        Base and adapter together.

    Raises
    ------
    ValueError
        If it is a kind that is not supported, does not fit the base, or is damaged.
    """
    config = read_settings(path / "adapter_config.json")
    file = next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise ValueError(f"{path} holds no {_WEIGHTS[0]}: copy the adapter's weights there")
    weights = open_checkpoint(file)
    places, modules, whole, shared = _places(weights, base, file)
    turned = bool(config.get("fan_in_fan_out"))
    scalings, ranks = {}, {}
    for name, place in places.items():
        where = weights.info(whole[name]) if name in whole else base.info(name)
        ranks[name] = _rank(name, place, weights, where, turned)
        scalings[name] = scaling(modules[name], ranks[name], config)
    notes = (_summary(config, ranks), *shared, *unknown_settings(path / "adapter_config.json", config))
    return Adapter(path, base, notes, scalings, ranks, weights, places, whole, turned)


def _places(
    weights: Checkpoint, base: Checkpoint, file: Path
) -> tuple[dict[str, dict[str, str]], dict[str, str], dict[str, str], list[str]]:
    """Parts of B A and their module, and whole tensors, by name in the base; and what ties make of them."""
    places: dict[str, dict[str, str]] = {}
    modules: dict[str, str] = {}
    whole: dict[str, str] = {}
    shared: dict[str, str] = {}
    for stored in weights.names:
        found = _PARTS.match(stored)
        module, embedding, part = found.groups() if found else (stored, None, "")
        for wrapper in (".modules_to_save.", ".base_layer."):
            module = module.replace(wrapper, ".")
        name, asked = _target(module, ".weight" if found else "", base, file, stored)
        if name != asked:
            shared[name] = asked
        if found is None:
            if name in whole:
                raise ValueError(_two_for_one(file, whole[name], stored, name, base))
            whole[name] = stored
            continue
        place = places.setdefault(name, {})
        if part in place or modules.setdefault(name, module) != module:
            raise ValueError(_two_for_one(file, modules[name], module, name, base))
        place[part] = stored
        if embedding:
            place["embedding"] = stored
    notes = [
        f"the adapter changes {asked}, which BASE ties to {name}: it is counted on the one matrix that both share, as "
        "a merge would store it; unmerged it changes the one use only"
        for name, asked in shared.items()
    ]
    return places, modules, whole, notes


def _two_for_one(file: Path, first: str, second: str, name: str, base: Checkpoint) -> str:
    """Complaint about two changes of a matrix that the base has once."""
    return (
        f"{file}: {first!r} and {second!r} both change {name!r}, which the base {base.path} ties: merge the adapter "
        "into an untied base with PEFT and compare the merged model"
    )


def _summary(config: dict[str, Any], ranks: dict[str, int]) -> str:
    """What the adapter is, in words."""
    return (
        f"TUNED is an adapter of {len(ranks)} matrices of rank {_range(ranks)}, merged in memory one tensor at a "
        f"time; it says that it was trained on {config.get('base_model_name_or_path')!r}, and its change is meaningful "
        "on just those weights"
    )


def _target(module: str, ending: str, base: Checkpoint, file: Path, stored: str) -> tuple[str, str]:
    """Name in the base of what a part of an adapter belongs to, and the name that the adapter has for it."""
    name = module.removeprefix(PREFIX) + ending
    for candidate in (name, name.removeprefix("model.")):
        kept = base.ties.get(candidate, candidate)
        if kept in base.names:
            return kept, candidate
    raise ValueError(
        f"{file}: {stored!r} belongs to {name!r}, which the base {base.path} does not have: give the base that the "
        "adapter was trained on"
    )


def _rank(name: str, place: dict[str, str], weights: Checkpoint, where: TensorInfo, turned: bool) -> int:
    """Rank of a pair of matrices, if it fits what it is added to."""
    file = weights.files[0]
    if not {"A", "B"} <= set(place):
        raise ValueError(f"{file}: {name!r} has only one of the two matrices A and B: save the adapter again")
    first, second = (weights.info(place[part]).shape for part in "AB")
    if len(first) != 2 or len(second) != 2:
        raise ValueError(
            f"{file}: {name!r} is a convolution, which is not supported: merge the adapter with PEFT"
        )
    made = (second[0], first[1])
    if turned or "embedding" in place:
        made = made[::-1]
    if first[0] != second[1] or made != where.shape:
        raise ValueError(
            f"{file}: B A of {name!r} has the shape {list(second)} × {list(first)} and the matrix in {where.file} "
            f"{list(where.shape)}: give the base that the adapter was trained on"
        )
    return first[0]


def _range(ranks: dict[str, int]) -> str:
    """Ranks in words."""
    low, high = min(ranks.values(), default=0), max(ranks.values(), default=0)
    return str(low) if low == high else f"{low} to {high}"
