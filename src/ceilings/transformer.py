r"""A small decoder that is exact in float64, and the enumeration of everything it can say.

The architecture is the one of current small language models (RMSNorm, rotary positions, causal attention,
gated MLP, no biases) and so are the module names, which makes its parameters read like those of a real
checkpoint. Written out here because the usual implementations cast to float32 inside the norm, the rotary
angles and the softmax: with those an identity can be checked to 1e-7 only, here to 1e-15. Enumeration works
for any causal model and lives in `ceilings.prefix_tree`; its functions can be imported from here as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ceilings.prefix_tree import ResponseLaw, enumerate_responses, enumeration, expected_reward

__all__ = [
    "ResponseLaw",
    "TinyTransformer",
    "TransformerConfig",
    "enumerate_responses",
    "enumeration",
    "expected_reward",
]


@dataclass(frozen=True)
class TransformerConfig:
    r"""Shape of a `TinyTransformer`.

    Parameters
    ----------
    vocab_size
        Number of tokens, V.
    width
        Width of the residual stream; a multiple of ``2 * heads``, since rotary positions turn pairs of
        coordinates.
    depth
        Number of layers.
    heads
        Attention heads in each layer.
    mlp_width
        Hidden width of the gated MLP.
    tied
        True when the output head *is* the embedding matrix: one parameter, used twice.
    init_scale
        Every matrix starts with independent normal entries of standard deviation ``init_scale /
        sqrt(columns)``. 1 gives next-token laws that are clearly not uniform; a tenth of it nearly uniform
        ones.
    rotary_base
        Base of the rotary angles.

    Raises
    ------
    ValueError
        If a size is not positive, or ``width`` does not divide as said above.
    """

    vocab_size: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    tied: bool = True
    init_scale: float = 1.0
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        """Refuse shapes that no model can have."""
        for name in ("vocab_size", "width", "depth", "heads", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} is not a multiple of 2 * heads = {2 * self.heads}; change either"
            )


class RMSNorm(nn.Module):
    """Divide by the root mean square, then scale each coordinate."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.base = config.heads, config.rotary_base
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(config.width, config.width) for _ in range(4)
        )

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Mix positions; ``visible[n, 0, t, u]`` is True where t may look at u."""
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self._rotate(q), self._rotate(k)
        match = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        attention = match.masked_fill(~visible, -math.inf).softmax(-1)
        return self.o_proj((attention @ v).transpose(-2, -3).flatten(-2))

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn each coordinate pair by an angle proportional to the position."""
        half = x.shape[-1] // 2
        position = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
        speed = self.base ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
        angle = position[:, None] * speed
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class GatedMLP(nn.Module):
    """SwiGLU: a linear map gated by another."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.width, config.mlp_width)
        self.up_proj = _linear(config.width, config.mlp_width)
        self.down_proj = _linear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position on its own."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), GatedMLP(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config.width), RMSNorm(config.width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """One layer."""
        x = x + self.self_attn(self.input_layernorm(x), visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything below the head."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width, dtype=torch.float64)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.depth))
        self.norm = RMSNorm(config.width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Hidden state at every position."""
        steps = torch.arange(input_ids.shape[-1], device=input_ids.device)
        visible = (steps[:, None] >= steps)[None, None]
        if attention_mask is not None:
            # NOTE a padded position still sees itself: softmax over nothing is NaN, and NaN times 0 spreads.
            visible = visible & attention_mask.bool()[:, None, None, :] | (steps[:, None] == steps)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, visible)
        return self.norm(x)


class TinyTransformer(nn.Module):
    r"""A decoder in float64 throughout, with reproducible weights.

    Parameters
    ----------
    config
        Its shape.
    seed
        Seed of the generator that draws the weights; the global generator is not touched.

    Notes
    -----
    A tied head appears once among ``named_parameters()``, as ``model.embed_tokens.weight``; an
    untied one is ``lm_head.weight``. The flat order of parameters everywhere in this library is that of
    ``named_parameters()``.
    """

    def __init__(self, config: TransformerConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = _linear(config.width, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(
                        0.0, config.init_scale / math.sqrt(parameter.shape[1]), generator=generator
                    )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        r"""Logits of the next token at every position.

        Parameters
        ----------
        input_ids
            Token numbers.
        attention_mask
            True (or 1) at real tokens, False (or 0) at padding; None when there is none.

        Returns
        -------
        Tensor
            ``logits[n, t]`` scores the token that follows ``input_ids[n, :t + 1]``.

        Shapes
        ------
        input_ids (N, T), attention_mask (N, T) -> (N, T, V).

        Notes
        -----
        Rotary attention depends on differences of positions only, so padding on the left shifts nothing.
        """
        return self.lm_head(self.model(input_ids, attention_mask))


def _linear(columns: int, rows: int) -> nn.Linear:
    """Return a float64 matrix without bias."""
    return nn.Linear(columns, rows, bias=False, dtype=torch.float64)
