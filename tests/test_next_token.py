"""Exact next-token moments against the obvious: every word's score by its own backward pass."""

import math

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from ceilings.next_token import NextToken, matched_words, next_token_moments
from ceilings.pretrained import load_pretrained
from ceilings.pullback import PullBack
from ceilings.reference import logit_derivative
from ceilings.testing import assert_at_most, assert_equal
from test_pretrained import require_built_in

PROMPT = torch.tensor([5, 9, 5, 3, 1])  # 5 twice; 3 is the padding token of the models below


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def exact_llama(monkeypatch):
    """Llama without the float32 casts of its norms and rotary positions, which stop every identity at 1e-7."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(llama.LlamaRotaryEmbedding, "forward", rotary)


def tiny_llama(tied=True, vocab=50, **extra):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=3,
        initializer_range=0.3,
        **extra,
    )
    return shaken(LlamaForCausalLM(config))


def shaken(model):
    """Norm weights and biases away from 1 and 0, where mistakes hide."""
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
    return model


def brute_force(model, prompt, rewards):
    """F and g of every parameter from one backward pass a word."""
    parameters = dict(model.named_parameters())
    log_probs = model(prompt[None]).logits[0, -1].log_softmax(0)
    probs = log_probs.detach().exp()
    fisher = {name: torch.zeros_like(p) for name, p in parameters.items()}
    gradient = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for v in range(len(probs)):
        scores = torch.autograd.grad(
            log_probs[v],
            list(parameters.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for name, s in zip(parameters, scores, strict=True):
            fisher[name] += probs[v] * s.square()
            gradient[name] += probs[v] * rewards[v] * s  # no baseline: the score has mean zero
    return fisher, gradient


def assert_exact(model, prompt=PROMPT, rtol=1e-10):
    rewards = torch.randn(model.config.vocab_size, generator=torch.Generator().manual_seed(1))
    moments = next_token_moments(model, prompt, rewards)
    fisher, gradient = brute_force(model, prompt, rewards)
    assert moments.names == tuple(dict(model.named_parameters()))
    for found, expected in ((moments.diagonal_fisher(), fisher), (moments.gradient(), gradient)):
        # A parameter that cannot act, such as a key with one position, has only rounding on both sides.
        rounding = 1e-13 * max(float(x.abs().max()) for x in expected.values())
        for name in moments.names:
            assert_equal(found[name], expected[name], rtol=rtol, atol=rounding)
    return moments


@pytest.mark.claim("thm-logits", "prop-next-token")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [50, 20])  # more words than directions, and fewer
def test_every_parameter_of_a_llama_is_exact(exact_llama, tied, vocab):
    moments = assert_exact(tiny_llama(tied, vocab))
    assert moments.slow_parameters == ()


def test_biases_one_position_and_repeated_tokens(exact_llama):
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    assert_exact(model)
    assert_exact(model, torch.tensor([7]))
    assert_exact(model, torch.tensor([4, 4, 4]))


def test_head_with_a_bias(exact_llama):
    model = tiny_llama(tied=False)
    model.lm_head = nn.Linear(32, 50, bias=True)
    assert_exact(shaken(model))


def test_gpt2_transposed_maps_layer_norms_and_learned_positions():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=8, initializer_range=0.3)
    moments = assert_exact(shaken(GPT2LMHeadModel(config)))
    assert moments.slow_parameters == ()


def test_gemma_scaled_embeddings_and_shifted_norm_weights():
    # Its float32 casts stay in: agreement to single precision.
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=3,
        initializer_range=0.3,
    )
    moments = assert_exact(shaken(GemmaForCausalLM(config)), rtol=1e-5)
    # Its embedding multiplies by a constant, which no rule covers: exact all the same, tied rows included.
    assert moments.slow_parameters == ("model.embed_tokens.weight",)


class _OwnProduct(nn.Module):
    """A matrix that no rule knows, used without its module's forward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return nn.functional.linear(x, self.inner.weight)


class _Shared(nn.Module):
    """One matrix used as it is and transposed: two rules, so none."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.other = linear, _Transposed(linear.weight)

    def forward(self, x):
        return self.linear(x) + self.other(x)


class _Transposed(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight


def test_parameters_without_a_rule_take_the_slow_path_and_are_exact(exact_llama):
    model = tiny_llama()
    model.model.layers[0].mlp.down_proj = _OwnProduct(model.model.layers[0].mlp.down_proj)
    moments = assert_exact(model)
    assert moments.slow_parameters == ("model.layers.0.mlp.down_proj.inner.weight",)


def test_matrix_with_two_different_uses_takes_the_slow_path(exact_llama):
    model = tiny_llama()
    model.model.layers[1].self_attn.o_proj = _Shared(model.model.layers[1].self_attn.o_proj)
    assert assert_exact(model).slow_parameters == ("model.layers.1.self_attn.o_proj.linear.weight",)


def test_use_behind_a_rule_s_back_is_noticed(exact_llama):
    # The module is called, so its rule applies, and its weight is used once more where no hook sees it.
    model = tiny_llama()
    model.model.layers[1].self_attn.o_proj.register_forward_hook(
        lambda m, args, out: out + args[0] @ m.weight
    )
    assert assert_exact(model).slow_parameters == ("model.layers.1.self_attn.o_proj.weight",)


def test_module_called_twice_adds_both_uses_before_squaring(exact_llama):
    model = tiny_llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    moments = assert_exact(model)
    assert moments.slow_parameters == ()


def test_unused_module_has_ceiling_zero(exact_llama):
    model = tiny_llama()
    model.model.layers[1].spare = nn.Linear(3, 3)
    moments = assert_exact(model)
    assert float(moments.ceiling()["model.layers.1.spare.weight"].max()) == 0


def test_in_place_activation_does_not_disturb_the_rule(exact_llama):
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.LeakyReLU(0.1, inplace=True)
    assert assert_exact(model).slow_parameters == ()


def test_chosen_entries_equal_those_of_the_whole(exact_llama):
    model = tiny_llama()
    law = NextToken(model, PROMPT)
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(3, 50, generator=generator)
    where = {n: torch.randint(p.numel(), (7,), generator=generator) for n, p in model.named_parameters()}
    where["model.embed_tokens.weight"] = torch.arange(4 * 32, 11 * 32)  # rows in the prompt and not
    entries = law.gradient_at(rewards, where)
    for k in range(3):
        whole = law.gradient(rewards[k])
        assert_equal(entries[k], torch.cat([whole[n].flatten()[w] for n, w in where.items()]), rtol=1e-12)


def test_factor_gives_the_fisher_matrix_below_the_head(exact_llama):
    model = tiny_llama()
    law = NextToken(model, PROMPT)
    where = {name: torch.tensor([0, 5, 17]) for name in law.names_below_head}
    factor = law.fisher_factor_at(where)
    fisher = law.diagonal_fisher()
    assert_equal(
        factor.square().sum(0), torch.cat([fisher[n].flatten()[w] for n, w in where.items()]), rtol=1e-12
    )
    name, other = list(where)[:2]
    log_probs = model(PROMPT[None]).logits[0, -1].log_softmax(0)
    parameters = dict(model.named_parameters())
    pairs = [
        torch.autograd.grad(log_probs[v], [parameters[name], parameters[other]], retain_graph=True)
        for v in range(50)
    ]
    expected = sum(p * a.flatten()[5] * b.flatten()[17] for p, (a, b) in zip(law.probs, pairs, strict=True))
    assert_equal(factor[:, 1] @ factor[:, 5], expected, rtol=1e-10)


def test_word_features_are_orthonormal_and_carry_every_score(exact_llama):
    model = tiny_llama()
    law = NextToken(model, PROMPT)
    features = law.word_features()
    assert_equal(law.probs @ features, torch.zeros(features.shape[1]), atol=1e-10)
    assert_equal(features.T @ (law.probs[:, None] * features), torch.eye(features.shape[1]), rtol=1e-8)
    where = {"model.layers.0.mlp.up_proj.weight": torch.tensor([3, 70])}
    log_probs = model(PROMPT[None]).logits[0, -1].log_softmax(0)
    weight = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    scores = [torch.autograd.grad(lp, weight, retain_graph=True)[0].flatten()[[3, 70]] for lp in log_probs]
    assert_equal(features @ law.fisher_factor_at(where), torch.stack(scores), rtol=1e-9)


def test_cross_term_needs_a_tied_matrix(exact_llama):
    with pytest.raises(ValueError, match="not tied"):
        NextToken(tiny_llama(tied=False), PROMPT).cross_term(5)


def test_model_is_left_as_it_was(exact_llama):
    model = tiny_llama()
    model.model.norm.weight.requires_grad_(False)
    before = {n: (p.clone(), p.requires_grad) for n, p in model.named_parameters()}
    next_token_moments(model, PROMPT, torch.arange(50.0))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0]) and p.requires_grad == before[name][1] and p.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_small_chunks_and_groups_change_nothing(exact_llama, monkeypatch):
    import ceilings.pullback as pullback

    model = tiny_llama()
    whole = NextToken(model, PROMPT).diagonal_fisher()
    monkeypatch.setattr(pullback, "_CHUNK_BYTES", 200_000)
    monkeypatch.setattr(pullback, "_PAIR_BYTES", 20_000)
    assert len(list(pullback._groups(PullBack(model, PROMPT).uses, 20_000))) > 3
    for name, f in NextToken(model, PROMPT).diagonal_fisher().items():
        assert_equal(f, whole[name], rtol=1e-12)


def test_moments_hold_every_reward_and_survive_a_file(exact_llama, tmp_path):
    model = tiny_llama()
    rewards = torch.stack([torch.arange(50.0), torch.eye(50)[7]])
    moments = next_token_moments(model, PROMPT, rewards, ("rank", "seven"))
    assert (moments.level, moments.weighting, moments.count, moments.weight_sum) == (
        "next-token",
        "probabilities",
        50,
        1,
    )
    p = float(NextToken(model, PROMPT).probs[7])
    assert math.isclose(moments.mean_reward("seven"), p, rel_tol=1e-12)
    assert math.isclose(moments.reward_std("seven"), math.sqrt(p * (1 - p)), rel_tol=1e-12)
    for name in moments.names:
        assert_at_most(moments.gradient("rank")[name].abs(), moments.ceiling("rank")[name], slack=1e-9)
    moments.save(tmp_path / "m.safetensors")
    again = type(moments).load(tmp_path / "m.safetensors")
    assert all(torch.equal(again.squares[n], moments.squares[n]) for n in moments.names)


@pytest.mark.parametrize("given", [1, 3])
def test_matched_words_are_other_words_as_likely_as_those_given(given):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(300, generator=generator).square()
    probs /= probs.sum()
    words = probs.topk(given).indices
    sets = torch.stack([matched_words(probs, words.tolist(), generator) for _ in range(20)])
    assert not bool(sets[:, words].any()) and set(sets.unique().tolist()) == {0.0, 1.0}
    assert_at_most(((sets @ probs) / probs[words].sum() - 1).abs(), torch.tensor(0.02).expand(20))
    assert len(sets.unique(dim=0)) > 15
    with pytest.raises(ValueError, match="no set of other words"):
        matched_words(torch.tensor([0.9, 0.05, 0.05]), [0], generator)


def test_each_mistake_has_its_sentence(exact_llama):
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"one prompt of token ids \(T,\)"):
        NextToken(model, PROMPT[None])
    with pytest.raises(ValueError, match="no linear output head"):
        NextToken(nn.Linear(3, 3), PROMPT)
    law = NextToken(model, PROMPT)
    with pytest.raises(ValueError, match="one number a word, 50"):
        law.gradient(torch.zeros(49))
    with pytest.raises(ValueError, match="NaN or infinite"):
        law.gradient(torch.full((50,), torch.nan))
    with pytest.raises(ValueError, match="is no parameter of this model"):
        law.gradient_at(torch.zeros(1, 50), {"nope": torch.tensor([0])})
    with pytest.raises(ValueError, match="head's matrix"):
        law.fisher_factor_at({"model.embed_tokens.weight": torch.tensor([0])})
    with pytest.raises(ValueError, match="1 reward names for 2 rewards"):
        next_token_moments(model, PROMPT, torch.zeros(2, 50), ("one",))


def test_logits_that_are_not_the_head_s_map_are_refused(exact_llama):
    model = tiny_llama()
    plain = model.forward
    model.forward = lambda *a, **k: _softcapped(plain(*a, **k))
    with pytest.raises(ValueError, match="not the linear head's map"):
        NextToken(model, PROMPT)


def _softcapped(output):
    output.logits = output.logits.tanh()
    return output


@pytest.fixture(scope="module")
def real():
    require_built_in()
    model, tokenizer = load_pretrained()
    prompt = torch.tensor(tokenizer("She drank a cup of").input_ids)
    return model, prompt, NextToken(model, prompt)


# One entry in each kind of place: a word of the prompt (" cup"), the answer's row, norms, attention, MLP.
PLACES = (
    ("model.embed_tokens.weight", (7118, 100)),
    ("model.embed_tokens.weight", (7188, 31)),
    ("model.layers.0.input_layernorm.weight", (14,)),
    ("model.layers.3.self_attn.k_proj.weight", (70, 300)),
    ("model.layers.11.self_attn.v_proj.weight", (9, 200)),
    ("model.layers.17.mlp.gate_proj.weight", (700, 41)),
    ("model.layers.29.mlp.down_proj.weight", (90, 1200)),
)


def test_real_model_agrees_with_differences_of_its_own_logits_over_all_words(real):
    model, prompt, law = real
    fisher = law.diagonal_fisher()
    rewards = torch.zeros(len(law.probs))
    rewards[7188] = 1.0
    gradient = law.gradient(rewards)
    for name, place in PLACES:
        slope = logit_derivative(model, prompt, name, place)
        score = slope - law.probs @ slope
        assert math.isclose(fisher[name][place].item(), float(law.probs @ score.square()), rel_tol=2e-3), name
        ceiling = math.sqrt(float(law.probs @ score.square() * law.probs[7188] * (1 - law.probs[7188])))
        # NOTE relative to the ceiling: a gradient near zero has no relative accuracy.
        assert abs(float(gradient[name][place] - law.probs[7188] * score[7188])) < 2e-3 * ceiling, name


def test_real_model_gradient_is_that_of_plain_differentiation(real):
    model, prompt, law = real
    rewards = torch.zeros(len(law.probs), dtype=torch.float32)
    rewards[7188] = 1.0
    expected = model(prompt[None]).logits[0, -1].softmax(0) @ rewards
    names, parameters = zip(*model.named_parameters(), strict=True)
    plain = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))
    for name, g in law.gradient(rewards).items():
        assert_equal(g, plain[name], rtol=1e-3)
