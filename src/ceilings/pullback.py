r"""One prompt through one model, kept: derivatives of its last hidden state, cotangent by cotangent.

`PullBack` runs the prompt once and remembers for every parameter how it was used (`ceilings.uses`). For a cotangent c
on the last hidden state h, one backward pass to activations gives the output gradients G, and with the activations A
they are all that is needed: that of a linear map's weight, for example, is
:math:`\partial (c^\top h)/\partial W_{oi} = \sum_t G_{to} A_{ti}`.

Many cotangents share the one forward pass, so the sum of their squared gradients needs no gradient of any of them:
:math:`\sum_k (\sum_t G_{kto} A_{ti})^2 = \sum_{t,t'} C_{tt'o} A_{ti} A_{t'i}` with
:math:`C_{tt'o} = \sum_k G_{kto} G_{kt'o}`.

Every rule is held against plain differentiation along a random cotangent before it is trusted. A parameter that has
no rule, or one that fails, takes the *slow* path, one ordinary backward pass a cotangent: as exact, and listed in
``slow_names``. None is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ceilings.uses import SquareSum, Use, joined, recorder

__all__ = ["PullBack"]

_CHUNK_BYTES: Final = 2**28  # output gradients held at once
_PAIR_BYTES: Final = 2**29  # sums over cotangents held at once


class PullBack:
    r"""Derivatives of the last hidden state h of one prompt in every parameter below the head.

    Parameters
    ----------
    model
        A causal language model of `transformers` whose logits are a linear head's map of its last hidden states.
        It is neither changed nor given gradients.
    input_ids
        The prompt.

    Shapes
    ------
    input_ids (T,).

    Raises
    ------
    ValueError
        If the prompt is not a vector of token ids, or the logits are not the head's map of its input.
    """

    def __init__(self, model: nn.Module, input_ids: Tensor) -> None:
        if input_ids.ndim != 1 or len(input_ids) == 0 or input_ids.is_floating_point():
            raise ValueError(
                f"input_ids must be one prompt of token ids (T,), got shape {tuple(input_ids.shape)}"
            )
        find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = find_head()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                "the model has no linear output head, so its next-token scores have no such form"
            )
        self.head = head
        self.parameters = dict(model.named_parameters())
        name_of = {id(p): name for name, p in self.parameters.items()}
        # Leaves of our own on the same memory: the model's parameters, frozen or not, stay as they are.
        leaves = {name: nn.Parameter(p.detach()) for name, p in self.parameters.items()}
        calls = self._run(model, input_ids, name_of, leaves)
        self.uses = {name: use for name, use in joined(calls).items() if use is not None}
        self._slow: dict[str, Tensor] = {}
        self._check(leaves)

    @property
    def slow_names(self) -> tuple[str, ...]:
        """Parameters below the head that had no fast rule."""
        return tuple(self._slow)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that move h, a matrix that is also the head among them."""
        return tuple(name for name in self.parameters if name in self.uses or name in self._slow)

    def _run(
        self, model: nn.Module, input_ids: Tensor, name_of: dict[int, str], leaves: dict[str, nn.Parameter]
    ) -> list[tuple[str, Use]]:
        """Run the prompt on ``leaves``, keep h and the logits, and list every use of a parameter."""
        owned = [(m, local, p) for m in model.modules() for local, p in m.named_parameters(recurse=False)]
        hidden: list[Tensor] = []
        calls: list[tuple[str, Use]] = []
        handles = [self.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))]
        for module in {id(m): m for m, _, _ in owned if m is not self.head}.values():
            own = {local: name_of[id(p)] for m, local, p in owned if m is module}
            handles.append(module.register_forward_hook(recorder(own, calls)))
        try:
            # NOTE not `functional_call`: it leaves a module that occurs twice with the wrong parameters.
            for module, local, p in owned:
                setattr(module, local, leaves[name_of[id(p)]])
            # NOTE the fused attention kernels have no batched backward pass; the plain one is as exact.
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                logits = model(input_ids=input_ids[None], use_cache=False).logits[0, -1].detach()
        finally:
            for module, local, p in owned:
                setattr(module, local, p)
            for handle in handles:
                handle.remove()
        self.hidden = hidden[0][0, -1] if len(hidden) == 1 else logits.new_full((1,), torch.nan)
        self.logits = logits
        with torch.no_grad():
            covered = len(hidden) == 1 and torch.allclose(
                logits, self.head(self.hidden), rtol=1e-4, atol=1e-4
            )
        if not covered:
            raise ValueError(
                "the logits are not the linear head's map of its input: this model is not covered"
            )
        return calls

    def _check(self, leaves: dict[str, nn.Parameter]) -> None:
        """Hold the rules against plain differentiation along one random cotangent; what differs is slow."""
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(len(self.hidden), generator=generator, dtype=torch.float64).to(self.hidden)
        found = torch.autograd.grad(
            self.hidden, list(leaves.values()), probe, retain_graph=True, allow_unused=True
        )
        plain = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
        self.uses = {name: use for name, use in self.uses.items() if name in plain}
        ruled = self.gradient(probe)
        rtol, atol = (1e-2, 1e-6) if self.hidden.dtype == torch.float32 else (1e-6, 1e-12)
        largest = max(float(g.abs().max()) for g in plain.values())
        for name, g in plain.items():
            limit = rtol * float(g.abs().max()) + atol * largest
            if name not in ruled or not float((ruled[name] - g).abs().max()) <= limit:
                self.uses.pop(name, None)
                self._slow[name] = leaves[name]

    def gradient(self, cotangent: Tensor) -> dict[str, Tensor]:
        r"""Gradient of :math:`c^\top h` in every parameter below the head.

        Parameters
        ----------
        cotangent
            c.

        Returns
        -------
        dict
            One tensor a parameter; a tied matrix gets the part of its use as embedding.

        Shapes
        ------
        cotangent (I,) -> as the parameter.
        """
        result = {}
        for _, upstream in self._pull(cotangent[None].to(self.hidden), tuple(self.uses)):
            for name, g in upstream.items():
                result[name] = self.uses[name].gradient(self.parameters[name], g[0])
        return result | self._slow_gradient(cotangent)

    def gradient_at(self, cotangents: Tensor, where: dict[str, Tensor]) -> Tensor:
        """Chosen entries of the gradients of many cotangents.

        Parameters
        ----------
        cotangents
            One a row.
        where
            Flat positions by parameter name.

        Returns
        -------
        Tensor
            The entries, in the order of ``where``.

        Shapes
        ------
        cotangents (K, I), where M positions in all -> (K, M).

        Raises
        ------
        ValueError
            If a name is not that of a parameter below the head.
        """
        if unknown := set(where) - set(self.names):
            raise ValueError(f"{sorted(unknown)[0]!r} is no parameter below the head; see `names`")
        stops = torch.tensor([0, *(len(w) for w in where.values())]).cumsum(0).tolist()
        columns = {name: slice(stops[i], stops[i + 1]) for i, name in enumerate(where)}
        result = self.hidden.new_zeros(len(cotangents), stops[-1])
        for rows, upstream in self._pull(
            cotangents.to(self.hidden), tuple(n for n in where if n in self.uses)
        ):
            for name, g in upstream.items():
                entries = self.uses[name].gradient_at(self.parameters[name], g, where[name])
                result[rows, columns[name]] = entries
        if set(where) & set(self._slow):
            for k, cotangent in enumerate(cotangents):
                for name, g in self._slow_gradient(cotangent).items():
                    if name in where:
                        result[k, columns[name]] = g.flatten()[where[name]]
        return result

    def sum_of_squares(self, cotangents: Tensor) -> dict[str, Tensor]:
        r"""Sum of the squared gradients of many cotangents.

        Parameters
        ----------
        cotangents
            One a row.

        Returns
        -------
        dict
            :math:`\sum_k (\partial_i c_k^\top h)^2`, one tensor a parameter.

        Shapes
        ------
        cotangents (K, I) -> as the parameter.
        """
        cotangents = cotangents.to(self.hidden)
        result: dict[str, Tensor] = {}
        for names in _groups(self.uses, _PAIR_BYTES):
            sums = {name: SquareSum(self.uses[name], self.parameters[name]) for name in names}
            for _, upstream in self._pull(cotangents, names):
                for name, g in upstream.items():
                    sums[name].add(g)
            result |= {name: total.result() for name, total in sums.items()}
        if self._slow:
            for cotangent in cotangents:
                for name, g in self._slow_gradient(cotangent).items():
                    result[name] = result[name].addcmul_(g, g) if name in result else g.square()
        return result

    def _pull(self, cotangents: Tensor, names: tuple[str, ...]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Output gradients (K', T, O) of the named uses, chunk by chunk of cotangents."""
        outputs = [output for name in names for output in self.uses[name].outputs]
        if not outputs:
            return
        size = sum(output.numel() for output in outputs) * cotangents.element_size()
        chunk = max(1, min(len(cotangents), _CHUNK_BYTES // size))
        for start in range(0, len(cotangents), chunk):
            rows = slice(start, min(start + chunk, len(cotangents)))
            pulled = torch.autograd.grad(
                self.hidden,
                outputs,
                cotangents[rows],
                retain_graph=True,
                is_grads_batched=True,
                allow_unused=True,
                materialize_grads=True,
            )
            flat = iter(g.flatten(1, -2) for g in pulled)
            yield rows, {name: torch.cat([next(flat) for _ in self.uses[name].outputs], 1) for name in names}

    def _slow_gradient(self, cotangent: Tensor) -> dict[str, Tensor]:
        """Gradients of the parameters without a rule, by plain differentiation."""
        if not self._slow:
            return {}
        leaves = tuple(self._slow.values())
        found = torch.autograd.grad(
            self.hidden,
            leaves,
            cotangent.to(self.hidden),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(self._slow, found, strict=True))


def _groups(uses: dict[str, Use], limit: int) -> Iterator[tuple[str, ...]]:
    """Names whose sums over pairs of positions fit in ``limit`` bytes together."""
    group: list[str] = []
    held = 0
    for name, use in uses.items():
        size = 8 * use.size * len(use.activations) if use.kind in ("linear", "transposed") else 0
        if group and held + size > limit:
            yield tuple(group)
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield tuple(group)
