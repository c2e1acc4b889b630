"""What every command shares: exit codes, one-sentence failures, progress, stopping well."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn

__all__ = [
    "OK",
    "STOPPED",
    "TOO_LARGE",
    "WRONG_INPUT",
    "Parser",
    "Terminal",
    "add_command",
    "fail",
    "guarded",
    "is_out_of_memory",
    "positive",
]

OK: Final = 0
WRONG_INPUT: Final = 2
STOPPED: Final = 3
TOO_LARGE: Final = 4


class Parser(argparse.ArgumentParser):
    """Parser that complains in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read on; of several processes only the first does."""
        if "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0":
            raise SystemExit(OK)
        sys.stderr.write(f"{self.prog}: {message}; see {self.prog} --help\n")
        raise SystemExit(WRONG_INPUT)


def add_command(commands: Any, name: str, summary: str, description: str, codes: str) -> Any:
    """Add a command, or an action of one, whose help keeps its line breaks.

    Parameters
    ----------
    commands
        What ``add_subparsers`` returned.
    name
        What it is called.
    summary
        A line for the list of commands.
    description
        What it does, with examples.
    codes
        Its exit codes, for the end of its help.

    Returns
    -------
    argparse.ArgumentParser
        To be given its options.
    """
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def guarded(work: Callable[[], None], memory: str) -> int:
    """Do the work of a command; every foreseen failure is one sentence and a code.

    Parameters
    ----------
    work
        The work.
    memory
        What to say where memory runs out.

    Returns
    -------
    int
        Exit code.

    Raises
    ------
    Exception
        What is no wrong input: a fault of this program, or that nobody reads on.
    """
    if not gc.isenabled():  # a process of its own, see `ceilings.cli.main`
        # What was imported stays to the end: neither the collector nor the end of the process need walk it again.
        gc.freeze()
        gc.enable()
    try:
        work()
    except Exception as error:
        if is_out_of_memory(error):
            return fail(memory, TOO_LARGE)
        if isinstance(error, BrokenPipeError) or not isinstance(error, ValueError | OSError):
            raise
        return fail(str(error), WRONG_INPUT)
    return OK


def fail(message: str, code: int) -> int:
    """Print why a command failed, on stderr.

    Parameters
    ----------
    message
        One sentence.
    code
        Exit code.

    Returns
    -------
    int
        The code.
    """
    sys.stderr.write(f"ceilings: {' '.join(message.split())}\n")
    return code


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, means that memory ran out; PyTorch has no type for that on a CPU.

    Parameters
    ----------
    error
        The error.

    Returns
    -------
    bool
        Whether it does.
    """
    while error is not None:
        if isinstance(error, MemoryError) or any(
            words in str(error) for words in ("allocate memory", "out of memory")
        ):
            return True
        error = error.__cause__
    return False


def positive(text: str) -> int:
    """Whole number of at least 1, for options.

    Parameters
    ----------
    text
        What was typed.

    Returns
    -------
    int
        The number.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is none.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


class Terminal:
    """Lines on stdout; on a terminal, progress on stderr; Ctrl-C once to stop well, twice to stop at once."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._stop = self._shown = False
        self._step, self._started, self._first = "", 0.0, 0
        self._previous: Any = None

    def say(self, text: str) -> None:
        """Print a line."""
        self._clear()
        print(text, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a step is, and how long it will still take."""
        if not self._terminal:
            return
        now = time.monotonic()
        if what != self._step:
            self._step, self._started, self._first = what, now, done
        made = done - self._first
        left = f" · about {_clock((now - self._started) / made * (total - done))} left" if made else ""
        self._clear()
        if done < total:
            sys.stderr.write(f"{what} {done} of {total}{left}")
            sys.stderr.flush()
            self._shown = True

    def allow_stopping(self) -> None:
        """Heed the first Ctrl-C after the batch at hand; the second at once."""

        def heed(number: int, frame: FrameType | None) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True
            self._clear()
            sys.stderr.write("ceilings: finishing this batch, then saving; Ctrl-C again stops at once\n")

        with contextlib.suppress(ValueError):  # only the main thread may ask for signals
            self._previous = signal.signal(signal.SIGINT, heed)

    def stopping(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._stop

    def close(self) -> None:
        """Leave the terminal and the signal as they were."""
        self._clear()
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _clear(self) -> None:
        """Take the line of progress away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def _clock(seconds: float) -> str:
    """Time left, in words."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
