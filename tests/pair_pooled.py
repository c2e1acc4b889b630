"""Pooling on two processes, process by process: uneven shares, an empty one, weights, what does not belong together."""

import os

import torch
from torch import distributed as dist

from ceilings import distributed, scores
from ceilings.pooled_sums import PooledAccumulator
from ceilings.transformer import TinyTransformer, TransformerConfig
from pair import keep

F64 = torch.float64
SHARES = {
    "uneven": (slice(0, 3), slice(3, 11)),
    "first empty": (None, slice(0, 11)),
    "last empty": (slice(0, 11), None),
}


def model(dtype=F64, vocabulary=7):
    shape = {"vocab_size": vocabulary, "width": 8, "depth": 1, "heads": 2, "mlp_width": 12, "tied": True}
    return TinyTransformer(TransformerConfig(**shape), 0).to(dtype)


def batch():
    """Sequences, and rewards with a large mean that differs between the shares."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(7, (11, 6), generator=g)
    rewards = torch.randn(11, 2, generator=g, dtype=F64) + 5 + torch.arange(11)[:, None]
    return ids, (torch.arange(6) >= 2).expand(11, -1), rewards


def pooled():
    """What process 0 ends up with, one file a case."""
    dist.init_process_group("gloo")
    for name, shares in SHARES.items():
        accumulator = PooledAccumulator(model(), ("a", "b"), 4)
        add(accumulator, shares)
        accumulator.pool()
        finish(accumulator, name)
    twice = PooledAccumulator(model(), ("a", "b"), 4)
    for shares in ((slice(0, 2), slice(2, 5)), (slice(5, 10), slice(10, 11))):
        add(twice, shares)
        twice.pool()
    finish(twice, "twice")
    weighted = PooledAccumulator(model(), ("a", "b"), 4)
    add(weighted, SHARES["uneven"], torch.arange(1, 12) / 66)
    weighted.pool()
    finish(weighted, "weighted")
    scores._NARROW_SEQUENCES = 8  # no process has as many, both together have
    narrow = PooledAccumulator(model(torch.float32), ("a", "b"), 4)
    add(narrow, (slice(0, 5), slice(5, 11)))
    narrow.pool()
    finish(narrow, "wide")
    keep(".", f"refused{dist.get_rank()}.json", [refused("vocabulary"), refused("weights")])
    dist.destroy_process_group()


def add(accumulator, shares, weights=None):
    mine = shares[dist.get_rank()]
    if mine is not None:
        some = None if weights is None else weights[mine]
        accumulator.add(*(part[mine] for part in batch()), weights=some)


def finish(accumulator, name):
    if dist.get_rank() == 0:
        accumulator.moments().save(f"{name}.safetensors")


def refused(what):
    """The error that every process raises."""
    first = dist.get_rank() == 0
    accumulator = PooledAccumulator(
        model(vocabulary=8 if first and what == "vocabulary" else 7), ("a", "b"), 4
    )
    weights = torch.ones(11) / 11 if first and what == "weights" else None
    add(accumulator, SHARES["uneven"], weights)
    try:
        accumulator.pool()
    except ValueError as error:
        return str(error)
    return os.environ["RANK"]


def strangers():
    """Process 1 has another model; process 0 keeps what it was told."""

    def lead(device):
        try:
            distributed.team().accumulator(model(), ("a", "b"))
        except ValueError as error:
            keep(".", "strangers.json", str(error))
        return 7

    return distributed.run_together("cpu", lead, lambda device: model().requires_grad_(False).float())
