"""A PEFT LoRA adapter on top of a base: what merging would store, one tensor at a time and never on disk.

The change of a matrix is scaling · B A. Kinds of adapters whose change is something else are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.checkpoints import Checkpoint, open_checkpoint
from ceilings.safetensors_file import TensorInfo

__all__ = ["Adapter", "open_adapter"]

_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX: Final = "base_model.model."
_PARTS: Final = re.compile(r"^(.*)\.lora_(embedding_)?([AB])(?:\.weight)?$")
# Initialisations that change the base: the stored A and B are a difference from a base that is not on disk.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq")
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
        found = self.base.info(name)
        if name in self._whole:
            return self._weights.info(self._whole[name])
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
        if name in self._whole:
            return self._weights.tensor(self._whole[name])
        base = self.base.tensor(name)
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
    config = _config(path / "adapter_config.json")
    file = next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise ValueError(f"{path} holds no {_WEIGHTS[0]}: copy the adapter's weights there")
    weights = open_checkpoint(file)
    places: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for stored in weights.names:
        found = _PARTS.match(stored)
        if found is None:
            whole[_target(stored.replace(".modules_to_save.", "."), "", base, file, stored)] = stored
            continue
        module, embedding, part = found.groups()
        place = places.setdefault(_target(module, ".weight", base, file, stored), {})
        place[part] = stored
        if embedding:
            place["embedding"] = stored
    turned = bool(config.get("fan_in_fan_out"))
    scalings, ranks = {}, {}
    for name, place in places.items():
        ranks[name] = _rank(name, place, weights, base, turned, file)
        scalings[name] = _scaling(name, ranks[name], config)
    trained_on = config.get("base_model_name_or_path")
    notes = (
        f"TUNED is an adapter of {len(places)} matrices of rank {_range(ranks)}, merged in memory one tensor at a "
        f"time; it says that it was trained on {trained_on!r}, and its change is meaningful on just those weights",
    )
    return Adapter(path, base, notes, scalings, ranks, weights, places, whole, turned)


def _config(path: Path) -> dict[str, Any]:
    """Settings of an adapter, refused where its change is not scaling · B A."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("peft_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again") from error
    merge = "merge it into the base with PEFT and compare the merged model"
    if kind != "LORA":
        raise ValueError(f"{path}: adapters of the kind {kind!r} are not supported, only LORA: {merge}")
    for key, what in (
        ("use_dora", "DoRA, which rescales rows too"),
        ("lora_bias", "a LoRA with biases"),
        ("layer_replication", "a LoRA on replicated layers"),
        ("target_parameters", "a LoRA on parameters outside of linear layers"),
        ("alora_invocation_tokens", "an activated LoRA, which changes the weights for some tokens only"),
        ("trainable_token_indices", "a LoRA with trained tokens"),
    ):
        if config.get(key):
            raise ValueError(f"{path}: this is {what}, which is not supported: {merge}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ValueError(f"{path}: the adapter began as {start!r}, which changes the base as well: {merge}")
    return config


def _target(module: str, ending: str, base: Checkpoint, file: Path, stored: str) -> str:
    """Name in the base of what a part of an adapter belongs to."""
    name = module.removeprefix(_PREFIX) + ending
    for candidate in (name, name.removeprefix("model.")):
        kept = base.ties.get(candidate, candidate)
        if kept in base.names:
            return kept
    raise ValueError(
        f"{file}: {stored!r} belongs to {name!r}, which the base {base.path} does not have: give the base that the "
        "adapter was trained on"
    )


def _rank(
    name: str, place: dict[str, str], weights: Checkpoint, base: Checkpoint, turned: bool, file: Path
) -> int:
    """Rank of a pair of matrices, if it fits the base."""
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
    if first[0] != second[1] or made != base.info(name).shape:
        raise ValueError(
            f"{file}: B A of {name!r} has the shape {list(second)} × {list(first)} and the base {base.path} "
            f"{list(base.info(name).shape)}: give the base that the adapter was trained on"
        )
    return first[0]


def _scaling(name: str, rank: int, config: dict[str, Any]) -> float:
    """Factor in front of B A."""
    module = name.removesuffix(".weight")
    patterns = config.get("alpha_pattern") or {}
    # The first pattern that the end of the module's name matches.
    key = next((k for k in patterns if re.match(rf"(.*\.)?({k})$", module)), None)
    alpha = float(patterns[key] if key is not None else config.get("lora_alpha", 8))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _range(ranks: dict[str, int]) -> str:
    """Ranks in words."""
    low, high = min(ranks.values(), default=0), max(ranks.values(), default=0)
    return str(low) if low == high else f"{low} to {high}"
