"""Sums sharded by rows over two processes: together they are the sums of one, and no process held more than its own."""

import json

import pytest
import torch

import pair_sharded
from ceilings.moments import ScoreMoments
from ceilings.reference import loop_score_moments
from ceilings.sharded_sums import load_rows, row_block
from ceilings.testing import assert_equal
from pair import run_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for code, _, complained in run_pair(pair_sharded.sharded, folder):
        assert code == 0 and "returned a view" not in complained, complained
    return folder


@pytest.fixture
def expected(monkeypatch):
    """One backward pass a sequence, on one process with whole weights."""

    def expect(case):
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        monkeypatch.setattr(LlamaRMSNorm, "forward", pair_sharded.in_float64)
        ids, mask, rewards, attention = pair_sharded.batch()
        model, _ = pair_sharded.build(case)
        return loop_score_moments(model.eval(), ids, mask, rewards, attention_mask=attention)

    return expect


@pytest.mark.parametrize("case", pair_sharded.CASES)
def test_rows_of_both_processes_are_the_sums_of_the_loop(folder, expected, case):
    exact = expected(case)
    found = load_rows(folder / case)
    assert found.names == exact.names and found.count == 9
    exact = exact.shifted(found.reward_shift)
    for part in ("scores", "squares", "reward_scores"):
        for name in exact.names:
            assert_equal(getattr(found, part)[name], getattr(exact, part)[name], rtol=1e-10)
    assert_equal(found.reward_sum, exact.reward_sum, rtol=1e-12, atol=1e-12)
    assert_equal(found.reward_squares, exact.reward_squares, rtol=1e-12)


def test_each_process_can_derive_its_own_rows(folder, expected):
    exact = expected("tied")
    for rank in range(2):
        part = load_rows(folder / "tied", rank)
        for found, whole in (
            (part.gradient("reward_1"), exact.gradient("reward_1")),
            (part.ceiling("reward_1"), exact.ceiling("reward_1")),
        ):
            for name in exact.names:
                rows = row_block(len(whole[name]), rank, 2)
                assert_equal(found[name], whole[name][rows], rtol=1e-9)


def test_each_process_holds_its_rows_and_leaves_the_model_as_it_was(folder):
    total = load_rows(folder / "tied").num_parameters
    held = []
    for rank in range(2):
        notes = json.loads((folder / f"notes{rank}.json").read_text())
        assert notes.pop("refused").startswith("gain has no fast rule here")
        for case, (untouched, entries, trained) in notes.items():
            assert untouched and trained, case
            held += [entries] if case == "tied" else []
    assert sum(held) == total and max(held) < 0.55 * total


def test_blocks_are_those_of_fsdp2():
    for rows in range(12):
        for size in range(1, 6):
            blocks = [row_block(rows, rank, size) for rank in range(size)]
            chunks = torch.arange(rows).chunk(size) if rows else ()
            assert [torch.arange(rows)[b].tolist() for b in blocks if b.start < b.stop] == [
                c.tolist() for c in chunks
            ]


def test_only_the_newest_files_are_kept_and_a_missing_one_is_named(folder, tmp_path):
    names = sorted(p.name for p in (folder / "whole").iterdir())
    assert names == [
        "moments-9-00001-of-00002.safetensors",
        "moments-9-00002-of-00002.safetensors",
        "moments.index.json",
    ]
    with pytest.raises(ValueError, match="moments.index.json is missing"):
        load_rows(tmp_path)
    (tmp_path / names[2]).write_text((folder / "whole" / names[2]).read_text())
    with pytest.raises(ValueError, match="moments-9-00001-of-00002.safetensors is missing"):
        load_rows(tmp_path)
    (tmp_path / names[2]).write_text("{")
    with pytest.raises(ValueError, match="no complete moments of several processes"):
        load_rows(tmp_path)
    assert ScoreMoments.load(folder / "whole" / names[0]).count == 9
