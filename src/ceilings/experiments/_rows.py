"""Collecting what each seed measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["append"]


def append(values: dict[str, Any], row: Mapping[str, Any], *keys: str) -> None:
    """Add one seed's entry to every leaf.

    Parameters
    ----------
    values
        Leaves so far, one entry a seed; changed in place.
    row
        Entries of the seed by name; what is a mapping has leaves below it.
    keys
        Where the leaves stand, from the root.
    """
    for key in keys:
        values = values.setdefault(key, {})
    for name, value in row.items():
        if isinstance(value, Mapping):
            append(values, value, name)
        else:
            values.setdefault(name, []).append(value)
