r"""Catching what goes into every module and what comes back, and proving that nothing is missed.

`find_rules` decides from the autograd graph itself which parameters are read through modules with a rule
and nowhere else. `Capture` then runs one backward pass to activations and hands over, parameter by parameter,
the terms from which the gradients of single sequences can be formed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from ceilings.score_rules import Rule, Term, rule_for

__all__ = ["Capture", "activations_only", "find_rules"]


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


def find_rules(
    model: nn.Module, parameters: dict[str, nn.Parameter], run: Callable[[], Tensor]
) -> tuple[dict[nn.Module, Rule], set[str]]:
    """Rules of the modules; parameters of which every use is a call with a rule.

    Parameters
    ----------
    model
        The model.
    parameters
        Those to measure.
    run
        One small forward pass of the model; its batch size differs from its other axes.

    Returns
    -------
    tuple
        The rules, and the names of the fast parameters. A parameter is not fast when the graph reads it more
        often than its modules were called, when one of them has no rule for it, or when the first axis of
        what it sees is not the sequence.
    """
    names = {id(p): name for name, p in parameters.items()}
    rules: dict[nn.Module, Rule] = {}
    calls: Counter[str] = Counter()
    slow: set[str] = set()

    def inspect_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        with torch.no_grad():
            rule, covered = _try_rule(module, args, output)
        if rule is not None:
            rules[module] = rule
        for key, parameter in module._parameters.items():
            if id(parameter) in names:
                calls[names[id(parameter)]] += 1
                if key not in covered:
                    slow.add(names[id(parameter)])

    handles = [m.register_forward_hook(inspect_call) for m in model.modules() if len(m._parameters)]
    required = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            reads = _reads(run(), names)
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in parameters.items():
            parameter.requires_grad_(required[name])
    return rules, {name for name in parameters if name not in slow and reads[name] == calls[name]}


class _Tap(torch.autograd.Function):
    """Pass an output on unchanged; on the way back, hand over the module's input and that gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, anchor: Tensor, record: Any) -> Tensor:
        """Identity."""
        ctx.record = record
        ctx.save_for_backward(inputs)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """Identity, with a report."""
        ctx.record(ctx.saved_tensors[0], cotangent)
        return cotangent, None, None, None


class Capture:
    """Hooks on the modules that own some parameters, for one forward and backward pass.

    Parameters
    ----------
    rules
        Rules of the modules of a model that `activations_only` has frozen.
    parameters
        The fast ones among its parameters.
    consume
        Called once a parameter with all its terms, as soon as the last of them is known.
    """

    def __init__(
        self,
        rules: dict[nn.Module, Rule],
        parameters: dict[str, nn.Parameter],
        consume: Callable[[str, list[Term]], None],
    ) -> None:
        self._names = {id(p): name for name, p in parameters.items()}
        self._rules, self._consume = rules, consume
        self._calls: Counter[str] = Counter()
        self._terms: dict[str, list[Term]] = {}
        self._handles: list[RemovableHandle] = []
        # An output gets a gradient only if it has a differentiable ancestor; token ids are none.
        self._anchor = torch.zeros((), requires_grad=True)

    def __enter__(self) -> Capture:
        """Attach the hooks."""
        self._handles = [m.register_forward_hook(self._tap) for m in self._rules if self._owned(m)]
        return self

    def __exit__(self, *error: object) -> None:
        """Detach them."""
        for handle in self._handles:
            handle.remove()

    def backward(self, logits: GradientEdge, cotangent: Tensor) -> None:
        """Carry the cotangent of the logits back and consume every parameter on the way.

        Parameters
        ----------
        logits
            Where the output of the forward pass inside this context sits in the graph.
        cotangent
            Gradient to start from.

        Shapes
        ------
        cotangent (N, T, V).
        """
        torch.autograd.backward(logits, cotangent)
        for name, terms in self._terms.items():  # uses that no gradient came back to contribute nothing
            self._consume(name, terms)
        self._terms.clear()

    def _tap(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        """Count the use and mark the output."""
        self._calls.update(self._owned(module).keys())

        def record(inputs: Tensor, cotangent: Tensor) -> None:
            self._record(module, inputs, cotangent)

        return _Tap.apply(output, args[0], self._anchor, record)  # type: ignore[no-untyped-call]

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


def _apply(rule: Rule, module: nn.Module, inputs: Tensor, cotangent: Tensor) -> dict[str, Term]:
    """Terms of one call, with sequence, position and feature as the only axes and at least float32."""
    cotangent = cotangent.to(torch.promote_types(cotangent.dtype, torch.float32))
    cotangent = cotangent.flatten(1, -2) if cotangent.dim() > 2 else cotangent.unsqueeze(1)
    if not inputs.is_floating_point():
        return rule(module, inputs.flatten(1) if inputs.dim() > 1 else inputs.unsqueeze(1), cotangent)
    inputs = inputs.to(cotangent.dtype)
    return rule(module, inputs.flatten(1, -2) if inputs.dim() > 2 else inputs.unsqueeze(1), cotangent)


def _try_rule(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[Rule | None, set[str]]:
    """Rule of a module and the parameters it covers; none where one small call does not fit it."""
    if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return None, set()
    if args[0].dim() < 2 or len(args[0]) != len(output):
        return None, set()
    rule = rule_for(module, args[0], output)
    return rule, set() if rule is None else set(_apply(rule, module, args[0], output))


def _reads(logits: Tensor, names: dict[int, str]) -> Counter[str]:
    """How often the graph behind the logits reads each parameter."""
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
