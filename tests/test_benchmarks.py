"""The benchmark: it tells right from wrong, its arithmetic holds, its tables are its record. Nothing is timed."""

import json

import pytest
import torch

import cost_table
import diff_table
import score_moments
import tables
from methods import METHODS, Method, Sums
from workloads import exact_norms, exact_toy, llama

RECORD = json.loads(tables.RESULT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["vmap", "ours"])
def test_exact_methods_are_called_right(name):
    found = score_moments.compare(METHODS[name])
    assert found["state"] == "right" and found["moments"] == "all"
    assert max(max(found[kind].values()) for kind in ("tied", "untied")) < 1e-13


def test_the_loop_is_that_of_the_library():
    from ceilings.reference import loop_score_moments

    with exact_norms():
        work = exact_toy()
        expected = loop_score_moments(work.model, work.ids, work.mask, work.rewards)
        found = Sums.zeros(work.model)
        METHODS["loop"].run(work, found)
    for name, square in expected.squares.items():
        assert torch.allclose(found.scores[name], expected.scores[name], rtol=1e-10, atol=1e-12)
        assert torch.allclose(found.squares[name], square, rtol=1e-10, atol=1e-12)
        assert torch.allclose(found.reward_scores[name], expected.reward_scores[name][0], rtol=1e-10)


def test_a_fast_wrong_answer_is_called_wrong():
    def square_of_the_sum(work, sums):
        METHODS["loop"].run(work, sums)
        for name, score in sums.scores.items():
            sums.squares[name] = score.square()

    found = score_moments.compare(Method("quick", "quick", square_of_the_sum))
    assert found["state"] == "wrong" and found["tied"]["squares"] > 0.1
    assert tables._answer(found).startswith("**wrong** by")


def test_a_peer_that_is_missing_or_refuses_stops_nothing():
    def refuse(work, sums):
        raise NotImplementedError("only\nimages")

    missing = score_moments.compare(Method("a", "a", refuse, package="no_such_package_of_anybody"))
    assert missing["state"] == "not installed"
    refusing = score_moments.compare(Method("b", "b", refuse))
    assert refusing == {"state": "refuses", "reason": "NotImplementedError: only images"}
    assert torch.get_default_dtype() == torch.float32


def test_a_batch_adds_what_its_sequences_add():
    model = llama(num_hidden_layers=1, vocab_size=32)
    one, all_at_once = Sums.zeros(model), Sums.zeros(model)
    for name, parameter in model.named_parameters():
        scores, rewards = torch.randn(3, *parameter.shape), torch.tensor([0.5, -2.0, 1.0])
        for score, reward in zip(scores, rewards.tolist(), strict=True):
            one.add(name, score, reward)
        all_at_once.add_batch(name, scores.clone(), rewards)
    for part in score_moments.PARTS:
        for name, value in getattr(one, part).items():
            assert torch.allclose(getattr(all_at_once, part)[name], value, atol=1e-5)


def test_ratios_are_taken_round_by_round():
    found = score_moments.summary([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert found == {"median": 2.0, "rounds": [2.0, 3.0, 1.0]}


def test_the_largest_model_by_hand():
    assert cost_table.bytes_per_parameter(4) == 16 and cost_table.bytes_per_parameter(2) == 14
    gibibyte = 1_073_741_824
    assert cost_table.largest_model(24 * gibibyte, 4) == pytest.approx(0.9 * 24 * gibibyte / 16)
    assert cost_table.largest_model(80 * gibibyte, 2) == pytest.approx(0.9 * 80 * gibibyte / 14)


def test_the_arithmetic_of_memory_was_held_against_processes():
    checks = RECORD["memory_check"]
    assert {c["weight_bytes"] for c in checks} == {2, 4}
    assert len({c["parameters"] for c in checks}) >= 3 and max(c["parameters"] for c in checks) > 2.5e8
    for c in checks:
        assert c["computed_mb"] == pytest.approx(c["parameters"] * (c["weight_bytes"] + 12) / 2**20)
        assert c["computed_mb"] < c["measured_mb"] < c["computed_mb"] + 1100  # what a batch takes


def test_the_readme_shows_the_record():
    text = tables.README.read_text(encoding="utf-8")
    assert tables.with_tables(text, RECORD) == text, "run: python benchmarks/tables.py"
    assert diff_table.with_table(text) == text, "run: python benchmarks/tables.py"
    assert tables.main(["--check"]) == 0


def test_the_table_says_why_a_method_has_no_time():
    answers = {
        "floor": {"state": "no answer"},
        "loop": {"state": "right", "moments": "all", "tied": {"scores": 0.0}, "untied": {"scores": 0.0}},
        "vmap": {"state": "right", "moments": "all", "tied": {"scores": 0.0}, "untied": {"scores": 0.0}},
        "nngeometry": {"state": "refuses", "reason": "no embeddings"},
        "opacus": {"state": "not installed", "reason": "no module"},
    }
    ratio = {"median": 2.0, "rounds": [2.0, 2.0]}
    toy = {
        "parameters": 10,
        "sequences": 2,
        "tokens": 3,
        "times": {"floor": [1.0]},
        "ratios": {"floor": ratio, "loop": ratio},
        "refused": {"vmap": "no rule", "nngeometry": "no embeddings"},
    }
    text = tables._times({"models": {"toy": toy}, "answers": answers})
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in text.splitlines()[2:]}
    assert rows[METHODS["loop"].label] == "2.00 (2.00–2.00)"
    assert rows[METHODS["nngeometry"].label] == rows[METHODS["vmap"].label] == "refuses"
    assert rows[METHODS["opacus"].label] == "not installed"
    said = tables._remarks({"models": {"toy": toy}, "answers": answers})
    assert (
        said.count("no embeddings") == 1 and "torch.func, vmap(grad) refuses random Llama: `no rule`" in said
    )


def test_a_method_that_refuses_is_asked_by_every_model():
    def refuse(work, sums):
        raise NotImplementedError("no embeddings")

    with exact_norms():
        work = exact_toy()
    found = score_moments.measure(work, [METHODS["floor"], Method("b", "b", refuse)], 1)
    assert found["refused"] == {"b": "NotImplementedError: no embeddings"} and "b" not in found["times"]


def test_a_record_of_less_still_makes_a_table():
    partial = RECORD | {"models": {"toy": RECORD["models"]["toy"]}}
    for part in ("enumeration", "growth", "memory_check"):
        partial.pop(part, None)
    text = tables.render(partial)
    assert "SmolLM2-135M, " not in text and "| ceilings |" in text


def test_the_record_says_where_and_with_what_and_names_no_host():
    expected = {"date", "processor", "cores", "threads", "python", "versions", "rounds"}
    assert set(RECORD["setting"]) == set(score_moments.setting(1)) == expected
    assert RECORD["setting"]["threads"] == 1


def test_floor_and_loop_are_always_measured(capsys):
    with pytest.raises(SystemExit):
        score_moments.main(["--methods", "ours"])
    assert "must include floor and loop" in capsys.readouterr().err


def test_the_table_of_checkpoints_says_what_was_missed():
    side = {"wall": 2.0, "memory_mb": 100.0}
    size = {
        "parameters": 2_000_000,
        "whole": side,
        "streamed": side,
        "ratios": {"time": 2.0, "scan": 9.0, "memory": 30.0},
        "ties_at_top_percent": {"size": 20_000, "tied": 7},
    }
    said = diff_table.render({"rounds": 3, "torch": "2", "python": "3", "sizes": [size]})
    assert "| 2M parameters | 2.0 s, 100 MB | 2.0 s, 100 MB | 2.0 × | 9.0 × | 30.0 × |" in said
    assert "missed: time. " in said and "met. " not in said and "20,000 entries) 7 are tied" in said
