"""``ceilings patch`` on the command line: its options, help and failures."""

from __future__ import annotations

import argparse
from typing import Any, Final

from ceilings.console import STOPPED, Terminal, add_command, fail, guarded

__all__ = ["add_patch", "run_patch"]

_PATCH: Final = """\
Store a fine-tune as what changed against its base, without loss: the result of apply equals the fine-tune byte for
byte, tensor by tensor, in every number format of safetensors. Nothing is downloaded.

examples:
  what would a patch weigh, beside other ways of storing this fine-tune?
      ceilings patch make base/ tuned/ tuned.patch.safetensors
  the fine-tune again
      ceilings patch apply base/ tuned.patch.safetensors tuned.safetensors
  which tensors does it change, and how much?
      ceilings patch inspect tuned.patch.safetensors
  two fine-tunes of one base in one; where both change a number differently, the first decides
      ceilings patch merge maths.patch.safetensors code.patch.safetensors both.patch.safetensors --prefer first

BASE and TUNED are files of safetensors or torch.save (.bin, .pt), or Hugging Face folders of them; OUT of apply is a
safetensors file. Of a GGUF file, save the de-quantised tensors as safetensors first.
"""
_CODES: Final = """\
exit codes:
  0  done
  1  a fault of this program, with a traceback: please report it
  2  wrong usage or input, or patches in conflict; the message says what and where
  3  stopped by Ctrl-C; nothing was written
  4  not enough memory
"""
_OUT_OF_MEMORY: Final = (
    "memory ran out; a patch needs a few hundred megabytes, whatever the checkpoint: free some"
)
_MAKE: Final = """\
Write OUT, which turns BASE into TUNED, and say what it weighs beside TUNED itself, TUNED compressed, and adapters.

A number counts as changed when any of its bits differ: −0 is not +0, and one NaN is not another. Rows that only TUNED
has (a larger vocabulary), tensors that only TUNED has, and what takes less so than as changes are stored whole: OUT is
never larger than TUNED compressed by the same codec, but for its table of names and digests.
"""
_APPLY: Final = """\
Write OUT, the checkpoint that PATCH makes of BASE, as one safetensors file. Every tensor of BASE is compared with the
digest that the patch holds of it: another base is refused, and OUT is then not written.
"""
_INSPECT: Final = "Say what a patch changes, tensor by tensor, and what it weighs. The base is not needed."
_MERGE: Final = """\
Write OUT, one patch that does what two patches of the same base do. The rule: a number that only one of them changes
is taken from that one; a number that both change to the same bits is that; everything else is a conflict. Conflicts
are counted and listed, and nothing is written unless --prefer says which patch decides them.
"""


def add_patch(commands: Any) -> None:
    """Add the command and its options to a parser.

    Parameters
    ----------
    commands
        What ``add_subparsers`` returned.
    """
    summary = "store a fine-tune as a lossless patch of its base"
    command = add_command(commands, "patch", summary, _PATCH, _CODES)
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str, summary: str, *places: str) -> Any:
        found = add_command(actions, name, summary, text, _CODES)
        for place in places:
            found.add_argument(place.lower(), metavar=place.split("_")[0])
        found.set_defaults(run=run_patch)
        return found

    action("make", _MAKE, "write a patch", "BASE", "TUNED", "OUT")
    action("apply", _APPLY, "write the checkpoint that a patch makes", "BASE", "PATCH", "OUT")
    inspect = action("inspect", _INSPECT, "say what a patch holds", "PATCH")
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    merge = action("merge", _MERGE, "write one patch for two", "PATCH_1", "PATCH_2", "OUT")
    merge.add_argument("--prefer", choices=("first", "second"), help="which patch decides conflicts")
    merge.add_argument(
        "--base", metavar="BASE", help="needed only where the two store a tensor in different ways, or whole"
    )


def run_patch(found: argparse.Namespace, terminal: Terminal) -> int:
    """Run ``ceilings patch``.

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
    from ceilings.patch_command import patch

    try:
        return guarded(lambda: patch(found, terminal), _OUT_OF_MEMORY)
    except KeyboardInterrupt:
        return fail("stopped; nothing was written, and the same command begins anew", STOPPED)
