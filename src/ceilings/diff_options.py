"""``ceilings diff`` on the command line: its options, help and failures."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from ceilings.console import Terminal, add_command, guarded, positive

if TYPE_CHECKING:
    from ceilings.diff_command import DiffOptions

__all__ = ["add_diff", "run_diff"]

_CODES: Final = """\
exit codes:
  0  compared
  1  a fault of this program, with a traceback: please report it
  2  wrong usage or input; the message says what and where
  4  not enough memory
"""
_DIFF: Final = """\
Compare a base with a fine-tune of it: is the change small, is it sparse, is it low-rank? Each by its own measure, with
the number format in which it holds. Local files only, read tensor by tensor; nothing is downloaded or written over.

examples:
  two Hugging Face folders; a table on the terminal
      ceilings diff base/ tuned/
  all numbers, and one page with pictures that opens offline
      ceilings diff base/ tuned/ --json diff.json --html diff.html
  a LoRA adapter: its change is computed, not merged on disk
      ceilings diff base/ adapter/
  a quantised base: both sides are rounded to the tuned model's format, unless told otherwise
      ceilings diff base.gguf tuned/
      ceilings diff base.gguf tuned/ --dtype float32
  several fine-tunes: what do they have in common, and what would chance give?
      ceilings diff base/ seed-1/ seed-2/ seed-3/

BASE and TUNED: a .safetensors, .bin, .pt or .gguf file, a Hugging Face folder (sharded or not), smollm2 for the
built-in model as BASE, a PEFT LoRA folder as TUNED. Names match exactly, or after the prefixes base_model.model.,
_orig_mod., module. and model. are taken off; never by resemblance.
"""


def add_diff(commands: Any) -> None:
    """Add the command and its options to a parser.

    Parameters
    ----------
    commands
        What ``add_subparsers`` returned.
    """
    summary = "compare checkpoints: small, sparse, low-rank?"
    command = add_command(commands, "diff", summary, _DIFF, _CODES)
    add = command.add_argument
    add("base", metavar="BASE", help="what the fine-tune began from")
    add("tuned", metavar="TUNED", nargs="+", help="one fine-tune, or several of the same base")
    add("--json", metavar="FILE", help="write all numbers to a file")
    add("--html", metavar="FILE", help="write one page with tables and pictures")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="round both sides to this format (the coarser of the two that are stored)",
    )
    add(
        "--min-coverage",
        metavar="SHARE",
        type=_share,
        default=0.99,
        help="least share of the base's parameters that must have a partner (0.99)",
    )
    add("--no-rank", action="store_true", help="leave singular values out: several times faster")
    add("--threads", metavar="N", type=positive, help="tensors to work on at once (one a core, at most 8)")
    command.set_defaults(run=run_diff)


def run_diff(found: argparse.Namespace, terminal: Terminal) -> int:
    """Run ``ceilings diff``.

    Parameters
    ----------
    found
        The options as typed.
    terminal
        Where to say what is going on.

    Returns
    -------
    int
        Exit code.
    """
    from ceilings.diff_command import diff

    options = _options(found)
    return guarded(
        lambda: diff(options, terminal), "memory ran out; --threads 1 works on one tensor at a time"
    )


def _share(text: str) -> float:
    """Share between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share between 0 and 1")
    return value


def _options(found: argparse.Namespace) -> DiffOptions:
    """Options of the command."""
    from ceilings.diff_command import DiffOptions

    return DiffOptions(
        base=found.base,
        tuned=tuple(found.tuned),
        json=found.json,
        html=found.html,
        dtype=found.dtype,
        min_coverage=found.min_coverage,
        rank=not found.no_rank,
        threads=found.threads,
    )
