"""The workflow that makes the records: what it would run, and what it says beforehand."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import refresh
from ceilings.results import results_directory

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def records(tmp_path) -> Path:
    """A copy of the records."""
    return Path(shutil.copytree(results_directory(), tmp_path / "results"))


def test_nothing_is_planned_while_every_record_is_fresh(records):
    assert refresh.planned(False, records) == {}
    assert "nothing to run" in refresh.plan(False, 2, records)


def test_every_experiment_is_planned_on_request(records):
    wanted = refresh.planned(True, records)
    assert list(wanted) == refresh.names()
    for name, start in wanted.items():
        assert json.loads((records / f"{name}.json").read_text())["digest"].startswith(start)


def test_stale_and_missing_records_are_planned(records):
    first, *_, last = refresh.names()
    (records / f"{first}.json").unlink()
    edited = json.loads((records / f"{last}.json").read_text())
    (records / f"{last}.json").write_text(json.dumps({**edited, "seeds": edited["seeds"][:-1]}))
    assert list(refresh.planned(False, records)) == sorted({first, last})
    text = refresh.plan(False, 2, records)
    assert f"{first:20} not known" in text and "1 of unknown length" in text
    assert f"{last:20} {refresh.said(edited['wall_seconds'])}" in text


def test_duration_fills_the_cores_with_the_longest_first():
    assert refresh.duration([4, 3, 3], 2) == 6  # 4 | 3 + 3
    assert refresh.duration([1, 1, 5, 1, 2], 2) == 5  # 5 | 2 + 1 + 1 + 1
    assert refresh.duration([1, 2, math.nan], 1) == 3
    assert refresh.duration([], 2) == 0


def test_lengths_are_said_in_words():
    assert [refresh.said(x) for x in (59.6, 119, 125, 3600, math.nan)] == [
        "60 s",
        "119 s",
        "2 min",
        "60 min",
        "not known",
    ]


def dry_run(folder: Path, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "-n",
        "-c2",
        "-s",
        str(ROOT / "Snakefile"),
        "--directory",
        str(folder),
    ]
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_dry_run_of_the_workflow_names_every_experiment(tmp_path):
    shown = dry_run(tmp_path, "--config", "everything=1")
    for name, digest in refresh.planned(True).items():
        assert f"_build/records/{name}-{digest}.made" in shown


def test_dry_run_does_nothing_while_every_record_is_fresh(tmp_path):
    assert "rule record" not in dry_run(tmp_path)
