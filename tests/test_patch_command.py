"""``ceilings patch`` as a user meets it: what it prints, how it fails, what it shows on a terminal."""

import json
import sys

import numpy as np
import pytest

from ceilings import patch_command
from ceilings.cli import main
from patch_files import bf16, load, save


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a base and two fine-tunes that disagree about one number."""
    monkeypatch.chdir(tmp_path)
    words = np.frombuffer(bf16(0.02 * np.random.default_rng(0).standard_normal((300, 100))), "<u2")
    base = {
        "layer.weight": ("BF16", (300, 100), words.tobytes()),
        "norm": ("BF16", (100,), bf16(np.ones(100))),
    }
    save(tmp_path / "base.safetensors", base)
    for name, places in (("maths", [5, 900, 901]), ("code", [5, 20_000])):
        new = words.copy()
        new[places] += 1 + (name == "code")
        tuned = base | {"layer.weight": ("BF16", (300, 100), new.tobytes())}
        save(tmp_path / f"{name}.safetensors", tuned)
    return tmp_path


def run(*arguments: str) -> int:
    """Exit code of the command."""
    return main(["patch", *arguments])


def make(name: str = "maths") -> None:
    """A patch, by the command."""
    assert run("make", "base.safetensors", f"{name}.safetensors", f"{name}.patch") == 0


def test_make_says_what_the_patch_weighs_beside_other_ways(here, capsys):
    make()
    said = capsys.readouterr()
    assert said.err == ""  # not a terminal: no progress
    first, *rest = said.out.splitlines()
    size = (here / "maths.patch").stat().st_size
    assert first == f"maths.patch: {size} B; 3 of 30,100 numbers changed (0.00997 %), in 1 of 2 tensors"
    lines = dict(line.strip().split("  ", 1) for line in rest if "  " in line.strip())
    assert lines["as it is"].strip() == "60.2 kB"
    assert lines["LoRA of rank 8"].strip().startswith(f"{8 * 400 * 2 / 1e3:.3g} kB")
    assert lines["LoRA of rank 64"].strip().startswith(f"{64 * 400 * 2 / 1e3:.3g} kB")
    assert "random ones need" in lines["positions"] and "bits a change" in lines["values"]


def test_apply_gives_the_fine_tune_back(here, capsys):
    make()
    assert run("apply", "base.safetensors", "maths.patch", "out.safetensors") == 0
    assert load(here / "out.safetensors") == load(here / "maths.safetensors")
    out = capsys.readouterr().out.splitlines()[-1]
    assert out == "out.safetensors: 2 tensors, 60.2 kB, all as they were when the patch was made"


def test_inspect_lists_tensors_and_speaks_json(here, capsys):
    make()
    capsys.readouterr()
    assert run("inspect", "maths.patch") == 0
    assert "  layer.weight BF16 [300, 100]: 0.01 % of 30,000 changed, " in capsys.readouterr().out
    assert run("inspect", "maths.patch", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["changed"], found["numbers"], found["bytes"]) == (
        3,
        30_100,
        (here / "maths.patch").stat().st_size,
    )
    assert found["tensors"]["layer.weight"]["changed"] == 3
    assert found["lora_bytes"] == {"8": 6400, "64": 51200}


def test_inspect_names_what_came_and_went(here, capsys):
    tuned = load(here / "maths.safetensors")
    del tuned["norm"]
    save(here / "maths.safetensors", tuned | {"extra": ("F32", (2,), b"12345678")})
    make()
    said = capsys.readouterr().out
    assert "stored whole" in said
    assert "1 tensors of the base are not in the result" in said
    run("inspect", "maths.patch")
    said = capsys.readouterr().out
    assert "  extra F32 [2]: new, " in said and "  norm: not in the result" in said


def test_merge_lists_conflicts_and_takes_a_decision(here, capsys):
    make("maths")
    make("code")
    capsys.readouterr()
    assert run("merge", "maths.patch", "code.patch", "both.patch") == 2
    said = capsys.readouterr()
    assert "  layer.weight: 1 of 1 numbers that both set; numbers" in said.out
    assert said.err.startswith(
        "ceilings: maths.patch and code.patch change 1 numbers differently, most in 'layer.w"
    )
    assert not (here / "both.patch").exists()
    assert run("merge", "maths.patch", "code.patch", "both.patch", "--prefer", "second") == 0
    said = capsys.readouterr().out
    assert "decided by the second patch" in said and "1 numbers are changed by both patches" in said
    assert "not known of a merged patch" in said
    assert run("apply", "base.safetensors", "both.patch", "out.safetensors") == 0
    assert "of a merged patch" in capsys.readouterr().out
    sides = [
        np.frombuffer(load(here / f"{n}.safetensors")["layer.weight"][2], "<u2")
        for n in ("base", "maths", "code")
    ]
    expected = np.where(sides[2] != sides[0], sides[2], sides[1])
    assert load(here / "out.safetensors")["layer.weight"][2] == expected.tobytes()


def test_failures_are_one_sentence_and_a_code(here, capsys):
    make()
    capsys.readouterr()
    assert run("apply", "code.safetensors", "maths.patch", "out.safetensors") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith(
        "ceilings: code.safetensors: 'layer.weight' differs from the base of maths.patch"
    )
    assert run("apply", "base.safetensors", "nothing", "out.safetensors") == 2
    assert "there is no patch 'nothing'" in capsys.readouterr().err
    assert run("make", "base.safetensors") == 2
    assert "see ceilings patch make --help" in capsys.readouterr().err
    assert run() == 2
    assert run("merge", "a", "b", "c", "--prefer", "third") == 2


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [(KeyboardInterrupt(), 3, "nothing was written"), (MemoryError(), 4, "memory ran out")],
)
def test_stopping_and_lack_of_memory_have_their_codes(here, capsys, monkeypatch, raised, code, said):
    def fail(*arguments):
        raise raised

    monkeypatch.setattr(patch_command, "make_patch", fail)
    assert run("make", "base.safetensors", "maths.safetensors", "out") == code
    assert said in capsys.readouterr().err


def test_a_fault_of_the_program_is_not_hidden(here, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(patch_command, "make_patch", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("make", "base.safetensors", "maths.safetensors", "out")


def test_on_a_terminal_there_is_progress_and_it_is_taken_away(here, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    make()
    said = capsys.readouterr().err
    assert "coding tensor 1 of 4" in said
    assert said.endswith("\r\x1b[K")


@pytest.mark.parametrize("action", ["make", "apply", "inspect", "merge"])
def test_help_is_a_manual_with_examples(capsys, action):
    assert main(["patch", "--help"]) == 0
    said = capsys.readouterr().out
    assert f"ceilings patch {action} " in said and "exit codes:" in said
    assert run(action, "--help") == 0
    assert "exit codes:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (3e9, "3 GB"),
    ],
)
def test_sizes_in_words(size, words):
    assert patch_command._size(size) == words
