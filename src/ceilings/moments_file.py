"""Files of score moments: safetensors with a JSON header, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch import Tensor

__all__ = ["read_tensors", "write_tensors"]

_KIND: Final = "ceilings.score_moments"


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors and header to one safetensors file.

    Parameters
    ----------
    path
        Where to. An existing file is replaced only once the new one is complete.
    tensors
        What to store, by name.
    header
        Anything JSON can hold; kept in the file's metadata under ``ceilings``.
    """
    from safetensors.torch import save_file

    target = Path(path)
    temporary = target.with_name(
        f".{target.name}.{os.getpid()}.part"
    )  # same folder, so that replacing is atomic
    metadata = {"ceilings": json.dumps({"kind": _KIND, **header})}
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, metadata)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_tensors(
    path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_tensors` wrote.

    Parameters
    ----------
    path
        The file.
    wanted
        Whether to read the tensor of a name; the others cost neither time nor memory.

    Returns
    -------
    tuple
        The header and the tensors.

    Raises
    ------
    ValueError
        If the file is no safetensors file, or one that holds something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            header = _header(file.metadata(), path)
            return header, {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}): write it again") from error


def _header(metadata: dict[str, str] | None, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Header of a file of moments; refuses any other file."""
    try:
        header: dict[str, Any] = json.loads((metadata or {})["ceilings"])
    except (KeyError, json.JSONDecodeError):
        header = {}
    if header.get("kind") != _KIND:
        raise ValueError(
            f"{path} is a safetensors file but holds no score moments: give one that `save` wrote"
        )
    return header
