r"""How a parameter is used in a forward pass, and what that says of its gradients: one rule a kind of module.

The activations A that a parameter meets, and the outputs it helps to make, are recorded once. With the gradients G of a
scalar in those outputs they give the parameter's own gradient:

- a linear map: :math:`\sum_t G_{to} A_{ti}`;
- a scale or a bias: :math:`\sum_t G_{tj} A_{tj}`, with A = 1 for a bias;
- a row of an embedding: the sum of :math:`G_t` over the positions t that hold its token.

Here one A belongs to many G: `SquareSum` sums the squares of many gradients without forming one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["SquareSum", "Use", "joined", "recorder"]

_NO_ROW: Final = -1  # a position whose token has no row of its own


@dataclass(frozen=True)
class Use:
    """How a parameter was used: ``activations`` (T, I), and the outputs (…, T, O) of every call, T adding up.

    "linear" is a weight (O, I), "transposed" one stored as (I, O); "scale" a vector that multiplies activations
    (T, O), or is added where they are 1; "lookup" a matrix whose rows ``activations`` (T,) picks.
    """

    kind: Literal["linear", "transposed", "scale", "lookup"]
    activations: Tensor
    outputs: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Numbers in one cotangent's output gradients."""
        return sum(output.numel() for output in self.outputs)

    def gradient(self, parameter: Tensor, upstream: Tensor) -> Tensor:
        """Gradient of one parameter from output gradients (T, O)."""
        if self.kind == "linear":
            return upstream.T @ self.activations
        if self.kind == "transposed":
            return self.activations.T @ upstream
        if self.kind == "scale":
            return (upstream * self.activations).sum(0)
        kept = self.activations != _NO_ROW
        return torch.zeros_like(parameter, requires_grad=False).index_add_(
            0, self.activations[kept], upstream[kept]
        )

    def gradient_at(self, parameter: Tensor, upstream: Tensor, where: Tensor) -> Tensor:
        """Entries ``where`` (flat) of one parameter's gradients from output gradients (K, T, O); shape (K, M)."""
        if self.kind == "scale":
            return (upstream * self.activations).sum(1)[:, where]
        row, column = where // parameter.shape[1], where % parameter.shape[1]
        output, into = (row, column) if self.kind == "linear" else (column, row)
        total = upstream.new_zeros(len(upstream), len(where))
        for t in range(upstream.shape[1]):
            factor = (
                (self.activations[t] == row).to(upstream)
                if self.kind == "lookup"
                else self.activations[t, into]
            )
            total.addcmul_(upstream[:, t, output], factor)
        return total


class SquareSum:
    """Sum over cotangents of one parameter's squared gradients, without the gradients where that can be."""

    def __init__(self, use: Use, parameter: Tensor) -> None:
        self.use, self.parameter = use, parameter
        self.pairs = use.kind in ("linear", "transposed")
        self.total: Tensor | None = None
        if use.kind == "lookup":
            self.kept = use.activations != _NO_ROW
            self.rows, self.position = use.activations[self.kept].unique(return_inverse=True)

    def add(self, upstream: Tensor) -> None:
        """Count output gradients (K, T, O) in."""
        if self.pairs:
            # Pairs t ≤ s in the order of `triu_indices`. NOTE ten times as fast here as the one einsum.
            later = (
                torch.linalg.vecdot(upstream[:, t:], upstream[:, t : t + 1], dim=0)
                for t in range(upstream.shape[1])
            )
            part = torch.cat(list(later)).double()
        elif self.use.kind == "lookup":
            rows = upstream.new_zeros(len(upstream), len(self.rows), upstream.shape[2])
            part = rows.index_add_(1, self.position, upstream[:, self.kept]).square().sum(0)
        else:
            part = (upstream * self.use.activations).sum(1).square().sum(0)
        self.total = part if self.total is None else self.total.add_(part)

    def result(self) -> Tensor:
        """The sum, shaped as the parameter."""
        assert self.total is not None
        if self.use.kind == "lookup":
            dense = torch.zeros_like(self.parameter, requires_grad=False)
            return dense.index_copy_(0, self.rows, self.total)
        if not self.pairs:
            return self.total
        # The double sum over positions is symmetric. Float64, because its terms may cancel.
        a = self.use.activations.double()
        t, s = torch.triu_indices(len(a), len(a))
        both = self.total * torch.where(t == s, 1.0, 2.0).double()[:, None]
        squares = (both.T @ (a[t] * a[s])).clamp_min_(0).to(self.parameter.dtype)
        return squares if self.use.kind == "linear" else squares.T.contiguous()


def joined(calls: list[tuple[str, Use]]) -> dict[str, Use | None]:
    """Repeated uses of a parameter as one; None where no single rule covers them."""
    result: dict[str, Use | None] = {}
    for name, use in calls:
        if name not in result:
            result[name] = use
            continue
        other = result[name]
        same = other is not None and other.kind == use.kind
        result[name] = (
            Use(use.kind, torch.cat([other.activations, use.activations]), other.outputs + use.outputs)
            if same and other is not None
            else None
        )
    return result


def recorder(own: dict[str, str], calls: list[tuple[str, Use]]) -> Callable[..., Any]:
    """Forward hook that notes the uses of a module's parameters, where there is a rule for it."""
    probing = False

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal probing
        rule = next((rule for applies, rule in _RULES if applies(module)), None)
        if probing or rule is None or len(args) != 1 or not isinstance(output, Tensor):
            return None
        probing = True  # a rule may call the module again
        found = rule(module, args[0].detach(), output)
        probing = False
        if set(found) == set(own):
            calls.extend((own[local], use) for local, use in found.items())
        # NOTE a copy goes on: an in-place activation would otherwise overwrite the output whose gradient is wanted.
        return output.clone()

    return hook


def _linear(module: Any, x: Tensor, y: Tensor) -> dict[str, Use]:
    """`nn.Linear`, and the transposed layer of GPT-2."""
    kind: Literal["linear", "transposed"] = "linear" if isinstance(module, nn.Linear) else "transposed"
    uses = {"weight": Use(kind, x.flatten(0, -2), (y,))}
    if module.bias is not None:
        uses["bias"] = Use("scale", x.new_ones(y.shape[:-1].numel(), 1), (y,))
    return uses


def _embedding(module: Any, ids: Tensor, y: Tensor) -> dict[str, Use]:
    """`nn.Embedding`. As in training, the row of a padding index gets no gradient from being looked up."""
    if module.padding_idx is not None:
        ids = ids.masked_fill(ids == module.padding_idx, _NO_ROW)
    return {"weight": Use("lookup", ids.flatten(), (y,))}


def _norm(module: Any, x: Tensor, y: Tensor) -> dict[str, Use]:
    """Any normalisation that is affine in a vector ``weight``: what the weight multiplies is read off by probing."""
    present = dict(module.named_parameters(recurse=False))
    if module.weight.ndim != 1 or not set(present) <= {"weight", "bias"}:
        return {}

    def at(weight: Tensor, bias: float) -> Tensor:
        values = {"weight": weight} | ({"bias": present["bias"].detach() * bias} if "bias" in present else {})
        return functional_call(module, values, (x,)).detach()

    w = module.weight.detach()
    zero = at(torch.zeros_like(w), 0)
    factor = at(torch.ones_like(w), 0) - zero
    if not torch.allclose(at(w, 1) - at(w, 0) + zero + factor * w, y.detach(), rtol=1e-4, atol=1e-5):
        return {}
    uses = {"weight": Use("scale", factor.flatten(0, -2), (y,))}
    if "bias" in present:
        uses["bias"] = Use("scale", x.new_ones(y.shape[:-1].numel(), 1), (y,))
    return uses


# One rule a kind of module: how its parameters were used, or nothing where the rule does not hold.
_RULES: Final = (
    (lambda m: type(m) is nn.Linear or type(m).__name__ == "Conv1D", _linear),
    (lambda m: type(m) is nn.Embedding, _embedding),
    (lambda m: type(m).__name__.endswith("Norm") and hasattr(m, "weight"), _norm),
)
