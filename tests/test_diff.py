"""The command: what it says, what it writes, what it refuses, and how it behaves on a terminal and in a pipe."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

from ceilings import cli
from ceilings.checkpoints import open_checkpoint
from ceilings.console import Terminal
from ceilings.report import schema
from toys import save_toy

STEP = 3e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base in bfloat16 with tied embeddings, and two fine-tunes of it."""
    root = tmp_path_factory.mktemp("pair")
    save_toy(root / "base", tokenizer=False, dtype=torch.bfloat16)
    for seed in (1, 2):
        copy_with(root / "base", root / f"tuned{seed}", lambda name, t, seed=seed: step(t, seed))
    return root


@pytest.fixture
def here(folders, tmp_path, monkeypatch):
    """An empty working folder beside which the checkpoints are."""
    for source in folders.iterdir():
        (tmp_path / source.name).symlink_to(source)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def step(tensor, seed):
    g = torch.Generator().manual_seed(seed)
    return (tensor.float() + STEP * torch.randn(tensor.shape, generator=g)).to(tensor.dtype)


def copy_with(source, target, change):
    """A folder like another, with other weights; `change` returns None to drop a tensor."""
    target.mkdir()
    weights = load_file(source / "model.safetensors")
    changed = {name: change(name, tensor) for name, tensor in weights.items()}
    save_file(
        {n: t for n, t in changed.items() if t is not None}, target / "model.safetensors", {"format": "pt"}
    )
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


def diff(*arguments):
    return cli.main(["diff", *map(str, arguments)])


def refusal(capsys, *arguments):
    """The one sentence of a refused command."""
    assert diff(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("ceilings: ") and said.err.count("\n") == 1
    return said.err


def numbers(*arguments):
    assert diff(*arguments, "--json", "d.json") == 0
    with open("d.json", encoding="utf-8") as file:
        found = json.load(file)
    jsonschema.validate(found, schema("diff"))  # every report of these tests follows the schema
    return found


def test_table_verdict_and_numbers(here, capsys):
    found = numbers("base", "tuned1")
    said = capsys.readouterr().out
    (tuned,) = found["tuned"]
    total = tuned["total"]
    assert "BASE  base: safetensors, 1 file; numbers: BF16 4,240 in 20; lm_head.weight is" in said
    assert "20 tensors matched, 100\u00a0% of the base's parameters" in said and "compared in BF16" in said
    row = next(line for line in said.splitlines() if line.startswith("all "))
    assert "4,240" in row and f"{100 * total['changed_share']['equality']:.3g}\u00a0%" in row
    verdict = [line.split()[0] for line in said.splitlines() if re.match(r"(Small|Sparse|Low-rank)\b", line)]
    assert verdict == ["Small:", "Sparse", "Low-rank:"]
    assert len(tuned["verdict"]) == 3
    small, sparse, rank = tuned["verdict"]
    assert "‖τ‖/‖θ‖, both rounded to BF16 with tied matrices counted once" in small
    assert (
        "could not have shown a step of the median size" in sparse and "number format and tolerance" in sparse
    )
    assert "cannot be told of matrices so small" in rank and "rounding to BF16" in rank
    assert "one piece of evidence, not two" in tuned["caveats"][0]
    assert total["changed"]["equality"] == total["changed"]["relative"]
    base, child = (load_file(here / name / "model.safetensors") for name in ("base", "tuned1"))
    assert total["changed"]["equality"] == sum(int((base[n] != child[n]).sum()) for n in base)
    assert found["base"]["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found["kind"] == "ceilings.diff" and found["overlaps"] == []


def test_the_page_opens_offline_and_shows_its_pictures(here, capsys):
    assert diff("base", "tuned1", "--html", "d.html") == 0
    page = (here / "d.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    for label in (
        "Changed share by layer and matrix",
        "Share of the squared change",
        "Share of the weights that",
    ):
        assert f'aria-label="{label}' in page
    assert not re.search(r"<script|https?://|src=|href=|@import|url\(", page)
    for head in ("Small? Sparse? Low-rank?", "Every tensor", "Every layer", "How it was made"):
        assert head in page
    assert (
        "model.layers.1.mlp.up_proj.weight" in page and "lm_head.weight is model.embed_tokens.weight" in page
    )


# Objects of the report that are tables by name, whose entries are free.
TABLES = """formats tied compared_in integers cuts energy_curve versions energy_share top_energy top_error
random_top_energy""".split()


def fixed_objects(node, key=""):
    """Every object of a report whose fields are fixed."""
    if isinstance(node, dict):
        if key not in TABLES:
            yield node
        for name, value in node.items():
            yield from fixed_objects(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from fixed_objects(value)


def test_a_number_too_many_or_too_few_is_against_the_schema(here):
    found = numbers("base", "tuned1", "tuned2")
    validator = jsonschema.Draft202012Validator(schema("diff"))
    tuned = found["tuned"][0]
    # One tensor with singular values, one without: the rest is alike.
    chosen = {type(entry["spectrum"]): entry for entry in tuned["tensors"]}
    assert set(chosen) == {dict, type(None)}
    tuned |= {"tensors": list(chosen.values()), "by_magnitude": tuned["by_magnitude"][-1:]}
    tuned |= {"kinds": tuned["kinds"][:1], "layers": tuned["layers"][:1], "compared_in": {"BF16": 4240}}
    del found["tuned"][1:]
    validator.validate(found)
    seen = set()
    for holder in fixed_objects(found):
        if frozenset(holder) in seen:
            continue
        seen.add(frozenset(holder))
        holder["more"] = 1
        assert not validator.is_valid(found), holder
        del holder["more"]
        for key in list(holder):
            value = holder.pop(key)
            assert key in ("exact", "matrices") or not validator.is_valid(found), key
            holder[key] = value
    assert len(seen) > 12
    validator.validate(found)


def test_nothing_changed(here, capsys):
    found = numbers("base", "base", "--html", "d.html")
    tuned = found["tuned"][0]
    assert tuned["total"]["changed"] == {"equality": 0, "absolute": 0, "relative": 0}
    assert "every one of the 4,240 compared numbers is equal in BF16" in tuned["verdict"][0]
    assert "No weight changed by a finite size." in (here / "d.html").read_text(encoding="utf-8")


def test_several_fine_tunes_have_their_overlaps_beside_chance(here, capsys):
    found = numbers("base", "tuned1", "tuned2", "tuned1", "--html", "d.html")
    said = capsys.readouterr().out
    pairs = {tuple(o["of"]): o for o in found["overlaps"]}
    assert len(found["overlaps"]) == 3
    overlap = pairs["tuned1", "tuned2"]
    base, one, two = (load_file(here / name / "model.safetensors") for name in ("base", "tuned1", "tuned2"))
    both = sum(int(((base[n] != one[n]) & (base[n] != two[n])).sum()) for n in base)
    assert overlap["changed"]["both"] == both
    # Both move what a step of this size can move, so the sets agree far beyond chance: it is the magnitudes.
    assert overlap["changed"]["shares"][0] > 2 * overlap["changed"]["chance_per_tensor"][0]
    low, high = overlap["top_percent"]["share"]
    assert low < high
    assert "open by ties" in said and "tuned1 and tuned2" in said
    page = (here / "d.html").read_text(encoding="utf-8")
    assert "<h2>Overlaps</h2>" in page and page.count("<svg") == 9


def test_stored_formats_are_printed_and_the_comparison_is_in_the_coarser_one(here, capsys):
    copy_with(here / "base", here / "up", lambda _, t: t.float())
    found = numbers("base", "up")
    said = capsys.readouterr().out
    assert "TUNED up: safetensors, 1 file; numbers: F32 4,240 in 20" in said and "compared in BF16" in said
    assert found["tuned"][0]["total"]["changed"]["equality"] == 0
    assert any("BASE is stored as BF16 and TUNED as F32" in c for c in found["tuned"][0]["caveats"])
    copy_with(here / "up", here / "moved", lambda _, t: t * (1 + 2**-12))
    assert numbers("base", "moved")["tuned"][0]["total"]["changed"]["equality"] == 0
    asked = numbers("base", "moved", "--dtype", "float32")["tuned"][0]
    assert asked["total"]["changed_share"]["equality"] > 0.99
    assert asked["total"]["changed"]["relative"] == 0, "a step of 2⁻¹² is below a thousandth"
    assert "coincide by construction" not in asked["caveats"][0]


def write_gguf(path, weights, heads=2):
    """A quantised GGUF file of a Llama, as its converter writes it: some rows permuted, matrices in blocks of 32."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(weights["model.embed_tokens.weight"]))
    writer.add_context_length(48)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in weights.items():
        values = tensor.float()
        if "q_proj" in name or "k_proj" in name:
            values = values.view(heads, 2, -1, 32).transpose(1, 2).reshape(32, 32)
        kind = gguf.GGMLQuantizationType.Q4_1 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quantize(values.contiguous().numpy(), kind)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_quantised_base_is_called_what_it_is_and_zero_training_changes_nothing(here, capsys):
    save_toy(
        here / "wide",
        tokenizer=False,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_key_value_heads=2,
    )
    write_gguf(here / "base.gguf", load_file(here / "wide" / "model.safetensors"))
    start = open_checkpoint(here / "base.gguf")
    exact = {name: start.tensor(name) for name in start.names}
    original = load_file(here / "wide" / "model.safetensors")
    for name, tensor in exact.items():  # four bits are close to what was quantised, in the right rows
        assert float((tensor - original[name]).norm() / original[name].norm()) < 0.1
    for name, dtype in (("same", torch.float32), ("child", torch.bfloat16)):
        (here / name).mkdir()
        save_file({n: t.to(dtype) for n, t in exact.items()}, here / name / "model.safetensors")
    same = numbers("base.gguf", "same")
    assert same["base"]["quantised"] == "GGUF Q4_1" and set(same["base"]["formats"]) == {"Q4_1", "F32"}
    assert same["tuned"][0]["total"]["changed"]["equality"] == 0
    child = numbers("base.gguf", "child")["tuned"][0]
    assert child["total"]["changed"]["equality"] == 0 and set(child["compared_in"]) == {"BF16"}
    assert any("BASE is quantised (GGUF Q4_1)" in c for c in child["caveats"])
    trap = numbers("base.gguf", "child", "--dtype", "float32")["tuned"][0]
    assert trap["total"]["changed_share"]["equality"] > 0.7
    assert "quantised: GGUF Q4_1" in capsys.readouterr().out


def test_packed_weights_are_refused(here, capsys):
    config = json.loads((here / "base" / "config.json").read_text())
    copy_with(here / "base", here / "packed", lambda _, t: t)
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (here / "packed" / "config.json").write_text(json.dumps(config))
    for sides, word in ((("packed", "base"), "BASE"), (("base", "packed"), "TUNED")):
        said = refusal(capsys, *sides)
        assert f"{word} packed is quantised (bitsandbytes 4-bit)" in said and "de-quantise it" in said


def test_an_adapter_is_compared_without_being_merged(here, capsys):
    (here / "adapter").mkdir()
    g = torch.Generator().manual_seed(0)
    stem = "base_model.model.model.layers.0.mlp.up_proj"
    parts = {
        f"{stem}.lora_A.weight": torch.randn(2, 16, generator=g),
        f"{stem}.lora_B.weight": torch.randn(24, 2, generator=g),
    }
    save_file(parts, here / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "lora_alpha": 4, "base_model_name_or_path": "base"}
    (here / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    before = sorted(p.name for p in (here / "adapter").iterdir())
    found = numbers("base", "adapter")["tuned"][0]
    assert sorted(p.name for p in (here / "adapter").iterdir()) == before
    assert found["kind"] == "adapter"
    assert {t["name"] for t in found["tensors"] if t["changed"]["equality"]} == {
        "model.layers.0.mlp.up_proj.weight"
    }
    assert "an adapter of 1 matrices of rank 2, merged in memory" in capsys.readouterr().out
    settings["peft_type"] = "LOHA"
    (here / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    assert "adapters of the kind 'LOHA' are not supported" in refusal(capsys, "base", "adapter")


def test_coverage_is_reported_and_too_little_of_it_refused(here, capsys):
    copy_with(here / "base", here / "half", lambda name, t: None if "layers.1" in name else t)
    said = refusal(capsys, "base", "half")
    assert "half: only 53.96 % of the base's parameters" in said and "'model.layers.1." in said
    assert "--min-coverage" in said
    found = numbers("base", "half", "--min-coverage", "0.5", "--html", "d.html")["tuned"][0]
    assert found["matching"]["coverage"] == 1 - 1952 / 4240
    assert len(found["matching"]["removed"]) == 9
    assert any("Only 53.96" in c for c in found["caveats"])
    assert "only in BASE" in (here / "d.html").read_text(encoding="utf-8")


def test_a_grown_vocabulary_is_listed(here, capsys):
    more = torch.zeros(3, 16, dtype=torch.bfloat16)
    copy_with(here / "base", here / "grown", lambda name, t: torch.cat([t, more]) if "embed" in name else t)
    found = numbers("base", "grown", "--html", "d.html")["tuned"][0]
    assert found["matching"]["rows"][0]["added"] == 3 and found["total"]["changed"]["equality"] == 0
    assert "model.embed_tokens.weight: 20 rows compared, 3 added" in capsys.readouterr().out
    assert "20 rows compared, 3 added" in (here / "d.html").read_text(encoding="utf-8")


def test_numbers_that_are_none_are_counted_and_named(here, capsys):
    def spoil(name, tensor):
        if "embed" in name:
            tensor = tensor.clone()
            tensor[0, 0], tensor[0, 1] = float("nan"), float("inf")
        return tensor

    copy_with(here / "base", here / "spoilt", spoil)
    tuned = numbers("base", "spoilt", "--html", "d.html")["tuned"][0]
    assert tuned["total"]["non_finite"] == tuned["total"]["changed"]["equality"] == 2
    assert tuned["total"]["change_norm"] == 0 and "the changes have no size" in tuned["verdict"][1]
    assert any("2 numbers changed to, from or between infinity and NaN" in c for c in tuned["caveats"])
    again = numbers("spoilt", "spoilt")["tuned"][0]["total"]
    assert again["changed"]["equality"] == 0

    def negative_zeros(name, tensor):
        return torch.where(tensor == 0, -0.0, tensor) if "norm" in name else tensor

    copy_with(here / "base", here / "plus", lambda name, t: torch.zeros_like(t) if "norm" in name else t)
    copy_with(here / "plus", here / "minus", negative_zeros)
    tuned = numbers("plus", "minus")["tuned"][0]
    assert tuned["total"]["bits_only"] == 80 and tuned["total"]["changed"]["equality"] == 0
    assert any("80 numbers differ in their bits and count as unchanged" in c for c in tuned["caveats"])


def test_no_rank_leaves_singular_values_out(here, capsys):
    tuned = numbers("base", "tuned1", "--no-rank", "--threads", "1")["tuned"][0]
    assert tuned["total"]["spectrum"] is None and "not measured" in tuned["verdict"][2]


def test_wrong_input_is_one_sentence(here, capsys):
    assert "there is no checkpoint 'nowhere'" in refusal(capsys, "base", "nowhere")
    assert "there is no folder 'no'" in refusal(capsys, "base", "tuned1", "--json", "no/d.json")
    content = (here / "base" / "model.safetensors").read_bytes()
    (here / "cut.safetensors").write_bytes(content[:-9])
    assert "cut.safetensors is truncated" in refusal(capsys, "base", "cut.safetensors")
    (here / "text.safetensors").write_text("this is no checkpoint at all")
    assert "text.safetensors is no safetensors file" in refusal(capsys, "text.safetensors", "base")
    save_file({"w": torch.empty(0)}, here / "hole.safetensors")
    assert "'w' has the shape [0]" in refusal(capsys, "base", "hole.safetensors")
    assert diff("base", "tuned1", "--min-coverage", "2") == 2
    assert "'2' is no share between 0 and 1" in capsys.readouterr().err
    assert diff("base") == 2
    assert "TUNED" in capsys.readouterr().err


def test_a_failed_write_leaves_no_half_file(here, capsys, monkeypatch):
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    assert diff("base", "tuned1", "--html", "d.html") == 2
    assert "disk full" in capsys.readouterr().err
    assert not list(here.glob("*.part")) and not list(here.glob(".*.part")) and not (here / "d.html").exists()


def test_too_little_memory_is_said(here, capsys, monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr("ceilings.diff_command.compare", no_memory)
    assert diff("base", "tuned1") == 4
    assert "memory ran out; --threads 1" in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal(here, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(
        Terminal, "progress", lambda self, what, done, total: shown.append((what, done, total))
    )
    assert diff("base", "tuned1", "tuned2") == 0
    for tuned in ("tuned1", "tuned2"):
        assert [s[1:] for s in shown if s[0] == f"comparing {tuned}:"] == [(k, 20) for k in range(1, 21)]
    assert shown[-1] == ("overlaps:", 20, 20)


def test_in_a_pipe_there_is_a_table_and_nothing_on_stderr(here):
    command = [sys.executable, "-m", "ceilings", "diff", "base", "tuned1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" and "\r" not in done.stdout and "\x1b" not in done.stdout
    assert "Sparse in BF16" in done.stdout


def test_the_benchmark_holds_both_sides_to_the_same_digits(here):
    """On a small pair: it refuses to print a ratio of two programs that say different things."""
    script = Path(__file__).parent.parent / "benchmarks" / "checkpoint_diff.py"
    command = [sys.executable, str(script), "--pair", "base", "tuned1", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    base, child = (load_file(here / name / "model.safetensors") for name in ("base", "tuned1"))
    zeros = sum(int((base[n] == child[n]).sum()) for n in base) / 4240
    assert f"{100 * zeros:.2f} % zeros" in done.stdout and "tied at the cut" in done.stdout
