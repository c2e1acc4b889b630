"""What a patch weighs, what it is made of, and what else its result could be stored as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ceilings.patch_coding import entropy_bits
from ceilings.patch_manifest import Manifest
from ceilings.safetensors_file import BITS

__all__ = ["PatchSummary"]

# Tables that an adapter leaves alone, by parts of their names.
_TABLES: Final = ("embed", "wte", "wpe", "lm_head", "output.weight")


@dataclass(frozen=True)
class PatchSummary:
    """Size of a patch, what it is made of, and what else the result could be stored as.

    Parameters
    ----------
    path
        The file.
    size
        Its bytes.
    manifest
        What it says of itself.
    """

    path: Path
    size: int
    manifest: Manifest

    @property
    def changed(self) -> int:
        """Changed numbers, among those that base and result have in common."""
        return sum(t.changed for t in self.manifest.tuned.values())

    @property
    def common(self) -> int:
        """Numbers that base and result have in common."""
        return sum(t.common // t.what.width for t in self.manifest.tuned.values())

    @property
    def density(self) -> float:
        """Share of the common numbers that changed; 1 means all of them."""
        return self.changed / max(1, self.common)

    @property
    def touched(self) -> list[str]:
        """Tensors that are not those of the base."""
        return [n for n, t in self.manifest.tuned.items() if not t.kept]

    @property
    def removed(self) -> list[str]:
        """Tensors of the base that the result does not have."""
        return [n for n in self.manifest.base if n not in self.manifest.tuned]

    @property
    def position_bytes(self) -> int:
        """Bytes that say where."""
        return sum(t.positions for t in self.manifest.tuned.values())

    @property
    def value_bytes(self) -> int:
        """Bytes that say what the changed numbers became."""
        return sum(t.values for t in self.manifest.tuned.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of rows and tensors that the base does not have, and of stretches that are shorter whole."""
        return sum(t.stored for t in self.manifest.tuned.values())

    @property
    def position_bound(self) -> float:
        """Bytes that positions need if in each tensor they are anywhere: Σ n·H(d) / 8."""
        tuned = self.manifest.tuned.values()
        return sum(entropy_bits(t.common // t.what.width, t.changed) for t in tuned if t.changed) / 8

    @property
    def dense_bytes(self) -> int:
        """Bytes of the result stored as it is."""
        return sum(t.what.size for t in self.manifest.tuned.values())

    def adapter_bytes(self, rank: int) -> int:
        """Bytes of a LoRA of this rank on every matrix but embeddings and head, in the format of each matrix.

        Parameters
        ----------
        rank
            The rank.

        Returns
        -------
        int
            The bytes. An adapter of that size need not be able to hold this fine-tune.

        Units
        -----
        bytes.
        """
        return sum(
            rank * sum(t.what.shape) * BITS[t.what.dtype] // 8
            for name, t in self.manifest.tuned.items()
            if len(t.what.shape) == 2 and not any(word in name for word in _TABLES)
        )
