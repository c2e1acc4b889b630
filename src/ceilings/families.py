r"""Ten small policies of ten architecture families, made by the configuration classes of `transformers`.

They share width, depth, heads and vocabulary, and differ in what makes a family: the norm and where it stands, how
positions enter, grouped or single keys, gates, biases, a parallel or a sequential block, tied or separate embeddings.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

__all__ = ["FAMILIES", "embedding_share", "family_policy", "inner_matrices"]

_WIDTH: Final = 32
_SHAPE: Final[dict[str, Any]] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    # As wide as the decoders of `ceilings.transformer` begin: half of 1/√width.
    "initializer_range": 0.09,
}
_GROUPED: Final = {"num_key_value_heads": 2, "head_dim": _WIDTH // 4}
_ADDED: Final[dict[str, dict[str, Any]]] = {
    "Llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": _GROUPED,
    "Mistral": {**_GROUPED, "sliding_window": None},
    "Gemma": {**_GROUPED, "tie_word_embeddings": True},
    "GPT2": {
        "n_embd": _WIDTH,
        "n_inner": 2 * _WIDTH,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "tie_word_embeddings": True,
    },
    "GPTNeoX": {"rotary_pct": 0.5},
    "Phi": {"partial_rotary_factor": 0.5},
    "Olmo2": {"num_key_value_heads": 2},
    "Falcon": {"multi_query": True, "parallel_attn": True, "ffn_hidden_size": 2 * _WIDTH},
}
#: The families, by the prefix of their classes.
FAMILIES: Final = tuple(_ADDED)


def family_policy(name: str, vocab_size: int, seed: int = 0) -> nn.Module:
    """A random policy of one family, in float64 and in evaluation mode.

    Parameters
    ----------
    name
        One of `FAMILIES`.
    vocab_size
        Number of tokens; token 0 ends a response.
    seed
        Seed of the weights.

    Returns
    -------
    nn.Module
        A causal language model of two layers; from ids (N, T) to an output with logits (N, T, V).

    Raises
    ------
    ValueError
        If there is no such family, or the vocabulary has fewer than two tokens.

    Notes
    -----
    Parameters are float64; some families compute their norms, or the angles of their positions, in float32 whatever
    the parameters are. There is no dropout.
    """
    if name not in _ADDED:
        raise ValueError(f"there is no family {name!r}: use one of {', '.join(FAMILIES)}")
    if vocab_size < 2:
        raise ValueError(f"a vocabulary of {vocab_size}: give the end token and at least one other")
    import transformers

    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    shape = {"tie_word_embeddings": False, "vocab_size": vocab_size} | special | _SHAPE | _ADDED[name]
    config = getattr(transformers, f"{name}Config")(**shape, attn_implementation="sdpa")
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    model_class = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # NOTE the draws depend on the default type, which a notebook may have changed.
        torch.set_default_dtype(torch.float32)
        try:
            model: nn.Module = model_class(config).double().eval()
        finally:
            torch.set_default_dtype(before)
    return model


def embedding_share(model: nn.Module) -> float:
    """Share of the parameters in embeddings and in the head.

    Parameters
    ----------
    model
        A policy of `family_policy`.

    Returns
    -------
    float
        0.1 means that nine tenths of the parameters are in the layers and norms; a tied head counts once.

    Units
    -----
    1.
    """
    inside = {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    head = model.get_output_embeddings()  # type: ignore[operator]
    inside |= {id(p) for p in head.parameters()}
    sizes = {id(p): p.numel() for p in model.parameters()}
    return sum(size for key, size in sizes.items() if key in inside) / sum(sizes.values())


def inner_matrices(model: nn.Module) -> tuple[str, ...]:
    """Names of the matrices inside the layers: neither embedding nor head, norm or bias.

    Parameters
    ----------
    model
        A policy of `family_policy`.

    Returns
    -------
    tuple
        In the order of ``named_parameters()``.
    """
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))
    )
