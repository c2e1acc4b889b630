"""What the settings of a PEFT adapter mean for its change, and which of them make it another than scaling · B A."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["PREFIX", "read_settings", "scaling", "unknown_settings"]

#: What PEFT puts in front of every name.
PREFIX: Final = "base_model.model."
# Initialisations that change the base: the stored A and B are a difference from a base that is not on disk.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings whose change of a matrix is not scaling · B A, or not of a matrix alone.
_REFUSED: Final = {
    "use_dora": "DoRA, which rescales rows too",
    "lora_bias": "a LoRA with biases",
    "layer_replication": "a LoRA on replicated layers",
    "target_parameters": "a LoRA on parameters outside of linear layers",
    "alora_invocation_tokens": "an activated LoRA, which changes the weights for some tokens only",
    "trainable_token_indices": "a LoRA with trained tokens",
    "use_qalora": "a LoRA on pooled inputs",
    "use_bdlora": "a LoRA of diagonal blocks",
    "arrow_config": "a mixture of adapters, which changes the weights for each token anew",
    "kasa_config": "KaSA, which changes the base as well",
}
# Settings that say how it was trained, or that are used here.
_KNOWN: Final = frozenset(
    """peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules
    exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save init_lora_weights
    layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config megatron_core loftq_config eva_config
    corda_config lora_ga_config velora_config monteclora_config qalora_group_size runtime_config
    ensure_weight_tying""".split()
)


def read_settings(path: Path) -> dict[str, Any]:
    """Settings of an adapter, refused where its change is not scaling · B A.

    Parameters
    ----------
    path
        The file ``adapter_config.json``.

    Returns
    -------
    dict
        The settings.

    Raises
    ------
    ValueError
        If it is no such file, or says that the adapter is of another kind.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("peft_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again") from error
    merge = "merge it into the base with PEFT and compare the merged model"
    if kind != "LORA":
        raise ValueError(f"{path}: adapters of the kind {kind!r} are not supported, only LORA: {merge}")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ValueError(f"{path}: this is {what}, which is not supported: {merge}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ValueError(f"{path}: the adapter began as {start!r}, which changes the base as well: {merge}")
    return config


def unknown_settings(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Note on settings that a later PEFT may have brought.

    Parameters
    ----------
    path
        File of the settings.
    config
        What it holds.

    Returns
    -------
    list
        One sentence, or none.
    """
    names = sorted(key for key, value in config.items() if value and key not in _KNOWN)
    if not names:
        return []
    return [
        f"{path} has settings that are not known here ({', '.join(names)}): if they make the change another than "
        "scaling · B A, merge the adapter with PEFT and compare the merged model"
    ]


def scaling(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Factor in front of B A.

    Parameters
    ----------
    module
        Name of the module as the adapter's file has it.
    rank
        Rows of A.
    config
        The settings.

    Returns
    -------
    float
        α/r, or α/√r of a rank-stabilised adapter; α may be the module's own.
    """
    module = module.removeprefix(PREFIX)
    patterns = config.get("alpha_pattern") or {}
    # The first pattern that the end of the module's name matches.
    key = next((k for k in patterns if re.match(rf"(.*\.)?({k})$", module)), None)
    alpha = float(patterns[key] if key is not None else config.get("lora_alpha", 8))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
