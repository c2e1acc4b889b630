"""One file of ``torch.save``: its tensors, loaded without running anything that the file brings along."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.safetensors_file import TensorInfo, dtype_code

__all__ = ["ENDINGS", "PytorchFile"]

#: Endings of the names of such files.
ENDINGS: Final = (".bin", ".pt", ".pth", ".ckpt")
_WRAPPERS: Final = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class PytorchFile:
    """Tensors of one file, and which of them share their storage.

    Parameters
    ----------
    path
        The file.
    tensors
        Each storage once, by the first name that it has.
    ties
        Stored name by other name of the same tensor.
    metadata
        Free text: none.
    notes
        What a reader should know: nothing.
    """

    path: Path
    tensors: dict[str, Tensor]
    ties: dict[str, str]
    metadata: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path) -> PytorchFile:
        """Load a file.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        PytorchFile
            Its tensors; mapped, not read, where the file allows that.

        Raises
        ------
        ValueError
            If it is no such file, is not whole, or holds more than tensors.
        """
        found = _state(path, _load(path))
        tensors: dict[str, Tensor] = {}
        ties: dict[str, str] = {}
        first: dict[tuple[Any, ...], str] = {}
        for name, value in found.items():
            _check(path, name, value)
            place = (
                value.untyped_storage().data_ptr(),
                value.storage_offset(),
                value.shape,
                value.stride(),
                value.dtype,
            )
            owner = first.setdefault(place, name) if value.numel() else name
            if owner == name:
                tensors[name] = value
            else:
                ties[name] = owner
        return cls(path, tensors, ties)

    def infos(self) -> dict[str, TensorInfo]:
        """Number format and shape of every tensor.

        Returns
        -------
        dict
            By name, each storage once.
        """
        return {
            n: TensorInfo(dtype_code(t.dtype), tuple(t.shape), self.path) for n, t in self.tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Tensor as it is stored.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        Tensor
            On the CPU.
        """
        return self.tensors[name].detach()

    def raw(self, name: str) -> memoryview:
        """Bytes of a tensor as a safetensors file would hold them.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        memoryview
            Little endian, row by row; it cannot be written to. A copy only where the file holds another order.
        """
        flat = self.tensors[name].detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        stored: Any = flat.view(torch.uint8).numpy()
        return memoryview(stored).toreadonly()


def _load(path: Path) -> Any:
    """What the file holds; nothing but tensors and plain containers is accepted."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty: copy it again")
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # written before PyTorch 1.6
    except pickle.UnpicklingError as error:
        if "Unsupported global" in str(error) or "Weights only load failed" in str(error):
            raise ValueError(
                f"{path} holds more than tensors and is not loaded, since that could run code: save its state_dict "
                "as safetensors where you trust it"
            ) from error
        raise ValueError(f"{path} is damaged or no file of torch.save: copy it again") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged or no file of torch.save: copy it again") from error


def _state(path: Path, found: Any) -> dict[str, Tensor]:
    """Tensors by name, out of the dictionary that training scripts wrap them in."""
    for key in _WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    tensors = {k: v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, dict) else {}
    if not tensors:
        raise ValueError(f"{path} holds no tensors by name: save the state_dict of the model")
    return {str(name): tensor for name, tensor in tensors.items()}


def _check(path: Path, name: str, value: Tensor) -> None:
    """Refuse what is no plain tensor."""
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        what = "has no data" if value.device.type == "meta" else "is sparse or quantised"
        raise ValueError(f"{path}: {name!r} {what}: save dense tensors with their values")
    try:
        dtype_code(value.dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {name!r}: {error}") from error
