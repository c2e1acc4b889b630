r"""How one call of a module contributes to the score of each sequence.

A rule takes what went into a module, :math:`A`, and the gradient that came back to its output, :math:`G`,
both with the sequence on the first axis, and returns one *term* a parameter. A term can form the gradient of
any sequence on any rows of the parameter when asked; it never stores the gradients of all sequences. A
parameter used several times has several terms, and they are added before anything is squared.

To teach the engine another module, write one function and register it in `RULES`. A module without a rule is
not wrong, only slow: its parameters get one backward pass a sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["RULES", "FullTerm", "OuterTerm", "RowsTerm", "Rule", "Term", "rule_for", "rule_holds"]


class Term(Protocol):
    """Per-sequence gradients of a parameter from one use of it."""

    def add_to(self, block: Tensor, sequences: slice, rows: slice, fresh: bool) -> None:
        """Add gradients of some sequences and rows to ``block`` (n, rows, columns); overwrite if fresh."""


Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, Term]]


class OuterTerm:
    r"""A matrix product: the gradient of sequence n is :math:`\sum_t l_{nt} r_{nt}^\top`.

    Parameters
    ----------
    left, right
        The two factors.

    Shapes
    ------
    left (N, T, rows), right (N, T, columns).
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    def add_to(self, block: Tensor, sequences: slice, rows: slice, fresh: bool) -> None:
        """Add this use."""
        left = self.left[sequences, :, rows].transpose(1, 2)
        block.baddbmm_(left, self.right[sequences], beta=0 if fresh else 1)


class RowsTerm:
    r"""A table look-up: token t of sequence n adds ``values[n, t]`` to row ``ids[n, t]``.

    Parameters
    ----------
    ids
        Rows looked up.
    values
        What flows back to each.

    Shapes
    ------
    ids (N, T), values (N, T, columns).
    """

    def __init__(self, ids: Tensor, values: Tensor) -> None:
        self.rows: list[Tensor] = []
        self.sums: list[Tensor] = []
        for sequence_ids, sequence_values in zip(ids, values, strict=True):
            # A token that occurs twice is one row: its two values are added here, before squaring.
            rows, where = sequence_ids.unique(return_inverse=True)
            zeros = values.new_zeros(len(rows), values.shape[-1])
            self.rows.append(rows)
            self.sums.append(zeros.index_add_(0, where, sequence_values))
        self._sorted_rows: list[list[int]] = [r.tolist() for r in self.rows]

    def add_to(self, block: Tensor, sequences: slice, rows: slice, fresh: bool) -> None:
        """Add this use."""
        if fresh:
            block.zero_()
        for target, n in zip(block, range(sequences.start, sequences.stop), strict=True):
            first = bisect_left(self._sorted_rows[n], rows.start)
            last = bisect_left(self._sorted_rows[n], rows.stop)
            if first < last:
                target.index_add_(0, self.rows[n][first:last] - rows.start, self.sums[n][first:last])


class FullTerm:
    """Gradients small enough to keep for every sequence: those of vectors.

    Parameters
    ----------
    values
        Gradient of each sequence.

    Shapes
    ------
    values (N, columns).
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def add_to(self, block: Tensor, sequences: slice, rows: slice, fresh: bool) -> None:
        """Add this use."""
        values = self.values[sequences].view(block.shape)
        block.copy_(values) if fresh else block.add_(values)


def _linear(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """y = W a + b."""
    return {"weight": OuterTerm(cotangent, inputs), "bias": FullTerm(cotangent.sum(1))}


def _transposed_linear(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """y = Wᵀ a + b: the layout of GPT-2's Conv1D."""
    return {"weight": OuterTerm(inputs, cotangent), "bias": FullTerm(cotangent.sum(1))}


def _embedding(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Rows of a table."""
    return {"weight": RowsTerm(inputs, cotangent)}


def _layer_norm(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """y = w · standardised(a) + b."""
    assert isinstance(module, nn.LayerNorm)
    normalised = functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    return {"weight": FullTerm((cotangent * normalised).sum(1)), "bias": FullTerm(cotangent.sum(1))}


def _scaled(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """y = f(a) + w · h(a) for unknown f and h, as in every RMSNorm: h is y at w = 1 minus y at w = 0."""
    normalised = _with_weight(module, inputs, 1.0) - _with_weight(module, inputs, 0.0)
    return {"weight": FullTerm((cotangent * normalised.to(cotangent.dtype)).sum(1))}


def _with_weight(module: nn.Module, inputs: Tensor, value: float) -> Tensor:
    """Output of a module with every entry of its weight set to one value."""
    weight = module._parameters["weight"]
    assert weight is not None
    try:
        module._parameters["weight"] = nn.Parameter(torch.full_like(weight, value), requires_grad=False)
        output: Tensor = module.forward(inputs)  # not module(inputs), which would run the hooks
        return output
    finally:
        module._parameters["weight"] = weight


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _scaled,
}


def rule_for(module: nn.Module) -> Rule | None:
    """Rule of a module, or None where it has no exact fast one.

    Parameters
    ----------
    module
        Any module. A subclass does not inherit the rule of its parent: its ``forward`` may differ.

    Returns
    -------
    Callable or None
        Maps (module, inputs, cotangent) to one term a parameter.
    """
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        return None
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        return None
    if type(module) in RULES:
        return RULES[type(module)]
    # Norms and GPT-2's Conv1D belong to model libraries; importing one to ask for a class would be dear.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return _transposed_linear
    if type(module).__name__.endswith("RMSNorm") and set(module._parameters) == {"weight"}:
        return _scaled
    return None


def rule_holds(module: nn.Module, inputs: Tensor, output: Tensor) -> bool:
    """Whether what a rule assumes about its module is true of one call.

    Parameters
    ----------
    module
        A module that has a rule.
    inputs, output
        One call of it.

    Returns
    -------
    bool
        True where the rule may be used. Only the rule for norms assumes anything: that y = f(a) + w · h(a).
    """
    if rule_for(module) is not _scaled:
        return True
    weight = module._parameters["weight"]
    if weight is None or weight.shape != inputs.shape[-1:]:
        return False
    at_zero, at_one = _with_weight(module, inputs, 0.0), _with_weight(module, inputs, 1.0)
    error = (at_zero + weight * (at_one - at_zero) - output).abs().max()
    return bool(error <= 64 * torch.finfo(output.dtype).eps * output.abs().max())
