"""What is measured: two models, the sequences they score, and one law that is enumerated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Workload", "exact_norms", "llama", "workload"]

MODELS = ("toy", "smollm2")


@dataclass(frozen=True)
class Workload:
    """A model with sequences of one length, prompts of one length, and a reward each; no padding.

    ``chunk`` is how many sequences a method that stores their gradients takes at once: what was fastest for
    such methods here.
    """

    name: str
    model: nn.Module
    ids: Tensor
    prompt: int
    rewards: Tensor
    chunk: int

    @property
    def mask(self) -> Tensor:
        """True at the tokens that are scored."""
        return (torch.arange(self.ids.shape[1]) >= self.prompt).expand(len(self.ids), -1)

    @property
    def labels(self) -> Tensor:
        """Next token of every position, -100 where it is not scored."""
        return self.ids[:, 1:].masked_fill(~self.mask[:, 1:], -100)

    @property
    def inputs(self) -> Tensor:
        """What the model sees: all but the last token."""
        return self.ids[:, :-1]

    def some(self, sequences: int, length: int | None = None) -> Workload:
        """A smaller workload: the first sequences, cut to some tokens."""
        length = self.ids.shape[1] if length is None else length
        return Workload(
            self.name,
            self.model,
            self.ids[:sequences, :length],
            min(self.prompt, length // 2),
            self.rewards[:sequences],
            min(self.chunk, sequences),
        )


def llama(tied: bool = True, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A random Llama, of about a million parameters unless told otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    config = LlamaConfig(**(shape | changes), tie_word_embeddings=tied, initializer_range=0.05)
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def workload(name: str) -> Workload:
    """One of `MODELS` with random tokens and rewards."""
    if name == "toy":
        return _with_sequences(name, llama(), sequences=256, length=32, prompt=8, chunk=64)
    if name == "smollm2":
        from ceilings.pretrained import load_pretrained

        return _with_sequences(name, load_pretrained()[0], sequences=8, length=64, prompt=15, chunk=2)
    raise ValueError(f"no model is called {name!r}: choose from {MODELS}")


def _with_sequences(name: str, model: Any, sequences: int, length: int, prompt: int, chunk: int) -> Workload:
    """Attach random sequences and rewards."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (sequences, length), generator=generator)
    return Workload(name, model, ids, prompt, torch.randn(sequences, generator=generator), chunk)


@contextmanager
def exact_norms() -> Iterator[None]:
    """Take the float32 cast out of Llama's norm: with it no check in float64 reaches below 1e-7."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: LlamaRMSNorm, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    with mock.patch.object(LlamaRMSNorm, "forward", forward):
        yield


def exact_toy(tied: bool = True) -> Workload:
    """The toy model in float64 with a few sequences: where answers are compared."""
    return _with_sequences("toy", llama(tied, torch.float64), sequences=6, length=12, prompt=3, chunk=3)
