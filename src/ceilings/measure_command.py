"""The work behind ``ceilings measure``: inputs, sampling, moments, report, in steps that can be taken up again."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ceilings.distributed import team
from ceilings.expected_cost import Cost, available_memory
from ceilings.jsonl import read_lines
from ceilings.measure_options import MeasureOptions
from ceilings.measure_tasks import (
    Console,
    Measured,
    NextTokenTask,
    PromptsTask,
    RolloutsTask,
    Task,
    vocabulary_size,
)
from ceilings.pretrained import load_pretrained, tied_names
from ceilings.report import VERSION, caveats, conclusions, package_versions, write_json
from ceilings.report_page import page
from ceilings.rollouts import Rollouts, read_rollouts
from ceilings.run_folder import RunFolder, model_fingerprint
from ceilings.summary import summarise, write_derived
from ceilings.tasks import RewardRule, read_prompts, reward_rule

__all__ = ["NeedsConsentError", "TooLargeError", "load", "measure"]

_LONG: Final = 3600.0  # seconds of an exact next-token measurement that ask for consent
_BUILT_IN: Final = "smollm2"


class TooLargeError(Exception):
    """The measurement does not fit into memory."""


class NeedsConsentError(ValueError):
    """The measurement takes hours, and the user has not said yes to that."""


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
        _check_lines(source)  # before the model is loaded: a broken file is found at once
    rules = {rule: _rule(rule) for rule in options.reward}
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
    task: Task
    if options.next_token is not None:
        task = NextTokenTask(options, model, tokenizer)
    elif options.rollouts is not None:
        task = RolloutsTask(options, model, _rollouts(options.rollouts, tokenizer))
    else:
        assert options.prompts is not None and rules
        task = PromptsTask(options, model, tokenizer, read_prompts(options.prompts, tokenizer), rules)
    cost = task.cost()
    _announce(cost, options, console)
    if options.dry_run:
        return
    _check_memory(cost, model)
    exact = options.next_token is not None or (options.level != "sequence" and options.sign_draws is None)
    if exact and cost.seconds > _LONG and not options.yes:
        raise NeedsConsentError(
            f"this takes about {_duration(cost.seconds)}: add --yes to start it, or choose another level"
        )
    started = time.monotonic()
    folder.claim(config)
    if options.next_token is None:
        console.allow_stopping()
    try:
        found = task.measured(folder, console)
    except ValueError:
        if not folder.has_moments:  # the samples cannot be used: leave nothing half done behind
            folder.abandon()
        raise
    report = _report(options, task, found, tokenizer, started)
    del task, model
    write_derived(found.folds, folder.path)
    _write_text(folder.path / "report.html", page(report))
    write_json(folder.path / "report.json", report)
    for sentence in report["conclusions"]:
        console.say(sentence)
    console.say(f"The whole report: {folder.path / 'report.html'}")


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
    OSError
        If its files cannot be read.
    MemoryError
        If there is no room for it.
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
    try:
        model, tokenizer = load_pretrained(path, dtype=dtype, need_tokenizer=False)
    except (ValueError, OSError, MemoryError):
        raise
    except Exception as error:
        # NOTE a file cut short fails wherever its reader happens to be, and every reader has errors of its own.
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{options.model!r} is not a readable causal language model ({reason}): copy it again, or use another"
        ) from error
    module: nn.Module = model
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(
                f"{name} of the model holds NaN or infinity: its probabilities are not defined, use another checkpoint"
            )
    return module.to(device), tokenizer


def _check_lines(source: str) -> None:
    """Refuse a file that is not made of JSON objects."""
    try:
        read_lines(source)
    except RecursionError:
        raise ValueError(f"{source}: a line is nested too deeply to be a rollout or a prompt") from None


def _rule(rule: str) -> RewardRule:
    """Reward rule; whatever the module of a user does on being imported is one sentence."""
    try:
        return reward_rule(rule)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"the reward rule {rule} cannot be imported: {type(error).__name__}: {error}"
        ) from None


def _rollouts(path: str, tokenizer: Any) -> Rollouts:
    """Rollouts of a file; a value of the wrong kind is a wrong input wherever it stands."""
    try:
        return read_rollouts(path, tokenizer)
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"{path}: a value cannot be used ({error}); rewards must be numbers, `log_probs` a list of numbers"
        ) from None


def _report(
    options: MeasureOptions, task: Task, found: Measured, tokenizer: Any, started: float
) -> dict[str, Any]:
    """The report, words included."""
    parameters = dict(task.model.named_parameters())
    embeddings: Any = getattr(task.model, "get_input_embeddings", lambda: None)()
    table = next((n for n, p in parameters.items() if p is getattr(embeddings, "weight", None)), None)

    def row_label(name: str, row: int) -> str | None:
        return tokenizer.decode([row]) if tokenizer is not None and name == table else None

    measured = time.monotonic()
    body = summarise(found.folds, found.halves, row_label)
    report: dict[str, Any] = {
        "kind": "ceilings.report",
        "version": VERSION,
        "config": options.result_config(),
        "versions": package_versions(),
        "device": _device_name(next(iter(parameters.values())).device),
        "dtype": options.dtype,
        "wall_seconds": round(time.monotonic() - started, 1),
        "model": {
            "class": type(task.model).__name__,
            "parameters": sum(tensor["parameters"] for tensor in body["tensors"]),
            "tensors": len(body["tensors"]),
            "tied": {name: list(others) for name, others in tied_names(task.model).items()},
            "slow_parameters": list(found.folds.together(found.folds.names[0]).slow_parameters),
            "slow_seconds": round(found.slow_seconds, 1),
            "slow_share": found.slow_seconds / max(measured - started, 1e-9),
            "vocabulary": vocabulary_size(task.model),
        },
        "sample": task.sample,
        **body,
    }
    report["fisher"] = {"kind": task.fisher_kind, **report["fisher"]}
    return report | {"conclusions": conclusions(report), "caveats": caveats(report)}


def _announce(cost: Cost, options: MeasureOptions, console: Console) -> None:
    """Say what it will cost."""
    each = f" in each of {team().size} processes" if team().size > 1 else ""
    console.say(
        f"{cost.parameters:,} parameters; memory about {_gigabytes(cost.bytes)}{each} (weights "
        f"{_gigabytes(cost.weight_bytes)}, moments {_gigabytes(cost.moment_bytes)}, a batch "
        f"{_gigabytes(cost.batch_bytes)}); "
        f"disk about {_gigabytes(cost.file_bytes)}; time about {_duration(cost.seconds)}"
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
    return "a second" if seconds < 1.5 else f"{seconds:.0f} seconds"
