"""The command line that every experiment shares."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ceilings.results import Record, assert_reproduces, load, write

__all__ = ["record_command"]


def record_command(
    run: Callable[[Any, Callable[[Iterable[Any]], Iterable[Any]]], Record], full: Any, smoke: Any
) -> int:
    """Command line of an experiment: run it with progress, and write the record of the full run.

    Parameters
    ----------
    run
        ``run(config, progress)``; ``progress`` wraps the loop over the seeds.
    full, smoke
        The two configurations. A smoke run is compared with the record and writes nothing.

    Returns
    -------
    int
        Exit status.
    """
    parser = argparse.ArgumentParser(description="Run this experiment and write its record.")
    parser.add_argument(
        "--smoke", action="store_true", help="run the short slice and compare it with the record"
    )
    smoke_only = parser.parse_args().smoke
    torch.set_num_threads(1)  # the order of summation is part of the numbers
    record = run(smoke if smoke_only else full, _progress)
    if smoke_only:
        assert_reproduces(record, load(record.name, full))
        print(f"{record.name}: the slice of seeds {list(record.seeds)} agrees with the record")
    else:
        print(f"wrote results/{write(record).name} after {record.wall_seconds:.0f} s")
    return 0


def _progress(items: Iterable[Any]) -> Iterator[Any]:
    """Count the items on a terminal; silent elsewhere."""
    every = list(items)
    start = time.perf_counter()
    for done, item in enumerate(every, 1):
        yield item
        if sys.stderr.isatty():
            left = (time.perf_counter() - start) / done * (len(every) - done)
            print(
                f"\r{done}/{len(every)}, {left:.0f} s left ",
                end="\n" if done == len(every) else "",
                file=sys.stderr,
            )
