"""Records of long runs: written by one command, read by the book, refused when stale.

A record is one JSON file, ``results/NAME.json``, made by ``python -m ceilings.experiments.NAME`` and by nothing
else. It carries what it was made from: configuration, seeds, versions, dtype, device model, wall time, and a
digest of the code. `load` computes that digest again from the source at hand, so a number of the book cannot
outlive the code that gave it.

    python -m ceilings.results check    is every record fresh? exits 1 if one is stale or missing
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ceilings.digest import code_digest

__all__ = [
    "FORMAT_VERSION",
    "Record",
    "StaleRecordError",
    "assert_reproduces",
    "check",
    "code_digest",
    "load",
    "results_directory",
    "write",
]

FORMAT_VERSION: Final = 1
_SIGNIFICANT_DIGITS: Final = 12
_MAX_BYTES: Final = 1_000_000
_SOURCE: Final = Path(__file__).resolve().parent


class StaleRecordError(RuntimeError):
    """A record that the code or the configuration at hand would not make again."""


@dataclass(frozen=True)
class Record:
    """What one long run measured, and what it was made from.

    Parameters
    ----------
    name
        Name of the experiment, ``ceilings.experiments.NAME``.
    config
        Its configuration, as plain JSON values.
    seeds
        One integer a repetition.
    values
        Nested mapping; every leaf is a list with one entry a seed. NaN means "undefined" and is kept; infinity
        is refused.
    versions
        Versions of Python and of the packages that compute.
    dtype
        Floating-point type of the computation, such as ``float64``.
    device
        Model of the processor, never the name of a machine.
    wall_seconds
        Duration of the run.
    digest
        `code_digest` at the time of the run.
    format_version
        Version of this layout.

    Raises
    ------
    ValueError
        If a leaf does not have one entry a seed, or a value cannot be stored.
    """

    name: str
    config: Mapping[str, Any]
    seeds: tuple[int, ...]
    values: Mapping[str, Any]
    versions: Mapping[str, str]
    dtype: str
    device: str
    wall_seconds: float
    digest: str
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Bring everything into the form that a JSON file gives back."""
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"record name {self.name!r} is not the name of an experiment module")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds {self.seeds} must be distinct and at least one")
        object.__setattr__(self, "config", json.loads(json.dumps(self.config, allow_nan=False)))
        object.__setattr__(self, "seeds", tuple(int(s) for s in self.seeds))
        object.__setattr__(self, "values", _checked(self.values, len(self.seeds), "values"))

    @classmethod
    def of_run(
        cls,
        config: Any,
        values: Mapping[str, Any],
        wall_seconds: float,
        *,
        name: str,
        dtype: torch.dtype,
        packages: Sequence[str] = (),
    ) -> Record:
        """Record of a run that has just ended, with the provenance of this process.

        Parameters
        ----------
        config
            Frozen dataclass with a field ``seeds``.
        values
            What was measured.
        wall_seconds
            Duration of the run.
        name
            Name of the experiment.
        dtype
            Floating-point type of the computation.
        packages
            Packages that compute, besides torch and numpy.

        Returns
        -------
        Record
            The record, not yet written.
        """
        plain = dataclasses.asdict(config)
        return cls(
            name=name,
            config=plain,
            seeds=tuple(config.seeds),
            values=values,
            versions={
                "python": platform.python_version(),
                **{p: version(p) for p in sorted({"torch", "numpy", *packages})},
            },
            dtype=str(dtype).removeprefix("torch."),
            device=_device_model(),
            wall_seconds=round(wall_seconds, 1),
            digest=code_digest(f"ceilings.experiments.{name}", plain),
        )

    def tensor(self, *keys: str) -> Tensor:
        """One leaf of the values as a float64 tensor.

        Parameters
        ----------
        keys
            Path to the leaf.

        Returns
        -------
        Tensor
            The values, one row a seed.

        Shapes
        ------
        -> (S, …) with S the number of seeds.

        Raises
        ------
        ValueError
            If there is no such leaf.
        """
        node: Any = self.values
        for depth, key in enumerate(keys):
            if not isinstance(node, Mapping) or key not in node:
                known = ", ".join(node) if isinstance(node, Mapping) else "nothing: a leaf"
                raise ValueError(f"record {self.name} has no {'/'.join(keys[: depth + 1])}; there is {known}")
            node = node[key]
        if isinstance(node, Mapping):
            raise ValueError(
                f"{'/'.join(keys)} of record {self.name} is not a leaf; it holds {', '.join(node)}"
            )
        return torch.tensor(node, dtype=torch.float64)


def _checked(value: Any, seeds: int, where: str) -> Any:
    """Values in stored form: nested mappings of lists of rounded numbers, one entry a seed."""
    if isinstance(value, Mapping):
        if not value:
            raise ValueError(f"{where} is empty")
        return {str(key): _checked(child, seeds, f"{where}/{key}") for key, child in value.items()}
    plain = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(plain, Sequence) or isinstance(plain, str) or len(plain) != seeds:
        raise ValueError(f"{where} must hold one entry for each of the {seeds} seeds")
    return [_rounded(entry, where) for entry in plain]


def _rounded(value: Any, where: str) -> Any:
    """A number to the digits that are worth keeping."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_rounded(entry, where) for entry in value]
    if isinstance(value, bool | int | str):
        return value
    if not isinstance(value, float):
        raise ValueError(
            f"{where} holds a {type(value).__name__}; only numbers, strings and lists of them are stored"
        )
    if math.isinf(value):
        raise ValueError(f"{where} is infinite: store what made it so")
    return value if math.isnan(value) else float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def results_directory(directory: Path | None = None) -> Path:
    """Folder of the records.

    Parameters
    ----------
    directory
        The folder, or None for ``results/`` at the root of the source tree that this package runs from.

    Returns
    -------
    Path
        An existing folder.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    folder = _SOURCE.parents[1] / "results" if directory is None else Path(directory)
    if folder.is_dir():
        return folder
    if directory is not None:
        raise FileNotFoundError(f"there is no folder {directory}: create it, or pass another")
    raise FileNotFoundError(
        "this copy of ceilings has no results/ beside its source: install it from a clone with "
        "`pip install -e .`, or pass the folder of the records as `directory`"
    )


def write(record: Record, directory: Path | None = None) -> Path:
    """Write a record so that a reader sees the old file or the new one, never half of it.

    Parameters
    ----------
    record
        The record.
    directory
        Folder of the records; see `results_directory`.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If the file would exceed 1 MB.
    """
    body = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    body["checksum"] = _checksum(body)
    text = _json(body) + "\n"
    if len(text.encode()) > _MAX_BYTES:
        raise ValueError(
            f"record {record.name} would take {len(text.encode())} bytes, more than 1 MB: store summaries"
        )
    target = results_directory(directory) / f"{record.name}.json"
    partial = target.with_suffix(f".json.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def load(name: str, config: Any = None, directory: Path | None = None) -> Record:
    """Read a record, if the code at hand is the code that made it.

    Parameters
    ----------
    name
        Name of the experiment.
    config
        The configuration that the caller expects (a dataclass or a mapping), or None for the recorded one.
    directory
        Folder of the records; see `results_directory`.

    Returns
    -------
    Record
        The record.

    Raises
    ------
    FileNotFoundError
        If there is no such record.
    StaleRecordError
        If its format, its configuration or its code digest differ, or it was edited.
    """
    path = results_directory(directory) / f"{name}.json"
    remedy = f"refresh it with `python -m ceilings.experiments.{name}`"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no record results/{name}.json: make it with `python -m ceilings.experiments.{name}`"
        )
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        stored, found = body.pop("checksum"), body["format_version"]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise StaleRecordError(f"results/{name}.json is not a record; {remedy}") from None
    if found != FORMAT_VERSION:
        raise StaleRecordError(
            f"results/{name}.json has format {found}, this code reads {FORMAT_VERSION}; {remedy}"
        )
    if stored != _checksum(body) or body["name"] != name:
        raise StaleRecordError(f"results/{name}.json was changed after it was written; {remedy}")
    record = Record(**{**body, "values": _with_nan(body["values"]), "seeds": tuple(body["seeds"])})
    if config is not None and _plain(config) != record.config:
        raise StaleRecordError(f"results/{name}.json was made with another configuration; {remedy}")
    if code_digest(f"ceilings.experiments.{name}", record.config) != record.digest:
        raise StaleRecordError(f"results/{name}.json was made by other code than this; {remedy}")
    return record


def assert_reproduces(part: Record, whole: Record, rtol: float = 1e-4) -> None:
    """Assert that a short run gives again what the record holds for its seeds.

    Parameters
    ----------
    part
        A run over some of the seeds, and perhaps some of the values, of ``whole``.
    whole
        The record.
    rtol
        Relative tolerance of each number; integers, strings and NaN must be equal.

    Raises
    ------
    AssertionError
        If a number differs.
    ValueError
        If ``part`` holds a seed or a leaf that ``whole`` has not.
    """
    missing = set(part.seeds) - set(whole.seeds)
    if missing:
        raise ValueError(f"seeds {sorted(missing)} are not in record {whole.name}")
    rows = [whole.seeds.index(seed) for seed in part.seeds]
    for keys, leaf in _leaves(part.values):
        node: Any = whole.values
        for key in keys:
            if not isinstance(node, Mapping) or key not in node:
                raise ValueError(f"record {whole.name} has no {'/'.join(keys)}")
            node = node[key]
        for seed, ours, row in zip(part.seeds, leaf, rows, strict=True):
            if not _close(ours, node[row], rtol):
                raise AssertionError(f"{'/'.join(keys)}, seed {seed}: {ours} now, {node[row]} in the record")


def check(directory: Path | None = None) -> dict[str, str]:
    """State of every record: each experiment must have one, and each record an experiment.

    Parameters
    ----------
    directory
        Folder of the records; see `results_directory`.

    Returns
    -------
    dict
        Maps a name to ``"fresh"`` or to the sentence that says what is wrong.
    """
    names = {p.stem for p in results_directory(directory).glob("*.json")}
    names |= {p.stem for p in (_SOURCE / "experiments").glob("*.py") if not p.stem.startswith("_")}
    states = {}
    for name in sorted(names):
        try:
            load(name, directory=directory)
            states[name] = "fresh"
        except (FileNotFoundError, StaleRecordError, ValueError) as error:
            states[name] = str(error)
    return states


def _plain(config: Any) -> Any:
    """Return a configuration as JSON gives it back."""
    fields = config if isinstance(config, Mapping) else dataclasses.asdict(config)
    return json.loads(json.dumps(dict(fields)))


def _checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of the content: a record is never edited by hand."""
    return hashlib.sha256(json.dumps(_without_nan(body), sort_keys=True).encode()).hexdigest()


def _without_nan(value: Any) -> Any:
    """JSON has no NaN; an undefined number is stored as null."""
    if isinstance(value, Mapping):
        return {key: _without_nan(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(child) for child in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _with_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_nan(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_with_nan(child) for child in value]
    return math.nan if value is None else value


def _leaves(
    values: Mapping[str, Any], keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    for key, child in values.items():
        if isinstance(child, Mapping):
            yield from _leaves(child, (*keys, key))
        else:
            yield (*keys, key), child


def _close(a: Any, b: Any, rtol: float) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_close(x, y, rtol) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isnan(a) and math.isnan(b) or math.isclose(a, b, rel_tol=rtol, abs_tol=1e-12)
    return bool(a == b)


def _json(value: Any, indent: int = 0) -> str:
    """JSON with one line a leaf, so that a diff shows which measurement changed."""
    if isinstance(value, Mapping) and value:
        pad = " " * (indent + 1)
        rows = [
            f"{pad}{json.dumps(key, ensure_ascii=False)}: {_json(child, indent + 1)}"
            for key, child in value.items()
        ]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    return json.dumps(_without_nan(value), ensure_ascii=False, allow_nan=False)


def _device_model() -> str:
    """Model of the processor."""
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def main() -> int:
    """Run the command line.

    Returns
    -------
    int
        0 if every record is fresh.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ceilings.results", description="The state of the records."
    )
    parser.add_argument("command", choices=["check"])
    parser.add_argument("--directory", type=Path, default=None, help="folder of the records")
    states = check(parser.parse_args().directory)
    for name, state in states.items():
        print(f"{name:20} {state}")
    return 0 if all(state == "fresh" for state in states.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
