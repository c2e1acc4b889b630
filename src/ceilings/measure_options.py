"""``ceilings measure`` on the command line: its options, help and failures."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any, Final

from ceilings.console import STOPPED, TOO_LARGE, Parser, Terminal, add_command, fail, guarded, positive

__all__ = ["MeasureOptions", "add_measure", "run_measure"]

_CODES: Final = """\
exit codes:
  0  the report is written, or was there already; or --dry-run
  1  a fault of this program, with a traceback: please report it
  2  wrong usage or input; the message says what and where
  3  stopped by Ctrl-C; the same command goes on from there
  4  not enough memory
  5  with torchrun: another process of the run was lost; torchrun itself ends with 1 and names these codes
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
  several rewards at once, on the same responses
      ceilings measure smollm2 --prompts prompts.jsonl --reward exact --reward 'regex:\\.$' --out run
  rollouts with rewards, as a trainer logged them (token ids are better than text)
      ceilings measure my-model/ --rollouts rollouts.jsonl --centre-by-group --out run
          rollouts.jsonl: {"prompt_ids": [1, 15], "response_ids": [7, 2], "reward": 1.0, "group": 0}
                      or: {"prompt": "2 + 2 =", "response": " 4", "reward": 1.0}
                      or: {"prompt": "2 + 2 =", "response": " 4", "rewards": {"exact": 1.0, "length": 0.3}}
  every next token, exactly: where does a reward for "tea" push, and where one for "coffee"?
      ceilings measure smollm2 --next-token "She drank a cup of" --options tea coffee --out run

  on two processes, which share out the sequences
      torchrun --nproc-per-node 2 -m ceilings measure smollm2 --rollouts rollouts.jsonl --out run

Stop with Ctrl-C: what is done is kept, and the same command goes on. A report is one page, DIR/report.html, with
all numbers in DIR/report.json.
"""


_OUT_OF_MEMORY: Final = (
    "memory ran out; the same command goes on from the last checkpoint with a smaller --batch-size, "
    "--dtype bfloat16 halves the weights"
)


@dataclass(frozen=True)
class MeasureOptions:
    """Options of ``ceilings measure``; its help says what they mean."""

    model: str
    out: str
    rollouts: str | None = None
    prompts: str | None = None
    reward: tuple[str, ...] = ()
    samples: int = 8
    max_new_tokens: int = 64
    next_token: str | None = None
    options: tuple[str, ...] = ()
    level: str = "sequence"
    sign_draws: int | None = None
    centre_by_group: bool = False
    permutations: int = 2
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int = 8
    checkpoint_seconds: float = 60.0
    dry_run: bool = False
    yes: bool = False

    def result_config(self) -> dict[str, Any]:
        """Options on which the result depends, beyond rounding."""
        names = (
            "model rollouts prompts reward samples max_new_tokens next_token options level sign_draws "
            "centre_by_group permutations seed dtype"
        ).split()
        config = {name: getattr(self, name) for name in names}
        config |= {"options": list(self.options), "reward": list(self.reward)}
        if self.prompts is None:
            config |= {"samples": None, "max_new_tokens": None}
        if self.next_token is not None:
            config |= {"level": "next-token", "permutations": 0}
        if self.sign_draws is not None:
            config["batch_size"] = self.batch_size  # the signs are drawn batch by batch
        return config


def add_measure(commands: Any) -> None:
    """Add the command and its options to a parser.

    Parameters
    ----------
    commands
        What ``add_subparsers`` returned.
    """
    command = add_command(commands, "measure", "measure ceilings and tightness", _MEASURE, _CODES)
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
    group.add_argument(
        "--reward",
        metavar="RULE",
        action="append",
        help="exact, exact:TEXT, regex:PATTERN or module:function; may be given again for further rewards",
    )
    group.add_argument("--samples", metavar="G", type=positive, help="responses to each prompt (8)")
    group.add_argument("--max-new-tokens", metavar="T", type=positive, help="longest response (64)")
    group = command.add_argument_group("with --next-token")
    group.add_argument(
        "--options", metavar="WORD", nargs="+", help="words of one token; the first is the reward"
    )
    group = command.add_argument_group("with --rollouts or --prompts")
    group.add_argument(
        "--level",
        choices=("sequence", "token", "next-token"),
        help="whose squares make the Fisher information: whole responses (the default), their tokens, or every token "
        "that could stand there, exactly: ever less noise, ever more time",
    )
    group.add_argument(
        "--sign-draws",
        metavar="K",
        type=positive,
        help="with --level token: K backward passes with random signs, unbiased, in place of one a token",
    )
    group.add_argument(
        "--permutations",
        metavar="P",
        type=positive,
        default=2,
        help="permuted copies of the reward, to see what chance gives (2); each needs as much memory as the gradient",
    )
    group = command.add_argument_group("how")
    group.add_argument(
        "--centre-by-group", action="store_true", help="subtract from each reward the mean of its group"
    )
    group.add_argument("--yes", action="store_true", help="start an exact measurement even if it takes hours")
    group.add_argument("--seed", type=int, default=0, help="seed of sampling and shuffling (0)")
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="of the weights"
    )
    group.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:1, mps, …")
    group.add_argument(
        "--batch-size", metavar="B", type=positive, default=8, help="sequences in one pass (8)"
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
    command.set_defaults(run=run_measure)


def run_measure(found: argparse.Namespace, terminal: Terminal) -> int:
    """Run ``ceilings measure``.

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
    options = _options(found)
    from ceilings import distributed

    if not distributed.launched():
        return _measure(options, terminal)
    from ceilings.measure_command import load

    return distributed.run_together(
        options.device,
        lambda device: _measure(replace(options, device=device), terminal),
        lambda device: load(replace(options, device=device))[0],
    )


def _measure(options: MeasureOptions, terminal: Terminal) -> int:
    """Run the command."""
    from ceilings.measure_command import TooLargeError, measure
    from ceilings.measurement import Interrupted

    try:
        return guarded(lambda: measure(options, terminal), _OUT_OF_MEMORY)
    except Interrupted:
        return fail(
            f"stopped; {options.out} keeps what is done, and the same command goes on from there", STOPPED
        )
    except TooLargeError as error:
        return fail(str(error), TOO_LARGE)


def _options(found: argparse.Namespace) -> MeasureOptions:
    """Options of the command, refused where they do not go together."""
    parser = Parser(prog="ceilings measure")
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
    if found.next_token is not None and found.level is not None:
        parser.error("--level does not go with --next-token: that is a level of its own")
    if found.sign_draws is not None and found.level != "token":
        parser.error("--sign-draws goes with --level token only")
    if found.reward is not None and len(set(found.reward)) < len(found.reward):
        parser.error("two of the --reward are the same: give each once")
    given: dict[str, Any] = {
        k: v for k, v in vars(found).items() if k not in ("command", "run") and v is not None
    }
    if found.options is not None:
        given["options"] = tuple(found.options)
    if found.reward is not None:
        given["reward"] = tuple(found.reward)
    return MeasureOptions(**given)
