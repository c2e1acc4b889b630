"""A GGUF file: its header without its vocabulary, and its tensors under their Hugging Face names, one at a time.

Names and layouts are those of `transformers`: the conversion there knows which rows llama.cpp permuted. A quantised
tensor is de-quantised to float32, and these numbers *are* the model: a trainer that started here saw no others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ceilings.safetensors_file import TensorInfo

__all__ = ["GgufFile", "conversion_of", "silence"]

_LONG_ARRAY: Final = 1000  # a header's vocabulary and merges; every other array of a header is short
_PLAIN: Final = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16"}
_NO_WEIGHTS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class GgufFile:
    """Tensors of one file by their Hugging Face names.

    Parameters
    ----------
    path
        The file.
    places
        Name inside the file by Hugging Face name.
    ties
        The output head, where the file holds none of its own.
    metadata
        Architecture and name of the model.
    notes
        What a reader should know.
    """

    path: Path
    places: dict[str, str]
    ties: dict[str, str]
    metadata: dict[str, str]
    notes: tuple[str, ...]
    _tensors: dict[str, Any] = field(repr=False)
    _processor: Any = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        GgufFile
            The file; no weights were read.

        Raises
        ------
        ValueError
            If it is no GGUF file, is not whole, or holds an architecture whose tensors cannot be told apart.
        """
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is no GGUF file: give the ending that its format has")
        try:
            with silence(), conversion_of(path) as (conversion, skeleton, reader):
                tensors = {tensor.name: tensor for tensor in reader.tensors}
                kind = str(conversion.read_field(reader, "general.architecture")[0])
                processor = conversion.TENSOR_PROCESSORS.get(kind, conversion.TensorProcessor)(
                    config=skeleton.config.to_dict()
                )
                mapping = conversion.get_gguf_hf_weights_map(skeleton, processor)
                tied = bool(skeleton.config.tie_word_embeddings)
        except ImportError as error:
            raise ValueError(
                f"{path}: GGUF needs the packages transformers and gguf: install them"
            ) from error
        except (OSError, ValueError, LookupError, RuntimeError, struct.error) as error:
            reason = " ".join(str(error).split())[:160]
            raise ValueError(f"{path} is truncated or no GGUF file that can be read ({reason})") from error
        unknown = [name for name in tensors if name not in mapping and name not in _NO_WEIGHTS]
        if unknown:
            raise ValueError(
                f"{path}: {unknown[0]!r} has no place in {kind!r} as transformers knows it: convert the file to "
                "safetensors first"
            )
        places = {mapping[name]: name for name in tensors if name in mapping}
        ties = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        if not (set(ties.values()) <= set(places)) or set(ties) & set(places):
            ties = {}
        return cls(path, places, ties, {"architecture": kind}, (), tensors, processor)

    def infos(self) -> dict[str, TensorInfo]:
        """Number format and shape of every tensor.

        Returns
        -------
        dict
            By Hugging Face name.
        """
        return {name: self._info(place) for name, place in self.places.items()}

    def tensor(self, name: str) -> Tensor:
        """Tensor, de-quantised where it is quantised.

        Parameters
        ----------
        name
            Its Hugging Face name.

        Returns
        -------
        Tensor
            A copy, with rows in the order of `transformers`.

        Raises
        ------
        ValueError
            If the tensor's layout is one that `transformers` takes apart while loading.
        """
        import gguf

        place = self.places[name]
        info, stored = self._info(place), self._tensors[place]
        values = gguf.dequantize(stored.data, stored.tensor_type)
        aside: dict[str, dict[str, Any]] = {"tensors": {}}
        found = self._processor.process(
            weights=values, name=place, tensor_key_mapping={}, parsed_parameters=aside
        )
        if aside["tensors"] or found.name != place:
            raise ValueError(
                f"{self.path}: {place!r} is laid out in a way that cannot be read one by one: convert the file to "
                "safetensors first"
            )
        dtype = {"F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}.get(
            info.dtype, torch.float32
        )
        return torch.from_numpy(np.require(found.weights, requirements=["C", "W"])).to(dtype)

    def raw(self, name: str) -> memoryview:
        """Refuse to hand out bytes.

        Parameters
        ----------
        name
            Name of a tensor.

        Raises
        ------
        ValueError
            Always.
        """
        raise ValueError(
            f"{self.path}: the bytes of {name!r} in a GGUF file are not those of a model: save the de-quantised "
            "tensors as safetensors first"
        )

    def _info(self, place: str) -> TensorInfo:
        tensor = self._tensors[place]
        kind = str(tensor.tensor_type.name)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        return TensorInfo(_PLAIN.get(kind, "F32"), shape, self.path, "" if kind in _PLAIN else kind)


@contextlib.contextmanager
def conversion_of(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """What `transformers` needs to convert a GGUF file, with the file parsed once.

    Parameters
    ----------
    path
        The file.

    Yields
    ------
    tuple
        The conversion's module, which reads this file only while the context lasts; the model without its weights;
        the file's reader.
    """
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM

    conversion: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    reader = _header_reader(path)
    with (
        mock.patch.object(gguf, "GGUFReader", lambda _: reader),
        # NOTE the conversion asks for the same table of names once for every submodule.
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        mock.patch.object(conversion, "tqdm", functools.partial(conversion.tqdm, disable=True)),
    ):
        settings = conversion.load_gguf_checkpoint(str(path))["config"]
        settings["vocab_size"] = settings.get("vocab_size") or _vocabulary_size(reader)
        config = AutoConfig.for_model(**settings)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        yield conversion, skeleton, reader


def _header_reader(path: Path) -> Any:
    """`gguf.GGUFReader` of a file, without its vocabulary: that alone takes most of a reading."""
    import gguf

    array, string = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING

    class HeaderReader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
            if raw_type != array or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            blob: Any = self.data
            item, count = struct.unpack_from("=IQ", blob, orig_offs)
            if count < _LONG_ARRAY or item == array:
                return super()._get_field_parts(orig_offs, raw_type)
            end = orig_offs + 12
            if item == string:
                for _ in range(count):
                    end += 8 + struct.unpack_from("=Q", blob, end)[0]
            else:
                end += count * np.dtype(self.gguf_scalar_to_np[gguf.GGUFValueType(item)]).itemsize
            return end - orig_offs, [], [], [array, gguf.GGUFValueType(item)]

    return HeaderReader(path)


def _vocabulary_size(reader: Any) -> int:
    """Rows of the embedding, for a header that does not state them."""
    return next(int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing from the loaders reaches stdout, stderr or the network while the context lasts.

    Yields
    ------
    None
        Nothing.
    """
    with (
        mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}),
        contextlib.ExitStack() as stack,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        from transformers.utils import logging as hf_logging

        verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
        hf_logging.set_verbosity(logging.CRITICAL)
        hf_logging.disable_progress_bar()
        stack.callback(hf_logging.set_verbosity, verbosity)
        if bars:
            stack.callback(hf_logging.enable_progress_bar)
        yield
