"""Reading checkpoints: every layout that a model is saved in, and every way in which one can be broken."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from ceilings.checkpoints import is_adapter, open_checkpoint
from ceilings.pretrained import built_in_model_path, load_pretrained
from ceilings.safetensors_file import BITS, TORCH_DTYPES
from toys import save_toy


def tensors(seed=0):
    """Two matrices and a vector."""
    g = torch.Generator().manual_seed(seed)
    return {
        "model.layers.0.a.weight": torch.randn(4, 6, generator=g).bfloat16(),
        "model.layers.0.b.weight": torch.randn(3, 4, generator=g),
        "model.norm.weight": torch.randn(5, generator=g).half(),
    }


def write_shards(folder, shards, index=None, kind="safetensors"):
    """A folder of shards with its index; `index` overrides what the index says."""
    folder.mkdir(exist_ok=True)
    names = {"safetensors": "model-{}.safetensors", "pytorch": "pytorch_model-{}.bin"}[kind]
    table = {}
    for k, shard in enumerate(shards):
        file = names.format(k)
        save_file(shard, folder / file) if kind == "safetensors" else torch.save(shard, folder / file)
        table |= dict.fromkeys(shard, file)
    file = {"safetensors": "model.safetensors", "pytorch": "pytorch_model.bin"}[kind]
    (folder / f"{file}.index.json").write_text(json.dumps({"weight_map": table | (index or {})}))
    return folder


def write_raw(path, header, data=b""):
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def assert_holds(checkpoint, expected):
    """The checkpoint has exactly these tensors, bit for bit."""
    assert sorted(checkpoint.names) == sorted(expected)
    for name, tensor in expected.items():
        found = checkpoint.tensor(name)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        assert checkpoint.info(name).shape == tuple(tensor.shape)


def refusal(path):
    """What opening says; one sentence that names the way out."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_file_of_safetensors(tmp_path):
    save_file(tensors(), tmp_path / "x.safetensors", {"format": "pt"})
    found = open_checkpoint(tmp_path / "x.safetensors")
    assert_holds(found, tensors())
    assert (found.kind, found.quantised, found.metadata) == ("safetensors", None, {"format": "pt"})
    info = found.info("model.layers.0.a.weight")
    assert (info.dtype, info.file) == ("BF16", tmp_path / "x.safetensors")


def test_shards_are_one_checkpoint_in_both_formats(tmp_path):
    whole = tensors()
    names = list(whole)
    parts = [{names[0]: whole[names[0]]}, {n: whole[n] for n in names[1:]}]
    for kind in ("safetensors", "pytorch"):
        folder = write_shards(tmp_path / kind, parts, kind=kind)
        found = open_checkpoint(folder)
        assert_holds(found, whole)
        assert found.kind == kind and len(found.files) == 2
        index = next(folder.glob("*.index.json"))
        assert open_checkpoint(index).names == found.names


def test_torch_save_plain_old_and_wrapped(tmp_path):
    whole = tensors()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    torch.save(whole, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": whole, "step": 3}, tmp_path / "trainer.ckpt")
    for path in (tmp_path, tmp_path / "old.pt", tmp_path / "trainer.ckpt"):
        assert_holds(open_checkpoint(path), whole)


def test_bytes_are_those_of_the_file_in_every_number_format(tmp_path):
    data, header = b"", {}
    for code, bits in BITS.items():
        # Sixteen numbers; bytes 0 and 1 only where PyTorch reads truth values.
        chunk = bytes((k % 2 if code == "BOOL" else 37 * k % 251) for k in range(2 * bits))
        header[code] = {"dtype": code, "shape": [2, 8], "data_offsets": [len(data), len(data) + len(chunk)]}
        data += chunk
    # One byte in front moves every tensor off its alignment.
    header = {"first": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}} | {
        code: e | {"data_offsets": [n + 1 for n in e["data_offsets"]]} for code, e in header.items()
    }
    path = write_raw(tmp_path / "all.safetensors", header, b"\7" + data)
    found = open_checkpoint(path)
    for code, entry in header.items():
        start, end = entry["data_offsets"]
        assert found.raw(code) == (b"\7" + data)[start:end]
        assert found.raw(code).readonly
        if entry["dtype"] in TORCH_DTYPES:
            assert bytes(found.tensor(code).flatten().view(torch.uint8).tolist()) == (b"\7" + data)[start:end]
        else:
            with pytest.raises(ValueError, match=rf"all.safetensors: '{code}'.*de-quantise"):
                found.tensor(code)


def test_formats_agree_with_the_library_of_the_standard(tmp_path):
    every = {
        code: (torch.arange(12) % 2).view(3, 4).to(dtype)
        for code, dtype in TORCH_DTYPES.items()
        if code != "F8_E8M0"
    }
    save_file(every, tmp_path / "every.safetensors")
    found = open_checkpoint(tmp_path / "every.safetensors")
    assert {name: found.info(name).dtype for name in found.names} == {code: code for code in every}
    assert_holds(found, every)


def test_writing_to_a_tensor_changes_no_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(tensors(), path)
    before = path.read_bytes()
    open_checkpoint(path).tensor("model.norm.weight").zero_()
    assert path.read_bytes() == before


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(7, 3)
        self.lm_head = nn.Linear(3, 7, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight


@pytest.mark.parametrize(
    "how", ["one name", "both names", "torch.save", "save_model", "no config, both names"]
)
def test_a_tied_head_is_one_tensor_however_it_is_saved(tmp_path, how):
    state = Tied().state_dict()
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    if how == "one name":
        save_file(
            {"model.embed_tokens.weight": state["model.embed_tokens.weight"]}, tmp_path / "model.safetensors"
        )
    elif how == "both names":
        save_file({k: v.clone() for k, v in state.items()}, tmp_path / "model.safetensors")
    elif how == "torch.save":
        (tmp_path / "config.json").unlink()
        torch.save(state, tmp_path / "pytorch_model.bin")
    elif how == "save_model":
        (tmp_path / "config.json").unlink()
        save_model(Tied(), tmp_path / "model.safetensors")
    else:
        (tmp_path / "config.json").unlink()
        save_file({k: v.clone() for k, v in state.items()}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert len(found.names) == 1
    (kept,) = found.names
    (other,) = set(state) - {kept}
    assert found.ties == {other: kept}
    assert torch.equal(found.tensor(other), found.tensor(kept))
    assert found.notes == ()


def test_an_untied_head_is_a_tensor_of_its_own(tmp_path):
    state = {k: v.clone() for k, v in Tied().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert len(open_checkpoint(tmp_path).names) == 2, "equal by accident, and the configuration says untied"
    state["lm_head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    found = open_checkpoint(tmp_path)
    assert len(found.names) == 2 and not found.ties
    assert "two different matrices" in found.notes[0]


def test_what_transformers_saves_is_read_back(tmp_path):
    folder = save_toy(tmp_path / "toy", tokenizer=False, dtype=torch.bfloat16)
    model, _ = load_pretrained(folder, dtype=torch.bfloat16, need_tokenizer=False)
    found = open_checkpoint(folder)
    assert_holds(found, {name: p.detach() for name, p in model.named_parameters()})
    assert found.ties == {"lm_head.weight": "model.embed_tokens.weight"}


def test_the_built_in_gguf_is_read_as_transformers_loads_it():
    model, _ = load_pretrained(need_tokenizer=False)
    found = open_checkpoint(built_in_model_path())
    loaded = dict(model.named_parameters())
    assert sorted(found.names) == sorted(loaded)
    for name in [n for n in loaded if not n.startswith("model.layers.") or n.startswith("model.layers.7.")]:
        assert torch.equal(found.tensor(name), loaded[name])
    assert found.quantised == "GGUF Q4_1" and found.kind == "gguf"
    assert found.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    info = found.info("model.layers.3.self_attn.q_proj.weight")
    assert (info.dtype, info.stored) == ("F32", "Q4_1")
    assert found.info("model.norm.weight").stored == ""
    with pytest.raises(ValueError, match="Q4_1.gguf: the bytes of 'model.norm.weight'.*safetensors first"):
        found.raw("model.norm.weight")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq 4-bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes 4-bit"),
        ({"quant_method": "fp8"}, "fp8"),
        (None, "an unnamed method (model.a.qweight)"),
    ],
)
def test_a_quantised_checkpoint_is_called_what_it_is(tmp_path, settings, said):
    save_file({"model.a.qweight": torch.ones(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    if settings:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    assert open_checkpoint(tmp_path).quantised == said


def test_broken_files_are_refused_with_their_name_and_a_way_out(tmp_path):
    whole = tmp_path / "whole.safetensors"
    save_file(tensors(), whole)
    content = whole.read_bytes()

    def broken(name, data):
        (tmp_path / name).write_bytes(data)
        return refusal(tmp_path / name)

    last = max(tensors(), key=lambda n: open_checkpoint(whole)._parts[n].entries[n].end)
    said = broken("cut.safetensors", content[:-3])
    assert "cut.safetensors is truncated" in said and repr(last) in said and "copy it again" in said
    assert "truncated inside its header" in broken("head.safetensors", content[:40])
    assert "bytes that its header does not describe" in broken("long.safetensors", content + b"abc")
    assert "is empty, copy it again" in broken("none.safetensors", b"")
    assert "a file that safetensors wrote" in broken("text.safetensors", b"hello, this is no model at all")
    assert "web page" in broken("page.safetensors", b"<!doctype html><html></html>" * 9)
    assert "git lfs pull" in broken("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha")
    torch.save(tensors(), tmp_path / "pickle.safetensors")
    assert "torch.save, give it the ending .bin" in refusal(tmp_path / "pickle.safetensors")
    assert ".gguf" in broken("g.safetensors", b"GGUF" + bytes(60))
    assert "ending '.npz', which says no format" in broken("x.npz", b"123")
    assert "is no GGUF file" in broken("x.gguf", content)
    assert "truncated or no GGUF" in broken("y.gguf", built_in_model_path().read_bytes()[:3000])


def test_broken_headers_are_refused_with_the_tensor(tmp_path):
    def header(*entries, data=8, **more):
        table = dict(zip("ab", entries, strict=False))
        return refusal(write_raw(tmp_path / "h.safetensors", table | more, bytes(data)))

    def entry(dtype="F32", shape=(2,), start=0, end=8):
        return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}

    assert "'a' has the number format 'F7'" in header(entry("F7"))
    assert "'a' of shape [3] in F32 takes 12 bytes and has 8" in header(entry(shape=(3,)))
    assert "'a' of shape [-2]" in header(entry(shape=(-2,), end=-8))
    assert "'b' does not begin where" in header(entry(), entry(start=4, end=12), data=12)
    assert "describes 'a' in a way" in header({"dtype": "F32", "shape": [2]})
    assert "describes 'a' in a way" in header(5)
    said = refusal(write_raw(tmp_path / "twice.safetensors", b'{"a": {}, "a": {}}'))
    assert "a name stands in it twice" in said
    assert "cannot be read" in refusal(write_raw(tmp_path / "json.safetensors", b"{not json}"))


def test_placeholders_are_refused(tmp_path):
    for name, save in (("x.safetensors", save_file), ("x.bin", torch.save)):
        save(tensors() | {"model.hole.weight": torch.empty(0)}, tmp_path / name)
        said = refusal(tmp_path / name)
        assert (
            name in said and "'model.hole.weight' has the shape [0]" in said and "gather the weights" in said
        )
    torch.save({"w": torch.empty(2, device="meta")}, tmp_path / "meta.bin")
    assert "'w' has no data" in refusal(tmp_path / "meta.bin")
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "sparse.bin")
    assert "'w' is sparse or quantised" in refusal(tmp_path / "sparse.bin")


class Payload:
    """What an attacker would save."""

    def __reduce__(self):
        return (print, ("this code must not run",))


def test_files_of_torch_save_run_no_code(tmp_path, capsys):
    torch.save({"w": torch.ones(2), "x": Payload()}, tmp_path / "evil.bin")
    assert "evil.bin holds more than tensors and is not loaded" in refusal(tmp_path / "evil.bin")
    assert capsys.readouterr().out == ""
    torch.save({"w": torch.ones(999)}, tmp_path / "cut.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-500])
    assert "cut.bin is damaged or no file of torch.save" in refusal(tmp_path / "cut.bin")
    (tmp_path / "none.bin").write_bytes(b"")
    assert "none.bin is empty" in refusal(tmp_path / "none.bin")
    (tmp_path / "text.bin").write_text("hello")
    assert "text.bin is damaged or no file of torch.save" in refusal(tmp_path / "text.bin")
    torch.save([1, 2], tmp_path / "list.bin")
    assert "list.bin holds no tensors by name" in refusal(tmp_path / "list.bin")
    state = tensors() | {"turned": torch.arange(6, dtype=torch.int16).view(2, 3).T}
    torch.save(state, tmp_path / "good.bin")
    found = open_checkpoint(tmp_path / "good.bin")
    assert found.raw("turned") == bytes((0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0)) and found.raw("turned").readonly
    norm = state["model.norm.weight"]
    assert found.raw("model.norm.weight") == norm.view(torch.uint8).numpy().tobytes()


def test_broken_folders_are_refused_with_a_way_out(tmp_path):
    assert "there is no checkpoint" in refusal(tmp_path / "nowhere")
    assert "holds no weights" in refusal(tmp_path)
    whole = tensors()
    names = list(whole)
    folder = write_shards(tmp_path / "gap", [{names[0]: whole[names[0]]}], {names[1]: "model-7.safetensors"})
    said = refusal(folder)
    assert "model-7.safetensors is missing" in said and repr(names[1]) in said and "fetch that shard" in said
    folder = write_shards(tmp_path / "lie", [{names[0]: whole[names[0]]}], {names[1]: "model-0.safetensors"})
    said = refusal(folder)
    assert f"model-0.safetensors does not hold {names[1]!r}" in said
    folder = write_shards(
        tmp_path / "out", [{names[0]: whole[names[0]]}], {names[1]: "../model-0.safetensors"}
    )
    assert "outside of its own folder" in refusal(folder)
    folder = write_shards(tmp_path / "twice", [whole, whole])
    assert open_checkpoint(folder).info(names[0]).file.name == "model-1.safetensors"
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "names no tensor" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "is no index of shards" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "holds 2 .safetensors files and no index, such as model-0" in refusal(folder)
    (folder / "model-1.safetensors").unlink()
    assert_holds(open_checkpoint(folder), whole)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json holds no table" in refusal(folder)


def test_a_name_in_two_shards_needs_the_index_to_decide(tmp_path):
    whole = tensors()
    folder = write_shards(tmp_path / "x", [whole, whole])
    table = {"model.norm.weight": "model-0.safetensors", "model.layers.0.a.weight": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    assert "'model.layers.0.b.weight' is in another shard too" in refusal(folder)


def test_an_adapter_is_no_checkpoint(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert is_adapter(tmp_path) and not is_adapter(tmp_path / "adapter_config.json")
    assert "is a PEFT adapter and no whole model" in refusal(tmp_path)


def test_unknown_names_are_refused(tmp_path):
    save_file(tensors(), tmp_path / "x.safetensors")
    found = open_checkpoint(tmp_path / "x.safetensors")
    for ask in (found.info, found.tensor, found.raw):
        with pytest.raises(ValueError, match=r"x.safetensors has no tensor 'nothing'"):
            ask("nothing")
