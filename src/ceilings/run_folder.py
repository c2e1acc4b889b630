"""The folder of one measurement: refused when it is another's, resumed when it is this one's."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from ceilings.report import write_json

__all__ = ["RunFolder", "model_fingerprint"]

_OURS: Final = frozenset(
    "run.json rollouts.jsonl moments.safetensors moments-1.safetensors moments-2.safetensors "
    "gradient.safetensors fisher.safetensors tightness.safetensors report.json report.html".split()
)
# What a process that was killed while writing leaves behind: our own temporary files, and those of safetensors.
_UNFINISHED: Final = re.compile(r"\..+\.part|\.tmp\w{6}")
_PROBED: Final = 256  # entries of each tensor that go into a model's fingerprint


class RunFolder:
    """Where a measurement keeps what it has done.

    Parameters
    ----------
    path
        The folder. It is made by `claim`, not before.

    Raises
    ------
    ValueError
        If it cannot be written to, or holds something that is not a run of this command.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        existing = self.path
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ValueError(f"{self.path} cannot be written to: choose another --out")
        self._made_here = not self.path.exists()
        held = {p.name for p in self.path.iterdir()} if self.path.exists() else set()
        strangers = {name for name in held if name not in _OURS and not _UNFINISHED.fullmatch(name)}
        if held and ("run.json" not in held or strangers):
            raise ValueError(
                f"{self.path} is not empty and holds more than a run of this command "
                f"({sorted(strangers or held)[0]!r}): choose another --out"
            )

    @property
    def rollouts(self) -> Path:
        """Sampled rollouts."""
        return self.path / "rollouts.jsonl"

    def moments(self, fold: int | None = None) -> Path:
        """Score moments, of all responses of a fold or of those that are done.

        Parameters
        ----------
        fold
            1 or 2; None where the sample is not split.

        Returns
        -------
        Path
            The file.
        """
        return self.path / ("moments.safetensors" if fold is None else f"moments-{fold}.safetensors")

    @property
    def has_moments(self) -> bool:
        """Whether some responses were measured."""
        return any(self.moments(fold).exists() for fold in (None, 1, 2))

    @property
    def finished(self) -> bool:
        """Whether the report is there; it is written last."""
        return (self.path / "report.html").exists() and (self.path / "report.json").exists()

    @property
    def begun(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "run.json").exists()

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse a folder that holds a run with another configuration.

        Parameters
        ----------
        config
            What the result depends on, as plain JSON values.

        Raises
        ------
        ValueError
            If the configuration in the folder differs, or cannot be read.
        """
        if not self.begun:
            return
        try:
            there = json.loads((self.path / "run.json").read_text(encoding="utf-8"))["config"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path / 'run.json'} cannot be read: choose another --out") from None
        plain = json.loads(json.dumps(config))
        if there != plain:
            names = sorted(k for k in {*there, *plain} if there.get(k) != plain.get(k))
            raise ValueError(
                f"{self.path} holds another run (it differs in {', '.join(names)}): "
                "choose another --out, or delete that folder first"
            )

    def claim(self, config: Mapping[str, Any]) -> None:
        """Make the folder, or sweep up what a killed process left in it, and write down what will be measured.

        Parameters
        ----------
        config
            As in `check`.
        """
        self.check(config)
        for path in self.path.iterdir() if self.begun else ():
            if _UNFINISHED.fullmatch(path.name):
                path.unlink()
        if not self.begun:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "run.json", {"config": config})

    def abandon(self) -> None:
        """Take back what `claim` and later steps wrote: the run cannot be finished."""
        for name in _OURS:
            (self.path / name).unlink(missing_ok=True)
        if self._made_here and self.path.exists() and not any(self.path.iterdir()):
            self.path.rmdir()


def model_fingerprint(model: nn.Module) -> str:
    """Short digest of a model's parameters: names, shapes, and some entries of each.

    Parameters
    ----------
    model
        The model.

    Returns
    -------
    str
        Sixteen hexadecimal digits. A change of a few entries of a large matrix may go unseen; a step of training
        does not.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _PROBED)][:_PROBED].cpu().double()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]
