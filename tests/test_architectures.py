"""The score engine on the families of causal language models that `transformers` ships, each at toy size."""

import itertools

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ceilings.reference import loop_score_moments
from ceilings.scores import ScoreAccumulator, score_moments
from ceilings.testing import assert_equal

transformers = pytest.importorskip("transformers")

F64 = torch.float64
VOCAB = 11
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 4}
GPT2 = {"n_embd": 16, "n_inner": 12, "n_layer": 2, "n_head": 4, "n_positions": 16}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
SLOW_EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"}
# Qwen2-MoE flattens sequences and positions into one axis before its shared expert.
SHARED = {f"mlp.shared_expert.{m}_proj.weight" for m in ("gate", "up", "down")} | {
    "mlp.shared_expert_gate.weight"
}

# Family: what its configuration adds, and which parameters of each layer have no fast rule.
FAMILIES = {
    "Llama": ({"num_key_value_heads": 2, "tie_word_embeddings": True}, set()),
    "Qwen2": ({"num_key_value_heads": 2}, set()),
    "Qwen3": (GROUPED, set()),
    "Mistral": (GROUPED | {"sliding_window": None}, set()),
    "Gemma": (GROUPED | {"tie_word_embeddings": True}, set()),
    "GPT2": (GPT2 | {"tie_word_embeddings": True}, set()),
    "GPTNeoX": ({"rotary_pct": 0.5}, set()),
    "Phi": ({"partial_rotary_factor": 0.5}, set()),
    "Olmo2": ({"num_key_value_heads": 2}, set()),
    "Falcon": ({"multi_query": True, "parallel_attn": True, "ffn_hidden_size": 12}, set()),
    "Mixtral": (EXPERTS | {"num_local_experts": 4}, SLOW_EXPERTS),
    "Qwen2Moe": (
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 6},
        SLOW_EXPERTS | SHARED,
    ),
    "Olmoe": (EXPERTS | {"num_experts": 4}, SLOW_EXPERTS),
}


class Wide(TorchFunctionMode):
    """Turn every request for float32 into one for float64: the casts inside the models limit a check to 1e-7."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(value):
            return F64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widen, args), **{k: widen(v) for k, v in (kwargs or {}).items()})


def family(name, **changes):
    """A random model of one family, in float64, with gains and biases that are not 1 and 0."""
    added, slow = FAMILIES[name]
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    shape = {"pad_token_id": 0, "tie_word_embeddings": False} | SHAPE | added | changes
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = getattr(transformers, f"{name}Config")(**shape, **plain)
    torch.manual_seed(0)
    model = getattr(transformers, head)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    names = {n for n, _ in model.named_parameters() if any(n.endswith(f".{s}") for s in slow)}
    return model, names


def batch(side, seed=0):
    """Prompts of 1–4 and responses of 1–4 tokens with a gap in some masks, padded on one side."""
    g = torch.Generator().manual_seed(seed)
    rows = [(1, 3), (4, 1), (2, 4), (2, 2), (3, 4)]
    width = max(p + r for p, r in rows) + 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, attention = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    for n, (p, r) in enumerate(rows):
        start = 0 if side == "right" else width - p - r
        ids[n, start : start + p + r] = torch.randint(VOCAB, (p + r,), generator=g)
        mask[n, start + p : start + p + r] = True
        attention[n, start : start + p + r] = 1
        if r == 4:
            mask[n, start + p + 1] = False
    return ids, mask, torch.randn(len(rows), 2, generator=g, dtype=F64), attention


def assert_same_sums(actual, expected):
    expected = expected.shifted(actual.reward_shift)
    for part, name in itertools.product(("scores", "squares", "reward_scores"), actual.names):
        found, wanted = getattr(actual, part)[name], getattr(expected, part)[name]
        assert wanted.any() or not found.any(), name
        try:
            assert_equal(found, wanted)
        except AssertionError as e:
            raise AssertionError(f"{part} of {name}: {e}") from e


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_measured_as_by_the_loop(name, side):
    model, slow = family(name)
    ids, mask, rewards, attention = batch(side)
    with Wide():
        moments = score_moments(model, ids, mask, rewards, attention_mask=attention, batch_size=2)
        expected = loop_score_moments(model, ids, mask, rewards, attention_mask=attention)
    assert set(moments.slow_parameters) == slow
    assert moments.names == tuple(n for n, _ in model.named_parameters())
    assert_same_sums(moments, expected)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mixtral"])
def test_frozen_parameters_are_left_out_and_the_others_do_not_change(name):
    model, slow = family(name)
    ids, mask, rewards, attention = batch("left")
    with Wide():
        whole = score_moments(model, ids, mask, rewards, attention_mask=attention)
        frozen = {n for n, _ in model.named_parameters() if ".0." in n or "embed" in n or "wte" in n}
        for n, parameter in model.named_parameters():
            parameter.requires_grad_(n not in frozen)
        some = score_moments(model, ids, mask, rewards, attention_mask=attention)
    assert set(some.names) == set(whole.names) - frozen
    assert set(some.slow_parameters) == slow - frozen
    for n in some.names:
        assert_equal(some.squares[n], whole.squares[n])
        assert_equal(some.reward_scores[n], whole.reward_scores[n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Gemma", "Mixtral", "Falcon"])
def test_models_as_they_ship_agree_with_float64_to_the_precision_of_their_weights(name, dtype):
    narrow, _ = family(name, num_hidden_layers=1)
    narrow = narrow.to(dtype)
    wide, _ = family(name, num_hidden_layers=1)
    wide.load_state_dict(narrow.state_dict())
    ids, mask, rewards, attention = batch("right")
    moments = score_moments(narrow, ids, mask, rewards, attention_mask=attention)
    with Wide():
        exact = score_moments(wide, ids, mask, rewards, attention_mask=attention)
    assert {t.dtype for t in moments.squares.values()} == {torch.float32}
    # NOTE bfloat16 has three digits and a routing decision may flip: this bounds gross errors only.
    found = torch.cat([moments.squares[n].flatten() for n in moments.names if "experts" not in n])
    wanted = torch.cat([exact.squares[n].flatten() for n in exact.names if "experts" not in n])
    assert_equal(found, wanted, rtol=2e-5 if dtype is torch.float32 else 0.2)


class Routed(nn.Module):
    """A model whose experts are plain linear modules that see other rows than the sequences."""

    def __init__(self, kind, width=6):
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.double()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = x + getattr(self, self.kind)(input_ids, x)
        return self.head(x.cumsum(1))

    def tokens(self, ids, x):
        """Each token to one expert: rows are tokens."""
        out = torch.zeros_like(x)
        for expert, chosen in zip(self.experts, (ids < 6, ids >= 6), strict=True):
            if chosen.any():
                out[chosen] = torch.tanh(expert(x[chosen]))
        return out

    def sequences(self, ids, x):
        """Each sequence to one expert by its first token: fewer rows, only in some batches."""
        out = torch.zeros_like(x)
        for expert, chosen in zip(self.experts, (ids[:, 0] < 6, ids[:, 0] >= 6), strict=True):
            if chosen.any():
                out[chosen] = torch.tanh(expert(x[chosen]))
        return out

    def sorted(self, ids, x):
        """All sequences to both experts, sorted by their first token."""
        order = ids[:, 0].argsort(stable=True)
        out = torch.tanh(self.experts[1](self.experts[0](x[order])))
        return out[order.argsort()]

    def time_first(self, ids, x):
        """Positions before sequences."""
        return torch.tanh(self.experts[1](self.experts[0](x.transpose(0, 1)))).transpose(0, 1)

    def capacity(self, ids, x):
        """A fixed number of groups before everything else, as expert parallelism has it: here 3."""
        flat = x.flatten(0, 1)
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 3, flat.shape[1])])
        out = torch.tanh(self.experts[1](self.experts[0](flat.view(3, -1, flat.shape[1]))))
        return out.flatten(0, 1)[: x.shape[0] * x.shape[1]].view_as(x)


@pytest.mark.parametrize("first", [1, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["tokens", "sequences", "sorted", "time_first", "capacity"])
def test_modules_that_see_other_rows_than_the_sequences_are_slow_and_right(kind, size, first):
    torch.manual_seed(0)
    model = Routed(kind)
    ids = torch.randint(VOCAB, (6, 7), generator=torch.Generator().manual_seed(size))
    ids[0], ids[3] = first, ids[0]
    ids[1:3, 0] = torch.tensor([8, 3])
    mask = (torch.arange(7) > 1).expand(6, -1)
    rewards = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    moments = score_moments(model, ids, mask, rewards, batch_size=size)
    assert_same_sums(moments, loop_score_moments(model, ids, mask, rewards))
    slow = {f"experts.{k}.{part}" for k in (0, 1) for part in ("weight", "bias")}
    assert set(moments.slow_parameters) <= slow
    if kind != "sequences" or 1 < size < 6:  # a batch that goes whole to one expert is no surprise
        assert set(moments.slow_parameters) == slow
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_what_the_slow_parameters_cost_is_reported():
    ids, mask, rewards, _ = batch("right")
    for name, costs in (("Llama", False), ("Mixtral", True)):
        accumulator = ScoreAccumulator(family(name)[0], ("a", "b"))
        accumulator.add(ids, mask, rewards)
        assert (accumulator.slow_seconds > 0) == costs == bool(accumulator.moments().slow_parameters)
