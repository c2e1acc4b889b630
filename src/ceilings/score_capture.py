r"""Catching what goes into every module and what comes back, and proving that nothing is missed.

`find_rules` decides from the autograd graph itself which parameters are read through modules with a rule
and nowhere else. `Capture` then runs one backward pass to activations and hands over, parameter by parameter,
the terms from which the gradients of single sequences can be formed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from ceilings.score_rules import Rule, Term, rule_for

__all__ = ["Capture", "Found", "activations_only", "find_rules", "graph_reads"]


@contextmanager
def activations_only(model: nn.Module) -> Iterator[None]:
    """Freeze the parameters, switch to evaluation mode and forget ``padding_idx``; restore all at the end.

    Parameters
    ----------
    model
        The model; gradients reach its activations, not its parameters.

    Yields
    ------
    None
        Nothing.

    Notes
    -----
    PyTorch drops the gradient of the embedding row at ``padding_idx`` although the output depends on it. Many
    checkpoints declare their end-of-turn token as padding, and that token occurs inside real prompts.
    """
    required = [(p, p.requires_grad) for p in model.parameters()]
    training = [(m, m.training) for m in model.modules()]
    padding = [(m, m.padding_idx) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        model.eval()
        for embedding, _ in padding:
            embedding.padding_idx = None
        for parameter, _ in required:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in required:
            parameter.requires_grad_(flag)
        for module, was_training in training:
            module.training = was_training
        for embedding, index in padding:
            embedding.padding_idx = index


class Found(NamedTuple):
    """What `find_rules` learnt.

    Parameters
    ----------
    rules
        Rules of the modules.
    fast
        Names of the parameters of which every use is a call with a rule; those of ``idle`` among them.
    idle
        Names of the parameters that the probes did not use. An expert that no probe was routed to is one: a
        later batch may use it.
    overwritten
        Modules whose output is changed in place by what follows them.
    """

    rules: dict[nn.Module, Rule]
    fast: set[str]
    idle: set[str]
    overwritten: set[nn.Module]


def find_rules(
    model: nn.Module, parameters: dict[str, nn.Parameter], run: Callable[[Tensor], Tensor], tokens: Tensor
) -> Found:
    """Rules of the modules; parameters of which every use is a call with a rule.

    Parameters
    ----------
    model
        The model.
    parameters
        Those to measure.
    run
        A forward pass of the model.
    tokens
        Some valid token ids.

    Returns
    -------
    Found
        A parameter is not fast when the graph reads it more often than its modules were called, when one of
        them has no rule for it, or when the first axis of what it sees is not the sequences in their order.

    Shapes
    ------
    run (N, T) -> (N, T, V), tokens (T,).

    Notes
    -----
    Two probes, of 3 × 5 and 2 × 3 tokens, tell the axis of the sequences from any other. In the first,
    sequences 0 and 2 are the same and 1 is not, which shows rows that were sorted or routed.
    """
    names = {id(p): name for name, p in parameters.items()}
    rules: dict[nn.Module, Rule] = {}
    calls: Counter[str] = Counter()
    slow: set[str] = set()
    outputs: list[tuple[nn.Module, Tensor, int]] = []
    sequences = 0

    def inspect_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        with torch.no_grad():
            rule, covered = _try_rule(module, args, output, sequences)
        if rule is not None:
            rules[module] = rule
            outputs.append((module, output, output._version))
        for key, parameter in module._parameters.items():
            if id(parameter) in names:
                calls[names[id(parameter)]] += 1
                if key not in covered:
                    slow.add(names[id(parameter)])

    handles = [m.register_forward_hook(inspect_call) for m in model.modules() if len(m._parameters)]
    required = {name: p.requires_grad for name, p in parameters.items()}
    reads: Counter[str] = Counter()
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            for probe in _probes(tokens):
                sequences = len(probe)
                reads += graph_reads(run(probe), names)
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in parameters.items():
            parameter.requires_grad_(required[name])
    fast = {name for name in parameters if name not in slow and reads[name] == calls[name]}
    overwritten = {module for module, output, version in outputs if output._version != version}
    return Found(rules, fast, {name for name in fast if not reads[name]}, overwritten)


def _probes(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Two small batches; rows 0 and 2 of the first agree and differ everywhere from row 1."""
    row = tokens.repeat(5)[:5]
    other = torch.where(row > 0, row - 1, 1)  # a token that every vocabulary has
    return torch.stack([row, other, row]), torch.stack([row[:3], other[:3]])


class _Tap(torch.autograd.Function):
    """Pass an output on unchanged; on the way back, hand over the module's input and that gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, anchor: Tensor, record: Any) -> Tensor:
        """Identity."""
        ctx.record, keep = record
        ctx.save_for_backward(inputs)
        return output.clone() if keep else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """Identity, with a report."""
        ctx.record(ctx.saved_tensors[0], cotangent)
        return cotangent, None, None, None


class Capture:
    """Hooks on the modules that own some parameters, for one forward and backward pass.

    Parameters
    ----------
    found
        Rules of the modules of a model that `activations_only` has frozen.
    parameters
        The fast ones among its parameters.
    sequences
        Number of sequences in the pass.

    Attributes
    ----------
    refused
        Names of the parameters whose module saw something else than the sequences, which the probes had not
        shown: their terms would be wrong.
    """

    def __init__(self, found: Found, parameters: dict[str, nn.Parameter], sequences: int) -> None:
        self._names = {id(p): name for name, p in parameters.items()}
        self._rules, self._overwritten, self._sequences = found.rules, found.overwritten, sequences
        self.refused: set[str] = set()
        self._consume: Callable[[str, list[Term]], None] = lambda name, terms: None
        self._calls: Counter[str] = Counter()
        self._terms: dict[str, list[Term]] = {}
        self._handles: list[RemovableHandle] = []
        # An output gets a gradient only if it has a differentiable ancestor; token ids are none.
        self._anchor = torch.zeros((), requires_grad=True)

    def __enter__(self) -> Capture:
        """Attach the hooks."""
        owners = [m for m in self._rules if self._owned(m)]
        self._handles = [m.register_forward_hook(self._tap) for m in owners]
        self._handles += [m.register_forward_pre_hook(_contiguous) for m in owners]
        return self

    def __exit__(self, *error: object) -> None:
        """Detach them."""
        for handle in self._handles:
            handle.remove()

    def backward(
        self,
        logits: GradientEdge,
        cotangent: Tensor,
        consume: Callable[[str, list[Term]], None],
        keep: bool = False,
    ) -> None:
        """Carry the cotangent of the logits back and consume every parameter on the way.

        Parameters
        ----------
        logits
            Where the output of the forward pass inside this context sits in the graph.
        cotangent
            Gradient to start from.
        consume
            Called once a parameter with all its terms, as soon as the last of them is known.
        keep
            True: the graph serves another cotangent afterwards.

        Shapes
        ------
        cotangent (N, T, V).
        """
        self._consume = consume
        torch.autograd.backward(logits, cotangent, retain_graph=keep)
        for name, terms in self._terms.items():  # uses that no gradient came back to contribute nothing
            self._consume(name, terms)
        self._terms.clear()

    def _tap(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        """Count the use and mark the output."""
        if not _by_sequence(args[0], self._sequences):
            self.refused |= self._owned(module).keys()
            return None
        self._calls.update(self._owned(module).keys())

        def record(inputs: Tensor, cotangent: Tensor) -> None:
            self._record(module, inputs, cotangent)

        keep = module in self._overwritten  # autograd lets nobody write into a view that a Function made
        return _Tap.apply(output, args[0], self._anchor, (record, keep))  # type: ignore[no-untyped-call]

    def _owned(self, module: nn.Module) -> dict[str, str]:
        """Measured parameters of a module: full name to its name in the module."""
        return {self._names[id(p)]: key for key, p in module._parameters.items() if id(p) in self._names}

    def _record(self, module: nn.Module, inputs: Tensor, cotangent: Tensor) -> None:
        """Turn one returned gradient into terms; consume the parameters that are complete."""
        terms = _apply(self._rules[module], module, inputs, cotangent)
        for name, key in self._owned(module).items():
            known = self._terms.setdefault(name, [])
            known.append(terms[key])
            if len(known) == self._calls[name]:
                self._consume(name, self._terms.pop(name))


def _contiguous(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Copy an input that is cut out of a larger one: PyTorch multiplies it sequence by sequence otherwise."""
    if args and isinstance(args[0], Tensor) and not args[0].is_contiguous():
        return (args[0].contiguous(), *args[1:])
    return None


def _apply(rule: Rule, module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Terms of one call, with sequence, position and feature as the only axes and at least float32."""
    cotangent = cotangent.to(torch.promote_types(cotangent.dtype, torch.float32))
    cotangent = cotangent.flatten(1, -2) if cotangent.dim() > 2 else cotangent.unsqueeze(1)
    if not inputs.is_floating_point():
        return rule(module, inputs.flatten(1) if inputs.dim() > 1 else inputs.unsqueeze(1), cotangent)
    inputs = inputs.to(cotangent.dtype)
    return rule(module, inputs.flatten(1, -2) if inputs.dim() > 2 else inputs.unsqueeze(1), cotangent)


def _try_rule(
    module: nn.Module, args: tuple[Any, ...], output: Any, sequences: int
) -> tuple[Rule | None, set[str]]:
    """Rule of a module and the parameters it covers; none where one small call does not fit it."""
    if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return None, set()
    if not _by_sequence(args[0], sequences) or len(output) != sequences or not _in_order(args[0]):
        return None, set()
    rule = rule_for(module, args[0], output)
    return rule, set() if rule is None else set(_apply(rule, module, args[0], output))


def _by_sequence(inputs: Tensor, sequences: int) -> bool:
    """Whether the first axis can be the sequence: a matrix of activations has lost that axis."""
    return inputs.dim() > 1 + inputs.is_floating_point() and len(inputs) == sequences


def _in_order(inputs: Tensor) -> bool:
    """Whether row 2 of a probe is like row 0 and not like row 1: see `_probes`."""
    if len(inputs) < 3:
        return True
    x = inputs.double()
    return bool((x[0] - x[2]).norm() <= (x[0] - x[1]).norm() / 2)


def graph_reads(logits: Tensor, names: dict[int, str]) -> Counter[str]:
    """How often the graph behind the logits reads each parameter.

    Parameters
    ----------
    logits
        Output of a forward pass.
    names
        Names of the parameters by their identity.

    Returns
    -------
    Counter
        Number of reads by name; those of other leaves are under the empty name.

    Shapes
    ------
    logits (N, T, V).
    """
    reads: Counter[str] = Counter()
    seen, stack = set(), [logits.grad_fn]
    while stack:
        node = stack.pop()
        for parent, _ in node.next_functions if node is not None else ():
            if parent is None:
                continue
            if hasattr(parent, "variable"):
                reads[names.get(id(parent.variable), "")] += 1
            elif parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return reads
