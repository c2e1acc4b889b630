"""Adapters as PEFT itself makes, saves and merges them: what is read off the disk is what its merge would store."""

import dataclasses
import json
import warnings

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ceilings.adapter_delta import open_adapter
from ceilings.checkpoint_diff import compare
from ceilings.checkpoints import open_checkpoint
from ceilings.diff_report import describe_tuned
from ceilings.matching import match
from toys import save_toy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def save_base(folder, architecture, **changes):
    """A small model on disk."""
    if architecture == "gpt2":
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, **changes)
        GPT2LMHeadModel(config).save_pretrained(folder)
        return folder
    return save_toy(
        folder, tokenizer=False, **({"tie_word_embeddings": False, "attention_bias": True} | changes)
    )


def train(folder, base, seed=3, **settings):
    """Save an adapter of random weights; the model that PEFT merges of it, by name."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        merged = model.merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in merged.state_dict().items()}, merged


def numbers_of(base, tuned):
    """The report's numbers."""
    matching = match(base, tuned)
    return describe_tuned(compare(base, tuned, matching), matching, base, tuned)


LINEAR = ["q_proj", "up_proj", "down_proj"]
CASES = {
    "plain": ("llama", {"target_modules": LINEAR, "r": 3, "lora_alpha": 5}),
    "every linear layer": ("llama", {"target_modules": "all-linear"}),
    "rank-stabilised": ("llama", {"target_modules": LINEAR, "r": 4, "lora_alpha": 7, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": LINEAR,
            "rank_pattern": {"up_proj": 2, r"^model\.layers\.0\..*down_proj": 5},
            "alpha_pattern": {"layers.1.mlp.up_proj": 11, r"model\.layers\.\d\.self_attn.q_proj": 3},
        },
    ),
    "patterns, rank-stabilised": (
        "llama",
        {
            "target_modules": LINEAR,
            "use_rslora": True,
            "rank_pattern": {"q_proj": 1},
            "alpha_pattern": {"proj": 2},
        },
    ),
    "an embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"], "r": 2, "lora_alpha": 3}),
    "an output head": ("llama", {"target_modules": ["lm_head"], "r": 2}),
    "whole modules": ("llama", {"target_modules": LINEAR, "modules_to_save": ["lm_head", "norm"]}),
    "all biases": ("llama", {"target_modules": LINEAR, "bias": "all"}),
    "biases of its own": ("llama", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "some layers": ("llama", {"target_modules": LINEAR, "layers_to_transform": [1]}),
    "a start along small directions": (
        "llama",
        {"target_modules": ["q_proj"], "r": 2, "init_lora_weights": "mica"},
    ),
    "inputs as rows": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "r": 3, "fan_in_fan_out": True}),
    "inputs as rows, found out by PEFT": ("gpt2", {"target_modules": ["c_fc"], "r": 3, "lora_alpha": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_what_peft_merges(case, tmp_path):
    architecture, settings = CASES[case]
    base = open_checkpoint(save_base(tmp_path / "base", architecture))
    merged, model = train(tmp_path / "adapter", tmp_path / "base", **settings)
    found = open_adapter(tmp_path / "adapter", base)
    changed = 0
    for name in found.names:
        full = name if name in merged else f"transformer.{name}"
        before, after, wanted = base.tensor(name), found.tensor(name), merged[full]
        assert after.dtype == wanted.dtype and after.shape == wanted.shape
        torch.testing.assert_close(
            after, wanted, rtol=1e-5, atol=1e-6, msg=lambda said, n=name: f"{n}: {said}"
        )
        changed += not torch.equal(before, wanted)
        assert torch.equal(before, after) == torch.equal(before, wanted), name
    assert changed > 0 and "not known here" not in " ".join(found.notes)
    model.save_pretrained(tmp_path / "merged")
    ours, theirs = (numbers_of(base, side)["total"] for side in (found, open_checkpoint(tmp_path / "merged")))
    for key in ("change_norm", "relative_size", "participation_ratio"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
    assert ours["spectrum"]["stable_rank"] == pytest.approx(theirs["spectrum"]["stable_rank"], rel=1e-4)


def test_on_a_bfloat16_base_the_comparison_sees_what_a_merge_stores(tmp_path):
    base = open_checkpoint(save_base(tmp_path / "base", "llama", dtype=torch.bfloat16))
    merged, _ = train(tmp_path / "adapter", tmp_path / "base", target_modules=LINEAR, r=2)
    found = open_adapter(tmp_path / "adapter", base)
    same = total = 0
    for name in found.names:
        assert merged[name].dtype == torch.bfloat16
        same += int((found.tensor(name).bfloat16() == merged[name]).sum())
        total += merged[name].numel()
    # PEFT adds in float32, we in float64: only a sum next to the middle of two bfloat16 numbers can go either way.
    assert same > 0.999 * total


def test_a_change_of_a_tied_matrix_is_the_merge_and_is_said(tmp_path):
    base = open_checkpoint(save_base(tmp_path / "base", "llama", tie_word_embeddings=True))
    merged, _ = train(tmp_path / "adapter", tmp_path / "base", target_modules=["lm_head"], r=2)
    found = open_adapter(tmp_path / "adapter", base)
    torch.testing.assert_close(found.tensor("model.embed_tokens.weight"), merged["lm_head.weight"])
    assert torch.equal(merged["model.embed_tokens.weight"], merged["lm_head.weight"]), (
        "a merge changes both uses"
    )
    assert "changes lm_head.weight, which BASE ties to model.embed_tokens.weight" in " ".join(found.notes)
    _, _ = train(tmp_path / "two", tmp_path / "base", target_modules=["lm_head", "embed_tokens"], r=2)
    with pytest.raises(
        ValueError, match=r"both change 'model.embed_tokens.weight', which the base .* ties: merge"
    ):
        open_adapter(tmp_path / "two", base)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"init_lora_weights": "pissa"}, "changes the base as well"),
        ({"init_lora_weights": "olora"}, "changes the base as well"),
        ({"lora_bias": True}, "LoRA with biases"),
        ({"trainable_token_indices": [1, 2]}, "trained tokens"),
        ({"alora_invocation_tokens": [3]}, "activated LoRA"),
    ],
)
def test_what_is_no_product_of_two_matrices_is_refused(settings, said, tmp_path):
    base = open_checkpoint(save_base(tmp_path / "base", "llama"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **settings)
    ).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=rf"adapter_config.json: .*{said}.*merge it into the base"):
        open_adapter(tmp_path / "adapter", base)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LoraConfig)])
def test_every_setting_of_this_peft_is_known_or_refused(field, tmp_path):
    base = open_checkpoint(save_base(tmp_path / "base", "llama"))
    train(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"], r=2)
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    assert settings["peft_version"] == peft.__version__
    if settings.get(field):  # set in every adapter
        assert "not known here" not in " ".join(open_adapter(path.parent, base).notes)
        return
    path.write_text(json.dumps(settings | {field: {"q_proj": 3} if "pattern" in field else True}))
    try:
        notes = open_adapter(path.parent, base).notes
    except ValueError as error:
        assert "merge it into the base with PEFT" in str(error) or field in ("fan_in_fan_out", "peft_type")
    else:
        assert "not known here" not in " ".join(notes)


def test_a_setting_of_another_peft_is_noted(tmp_path):
    base = open_checkpoint(save_base(tmp_path / "base", "llama"))
    train(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"], r=2)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_something_new": True}))
    assert "settings that are not known here (use_something_new)" in " ".join(
        open_adapter(path.parent, base).notes
    )
