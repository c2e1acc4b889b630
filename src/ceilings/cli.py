"""The command ``ceilings``: options, progress, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from ceilings.measure_command import MeasureOptions

__all__ = ["main"]

OK: Final = 0
WRONG_INPUT: Final = 2
STOPPED: Final = 3
TOO_LARGE: Final = 4

_CODES: Final = """\
exit codes:
  0  the report is written, or was there already; or --dry-run
  1  a fault of this program, with a traceback: please report it
  2  wrong usage or input; the message says what and where
  3  stopped by Ctrl-C; the same command goes on from there
  4  not enough memory
"""
_MEASURE: Final = """\
Measure how far a reward can push each parameter of a causal language model: the gradient of the expected reward,
its ceiling σ(R)·√F, and tightness, the share of the ceiling in use. Nothing is trained and nothing is downloaded.

examples:
  what would it cost?
      ceilings measure smollm2 --prompts prompts.jsonl --reward exact --out run --dry-run
  sample 8 responses to each prompt and reward those that equal the prompt's answer
      ceilings measure smollm2 --prompts prompts.jsonl --reward exact --samples 8 --out run
          prompts.jsonl:  {"prompt": "2 + 2 =", "answer": "4"}
  reward what matches a pattern, or what a function of yours says: score(response, line) -> number
      ceilings measure my-model/ --prompts prompts.jsonl --reward 'regex:\\\\b4\\\\b' --out run
      ceilings measure my-model/ --prompts prompts.jsonl --reward my_rewards:score --out run
  rollouts with rewards, as a trainer logged them (token ids are better than text)
      ceilings measure my-model/ --rollouts rollouts.jsonl --centre-by-group --out run
          rollouts.jsonl: {"prompt_ids": [1, 15], "response_ids": [7, 2], "reward": 1.0, "group": 0}
                      or: {"prompt": "2 + 2 =", "response": " 4", "reward": 1.0}
  every next token, exactly: where does a reward for "tea" push, and where one for "coffee"?
      ceilings measure smollm2 --next-token "She drank a cup of" --options tea coffee --out run

Stop with Ctrl-C: what is done is kept, and the same command goes on. A report is one page, DIR/report.html, with
all numbers in DIR/report.json.
"""


class _Parser(argparse.ArgumentParser):
    """Parser that complains in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read on."""
        sys.stderr.write(f"{self.prog}: {message}; see {self.prog} --help\n")
        raise SystemExit(WRONG_INPUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments
        The command line without the name of the program; None for that of this process.

    Returns
    -------
    int
        0 done; 2 wrong usage or input; 3 stopped, to be resumed; 4 not enough memory.
    """
    console = _Console()
    try:
        return _measure(_options(_parser().parse_args(arguments)), console)
    except SystemExit as end:  # argparse ends the process; a function that is called returns
        return int(end.code or 0)
    except KeyboardInterrupt:
        return _fail(
            "stopped; what was saved before is kept, and the same command goes on from there", STOPPED
        )
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads on; say nothing more
        return OK
    finally:
        console.close()


def _measure(options: MeasureOptions, console: _Console) -> int:
    """Run ``ceilings measure``; every foreseen failure is one sentence and a code."""
    import torch

    from ceilings.measure_command import TooLargeError, measure
    from ceilings.measurement import Interrupted

    try:
        measure(options, console)
    except Interrupted:
        return _fail(
            f"stopped; {options.out} keeps what is done, and the same command goes on from there", STOPPED
        )
    except TooLargeError as error:
        return _fail(str(error), TOO_LARGE)
    except (MemoryError, torch.OutOfMemoryError):
        return _out_of_memory()
    except (ValueError, OSError, RuntimeError) as error:
        if any(_is_memory(e) for e in (error, error.__cause__)):
            return _out_of_memory()
        if isinstance(error, RuntimeError | BrokenPipeError):
            raise
        return _fail(" ".join(str(error).split()), WRONG_INPUT)
    return OK


def _is_memory(error: BaseException | None) -> bool:
    """Whether an error means that memory ran out; PyTorch has no type of its own for that on a CPU."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)


def _out_of_memory() -> int:
    """Say so."""
    return _fail(
        "memory ran out; the same command goes on from the last checkpoint with a smaller --batch-size, "
        "--dtype bfloat16 halves the weights",
        TOO_LARGE,
    )


def _fail(message: str, code: int) -> int:
    """Print a sentence and give the code back."""
    sys.stderr.write(f"ceilings: {message}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    """All options."""
    parser = _Parser(
        prog="ceilings", description="How far a reward can push each parameter of a language model."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(
        "measure",
        help="measure ceilings and tightness",
        description=_MEASURE,
        epilog=_CODES,
        formatter_class=raw,
    )
    add = command.add_argument
    add(
        "model", metavar="MODEL", help="local Hugging Face folder, .gguf file, or smollm2, the built-in model"
    )
    add("--out", metavar="DIR", required=True, help="folder for the report; made if it is not there")
    source = command.add_argument_group("what to measure on (one of three)").add_mutually_exclusive_group(
        required=True
    )
    source.add_argument("--rollouts", metavar="FILE", help="JSON Lines of prompts, responses and rewards")
    source.add_argument(
        "--prompts", metavar="FILE", help="JSON Lines of prompts; responses are sampled at temperature 1"
    )
    source.add_argument(
        "--next-token", metavar="TEXT", help="every next token after this prompt, in exact expectation"
    )
    group = command.add_argument_group("with --prompts")
    group.add_argument("--reward", metavar="RULE", help="exact, exact:TEXT, regex:PATTERN or module:function")
    group.add_argument("--samples", metavar="G", type=_positive, help="responses to each prompt (8)")
    group.add_argument("--max-new-tokens", metavar="T", type=_positive, help="longest response (64)")
    group = command.add_argument_group("with --next-token")
    group.add_argument(
        "--options", metavar="WORD", nargs="+", help="words of one token; the first is the reward"
    )
    group.add_argument("--yes", action="store_true", help="start even if it takes hours")
    group = command.add_argument_group("how")
    group.add_argument(
        "--centre-by-group", action="store_true", help="subtract from each reward the mean of its group"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of sampling and shuffling (0)")
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="of the weights"
    )
    group.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:1, mps, …")
    group.add_argument(
        "--batch-size", metavar="B", type=_positive, default=8, help="sequences in one pass (8)"
    )
    group.add_argument(
        "--checkpoint-seconds",
        metavar="S",
        type=float,
        default=60.0,
        help="least time between two savings (60)",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print parameters, memory and time expected, and stop"
    )
    return parser


def _options(found: argparse.Namespace) -> MeasureOptions:
    """Options of the command, refused where they do not go together."""
    parser = _Parser(prog="ceilings measure")
    if found.prompts is None:
        for name in ("reward", "samples", "max_new_tokens"):
            if getattr(found, name) is not None:
                parser.error(f"--{name.replace('_', '-')} goes with --prompts only")
    elif found.reward is None:
        parser.error("--prompts needs a --reward: exact, exact:TEXT, regex:PATTERN or module:function")
    if (found.next_token is None) != (found.options is None):
        parser.error("--next-token and --options go together")
    if found.next_token is not None and found.centre_by_group:
        parser.error("--centre-by-group does not go with --next-token: there is one prompt only")
    from ceilings.measure_command import MeasureOptions

    given: dict[str, Any] = {k: v for k, v in vars(found).items() if k != "command" and v is not None}
    if found.options is not None:
        given["options"] = tuple(found.options)
    return MeasureOptions(**given)


def _positive(text: str) -> int:
    """Whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


class _Console:
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
