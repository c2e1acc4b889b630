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

__all__ = ["RULES", "FullTerm", "OuterTerm", "RowsTerm", "Rule", "Term", "Write", "joined", "rule_for"]


Write = Callable[[Tensor, slice, bool], None]


class Term(Protocol):
    """Per-sequence gradients of a parameter from one use of it."""

    def on_rows(self, rows: slice) -> Write:
        """Prepare for some rows of the parameter.

        Parameters
        ----------
        rows
            The rows.

        Returns
        -------
        Callable
            ``write(block, sequences, fresh)`` adds the gradients of some sequences to ``block``, or
            overwrites it when ``fresh``.

        Shapes
        ------
        block (n, rows, columns).
        """


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
        self._columns = left.transpose(1, 2)

    def on_rows(self, rows: slice) -> Write:
        """Prepare for some rows: see `Term`."""
        # NOTE narrow, and no view that is not needed: this runs thousands of times a batch.
        left, right = self._columns.narrow(1, rows.start, rows.stop - rows.start), self.right
        number = len(right)

        def write(block: Tensor, sequences: slice, fresh: bool) -> None:
            if len(block) == number:
                block.baddbmm_(left, right, beta=0 if fresh else 1)
            else:
                block.baddbmm_(left[sequences], right[sequences], beta=0 if fresh else 1)

        return write


class RowsTerm:
    r"""A table look-up: token t of sequence n adds ``values[n, t]`` to row ``ids[n, t]``.

    Parameters
    ----------
    ids
        Rows looked up.
    values
        What flows back to each.

    Attributes
    ----------
    sequences, rows, sums
        One entry for each row that a sequence looked up, sorted by sequence and row.

    Shapes
    ------
    ids (N, T), values (N, T, columns); sequences and rows (U,), sums (U, columns).
    """

    def __init__(self, ids: Tensor, values: Tensor) -> None:
        self._ids, self._values = ids, values
        self._size = int(ids.max()) + 1
        number = torch.arange(len(ids), device=ids.device)[:, None]
        # A token that occurs twice is one row: its two values are added here, before squaring.
        keys, where = (number * self._size + ids).unique(return_inverse=True)
        self.sequences, self.rows = keys // self._size, keys % self._size
        zeros = values.new_zeros(len(keys), values.shape[-1])
        self.sums = zeros.index_add_(0, where.flatten(), values.flatten(0, 1))
        self._keys: list[int] = keys.tolist()

    def on_rows(self, rows: slice) -> Write:
        """Prepare for some rows: see `Term`."""
        first, last = min(rows.start, self._size), min(rows.stop, self._size)

        def write(block: Tensor, sequences: slice, fresh: bool) -> None:
            if fresh:
                block.zero_()
            # With all rows in the block the keys of all its sequences are one run.
            whole = first == 0 and last == self._size
            number = sequences.stop - sequences.start
            for n, count in [(0, number)] if whole else [(n, 1) for n in range(number)]:
                begin = bisect_left(self._keys, (sequences.start + n) * self._size + first)
                end = bisect_left(self._keys, (sequences.start + n + count - 1) * self._size + last)
                if begin < end:
                    local = (self.sequences[begin:end] - sequences.start) * block.shape[1]
                    local += self.rows[begin:end] - rows.start
                    block.flatten(0, 1).index_add_(0, local, self.sums[begin:end])

        return write


def joined(terms: list[RowsTerm]) -> RowsTerm:
    """Several look-ups in one table as one: rows that a sequence met twice are added.

    Parameters
    ----------
    terms
        The look-ups.

    Returns
    -------
    RowsTerm
        Their sum.
    """
    return RowsTerm(torch.cat([t._ids for t in terms], dim=1), torch.cat([t._values for t in terms], dim=1))


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

    def on_rows(self, rows: slice) -> Write:
        """Prepare for the one row there is: see `Term`."""

        def write(block: Tensor, sequences: slice, fresh: bool) -> None:
            values = self.values[sequences, None]
            block.copy_(values) if fresh else block.add_(values)

        return write


def _linear(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Affine map, y = W a + b."""
    return {"weight": OuterTerm(cotangent, inputs), "bias": FullTerm(cotangent.sum(1))}


def _transposed_linear(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Affine map stored transposed, y = Wᵀ a + b: the layout of GPT-2's Conv1D."""
    return {"weight": OuterTerm(inputs, cotangent), "bias": FullTerm(cotangent.sum(1))}


def _embedding(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Rows of a table."""
    return {"weight": RowsTerm(inputs, cotangent)}


def _scaled_embedding(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Rows of a table times a constant: Gemma's embedding."""
    scale = module.embed_scale
    assert isinstance(scale, Tensor) and isinstance(module.weight, Tensor)
    # NOTE rounded as the module rounds it: in bfloat16 the square root of the width is another number.
    return {"weight": RowsTerm(inputs, cotangent * scale.to(module.weight.dtype).to(cotangent.dtype))}


def _layer_norm(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Standardise, scale, shift: y = w · h(a) + b."""
    assert isinstance(module, nn.LayerNorm)
    normalised = functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    return {"weight": FullTerm((cotangent * normalised).sum(1)), "bias": FullTerm(cotangent.sum(1))}


def _scaled(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Scale: y = w · h(a), an RMSNorm with any h, which is y at w = 1."""
    normalised = _with_weight(module, inputs, 1.0)
    return {"weight": FullTerm((cotangent * normalised).sum(1))}


def _scaled_and_shifted(module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Scale by 1 + w: y = f(a) + w · h(a), where h is y at w = 1 minus y at w = 0."""
    normalised = _with_weight(module, inputs, 1.0) - _with_weight(module, inputs, 0.0)
    return {"weight": FullTerm((cotangent * normalised).sum(1))}


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
}


def rule_for(module: nn.Module, inputs: Tensor, output: Tensor) -> Rule | None:
    """Rule of a module, or None where it has no exact fast one.

    Parameters
    ----------
    module
        Any module. A subclass does not inherit the rule of its parent: its ``forward`` may differ.
    inputs, output
        One small call of it, on which the assumptions about norms of unknown make are tried out.

    Returns
    -------
    Callable or None
        Maps (module, inputs, cotangent) to one term a parameter.
    """
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        return None
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        return None
    # Norms and the other named classes belong to model libraries; importing one to ask for a class would be dear.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return _transposed_linear
    if type(module).__name__ == "FalconLinear" and isinstance(module, nn.Linear):
        return _linear
    if type(module).__name__.endswith("ScaledWordEmbedding") and isinstance(module, nn.Embedding):
        return _scaled_embedding if _is_scaled(module, inputs, output) else None
    if type(module).__name__.endswith("RMSNorm") and set(module._parameters) == {"weight"}:
        return _norm_rule(module, inputs, output)
    return RULES.get(type(module))


def _is_scaled(module: nn.Embedding, inputs: Tensor, output: Tensor) -> bool:
    """Whether an embedding multiplies its rows by its ``embed_scale`` and does nothing else."""
    scale = getattr(module, "embed_scale", None)
    if not isinstance(scale, Tensor) or scale.numel() != 1:
        return False
    return torch.equal(functional.embedding(inputs, module.weight) * scale.to(module.weight.dtype), output)


def _norm_rule(module: nn.Module, inputs: Tensor, output: Tensor) -> Rule | None:
    """Whichever of the two formulas for an RMSNorm reproduces the output."""
    weight = module._parameters["weight"]
    if weight is None or weight.shape != inputs.shape[-1:]:
        return None
    at_zero, at_one = _with_weight(module, inputs, 0.0), _with_weight(module, inputs, 1.0)
    error = (at_zero + weight * (at_one - at_zero) - output).abs().max()
    if not bool(error <= 64 * torch.finfo(output.dtype).eps * output.abs().max()):
        return None
    return _scaled_and_shifted if bool(at_zero.any()) else _scaled
