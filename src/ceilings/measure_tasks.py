"""What `ceilings measure` can measure on: rollouts from a file, prompts to answer, the next token of one prompt."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, cast

import torch
from torch import nn

from ceilings.distributed import team
from ceilings.expected_cost import Cost, sample_cost
from ceilings.folds import Folds, two_halves
from ceilings.jsonl import read_lines
from ceilings.measure_options import MeasureOptions
from ceilings.measurement import Checkpoint, Interrupted, measure_rollouts, reward_columns
from ceilings.moments import Level, ScoreMoments
from ceilings.next_token import next_token_moments
from ceilings.rollouts import Rollouts, centred_by_group, check_fits, read_rollouts, write_rollouts
from ceilings.run_folder import RunFolder
from ceilings.tasks import Prompt, RewardRule
from ceilings.uncertainty import is_permuted

__all__ = [
    "Console",
    "Measured",
    "NextTokenTask",
    "PromptsTask",
    "RolloutsTask",
    "Task",
    "generator_of",
    "vocabulary_size",
]

_ROWS: Final = 32  # responses sampled at once: one pass over the weights serves all of them


class Console(Protocol):
    """What the command line lends to the work."""

    def say(self, text: str) -> None:
        """Print a line."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a step is."""

    def allow_stopping(self) -> None:
        """From now on a request to stop is heeded where the work can be taken up again."""

    def stopping(self) -> bool:
        """Whether the user asked to stop."""


@dataclass(frozen=True)
class Measured:
    """What a task found.

    Parameters
    ----------
    folds
        The moments.
    halves
        What was kept whole when the responses were split: ``"groups"``, ``"responses"``, or None for no split.
    slow_seconds
        Time that the parameters without a fast rule took, in this call.
    """

    folds: Folds
    halves: str | None
    slow_seconds: float


class Task(Protocol):
    """One way of getting at score moments."""

    model: nn.Module
    sample: dict[str, Any]
    fisher_kind: str

    def cost(self) -> Cost:
        """Expected cost."""

    def measured(self, folder: RunFolder, console: Console) -> Measured:
        """Do the work; the moments are in the folder afterwards."""


class RolloutsTask:
    """Rollouts that were made elsewhere."""

    fisher_kind = "as the rollouts"
    source = "rollouts"

    def __init__(self, options: MeasureOptions, model: nn.Module, rollouts: Rollouts) -> None:
        self.options, self.model, self.rollouts = options, model, rollouts
        rollouts.check_signal(options.centre_by_group)
        sequences = [p + r for p, r in zip(rollouts.prompt_ids, rollouts.response_ids, strict=True)]
        names = [f"{options.rollouts}, rollout {row}" for row in range(1, len(sequences) + 1)]
        check_fits(sequences, vocabulary_size(model), _context(model), names)
        self.sample = _sample(rollouts, self.source)

    def cost(self) -> Cost:
        """Expected cost."""
        return _cost(self.options, self.model, self.rollouts)

    def measured(self, folder: RunFolder, console: Console) -> Measured:
        """Measure them."""
        return _measured(self.options, self.model, self.rollouts, folder, console)


class PromptsTask:
    """Prompts to which the model responds here."""

    fisher_kind = "monte-carlo"

    def __init__(
        self,
        options: MeasureOptions,
        model: nn.Module,
        tokenizer: Any,
        prompts: list[Prompt],
        rules: dict[str, RewardRule],
    ) -> None:
        if tokenizer is None:
            raise ValueError(
                "the model has no tokenizer, and a reward rule reads text: use --rollouts with rewards"
            )
        self.options, self.model, self.tokenizer = options, model, tokenizer
        self.prompts, self.rules = prompts, rules
        if options.samples * len(prompts) < 2:
            raise ValueError("one response only: a covariance needs at least two, raise --samples")
        check_fits(
            [p.ids for p in prompts],
            vocabulary_size(model),
            _context(model),
            [p.where for p in prompts],
            options.max_new_tokens,
        )
        self.end_ids = _end_ids(model, tokenizer)
        self.sample: dict[str, Any] = {}

    def cost(self) -> Cost:
        """Expected cost, if no response ends before it must."""
        options = self.options
        rows = -(-min(len(self.prompts), self._at_once()) // team().size) * options.samples
        steps = options.max_new_tokens * -(-len(self.prompts) // self._at_once())
        return _cost(options, self.model, self._longest(), steps, rows)

    def measured(self, folder: RunFolder, console: Console) -> Measured:
        """Sample, then measure."""
        rollouts = self._sampled(folder, console)
        rollouts.check_signal(self.options.centre_by_group)
        self.sample = _sample(rollouts, "sampled")
        return _measured(self.options, self.model, rollouts, folder, console)

    def _longest(self) -> Rollouts:
        """Rollouts as they would be if no response ended: of made-up tokens, no two of which agree."""
        room = range(self.options.max_new_tokens)
        owners = [(k, p) for k, p in enumerate(self.prompts) for _ in range(self.options.samples)]
        responses = tuple(tuple(n * len(room) + t for t in room) for n in range(len(owners)))
        rewards = {name: torch.zeros(len(owners)) for name in self.rules}
        main, *_ = rewards
        return Rollouts(
            tuple(p.ids for _, p in owners),
            responses,
            rewards.pop(main),
            tuple(k for k, _ in owners),
            reward_name=main,
            further_rewards=rewards,
        )

    def _at_once(self) -> int:
        """Prompts that are answered in one batch, by all processes together."""
        return team().size * max(1, _ROWS // self.options.samples)

    def _sampled(self, folder: RunFolder, console: Console) -> Rollouts:
        """Sample what is not in the folder yet."""
        options, samples = self.options, self.options.samples
        parts: list[Rollouts] = [read_rollouts(folder.rollouts)] if folder.rollouts.exists() else []
        extra: list[dict[str, Any]] = []
        if parts:
            extra = [{"response": line.values.get("response")} for line in read_lines(folder.rollouts)]
        done, saved = sum(len(part) for part in parts) // samples, time.monotonic()
        for start in range(done, len(self.prompts), self._at_once()):
            prompts = self.prompts[start : start + self._at_once()]
            drawn = team().sample(
                self.model,
                [p.ids for p in prompts],
                samples,
                [generator_of(options.seed, start + k) for k in range(len(prompts))],
                max_new_tokens=options.max_new_tokens,
                end_ids=self.end_ids,
            )
            texts = [self._text(ids) for ids in drawn.response_ids]
            owners = [prompt for prompt in prompts for _ in range(samples)]
            rewards = {
                name: torch.tensor(
                    [self._reward(name, text, prompt) for text, prompt in zip(texts, owners, strict=True)],
                    dtype=torch.float64,
                )
                for name in self.rules
            }
            main, *_ = rewards
            groups = tuple(start + k for k in range(len(prompts)) for _ in range(samples))
            parts.append(
                Rollouts(
                    tuple(p.ids for p in owners),
                    drawn.response_ids,
                    rewards.pop(main),
                    groups,
                    drawn.log_probs,
                    reward_name=main,
                    further_rewards=rewards,
                )
            )
            extra += [{"response": text} for text in texts]
            answered = start + len(prompts)
            console.progress("sampling", answered, len(self.prompts))
            stopping = answered < len(self.prompts) and console.stopping()
            # NOTE the whole file is written each time, so not after every batch.
            if (
                stopping
                or answered == len(self.prompts)
                or time.monotonic() - saved > options.checkpoint_seconds
            ):
                write_rollouts(folder.rollouts, _together(parts), extra)
                saved = time.monotonic()
            if stopping:
                raise Interrupted
        return _together(parts)

    def _text(self, ids: tuple[int, ...]) -> str:
        """Text of a response, without the token that ended it."""
        shown = ids[:-1] if ids[-1] in self.end_ids else ids
        return str(self.tokenizer.decode(shown, skip_special_tokens=True))

    def _reward(self, name: str, text: str, prompt: Prompt) -> float:
        """Reward of one response; a rule that cannot judge names the prompt."""
        try:
            return float(self.rules[name](text, prompt.line))
        except ValueError as error:
            raise ValueError(f"{prompt.where}: {error}") from error


class NextTokenTask:
    """Every next token after one prompt, with its probability."""

    fisher_kind = "exact"

    def __init__(self, options: MeasureOptions, model: nn.Module, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ValueError(
                "the model has no tokenizer, and --next-token is text: give a folder that has one"
            )
        assert options.next_token is not None
        ids = tuple(tokenizer(options.next_token).input_ids)
        if not ids:
            raise ValueError("the prompt of --next-token has no token: give some text")
        check_fits([ids], vocabulary_size(model), _context(model), ["the prompt of --next-token"])
        self.options, self.model, self.ids = options, model, torch.tensor(ids)
        self.words = [_word(option, options.next_token, tokenizer) for option in options.options]
        if len(set(self.words)) < len(self.words):
            raise ValueError("two of the --options are the same token: give different words")
        vocabulary = vocabulary_size(model)
        self.sample = {
            "source": "whole vocabulary",
            "responses": vocabulary,
            "groups": 1,
            "response_tokens": vocabulary,
            "from_text": False,
        }

    def cost(self) -> Cost:
        """Expected cost."""
        one = Rollouts((tuple(self.ids.tolist()),), ((self.words[0],),), torch.zeros(1), (0,))
        return sample_cost(self.model, one, len(self.words), 1, level="next-token", exact=True)

    def measured(self, folder: RunFolder, console: Console) -> Measured:
        """Measure the whole vocabulary."""
        rewards = torch.zeros(len(self.words), vocabulary_size(self.model))
        rewards[range(len(self.words)), self.words] = 1
        moments = next_token_moments(self.model, self.ids, rewards, self.options.options)
        _check_finite(moments, folder)
        moments.save(folder.moments())
        del moments
        return Measured(Folds([folder.moments()]), None, 0.0)


def _cost(
    options: MeasureOptions, model: nn.Module, rollouts: Rollouts, steps: int = 0, rows: int = 1
) -> Cost:
    """Cost of rollouts with the options of a run."""
    return sample_cost(
        model,
        rollouts,
        len(rollouts.all_rewards) + options.permutations,
        options.batch_size,
        level=cast(Level, options.level),
        sign_draws=options.sign_draws,
        new_tokens=steps,
        rows=rows,
        processes=team().size,
    )


def _measured(
    options: MeasureOptions, model: nn.Module, rollouts: Rollouts, folder: RunFolder, console: Console
) -> Measured:
    """Measure rollouts, one half after the other, at the level and with the rewards that the options ask for."""
    reserved = next((name for name in rollouts.all_rewards if is_permuted(name)), None)
    if reserved:
        raise ValueError(f"a permuted reward is called {reserved!r} here: give yours another name")
    split = two_halves(rollouts.groups, generator_of(options.seed, -2))
    folds = split[:2] if split else (list(range(len(rollouts))),)
    rewards = torch.stack([column.double() for column in rollouts.all_rewards.values()], 1)
    if options.centre_by_group:
        rewards = centred_by_group(rewards, torch.tensor(rollouts.groups))
    columns, names = reward_columns(
        rewards,
        tuple(rollouts.all_rewards),
        rollouts.groups,
        folds,
        options.permutations,
        generator_of(options.seed, -1),
    )
    spent, done, files = [0.0], 0, []
    for fold, rows in enumerate(folds, 1):
        path = folder.moments(fold if split else None)
        files.append(path)
        if path.exists() and ScoreMoments.stored_header(path)["count"] == len(rows):
            done += len(rows)
            continue
        moments = measure_rollouts(
            model,
            rollouts.take(rows),
            columns[rows],
            names,
            batch_size=options.batch_size,
            level=cast(Level, options.level),
            sign_draws=options.sign_draws,
            seed=options.seed,
            checkpoint=Checkpoint(path, options.checkpoint_seconds),
            progress=partial(_progress, console, done, len(rollouts)),
            stop=console.stopping,
            slow=spent.append,
        )
        _check_finite(moments, folder)
        moments.save(path)
        del moments  # one half in memory at a time: the other waits on the disk
        done += len(rows)
        if done < len(rollouts) and console.stopping():
            raise Interrupted
    return Measured(Folds(files), split[2] if split else None, sum(spent))


def _check_finite(moments: ScoreMoments, folder: RunFolder) -> None:
    """Refuse sums that no report can be made of, and leave nothing of them."""
    for name, squares in moments.squares.items():
        if not bool(squares.isfinite().all()):
            folder.abandon()
            raise ValueError(
                f"the scores of {name} are NaN or infinite: the model overflows on these responses, "
                "try --dtype float64"
            )


def _progress(console: Console, before: int, total: int, done: int, of: int) -> None:
    """Progress over both halves."""
    console.progress("measuring", before + done, total)


def _sample(rollouts: Rollouts, source: str) -> dict[str, Any]:
    """Size of the sample."""
    return {
        "source": source,
        "responses": len(rollouts),
        "groups": len(set(rollouts.groups)),
        "response_tokens": sum(map(len, rollouts.response_ids)),
        "from_text": rollouts.from_text,
    }


def _together(parts: list[Rollouts]) -> Rollouts:
    """Several portions of sampled rollouts as one."""

    def chain(name: str) -> Any:
        return tuple(itertools.chain.from_iterable(getattr(part, name) or () for part in parts))

    return Rollouts(
        chain("prompt_ids"),
        chain("response_ids"),
        torch.cat([part.rewards for part in parts]),
        chain("groups"),
        chain("log_probs") or None,
        reward_name=parts[0].reward_name,
        further_rewards={
            name: torch.cat([part.further_rewards[name] for part in parts])
            for name in parts[0].further_rewards
        },
    )


def _word(option: str, prompt: str, tokenizer: Any) -> int:
    """Token of an option, as it would follow the prompt."""
    text = option if option[:1].isspace() or prompt[-1:].isspace() else f" {option}"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise ValueError(
            f"the option {option!r} is {len(ids)} tokens after this prompt: give words of one token each"
        )
    return int(ids[0])


def vocabulary_size(model: nn.Module) -> int:
    """Number of tokens that a model can read.

    Parameters
    ----------
    model
        The model.

    Returns
    -------
    int
        Rows of its embedding.
    """
    find: Callable[[], Any] = getattr(model, "get_input_embeddings", lambda: None)
    return int(find().weight.shape[0])


def _context(model: nn.Module) -> int | None:
    """Longest sequence that the model can read."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else None


def _end_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def generator_of(seed: int, stream: int) -> torch.Generator:
    """Source of randomness of one stream of a run, independent of all others.

    Parameters
    ----------
    seed
        Seed of the run.
    stream
        Number of the prompt that is sampled; -1 for permutations, -2 for halves.

    Returns
    -------
    torch.Generator
        The same each time.
    """
    text = hashlib.sha256(f"{seed} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(text[:7], "big"))
