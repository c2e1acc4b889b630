"""The score engine against one backward pass a sequence, closed forms and exact enumeration."""

import itertools
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from ceilings import ceiling as dense
from ceilings import score_sums
from ceilings.reference import finite_difference_gradient, loop_score_moments, per_sequence_scores
from ceilings.scores import ScoreAccumulator, ScoreMoments, flatten, score_moments
from ceilings.testing import assert_at_most, assert_equal, assert_within_standard_errors
from ceilings.transformer import (
    TinyTransformer,
    TransformerConfig,
    enumerate_responses,
    enumeration,
    expected_reward,
)

F64 = torch.float64
VOCAB = 7
SUMS = ("scores", "squares", "reward_scores")


def tiny(tied=True, seed=0, **changes):
    shape = {"vocab_size": VOCAB, "width": 8, "depth": 2, "heads": 2, "mlp_width": 12, "tied": tied}
    return TinyTransformer(TransformerConfig(**(shape | changes)), seed)


def random_batch(n=11, length=8, prompt=3, seed=0, rewards=2):
    """Rows of equal length with tokens that repeat, and rewards with a large mean."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (n, length), generator=g)
    mask = (torch.arange(length) >= prompt).expand(n, -1)
    return ids, mask, torch.randn(n, rewards, generator=g, dtype=F64) + 5


def padded_batch(side, seed=0):
    """Prompts of 1–4 and responses of 1–4 tokens, padded; the pad token also occurs as a real token."""
    g = torch.Generator().manual_seed(seed)
    rows = [(p, r) for p in (1, 2, 4) for r in (1, 3, 4)]
    width = max(p + r for p, r in rows) + 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, attention = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    for n, (p, r) in enumerate(rows):
        start = 0 if side == "right" else width - p - r
        ids[n, start : start + p + r] = torch.randint(VOCAB, (p + r,), generator=g)
        mask[n, start + p : start + p + r] = True
        attention[n, start : start + p + r] = 1
    return ids, mask, torch.randn(len(rows), generator=g, dtype=F64), attention


def assert_same_sums(actual, expected, rtol=1e-10):
    assert actual.names == expected.names
    expected = expected.shifted(actual.reward_shift)
    for part, name in itertools.product(SUMS, actual.names):
        assert_equal(getattr(actual, part)[name], getattr(expected, part)[name], rtol=rtol)
    for part in ("reward_sum", "reward_squares"):
        assert_equal(getattr(actual, part), getattr(expected, part), rtol=rtol, atol=1e-12)
    assert actual.count == expected.count
    assert abs(actual.weight_sum - expected.weight_sum) < 1e-12


class Odd(nn.Module):
    """What the small decoder lacks: biases, LayerNorm, learned positions, a layer used twice, a bare vector."""

    def __init__(self, width=6, functional_head=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(20, width)
        self.norm, self.shared = nn.LayerNorm(width), nn.Linear(width, width)
        self.gain = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, VOCAB)
        self.functional_head = functional_head
        self.double()

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        x = self.tokens(input_ids) + self.positions(position_ids)
        visible = (torch.ones(x.shape[1], x.shape[1]).tril() * attention_mask[:, None, :]).to(x)
        visible = visible / visible.sum(-1, keepdim=True).clamp_min(1)
        for _ in range(2):
            x = x + torch.tanh(self.shared(self.norm(visible @ x)))
        x = x * self.gain
        return functional.linear(x, self.tokens.weight) if self.functional_head else self.head(x)


class Bandit(nn.Module):
    """A table of logits: after token 0 the next token is one choice among V options."""

    def __init__(self, logits):
        super().__init__()
        self.table = nn.Embedding.from_pretrained(
            torch.diag(torch.ones(len(logits))).double() * 0 + logits, False
        )

    def forward(self, input_ids):
        return self.table(input_ids)


def pulls(options):
    """The batch in which a bandit gives each answer once."""
    ids = torch.stack([torch.zeros(len(options), dtype=torch.long), torch.as_tensor(options)], 1)
    return ids, torch.tensor([[False, True]]).expand(len(options), -1)


@pytest.fixture
def exact_llama(monkeypatch):
    """Hugging Face's Llama in float64 with its float32 casts taken out: grouped heads, biases, tied.

    The pad token is one that the batches use as a real one. Its row begins at zero, where a norm multiplies by a
    thousand: its score would dwarf all others, and a tolerance relative to the largest entry would see nothing else.
    So the row is drawn like the rest.
    """
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)

    def build(**changes):
        torch.manual_seed(0)
        shape = {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "initializer_range": 0.5,
            "pad_token_id": 0,
        }
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(shape | changes))).double()
        nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
        return model

    return build


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_no_row_of_the_exact_llama_hides_the_others_from_a_relative_tolerance(exact_llama, changes):
    model = exact_llama(**changes)
    assert model.model.embed_tokens.padding_idx == 0
    ids, mask, rewards, attention = padded_batch("left")
    squares = loop_score_moments(model, ids, mask, rewards, attention_mask=attention).squares
    rows = squares["model.embed_tokens.weight"].amax(1)
    assert float(rows.max() / rows.min()) < 1e3


# The engine against the loop


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("tied", [True, False])
def test_moments_are_those_of_one_backward_pass_a_sequence(tied, batch_size):
    model, batch = tiny(tied), random_batch()
    moments = score_moments(model, *batch, batch_size=batch_size)
    assert moments.slow_parameters == ()
    assert_same_sums(moments, loop_score_moments(model, *batch))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tied", [True, False])
def test_padding_counts_for_nothing(tied, side):
    ids, mask, rewards, attention = padded_batch(side)
    moments = score_moments(tiny(tied), ids, mask, rewards, attention_mask=attention, batch_size=4)
    assert_same_sums(moments, loop_score_moments(tiny(tied), ids, mask, rewards, attention_mask=attention))
    other = torch.where(attention.bool(), ids, 5)
    again = score_moments(tiny(tied), other, mask, rewards, attention_mask=attention, batch_size=3)
    assert_same_sums(again, moments, rtol=1e-12)


def test_padding_on_the_right_needs_no_mask():
    ids, mask, rewards, attention = padded_batch("right")
    with_mask = score_moments(tiny(), ids, mask, rewards, attention_mask=attention)
    assert_same_sums(score_moments(tiny(), ids, mask, rewards), with_mask, rtol=1e-12)


@pytest.mark.parametrize("block_bytes", [8, 200, 600, 1 << 20])
@pytest.mark.parametrize("tied", [True, False])
def test_the_size_of_a_block_changes_nothing(monkeypatch, tied, block_bytes):
    monkeypatch.setattr(score_sums, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(score_sums, "_ROWS", 1)
    monkeypatch.setattr(score_sums, "_SEQUENCES", 3)
    assert_same_sums(
        score_moments(tiny(tied), *random_batch()), loop_score_moments(tiny(tied), *random_batch())
    )


def test_weights_enter_each_sum_once():
    model, (ids, mask, rewards) = tiny(), random_batch()
    weights = torch.rand(len(ids), dtype=F64, generator=torch.Generator().manual_seed(1))
    weights[3] = 0
    weights /= weights.sum()
    moments = score_moments(model, ids, mask, rewards, weights=weights, batch_size=4)
    assert moments.weighting == "probabilities"
    assert_same_sums(moments, loop_score_moments(model, ids, mask, rewards, weights))


def test_several_rewards_cost_no_second_pass_and_do_not_mix():
    model, (ids, mask, rewards) = tiny(), random_batch(rewards=3)
    together = score_moments(model, ids, mask, rewards, reward_names=("a", "b", "c"))
    for k, name in enumerate("abc"):
        alone = score_moments(model, ids, mask, rewards[:, k])
        assert_equal(flatten(together.gradient(name)), flatten(alone.gradient()))
        assert abs(together.reward_std(name) - alone.reward_std()) < 1e-12


@pytest.mark.parametrize("functional_head", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_biases_layer_norms_positions_reuse_and_bare_parameters(side, functional_head):
    torch.manual_seed(0)
    model = Odd(functional_head=functional_head)
    ids, mask, rewards, attention = padded_batch(side)
    moments = score_moments(model, ids, mask, rewards, attention_mask=attention, batch_size=4)
    expected_slow = {"gain", "tokens.weight"} if functional_head else {"gain"}
    assert set(moments.slow_parameters) == expected_slow
    used = [n for n in moments.names if not (functional_head and n.startswith("head"))]
    scores = {}
    for row in range(len(ids)):
        real = attention[row].bool()
        ids_1, mask_1 = ids[row][real][None], mask[row][real][None]
        positions = torch.arange(ids_1.shape[1])[None]
        logits = model(ids_1, torch.ones_like(ids_1), positions)[0, :-1].log_softmax(-1)
        log_prob = logits.gather(1, ids_1[0, 1:, None])[:, 0][mask_1[0, 1:]].sum()
        grads = torch.autograd.grad(log_prob, [dict(model.named_parameters())[n] for n in used])
        for name, grad in zip(used, grads, strict=True):
            scores.setdefault(name, []).append(grad)
    for name in used:
        s = torch.stack(scores[name])
        assert_equal(moments.scores[name], s.sum(0))
        assert_equal(moments.squares[name], s.square().sum(0))
    for name in set(moments.names) - set(used):
        assert not moments.squares[name].any()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}]
)
def test_llama_of_hugging_face(exact_llama, changes, side):
    model = exact_llama(**changes)
    ids, mask, rewards, attention = padded_batch(side)
    moments = score_moments(model, ids, mask, rewards, attention_mask=attention, batch_size=4)
    assert moments.slow_parameters == ()
    assert_same_sums(moments, loop_score_moments(model, ids, mask, rewards, attention_mask=attention))


def test_a_prompt_needs_no_logits_and_signs_stay_with_their_tokens(exact_llama):
    model, (ids, mask, rewards) = exact_llama(), random_batch(prompt=5)
    lengths = []
    model.lm_head.register_forward_hook(lambda m, args, output: lengths.append(output.shape[1]))
    moments = score_moments(model, ids, mask, rewards, batch_size=len(ids))
    assert lengths[-1] == 3 and mask.sum(1).tolist() == [3] * len(ids)
    assert_same_sums(moments, loop_score_moments(model, ids, mask, rewards))

    def signed(accepts):
        accumulator = ScoreAccumulator(
            model, ("a", "b"), 4, level="token", sign_draws=2, generator=torch.Generator().manual_seed(3)
        )
        accumulator._accepts &= accepts
        accumulator.add(ids, mask, rewards)
        return accumulator.moments()

    every = {"attention_mask", "position_ids", "use_cache"}
    assert_same_sums(signed(every | {"logits_to_keep"}), signed(every))


def test_llama_in_float32_as_it_ships():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    model, batch = transformers.LlamaForCausalLM(config), random_batch(rewards=1)
    moments = score_moments(model, *batch)
    assert {t.dtype for t in moments.squares.values()} == {torch.float32}
    assert_same_sums(moments, loop_score_moments(model, *batch), rtol=1e-5)


def test_bfloat16_models_are_summed_in_float32():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=4
    )
    moments = score_moments(transformers.LlamaForCausalLM(config).bfloat16(), *random_batch())
    assert {t.dtype for part in SUMS for t in getattr(moments, part).values()} == {torch.float32}


def test_gpt2_with_its_transposed_matrices_and_learned_positions():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=12, n_embd=8, n_layer=2, n_head=2, initializer_range=0.5
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids, mask, rewards, attention = padded_batch("left")
    moments = score_moments(model, ids, mask, rewards, attention_mask=attention, batch_size=4)
    assert moments.slow_parameters == ()
    assert_same_sums(moments, loop_score_moments(model, ids, mask, rewards, attention_mask=attention))


def test_a_norm_that_scales_by_one_plus_w():
    class OffsetRMSNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, dtype=F64))

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1 + self.weight)

    class WrongRMSNorm(OffsetRMSNorm):
        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight.exp()

    torch.manual_seed(0)
    for make, slow in ((OffsetRMSNorm, ()), (WrongRMSNorm, ("model.norm.weight",))):
        model = tiny()
        model.model.norm = make(8)
        moments = score_moments(model, *random_batch())
        assert moments.slow_parameters == slow
        assert_same_sums(moments, loop_score_moments(model, *random_batch()))


def test_the_pad_row_of_an_embedding_is_differentiated_like_any_other(exact_llama):
    model = exact_llama(num_hidden_layers=1, tie_word_embeddings=False)
    embedding = model.model.embed_tokens
    assert embedding.padding_idx == 0
    ids, mask = torch.tensor([[2, 0, 4, 1]]), torch.tensor([[False, False, True, True]])

    def log_prob(row):
        with torch.no_grad():
            embedding.weight[0] = row
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            return log_probs[torch.arange(3), ids[0, 1:]][1:].sum()

    moments = score_moments(model, ids, mask, torch.zeros(1))
    numeric = finite_difference_gradient(log_prob, embedding.weight.detach()[0].clone())
    assert_equal(moments.scores["model.embed_tokens.weight"][0], numeric, rtol=1e-8)
    assert embedding.padding_idx == 0


def test_the_pad_row_is_differentiated_on_the_slow_path_too():
    torch.manual_seed(0)
    model = Odd(functional_head=True)
    plain = score_moments(model, *random_batch())
    model.tokens.padding_idx = 0
    again = score_moments(model, *random_batch())
    assert "tokens.weight" in again.slow_parameters and model.tokens.padding_idx == 0
    assert_same_sums(again, plain, rtol=1e-14)


def test_portions_add_up_and_the_last_partial_batch_is_not_lost():
    model, (ids, mask, rewards) = tiny(), random_batch(n=11, rewards=1)
    accumulator = ScoreAccumulator(model, batch_size=4)
    for part in (slice(0, 5), slice(5, 6), slice(6, 11)):
        accumulator.add(ids[part], mask[part], rewards[part])
    moments = accumulator.moments()
    assert moments.count == 11
    assert_same_sums(moments, loop_score_moments(model, ids, mask, rewards))


def test_only_parameters_that_require_a_gradient_are_measured_and_the_model_is_left_as_found():
    model = tiny().train()
    model.model.layers[0].requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    moments = score_moments(model, *random_batch())
    assert set(moments.names) == {name for name, required in before.items() if required}
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert model.training and all(p.grad is None for p in model.parameters())
    whole = score_moments(tiny(), *random_batch())
    assert_equal(flatten(moments.squares), flatten({n: whole.squares[n] for n in moments.names}), rtol=1e-12)


def test_the_model_is_left_as_found_after_an_error_too(monkeypatch):
    model = tiny()
    monkeypatch.setattr(score_sums.ParameterSums, "add", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_moments(model, *random_batch())
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


# Exact enumeration and closed forms


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.claim("thm-zero-mean")
@pytest.mark.claim("thm-covariance")
@pytest.mark.claim("thm-ceiling")
def test_a_whole_law_gives_zero_mean_the_exact_fisher_and_the_exact_gradient(tied, eos):
    model, prompt = tiny(tied, vocab_size=4, width=4, heads=1, mlp_width=6, depth=1), (1, 3)
    law, everything = enumerate_responses(model, prompt, 3, eos), enumeration(model, prompt, 3, eos)
    rewards = everything.rewards(lambda y: y[0] + 0.5 * (2 in y))
    moments = score_moments(model, *law.batch(), rewards, weights=law.probs, batch_size=10)
    size = float(flatten(moments.squares).sqrt().max())
    assert float(flatten(moments.mean_score()).abs().max()) < 1e-12 * size
    assert_equal(flatten(moments.diagonal_fisher()), law.probs @ everything.scores.square())
    assert_equal(
        flatten(moments.gradient()), dense.score_reward_covariance(everything.scores, rewards, law.probs)
    )
    assert_equal(flatten(moments.ceiling()), dense.gradient_ceiling(everything.scores, rewards, law.probs))
    tightness = dense.tightness(everything.scores, rewards, law.probs)
    assert torch.equal(flatten(moments.tightness()).isnan(), tightness.isnan())  # an untied row of no prefix
    assert_equal(flatten(moments.tightness()).nan_to_num(), tightness.nan_to_num(), rtol=1e-8)

    model.zero_grad()
    expected_reward(model, prompt, rewards, 3, eos).backward()
    assert_equal(flatten(moments.gradient()), torch.cat([p.grad.flatten() for p in model.parameters()]))

    theta = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def objective(point):
        torch.nn.utils.vector_to_parameters(point, model.parameters())
        return expected_reward(model, prompt, rewards, 3, eos).detach()

    assert_equal(flatten(moments.gradient()), finite_difference_gradient(objective, theta), rtol=1e-8)


def test_a_softmax_bandit_has_the_closed_form():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=F64)
    probs, options = logits.softmax(0), list(range(4))
    rewards = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=F64)
    moments = score_moments(Bandit(logits), *pulls(options), rewards, weights=probs)
    fisher = torch.diag(torch.diag(probs) - torch.outer(probs, probs))
    assert_equal(moments.diagonal_fisher()["table.weight"][0], fisher, rtol=1e-14)
    assert_equal(moments.gradient()["table.weight"][0], probs * (rewards - probs @ rewards), rtol=1e-14)
    assert abs(moments.mean_reward() - float(probs @ rewards)) < 1e-14
    assert not moments.squares["table.weight"][1:].any()


def all_batches(probs, size):
    """Every batch of a given size that a bandit can draw, with its probability."""
    for options in itertools.product(range(len(probs)), repeat=size):
        yield options, float(torch.stack([probs[a] for a in options]).prod())


def test_doubling_the_batch_keeps_the_mean_of_the_fisher_and_halves_the_square_of_the_mean():
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=F64)
    probs = logits.softmax(0)
    fisher = probs * (1 - probs)
    for size in (1, 2, 4):
        right, wrong = torch.zeros(3, dtype=F64), torch.zeros(3, dtype=F64)
        for options, p in all_batches(probs, size):
            moments = score_moments(Bandit(logits), *pulls(options), torch.zeros(size))
            right += p * moments.diagonal_fisher(centred=False)["table.weight"][0]
            wrong += p * moments.mean_score()["table.weight"][0].square()
        assert_equal(right, fisher, rtol=1e-12)
        assert_equal(wrong, fisher / size, rtol=1e-12)


def test_sampled_moments_approach_the_exact_ones():
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=F64)
    probs, count = logits.softmax(0), 4000
    options = torch.multinomial(probs, count, replacement=True, generator=torch.Generator().manual_seed(0))
    moments = score_moments(Bandit(logits), *pulls(options), torch.zeros(count), batch_size=1000)
    squares = (torch.eye(3, dtype=F64) - probs).square()
    error = ((probs @ squares.square() - (probs @ squares).square()) / count).sqrt()
    estimate = moments.diagonal_fisher(centred=False)["table.weight"][0]
    assert_within_standard_errors(estimate, probs * (1 - probs), error, k=4)


@pytest.mark.claim("prop-vacuous")
def test_in_sample_the_ceiling_always_holds():
    for seed in range(3):
        moments = score_moments(tiny(seed=seed), *random_batch(n=5, seed=seed, rewards=1))
        assert_at_most(flatten(moments.gradient()).abs(), flatten(moments.ceiling()))
        assert_at_most(flatten(moments.tightness()).nan_to_num(), 1.0, slack=0)


def test_derived_quantities_divide_by_n_and_centre():
    model, (ids, mask, rewards) = tiny(), random_batch(rewards=1)
    scores = torch.cat([s.flatten(1) for s in per_sequence_scores(model, ids, mask).values()], 1)
    moments = score_moments(model, ids, mask, rewards)
    assert_equal(flatten(moments.mean_score()), scores.mean(0))
    assert_equal(flatten(moments.gradient()), dense.score_reward_covariance(scores, rewards[:, 0]), rtol=1e-9)
    assert_equal(flatten(moments.diagonal_fisher()), scores.var(0, correction=0))
    assert_equal(flatten(moments.diagonal_fisher(centred=False)), scores.square().mean(0))
    assert abs(moments.reward_std() - float(rewards.std(correction=0))) < 1e-12
    assert abs(moments.mean_reward() - float(rewards.mean())) < 1e-12
    assert moments.num_parameters == scores.shape[1] == len(flatten(moments.scores))


def test_tightness_is_undefined_where_nothing_varies():
    model, (ids, mask, _) = tiny(), random_batch()
    constant = score_moments(model, ids, mask, torch.full((len(ids),), 0.1))
    assert bool(flatten(constant.tightness()).isnan().all())
    assert constant.reward_std() < 1e-8
    same = score_moments(model, ids[:1].expand(3, -1), mask[:3], torch.tensor([0.0, 1.0, 2.0]))
    assert bool(flatten(same.tightness()).isnan().all())
    unused = score_moments(model, ids, mask, torch.arange(len(ids)))
    assert bool(unused.tightness()["model.embed_tokens.weight"].isfinite().all())


def test_rewards_with_a_large_mean_lose_no_digits():
    model, (ids, mask, rewards) = tiny(), random_batch(rewards=1)
    plain = score_moments(model, ids, mask, rewards).gradient()
    lifted = score_moments(model, ids, mask, rewards + 1e9).gradient()
    assert_equal(flatten(lifted), flatten(plain), rtol=1e-6)


# Merging


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(1, 10), seed=st.integers(0, 99), weighted=st.booleans(), batch_size=st.integers(1, 12))
def test_the_merge_of_any_split_is_the_whole(cut, seed, weighted, batch_size):
    model, (ids, mask, rewards) = tiny(depth=1), random_batch(seed=seed)
    weights = torch.rand(11, dtype=F64, generator=torch.Generator().manual_seed(seed)) if weighted else None
    weights = None if weights is None else weights / weights.sum()
    whole = score_moments(model, ids, mask, rewards, weights=weights)
    parts = []
    for part in (slice(0, cut), slice(cut, 11)):
        accumulator = ScoreAccumulator(model, whole.reward_names, batch_size)
        some = None if weights is None else weights[part]
        accumulator.add(ids[part], mask[part], rewards[part], weights=some)
        parts.append(accumulator.moments())
    assert_same_sums(parts[0].merge(parts[1]), whole)
    assert_same_sums(parts[1].merge(parts[0]), whole)
    for name in whole.reward_names:
        assert_equal(
            flatten(parts[0].merge(parts[1]).gradient(name)), flatten(whole.gradient(name)), rtol=1e-9
        )


def test_part_of_a_law_has_no_expectation():
    model, law = tiny(vocab_size=3), enumerate_responses(tiny(vocab_size=3), (1,), 2)
    accumulator = ScoreAccumulator(model)
    ids, mask = law.batch()
    accumulator.add(ids[:4], mask[:4], torch.zeros(4), weights=law.probs[:4])
    half = accumulator.moments()
    for question in (half.gradient, half.diagonal_fisher, half.ceiling, half.tightness, half.mean_score):
        with pytest.raises(ValueError, match="merge the moments of the remaining responses first"):
            question()


def test_moments_that_do_not_belong_together_are_not_merged():
    batch = random_batch(rewards=1)
    whole = score_moments(tiny(), *batch)
    untied, wider = score_moments(tiny(False), *batch), score_moments(tiny(mlp_width=14), *batch)
    weighted = score_moments(tiny(), *batch, weights=torch.full((11,), 1 / 11, dtype=F64))
    other_reward = score_moments(tiny(), *batch, reward_names=("length",))
    cases = [
        (untied, "names differs \\('lm_head.weight' only there\\)"),
        (wider, "mlp.gate_proj.weight has shape \\(12, 8\\) here and \\(14, 8\\) there"),
        (weighted, "weighting differs \\('samples' here, 'probabilities' there\\)"),
        (other_reward, "reward_names differs"),
    ]
    for other, message in cases:
        with pytest.raises(ValueError, match=message):
            whole.merge(other)


# Files


def assert_identical(a, b):
    assert a.names == b.names
    for part, name in itertools.product(SUMS, a.names):
        assert torch.equal(getattr(a, part)[name], getattr(b, part)[name])
    for field in ("reward_shift", "reward_sum", "reward_squares"):
        assert torch.equal(getattr(a, field), getattr(b, field))
    for field in ("reward_names", "count", "weight_sum", "level", "weighting", "slow_parameters", "version"):
        assert getattr(a, field) == getattr(b, field)


def test_a_file_gives_back_every_bit(tmp_path):
    torch.manual_seed(0)
    for model in (tiny(), Odd()):
        moments = score_moments(model, *random_batch(), reward_names=("right", "short"))
        moments.save(tmp_path / "moments.safetensors")
        loaded = ScoreMoments.load(tmp_path / "moments.safetensors")
        assert_identical(loaded, moments)
        assert_same_sums(loaded.merge(moments), moments.merge(moments))
        assert os.listdir(tmp_path) == ["moments.safetensors"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path, moments = tmp_path / "moments.safetensors", score_moments(tiny(), *random_batch())
    moments.save(path)
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_moments(tiny(), *random_batch(n=3)).save(path)
    assert os.listdir(tmp_path) == ["moments.safetensors"]
    assert_identical(ScoreMoments.load(path), moments)


def rewrite_header(path, **changes):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["ceilings"])
    save_file(load_file(path), path, {"ceilings": json.dumps(header | changes)})


def test_files_of_another_version_or_kind_are_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "moments.safetensors"
    moments = score_moments(tiny(), *random_batch())
    moments.save(path)
    rewrite_header(path, version=2)
    with pytest.raises(ValueError, match="version 2, this library reads version 1: measure again"):
        ScoreMoments.load(path)
    rewrite_header(path, version=1, kind="something else")
    with pytest.raises(ValueError, match="holds no score moments"):
        ScoreMoments.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="holds no score moments"):
        ScoreMoments.load(path)
    moments.save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        ScoreMoments.load(path)


def test_the_data_type_refuses_what_later_code_could_misread():
    moments = score_moments(tiny(), *random_batch())
    fields = {name: getattr(moments, name) for name in moments.__dataclass_fields__}
    first = moments.names[0]
    cases = [
        ({"version": 0}, "version 0, this library reads version 1"),
        ({"level": "word"}, "level is 'word'; it must be one of"),
        ({"weighting": "none"}, "weighting is 'none'; it must be one of"),
        ({"count": 0}, "at least one parameter, one response and a positive weight"),
        ({"scores": {}}, "at least one parameter"),
        ({"reward_sum": torch.zeros(3)}, "reward_sum has shape \\(3,\\) for 2 reward names"),
        ({"squares": {"x": torch.zeros(1)}}, "squares and scores name different parameters"),
        ({"squares": moments.squares | {first: torch.zeros(2)}}, f"squares of {first} has shape \\(2,\\)"),
        ({"reward_scores": moments.scores}, "reward_scores of .* expected \\(2, "),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            ScoreMoments(**(fields | change))
    with pytest.raises(ValueError, match="no reward is called 'taste': name one of"):
        moments.gradient("taste")
    with pytest.raises(ValueError, match="no reward is called None"):
        moments.gradient()


# What is refused


def corrupted(**changes):
    ids, mask, rewards = random_batch(rewards=1)
    inputs = {"input_ids": ids, "response_mask": mask, "rewards": rewards[:, 0].clone()} | changes
    return lambda: score_moments(tiny(), **inputs)


def test_bad_input_is_refused_in_one_sentence():
    ids, mask, rewards = random_batch(rewards=1)
    nan, infinite = rewards[:, 0].clone(), rewards[:, 0].clone()
    nan[4], infinite[5] = float("nan"), float("inf")
    silent, first, padded = mask.clone(), mask.clone(), torch.ones_like(ids)
    silent[2], first[1, 0] = False, True
    padded[3, -1] = 0
    unled = torch.ones_like(ids)
    unled[6, :3] = 0
    uniform = torch.full((11,), 1 / 11, dtype=F64)
    negative, missing = uniform.clone(), uniform.clone()
    negative[0], negative[1] = -uniform[0], 3 * uniform[1]
    missing[0] = float("nan")
    cases = [
        ({"rewards": nan}, "reward of sequence 4 is NaN or infinite"),
        ({"rewards": infinite}, "reward of sequence 5 is NaN or infinite"),
        ({"rewards": rewards[:5]}, r"rewards have shape \(5, 1\), expected \(11, 1\)"),
        ({"rewards": torch.zeros(11, 2), "reward_names": ("a",)}, r"rewards have shape \(11, 2\), expected"),
        ({"response_mask": silent}, "sequence 2 has no scored token"),
        ({"response_mask": first}, "sequence 1: scored token 0 has no real token before it"),
        ({"attention_mask": padded}, "sequence 3: scored token 7 is padding"),
        ({"attention_mask": unled}, "sequence 6: scored token 3 has no real token before it"),
        ({"response_mask": mask[:, :5]}, r"response_mask has shape \(11, 5\), input_ids \(11, 8\)"),
        ({"attention_mask": padded[:4]}, r"attention_mask has shape \(4, 8\), input_ids \(11, 8\)"),
        ({"response_mask": mask.long()}, "response_mask is torch.int64; give booleans"),
        ({"input_ids": ids.double()}, "input_ids must be whole numbers"),
        ({"input_ids": ids[0]}, "input_ids must be whole numbers"),
        ({"input_ids": ids[:0]}, "input_ids must be whole numbers"),
        ({"weights": 2 * uniform}, "weights sum to 2, not 1"),
        ({"weights": missing}, "weights sum to nan, not 1"),
        ({"weights": torch.ones(1)}, r"weights have shape \(1,\) for 11 sequences"),
        ({"weights": negative}, "weight of sequence 0 is -0.09"),
        ({"batch_size": 0}, "batch_size 0 with 1 reward names"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            corrupted(**changes)()
        assert "\n" not in str(caught.value)


def test_a_frozen_model_and_an_empty_accumulator_are_refused():
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        score_moments(tiny().requires_grad_(False), *random_batch())
    with pytest.raises(ValueError, match="no sequence was added"):
        ScoreAccumulator(tiny()).moments()


def test_samples_and_probabilities_are_kept_apart():
    ids, mask, rewards = random_batch(rewards=1)
    accumulator = ScoreAccumulator(tiny())
    accumulator.add(ids, mask, rewards)
    with pytest.raises(ValueError, match="earlier sequences were samples, these are probabilities"):
        accumulator.add(ids, mask, rewards, weights=torch.full((11,), 1 / 11))


# Going on from saved moments


def test_an_accumulator_goes_on_from_saved_moments(tmp_path):
    model, (ids, mask, rewards) = tiny(), random_batch()
    first = ScoreAccumulator(model, ("a", "b"), 4)
    first.add(ids[:5], mask[:5], rewards[:5])
    first.moments().save(tmp_path / "moments.safetensors")
    second = ScoreAccumulator(model, ("a", "b"), 4)
    second.restore(ScoreMoments.load(tmp_path / "moments.safetensors"))
    assert second.moments().count == 5 and second.moments().slow_parameters == ()
    second.add(ids[5:], mask[5:], rewards[5:])
    assert_same_sums(second.moments(), loop_score_moments(model, ids, mask, rewards))


def test_moments_of_something_else_are_not_restored():
    model, (ids, mask, rewards) = tiny(), random_batch()
    moments = score_moments(model, ids, mask, rewards)
    with pytest.raises(ValueError, match="belong to another model, level or reward"):
        ScoreAccumulator(model, ("other", "names")).restore(moments)
    with pytest.raises(ValueError, match="belong to another model, level or reward"):
        ScoreAccumulator(tiny(width=16), moments.reward_names).restore(moments)
    busy = ScoreAccumulator(model, moments.reward_names)
    busy.add(ids, mask, rewards)
    with pytest.raises(ValueError, match="holds sequences already"):
        busy.restore(moments)
