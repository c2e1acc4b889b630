"""A checkpoint on disk, tensor by tensor: what is stored, in which number format, under which names.

Local files and folders only, and nothing is ever loaded whole. Formats are those of the files, never what a loader
makes of them: a library that turns bfloat16 into float32 while loading changes what "unchanged" means.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from ceilings.pytorch_file import ENDINGS, PytorchFile
from ceilings.safetensors_file import SafetensorsFile, TensorInfo
from ceilings.ties import find_ties

__all__ = ["Checkpoint", "is_adapter", "open_checkpoint"]

_WHOLE: Final = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_ADAPTER: Final = "adapter_config.json"
_BLOCK: Final = 2**24
_PACKED: Final = (".qweight", ".qzeros", ".absmax", ".quant_map", ".weight_packed", ".weight_scale_inv")


class _Part(Protocol):
    """One file of a checkpoint."""

    @property
    def metadata(self) -> dict[str, str]:
        """Free text."""

    @property
    def ties(self) -> dict[str, str]:
        """Other names of stored tensors, as far as the file itself tells."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know."""

    def infos(self) -> dict[str, TensorInfo]:
        """What it holds."""

    def tensor(self, name: str) -> Tensor:
        """One tensor."""

    def raw(self, name: str) -> memoryview:
        """Bytes of one tensor."""


@dataclass(frozen=True)
class Checkpoint:
    """Names, formats and shapes of a checkpoint, and its tensors one by one.

    Parameters
    ----------
    path
        What was opened.
    kind
        Format of the files.
    files
        The files, sorted.
    names
        Stored names, each storage once: a tied name is in ``ties`` and not here.
    ties
        Name under which the tensor is stored, by each other name that it has.
    metadata
        Free text of a safetensors or GGUF file.
    quantised
        How the weights are quantised, in words; None if they are not.
    config
        What ``config.json`` beside the weights holds.
    notes
        What a reader should know about how names were read.
    """

    path: Path
    kind: Literal["safetensors", "pytorch", "gguf"]
    files: tuple[Path, ...]
    names: tuple[str, ...]
    ties: dict[str, str]
    metadata: dict[str, str]
    quantised: str | None
    config: dict[str, Any]
    notes: tuple[str, ...]
    _parts: dict[str, Any] = field(repr=False)  # how each file is read: a `_Part`
    _infos: dict[str, TensorInfo] = field(repr=False)

    def info(self, name: str) -> TensorInfo:
        """Number format, shape and file of a tensor.

        Parameters
        ----------
        name
            Its name, or another that is tied to it.

        Returns
        -------
        TensorInfo
            What the file says.

        Raises
        ------
        ValueError
            If there is no such tensor.
        """
        name = self.ties.get(name, name)
        if name not in self._infos:
            raise ValueError(f"{self.path} has no tensor {name!r}: look at its names for the right one")
        return self._infos[name]

    def tensor(self, name: str) -> Tensor:
        """Tensor in the number format in which it is stored.

        Parameters
        ----------
        name
            Its name, or another that is tied to it.

        Returns
        -------
        Tensor
            On the CPU; a view of the file where the format allows that. Quantised GGUF tensors come as float32.

        Raises
        ------
        ValueError
            If there is no such tensor, or PyTorch cannot hold its format.
        """
        self.info(name)
        name = self.ties.get(name, name)
        return self._parts[name].tensor(name)

    def raw(self, name: str) -> memoryview:
        """Stored bytes of a tensor, little endian and row by row.

        Parameters
        ----------
        name
            Its name, or another that is tied to it.

        Returns
        -------
        memoryview
            A view of the file where the format allows that; it cannot be written to.

        Raises
        ------
        ValueError
            If there is no such tensor, or the file is a GGUF file.
        """
        self.info(name)
        name = self.ties.get(name, name)
        return self._parts[name].raw(name)


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a PEFT adapter instead of a model.

    Parameters
    ----------
    path
        A folder, or anything.

    Returns
    -------
    bool
        Whether it does.
    """
    return (Path(path) / _ADAPTER).is_file()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: read headers and check that all is there.

    Parameters
    ----------
    path
        A ``.safetensors``, ``.gguf`` or ``torch.save`` file, an index of shards, or a Hugging Face folder.

    Returns
    -------
    Checkpoint
        The checkpoint; of safetensors and GGUF files nothing but headers was read.

    Raises
    ------
    FileNotFoundError
        If there is nothing at ``path``, or a shard is missing.
    ValueError
        If it is no checkpoint, a file is damaged, or a tensor is empty.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(
            f"there is no checkpoint {str(source)!r}: give a local file or folder, nothing is downloaded"
        )
    found = _weights(source) if source.is_dir() else source
    listed = _shards(found) if found.name.endswith(".index.json") else None
    files = [found] if listed is None else list(dict.fromkeys(listed.values()))
    kind = _kind(files[0])
    parts = {file: _open(file, kind) for file in files}
    tables = {file: part.infos() for file, part in parts.items()}
    for table in tables.values():
        for name, info in table.items():
            if 0 in info.shape:
                raise ValueError(
                    f"{info.file}: {name!r} has the shape {list(info.shape)} and holds no number, a placeholder as "
                    "sharded training leaves it: gather the weights and save again"
                )
    holders = _holders(tables, {file: part.ties for file, part in parts.items()}, listed, found)
    infos = {name: tables[file][name] for name, file in holders.items()}
    return _assemble(source, found, kind, parts, infos)


def _weights(folder: Path) -> Path:
    """The file of a folder that holds the weights, or lists the files that do."""
    for name in _WHOLE:
        if (folder / name).is_file():
            return folder / name
    if is_adapter(folder):
        raise ValueError(
            f"{folder} is a PEFT adapter and no whole model: give it as TUNED to ceilings diff, or merge it first"
        )
    for ending in (".safetensors", ".gguf"):
        found = sorted(folder.glob(f"*{ending}"))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{folder} holds {len(found)} {ending} files and no index, such as {found[0].name}: give one of them"
            )
    raise ValueError(
        f"{folder} holds no weights: give a folder with model.safetensors, an index or a .gguf file"
    )


def _shards(index: Path) -> dict[str, Path]:
    """File of each tensor that an index names."""
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        listed = {str(name): index.parent / str(file) for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of shards, it has no weight_map: copy it again") from error
    if not listed:
        raise ValueError(f"{index} names no tensor: copy it again")
    for name, file in listed.items():
        if file.parent != index.parent:
            raise ValueError(f"{index} looks for {name!r} outside of its own folder: correct the index")
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing, which by {index.name} holds {name!r}: fetch that shard"
            )
    return listed


def _kind(file: Path) -> Literal["safetensors", "pytorch", "gguf"]:
    """Format by the ending of a name."""
    ending = file.suffix.lower()
    if ending == ".safetensors":
        return "safetensors"
    if ending == ".gguf":
        return "gguf"
    if ending in ENDINGS:
        return "pytorch"
    raise ValueError(
        f"{file} has the ending {ending!r}, which says no format: give .safetensors, .bin, .pt, .pth or .gguf"
    )


def _open(file: Path, kind: str) -> _Part:
    """One file of a checkpoint."""
    if kind == "safetensors":
        return SafetensorsFile.open(file)
    if kind == "pytorch":
        return PytorchFile.open(file)
    from ceilings.gguf_file import GgufFile

    return GgufFile.open(file)


def _holders(
    tables: dict[Path, dict[str, TensorInfo]],
    ties: dict[Path, dict[str, str]],
    listed: dict[str, Path] | None,
    found: Path,
) -> dict[str, Path]:
    """The file that holds each tensor; an index decides between files that hold the same name."""
    holders: dict[str, Path] = {}
    for file, table in tables.items():
        for name in table:
            if name in holders and (listed is None or name not in listed):
                raise ValueError(
                    f"{file}: {name!r} is in another shard too, and {found.name} does not decide: remove one of them"
                )
            if listed is None or listed.get(name, file) == file:
                holders[name] = file
    for name, file in (listed or {}).items():
        if name not in holders and name not in ties[file]:
            raise ValueError(
                f"{file} does not hold {name!r}, although {found.name} says so: fetch the shard and the index again"
            )
    return holders


def _assemble(
    source: Path,
    found: Path,
    kind: Literal["safetensors", "pytorch", "gguf"],
    parts: dict[Path, _Part],
    infos: dict[str, TensorInfo],
) -> Checkpoint:
    """Checkpoint of files that were found whole."""
    owners = {name: parts[info.file] for name, info in infos.items()}
    config = _config(found.parent) if found.name in _WHOLE or source.is_dir() else {}
    metadata = {key: text for part in parts.values() for key, text in part.metadata.items()}
    stored = {other: kept for part in parts.values() for other, kept in part.ties.items()}
    ties, notes = find_ties(
        infos, config, metadata, lambda a, b: _same(owners[a].tensor(a), owners[b].tensor(b))
    )
    return Checkpoint(
        path=source,
        kind=kind,
        files=tuple(sorted(parts)),
        names=tuple(name for name in infos if name not in ties),
        ties=stored | ties,
        metadata=metadata,
        quantised=_quantised(infos, config),
        config=config,
        notes=(*notes, *(note for part in parts.values() for note in part.notes)),
        _parts=owners,
        _infos=infos,
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal byte for byte."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    pieces = zip(*(t.flatten().view(torch.uint8).split(_BLOCK) for t in (a, b)), strict=True)
    return all(torch.equal(p, q) for p, q in pieces)


def _config(folder: Path) -> dict[str, Any]:
    """What ``config.json`` of a folder holds."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no table of settings: copy it again")
    return config


def _quantised(infos: dict[str, TensorInfo], config: dict[str, Any]) -> str | None:
    """How the weights are quantised, by their block formats, the configuration, or telling names."""
    blocks: Counter[str] = Counter()
    for info in infos.values():
        blocks[info.stored] += math.prod(info.shape)
    del blocks[""]
    if blocks:
        return f"GGUF {blocks.most_common(1)[0][0]}"
    settings = config.get("quantization_config")
    if isinstance(settings, dict):
        method = str(settings.get("quant_method", "an unnamed method"))
        bits = settings.get("bits") or (
            4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else ""
        )
        return f"{method} {bits}-bit" if bits else method
    packed = next((name for name in infos if name.endswith(_PACKED)), None)
    return None if packed is None else f"an unnamed method ({packed})"
