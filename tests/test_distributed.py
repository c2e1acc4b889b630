"""The command on two processes: what it measures, who writes, and what happens when one of them fails."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pair_measure
from ceilings import cli, distributed
from ceilings.moments import ScoreMoments
from ceilings.pretrained import load_pretrained
from ceilings.scores import score_moments
from ceilings.testing import assert_equal
from pair import run_pair
from toys import save_toy, some_rollouts, write_jsonl

SUMS = ("scores", "squares", "reward_scores")


def fill(folder, rollouts=18):
    """A toy model and something to measure it on."""
    save_toy(folder / "toy")
    # Each in a group of its own, so that the halves of the sample have one size.
    lines = [line | {"group": number} for number, line in enumerate(some_rollouts(rollouts))]
    write_jsonl(folder / "rollouts.jsonl", lines)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"w{k} w{k + 1}", "answer": "w5"} for k in range(2, 7)])
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Folder in which two processes have measured every case, and how they ended."""
    folder = fill(tmp_path_factory.mktemp("pair"))
    return folder, run_pair(pair_measure.measured, folder)


@pytest.fixture
def ended(pairs, monkeypatch):
    """What each case returned and printed, with the folder as the working one and norms as in the pair."""
    monkeypatch.chdir(pairs[0])
    monkeypatch.setattr(pair_measure.LlamaRMSNorm, "forward", pair_measure.in_float64)
    return json.loads((pairs[0] / "ended.json").read_text())


def both(out):
    """Moments of both halves of a sample, or of all of it where it has none."""
    files = sorted(Path(out).glob("moments*"))
    return functools.reduce(ScoreMoments.merge, map(ScoreMoments.load, files))


def alone(case, out):
    """The same case on one process."""
    assert cli.main(["measure", *pair_measure.CASES[case], "--out", out]) == 0
    return both(out)


def assert_same(found, expected, rtol=1e-12):
    found = found.shifted(expected.reward_shift)
    for part in SUMS:
        for name in expected.names:
            assert_equal(getattr(found, part)[name], getattr(expected, part)[name], rtol=rtol)
    assert_equal(found.reward_sum, expected.reward_sum, rtol=1e-12, atol=1e-12)
    assert_equal(found.reward_squares, expected.reward_squares, rtol=1e-12)
    assert (found.count, found.weight_sum) == (expected.count, expected.weight_sum)


def test_two_processes_measure_what_one_does(ended):
    # Halves of nine in steps of two times two: in the last step process 1 has none.
    code, said, complained = ended["rollouts"]
    assert (code, complained) == (0, "") and said.count("The whole report") == 1
    assert [ScoreMoments.load(f"rollouts/moments-{k}.safetensors").count for k in (1, 2)] == [9, 9]
    found = both("rollouts")
    assert_same(found, alone("rollouts", "rollouts-alone"))
    assert set(os.listdir("rollouts")) == set(os.listdir("rollouts-alone"))
    reports = [json.loads(Path(f"{out}/report.json").read_text()) for out in ("rollouts", "rollouts-alone")]
    assert reports[0]["tightness"]["mean"] == pytest.approx(reports[1]["tightness"]["mean"], rel=1e-9)


def test_sample_does_not_depend_on_the_number_of_processes(ended):
    assert ended["prompts"][0] == 0
    expected = alone("prompts", "prompts-alone")
    rows = [
        [json.loads(line) for line in Path(f"{out}/rollouts.jsonl").read_text().splitlines()]
        for out in ("prompts", "prompts-alone")
    ]
    for found, other in zip(*rows, strict=True):
        assert found.pop("log_probs") == pytest.approx(other.pop("log_probs"), abs=2e-6)
        assert found == other
    assert_same(both("prompts"), expected)


def test_next_token_is_left_to_the_first_process(ended):
    assert ended["next"][0] == 0
    assert_same(both("next"), alone("next", "next-alone"))


def test_tokens_are_squared_as_on_one_process_and_signs_differ_between_processes(ended):
    model, _ = load_pretrained("toy", dtype=torch.float64)
    rows = pair_measure.tokens()
    exact = score_moments(model, *rows, level="token")
    found, signs, again = (ScoreMoments.load(f"{n}.safetensors") for n in ("token", "signs", "again"))
    assert_same(found, exact)
    for name in exact.names:
        assert torch.equal(signs.squares[name], again.squares[name])
        assert_equal(signs.scores[name], exact.scores[name], rtol=1e-12)
        # Unbiased: 64 draws for each of four tokens, on two processes, leave an error of this order in a total.
        assert float(signs.squares[name].sum() / exact.squares[name].sum()) == pytest.approx(1, abs=0.25)
    # Process 1 has the sequences of process 0. With its signs too, the sum would be twice that of one of them.
    generator = torch.Generator().manual_seed(3)
    seed = int(torch.randint(2**62, (2,), generator=generator)[0])
    own = score_moments(
        model,
        *(part[::2] for part in rows),
        level="token",
        sign_draws=64,
        generator=torch.Generator().manual_seed(seed),
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((signs.squares[name] - 2 * own.squares[name]).norm() / own.squares[name].norm()) > 0.01


@pytest.mark.parametrize(
    "case, code, sentence",
    [
        ("useless", 2, "rewards equal 0"),
        ("memory", 4, "memory ran out"),
        ("value", 2, "process 1: this sequence is wrong"),
        ("stopped", 3, "the same command goes on from there"),
    ],
)
def test_whoever_fails_all_end_with_one_sentence(ended, case, code, sentence):
    assert ended[case][0] == code
    complained = ended[case][2]
    assert sentence in complained and complained.count("\n") == 1 and "Traceback" not in complained


def test_fault_of_the_program_shows_the_traceback_of_its_process(ended):
    assert "a fault of ours" in ended["bug"][0] and "in process 1" in ended["bug"][0]
    assert "pair_measure.py" in ended["bug"][0]


def test_nothing_is_left_half_written(ended):
    assert not os.path.exists("useless")
    for case in ("memory", "value", "bug", "death"):
        assert set(os.listdir(case)) == {"run.json", "moments-1.safetensors", "moments-2.safetensors"}
        # Saved after every step of four; the second step of the second half fails.
        assert both(case).count == 9 + 4


def test_sums_that_nobody_needs_are_let_go(ended):
    # They are as large as the model. The tests make 18, one after another; an error holds on to its own for a while.
    for rank in range(2):
        held = json.loads(Path(f"held{rank}.json").read_text())
        assert len(held) == 18 and max(held) <= 2 and held.count(1) > 9


def test_a_run_that_two_processes_left_is_finished_by_one_or_two(ended):
    expected = alone("rollouts", "expected")
    assert ended["resumed"][0] == 0
    assert_same(both("stopped"), expected)
    assert_same(alone("memory", "memory"), expected)


def test_a_process_that_dies_ends_the_run_with_a_sentence(pairs):
    (code, said, complained), (killed, *_) = pairs[1]
    assert (code, killed) == (distributed.LOST, -signal.SIGKILL)
    assert "another process of this run was lost" in complained and "Traceback" not in complained
    assert said == "" and "death" not in json.loads((pairs[0] / "ended.json").read_text())


def test_ctrl_c_under_torchrun_keeps_what_is_done(tmp_path, monkeypatch):
    fill(tmp_path, 2400)
    monkeypatch.chdir(tmp_path)
    arguments = ["measure", "toy", "--rollouts", "rollouts.jsonl", "--out", "run"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ceilings"]
    process = subprocess.Popen(
        [*command, *arguments, "--batch-size", "1", "--checkpoint-seconds", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run/moments-1.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert err.count("finishing this batch") == 1 and err.count("the same command goes on") == 1, err
    assert out.count("parameters; memory about") == 1
    assert set(os.listdir("run")) - {"moments-2.safetensors"} == {"run.json", "moments-1.safetensors"}
    assert 0 < both("run").count < 2400
    assert cli.main([*arguments, "--batch-size", "128"]) == 0
    assert cli.main([*arguments[:-1], "alone", "--batch-size", "128"]) == 0
    found, expected = both("run"), both("alone")
    assert found.squares[found.names[0]].dtype == torch.float64
    assert_same(found, expected, rtol=1e-4)


# What can be said on one process


def test_wrong_usage_is_said_once(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["measure", "toy"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("device, message", [("cuda:1", "share cpu or cuda"), ("mps", "share cpu or cuda")])
def test_device_that_cannot_be_shared_out(device, message, capsys, monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert distributed.launched()
    assert cli.main(["measure", "toy", "--rollouts", "r", "--out", "o", "--device", device]) == 2
    assert message in capsys.readouterr().err


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "99")
    with pytest.raises(ValueError, match="99 processes on a machine with"):
        distributed.Team("cuda", together=True)
