"""The experiment over twenty prompts, on a model small enough to differentiate every word."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ceilings.experiments import _prompt_rows, prompts
from ceilings.next_token import NextToken
from ceilings.reference import per_sequence_scores
from ceilings.results import load
from ceilings.testing import assert_at_most, assert_equal

VOCABULARY = 256
SHORT = replace(
    prompts.FULL,
    seeds=(0, 3, 6, 9),
    every=3,
    joint_every=5,
    rollouts=24,
    max_new_tokens=3,
    rollout_every=5,
    splits=2,
)


class Bytes:
    """A token a byte."""

    eos_token_id = 0

    def __call__(self, text):
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, ids):
        return bytes(ids).decode("latin-1")


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval(), Bytes()


@pytest.fixture
def record(tiny, monkeypatch):
    monkeypatch.setattr(prompts, "load_pretrained", lambda: tiny)
    monkeypatch.setattr(prompts, "PROMPTS", tuple(replace(p, check=p.check and ".") for p in prompts.PROMPTS))
    return lambda config, folder=None: prompts.run(config, folder=folder)


def every_word(model, ids):
    """Probabilities, and the score of every word as one row, from one backward pass each."""
    rows = torch.cat([ids.expand(VOCABULARY, -1), torch.arange(VOCABULARY)[:, None]], 1)
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[:, -1] = True
    scores = per_sequence_scores(model, rows, mask)
    with torch.no_grad():
        return model(ids[None]).logits[0, -1].double().softmax(0), scores


def test_a_row_holds_what_every_word_gives(tiny, record):
    model, tokenizer = tiny
    found = record(replace(SHORT, seeds=(0, 6), parts=("nulls", "joint")))
    for row, seed in enumerate((0, 6)):
        text = prompts.PROMPTS[seed].text
        π, scores = every_word(model, torch.tensor(tokenizer(text).input_ids))
        layers = torch.cat([s.flatten(1).double() for n, s in scores.items() if n != _prompt_rows.TABLE], 1)
        likeliest, second = π.topk(2).indices.tolist()
        stated = prompts.PROMPTS[seed].stated.encode()[0]
        pay = torch.eye(VOCABULARY, dtype=torch.float64)
        rewards = {
            "likeliest": pay[likeliest],
            "stated": pay[stated],
            "contrast": pay[second] - pay[likeliest],
            "typical": π.log(),
        }
        fisher = π @ layers.square()
        # Single precision, and parameters of which only rounding is left.
        kept = fisher > 1e-9 * fisher.max()
        for name, reward in rewards.items():
            σ = (π @ (reward - π @ reward).square()).sqrt()
            rho = ((π * reward) @ layers)[kept] / (σ * fisher[kept].sqrt())
            here = {key: found.tensor("reward", name, key)[row] for key in ("rms", "std", "largest")}
            assert_equal(here["std"], σ, rtol=1e-5)
            assert_equal(here["rms"], rho.square().mean().sqrt(), rtol=2e-2)
            assert_at_most(here["largest"], 1.0, slack=1e-3)
        q_proj = fisher[: 16 * 16]  # the first tensor of a layer in this architecture
        mean = torch.cat([(π @ s.double().flatten(1).square()) for s in scores.values()]).mean()
        place = _prompt_rows.KINDS.index("self_attn.q_proj")
        assert_equal(
            found.tensor("policy", "ceiling")[row, place, 0], (q_proj.mean() / mean).sqrt(), rtol=1e-3
        )


def test_the_largest_rms_is_that_of_the_best_reward(tiny, record):
    model, tokenizer = tiny
    text = prompts.PROMPTS[6].text
    law = NextToken(model, torch.tensor(tokenizer(text).input_ids))
    fisher = law.diagonal_fisher()
    found = _prompt_rows.joint_row(law, fisher, every=1)
    π, scores = every_word(model, torch.tensor(tokenizer(text).input_ids))
    layers = torch.cat([s.flatten(1).double() for n, s in scores.items() if n != _prompt_rows.TABLE], 1)
    kept = (π @ layers.square()) > 1e-9 * (π @ layers.square()).max()
    unit = torch.nn.functional.normalize(π.sqrt()[:, None] * (layers - π @ layers)[:, kept], dim=0)
    assert_equal(found["forced"], torch.linalg.matrix_norm(unit, 2) / unit.shape[1] ** 0.5, rtol=2e-2)


def test_nulls_are_as_many_as_asked_and_dealing_out_keeps_the_values(tiny):
    model, tokenizer = tiny
    law = NextToken(model, torch.tensor(tokenizer("abc").input_ids))
    words = _prompt_rows.words_of(law, tokenizer, "abc", "d")
    named = _prompt_rows.rewards_of(law, words)
    assert words["stated"] == ord("d") and float(named["stated"].sum()) == 1
    assert (
        float(named["contrast"][words["second"]]) == 1 and float(named["contrast"][words["likeliest"]]) == -1
    )
    drawn = _prompt_rows._null_rewards(law, words, named, 20, torch.Generator().manual_seed(0))
    assert set(drawn) == {
        "stated: dealt out",
        "typical: dealt out",
        "random",
        "likeliest: matched",
        "stated: matched",
    }
    assert torch.equal(
        drawn["typical: dealt out"].sort(1).values, named["typical"].sort().values.expand(20, -1)
    )
    for name in ("likeliest", "stated"):
        matched = drawn[f"{name}: matched"]
        if matched is not None:
            assert matched.shape == (20, VOCABULARY) and not bool(matched[:, words[name]].any())
            assert_equal(matched @ law.probs, law.probs[words[name]].expand(20), rtol=0.02)


def test_within_tensors_nothing_leaves_its_tensor():
    where = {"a": torch.arange(5), "b": torch.arange(3)}
    values = torch.arange(8.0)
    into = torch.empty(20, 8)
    draws = _prompt_rows.within_tensors(values, where, into, torch.Generator().manual_seed(0))
    assert torch.equal(draws[:, :5].sort(1).values, values[:5].expand(20, -1))
    assert torch.equal(draws[:, 5:].sort(1).values, values[5:].expand(20, -1))
    assert not torch.equal(draws[0], draws[1])


def test_a_stopped_run_goes_on_where_it_was(tiny, record, tmp_path, monkeypatch):
    whole = record(SHORT)
    record(replace(SHORT, seeds=(0, 3), parts=("nulls", "joint", "rollouts", "shared")), tmp_path)
    measured = []
    before = prompts._measured
    monkeypatch.setattr(prompts, "_measured", lambda *a: measured.append(a[3]) or before(*a))
    again = record(SHORT, tmp_path)
    assert measured == [6, 9]
    assert str(again.values) == str(whole.values)  # NaN too
    overlap = whole.tensor("shared", "overlap")
    assert_equal(overlap.diagonal(), torch.ones(4))
    assert_equal(overlap, overlap.T)
    for part in ("answer", "token"):
        lengths = [len(x) for x in whole.values["rollouts"][part]["squares"]]
        assert lengths == [0, 21, 21, 0]


def test_a_continuation_that_changes_the_prompts_tokens_is_refused(tiny):
    class Pairs(Bytes):
        """Two bytes a token, from the end."""

        def __call__(self, text):
            raw = text.encode()
            return SimpleNamespace(
                input_ids=[raw[max(k - 2, 0) : k][0] for k in range(len(raw), 0, -2)][::-1]
            )

    law = NextToken(tiny[0], torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="state another continuation"):
        _prompt_rows.words_of(law, Pairs(), "abc", "d")


def test_twenty_prompts_of_seven_kinds_each_with_a_continuation():
    assert len(prompts.PROMPTS) == len({p.text for p in prompts.PROMPTS}) == 20
    assert len({p.kind for p in prompts.PROMPTS}) == 7
    assert all(p.stated for p in prompts.PROMPTS) and sum(bool(p.check) for p in prompts.PROMPTS) == 4


@pytest.mark.claim("prop-shared-tops", "thm-joint")
def test_the_record_agrees_with_itself():
    record = load("prompts", prompts.FULL)
    k = torch.arange(20, dtype=torch.float64)
    for companions, overlap in (("companions", "overlap"), ("chance companions", "chance by tensor")):
        share, pairs = record.tensor("shared", companions), record.tensor("shared", overlap)
        assert_equal(share.sum(1), torch.ones(20), rtol=1e-4)
        # How many other sets a member is in, on average: the overlaps with them, added up.
        assert_equal(share @ k, pairs.sum(1) - pairs.diagonal(), rtol=1e-2)
    tensor, row, column = (
        record.tensor("shared", f"chance by {part}") for part in ("tensor", "row", "column")
    )
    for finer in (row, column):
        assert_at_most(tensor.diagonal(), finer.diagonal())
    forced = record.tensor("policy", "forced")
    for name in _prompt_rows.REWARDS:
        rms = record.tensor("reward", name, "rms")
        known = ~forced.isnan()
        assert int(known.sum()) == 7 and bool((rms < forced)[known].all())
        assert_equal(record.tensor("reward", name, "sample rms"), rms, rtol=3e-2)  # a sample of one in 307
        assert_at_most(record.tensor("reward", name, "largest"), torch.ones(20), slack=1e-3)
