"""What an interrupted run had finished: one file a seed, beside nothing that is committed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ceilings.digest import code_digest
from ceilings.results import Record, results_directory

__all__ = ["Keep", "kept_in", "not_kept", "partial_folder", "resumed"]

#: From a name and a function that measures to what it measures, perhaps from an earlier run.
Keep = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]


def not_kept(_: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure, and keep nothing."""
    return measure()


def kept_in(folder: Path, spent: list[float] | None = None) -> Keep:
    """Keep what was measured in a folder, and read it from there the next time; ``spent`` gets the seconds it took."""

    def keep(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = folder / f"{name}.json"
        if path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if spent is not None:
                spent.append(kept["seconds"])
            found: dict[str, Any] = kept["values"]
            return found
        start = time.perf_counter()
        values = measure()
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(
            json.dumps({"seconds": time.perf_counter() - start, "values": values}), encoding="utf-8"
        )
        partial.replace(path)
        return values

    return keep


def resumed(
    run: Callable[..., Record], full: Any, name: str
) -> Callable[[Any, Callable[[Iterable[Any]], Iterable[Any]]], Record]:
    """The same run, going on where an interrupted one of the same code and configuration stopped.

    Parameters
    ----------
    run
        ``run(config, progress, keep=...)``.
    full
        The only configuration whose runs are kept: a slice that is compared with the record must be computed.
    name
        Of the experiment.

    Returns
    -------
    Callable
        ``run(config, progress)``; the folder goes when the run is complete.
    """

    def go(config: Any, progress: Callable[[Iterable[Any]], Iterable[Any]]) -> Record:
        if config != full:
            return run(config, progress)
        spent: list[float] = []
        with partial_folder(name, config) as folder:
            record = run(config, progress, keep=kept_in(folder, spent))
        return dataclasses.replace(record, wall_seconds=round(record.wall_seconds + sum(spent), 1))

    return go


@contextlib.contextmanager
def partial_folder(name: str, config: Any) -> Iterator[Path]:
    """Folder of what an unfinished run has done, by the digest of its code and configuration, so never another's.

    It goes when the block ends, and stays when the block is left by an error or an interruption.
    """
    digest = code_digest(f"ceilings.experiments.{name}", json.loads(json.dumps(dataclasses.asdict(config))))
    folder = results_directory().parent / "_build" / "partial" / f"{name}-{digest[:12]}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
