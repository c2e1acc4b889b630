"""Sums sharded by rows on two processes, with whole weights and with those of FSDP2."""

from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ceilings.sharded_sums import ShardedAccumulator, load_rows, save_rows
from pair import keep

F64 = torch.float64
VOCABULARY = 7  # odd, so that the two processes have unequal numbers of rows
NAMES = ("reward_0", "reward_1")
CASES = ("tied", "untied", "pieces", "whole", "gpt2", "narrow")


class Narrow(nn.Module):
    """A matrix of one row, of which the second process has none; with `gain`, a parameter without a rule."""

    def __init__(self, gain=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)
        self.down, self.up = nn.Linear(4, 1), nn.Linear(1, 4)
        self.gain = nn.Parameter(torch.randn(4)) if gain else 1

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return SimpleNamespace(logits=self.head(x + self.up(torch.tanh(self.down(x))) * self.gain))


def in_float64(self, x):
    """Hugging Face's norm without its cast to float32."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def build(case):
    """A toy model, and its blocks."""
    torch.manual_seed(0)
    if case in ("narrow", "refused"):
        return Narrow(case == "refused").double(), []
    if case == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=8,
            n_layer=2,
            n_head=2,
            n_positions=16,
            initializer_range=0.4,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = GPT2LMHeadModel(config).double()
        return model, model.transformer.h
    LlamaRMSNorm.forward = in_float64
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=10,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=case not in ("untied", "pieces"),
        attention_bias=True,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).double()
    return model, model.model.layers


def batch():
    """Nine sequences of unequal length, padded on the left; two rewards with a large mean."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (9, 8), generator=g)
    pads = torch.arange(9) % 4
    attention = (torch.arange(8) >= pads[:, None]).long()
    mask = torch.arange(8) >= (pads + 2)[:, None]
    return ids * attention, mask, torch.randn(9, 2, generator=g, dtype=F64) + 4, attention


def sharded():
    """Rows of both processes, one folder a case."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    notes = {}
    for case in CASES:
        model, blocks = build(case)
        if case == "pieces":
            fully_shard(model.model.embed_tokens, mesh=mesh)
            fully_shard(model.model.norm, mesh=mesh)
            fully_shard(model.lm_head, mesh=mesh)
        if case != "whole":
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        ids, mask, rewards, attention = batch()
        accumulator = ShardedAccumulator(model, NAMES, 2)
        for some in (slice(0, 5), slice(5, 6)):
            accumulator.add(ids[some], mask[some], rewards[some], attention_mask=attention[some])
        save_rows(accumulator.moments(), case)
        again = ShardedAccumulator(model, NAMES, 2)
        again.restore(load_rows(case, dist.get_rank()))
        again.add(ids[6:], mask[6:], rewards[6:], attention_mask=attention[6:])
        save_rows(again.moments(), case)
        notes[case] = [
            all(p.requires_grad and p.grad is None for p in model.parameters()),
            sum(t.numel() for t in again.moments().squares.values()),
            trained(model, ids),
        ]
    try:
        ShardedAccumulator(build("refused")[0], NAMES, 2).add(*batch()[:3])
    except ValueError as error:
        notes["refused"] = str(error)
    keep(".", f"notes{dist.get_rank()}.json", notes)
    dist.destroy_process_group()


def trained(model, ids):
    """Whether an ordinary backward pass still reaches every parameter afterwards."""
    model(ids).logits.square().sum().backward()
    return all(p.grad is not None for p in model.parameters())
