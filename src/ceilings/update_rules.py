r"""Optimisers by name, the rate that gives each the same first step, and the loop in which they are compared.

`ceilings.training.train` knows Adam and SGD and what a method needs; here the method is what stays fixed and the rule
of the update is what varies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn

from ceilings.batches import Batch, token_laws, token_log_probs
from ceilings.methods import Method
from ceilings.sources import Source

__all__ = [
    "RULES",
    "Rule",
    "SignDescent",
    "Stepper",
    "descend",
    "first_step_size",
    "flat_parameters",
    "load_flat",
    "make_rule",
]

Rule = Literal["sgd", "momentum", "adam", "adamw", "adam_large_epsilon", "rmsprop", "sign", "muon"]
#: The rules of the update, in the order of the tables of the book.
RULES: Final[tuple[Rule, ...]] = (
    "sgd",
    "momentum",
    "adam_large_epsilon",
    "adam",
    "adamw",
    "rmsprop",
    "sign",
    "muon",
)


class Stepper(Protocol):
    """What the loop asks of an optimiser."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Move the parameters."""


class SignDescent(torch.optim.Optimizer):
    """Every parameter moves by the rate, against the sign of its gradient.

    Parameters
    ----------
    parameters
        What to move.
    lr
        The rate.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step; a gradient of exactly zero moves nothing.

        Parameters
        ----------
        closure
            Not used; every optimiser of torch has one.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class _Joined(torch.optim.Optimizer):
    """Two optimisers of disjoint parameters as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step of each."""
        for part in self.parts:
            part.step()


def make_rule(
    name: Rule, model: nn.Module, rate: float, *, epsilon: float | None = None
) -> torch.optim.Optimizer:
    r"""Build an optimiser over the parameters of a model.

    Parameters
    ----------
    name
        One of `RULES`.
    model
        Whose parameters move.
    rate
        Learning rate.
    epsilon
        ε of Adam, AdamW and RMSProp, by default 1e-8; ``adam_large_epsilon`` must be given one.

    Returns
    -------
    torch.optim.Optimizer
        The optimiser.

    Raises
    ------
    ValueError
        If there is no such rule, or ``adam_large_epsilon`` has no ε.

    Notes
    -----
    1. Momentum is 0.9, Adam's constants are (0.9, 0.999), AdamW decays by 0.1, RMSProp's memory is 0.99.
    2. Muon takes the matrices inside the layers; embeddings and norms are left to Adam with the same rate. It
       orthogonalises in bfloat16, so its numbers are the same on one machine only.
    """
    if name == "adam_large_epsilon" and epsilon is None:
        raise ValueError("adam_large_epsilon has no ε: pass one, of the size of the gradients or above")
    eps, parameters = 1e-8 if epsilon is None else epsilon, list(model.parameters())
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=rate),
        "momentum": lambda: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, lr=rate, eps=eps),
        "adam_large_epsilon": lambda: torch.optim.Adam(parameters, lr=rate, eps=eps),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=rate, eps=eps, weight_decay=0.1),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=rate, eps=eps),
        "sign": lambda: SignDescent(parameters, lr=rate),
        "muon": lambda: _muon(model, rate, eps),
    }
    if name not in makers:
        raise ValueError(f"there is no update rule {name!r}: use one of {', '.join(RULES)}")
    return makers[name]()


def first_step_size(name: Rule, model: nn.Module, gradient: Tensor, *, epsilon: float | None = None) -> float:
    r"""Root mean square of the first step at rate 1, so that rules can be compared at equal first steps.

    Parameters
    ----------
    name
        One of `RULES`.
    model
        The model; it is not changed.
    gradient
        Gradient of the first batch, flat.
    epsilon
        As in `make_rule`.

    Returns
    -------
    float
        Divide the wanted size by it and get the rate: every rule's first step is proportional to its rate.

    Shapes
    ------
    gradient (D,).

    Units
    -----
    [θ] per unit of rate.

    Raises
    ------
    ValueError
        If the step is zero.
    """
    probe = copy.deepcopy(model)
    before = flat_parameters(probe)
    start = 0
    for parameter in probe.parameters():
        parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
    make_rule(name, probe, 1.0, epsilon=epsilon).step()
    size = float((flat_parameters(probe) - before).square().mean().sqrt())
    if size == 0:
        raise ValueError(f"the first step of {name} is zero: no rate makes it longer")
    return size


def descend(
    model: nn.Module,
    method: Method,
    source: Source,
    stepper: Stepper,
    *,
    steps: int,
    generator: torch.Generator,
    watch: Callable[[nn.Module], None] | None = None,
) -> None:
    """Train a model in place: draw, score, step.

    Parameters
    ----------
    model
        The policy.
    method
        From `ceilings.methods.make_method`, with one update a batch.
    source
        From `ceilings.sources`.
    stepper
        An optimiser, or `ceilings.storage.StoredWeights`.
    steps
        Batches.
    generator
        Source of randomness.
    watch
        Called with the model after every step.

    Raises
    ------
    ValueError
        If the method uses a batch more than once.

    Notes
    -----
    With an optimiser that `ceilings.training.train` knows, and its seed, this is the same run bit by bit; it
    evaluates nothing and draws nothing else.
    """
    if method.updates != 1:
        raise ValueError(f"{method.name} uses a batch {method.updates} times: here a batch is one step")
    model.eval()
    reference = copy.deepcopy(model)
    for _ in range(steps):
        rollouts = source(model, generator)
        laws, mask = token_laws(model, rollouts)
        log_probs = token_log_probs(laws, rollouts)
        loss = method.loss(Batch(rollouts, model, reference, mask, laws, log_probs, log_probs.detach()))
        if loss is not None:
            stepper.zero_grad()
            loss.backward()
            stepper.step()
        if watch is not None:
            watch(model)


def flat_parameters(model: nn.Module) -> Tensor:
    """All parameters in one vector.

    Parameters
    ----------
    model
        The model.

    Returns
    -------
    Tensor
        A copy, in the order of ``named_parameters()``.

    Shapes
    ------
    -> (D,).
    """
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def load_flat(model: nn.Module, values: Tensor) -> None:
    """Write a vector into the parameters.

    Parameters
    ----------
    model
        The model.
    values
        As `flat_parameters` gives them.

    Shapes
    ------
    values (D,).
    """
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())


def _muon(model: nn.Module, rate: float, epsilon: float) -> torch.optim.Optimizer:
    """Muon inside the layers, Adam elsewhere."""
    inside: list[nn.Parameter] = []
    outside: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (inside if parameter.ndim == 2 and ".layers." in name else outside).append(parameter)
    return _Joined(
        torch.optim.Muon(inside, lr=rate, weight_decay=0.0), torch.optim.Adam(outside, lr=rate, eps=epsilon)
    )
