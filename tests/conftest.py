"""The built book, once for all tests that look at it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def built_book(tmp_path_factory) -> Path:
    """The folder of the book's HTML, built with warnings as errors; BOOK_HTML names one that is built already."""
    if ready := os.environ.get("BOOK_HTML"):
        return Path(ready).resolve()
    target = tmp_path_factory.mktemp("book")
    start = "from jupyter_book.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        start,
        "build",
        str(ROOT),
        "--path-output",
        str(target),
        "-n",
        "-W",
        "--keep-going",
        "-q",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"the book does not build:\n{run.stdout}\n{run.stderr}"
    return target / "_build" / "html"
