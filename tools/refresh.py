"""Which records are to be made again, and how long that takes: the plan of the Snakefile, and what it says beforehand.

    python tools/refresh.py          the records that are stale or missing
    python tools/refresh.py --all    every record

How long a run takes is what its last record says it took. Nothing is run from here: `make results` prints this plan
and then starts the workflow.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pkgutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import ceilings.experiments
from ceilings.results import check, code_digest, results_directory

__all__ = ["duration", "names", "plan", "planned", "said", "seconds"]


def names() -> list[str]:
    """Every experiment."""
    found = pkgutil.iter_modules(ceilings.experiments.__path__)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def planned(everything: bool, directory: Path | None = None) -> dict[str, str]:
    """The experiments to run, each with the beginning of the digest that its record will carry."""
    states = check(directory)
    wanted = [name for name in names() if everything or states[name] != "fresh"]
    return {name: _digest(name)[:12] for name in wanted}


def seconds(name: str, directory: Path | None = None) -> float:
    """How long the last run took; NaN where no record says so."""
    try:
        text = (results_directory(directory) / f"{name}.json").read_text(encoding="utf-8")
        return float(json.loads(text)["wall_seconds"])
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError, ValueError):
        return math.nan


def duration(jobs: Iterable[float], cores: int) -> float:
    """How long jobs take on some cores, one core each, the longest first; unknown ones count nothing."""
    busy = [0.0] * max(1, cores)
    for job in sorted((job for job in jobs if not math.isnan(job)), reverse=True):
        busy[busy.index(min(busy))] += job
    return max(busy)


def said(length: float) -> str:
    """A length of time in words."""
    if math.isnan(length):
        return "not known"
    return f"{length:.0f} s" if length < 120 else f"{length / 60:.0f} min"


def plan(everything: bool, cores: int, directory: Path | None = None) -> str:
    """What will be run and how long that will take, for people."""
    wanted = {name: seconds(name, directory) for name in planned(everything, directory)}
    if not wanted:
        return "Every record is fresh: there is nothing to run."
    rows = [f"  {name:20} {said(length)}" for name, length in wanted.items()]
    total = said(duration(wanted.values(), cores))
    unknown = sum(map(math.isnan, wanted.values()))
    rest = f", and {unknown} of unknown length" if unknown else ""
    return "\n".join(
        [
            "To be run, with the time that each took last:",
            *rows,
            f"In all about {total} on {cores} cores{rest}.",
        ]
    )


def _digest(name: str) -> str:
    module = importlib.import_module(f"ceilings.experiments.{name}")
    return code_digest(f"ceilings.experiments.{name}", json.loads(json.dumps(asdict(module.FULL))))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Say which records are to be made again, and how long it takes."
    )
    parser.add_argument("--all", action="store_true", help="every record, fresh or not")
    parser.add_argument("--cores", type=int, default=2, help="jobs at a time")
    arguments = parser.parse_args()
    print(plan(arguments.all, arguments.cores), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
