"""`ceilings.patch`: the result is the fine-tune to the last bit, the size is what entropy allows, damage is seen."""

import base64
import math
import os
import signal
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ceilings import patch as patches
from ceilings import patch_coding, patch_file
from ceilings.patch import apply_patch, inspect_patch, make_patch
from ceilings.patch_bytes import Reader, number
from ceilings.patch_coding import (
    WHOLE,
    changes,
    code_changes,
    code_stretch,
    decode_changes,
    entropy_bits,
    new_words,
)
from ceilings.patch_merge import merge_patches
from patch_files import WIDTHS, Tensor, bf16, load, save, size

RNG = np.random.default_rng
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def shapes(draw, dtype: str) -> tuple[int, ...]:
    """A shape, odd, empty or scalar, that takes whole bytes."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
    return shape if WIDTHS[dtype] * math.prod(shape) % 8 == 0 else (*shape, 4)


@st.composite
def tensors(draw) -> Tensor:
    """A tensor of any number format, of any bits."""
    dtype = draw(st.sampled_from(sorted(WIDTHS)))
    shape = draw(shapes(dtype))
    return dtype, shape, _bytes(draw, size(dtype, shape))


def _bytes(draw, count: int) -> bytes:
    """Random bytes from a drawn seed: all patterns, also those of NaN."""
    return RNG(draw(st.integers(0, 2**32))).bytes(count)


@st.composite
def fine_tunes(draw, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """What may become of a checkpoint: bits flip, rows come and go, tensors come and go."""
    tuned = {}
    for name, (dtype, shape, raw) in base.items():
        fate = draw(st.sampled_from(["same", "flip", "flip", "all", "grow", "shrink", "other", "gone"]))
        words = bytearray(raw)
        if fate == "flip" and raw:
            for at in draw(st.lists(st.integers(0, len(raw) - 1), max_size=6)):
                words[at] ^= draw(st.integers(1, 255))
        elif fate == "all":
            words = bytearray(_bytes(draw, len(raw)))
        elif fate in ("grow", "shrink") and shape and WIDTHS[dtype] * math.prod(shape[1:]) % 8 == 0:
            row = WIDTHS[dtype] * math.prod(shape[1:]) // 8
            rows = shape[0] + 2 if fate == "grow" else shape[0] // 2
            shape = (rows, *shape[1:])
            words = (words + _bytes(draw, 2 * row))[: rows * row]
        elif fate == "other":
            dtype, shape, words = draw(tensors())
        if fate != "gone":
            tuned[name] = (dtype, shape, bytes(words))
    for k in range(draw(st.integers(0, 2))):
        tuned[f"new {k}"] = draw(tensors())
    return tuned


@st.composite
def pairs(draw, sides: int = 1):
    """A base, and fine-tunes of it that keep at least one name."""
    base = draw(st.dictionaries(st.sampled_from("abcdé"), tensors(), min_size=1)) | {
        "kept": ("U8", (1,), b"x")
    }
    return base, [draw(fine_tunes(base)) | {"kept": ("U8", (1,), b"x")} for _ in range(sides)]


@FEW
@given(pair=pairs())
def test_apply_gives_back_every_tensor_bit_by_bit(pair, tmp_path) -> None:
    base, (tuned,) = pair
    save(tmp_path / "base.safetensors", base)
    save(tmp_path / "tuned.safetensors", tuned, {"format": "pt", "note": "ü"})
    made = make_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "tuned", "patch")))
    apply_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "patch", "out")))
    assert load(tmp_path / "out.safetensors") == tuned
    common = [n for n in tuned if n in base]
    assert set(made.removed) == base.keys() - tuned.keys()
    assert {n for n in common if base[n] == tuned[n]} == set(tuned) - set(made.touched)
    assert inspect_patch(tmp_path / "patch.safetensors") == made


@FEW
@given(pair=pairs(), chunk=st.sampled_from([1, 3, 8]))
def test_stretches_of_any_length_give_the_same_tensors(pair, chunk, tmp_path) -> None:
    base, (tuned,) = pair
    save(tmp_path / "base.safetensors", base)
    save(tmp_path / "tuned.safetensors", tuned)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patches, "CHUNK", chunk)
        make_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "tuned", "patch")))
        apply_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "patch", "out")))
    assert load(tmp_path / "out.safetensors") == tuned


@settings(max_examples=200, deadline=None)
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(1, 3000),
    density=st.sampled_from([0, 1e-3, 0.02, 0.3, 0.5, 0.9, 0.999, 1]),
    near=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_coded_changes_come_back(width, size, density, near, seed) -> None:
    rng = RNG(seed)
    old = np.frombuffer(rng.bytes(size * width), f"<u{width}")
    noise = rng.integers(1, 4, size) * (1 if near else 2 ** (8 * width - 3))
    new = old + np.where(rng.random(size) < density, noise.astype(old.dtype), 0).astype(old.dtype)
    found = changes(old, new)
    assert np.array_equal(found.positions, np.flatnonzero(old != new))
    where, which = code_changes(found, size)
    again = decode_changes(Reader(where + which), size, width)
    assert again.mode == found.mode
    result = old.copy()
    result[again.positions] = new_words(again, old)
    assert np.array_equal(result, new)


@st.composite
def stretches(draw):
    """Numbers before and after: of any width, constant, periodic, of few kinds, moved a little, or anything."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.sampled_from([1, 2, 50, 400, 3000]))
    rng, kind = RNG(draw(st.integers(0, 2**32))), np.dtype(f"<u{width}")

    def words(way: str, before: np.ndarray) -> np.ndarray:
        anything = np.frombuffer(rng.bytes(size * width), kind)
        if way == "constant":
            return np.full(size, anything[0])
        if way == "periodic":
            return np.resize(anything[: 1 + size // 7], size)
        if way == "few":
            return rng.choice(anything[: 1 + size % 5], size)
        if way == "near":
            return before + (rng.random(size) < rng.random()).astype(kind)
        return anything

    ways = st.sampled_from(["constant", "periodic", "few", "near", "anything"])
    old = words(draw(ways), np.zeros(size, kind))
    return old, words(draw(ways), old)


@settings(max_examples=200, deadline=None)
@given(case=stretches())
def test_a_stretch_never_takes_more_than_its_numbers_compressed(case) -> None:
    old, new = case
    coded = code_stretch(old, new)
    assert coded.changed == int((old != new).sum())
    data = coded.positions + coded.values + coded.whole
    again = decode_changes(Reader(data), len(old), old.dtype.itemsize)
    assert (again.mode == WHOLE) == bool(coded.whole)
    result = old.copy()
    result[again.positions] = new_words(again, old)
    assert np.array_equal(result, new)
    # Each place of the numbers by itself, as zlib would have it; the codec takes 6 bytes a place more at most, gives up
    # 2 % for speed, and says how many numbers there are and their check sum.
    places = new.view(np.uint8).reshape(len(new), -1).T
    packed = sum(min(len(p), *(len(_deflated(p.tobytes(), way)) for way in (0, 2))) for p in places)
    assert coded.alone <= 1.03 * packed + 6 * len(places)
    assert len(data) <= coded.alone + 3 + 4
    changed_only = sum(map(len, code_changes(changes(old, new), len(old))))
    assert len(data) <= changed_only


def _deflated(data: bytes, strategy: int) -> bytes:
    """Raw DEFLATE; strategy 2 looks for no repetitions."""
    codec = zlib.compressobj(6, zlib.DEFLATED, -15, 9, strategy)
    return codec.compress(data) + codec.flush()


def test_a_fine_tune_that_is_constant_costs_next_to_nothing(tmp_path) -> None:
    old = bf16(RNG(9).standard_normal(2**16))
    made = _made(tmp_path, {"w": ("BF16", (2**16,), old)}, {"w": ("BF16", (2**16,), bytes(2**17))})
    assert made.changed == 2**16 - int((np.frombuffer(old, "<u2") == 0).sum())  # counted all the same
    assert made.position_bytes == made.value_bytes == 0
    assert made.stored_bytes < 20
    apply_patch(tmp_path / "base.safetensors", tmp_path / "patch.safetensors", tmp_path / "out.safetensors")
    assert load(tmp_path / "out.safetensors")["w"][2] == bytes(2**17)


@FEW
@given(pair=pairs(), chunk=st.sampled_from([3, 2**22]))
def test_a_patch_is_never_larger_than_the_result_compressed_and_a_table(pair, chunk, tmp_path) -> None:
    base, (tuned,) = pair
    save(tmp_path / "base.safetensors", base)
    save(tmp_path / "tuned.safetensors", tuned)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patches, "CHUNK", chunk)
        made = make_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "tuned", "patch")))
    coded = made.position_bytes + made.value_bytes + made.stored_bytes
    numbers = sum(len(raw) for _, _, raw in tuned.values())
    stretches = sum(
        -(-len(raw) // (chunk * made.manifest.tuned[n].what.width)) for n, (_, _, raw) in tuned.items()
    )
    assert coded <= made.manifest.compressed + 7 * (stretches + len(tuned))
    raw = (tmp_path / "patch.safetensors").read_bytes()
    assert (
        made.size == len(raw) == 8 + int.from_bytes(raw[:8], "little") + coded
    )  # the table, and what is coded
    assert made.manifest.compressed <= numbers + 6 * 8 * (stretches + len(tuned))


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**40 + 3])
def test_numbers_come_back(value) -> None:
    assert Reader(number(value)).number() == value


def test_signed_zeros_and_payloads_of_nan_are_bits_like_any_others(tmp_path) -> None:
    old = np.array([0x00000000, 0x7FC00000, 0x3F800000, 0x7F800000], "<u4")
    new = np.array(
        [0x80000000, 0x7FC00001, 0x3F800000, 0xFFC00000], "<u4"
    )  # -0, another NaN, the same, a third
    made = _made(tmp_path, {"w": ("F32", (4,), old.tobytes())}, {"w": ("F32", (4,), new.tobytes())})
    assert made.changed == 3
    apply_patch(tmp_path / "base.safetensors", tmp_path / "patch.safetensors", tmp_path / "out.safetensors")
    assert load(tmp_path / "out.safetensors")["w"][2] == new.tobytes()


def _made(folder: Path, base: dict[str, Tensor], tuned: dict[str, Tensor]):
    """A patch between two checkpoints."""
    save(folder / "base.safetensors", base)
    save(folder / "tuned.safetensors", tuned)
    return make_patch(*(folder / f"{n}.safetensors" for n in ("base", "tuned", "patch")))


@pytest.mark.parametrize(
    ("density", "excess"),
    [(1e-4, 0.10), (1e-3, 0.03), (0.01, 0.015), (0.1, 0.015), (0.5, 0.015), (0.9, 0.015)],
)
@pytest.mark.claim("prop-patch")
def test_random_positions_cost_their_entropy(density, excess) -> None:
    n = 2**21
    positions = np.flatnonzero(RNG(1).random(n) < density)
    k = len(positions)
    exact = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert exact <= entropy_bits(n, k) <= exact + math.log2(n + 1)  # the count of masks, and the bound on it
    where, _ = code_changes(patch_coding.Changes("bits", positions, np.zeros(k, np.uint16)), n)
    assert exact <= 8 * len(where) <= (1 + excess) * exact


def test_a_mask_with_structure_costs_less() -> None:
    rows = np.zeros((2048, 512), bool)
    rows[RNG(2).choice(2048, 100, replace=False)] = True  # whole rows, as of an embedding
    positions = np.flatnonzero(rows)
    where, _ = code_changes(
        patch_coding.Changes("bits", positions, np.zeros(len(positions), np.uint16)), rows.size
    )
    assert 8 * len(where) < 0.05 * entropy_bits(rows.size, len(positions))


@pytest.mark.claim("prop-patch")
def test_values_cost_about_their_entropy_given_the_old_ones() -> None:
    rng = RNG(3)
    old = np.frombuffer(bf16(0.02 * rng.standard_normal(2**20)), "<u2")
    law = {1: 0.4, -1: 0.4, 2: 0.1, -2: 0.1}  # steps in units of the last place
    steps = rng.choice(list(law), len(old), p=list(law.values()))
    moved = rng.random(len(old)) < 0.05
    found = changes(old, old + np.where(moved, steps, 0).astype(np.uint16))
    entropy = -sum(p * math.log2(p) for p in law.values())
    _, which = code_changes(found, len(old))
    assert found.mode == "step"
    assert entropy < 8 * len(which) / moved.sum() < 1.03 * entropy


def test_flags_are_stored_as_flips_and_new_weights_by_themselves() -> None:
    rng = RNG(4)
    flags = rng.integers(0, 2**16, 5000, dtype=np.uint16)
    assert changes(flags, flags ^ np.uint16(1 << 9)).mode == "xor"
    old, new = (np.frombuffer(bf16(rng.standard_normal(5000)), "<u2") for _ in range(2))
    assert changes(old, new).mode == "bits"


def test_a_tensor_that_changed_everywhere_costs_no_more_than_the_tensor_alone(tmp_path) -> None:
    old, new = (bf16(0.02 * RNG(k).standard_normal(2**16)) for k in range(2))
    made = _made(tmp_path, {"w": ("BF16", (256, 256), old)}, {"w": ("BF16", (256, 256), new)})
    assert made.size < len(new)
    # The size of the result by itself, coded and foretold from the frequencies of its bytes.
    coded = made.value_bytes + made.position_bytes + made.stored_bytes
    shares = [np.bincount(np.frombuffer(new, np.uint8)[k::2], minlength=256) / 2**16 for k in range(2)]
    foretold = -sum(float((p[p > 0] * np.log2(p[p > 0])).sum()) for p in shares) * 2**16 / 8
    assert coded - 8 <= made.manifest.compressed == pytest.approx(foretold, rel=0.03)


def test_bytes_are_accounted_for(tmp_path) -> None:
    old = RNG(5).bytes(4000)
    new = bytearray(old)
    new[17] ^= 1
    base = {"head.weight": ("F32", (10, 100), old), "same": ("F32", (1,), b"1234")}
    tuned = {"head.weight": ("F32", (11, 100), bytes(new) + old[:400]), "wide": ("F64", (2,), b"8" * 16)}
    made = _made(tmp_path, base, tuned)
    assert (made.changed, made.common, made.density) == (1, 1000, 1 / 1000)
    assert made.dense_bytes == 11 * 100 * 4 + 16
    assert made.adapter_bytes(8) == 8 * (11 + 100) * 4
    assert made.removed == ["same"]
    assert made.position_bound == pytest.approx(-(math.log2(1e-3) + 999 * math.log2(0.999)) / 8)
    coded = sum(len(raw) for _, _, raw in load(tmp_path / "patch.safetensors").values())
    assert coded == made.position_bytes + made.value_bytes + made.stored_bytes


def test_a_head_that_was_tied_costs_as_much_as_the_embedding_and_no_more(tmp_path) -> None:
    old = np.frombuffer(bf16(RNG(6).standard_normal((400, 64))), "<u2")
    new = old.copy()
    new[::50] += 1
    base = {"model.embed_tokens.weight": ("BF16", (400, 64), old.tobytes())}
    tuned = {n: ("BF16", (400, 64), new.tobytes()) for n in ("lm_head.weight", "model.embed_tokens.weight")}
    made = _made(tmp_path, base, tuned)
    assert made.manifest.tuned["lm_head.weight"].origin == "model.embed_tokens.weight"
    assert made.stored_bytes == 0
    apply_patch(tmp_path / "base.safetensors", tmp_path / "patch.safetensors", tmp_path / "out.safetensors")
    assert load(tmp_path / "out.safetensors") == tuned


def test_shards_are_one_checkpoint(tmp_path) -> None:
    parts = [{"a": ("U8", (3,), b"abc")}, {"b": ("F32", (1,), b"wxyz"), "c": ("U8", (1,), b"!")}]
    folder = tmp_path / "base"
    folder.mkdir()
    for k, part in enumerate(parts):
        save(folder / f"model-{k}.safetensors", part)
    table = ", ".join(f'"{n}": "model-{k}.safetensors"' for k, part in enumerate(parts) for n in part)
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{table}}}}}')
    tuned = parts[0] | parts[1] | {"c": ("U8", (1,), b"?")}
    save(tmp_path / "tuned.safetensors", tuned)
    made = make_patch(folder, tmp_path / "tuned.safetensors", tmp_path / "patch.safetensors")
    assert made.touched == ["c"]
    apply_patch(folder, tmp_path / "patch.safetensors", tmp_path / "out.safetensors")
    assert load(tmp_path / "out.safetensors") == tuned


def test_a_file_of_the_library_comes_back_as_a_whole(tmp_path) -> None:
    import torch
    from safetensors.torch import save_file

    base = {"b.bias": torch.ones(3), "a": torch.randn(5, 4, dtype=torch.bfloat16), "n": torch.tensor(7)}
    tuned = {k: v.clone() for k, v in base.items()}
    tuned["a"][2] *= 2
    save_file(base, tmp_path / "base.safetensors", {"format": "pt"})
    save_file(tuned, tmp_path / "tuned.safetensors", {"format": "pt"})
    make_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "tuned", "patch")))
    apply_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "patch", "out")))
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "tuned.safetensors").read_bytes()


# Written by the first version of the format: what changed, new rows, a new tensor, one that is gone.
VERSION_1 = (
    "c-oCq%TC)s6b%6k1*u}mrV{e9ve3LAS)neFy6l2g5~X)uA%Zv&HboVR`UU-ss$bGg_f<cqckIFjsOqs~&G?>k?mctw@9jbN+?TW2"
    "GPV$)h1ske-IqQtt{3&ZDM#h~q`X?xVN#AJkH@ELX#M4+tS05Bc+)IaHU6f!bI`<DSj=P7b^yZ|XwZZ>=Bx@t1{pPYMs=c062lFN"
    "+z~2?rb!D=h|z>;qLOx?qU|IyDY9WAap_{1wX3UGH>Y=TF~7_*<4O7MoGOeRQ$i{=MGSxm!o?Vwj9dy6JPAT1<v~GE7Kw9Iy}DWU"
    "1m~P(Jj<t6MPSJTvq38Xidhedu|%{7NJ914`KpdR_QG`1oh<c06qZVY<k}kNy$p_9W+@{oNQ7=Mti7#c=u4{OUC;7fiA*!C>f7t<"
    "iu_$v<%9$!Oe&*{3uqi695fAFB;mL*ApccNe_EM}RkWfUDbYqkgH4=)^DI#S%{;SAM-*{FrquKOhuO3@``O3}EAH~As4Mb2DK(|s"
    "ctN}tl0kC8i9{8*MoSf}eX!@D7kh^iRselFt?`os{A#(riA~d)h&pUjR*%g&Yc2uZ!qydmdzJ7)6sO)q6||sSCvBp1OnVwV#~f+G"
    "oET>uyki7=#3`bL0~$~(-%lQh(0*P=q`WYwgaUaprdWO14b3X0Cbl>(<6QDI<1p)&f#N9;o#G@TpK<d=B5t1&aU20V-E2-yib1he"
    "42$hzr`RouVsDuD-8%gC_WbDRjsN)J*I6+b3<n3pANyy6pWk19IsSS)815AN2gh66yL+z={{S!tEJF"
)  # fmt: skip


def test_patches_of_the_first_version_still_apply(tmp_path) -> None:
    old = (np.arange(600) * 7919 % 65521).astype("<u2")
    new = old.copy()
    new[::41] += 1
    new[5] = 0x7FC1
    base = {"embed_tokens.weight": ("BF16", (100, 6), old.tobytes()), "norm": ("F32", (2,), bytes(8))}
    rows = new.tobytes() + bytes(range(12))
    tuned = {"embed_tokens.weight": ("BF16", (101, 6), rows), "norm": ("F32", (2,), b"\1" * 8)}
    tuned |= {"new": ("I64", (), bytes(range(8)))}
    save(tmp_path / "base.safetensors", base | {"gone": ("U8", (1,), b"x")})
    (tmp_path / "patch").write_bytes(zlib.decompress(base64.b85decode(VERSION_1)))
    apply_patch(tmp_path / "base.safetensors", tmp_path / "patch", tmp_path / "out.safetensors")
    assert load(tmp_path / "out.safetensors") == tuned
    save(tmp_path / "tuned.safetensors", tuned)
    again = make_patch(*(tmp_path / n for n in ("base.safetensors", "tuned.safetensors", "again")))
    first = inspect_patch(tmp_path / "patch")
    assert (first.manifest.version, again.manifest.version) == (1, 2)
    assert (first.changed, first.removed) == (again.changed, again.removed) == (18, ["gone"])
    merge_patches(
        tmp_path / "patch", tmp_path / "again", tmp_path / "both", base=tmp_path / "base.safetensors"
    )
    apply_patch(tmp_path / "base.safetensors", tmp_path / "both", tmp_path / "out.safetensors")
    assert load(tmp_path / "out.safetensors") == tuned


def test_files_of_torch_save_are_as_good_as_safetensors(tmp_path) -> None:
    import torch
    from safetensors.torch import save_file

    def weights(step: float) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        found = {"embed_tokens.weight": torch.randn(6, 4, generator=draw, dtype=torch.bfloat16) + step}
        found |= {"turned": torch.randn(3, 5, generator=draw, dtype=torch.float64).T, "n": torch.tensor(7)}
        return found | {"z": torch.randn(3, generator=draw, dtype=torch.complex64), "f": torch.tensor([True])}

    for name, step in (("base", 0.0), ("tuned", 0.5)):
        plain = {k: v.contiguous() for k, v in weights(step).items()}
        save_file(plain, tmp_path / f"{name}.safetensors", {"format": "pt"})
        state = weights(step)
        state["lm_head.weight"] = state["embed_tokens.weight"]  # one storage, two names
        (tmp_path / name).mkdir()
        torch.save(state, tmp_path / name / "pytorch_model.bin")
    wanted = load(tmp_path / "tuned.safetensors")
    for k, (base, tuned) in enumerate(
        (b, t) for b in ("base", "base.safetensors") for t in ("tuned/pytorch_model.bin", "tuned.safetensors")
    ):
        made = make_patch(tmp_path / base, tmp_path / tuned, tmp_path / "patch")
        assert made.touched == ["embed_tokens.weight"]
        # The formats hold the same bytes: a base in either is the base.
        for again in ("base", "base.safetensors"):
            apply_patch(tmp_path / again, tmp_path / "patch", tmp_path / f"{k}.safetensors")
            assert load(tmp_path / f"{k}.safetensors") == wanted
    apply_patch(tmp_path / "base", tmp_path / "patch", tmp_path / "out.safetensors")
    make_patch(tmp_path / "base", tmp_path / "tuned", tmp_path / "patch")
    apply_patch(tmp_path / "base", tmp_path / "patch", tmp_path / "out.safetensors")
    from ceilings.checkpoints import open_checkpoint

    found = open_checkpoint(tmp_path / "out.safetensors")
    assert found.metadata == {"format": "pt", "lm_head.weight": "embed_tokens.weight"}
    assert torch.equal(found.tensor("lm_head.weight"), weights(0.5)["embed_tokens.weight"])


# ---- what is refused


@pytest.fixture
def three(tmp_path, monkeypatch) -> Path:
    """Base, tuned and patch in the current folder."""
    monkeypatch.chdir(tmp_path)
    old = RNG(7).bytes(800)
    new = bytearray(old)
    new[400:404] = b"abcd"
    base = {"w": ("F32", (2, 100), old), "norm": ("F32", (1,), b"1234")}
    save(tmp_path / "base.safetensors", base)
    save(tmp_path / "tuned.safetensors", base | {"w": ("F32", (2, 100), bytes(new))})
    make_patch("base.safetensors", "tuned.safetensors", "patch.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b | {"w": ("F32", (2, 100), bytes(800))}, "other.safetensors: 'w' differs from the base of patch"),
        (lambda b: b | {"norm": ("F32", (1,), b"9999")}, "other.safetensors: 'norm' differs from the base"),
        (lambda b: b | {"w": ("F32", (100, 2), b["w"][2])}, r"'w' is F32 \[100, 2\] and F32 \[2, 100\] in the base"),
        (lambda b: b | {"w": ("I32", (2, 100), b["w"][2])}, r"'w' is I32 \[2, 100\] and F32 \[2, 100\] in the base"),
        (lambda b: {"w": b["w"]}, "other.safetensors has no 'norm', which the base of patch.safetensors has"),
        (lambda b: b | {"more": ("U8", (0,), b"")}, "other.safetensors: 'more' is not in the base of patch"),
    ],
)  # fmt: skip
def test_another_base_is_refused_by_tensor_and_file(three, change, message) -> None:
    save(three / "other.safetensors", change(load(three / "base.safetensors")))
    (three / "out.safetensors").write_text("precious")
    with pytest.raises(ValueError, match=message) as found:
        apply_patch("other.safetensors", "patch.safetensors", "out.safetensors")
    assert "give the base that the patch was made for" in str(found.value)
    assert (three / "out.safetensors").read_text() == "precious"
    assert sorted(p.name for p in three.iterdir() if ".part" in p.name) == []


def test_a_tensor_that_the_result_drops_still_tells_bases_apart(three) -> None:
    tuned = load(three / "tuned.safetensors")
    del tuned["norm"]
    save(three / "tuned.safetensors", tuned)
    make_patch("base.safetensors", "tuned.safetensors", "patch.safetensors")
    save(three / "other.safetensors", load(three / "base.safetensors") | {"norm": ("F32", (1,), b"9999")})
    with pytest.raises(ValueError, match="'norm' differs"):
        apply_patch("other.safetensors", "patch.safetensors", "out.safetensors")


def test_any_damaged_byte_is_seen(three) -> None:
    whole, tuned = (three / "patch.safetensors").read_bytes(), load(three / "tuned.safetensors")
    seen = 0
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 7
        (three / "patch.safetensors").write_bytes(broken)
        (three / "out.safetensors").unlink(missing_ok=True)
        try:
            apply_patch("base.safetensors", "patch.safetensors", "out.safetensors")
        except ValueError:
            seen += 1
            assert not (three / "out.safetensors").exists()
        else:  # a byte of free text, of a size that is only reported, or one that the codec skips
            assert load(three / "out.safetensors") == tuned
    assert seen > 0.8 * len(whole)


def test_every_truncation_is_seen(three) -> None:
    whole = (three / "patch.safetensors").read_bytes()
    for keep in range(0, len(whole), 7):
        (three / "patch.safetensors").write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"patch\.safetensors"):
            apply_patch("base.safetensors", "patch.safetensors", "out.safetensors")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_patch("none.safetensors", "tuned.safetensors", "p"), "no checkpoint 'none.safetensors'"),
        (lambda: make_patch("base.safetensors", "alien.safetensors", "p"), "no tensor of alien.safetensors is named"),
        (lambda: make_patch("base.safetensors", "tuned.safetensors", "."), "is a folder: give the name of a file"),
        (lambda: make_patch("base.safetensors", "tuned.safetensors", "no/p"), "no folder 'no' to write p in"),
        (lambda: make_patch("base.safetensors", "tuned.safetensors", "base.safetensors"), "give OUT another name"),
        (lambda: make_patch("base.safetensors", "small.gguf", "p"), "small.gguf is a GGUF file, .* save the de-quan"),
        (lambda: make_patch("base.safetensors", "adapter", "p"), "adapter is a PEFT adapter and no .*: .* merge it"),
        (lambda: make_patch("base.safetensors", "code.bin", "p"), "code.bin is damaged or no file of torch.save"),
        (lambda: apply_patch("base.safetensors", "none", "o"), "there is no patch 'none'"),
        (lambda: apply_patch("base.safetensors", "tuned.safetensors", "o"), "is a safetensors file but no patch"),
        (lambda: apply_patch("base.safetensors", "future.safetensors", "o"), "version 99, and 1 and 2 are known here"),
        (lambda: apply_patch("base.safetensors", "moments.safetensors", "o"), "it holds something else"),
        (lambda: apply_patch("base.safetensors", "patch.safetensors", "patch.safetensors"), "give OUT another name"),
        (lambda: inspect_patch("base.safetensors"), "is a safetensors file but no patch"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_one_sentence(three, call, message) -> None:
    save(three / "alien.safetensors", {"x": ("U8", (1,), b"1")})
    (three / "small.gguf").write_bytes(b"GGUF")
    (three / "code.bin").write_bytes(b"hello")
    (three / "adapter").mkdir()
    (three / "adapter" / "adapter_config.json").write_text("{}")
    for name, said in (
        ("future", '{"kind": "ceilings.patch", "version": 99}'),
        ("moments", '{"kind": "ceilings.x"}'),
    ):
        save(three / f"{name}.safetensors", {"x": ("U8", (1,), b"1")}, {"ceilings": said})
    with pytest.raises((ValueError, OSError), match=message) as found:
        call()
    assert "\n" not in str(found.value)


# ---- whole or not at all, and little memory


def test_a_failure_leaves_no_file(three) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("stop here")

    for call in (
        lambda: make_patch("base.safetensors", "tuned.safetensors", "out.safetensors", fail),
        lambda: apply_patch("base.safetensors", "patch.safetensors", "out.safetensors", fail),
    ):
        before = sorted(os.listdir())
        with pytest.raises(RuntimeError, match="stop here"):
            call()
        assert sorted(os.listdir()) == before


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a signal that nothing can catch")
def test_a_killed_run_leaves_the_old_file(three) -> None:
    (three / "out.safetensors").write_text("precious")
    slow = (
        "import time; from ceilings.patch import apply_patch\n"
        "def wait(done, total): print('half', flush=True); time.sleep(60)\n"
        "apply_patch('base.safetensors', 'patch.safetensors', 'out.safetensors', wait)"
    )
    with subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"half\n"
        assert list(three.glob(".out.safetensors.*.part"))  # it is under way
        run.send_signal(signal.SIGKILL)
    assert (three / "out.safetensors").read_text() == "precious"


def test_progress_counts_tensors(three) -> None:
    told: list[tuple[int, int]] = []
    make_patch("base.safetensors", "tuned.safetensors", "p", lambda *at: told.append(at))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    told.clear()
    apply_patch("base.safetensors", "patch.safetensors", "o", lambda *at: told.append(at))
    assert told == [(1, 2), (2, 2)]


def test_memory_follows_the_stretch_and_not_the_checkpoint(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(patches, "CHUNK", 2**16)
    monkeypatch.setattr(patch_file, "_PIECE", 2**17)
    rng, count = RNG(8), 40
    base = {f"w{k:02}": ("BF16", (512, 512), bf16(rng.standard_normal(2**18))) for k in range(count)}
    tuned = {n: (d, s, raw[:-2] + b"ab") for n, (d, s, raw) in base.items()}
    tuned["w07"] = ("BF16", (512, 512), bf16(rng.standard_normal(2**18)))  # one that changed everywhere
    save(tmp_path / "base.safetensors", base)
    save(tmp_path / "tuned.safetensors", tuned)
    tracemalloc.start()
    try:
        make_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "tuned", "patch")))
        apply_patch(*(tmp_path / f"{n}.safetensors" for n in ("base", "patch", "out")))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6 < count * 2**19
    assert load(tmp_path / "out.safetensors") == tuned
