"""The command ``ceilings``: one line a command, each with a module for its options and one for its work."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from ceilings.console import OK, STOPPED, Parser, Terminal, fail
from ceilings.diff_options import add_diff
from ceilings.measure_options import add_measure
from ceilings.patch_options import add_patch

__all__ = ["main"]


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
    terminal = Terminal()
    alone = arguments is None
    if alone:  # until the work begins: a tenth of the time that PyTorch takes to load is the collector's
        gc.disable()
    try:
        found = _parser().parse_args(arguments)
        code: int = found.run(found, terminal)
        return code
    except SystemExit as end:  # argparse ends the process; a function that is called returns
        return int(end.code or 0)
    except KeyboardInterrupt:
        return fail(
            "stopped; what was saved before is kept, and the same command goes on from there", STOPPED
        )
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads on; say nothing more
        return OK
    finally:
        if alone:
            gc.enable()
        terminal.close()


def _parser() -> Parser:
    """All commands."""
    parser = Parser(
        prog="ceilings", description="How far a reward can push each parameter of a language model."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_measure(commands)
    add_diff(commands)
    add_patch(commands)
    return parser
