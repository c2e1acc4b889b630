"""The work behind ``ceilings measure``: inputs, sampling, moments, report, in steps that can be taken up again."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from ceilings.distributed import team
from ceilings.expected_cost import Cost, available_memory, measured_cost
from ceilings.jsonl import read_lines
from ceilings.measurement import Checkpoint, Interrupted, measure_rollouts, reward_columns
from ceilings.moments import ScoreMoments
from ceilings.next_token import next_token_moments
from ceilings.pretrained import load_pretrained, tied_names
from ceilings.report import VERSION, caveats, conclusions, package_versions, write_json
from ceilings.report_page import page
from ceilings.rollouts import Rollouts, check_fits, read_rollouts, write_rollouts
from ceilings.run_folder import RunFolder, model_fingerprint
from ceilings.summary import summarise, write_derived
from ceilings.tasks import Prompt, RewardRule, read_prompts, reward_rule

__all__ = ["Console", "MeasureOptions", "NeedsConsentError", "TooLargeError", "load", "measure"]

_ROWS: Final = 32  # responses sampled at once: one pass over the weights serves all of them
_LONG: Final = 3600.0  # seconds of an exact next-token measurement that ask for consent
_BUILT_IN: Final = "smollm2"


class TooLargeError(Exception):
    """The measurement does not fit into memory."""


class NeedsConsentError(ValueError):
    """The measurement takes hours, and the user has not said yes to that."""


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
class MeasureOptions:
    """Options of ``ceilings measure``; its help says what they mean."""

    model: str
    out: str
    rollouts: str | None = None
    prompts: str | None = None
    reward: str | None = None
    samples: int = 8
    max_new_tokens: int = 64
    next_token: str | None = None
    options: tuple[str, ...] = ()
    centre_by_group: bool = False
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
            "model rollouts prompts reward samples max_new_tokens next_token options centre_by_group seed dtype"
        ).split()
        config = {name: getattr(self, name) for name in names}
        config["options"] = list(self.options)
        if self.prompts is None:
            config |= {"reward": None, "samples": None, "max_new_tokens": None}
        return config | {"level": "sequence" if self.next_token is None else "next-token"}


def measure(options: MeasureOptions, console: Console) -> None:
    """Measure a model and write the report.

    Parameters
    ----------
    options
        What to measure.
    console
        Where to say what is going on.

    Raises
    ------
    ValueError
        If an input is wrong.
    NeedsConsentError
        If it takes hours and nobody said yes to that.
    TooLargeError
        If there is not enough memory.
    Interrupted
        If the user stopped the run; what was done is in the folder.
    """
    folder = RunFolder(options.out)
    source = options.rollouts or options.prompts
    if source is not None:
        read_lines(source)  # before the model is loaded: a broken file is found at once
    rule = reward_rule(options.reward or "exact") if options.prompts is not None else None
    model, tokenizer = load(options)
    config = options.result_config() | {
        "model_fingerprint": model_fingerprint(model),
        "input_digest": None
        if source is None
        else hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16],
    }
    folder.check(config)
    if folder.finished and not options.dry_run:
        console.say(f"{options.out} holds this measurement already: see {Path(options.out) / 'report.html'}")
        return
    task: _Task
    if options.next_token is not None:
        task = _NextTokenTask(options, model, tokenizer)
    elif options.rollouts is not None:
        task = _RolloutsTask(options, model, read_rollouts(options.rollouts, tokenizer))
    else:
        assert options.prompts is not None and rule is not None
        task = _PromptsTask(options, model, tokenizer, read_prompts(options.prompts, tokenizer), rule)
    cost = task.cost()
    _announce(cost, options, console)
    if options.dry_run:
        return
    _check_memory(cost, model)
    if options.next_token is not None and cost.seconds > _LONG and not options.yes:
        raise NeedsConsentError(
            f"this exact measurement takes about {_duration(cost.seconds)}: add --yes to start it, or sample instead"
        )
    started = time.monotonic()
    folder.claim(config)
    if options.next_token is None:
        console.allow_stopping()
    try:
        moments = task.moments(folder, console)
    except ValueError:
        if not folder.moments.exists():  # the samples cannot be used: leave nothing half done behind
            folder.abandon()
        raise
    moments.save(folder.moments)
    report = _report(options, task, moments, tokenizer, time.monotonic() - started)
    del task, model
    write_derived(moments, folder.path)
    _write_text(folder.path / "report.html", page(report))
    write_json(folder.path / "report.json", report)
    for sentence in report["conclusions"]:
        console.say(sentence)
    console.say(f"The whole report: {folder.path / 'report.html'}")


class _Task(Protocol):
    """One way of getting at score moments."""

    model: nn.Module
    sample: dict[str, Any]
    fisher_kind: str

    def cost(self) -> Cost:
        """Expected cost."""

    def moments(self, folder: RunFolder, console: Console) -> ScoreMoments:
        """Do the work."""


class _RolloutsTask:
    """Rollouts that were made elsewhere."""

    fisher_kind = "as the rollouts"
    source = "rollouts"

    def __init__(self, options: MeasureOptions, model: nn.Module, rollouts: Rollouts) -> None:
        self.options, self.model, self.rollouts = options, model, rollouts
        rollouts.check_signal(options.centre_by_group)
        sequences = [p + r for p, r in zip(rollouts.prompt_ids, rollouts.response_ids, strict=True)]
        names = [f"{options.rollouts}, rollout {row}" for row in range(1, len(sequences) + 1)]
        check_fits(sequences, _vocabulary(model), _context(model), names)
        self.sample = _sample(rollouts, self.source)

    def cost(self) -> Cost:
        return measured_cost(self.model, self.rollouts.lengths, 2, self.options.batch_size)

    def moments(self, folder: RunFolder, console: Console) -> ScoreMoments:
        return _rollout_moments(self.options, self.model, self.rollouts, folder, console)


class _PromptsTask:
    """Prompts to which the model responds here."""

    fisher_kind = "monte-carlo"

    def __init__(
        self,
        options: MeasureOptions,
        model: nn.Module,
        tokenizer: Any,
        prompts: list[Prompt],
        rule: RewardRule,
    ) -> None:
        if tokenizer is None:
            raise ValueError(
                "the model has no tokenizer, and a reward rule reads text: use --rollouts with rewards"
            )
        self.options, self.model, self.tokenizer = options, model, tokenizer
        self.prompts, self.rule = prompts, rule
        if options.samples * len(prompts) < 2:
            raise ValueError("one response only: a covariance needs at least two, raise --samples")
        check_fits(
            [p.ids for p in prompts],
            _vocabulary(model),
            _context(model),
            [p.where for p in prompts],
            options.max_new_tokens,
        )
        self.end_ids = _end_ids(model, tokenizer)
        self.sample: dict[str, Any] = {}

    def cost(self) -> Cost:
        options = self.options
        lengths = [len(p.ids) + options.max_new_tokens for p in self.prompts for _ in range(options.samples)]
        rows = min(len(self.prompts), self._at_once()) * options.samples
        steps = options.max_new_tokens * -(-len(self.prompts) // self._at_once())
        return measured_cost(self.model, lengths, 2, options.batch_size, steps, rows)

    def moments(self, folder: RunFolder, console: Console) -> ScoreMoments:
        rollouts = self._sampled(folder, console)
        rollouts.check_signal(self.options.centre_by_group)
        self.sample = _sample(rollouts, "sampled")
        return _rollout_moments(self.options, self.model, rollouts, folder, console)

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
                [_generator(options.seed, start + k) for k in range(len(prompts))],
                max_new_tokens=options.max_new_tokens,
                end_ids=self.end_ids,
            )
            texts = [self._text(ids) for ids in drawn.response_ids]
            owners = [prompt for prompt in prompts for _ in range(samples)]
            rewards = [self._reward(text, prompt) for text, prompt in zip(texts, owners, strict=True)]
            groups = tuple(start + k for k in range(len(prompts)) for _ in range(samples))
            parts.append(
                Rollouts(
                    tuple(p.ids for p in owners),
                    drawn.response_ids,
                    torch.tensor(rewards, dtype=torch.float64),
                    groups,
                    drawn.log_probs,
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

    def _reward(self, text: str, prompt: Prompt) -> float:
        """Reward of one response; a rule that cannot judge names the prompt."""
        try:
            return float(self.rule(text, prompt.line))
        except ValueError as error:
            raise ValueError(f"{prompt.where}: {error}") from error


class _NextTokenTask:
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
        check_fits([ids], _vocabulary(model), _context(model), ["the prompt of --next-token"])
        self.options, self.model, self.ids = options, model, torch.tensor(ids)
        self.words = [_word(option, options.next_token, tokenizer) for option in options.options]
        if len(set(self.words)) < len(self.words):
            raise ValueError("two of the --options are the same token: give different words")
        vocabulary = _vocabulary(model)
        self.sample = {
            "source": "whole vocabulary",
            "responses": vocabulary,
            "groups": 1,
            "response_tokens": vocabulary,
            "from_text": False,
        }

    def cost(self) -> Cost:
        width = int(getattr(getattr(self.model, "config", None), "hidden_size", 0) or 1024)
        cost = measured_cost(self.model, [len(self.ids)], len(self.words) - 1, 1)
        # One pass to activations for every direction of the head's covariance, many directions at once.
        seconds = cost.seconds * width * 0.15
        return dataclasses.replace(cost, seconds=seconds, batch_bytes=cost.batch_bytes + 8e8)

    def moments(self, folder: RunFolder, console: Console) -> ScoreMoments:
        rewards = torch.zeros(len(self.words), _vocabulary(self.model))
        rewards[range(len(self.words)), self.words] = 1
        return next_token_moments(self.model, self.ids, rewards, self.options.options)


def _rollout_moments(
    options: MeasureOptions, model: nn.Module, rollouts: Rollouts, folder: RunFolder, console: Console
) -> ScoreMoments:
    """Measure rollouts at the level and with the rewards that the options ask for."""
    rewards, names = reward_columns(rollouts, options.centre_by_group, _generator(options.seed, -1))
    return measure_rollouts(
        model,
        rollouts,
        rewards,
        names,
        batch_size=options.batch_size,
        checkpoint=Checkpoint(folder.moments, options.checkpoint_seconds),
        progress=lambda done, total: console.progress("measuring", done, total),
        stop=console.stopping,
    )


def load(options: MeasureOptions) -> tuple[nn.Module, Any]:
    """Load the model onto its device, and its tokenizer if it has one.

    Parameters
    ----------
    options
        Which model, dtype and device.

    Returns
    -------
    tuple
        Model, and tokenizer or None.

    Raises
    ------
    ValueError
        If the device cannot be used or the model not be read.
    """
    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:100]
        raise ValueError(f"the device {options.device!r} cannot be used: {reason}") from None
    path = None if options.model == _BUILT_IN else options.model
    if path is not None and not Path(path).exists():
        raise ValueError(
            f"there is no model {options.model!r}: give a local Hugging Face folder, a .gguf file, or {_BUILT_IN}"
        )
    dtype = getattr(torch, options.dtype)
    model, tokenizer = load_pretrained(path, dtype=dtype, need_tokenizer=False)
    module: nn.Module = model
    return module.to(device), tokenizer


def _report(
    options: MeasureOptions, task: _Task, moments: ScoreMoments, tokenizer: Any, seconds: float
) -> dict[str, Any]:
    """The report, words included."""
    parameters = dict(task.model.named_parameters())
    embeddings: Any = getattr(task.model, "get_input_embeddings", lambda: None)()
    table = next((n for n, p in parameters.items() if p is getattr(embeddings, "weight", None)), None)

    def row_label(name: str, row: int) -> str | None:
        return tokenizer.decode([row]) if tokenizer is not None and name == table else None

    body = summarise(moments, row_label)
    report: dict[str, Any] = {
        "kind": "ceilings.report",
        "version": VERSION,
        "config": options.result_config(),
        "versions": package_versions(),
        "device": _device_name(next(iter(parameters.values())).device),
        "dtype": options.dtype,
        "wall_seconds": round(seconds, 1),
        "model": {
            "class": type(task.model).__name__,
            "parameters": moments.num_parameters,
            "tensors": len(moments.names),
            "tied": {name: list(others) for name, others in tied_names(task.model).items()},
            "slow_parameters": list(moments.slow_parameters),
            "vocabulary": _vocabulary(task.model),
        },
        "sample": task.sample,
        **body,
    }
    report["fisher"] = {"kind": task.fisher_kind, **report["fisher"]}
    return report | {"conclusions": conclusions(report), "caveats": caveats(report)}


def _announce(cost: Cost, options: MeasureOptions, console: Console) -> None:
    """Say what it will cost."""
    console.say(
        f"{cost.parameters:,} parameters; memory about {_gigabytes(cost.bytes)} (weights "
        f"{_gigabytes(cost.weight_bytes)}, moments {_gigabytes(cost.moment_bytes)}, a batch "
        f"{_gigabytes(cost.batch_bytes)}); time about {_duration(cost.seconds)}"
    )


def _check_memory(cost: Cost, model: nn.Module) -> None:
    """Refuse what cannot fit, before hours are spent on it. The weights are there already."""
    device = next(model.parameters()).device
    free = available_memory(device)
    needed = (cost.moment_bytes + cost.batch_bytes) * (team().here if device.type == "cpu" else 1)
    if free is not None and needed > free:
        raise TooLargeError(
            f"the moments and a batch need {_gigabytes(needed)} and {_gigabytes(free)} are free: lower --batch-size, "
            "use --dtype bfloat16, or a larger machine"
        )


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


def _vocabulary(model: nn.Module) -> int:
    """Number of tokens that the model can read."""
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


def _generator(seed: int, stream: int) -> torch.Generator:
    """Source of randomness of one stream of a run, independent of all others."""
    text = hashlib.sha256(f"{seed} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(text[:7], "big"))


def _device_name(device: torch.device) -> str:
    """Kind of device, never the name of a machine."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _gigabytes(size: float) -> str:
    """Size in words."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    """Time in words."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 1):.0f} seconds"
