"""`ceilings.patch_merge` against dictionaries: every number that a fine-tune sets, by its place."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ceilings.patch import apply_patch, inspect_patch, make_patch
from ceilings.patch_merge import ConflictError, merge_patches
from patch_files import Tensor, bf16, load, save
from test_patch import FEW, RNG, pairs


def _patches(folder, base: dict[str, Tensor], *tuned: dict[str, Tensor]) -> list[str]:
    """Patches of several fine-tunes of one base."""
    save(folder / "base.safetensors", base)
    made = []
    for k, one in enumerate(tuned):
        save(folder / f"tuned{k}.safetensors", one)
        made.append(folder / f"patch{k}.safetensors")
        make_patch(folder / "base.safetensors", folder / f"tuned{k}.safetensors", made[-1])
    return made


def _applied(folder) -> dict[str, Tensor]:
    """What the merged patch makes of the base."""
    apply_patch(folder / "base.safetensors", folder / "out.safetensors", folder / "result.safetensors")
    return load(folder / "result.safetensors")


def _places(base: dict[str, Tensor], tuned: dict[str, Tensor], width: int) -> dict[tuple[str, int], bytes]:
    """Every number that a fine-tune sets, by tensor and place."""
    return {
        (name, at): raw[at : at + width]
        for name, (_, _, raw) in tuned.items()
        for at in range(0, len(raw), width)
        if raw[at : at + width] != base[name][2][at : at + width]
    }


@st.composite
def same_shapes(draw):
    """A base and two fine-tunes of the same shapes, all of one width, and that width."""
    dtype, width = draw(st.sampled_from([("BF16", 2), ("F32", 4), ("I64", 8), ("BOOL", 1), ("F8_E4M3", 1)]))
    rng = RNG(draw(st.integers(0, 2**32)))
    base = {name: (dtype, (10, 6), rng.bytes(60 * width)) for name in "abc"}
    near = draw(st.booleans())
    sides = []
    for density in draw(st.tuples(*[st.sampled_from([0, 0.02, 0.3, 1, "flat"])] * 2)):
        tuned = {}
        for name, (_, shape, raw) in base.items():
            words = np.frombuffer(raw, f"<u{width}").copy()
            if density == "flat":  # stored whole
                tuned[name] = (dtype, shape, np.full_like(words, words[rng.integers(3)]).tobytes())
                continue
            moved = rng.random(60) < density * rng.random()
            words[moved] += rng.integers(1, 3 if near else 2 ** (8 * width - 1), moved.sum()).astype(
                words.dtype
            )
            tuned[name] = (dtype, shape, words.tobytes())
        sides.append(tuned)
    return base, sides, width


@FEW
@given(case=same_shapes(), prefer=st.sampled_from([None, "first", "second"]), base_given=st.booleans())
def test_merging_is_the_union_of_what_both_set(case, prefer, base_given, tmp_path) -> None:
    base, sides, width = case
    patches = _patches(tmp_path, base, *sides)
    one, two = (_places(base, side, width) for side in sides)
    both = one.keys() & two.keys()
    differing = {place for place in both if one[place] != two[place]}
    modes_may_differ = not base_given
    given_base = {"base": tmp_path / "base.safetensors"} if base_given else {}
    (tmp_path / "out.safetensors").unlink(missing_ok=True)
    try:
        merged = merge_patches(*patches, tmp_path / "out.safetensors", prefer=prefer, **given_base)
    except ConflictError as error:
        assert prefer is None and differing
        assert sum(c.differing for c in error.conflicts) == len(differing)
        assert {c.name for c in error.conflicts} == {name for name, _ in differing}
        assert not (tmp_path / "out.safetensors").exists()
        return
    except ValueError as error:
        assert modes_may_differ and "give --base BASE" in str(error)
        return
    assert prefer is not None or not differing
    assert merged.both == len(both)
    assert sum(c.differing for c in merged.conflicts) == len(differing)
    wanted = one | two if prefer == "second" else two | one
    result = _applied(tmp_path)
    assert _places(base, result, width) == wanted
    assert merged.patch.changed == len(wanted)


@FEW
@given(case=pairs(sides=2), prefer=st.sampled_from(["first", "second"]))
def test_any_two_patches_merge_tensor_by_tensor(case, prefer, tmp_path) -> None:
    base, sides = case
    merge_patches(
        *_patches(tmp_path, base, *sides),
        tmp_path / "out.safetensors",
        prefer=prefer,
        base=tmp_path / "base.safetensors",
    )
    result = _applied(tmp_path)
    one, two = sides if prefer == "first" else sides[::-1]
    for name in one.keys() | two.keys() | base.keys():
        before, first, second, found = (side.get(name) for side in (base, one, two, result))
        if first == before or second == before:  # only one of them does anything
            assert found == (second if first == before else first)
        elif found is not None and second is not None and found != first:  # number by number
            assert found[:2] == first[:2] == second[:2]
            assert all(byte in options for byte, *options in zip(found[2], first[2], second[2], strict=True))
        else:
            assert found == first


def test_a_patch_merged_with_itself_is_that_patch(tmp_path) -> None:
    old = RNG(1).bytes(4000)
    new = bytearray(old)
    new[::400] = b"?" * 10
    base, tuned = {"w": ("F32", (10, 100), old)}, {"w": ("F32", (11, 100), bytes(new) + old[:400])}
    one, two = _patches(tmp_path, base, tuned, tuned)
    merged = merge_patches(one, two, tmp_path / "out.safetensors")
    assert (merged.both, merged.conflicts) == (10 + 100, ())
    assert inspect_patch(one).manifest.tuned == merged.patch.manifest.tuned
    assert _applied(tmp_path) == tuned


def test_what_both_make_the_same_needs_no_base_even_if_it_is_stored_whole(tmp_path) -> None:
    base = {n: ("BF16", (400,), bf16(RNG(4).standard_normal(400))) for n in "ab"}
    flat = {"a": ("BF16", (400,), bytes(800))}
    other = ("BF16", (400,), bf16(RNG(5).standard_normal(400)))
    merged = merge_patches(
        *_patches(tmp_path, base, base | flat, flat | {"b": other}), tmp_path / "out.safetensors"
    )
    assert (merged.both, merged.conflicts) == (400, ())
    assert _applied(tmp_path) == flat | {"b": other}
    patches = _patches(tmp_path, base, base | flat, base | {"a": other})
    with pytest.raises(ValueError, match="store 'a' in different ways, .* give --base BASE"):
        merge_patches(*patches, tmp_path / "out.safetensors", prefer="first")
    merged = merge_patches(
        *patches, tmp_path / "out.safetensors", prefer="first", base=tmp_path / "base.safetensors"
    )
    assert merged.patch.size < 1200 and merged.patch.changed == 400  # still whole
    assert _applied(tmp_path) == base | flat


def test_order_does_not_matter_without_conflicts(tmp_path) -> None:
    base = {"w": ("BF16", (2000,), bf16(RNG(2).standard_normal(2000)))}
    words = np.frombuffer(base["w"][2], "<u2")
    sides = [
        {"w": ("BF16", (2000,), (words + (np.arange(2000) % k == 0)).astype("<u2").tobytes())}
        for k in (7, 11)
    ]
    patches, results = _patches(tmp_path, base, *sides), []
    for order in (patches, patches[::-1]):
        merged = merge_patches(*order, tmp_path / "out.safetensors")
        assert merged.both == len(range(0, 2000, 77))  # both add one there: no conflict
        results.append(_applied(tmp_path))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("one", "two", "why", "count"),
    [
        (None, ("U8", (4,), b"abcX"), "one removes it, one changes it", 1),
        (("U8", (5,), b"abcde"), ("U8", (6,), b"abcdef"), r"U8 \[5\] and U8 \[6\]", 2),
        (("I8", (4,), b"abcd"), ("U8", (2, 2), b"abcd"), r"I8 \[4\] and U8 \[2, 2\]", 4),
        (("U8", (5,), b"abcdx"), ("U8", (5,), b"abcdy"), "numbers", 1),
    ],
)
def test_conflicts_over_more_than_numbers_are_counted_and_decided(one, two, why, count, tmp_path) -> None:
    base = {"w": ("U8", (4,), b"abcd"), "kept": ("U8", (1,), b"k")}
    sides = [base | {"w": side} if side else {"kept": base["kept"]} for side in (one, two)]
    patches = _patches(tmp_path, base, *sides)
    with pytest.raises(ConflictError, match=f"change {count} numbers differently, most in 'w'") as found:
        merge_patches(*patches, tmp_path / "out.safetensors")
    assert "say --prefer first or --prefer second" in str(found.value)
    (conflict,) = found.value.conflicts
    assert (conflict.name, conflict.differing) == ("w", count)
    assert re.search(why, conflict.why)
    assert not (tmp_path / "out.safetensors").exists()
    for prefer, side in zip(("first", "second"), sides, strict=True):
        merge_patches(*patches, tmp_path / "out.safetensors", prefer=prefer)
        assert _applied(tmp_path) == side


def test_patches_of_different_bases_do_not_merge(tmp_path) -> None:
    base, tuned = {"w": ("U8", (2,), b"ab")}, {"w": ("U8", (2,), b"ac")}
    (one,) = _patches(tmp_path, base, tuned)
    (tmp_path / "more").mkdir()
    (two,) = _patches(tmp_path / "more", {"w": ("U8", (2,), b"xb")}, tuned)
    with pytest.raises(
        ValueError, match="were made for different bases, which differ in 'w': make both patches"
    ):
        merge_patches(one, two, tmp_path / "out.safetensors")
    with pytest.raises(ValueError, match=r"more/base.safetensors: 'w' is BF16 \[1\] and U8 \[2\]"):
        wrong = {"w": ("BF16", (1,), b"ab")}
        save(tmp_path / "more" / "base.safetensors", wrong)
        merge_patches(one, one, tmp_path / "out.safetensors", base=tmp_path / "more" / "base.safetensors")


def test_values_stored_in_different_ways_need_the_base(tmp_path) -> None:
    words = RNG(3).integers(0, 2**16, 5000, dtype=np.uint16)
    near, far = words + np.uint16(1), RNG(4).integers(0, 200, 5000, dtype=np.uint16)
    base, *sides = ({"w": ("U16", (5000,), w.tobytes())} for w in (words, near, far))
    patches = _patches(tmp_path, base, *sides)
    with pytest.raises(ValueError, match="store 'w' in different ways, .* give --base BASE"):
        merge_patches(*patches, tmp_path / "out.safetensors", prefer="first")
    merge_patches(*patches, tmp_path / "out.safetensors", prefer="first", base=tmp_path / "base.safetensors")
    assert _applied(tmp_path) == sides[0]


def test_a_head_untied_by_both_is_merged_like_a_change_of_the_embedding(tmp_path) -> None:
    words = np.frombuffer(bf16(RNG(6).standard_normal((50, 8))), "<u2")
    changed = words.copy()
    changed[3] += 1
    tied = ("BF16", (50, 8), words.tobytes())
    base = {"embed_tokens.weight": tied}
    sides = [base | {"lm_head.weight": head} for head in (tied, ("BF16", (50, 8), changed.tobytes()))]
    for order in (sides, sides[::-1]):
        merge_patches(*_patches(tmp_path, base, *order), tmp_path / "out.safetensors")
        assert _applied(tmp_path) == sides[1]


@settings(max_examples=20, deadline=None)
@given(at=st.integers(0, 10**6))
def test_damage_is_seen_in_a_merge_too(at, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("damage")
    base = {"w": ("BF16", (900,), bf16(RNG(5).standard_normal(900)))}
    words = np.frombuffer(base["w"][2], "<u2")
    sides = [
        {"w": ("BF16", (900,), (words + (np.arange(900) % k == 0)).astype("<u2").tobytes())} for k in (3, 5)
    ]
    one, two = _patches(folder, base, *sides)
    merge_patches(one, two, folder / "out.safetensors")
    expected = _applied(folder)
    whole = bytearray(two.read_bytes())
    whole[at % len(whole)] ^= 4
    two.write_bytes(whole)
    try:
        merge_patches(one, two, folder / "out.safetensors", prefer="first")
    except ValueError as error:
        assert "patch1.safetensors" in str(error)
    else:
        assert _applied(folder) == expected
