"""A model small enough for every test of the command, saved as a user would have it."""

import json

import torch

VOCABULARY = 20
CONTEXT = 48


def save_toy(folder, tokenizer=True, dtype=torch.float32, **changes):
    """Save a random Llama and a tokenizer of words w0 … w19; token 1 ends a response."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.4,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(shape | changes))).to(dtype).save_pretrained(folder)
    if tokenizer:
        words = {"</s>" if k == 1 else f"w{k}": k for k in range(VOCABULARY)}
        table = Tokenizer(models.WordLevel(words, unk_token="w0"))
        table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=table, unk_token="w0", eos_token="</s>").save_pretrained(
            folder
        )
    return folder


def write_jsonl(path, lines):
    """Write objects, one a line; text is written as it is."""
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n",
        encoding="utf-8",
    )
    return path


def rollout(prompt=(2, 3), response=(4, 5, 1), reward=1.0, **more):
    """One line of a file of rollouts."""
    return {"prompt_ids": list(prompt), "response_ids": list(response), "reward": reward, **more}


def some_rollouts(n=12, seed=0):
    """Rollouts of unequal lengths in four groups, with graded rewards."""
    g = torch.Generator().manual_seed(seed)
    lines = []
    for k in range(n):
        prompt = [2 + k % 4] * (1 + k % 4)
        response = torch.randint(2, VOCABULARY, (int(torch.randint(1, 6, (1,), generator=g)),), generator=g)
        lines.append(rollout(prompt, response.tolist(), float(torch.rand(1, generator=g)) + 3, group=k % 4))
    return lines
