"""Token and next-token levels of the score engine, against loops over tokens and over the vocabulary."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ceilings.moments import ScoreMoments
from ceilings.next_token_cost import next_token_cost
from ceilings.reference import loop_score_moments, per_sequence_scores
from ceilings.scores import ScoreAccumulator, flatten, score_moments
from ceilings.testing import assert_differs, assert_equal, assert_within_standard_errors
from ceilings.transformer import TinyTransformer, TransformerConfig, enumerate_responses
from test_architectures import VOCAB, Wide, batch, family

F64 = torch.float64


def tiny(**changes):
    shape = {"vocab_size": VOCAB, "width": 8, "depth": 2, "heads": 2, "mlp_width": 12}
    return TinyTransformer(TransformerConfig(**(shape | changes)))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def uniform(*shape, seed=1):
    w = torch.rand(shape, generator=generator(seed), dtype=F64)
    return w / w.sum()


def token_scores(model, ids, mask, attention=None):
    """Score of every scored token by its own backward pass, and which sequence it belongs to."""
    where = mask.nonzero()
    alone = torch.zeros(len(where), ids.shape[1], dtype=torch.bool)
    alone[torch.arange(len(where)), where[:, 1]] = True
    n = where[:, 0]
    real = None if attention is None else attention[n]
    return per_sequence_scores(model, ids[n], alone, real), n


def same(actual, expected, part, rtol=1e-10):
    for name, value in expected.items():
        found = getattr(actual, part)[name]
        try:
            assert_equal(found, value, rtol=rtol)
        except AssertionError as e:
            raise AssertionError(f"{part} of {name}: {e}") from e


# Token level


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Falcon", "Mixtral"])
def test_token_level_sums_the_squares_of_single_tokens(name, side):
    model, slow = family(name, num_hidden_layers=1)
    ids, mask, rewards, attention = batch(side)
    w = uniform(len(ids))
    with Wide():
        moments = score_moments(
            model, ids, mask, rewards, weights=w, attention_mask=attention, batch_size=4, level="token"
        )
        scores, n = token_scores(model, ids, mask, attention)
        loop = loop_score_moments(model, ids, mask, rewards, w, attention).shifted(moments.reward_shift)
    assert moments.level == "token" and moments.count == len(ids)
    assert set(moments.slow_parameters) == slow
    same(moments, {k: torch.einsum("r,r...->...", w[n], s * s) for k, s in scores.items()}, "squares")
    same(moments, loop.scores, "scores", rtol=1e-9)
    same(moments, loop.reward_scores, "reward_scores", rtol=1e-9)
    # Nothing is centred: a token's score has mean zero after every prefix.
    assert_equal(flatten(moments.diagonal_fisher()), flatten(moments.squares))


def test_the_squares_of_positions_are_not_those_of_tokens():
    """(G²)ᵀ(A²) is right after the last mixing of positions and nowhere before it."""
    model = tiny(tied=False)
    ids, mask, _, _ = batch("right")
    ids, mask = ids[2:3, :6], mask[2:3, :6]  # one prompt, several scored tokens
    exact = score_moments(model, ids, mask, torch.zeros(1), level="token").squares
    kept, handles = {}, []

    def keep(name):
        def hook(module, args, output):
            output.retain_grad()
            kept[name] = (args[0], output)

        return hook

    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for n, m in model.named_modules():
        if n in names:
            handles.append(m.register_forward_hook(keep(n)))
    log_probs = model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    log_probs[mask[0, 1:]].sum().backward()
    for handle in handles:
        handle.remove()
    shortcut = {n: (g.grad[0].square().T @ a[0].square()).detach() for n, (a, g) in kept.items()}
    after_mixing = ("lm_head", "layers.1.mlp", "layers.1.self_attn.o_proj", "layers.1.self_attn.q_proj")
    for n in names:
        if any(part in n for part in after_mixing):
            assert_equal(shortcut[n], exact[f"{n}.weight"])
        else:
            wrong = float((shortcut[n] - exact[f"{n}.weight"]).norm() / exact[f"{n}.weight"].norm())
            assert wrong > 0.1, (n, wrong)


# The sign estimate


def all_signs(monkeypatch, ids, mask):
    """Replace the draws by every pattern of signs on the scored tokens, each once; return their number."""
    columns = mask.any(0).nonzero()[:, 0]
    patterns = torch.ones(2 ** len(columns), ids.shape[1], dtype=torch.int8)
    patterns[:, columns] = torch.tensor(
        list(itertools.product((-1, 1), repeat=len(columns))), dtype=torch.int8
    )
    monkeypatch.setattr(ScoreAccumulator, "_signs", lambda _, rows: patterns.expand(len(rows), -1, -1))
    return len(patterns)


@pytest.mark.parametrize("name", ["GPT2", "Mixtral"])
def test_over_all_signs_the_estimate_is_the_exact_token_level(monkeypatch, name):
    model, _ = family(name, num_hidden_layers=1)
    ids, mask, rewards, attention = batch("left")
    with Wide():
        keywords = {"attention_mask": attention, "batch_size": 2, "level": "token"}
        exact = score_moments(model, ids, mask, rewards, **keywords)
        draws = all_signs(monkeypatch, ids, mask)
        signed = score_moments(model, ids, mask, rewards, sign_draws=draws, generator=generator(), **keywords)
    same(signed, exact.squares, "squares")
    same(signed, exact.scores, "scores", rtol=1e-9)
    same(signed, exact.reward_scores, "reward_scores", rtol=1e-9)


def test_the_sign_estimate_is_unbiased_and_its_error_falls_as_one_over_the_root_of_the_draws():
    model = tiny(depth=1)
    ids, mask, rewards, _ = batch("right")
    exact = flatten(score_moments(model, ids, mask, rewards, level="token").squares)
    errors = {}
    for draws in (4, 64):
        runs = torch.stack(
            [
                flatten(
                    score_moments(
                        model, ids, mask, rewards, level="token", sign_draws=draws, generator=generator(seed)
                    ).squares
                )
                for seed in range(12)
            ]
        )
        errors[draws] = float((runs - exact).square().sum().sqrt())
        total = runs.sum(1)
        assert_within_standard_errors(total.mean(), exact.sum(), total.std() / len(total) ** 0.5, k=4)
    assert 2.5 < errors[4] / errors[64] < 6  # 4, give or take the error of the 12 seeds


def test_signs_do_not_depend_on_how_the_sequences_are_batched():
    model = tiny(depth=1)
    ids, mask, rewards, attention = batch("left")
    keywords = {"attention_mask": attention, "level": "token", "sign_draws": 3}
    runs = [
        score_moments(model, ids, mask, rewards, batch_size=size, generator=generator(), **keywords)
        for size in (1, 2, 5)
    ]
    other = score_moments(model, ids, mask, rewards, generator=generator(1), **keywords)
    exact = score_moments(model, ids, mask, rewards, attention_mask=attention, level="token")
    for run in runs:
        same(run, runs[0].squares, "squares")
        same(run, exact.scores, "scores", rtol=1e-9)
        same(run, exact.reward_scores, "reward_scores", rtol=1e-9)
    assert_differs(flatten(other.squares), flatten(runs[0].squares), by_at_least=1e-3)


# The next-token level


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2", "Mixtral"])
def test_next_token_level_is_the_sum_over_the_vocabulary(name, side):
    model, _ = family(name, num_hidden_layers=1, vocab_size=VOCAB)
    ids, mask, rewards, attention = batch(side)
    w = uniform(len(ids))
    with Wide():
        moments = score_moments(
            model, ids, mask, rewards, weights=w, attention_mask=attention, level="next-token"
        )
        sequence = score_moments(model, ids, mask, rewards, weights=w, attention_mask=attention)
        expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for n, t in mask.nonzero().tolist():
            prefix = ids[n, :t][attention[n, :t].bool()]
            rows = torch.cat([prefix.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
            last = (torch.arange(rows.shape[1]) == len(prefix)).expand(VOCAB, -1)
            law = model(prefix[None]).logits[0, -1].detach().softmax(0)
            for key, s in per_sequence_scores(model, rows, last).items():
                expected[key] += w[n] * torch.einsum("v,v...->...", law, s * s)
    assert moments.level == "next-token"
    same(moments, expected, "squares", rtol=1e-9)
    same(moments, sequence.scores, "scores")
    same(moments, sequence.reward_scores, "reward_scores")


def test_next_token_level_leaves_frozen_parameters_out_and_counts_a_shared_prefix_once(monkeypatch):
    from ceilings import scores as module

    model, _ = family("Llama", num_hidden_layers=1)
    model.model.embed_tokens.requires_grad_(False)
    ids = torch.tensor([[1, 4, 5, 6], [1, 4, 5, 7], [1, 4, 5, 5]])
    mask = (torch.arange(4) > 1).expand(3, -1)
    prefixes = []
    real = module.NextToken
    monkeypatch.setattr(module, "NextToken", lambda m, p: prefixes.append(p.tolist()) or real(m, p))
    with Wide():
        together = score_moments(model, ids, mask, torch.arange(3), level="next-token")
        assert prefixes == [[1, 4], [1, 4, 5]]
        parts = [
            score_moments(model, ids[n : n + 1], mask[n : n + 1], torch.tensor([n]), level="next-token")
            for n in range(3)
        ]
    assert "model.embed_tokens.weight" not in together.names
    same(together, parts[0].merge(parts[1]).merge(parts[2]).squares, "squares")


def test_the_cost_of_the_next_token_level_counts_prefixes_once_and_grows_as_the_formula():
    model, _ = family("Llama")
    ids = torch.tensor([[1, 4, 5, 6], [1, 4, 5, 7], [1, 4, 6, 5]])
    mask = (torch.arange(4) > 1).expand(3, -1)
    cost = next_token_cost(model, ids, mask)
    assert (cost.positions, cost.prefixes, cost.cotangents) == (6, 3, 16)
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 12  # q and o, k and v, gate, up and down
    rows = 2 * (16 + 16 + 8 + 8 + 12 + 12 + 16)
    expected = 0
    for length in (2, 3, 3):
        expected += 2 * length * (2 * layer * 19 + VOCAB * 16)
        expected += 2 * length**2 * (16 * rows + 2 * layer) + 2 * VOCAB * 16**2
    assert cost.operations == expected
    assert 0 < cost.seconds < 1
    padded = torch.cat([torch.zeros_like(ids[:, :1]), ids], 1)
    attention = (torch.arange(5) > 0).long().expand(3, -1)
    shifted = next_token_cost(model, padded, torch.cat([mask[:, :1] & False, mask], 1), attention)
    assert shifted.operations == cost.operations
    with pytest.raises(ValueError, match="the model has no linear output head"):
        next_token_cost(tiny(), ids, mask)


# All levels together


@pytest.mark.claim("thm-tokens")
def test_all_levels_have_one_expectation(monkeypatch):
    model, _ = family("Qwen2", num_hidden_layers=1, vocab_size=4)
    with Wide():
        law = enumerate_responses(model, (1,), 3, eos=2)
        ids, mask = law.batch()
        rewards = torch.randn(len(ids), generator=generator(), dtype=F64)
        keywords = {"weights": law.probs, "batch_size": 32}
        sequence = score_moments(model, ids, mask, rewards, **keywords)
        token = score_moments(model, ids, mask, rewards, level="token", **keywords)
        exact = score_moments(model, ids, mask, rewards, level="next-token", **keywords)
        draws = all_signs(monkeypatch, ids, mask)
        signed = score_moments(
            model, ids, mask, rewards, level="token", sign_draws=draws, generator=generator(), **keywords
        )
    fisher = flatten(sequence.diagonal_fisher())
    for other in (token, exact, signed):
        assert_equal(flatten(other.diagonal_fisher()), fisher)
        assert_equal(flatten(other.gradient()), flatten(sequence.gradient()))
        assert_equal(flatten(other.ceiling()), flatten(sequence.ceiling()))


@settings(max_examples=8, deadline=None)
@given(cut=st.integers(1, 4), level=st.sampled_from(["token", "signs"]), size=st.integers(1, 6))
def test_merges_of_any_split_are_the_whole_at_token_level(cut, level, size):
    model = tiny(depth=1)
    ids, mask, rewards, attention = batch("left")

    def accumulate(*parts):
        keywords = {"sign_draws": 2, "generator": generator()} if level == "signs" else {}
        accumulator = ScoreAccumulator(model, ("a", "b"), size, level="token", **keywords)
        for part in parts:
            accumulator.add(ids[part], mask[part], rewards[part], attention_mask=attention[part])
        return accumulator

    first, second = slice(0, cut), slice(cut, 5)
    whole = accumulate(first, second).moments()
    other = accumulate(first)  # its generator stands where the second portion began
    parts = [other.moments()]
    rest = ScoreAccumulator(
        model, ("a", "b"), size, level="token", sign_draws=other._draws or None, generator=other._generator
    )
    rest.add(ids[second], mask[second], rewards[second], attention_mask=attention[second])
    merged = parts[0].merge(rest.moments())
    assert merged.level == "token"
    same(merged, whole.squares, "squares")
    same(merged, whole.scores, "scores", rtol=1e-9)


def test_levels_survive_a_file_and_do_not_mix(tmp_path):
    model = tiny(depth=1)
    ids, mask, rewards, attention = batch("right")
    token = score_moments(model, ids, mask, rewards, level="token")
    token.save(tmp_path / "m.safetensors")
    assert ScoreMoments.load(tmp_path / "m.safetensors").level == "token"
    with pytest.raises(ValueError, match="cannot merge: level differs \\('token' here, 'sequence' there\\)"):
        token.merge(score_moments(model, ids, mask, rewards))


def test_what_does_not_fit_a_level_is_refused():
    model = tiny(depth=1)
    ids, mask, rewards, _ = batch("right")
    cases = [
        ({"level": "word"}, "level is 'word'; it must be one of"),
        ({"sign_draws": 2, "generator": generator()}, "leave it out at level 'sequence'"),
        (
            {"level": "next-token", "sign_draws": 2, "generator": generator()},
            "leave it out at level 'next-token'",
        ),
        (
            {"level": "token", "sign_draws": 0, "generator": generator()},
            "sign_draws is 0; draw at least once",
        ),
        ({"level": "token", "sign_draws": 2}, "sign_draws needs a generator"),
        ({"level": "next-token"}, "the model has no linear output head"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            score_moments(model, ids, mask, rewards, **changes)
        assert "\n" not in str(caught.value)
