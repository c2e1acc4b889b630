"""Sampling: the law that is drawn from is the law that is scored, whatever the batch."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ceilings.sampling import sample_responses
from ceilings.transformer import TinyTransformer, TransformerConfig, enumerate_responses

V = 5
END = 1
PROMPTS = [(2,), (3, 4, 2, 3), (0, 0)]


def generators(seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def build(kind):
    torch.manual_seed(0)
    if kind == "tiny":
        return TinyTransformer(TransformerConfig(V, 8, 1, 2, 8), 0)
    if kind == "gpt2":  # learned positions: padding on the left would move them
        shape = {"vocab_size": V, "n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(
            GPT2Config(**shape, initializer_range=0.5, bos_token_id=0, eos_token_id=1)
        ).double()
    shape = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.5,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**shape, **heads)).double()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "tiny"])
def test_logged_law_is_the_model_s_own_at_temperature_1(kind):
    model = build(kind).eval()  # for the check below: GPT-2 has dropout
    drawn = sample_responses(
        model, PROMPTS, 4, generators(range(3)), max_new_tokens=6, end_ids=(END,), keep_laws=True
    )
    assert len(drawn.response_ids) == 12 and len({len(r) for r in drawn.response_ids}) > 1
    for n, response in enumerate(drawn.response_ids):
        prompt = PROMPTS[n // 4]
        assert END not in response[:-1] and (response[-1] == END or len(response) == 6)
        with torch.no_grad():
            output = model(torch.tensor([prompt + response]))
        law = getattr(output, "logits", output)[0].log_softmax(-1)[len(prompt) - 1 : -1]
        # float32 for what is logged; Hugging Face computes norms in float32 besides
        assert torch.allclose(drawn.laws[n].double(), law, atol=2e-5)
        assert torch.allclose(drawn.log_probs[n].double(), law[range(len(response)), response], atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "tiny"])
def test_what_is_drawn_for_a_prompt_does_not_depend_on_its_company(kind):
    model = build(kind)
    settings = {"max_new_tokens": 6, "end_ids": (END,)}
    together = sample_responses(model, PROMPTS, 3, generators([5, 6, 7]), **settings).response_ids
    alone = [
        sample_responses(model, [p], 3, generators([s]), **settings).response_ids
        for p, s in zip(PROMPTS, [5, 6, 7], strict=True)
    ]
    assert together == tuple(r for part in alone for r in part)


def test_prompts_of_one_length_go_through_any_model_together():
    model = build("tiny")
    calls = []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    sample_responses(model, [(2,), (3,)], 5, generators([5, 6]), max_new_tokens=1)
    assert calls == [2]  # one pass for both prompts; a padded batch would need positions
    calls.clear()
    sample_responses(model, [(2,), (3, 4)], 5, generators([5, 6]), max_new_tokens=1)
    assert calls == [1, 1]


def test_frequencies_are_those_of_the_enumerated_law():
    model = build("tiny")
    n = 4000
    drawn = sample_responses(model, [(2,)], n, generators([0]), max_new_tokens=2, end_ids=(END,))
    law = enumerate_responses(model, (2,), 2, END)
    counts = {}
    for response in drawn.response_ids:
        counts[response] = counts.get(response, 0) + 1
    assert set(counts) <= set(law.responses)
    # Pearson's statistic over the 21 responses: 99.99 % of samples stay below 52 (20 degrees of freedom).
    expected = n * law.probs
    found = torch.tensor([counts.get(r, 0) for r in law.responses]).double()
    assert len(law.responses) == 21 and float(((found - expected) ** 2 / expected).sum()) < 52


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_no_token_is_run_twice(kind):
    model, seen = build(kind), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    sample_responses(model, [(2, 3), (4, 2)], 3, generators([0, 1]), max_new_tokens=4)
    assert seen == [(2, 2), (6, 1), (6, 1), (6, 1)]  # the prompts once, then one token a row


def test_mode_of_the_model_is_left_alone():
    model = build("llama").train()
    sample_responses(model, [(2,)], 1, generators([0]), max_new_tokens=1)
    assert model.training


def test_nothing_to_sample_is_refused():
    model = build("tiny")
    with pytest.raises(ValueError, match="1 prompts, 0 samples, 3 new tokens: each must be at least 1"):
        sample_responses(model, [(2,)], 0, generators([0]), max_new_tokens=3)
    with pytest.raises(ValueError, match="2 generators for 1 prompts"):
        sample_responses(model, [(2,)], 1, generators([0, 1]), max_new_tokens=3)
