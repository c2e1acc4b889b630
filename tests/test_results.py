"""Records: what makes one stale, what does not, and what a file may hold."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ceilings import results
from ceilings.digest import code_digest, code_modules
from ceilings.results import Record, StaleRecordError, assert_reproduces, check, load, write

EXPERIMENT = '''"""An experiment."""

from ceilings.engine import twice


def run(x):
    """Measure."""
    return twice(x) + 1
'''
ENGINE = '''"""The engine."""


def twice(x):
    from .deep import factor

    return factor() * x
'''
DEEP = "def factor():\n    return 2\n"
FILES = {
    "__init__.py": '"""Package."""\n__version__ = "0.1.0"\n',
    "experiments/__init__.py": "",
    "experiments/toy.py": EXPERIMENT,
    "engine.py": ENGINE,
    "deep.py": DEEP,
    "unrelated.py": "x = 1\n",
    "results.py": "y = 1\n",
}


@dataclass(frozen=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2)
    width: int = 4


def tree(folder: Path, **changed: str) -> Path:
    """A package on disk; ``changed`` maps a file (``__`` for ``/``) to its new text."""
    for name, text in FILES.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(changed.get(name.replace("/", "__").removesuffix(".py"), text), encoding="utf-8")
    return folder


def digest(folder: Path, **changed: str) -> str:
    return code_digest("ceilings.experiments.toy", {"width": 4}, tree(folder, **changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"experiments__toy": EXPERIMENT.replace("Measure.", "Measure it well.")},
        {"experiments__toy": EXPERIMENT.replace("    return", "    # why\n    return")},
        {"experiments__toy": EXPERIMENT.replace("twice(x) + 1", "(twice(x)\n            + 1)")},
        {"experiments__toy": EXPERIMENT.replace('    """Measure."""\n', "")},
        {"engine": ENGINE.replace("The engine", "An engine") + "\n# the end\n"},
        {"unrelated": "x = 2\n"},
        {"results": "y = 2\n"},
        {"__init__": '"""Other words."""\n__version__ = "0.2.0"\n'},
    ],
)
def test_words_and_layout_leave_a_record_fresh(tmp_path, changed):
    assert digest(tmp_path / "a") == digest(tmp_path / "b", **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"experiments__toy": EXPERIMENT.replace("+ 1", "+ 2")},
        {"experiments__toy": EXPERIMENT.replace("+ 1", "+ 1.0")},
        {"experiments__toy": EXPERIMENT.replace("+ 1", "- 1")},
        {"experiments__toy": EXPERIMENT.replace("twice(x)", "twice(-x)")},
        {"experiments__toy": EXPERIMENT.replace("def run(x)", "def run(x=0)")},
        {"experiments__toy": EXPERIMENT.replace("    return", "    print('')\n    return")},
        {"engine": ENGINE.replace("* x", "+ x")},
        {"deep": DEEP.replace("2", "3")},  # reached by a relative import inside a function
        {"__init__": '"""Package."""\nx = 1\n'},
        {"experiments____init__": "x = 1\n"},
    ],
)
def test_any_change_of_code_makes_a_record_stale(tmp_path, changed):
    assert digest(tmp_path / "a") != digest(tmp_path / "b", **changed)


def test_the_configuration_is_part_of_the_digest(tmp_path):
    source = tree(tmp_path)
    name = "ceilings.experiments.toy"
    assert code_digest(name, {"width": 4}, source) != code_digest(name, {"width": 5}, source)
    assert code_digest(name, {"a": 1, "b": 2}, source) == code_digest(name, {"b": 2, "a": 1}, source)


def test_the_modules_of_an_experiment_are_those_it_rests_on(tmp_path):
    assert set(code_modules("ceilings.experiments.toy", tree(tmp_path))) == {
        "ceilings",
        "ceilings.experiments",
        "ceilings.experiments.toy",
        "ceilings.engine",
        "ceilings.deep",
    }
    with pytest.raises(ValueError, match="no module ceilings.experiments.none"):
        code_modules("ceilings.experiments.none", tmp_path)


@pytest.fixture
def record() -> Record:
    """A record of three seeds under the name of a real experiment, so that its digest can be computed."""
    values = {
        "a": {"x": torch.tensor([1 / 3, math.nan, 2.0], dtype=torch.float64), "n": [1, 2, 3]},
        "b": [[0.5, math.nan], [1.0, 2.0], [3.0, 4.0]],
    }
    return Record.of_run(Config(), values, 1.234, name="forced", dtype=torch.float64)


def test_a_record_survives_its_file(record, tmp_path):
    path = write(record, tmp_path)
    again = load("forced", Config(), tmp_path)
    assert again.values["a"]["n"] == [1, 2, 3]
    assert again.values["a"]["x"][0] == 0.333333333333  # 12 significant digits
    assert math.isnan(again.values["a"]["x"][1]) and math.isnan(again.values["b"][0][1])
    assert again.tensor("b").shape == (3, 2)
    assert (again.seeds, again.config, again.digest) == (record.seeds, record.config, record.digest)
    assert write(again, tmp_path).read_bytes() == path.read_bytes()
    json.loads(path.read_text(), parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))


def test_a_file_names_no_machine_and_no_path(record, tmp_path):
    text = write(record, tmp_path).read_text()
    for secret in (platform.node(), str(tmp_path), str(Path.home()), str(Path.cwd())):
        assert secret not in text
    assert {"python", "torch", "numpy"} <= set(json.loads(text)["versions"])


def corrupted(path: Path, change) -> None:
    body = json.loads(path.read_text())
    change(body)
    body["checksum"] = results._checksum({k: v for k, v in body.items() if k != "checksum"})
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body.update(digest="0" * 64), "made by other code"),
        (lambda body: body.update(format_version=0), "has format 0"),
        (lambda body: body["config"].update(width=5), "another configuration"),
        (lambda body: body.update(name="other"), "changed after it was written"),
    ],
)
def test_a_stale_record_is_refused_with_the_command_that_refreshes_it(record, tmp_path, change, reason):
    corrupted(write(record, tmp_path), change)
    with pytest.raises(StaleRecordError, match=reason) as error:
        load("forced", Config(), tmp_path)
    assert "python -m ceilings.experiments.forced" in str(error.value)


def test_an_edited_or_torn_file_is_refused(record, tmp_path):
    path = write(record, tmp_path)
    text = path.read_text()
    path.write_text(text.replace("0.333333333333", "0.333333333334"))
    with pytest.raises(StaleRecordError, match="changed after it was written"):
        load("forced", directory=tmp_path)
    for torn in (text[: len(text) // 2], "[]", "{}", ""):
        path.write_text(torn)
        with pytest.raises(StaleRecordError, match="is not a record"):
            load("forced", directory=tmp_path)


def test_without_a_configuration_the_recorded_one_counts(record, tmp_path):
    corrupted(write(record, tmp_path), lambda body: body["config"].update(width=5))
    with pytest.raises(StaleRecordError, match="other code"):  # the digest covers the configuration
        load("forced", directory=tmp_path)


def test_a_missing_record_or_folder_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"python -m ceilings\.experiments\.forced"):
        load("forced", directory=tmp_path)
    with pytest.raises(FileNotFoundError, match="create it"):
        load("forced", directory=tmp_path / "none")
    monkeypatch.setattr(results, "_SOURCE", tmp_path / "lib" / "ceilings")
    with pytest.raises(FileNotFoundError, match="pip install -e"):
        load("forced")


def test_a_failed_write_leaves_the_old_record_and_no_debris(record, tmp_path, monkeypatch):
    before = write(record, tmp_path).read_bytes()
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(record, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["forced.json"]
    assert (tmp_path / "forced.json").read_bytes() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": [1.0, 2.0]}, "one entry for each of the 3 seeds"),
        ({"x": 1.0}, "one entry for each"),
        ({"x": "abc"}, "one entry for each"),
        ({}, "is empty"),
        ({"x": [1.0, math.inf, 2.0]}, "is infinite"),
        ({"x": [1.0, 2.0, object()]}, "holds a object"),
        ({"x": [None, 1.0, 2.0]}, "holds a NoneType"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Record.of_run(Config(), values, 0.0, name="forced", dtype=torch.float64)


def test_a_record_over_a_megabyte_is_refused(tmp_path):
    values = {"x": torch.rand(3, 30_000, dtype=torch.float64)}
    with pytest.raises(ValueError, match="more than 1 MB"):
        write(Record.of_run(Config(), values, 0.0, name="forced", dtype=torch.float64), tmp_path)
    assert not list(tmp_path.iterdir())


def test_seeds_and_names_are_checked(record):
    with pytest.raises(ValueError, match="distinct"):
        Record.of_run(Config(seeds=(0, 0)), {"x": [1, 2]}, 0.0, name="forced", dtype=torch.float64)
    with pytest.raises(ValueError, match="not the name of an experiment"):
        Record(**{**vars(record), "name": "../forced"})


def test_a_missing_leaf_is_named(record):
    with pytest.raises(ValueError, match=r"has no a/z; there is x, n"):
        record.tensor("a", "z")
    with pytest.raises(ValueError, match="is not a leaf"):
        record.tensor("a")
    with pytest.raises(ValueError, match="nothing: a leaf"):
        record.tensor("b", "c")


def test_a_slice_is_compared_seed_by_seed(record):
    part = Record.of_run(
        Config(seeds=(2, 1)), {"a": {"x": [2.00001, math.nan]}}, 0.0, name="forced", dtype=torch.float64
    )
    assert_reproduces(part, record)
    for wrong in (
        {"a": {"x": [2.001, math.nan]}},
        {"a": {"x": [2.0, 0.0]}},
        {"a": {"x": [math.nan, math.nan]}},
        {"a": {"n": [3, 3]}},
    ):
        part = Record.of_run(Config(seeds=(2, 1)), wrong, 0.0, name="forced", dtype=torch.float64)
        with pytest.raises(AssertionError, match="in the record"):
            assert_reproduces(part, record)
    part = Record.of_run(Config(seeds=(7,)), {"b": [1]}, 0.0, name="forced", dtype=torch.float64)
    with pytest.raises(ValueError, match="not in record"):
        assert_reproduces(part, record)
    part = Record.of_run(Config(seeds=(1,)), {"c": [1]}, 0.0, name="forced", dtype=torch.float64)
    with pytest.raises(ValueError, match="has no c"):
        assert_reproduces(part, record)


def test_every_record_of_the_repository_is_fresh():
    assert set(check().values()) == {"fresh"}, check()


def test_the_command_line_lists_the_states(record, tmp_path):
    command = [sys.executable, "-m", "ceilings.results", "check"]
    fresh = subprocess.run(command, capture_output=True, text=True, check=False)
    assert fresh.returncode == 0 and "forced" in fresh.stdout, fresh.stdout + fresh.stderr
    corrupted(write(record, tmp_path), lambda body: body.update(digest="0" * 64))
    stale = subprocess.run([*command, "--directory", tmp_path], capture_output=True, text=True, check=False)
    assert stale.returncode == 1 and "python -m ceilings.experiments.forced" in stale.stdout
