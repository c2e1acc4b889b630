"""Break things on purpose, one at a time, and see that a check catches each: ``make mutate``.

    python tools/mutate.py             all faults, and a table of what caught each
    python tools/mutate.py WORD ...    those whose name contains one of the words
    python tools/mutate.py --list      their names

Each fault is planted in a temporary copy of the repository, and only the check named with it is run there. The check
is first run without the fault: one that fails anyway catches nothing. A fault that no check catches, and one whose
text is no longer there, are errors.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutations import CHECKS, FAULTS, Fault
from notebooks import ROOT

__all__ = ["copy_of_repository", "plant", "run_check"]


def copy_of_repository(target: Path) -> None:
    """The files that git knows or would take, and nothing that was built."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_check(check: str, copy: Path) -> tuple[bool, str]:
    """Run a check in the copy: did it pass, and what failed first?"""
    arguments = shlex.split(CHECKS.get(check, check))
    # NOTE PYTHONPATH: the environment holds the library of the repository itself, not of the copy.
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CI": "true",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--no-header",
        *arguments,
    ]
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if run.returncode == 0:
        return True, ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return False, failed[1] if failed else run.stdout.strip()[-300:]


def plant(fault: Fault, copy: Path) -> dict[Path, str]:
    """Break the copy; the files as they were, to mend it with."""
    before: dict[Path, str] = {}
    for edit in fault.edits:
        path = copy / edit.file
        text = path.read_text(encoding="utf-8")
        changed = edit(text)
        before.setdefault(path, text)
        path.write_text(changed, encoding="utf-8")
    return before


def verdict(fault: Fault, copy: Path, sound: dict[str, str]) -> tuple[bool, str]:
    """Was the fault caught, and by what?"""
    if fault.check not in sound:
        passed, failed = run_check(fault.check, copy)
        sound[fault.check] = "" if passed else failed
    if sound[fault.check]:
        return False, f"NOTHING TO LEARN: {sound[fault.check]} fails without the fault"
    before: dict[Path, str] = {}
    try:
        before = plant(fault, copy)
        passed, failed = run_check(fault.check, copy)
    except ValueError as error:
        return False, f"NOT PLANTED: {error}"
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")
    return (False, "SURVIVED") if passed else (True, failed)


def work(groups: queue.SimpleQueue[list[Fault]], report: Callable[[Fault, bool, str], None]) -> None:
    """Take faults that share a check, one group at a time, into a copy of one's own, until none are left."""
    with tempfile.TemporaryDirectory() as folder:
        copy, sound = Path(folder).resolve(), dict[str, str]()
        copy_of_repository(copy)
        while True:
            try:
                group = groups.get_nowait()
            except queue.Empty:
                return
            for fault in group:
                report(fault, *verdict(fault, copy, sound))


def chosen(words: list[str]) -> list[Fault]:
    """The faults whose names contain one of the words; all without words."""
    return [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]


def try_all(faults: list[Fault], jobs: int) -> int:
    """Plant every fault, print what caught each, and count those that nothing did."""
    groups: queue.SimpleQueue[list[Fault]] = queue.SimpleQueue()
    for check in dict.fromkeys(fault.check for fault in faults):
        groups.put([fault for fault in faults if fault.check == check])
    missed: list[str] = []

    def report(fault: Fault, caught: bool, by: str) -> None:
        if not caught:
            missed.append(fault.name)
        print(f"{fault.name:56}  {by}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for worker in [pool.submit(work, groups, report) for _ in range(jobs)]:
            worker.result()
    return len(missed)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Break things on purpose and see that a check catches each.")
    parser.add_argument("words", nargs="*", help="only faults whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="only name the faults")
    parser.add_argument("--jobs", type=int, default=2, help="how many to plant at a time (2)")
    arguments = parser.parse_args()
    faults = chosen(arguments.words)
    if arguments.list or not faults:
        print("\n".join(fault.name for fault in faults) or "no fault has such a name")
        return 0 if faults else 1
    start = time.perf_counter()
    missed = try_all(faults, arguments.jobs)
    print(f"{len(faults) - missed} of {len(faults)} faults caught in {time.perf_counter() - start:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
