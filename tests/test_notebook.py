"""What chapters share; the first line of every chapter runs in a process of its own because it changes global state."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ceilings import cli
from ceilings.notebook import report_part, terminal

PROBE = """
import json, torch
from ceilings.notebook import setup
setup({arguments})
one = torch.rand(3).tolist()
setup({arguments})
import matplotlib as mpl
print(json.dumps({{
    "dtype": str(torch.get_default_dtype()),
    "threads": torch.get_num_threads(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "same": one == torch.rand(3).tolist(),
    "first": one[0],
    "shown": repr(torch.tensor([1 / 3, 1e-7])),
    "dpi": mpl.rcParams["savefig.dpi"],
    "layout": mpl.rcParams["figure.constrained_layout.use"],
}}))
"""


def probe(tmp_path, arguments=""):
    """State after ``setup``, and whatever it wrote to stderr."""
    environment = os.environ | {"HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path), "MPLBACKEND": "Agg"}
    code = PROBE.format(arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_chapter_starts_from_one_state(tmp_path):
    state, complaints = probe(tmp_path)
    assert state["dtype"] == "torch.float64" and state["threads"] == 1
    assert state["deterministic"] and state["same"]
    assert "0.3333" in state["shown"] and "0.33333" not in state["shown"] and "e-" not in state["shown"]
    assert state["dpi"] == 150 and state["layout"]
    assert complaints == ""


def test_the_arguments_are_used(tmp_path):
    state, _ = probe(tmp_path, "seed=3, threads=2, dtype=__import__('torch').float32")
    assert state["dtype"] == "torch.float32" and state["threads"] == 2 and state["same"]
    expected = torch.rand(3, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    assert state["first"] == float(expected[0])


def test_a_command_is_shown_as_in_a_terminal(tmp_path, capsys, monkeypatch):
    seen = []

    def main(arguments):
        seen.append((arguments, os.getcwd()))
        print("disk 3 MB; time about 7 seconds")
        print("many words " * 20)
        sys.stderr.write("ceilings: no\n")
        return 2

    monkeypatch.setattr(cli, "main", main)
    terminal("ceilings measure 'a model' --out run", tmp_path, code=2)
    assert seen == [(["measure", "a model", "--out", "run"], str(tmp_path))]
    assert os.getcwd() != str(tmp_path)
    rows = capsys.readouterr().out.splitlines()
    assert rows[:2] == ["$ ceilings measure 'a model' --out run", "disk 3 MB; time about …"]
    assert rows[-1] == "ceilings: no"
    assert max(map(len, rows)) <= 92 and rows[3].startswith("  words")
    with pytest.raises(RuntimeError, match="ended with code 2 and not 0"):
        terminal("ceilings measure", tmp_path)
    with pytest.raises(ValueError, match="begin it with `ceilings`"):
        terminal("rm -r run", tmp_path)


def test_a_part_of_a_report_is_found_by_its_heading(tmp_path):
    page = tmp_path / "report.html"
    page.write_text("<section><h2>One (1)</h2><p>a</p></section><section><h2>Two</h2>b</section>")
    assert report_part(page, "One (1)").data == '<div class="report-part"><p>a</p></div>'
    assert report_part(page, "Two").data == '<div class="report-part">b</div>'
    with pytest.raises(ValueError, match="no section 'Three'"):
        report_part(page, "Three")
