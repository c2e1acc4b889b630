"""Which names of a checkpoint are one tensor: told by its configuration, by its file, or by equal bytes.

A language model's output head is often its input embedding. Some files hold the matrix once, some twice, and a
comparison that does not know counts a quarter of a small model twice, or reports it as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

__all__ = ["find_ties", "head_and_embedding", "says_tied"]

_HEADS: Final = ("lm_head.weight", "embed_out.weight", "output_projection.weight")
_EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)


def says_tied(config: Mapping[str, Any]) -> bool | None:
    """Whether a configuration ties the output head to the input embedding.

    Parameters
    ----------
    config
        What ``config.json`` holds.

    Returns
    -------
    bool | None
        None where it does not say, and each architecture has its own default.
    """
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return None


def head_and_embedding(names: Iterable[str]) -> tuple[str | None, str | None]:
    """Names of the output head and of the input embedding.

    Parameters
    ----------
    names
        All names of a checkpoint.

    Returns
    -------
    tuple
        The two names; None for one that is not there, or of which there are several.
    """
    names = list(names)

    def only(endings: tuple[str, ...]) -> str | None:
        found = [n for n in names if any(n == e or n.endswith(f".{e}") for e in endings)]
        return found[0] if len(found) == 1 else None

    return only(_HEADS), only(_EMBEDDINGS)


def find_ties(
    names: Iterable[str],
    config: Mapping[str, Any],
    metadata: Mapping[str, str],
    same: Callable[[str, str], bool],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Other names of tensors that are stored once, or that are one tensor stored twice.

    Parameters
    ----------
    names
        Stored names.
    config
        What ``config.json`` holds.
    metadata
        Free text of a safetensors file: names that were dropped when it was written lead to the name that was kept.
    same
        Whether two stored tensors are equal byte for byte.

    Returns
    -------
    tuple
        Stored name by other name, and notes for the reader.
    """
    stored = set(names)
    ties = {other: kept for other, kept in metadata.items() if kept in stored and other not in stored}
    head, embedding = head_and_embedding(names)
    tied = says_tied(config)
    if embedding is None or tied is False:
        return ties, ()
    if head is None:
        # NOTE absent and tied is not missing. Where the configuration is silent nothing is assumed.
        return (ties | {"lm_head.weight": embedding} if tied else ties), ()
    if same(head, embedding):
        return ties | {head: embedding}, ()
    if tied:
        return ties, (
            f"the configuration ties {head} to {embedding}, but two different matrices are stored; both are counted",
        )
    return ties, ()
