"""The first line of every chapter, run in a process of its own because it changes global state."""

import json
import os
import subprocess
import sys

import torch

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
