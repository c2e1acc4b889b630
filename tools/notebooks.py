"""Chapters: from the text that is written by hand to the notebook that the book shows.

A chapter is one MyST text file, ``book/PART/NAME.md``, and one executed notebook beside it,
``book/PART/NAME.ipynb``. The text is the source; the notebook is always made from it, here, and both
are committed. Nothing in the notebook depends on when or where it was made, so building twice gives
the same bytes.

    python tools/notebooks.py build [NAME ...]    run these chapters (all of them without a name)
    python tools/notebooks.py check [NAME ...]    does each notebook still hold its text?

A NAME is ``PART/NAME``, with or without ``book/`` and the extension.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

__all__ = [
    "ChapterError",
    "chapters",
    "check",
    "execute",
    "mismatch",
    "paths",
    "read_text",
    "unstable_outputs",
]

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"

KERNEL_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "TQDM_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
CELL_TIMEOUT_SECONDS = 300
SIGNIFICANT_DIGITS = 6

NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    # NOTE pygments_lexer: without it a notebook turned back into text loses "code-cell ipython3".
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}

# What must never be stored, since it is different on the next machine or in the next run.
UNSTABLE = {
    "a path": re.compile(
        r"(?<![\w.:/<])/(?:home|root|tmp|usr|opt|var|work|Users|mnt|srv)/[\w.-]+|[A-Z]:\\\w+"
    ),
    "an address": re.compile(r"\bat 0x[0-9a-fA-F]{6,}|\b0x[0-9a-fA-F]{9,}"),
    "a temporary name": re.compile(r"ipykernel_\d+|<ipython-input-"),
    "a timing": re.compile(r"\b\d+(?:\.\d+)?\s?(?:ms|µs|us|ns|it/s|s/it|seconds?)\b|\bWall time|\bCPU times"),
    "a progress bar": re.compile(r"\d+%\|"),
    "a raw residual": re.compile(r"(?<![\w.])\d(?:\.\d+)?e-1[4-9]\b"),
}


class ChapterError(Exception):
    """A chapter that cannot be made, with the sentence that says why."""


def chapters() -> list[str]:
    """The chapters of the table of contents, in reading order, such as ``identity/ceiling``."""

    def files(node: dict[str, Any]) -> Iterator[str]:
        if "root" in node:
            yield node["root"]
        if "file" in node:
            yield node["file"]
        for branch in ("parts", "chapters", "sections", "entries", "subtrees"):
            for child in node.get(branch, []):
                yield from files(child)

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    notebooks = [Path(file) for file in files(toc) if file.endswith(".ipynb")]
    return [file.relative_to("book").with_suffix("").as_posix() for file in notebooks]


def paths(name: str) -> tuple[Path, Path]:
    """The text and the notebook of a chapter, however the chapter was named."""
    plain = name.removeprefix("book/").removesuffix(".md").removesuffix(".ipynb")
    return BOOK / f"{plain}.md", BOOK / f"{plain}.ipynb"


def read_text(source: Path) -> NotebookNode:
    """The notebook without outputs that a text file describes."""
    if not source.is_file():
        raise ChapterError(f"there is no chapter text {shown(source)}")
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="md:myst")
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"c{number:03d}"
    return notebook


def check(name: str) -> str | None:
    """Why the notebook of a chapter does not hold its text, or None if it does."""
    source, target = paths(name)
    expected = read_text(source)
    if not target.is_file():
        return f"{shown(target)} has not been made; run: {remedy(name)}"
    found = nbformat.read(target, as_version=4)
    difference = mismatch(expected, found)
    return None if difference is None else f"{shown(target)} is stale ({difference}); run: {remedy(name)}"


def mismatch(expected: NotebookNode, found: NotebookNode) -> str | None:
    """The first difference between a text and a notebook, outputs apart; None if there is none."""
    if len(expected.cells) != len(found.cells):
        return f"the text has {len(expected.cells)} cells, the notebook {len(found.cells)}"
    for number, (one, other) in enumerate(zip(expected.cells, found.cells, strict=True)):
        for field in ("cell_type", "id", "source", "metadata"):
            if one[field] != other[field]:
                return f"cell {number} differs in its {field}"
    if found.metadata != expected.metadata:
        return "the notebook's metadata differ"
    return None


def execute(notebook: NotebookNode, folder: Path) -> int | None:
    """Run every cell in place, in order; the peak memory of the kernel in bytes, where it can be had."""
    # NOTE: the kernel inherits this process's environment; passing env= would replace it whole.
    os.environ.update(KERNEL_ENVIRONMENT)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--IPKernelApp.log_level=40"],
    )
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            run_cell(client, cell, number)
        return peak_memory(getattr(client.km.provisioner, "pid", None)) if client.km else None


def run_cell(client: NotebookClient, cell: NotebookNode, number: int) -> None:
    """One cell; an error, or anything on stderr, ends the chapter with a message for its author."""
    try:
        client.execute_cell(cell, number)
    except CellExecutionError:
        traceback = "\n".join(cell.outputs[-1].get("traceback", []))
        raise ChapterError(f"{quoted_cell(cell, number)}\n\n{plain(traceback)}") from None
    except CellTimeoutError:
        raise ChapterError(f"{quoted_cell(cell, number)}\n\nran past {CELL_TIMEOUT_SECONDS} s") from None
    except DeadKernelError:
        raise ChapterError(f"{quoted_cell(cell, number)}\n\nthe kernel died (out of memory?)") from None
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stderr":
            raise ChapterError(f"{quoted_cell(cell, number)}\n\nwrote to stderr:\n{output.text.rstrip()}")


def quoted_cell(cell: NotebookNode, number: int) -> str:
    """A cell as it is shown in a message: its number, counted from 0 over all cells, and its source."""
    lines = "\n".join(f"    {line}" for line in cell.source.splitlines())
    return f"cell {number}:\n\n{lines}"


def plain(text: str) -> str:
    """Text without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def peak_memory(pid: int | None) -> int | None:
    """The largest resident size of a process so far, in bytes; None where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None


def unstable_outputs(notebook: NotebookNode) -> list[str]:
    """What a notebook stores that another machine, or another run, would store differently."""
    findings = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            texts = [output.get("text", "")]
            # NOTE: what is glued without being displayed is stored under application/papermill.record/text/….
            texts += [text for kind, text in output.get("data", {}).items() if "text/" in kind]
            for text in texts:
                for what, pattern in UNSTABLE.items():
                    if hit := pattern.search(text):
                        findings.append(f"cell {number} stores {what}: {hit[0]!r}")
                if digits := too_precise(text):
                    findings.append(f"cell {number} stores more than {SIGNIFICANT_DIGITS} digits: {digits}")
    return findings


def too_precise(text: str) -> str | None:
    """The first decimal number with more digits than another processor would agree on."""
    for number in re.findall(r"(?<![\w.])\d+\.\d+", text):
        if len(number.replace(".", "").lstrip("0")) > SIGNIFICANT_DIGITS:
            return number
    return None


def build(name: str) -> None:
    """Make the notebook of a chapter; nothing is written unless every cell ran and its outputs will keep."""
    source, target = paths(name)
    notebook = read_text(source)
    start = time.perf_counter()
    peak = execute(notebook, target.parent)
    seconds = time.perf_counter() - start
    if findings := unstable_outputs(notebook):
        raise ChapterError("\n".join(findings))
    nbformat.validate(notebook)
    text = nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"
    unchanged = target.is_file() and target.read_text(encoding="utf-8") == text
    partial = target.with_suffix(".ipynb.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)
    memory = f"{peak / 2**30:5.2f} GiB" if peak is not None else "memory not known"
    print(f"{shown(target):44} {seconds:6.1f} s  {memory}{'  unchanged' if unchanged else ''}", flush=True)


def shown(path: Path) -> str:
    """A path as a reader of the repository knows it."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def remedy(name: str) -> str:
    """The command that makes a chapter again."""
    return f"make notebooks NAMES={paths(name)[0].relative_to(BOOK).with_suffix('').as_posix()}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the notebooks of the book from their text.")
    parser.add_argument("command", choices=["build", "check"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as identity/ceiling; all without one")
    arguments = parser.parse_args()
    names = arguments.names or chapters()
    failures = 0
    for name in names:
        try:
            if arguments.command == "build":
                build(name)
                complaint = None
            else:
                complaint = check(name)
        except ChapterError as error:
            complaint = f"{shown(paths(name)[0])}: {error}"
        if complaint:
            failures += 1
            print(complaint, file=sys.stderr, flush=True)
    if arguments.command == "check" and not failures:
        print(f"{len(names)} notebooks hold their text")
    elif arguments.command == "build" and (forgotten := sorted({*known(names)} - {*chapters()})):
        print(f"not in _toc.yml yet: {', '.join(forgotten)}")
    return 1 if failures else 0


def known(names: list[str]) -> Iterator[str]:
    """The names as the table of contents spells them."""
    return (paths(name)[0].relative_to(BOOK).with_suffix("").as_posix() for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
