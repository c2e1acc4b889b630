"""Where a parameter sits in a model, as far as its name tells."""

from __future__ import annotations

import re

__all__ = ["place"]


def place(name: str) -> tuple[int | None, str]:
    """Layer and kind of matrix that a parameter's name tells.

    Parameters
    ----------
    name
        Its name.

    Returns
    -------
    tuple
        Number of the layer, None outside the layers; the kind, which the experts of a layer share.
    """
    short = name.removesuffix(".weight")
    found = re.search(r"(?:^|\.)(\d+)\.(.+)$", short)
    if found is None:
        return None, short
    return int(found[1]), re.sub(r"\.\d+(?=\.|$)", ".*", found[2])
