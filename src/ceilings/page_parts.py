"""What the pages of all commands are made of: one file that needs nothing but a browser."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Final

__all__ = ["bullets", "document", "short", "table", "tiles"]

_STYLE: Final = files("ceilings").joinpath("report.css").read_text(encoding="utf-8")


def document(title: str, parts: Iterable[str]) -> str:
    """Page of several parts.

    Parameters
    ----------
    title
        Plain text.
    parts
        HTML; empty ones are left out.

    Returns
    -------
    str
        HTML with its style inside: no script, and no request to anywhere.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def tiles(entries: Iterable[tuple[str, str]]) -> str:
    """Numbers to begin with.

    Parameters
    ----------
    entries
        A number and what it is, as HTML.

    Returns
    -------
    str
        HTML.
    """
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{what}</span></div>' for value, what in entries)
    return f'<div class="tiles">{shown}</div>'


def bullets(sentences: Iterable[str]) -> str:
    """Bulleted sentences.

    Parameters
    ----------
    sentences
        Plain text.

    Returns
    -------
    str
        HTML.
    """
    return "<ul>" + "".join(f"<li>{html.escape(s)}</li>" for s in sentences) + "</ul>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Table whose first column is a name and whose others are numbers.

    Parameters
    ----------
    heads
        Plain text.
    rows
        Cells, as HTML.

    Returns
    -------
    str
        HTML; a wide table scrolls by itself.
    """
    top = "".join(f"<th{'' if k == 0 else ' class=num'}>{html.escape(h)}</th>" for k, h in enumerate(heads))
    rows = list(rows)
    assert all(len(row) == len(heads) for row in rows)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{"num" if k else "name"}">{c}</td>' for k, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def short(matrix: str) -> str:
    """Name of a matrix without the block that it sits in, unless that says what it is.

    Parameters
    ----------
    matrix
        Kind of a matrix.

    Returns
    -------
    str
        Its last part, or the last two.
    """
    parts = [part for part in matrix.split(".") if part != "*"]
    return ".".join(parts[-2:]) if parts[-1] in ("bias", "dense") else parts[-1]
