"""The ways to get the score moments that are compared: each adds S₁ = Σs, S₂ = Σs² and S_R = ΣRs to `Sums`.

A peer gets what suits it: the fastest loss that PyTorch offers, its own best chunk of sequences, and sums that were
allocated before the clock started.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads import Workload

__all__ = ["METHODS", "Method", "NotInstalled", "Sums", "answer"]


class NotInstalled(Exception):
    """A peer that this environment lacks."""


@dataclass
class Sums:
    """The three sums of every parameter. A method that cannot form one leaves it at zero and says so."""

    scores: dict[str, Tensor]
    squares: dict[str, Tensor]
    reward_scores: dict[str, Tensor]
    engine: Any = field(default=None)

    @classmethod
    def zeros(cls, model: nn.Module) -> Sums:
        """Room for them."""
        named = dict(model.named_parameters())
        return cls(
            *({n: torch.zeros_like(p, requires_grad=False) for n, p in named.items()} for _ in range(3))
        )

    def add(self, name: str, score: Tensor, reward: float) -> None:
        """Add one sequence."""
        self.scores[name].add_(score)
        self.squares[name].addcmul_(score, score)
        self.reward_scores[name].add_(score, alpha=reward)

    def add_batch(self, name: str, scores: Tensor, rewards: Tensor) -> None:
        """Add several sequences; overwrites their scores."""
        flat = scores.reshape(len(scores), -1).T
        ones, rewards = torch.ones(len(scores), dtype=flat.dtype), rewards.to(flat)
        self.scores[name].view(-1).addmv_(flat, ones)
        self.reward_scores[name].view(-1).addmv_(flat, rewards)
        self.squares[name].view(-1).addmv_(flat.square_(), ones)


@dataclass(frozen=True)
class Method:
    """A way to get the moments."""

    name: str
    label: str
    run: Callable[[Workload, Sums], None]
    package: str | None = None
    moments: str = "all"  # "all", "squares" where the peer offers no more, or "none"
    shared_sums: bool = True  # False: the method keeps sums of its own


def _log_prob(model: nn.Module, inputs: Tensor, labels: Tensor, **extra: Any) -> Tensor:
    """Log-probability of the labelled tokens, summed over everything."""
    logits = model(inputs, use_cache=False, **extra).logits
    return -functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _floor(work: Workload, sums: Sums) -> None:
    """One forward and backward pass with ordinary weight gradients: nothing a sequence."""
    _log_prob(work.model, work.inputs, work.labels).backward()
    work.model.zero_grad(set_to_none=True)


def _short_floor(work: Workload, sums: Sums) -> None:
    """The same with logits at the scored positions only, as the engine forms them."""
    last = work.ids.shape[1] - work.prompt
    _log_prob(work.model, work.inputs, work.labels[:, -last:], logits_to_keep=last).backward()
    work.model.zero_grad(set_to_none=True)


def _loop(work: Workload, sums: Sums) -> None:
    """One backward pass a sequence."""
    for inputs, labels, reward in zip(
        work.inputs.split(1), work.labels.split(1), work.rewards.tolist(), strict=True
    ):
        _log_prob(work.model, inputs, labels).backward()
        for name, parameter in work.model.named_parameters():
            assert parameter.grad is not None
            sums.add(name, parameter.grad, reward)
        work.model.zero_grad(set_to_none=True)


def _vmap(work: Workload, sums: Sums) -> None:
    """PyTorch's own per-sample gradients."""
    parameters = {name: p.detach() for name, p in work.model.named_parameters()}

    def log_prob(values: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(work.model, values, (inputs[None],), {"use_cache": False}).logits[0]
        return -functional.cross_entropy(logits, labels, reduction="sum")

    per_sequence = vmap(grad(log_prob), in_dims=(None, 0, 0))
    for inputs, labels, rewards in _chunks(work):
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no rule for vmap
            grads = per_sequence(parameters, inputs, labels)
        for name in parameters:
            sums.add_batch(name, grads.pop(name), rewards)


def _opacus(work: Workload, sums: Sums) -> None:
    """Per-sample gradients by hooks."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(work.model.train(), loss_reduction="sum")
    try:
        for inputs, labels, rewards in _chunks(work):
            _log_prob(wrapped, inputs, labels).backward()
            for name, parameter in work.model.named_parameters():
                sums.add_batch(name, parameter.grad_sample, rewards)  # type: ignore[attr-defined]
            wrapped.zero_grad(set_to_none=True)
    finally:
        wrapped.to_standard_module().eval()
        work.model.zero_grad(set_to_none=True)


def _backpack(work: Workload, sums: Sums) -> None:
    """BatchGrad, with the extension for the norm that BackPACK lacks."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad
    from backpack.extensions.firstorder.base import FirstOrderModuleExtension

    class Norm(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight"])

        def weight(self, _: Any, module: Any, __: Any, g_out: Any, ___: Any) -> Tensor:
            x = module.input0
            normalised = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            return (g_out[0] * normalised).sum(1)

    per_sequence = BatchGrad()
    norms = {type(m) for m in work.model.modules() if type(m).__name__.endswith("RMSNorm")}
    for norm in norms:
        per_sequence.set_module_extension(norm, Norm())
    model = extend(copy.deepcopy(work.model))  # its hooks would stay on the model of the others
    for inputs, labels, rewards in _chunks(work):
        with backpack(per_sequence):
            _log_prob(model, inputs, labels).backward()
        for name, parameter in model.named_parameters():
            sums.add_batch(name, parameter.grad_batch, rewards)
            parameter.grad = parameter.grad_batch = None


def _laplace(work: Workload, sums: Sums) -> None:
    """The diagonal of the empirical Fisher matrix: squares only."""
    from laplace.curvature import CurvlinopsEF

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = work.model

        def forward(self, inputs: Tensor) -> Tensor:
            return self.language_model(inputs, use_cache=False).logits.transpose(1, 2)

    backend = CurvlinopsEF(Logits(), "classification")
    named = dict(work.model.named_parameters())
    for inputs, labels, _ in _chunks(work):
        with sdpa_kernel(SDPBackend.MATH):  # it uses vmap
            diagonal = backend.diag(inputs, labels)[1]
        for name, part in zip(named, diagonal.split([p.numel() for p in named.values()]), strict=True):
            sums.squares[name].add_(part.view_as(named[name]))


def _nngeometry(work: Workload, sums: Sums) -> None:
    """The diagonal of the Fisher matrix from its Jacobian hooks: squares only."""
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.layercollection import LayerCollection
    from nngeometry.object import PMatDiag
    from torch.utils.data import DataLoader, TensorDataset

    def log_prob(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = work.model(inputs, use_cache=False).logits
        return -functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(
            1, keepdim=True
        )

    layers = LayerCollection.from_model(work.model)
    backend = TorchHooksJacobianBackend(work.model, function=log_prob, layer_collection=layers)
    examples = DataLoader(TensorDataset(work.inputs, work.labels), batch_size=work.chunk)
    PMatDiag(generator=backend, examples=examples)


def _ours(work: Workload, sums: Sums) -> None:
    """The engine of the library; its sums live in the accumulator."""
    from ceilings.scores import ScoreAccumulator

    if sums.engine is None:
        sums.engine = ScoreAccumulator(work.model, batch_size=max(work.chunk, min(64, len(work.ids))))
    sums.engine.add(work.ids, work.mask, work.rewards)


METHODS = {
    method.name: method
    for method in (
        Method("floor", "plain batched backward (no moments)", _floor, moments="none"),
        Method("short-floor", "the same, logits only where scored", _short_floor, moments="none"),
        Method("ours", "ceilings", _ours, shared_sums=False),
        Method("loop", "loop, one backward a sequence", _loop),
        Method("vmap", "torch.func, vmap(grad)", _vmap),
        Method("opacus", "Opacus, hooks", _opacus, "opacus"),
        Method("backpack", "BackPACK, BatchGrad", _backpack, "backpack"),
        Method("laplace", "laplace-torch, CurvlinopsEF", _laplace, "laplace", "squares"),
        Method("nngeometry", "nngeometry, PMatDiag", _nngeometry, "nngeometry", "squares"),
    )
}


def answer(method: Method, work: Workload) -> Sums:
    """Sums of one workload by one method, from zero.

    Raises
    ------
    NotInstalled
        If the peer is not here. What the peer itself raises passes through.
    """
    if method.package is not None:
        try:
            importlib.import_module(method.package)
        except ImportError as error:
            raise NotInstalled(str(error)) from error
    sums = Sums.zeros(work.model)
    method.run(work, sums)
    if sums.engine is not None:
        moments = sums.engine.moments()
        moments = moments.shifted(torch.zeros_like(moments.reward_shift))
        first = {name: reward[0] for name, reward in moments.reward_scores.items()}
        return Sums(moments.scores, moments.squares, first)
    return sums


def _chunks(work: Workload) -> Any:
    """Inputs, labels and rewards of a few sequences at a time."""
    parts = (part.split(work.chunk) for part in (work.inputs, work.labels, work.rewards))
    return zip(*parts, strict=True)
