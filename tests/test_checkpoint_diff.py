"""The numbers of a comparison against dense float64 arithmetic on small random pairs, and every kind of input."""

import gc
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from ceilings import cli, delta_scan
from ceilings.adapter_delta import open_adapter
from ceilings.checkpoint_diff import SHARES, compare, count_overlap
from ceilings.checkpoints import open_checkpoint
from ceilings.delta_scan import coarser, scan
from ceilings.diff_report import bins_entry, describe_overlap, describe_side, describe_tuned
from ceilings.matching import match
from ceilings.overlaps import CutFinder, open_overlap
from ceilings.safetensors_file import TORCH_DTYPES
from ceilings.spectrum import random_stable_rank, spectrum
from ceilings.tally import GRIDS, half_gap_exponents

NAMES = {
    "model.embed_tokens.weight": (40, 12),
    "model.layers.0.self_attn.q_proj.weight": (12, 12),
    "model.layers.0.mlp.up_proj.weight": (30, 12),
    "model.layers.0.norm.weight": (12,),
    "model.layers.1.self_attn.q_proj.weight": (12, 12),
    "model.layers.1.mlp.up_proj.weight": (30, 12),
    "model.layers.1.norm.weight": (12,),
    "model.norm.weight": (12,),
}


def weights(seed=0, dtype=torch.bfloat16, std=0.02):
    """Weights of a small model, of very different magnitudes."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: (std * torch.randn(shape, generator=g) * torch.rand(shape, generator=g) ** 3).to(dtype)
        for name, shape in NAMES.items()
    }


def moved(base, step, seed=1, share=1.0):
    """Weights after a step of random size."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: (
            t.double() + step * torch.randn(t.shape, generator=g) * (torch.rand(t.shape, generator=g) < share)
        ).to(t.dtype)
        for name, t in base.items()
    }


def save(path, tensors, config=None):
    """A Hugging Face folder, or a file of that name."""
    if path.suffix:
        save_file(tensors, path)
    else:
        path.mkdir(exist_ok=True)
        save_file(tensors, path / "model.safetensors")
        if config is not None:
            (path / "config.json").write_text(json.dumps(config))
    return open_checkpoint(path)


def diff_of(base, tuned, **options):
    return compare(base, tuned, match(base, tuned), describe=bins_entry, **options)


def report_of(base, tuned, **options):
    matching = match(base, tuned)
    found = compare(base, tuned, matching, describe=bins_entry, **options)
    return describe_tuned(found, matching, base, tuned)


def dense(a, b, dtype):
    """Every number of the report, written down from its definition in float64, nothing shared with the library."""
    a, b = (t.to(TORCH_DTYPES[dtype]).double().flatten() for t in (a, b))
    changed = ~((a == b) | (a.isnan() & b.isnan()))
    sized = a.isfinite() & b.isfinite()
    tau = torch.where(sized & changed, b - a, torch.zeros(()).double())
    size = tau.abs()
    odd = changed & ~sized
    top = size.sort(descending=True).values
    kept = torch.where(a.isfinite(), a, torch.zeros(()).double())
    energy = float((tau**2).sum())
    order = a.abs().argsort()
    count = max(1, round(0.01 * len(a)))
    return {
        "equality": int(changed.sum()),
        "absolute": int((odd | (size > 1e-5)).sum()),
        "relative": int((odd | (size > 1e-3 * torch.maximum(a.abs(), b.abs()))).sum()),
        "change_norm": math.sqrt(energy),
        "base_norm": float(kept.norm()),
        "energy": {s: float((top[: max(1, round(s * len(a)))] ** 2).sum()) / energy for s in SHARES}
        if energy
        else {},
        "participation": energy**2 / float((tau**4).sum()) if energy else None,
        "decile": float(changed[order[: len(a) // 10]].sum()) / max(1, int(changed.sum())),
        "cut": float(top[count - 1]),
        "tied": int((size.float() == top[count - 1].float()).sum()),
    }


def assert_close(actual, expected, rtol=1e-6):
    assert actual == pytest.approx(expected, rel=rtol)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3"])
@pytest.mark.parametrize("step", [3e-6, 3e-4, 1.0])
def test_every_number_agrees_with_dense_arithmetic(tmp_path, dtype, step):
    stored = TORCH_DTYPES[dtype]
    if dtype == "F8_E4M3":
        step *= 10  # eight bits see no smaller steps
    before = {n: t.to(stored) for n, t in weights(dtype=torch.float32, std=0.5).items()}
    after = {n: t.to(stored) for n, t in moved({n: t.float() for n, t in before.items()}, step).items()}
    pair = save(tmp_path / "base", before), save(tmp_path / "tuned", after)
    found = report_of(*pair, threads=2)
    entries = {e["name"]: (e, before[e["name"]], after[e["name"]]) for e in found["tensors"]}
    entries |= {e["kind"]: (e, *joined(before, after, e["kind"])) for e in found["kinds"]}
    total = torch.cat([t.float().flatten() if dtype != "F64" else t.flatten() for t in before.values()])
    moved_total = torch.cat([t.float().flatten() if dtype != "F64" else t.flatten() for t in after.values()])
    entries["all"] = (found["total"], total, moved_total)
    for entry, a, b in entries.values():
        expected = dense(a, b, dtype)
        for rule in ("equality", "absolute", "relative"):
            assert entry["changed"][rule] == expected[rule]
        assert_close(entry["change_norm"], expected["change_norm"])
        assert_close(entry["base_norm"], expected["base_norm"])
        for share, value in expected["energy"].items():
            low, high = entry["energy_share"][f"{share:g}"]
            assert low * (1 - 1e-6) <= value <= high * (1 + 1e-6)
            assert high - low <= 0.02 * value
        if expected["participation"]:
            assert_close(entry["participation_ratio"], expected["participation"])
    expected = dense(total, moved_total, dtype)
    if expected["energy"]:
        for share, value in expected["energy"].items():
            assert_close(found["total"]["energy_share"][f"{share:g}"][0], value)
    assert_close(found["cuts"]["0.01"]["value"], expected["cut"])
    assert found["cuts"]["0.01"]["tied"] == expected["tied"]


def joined(before, after, kind):
    """All tensors of a kind in one vector."""
    names = [
        n for n in before if n.removesuffix(".weight").endswith(kind) and (kind != "norm" or "layers" in n)
    ]
    wide = torch.float64 if next(iter(before.values())).dtype == torch.float64 else torch.float32
    return tuple(torch.cat([side[n].to(wide).flatten() for n in names]) for side in (before, after))


def test_parts_add_up_to_the_whole(tmp_path):
    before = weights()
    pair = save(tmp_path / "base", before), save(tmp_path / "tuned", moved(before, 1e-3, share=0.3))
    found = report_of(*pair, threads=2)
    for parts in ("tensors", "kinds", "layers"):
        for count in ("parameters", "unchanged", "could_not_show", "bits_only", "non_finite"):
            assert sum(e[count] for e in found[parts]) == found["total"][count], (parts, count)
        for rule in ("equality", "absolute", "relative"):
            assert sum(e["changed"][rule] for e in found[parts]) == found["total"]["changed"][rule]
        assert_close(sum(e["change_norm"] ** 2 for e in found[parts]), found["total"]["change_norm"] ** 2)
        assert_close(sum(e["base_norm"] ** 2 for e in found[parts]), found["total"]["base_norm"] ** 2)
    assert found["total"]["parameters"] == sum(math.prod(s) for s in NAMES.values())
    # A mean that is not weighted would be another number here.
    share = sum(e["parameters"] * e["changed_share"]["equality"] for e in found["tensors"])
    assert_close(found["total"]["changed_share"]["equality"], share / found["total"]["parameters"])
    by_magnitude = found["by_magnitude"]
    assert sum(row["weights"] for row in by_magnitude) == found["total"]["parameters"]
    assert sum(row["changed"] for row in by_magnitude) == found["total"]["changed"]["equality"]


def test_results_do_not_depend_on_the_number_of_threads(tmp_path):
    before = weights()
    pair = save(tmp_path / "base", before), save(tmp_path / "tuned", moved(before, 1e-3))
    assert report_of(*pair, threads=1) == report_of(*pair, threads=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("room", [0, 7, 2**20], ids=["none", "few", "all"])
def test_cuts_are_the_same_whether_sizes_were_kept_or_are_read_again(tmp_path, monkeypatch, dtype, room):
    before = weights(dtype=dtype)
    after = moved(before, 1e-3, share=0.5)
    pair = save(tmp_path / "base", before), save(tmp_path / "tuned", after)
    monkeypatch.setattr("ceilings.delta_scan._FEW", room)
    monkeypatch.setattr("ceilings.delta_scan._FEW_IN", 2**40)
    found = report_of(*pair)["cuts"]
    sizes = torch.cat([(after[n].double() - before[n].double()).abs().float().flatten() for n in NAMES])
    ordered = sizes.sort(descending=True).values
    for share in SHARES:
        cut, size = found[f"{share:g}"], max(1, round(share * len(sizes)))
        assert cut["value"] == float(ordered[size - 1]), share
        assert cut["above"] == int((sizes > ordered[size - 1]).sum()), share
        assert cut["tied"] == int((sizes == ordered[size - 1]).sum()), share


def test_blocks_join_without_a_seam(tmp_path, monkeypatch):
    before = weights()
    pair = save(tmp_path / "base", before), save(tmp_path / "tuned", moved(before, 1e-3))
    whole = report_of(*pair)
    monkeypatch.setattr("ceilings.delta_scan._BLOCK", 7)
    pieces = report_of(*pair)
    assert pieces["cuts"] == whole["cuts"] and pieces["energy_curve"].keys() == whole["energy_curve"].keys()
    for a, b in zip(pieces["tensors"], whole["tensors"], strict=True):
        assert a["changed"] == b["changed"]
        assert_close(a["change_norm"], b["change_norm"], 1e-12)


def test_zeros_of_either_sign_and_nan_of_any_payload_are_unchanged():
    bits = torch.tensor([0x0000, -0x8000, 0x7FC0, 0x7FC1, 0x7F80, 0x3F80, 0x7F80, 0x3F80], dtype=torch.int16)
    other = torch.tensor(
        [-0x8000, 0x0000, 0x7FC5, -0x0001, 0x7F80, 0x7FC0, -0x0080, 0x3F81], dtype=torch.int16
    )
    found = scan(bits.view(torch.bfloat16), other.view(torch.bfloat16), "BF16")
    # Two zeros and two NaN; then inf = inf, 1 → NaN, inf → −inf, 1 → the next number.
    assert (found.bits_only, found.equality, found.non_finite) == (4, 3, 2)
    assert (found.absolute, found.relative) == (3, 3)
    assert found.square == 2.0**-14 and found.base_square == 2.0
    for dtype in ("F16", "F32", "F64"):
        a, b = (t.view(torch.bfloat16).to(TORCH_DTYPES[dtype]) for t in (bits, other))
        again = scan(a, b, dtype)
        assert (again.equality, again.non_finite, again.square, again.base_square) == (3, 2, 2.0**-14, 2.0)


def test_rules_one_and_three_coincide_in_bfloat16_and_not_in_float32():
    """All neighbours of all bfloat16 numbers: every smallest possible change."""
    bits = torch.arange(0x7F7F, dtype=torch.int16)
    found = scan(bits.view(torch.bfloat16), (bits + 1).view(torch.bfloat16), "BF16")
    assert found.equality == found.relative == len(bits)
    assert found.absolute < found.equality
    wide = scan(torch.ones(4), torch.ones(4) + 1e-4, "F32")
    assert (wide.equality, wide.absolute, wide.relative) == (4, 4, 0)
    small = scan(torch.full((4,), 1e-6), torch.full((4,), 2e-6), "F32")
    assert (small.equality, small.absolute, small.relative) == (4, 0, 4)


def test_one_training_leaves_three_counts_in_three_ways_to_store_it(tmp_path):
    """768 weights of a norm, all 1, under Adam: float32, a float32 copy that is saved in bfloat16, bfloat16 alone."""
    g = torch.Generator().manual_seed(0)
    drift, noise = torch.randn(768, generator=g), torch.randn(100, 768, generator=g)
    kept = {}
    for word, master, stored in (
        ("float32", torch.float32, torch.float32),
        ("copy", torch.float32, torch.bfloat16),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
    ):
        weight = torch.ones(768, dtype=master)
        optimiser = torch.optim.Adam([weight], lr=1e-4)
        for step in noise:
            weight.grad = (drift + step).to(master)
            optimiser.step()
        kept[word] = weight
        before = save(tmp_path / f"{word}-before", {"norm.weight": torch.ones(768, dtype=stored)})
        after = save(tmp_path / f"{word}-after", {"norm.weight": weight.to(stored)})
        kept[f"{word}, counted"] = report_of(before, after, rank=False)["total"]["changed"]["equality"]
    # No step of Adam is longer than 3.2 times its rate, which is far below half the gap under 1, 2⁻⁹.
    assert kept["bfloat16, counted"] == 0 and bool((kept["bfloat16"] == 1).all())
    # The copy shows what has gone past half a gap: 2⁻⁹ down, 2⁻⁸ up; on the edge the even neighbour is 1 itself.
    shown = int(((kept["float32"] < 1 - 2**-9) | (kept["float32"] > 1 + 2**-8)).sum())
    assert kept["copy, counted"] == shown and 100 < shown < 700
    assert kept["float32, counted"] == 768


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_the_least_visible_step_is_where_rounding_begins_to_show_it(dtype):
    """Every number of the format, one step just below and one just above the threshold, both ways."""
    stored = TORCH_DTYPES[dtype]
    numbers = (
        torch.arange(256).byte().view(stored)
        if stored.itemsize == 1
        else torch.arange(0x7F00).short().view(stored)
    )
    numbers = numbers.double()
    numbers = numbers[numbers.isfinite() & (numbers >= 0)]
    largest = float(numbers.max())
    numbers = numbers[(numbers < largest / 2) & (numbers > 2.0**-100)]
    bucket = numbers.bfloat16().view(torch.int16).long()
    threshold = 2.0 ** torch.from_numpy(half_gap_exponents(dtype))[bucket].double()

    def shown(step):
        return torch.stack([(numbers + sign * step).to(stored).double() != numbers for sign in (-1, 1)])

    assert not shown(0.99 * threshold).any()
    assert shown(1.01 * threshold).any(0).all()


def test_hidden_weights_are_those_whose_gap_is_wider_than_the_median_step(tmp_path):
    base = {"w": torch.tensor([1.0, 1.5, 2.0, 3.0, 0.01, 0.01, 0.01, 300.0]).bfloat16()}
    tuned = {"w": base["w"].clone()}
    tuned["w"][4:6] += 2.0**-10
    found = report_of(save(tmp_path / "base", base), save(tmp_path / "tuned", tuned))
    step = 2.0**-10
    # Half gaps: 1.5 → 2⁻⁸; 1 and 2 towards zero → 2⁻⁹, 2⁻⁸; 3 → 2⁻⁷; 300 → 1; 0.01 → 2⁻¹⁵.
    assert found["median_step"] == step
    assert found["total"]["unchanged"] == 6 and found["total"]["could_not_show"] == 5


def test_changes_on_the_smallest_weights_are_counted_against_a_tenth():
    a = torch.linspace(0.01, 1, 1000).bfloat16()
    b = a.clone()
    b[:50] *= 2  # the smallest twentieth
    assert scan(a, b, "BF16").smallest_decile() == pytest.approx(1.0)
    b = a.clone()
    b[::10] *= 2
    assert scan(a, b, "BF16").smallest_decile() == pytest.approx(0.1, abs=0.02)
    ties = torch.ones(1000).bfloat16()
    other = ties.clone()
    other[:300] = 2
    assert scan(ties, other, "BF16").smallest_decile() == pytest.approx(0.1), "ties count in proportion"


def test_a_mere_change_of_format_is_no_change_unless_one_asks_in_the_finer_format(tmp_path):
    fine = {n: t.float() for n, t in weights(dtype=torch.float32).items()}
    coarse = {n: t.bfloat16() for n, t in fine.items()}
    base, tuned = save(tmp_path / "base", fine), save(tmp_path / "tuned", coarse)
    found = report_of(base, tuned)
    assert found["compared_in"] == {"BF16": found["total"]["parameters"]}
    assert found["total"]["changed"]["equality"] == 0
    asked = report_of(base, tuned, dtype="F32")
    expected = sum(int((fine[n] != coarse[n].float()).sum()) for n in fine)
    assert asked["total"]["changed"]["equality"] == expected > 0.9 * found["total"]["parameters"]
    # A silent upcast on load: the child is the base in float32.
    up = save(tmp_path / "up", {n: t.float() for n, t in coarse.items()})
    assert report_of(tuned, up)["total"]["changed"]["equality"] == 0
    assert coarser("F16", "BF16") == coarser("BF16", "F32") == "BF16"


def test_zero_training_from_a_four_bit_base_changes_nothing_but_seems_to(tmp_path):
    """Numbers on a grid of 16 values a block: few of them are exact in bfloat16."""
    g = torch.Generator().manual_seed(0)
    scale, least = torch.rand(500, 1, generator=g), -torch.rand(500, 1, generator=g)
    base = {"w": least + scale / 15 * torch.randint(16, (500, 32), generator=g)}
    same = save(tmp_path / "same", base)
    child = save(tmp_path / "child", {"w": base["w"].bfloat16()})
    start = save(tmp_path / "base", base)
    assert report_of(start, same)["total"]["changed"]["equality"] == 0
    assert report_of(start, child)["total"]["changed"]["equality"] == 0
    assert report_of(start, child, dtype="F32")["total"]["changed_share"]["equality"] > 0.7


def test_tied_heads_count_once_in_every_combination(tmp_path):
    before = weights()
    after = moved(before, 1e-2)
    totals = set()
    for k, (twice_before, twice_after) in enumerate(itertools.product((False, True), repeat=2)):
        sides = []
        for word, state, twice in (("base", before, twice_before), ("tuned", after, twice_after)):
            state = dict(state)
            if twice:
                state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
            sides.append(save(tmp_path / f"{word}{k}", state, {"tie_word_embeddings": True}))
        found = report_of(*sides)
        assert found["matching"]["coverage"] == 1 and not found["matching"]["added"]
        totals.add((found["total"]["parameters"], found["total"]["changed"]["equality"]))
    assert len(totals) == 1


def test_untied_heads(tmp_path):
    before = weights()
    head = {"lm_head.weight": before["model.embed_tokens.weight"] * 2}
    tied, untied = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
    one = save(tmp_path / "tied", before, tied)
    two = save(tmp_path / "untied", before | head, untied)
    found = report_of(two, two)
    assert found["total"]["parameters"] == report_of(one, one)["total"]["parameters"] + 480
    grown = report_of(one, two)
    assert [e["name"] for e in grown["matching"]["added"]] == ["lm_head.weight"]
    assert (
        "tied to model.embed_tokens.weight in BASE and a matrix of its own" in grown["matching"]["notes"][0]
    )
    shrunk = report_of(two, one)
    assert shrunk["matching"]["coverage"] == 1
    assert "compared with 2 tensors of BASE" in shrunk["matching"]["notes"][0]
    changed = {e["name"]: e["changed"]["equality"] for e in shrunk["tensors"]}
    assert changed["lm_head.weight"] > 400 and changed["model.embed_tokens.weight"] == 0


@pytest.mark.parametrize("rows", [44, 38])
def test_a_vocabulary_that_grew_or_shrank_is_compared_on_common_rows(tmp_path, rows):
    before = weights()
    after = dict(before)
    table = torch.full((rows, 12), 0.5).bfloat16()
    common = min(rows, 40)
    table[:common] = before["model.embed_tokens.weight"][:common]
    table[1] = 0.25
    after["model.embed_tokens.weight"] = table
    found = report_of(save(tmp_path / "base", before), save(tmp_path / "tuned", after))
    assert found["matching"]["rows"] == [
        {
            "name": "model.embed_tokens.weight",
            "common": common,
            "added": max(0, rows - 40),
            "removed": max(0, 40 - rows),
        }
    ]
    assert found["total"]["changed"]["equality"] == 12
    all_of_them = sum(math.prod(s) for s in NAMES.values())
    assert found["matching"]["coverage"] == 1 - 12 * max(0, 40 - rows) / all_of_them


def test_other_shapes_are_not_compared(tmp_path):
    before = weights()
    after = before | {"model.layers.0.mlp.up_proj.weight": torch.ones(31, 12).bfloat16()}
    base, tuned = save(tmp_path / "base", before), save(tmp_path / "tuned", after)
    matching = match(base, tuned)
    assert matching.other_shape == {"model.layers.0.mlp.up_proj.weight": ((30, 12), (31, 12))}
    with pytest.raises(
        ValueError, match=r"tuned: only 76.* % .*'model.layers.0.mlp.up_proj.weight'.*--min-coverage"
    ):
        matching.check(0.99, "tuned")
    matching.check(0.7, "tuned")


@pytest.mark.parametrize(
    "prefix", ["base_model.model.", "_orig_mod.", "module.", "module._orig_mod.", "-model."]
)
def test_prefixes_of_wrappers_come_off_and_nothing_else_matches(tmp_path, prefix):
    before = weights()
    after = moved(before, 1e-2)
    if prefix[0] == "-":
        renamed = {n.removeprefix(prefix[1:]): t for n, t in after.items()}
    else:
        renamed = {prefix + n: t for n, t in after.items()}
    base, plain = save(tmp_path / "base", before), save(tmp_path / "plain", after)
    other = save(tmp_path / "other", renamed)
    for sides in ((base, other), (other, base)):
        found = match(*sides)
        assert found.coverage == 1 and found.renamed == len(NAMES)
    assert report_of(base, other)["total"] == report_of(base, plain)["total"]
    strange = save(tmp_path / "strange", {f"my_{n}": t for n, t in after.items()})
    with pytest.raises(ValueError, match="share no tensor of the same name"):
        match(base, strange)


def test_ambiguous_names_are_refused(tmp_path):
    w = torch.ones(2, 2)
    base = save(tmp_path / "base", {"a.weight": w})
    tuned = save(tmp_path / "tuned", {"module.a.weight": w, "model.a.weight": 2 * w})
    with pytest.raises(ValueError, match=r"TUNED: 'model.a.weight' and 'module.a.weight' have the same name"):
        match(base, tuned)


def test_whole_numbers_are_compared_as_such_and_odd_formats_refused(tmp_path):
    w = {"w": torch.ones(2, 2)}
    base = save(tmp_path / "base", w | {"ids": torch.arange(5)})
    tuned = save(tmp_path / "tuned", w | {"ids": torch.tensor([0, 1, 9, 3, 9])})
    found = diff_of(base, tuned)
    assert found.integers == {"ids": 2} and found.total.tally.parameters == 4
    odd = save(tmp_path / "odd", w | {"ids": torch.ones(5)})
    with pytest.raises(ValueError, match=r"base/model.safetensors: 'ids' is stored as I64.*F32.*convert"):
        diff_of(base, odd)
    only = save(tmp_path / "only", {"ids": torch.arange(5)})
    with pytest.raises(ValueError, match="no tensor with floating numbers"):
        diff_of(only, only)


def families():
    """Matrices with known kinds of spectra."""
    g = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    slow = torch.arange(1, 151).float() ** -0.7
    yield "flat", normal(200, 150)
    yield "one direction", 0.01 * normal(200, 150) + normal(200, 1) @ normal(1, 150)
    yield "rank 16", normal(150, 16) @ normal(16, 200)
    yield "power law", torch.linalg.qr(normal(200, 150)).Q * slow @ torch.linalg.qr(normal(150, 150)).Q


@pytest.mark.parametrize("exact", [True, False])
def test_singular_energies_agree_with_the_singular_values(monkeypatch, exact):
    monkeypatch.setattr("ceilings.spectrum._BLOCK", 1000)
    monkeypatch.setattr("ceilings.spectrum._EXACT", 1024 if exact else 0)
    for name, matrix in families():
        found = spectrum(lambda rows, columns, matrix=matrix: matrix[rows, columns], *matrix.shape)
        energies = torch.linalg.svdvals(matrix.double()).square()
        assert found.exact is exact
        assert_close(found.energy, float(energies.sum()))
        for k in (1, 8, 64):
            truth = float(energies[:k].sum())
            if exact:
                assert_close(found.top[k], truth, 1e-12)
            else:
                assert truth - found.error[k] - 1e-5 * truth <= found.top[k] <= truth * (1 + 1e-5), (name, k)
                assert found.error[k] <= 0.05 * truth
    assert spectrum(lambda rows, columns: torch.zeros(200, 150)[rows, columns], 200, 150) is None


def test_the_default_number_format_of_the_session_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr("ceilings.spectrum._EXACT", 0)
    before = weights()
    pair = save(tmp_path / "base", before), save(tmp_path / "tuned", moved(before, 1e-3))
    plain = report_of(*pair)
    torch.set_default_dtype(torch.float64)
    try:
        assert report_of(*pair) == plain
    finally:
        torch.set_default_dtype(torch.float32)


def test_random_changes_have_the_stable_rank_that_is_named_beside():
    g = torch.Generator().manual_seed(0)
    for shape in ((400, 300), (600, 100)):
        noise = torch.randn(shape, generator=g)
        found = spectrum(lambda rows, columns, noise=noise: noise[rows, columns], *shape)
        assert found.stable_rank == pytest.approx(random_stable_rank(*shape), rel=0.05)


def test_a_rank_one_change_rounded_to_bfloat16_is_of_full_rank_and_its_stable_rank_is_one(tmp_path):
    """The trap of the rank: what rounding adds is small and fills every direction."""
    g = torch.Generator().manual_seed(0)
    base = {"w": (0.02 * torch.randn(128, 128, generator=g)).bfloat16()}
    step = 1e-2 * torch.randn(128, 1, generator=g) @ torch.randn(1, 128, generator=g)
    tuned = {"w": (base["w"].float() + step).bfloat16()}
    delta = tuned["w"].float() - base["w"].float()
    assert int(torch.linalg.matrix_rank(delta)) > 100
    found = report_of(save(tmp_path / "base", base), save(tmp_path / "tuned", tuned))["tensors"][0][
        "spectrum"
    ]
    assert found["stable_rank"] < 1.01 and found["top_energy"]["1"] > 0.99


def brute_overlaps(sides_a, sides_b, first, second):
    """All overlaps that some choice among the ties gives, by trying every one."""
    entries = range(len(sides_a))
    sure = [{k for k in entries if s[k] == 2} for s in (sides_a, sides_b)]
    open_ = [[k for k in entries if s[k] == 1] for s in (sides_a, sides_b)]
    return {
        len((sure[0] | set(a)) & (sure[1] | set(b)))
        for a in itertools.combinations(open_[0], first)
        for b in itertools.combinations(open_[1], second)
    }


def test_the_interval_that_ties_leave_open_is_attained_and_not_exceeded():
    g = torch.Generator().manual_seed(0)
    for _ in range(60):
        a, b = torch.randint(0, 3, (2, 8), generator=g).tolist()
        counts = torch.zeros(3, 3, dtype=torch.int64)
        for i, j in zip(a, b, strict=True):
            counts[i, j] += 1
        for first, second in itertools.product(range(a.count(1) + 1), range(b.count(1) + 1)):
            possible = brute_overlaps(a, b, first, second)
            assert open_overlap(counts, first, second) == (min(possible), max(possible))


def test_cuts_are_exact_with_ties():
    g = torch.Generator().manual_seed(0)
    for values in (torch.rand(5000, generator=g), torch.randint(0, 9, (5000,), generator=g).float() / 7):
        patterns = values.view(torch.int32)
        counts = torch.bincount(patterns >> 16, minlength=2**15)
        for size in (1, 50, 4999, 5000):
            finder = CutFinder(counts, size)
            half = finder.empty()
            half.add(patterns[:2000])
            finder.add(patterns[2000:])
            finder += half
            cut = finder.cut()
            level = values.sort(descending=True).values[size - 1]
            assert cut.value == float(level)
            assert (cut.above, cut.tied) == (int((values > level).sum()), int((values == level).sum()))


def test_a_bucket_of_equal_sizes_is_not_read_again(tmp_path, monkeypatch):
    g = torch.Generator().manual_seed(0)
    # Whole steps of a 128th, as one power of two of a 16-bit format has them.
    before = {"w": (1 + torch.randint(64, (40, 50), generator=g) / 128).bfloat16()}
    after = {"w": (before["w"].float() + torch.randint(60, (40, 50), generator=g) / 128).bfloat16()}
    base, tuned = save(tmp_path / "base", before), save(tmp_path / "tuned", after)
    once = diff_of(base, tuned, rank=False)
    monkeypatch.setattr(CutFinder, "settled", property(lambda _: False, lambda *_: None), raising=False)
    twice = diff_of(base, tuned, rank=False)
    assert once.cuts == twice.cuts
    for share in SHARES:
        assert_close(once.top_energy[share], twice.top_energy[share], 1e-12)
    monkeypatch.undo()
    steps = []
    compare(
        base, tuned, match(base, tuned), rank=False, progress=lambda what, done, total: steps.append(what)
    )
    assert steps == ["comparing"]


def test_overlaps_agree_with_sets(tmp_path):
    before = weights()
    after = [moved(before, 3e-4, seed=k, share=0.4) for k in (1, 2)]
    base = save(tmp_path / "base", before)
    tuned = [save(tmp_path / f"t{k}", state) for k, state in enumerate(after)]
    diffs = [diff_of(base, side, rank=False) for side in tuned]
    found = describe_overlap(["a", "b"], count_overlap(base, tuned, diffs, threads=2)[0, 1], diffs)
    flat = [torch.cat([(s[n].float() - before[n].float()).flatten() for n in NAMES]).abs() for s in after]
    masks = [f > 0 for f in flat]
    both = int((masks[0] & masks[1]).sum())
    assert found["changed"]["both"] == both
    assert found["changed"]["shares"] == [both / int(m.sum()) for m in masks]
    assert found["changed"]["jaccard"] == both / int((masks[0] | masks[1]).sum())
    assert found["changed"]["chance"] == [float(m.double().mean()) for m in masks[::-1]]
    chance = sum(
        float((after[0][n] != before[n]).sum() * (after[1][n] != before[n]).sum()) / before[n].numel()
        for n in NAMES
    )
    assert_close(found["changed"]["chance_per_tensor"][0], chance / int(masks[0].sum()))
    size = round(0.01 * len(flat[0]))
    tops = [set(f.topk(size).indices.tolist()) for f in flat]
    low, high = found["top_percent"]["share"]
    assert low <= len(tops[0] & tops[1]) / size <= high
    assert found["top_percent"]["chance"] == size / len(flat[0])


def test_overlap_of_a_fine_tune_with_itself_is_open_only_by_ties(tmp_path):
    before = weights(dtype=torch.float32)
    base, tuned = save(tmp_path / "base", before), save(tmp_path / "tuned", moved(before, 1e-3))
    diffs = [diff_of(base, tuned, rank=False)] * 2
    found = describe_overlap(["a", "b"], count_overlap(base, [tuned, tuned], diffs)[0, 1], diffs)
    assert found["changed"]["shares"] == [1, 1] and found["top_percent"]["share"] == [1, 1]


def test_members_that_only_one_fine_tune_could_have_are_not_shared(tmp_path):
    before = weights(dtype=torch.float32)
    first = moved(before, 1e-3)
    second = {n: t for n, t in first.items() if n != "model.layers.1.mlp.up_proj.weight"}
    base = save(tmp_path / "base", before)
    tuned = [save(tmp_path / "one", first), save(tmp_path / "two", second)]
    diffs = [diff_of(base, side, rank=False) for side in tuned]
    counts = count_overlap(base, tuned, diffs)[0, 1]
    assert counts.parameters == diffs[1].total.tally.parameters
    for side, diff in ((counts.sides.sum(1), diffs[0]), (counts.sides.sum(0), diffs[1])):
        assert int(side[2]) == diff.cuts[0.01].above and int(side[1]) == diff.cuts[0.01].tied


def adapter(folder, tensors, **config):
    """A PEFT folder."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": "some/base"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def lora(module, out, inside, rank=2, seed=5, embedding=False):
    """A and B of one module, under the names that PEFT saves."""
    g = torch.Generator().manual_seed(seed)
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    return {
        f"base_model.model.{module}.{names[0]}": torch.randn(rank, inside, generator=g),
        f"base_model.model.{module}.{names[1]}": torch.randn(out, rank, generator=g),
    }


def parts(tensors):
    """A and B in float64."""
    return (next(t.double() for n, t in tensors.items() if f"_{part}" in n) for part in "AB")


MODULE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"alpha_pattern": {"up_proj": 1}}, 0.5),
        ({"alpha_pattern": {"layers.1.mlp.up_proj": 1, "down": 4}}, 3.0),
        ({"alpha_pattern": {r"layers\.\d\.mlp.*": 5}, "use_rslora": True}, 5 / math.sqrt(2)),
    ],
)
def test_the_change_of_an_adapter_is_scaling_times_b_a(tmp_path, config, scaling):
    before = weights(dtype=torch.float32)
    base = save(tmp_path / "base", before)
    stored = lora(MODULE, 30, 12)
    found = open_adapter(adapter(tmp_path / "adapter", stored, **config), base)
    a, b = parts(stored)
    expected = before[f"{MODULE}.weight"].double() + scaling * b @ a
    assert torch.allclose(found.tensor(f"{MODULE}.weight").double(), expected, rtol=1e-6)
    for name in set(NAMES) - {f"{MODULE}.weight"}:
        assert torch.equal(found.tensor(name), before[name])
    report = report_of(base, found)
    changed = {e["name"]: e["changed"]["equality"] for e in report["tensors"] if e["changed"]["equality"]}
    assert changed == {f"{MODULE}.weight": 360}
    tensor = next(e for e in report["tensors"] if e["name"] == f"{MODULE}.weight")
    assert_close(tensor["change_norm"], float((scaling * b @ a).norm()))
    assert tensor["spectrum"]["top_energy"]["8"] == pytest.approx(1.0)
    assert "rank 2" in describe_side(found, "x")["notes"][0] and "'some/base'" in found.notes[0]


def test_an_adapter_on_bfloat16_is_what_a_merge_would_store(tmp_path):
    before = weights()
    base = save(tmp_path / "base", before)
    stored = {n: 1e-2 * t for n, t in lora(MODULE, 30, 12).items()}
    report = report_of(base, open_adapter(adapter(tmp_path / "adapter", stored), base))
    a, b = parts(stored)
    merged = before | {
        f"{MODULE}.weight": (before[f"{MODULE}.weight"].double() + 3 * b @ a).float().bfloat16()
    }
    assert report["compared_in"].keys() == {"BF16"}
    assert report["total"] == report_of(base, save(tmp_path / "merged", merged))["total"]


def test_embeddings_turned_matrices_and_whole_tensors_of_an_adapter(tmp_path):
    before = weights(dtype=torch.float32)
    base = save(tmp_path / "base", before, {"tie_word_embeddings": True})
    stored = lora("model.embed_tokens", 12, 40, embedding=True)
    new = torch.full((12,), 0.5)
    found = open_adapter(
        adapter(tmp_path / "a", stored | {"base_model.model.model.norm.weight": new}, use_dora=False), base
    )
    a, b = parts(stored)
    expected = before["model.embed_tokens.weight"].double() + 3 * (b @ a).T
    assert torch.allclose(found.tensor("lm_head.weight").double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.tensor("model.norm.weight"), new)
    turned = lora(MODULE, 12, 30)  # inputs as rows
    found = open_adapter(adapter(tmp_path / "b", turned, fan_in_fan_out=True), base)
    a, b = parts(turned)
    expected = before[f"{MODULE}.weight"].double() + 3 * (b @ a).T
    assert torch.allclose(found.tensor(f"{MODULE}.weight").double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "adapters of the kind 'IA3' are not supported"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "LoRA with biases"),
        ({"layer_replication": [[0, 1]]}, "replicated layers"),
        ({"target_parameters": ["experts"]}, "outside of linear layers"),
        ({"trainable_token_indices": [1]}, "trained tokens"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base as well"),
    ],
)
def test_adapters_whose_change_is_something_else_are_refused(tmp_path, config, said):
    base = save(tmp_path / "base", weights())
    folder = adapter(tmp_path / "adapter", lora(MODULE, 30, 12), **config)
    with pytest.raises(ValueError, match=rf"adapter_config.json: .*{said}.*merge it into the base"):
        open_adapter(folder, base)


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    base = save(tmp_path / "base", weights())

    def refusal(tensors, **config):
        with pytest.raises(ValueError) as caught:
            open_adapter(adapter(tmp_path / "adapter", tensors, **config), base)
        return str(caught.value)

    said = refusal(lora("model.layers.7.mlp.up_proj", 30, 12))
    assert "adapter_model.safetensors" in said and "'model.layers.7.mlp.up_proj.weight'" in said
    said = refusal(lora(MODULE, 31, 12))
    assert "[31, 2] × [2, 12]" in said and "[30, 12]" in said and "trained on" in said
    only = {n: t for n, t in lora(MODULE, 30, 12).items() if "lora_A" in n}
    assert "only one of the two matrices" in refusal(only)
    conv = {n: t[:, :, None, None] for n, t in lora(MODULE, 30, 12).items()}
    assert "is a convolution" in refusal(conv)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json is not JSON"):
        open_adapter(tmp_path / "adapter", base)
    folder = adapter(tmp_path / "empty", lora(MODULE, 30, 12))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no adapter_model.safetensors"):
        open_adapter(folder, base)


def test_every_float_format_has_a_grid():
    assert set(GRIDS) == {
        code for code, dtype in TORCH_DTYPES.items() if dtype.is_floating_point and code != "F8_E8M0"
    }


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("count", [1, 3, 8, 1000, 1003])
def test_entries_that_differ_are_found_whether_few_or_many(dtype, share, count):
    draw = torch.Generator().manual_seed(count)
    base = torch.randint(0, 200, (count,), generator=draw).to(dtype)
    moved = torch.rand(count, generator=draw) < share
    moved[-1] = share > 0  # the last entries may fill no eight bytes
    tuned = torch.where(moved, base + 1, base)
    assert delta_scan._where_bits_differ(base, tuned).tolist() == moved.nonzero().flatten().tolist()


def test_entries_that_differ_are_found_off_the_grid_of_eight_bytes():
    whole = torch.arange(64).bfloat16()
    base, tuned = whole[1:40], (whole + (whole % 7 == 0))[1:40]
    assert delta_scan._where_bits_differ(base, tuned).tolist() == [6, 13, 20, 27, 34]


def test_the_collector_rests_in_a_process_of_its_own_only(tmp_path, monkeypatch):
    # Frozen, the garbage of an earlier command in this process could not be collected.
    frozen, arguments = [], ["diff", str(tmp_path), str(tmp_path)]
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.setattr("sys.argv", ["ceilings", *arguments])
    for expected, given in (([], arguments), ([False], None)):
        assert cli.main(given) == 2
        assert frozen == expected and gc.isenabled()
