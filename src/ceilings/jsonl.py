"""Reading JSON Lines so that every complaint names the file and the line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Line", "read_lines"]


@dataclass(frozen=True)
class Line:
    """One object of a JSON Lines file.

    Parameters
    ----------
    where
        File and line number, for messages.
    values
        The object.
    """

    where: str
    values: Mapping[str, Any]

    def first(self, names: Sequence[str]) -> Any:
        """Value of the first of several names that is there.

        Parameters
        ----------
        names
            Names in the order of preference.

        Returns
        -------
        Any
            The value; None if no name is there, or if it holds null.
        """
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """Token ids under a name.

        Parameters
        ----------
        name
            Where they are.

        Returns
        -------
        tuple
            The ids; None if the name is not there.

        Raises
        ------
        ValueError
            If what is there is no list of whole numbers.
        """
        ids = self.values.get(name)
        if ids is None:
            return None
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise ValueError(
                f"{self.where}: {name} must be a list of whole numbers, such as [1, 15, 7]; it is {_short(ids)}"
            )
        return tuple(ids)


def read_lines(path: str | os.PathLike[str]) -> list[Line]:
    """Objects of a JSON Lines file; blank lines are passed over.

    Parameters
    ----------
    path
        The file, in UTF-8.

    Returns
    -------
    list
        One `Line` an object.

    Raises
    ------
    ValueError
        If the file is missing, unreadable or empty, or a line is no JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}: check the name and the folder") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ValueError(f"{path} cannot be read: {reason}") from None
    lines = []
    for number, row in enumerate(text.split("\n"), 1):
        if row.strip():
            lines.append(Line(f"{path}, line {number}", _object(row, f"{path}, line {number}")))
    if not lines:
        raise ValueError(f"{path} is empty: give one JSON object a line")
    return lines


def _object(row: str, where: str) -> dict[str, Any]:
    """Parse one line."""
    try:
        values = json.loads(row)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not complete JSON ({error.msg.removesuffix(' at')} at column {error.colno}); "
            "correct the line, or delete it if the file was cut short"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a JSON object in braces, found {_short(values)}")
    return values


def _short(value: Any) -> str:
    """Value for a message, cut."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
