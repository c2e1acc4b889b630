"""Prompts, and rules that reward a response to them.

A prompt file holds one JSON object a line: ``prompt`` (text, or a list of chat messages) or ``prompt_ids``, and
whatever a rule needs to judge a response, such as ``answer``.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ceilings.jsonl import Line, read_lines

__all__ = ["PROMPT_NAMES", "Prompt", "RewardRule", "encode_prompt", "read_prompts", "reward_rule"]

#: From the text of a response and the line of its prompt to a number.
RewardRule = Callable[[str, Mapping[str, Any]], float]

#: What the prompt is called here and in the logs of trainers.
PROMPT_NAMES: Final = ("prompt", "input", "question")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Parameters
    ----------
    ids
        Its tokens.
    line
        The object that it came from, which a `RewardRule` may consult.
    where
        File and line, for messages.
    """

    ids: tuple[int, ...]
    line: Mapping[str, Any]
    where: str


def read_prompts(path: str | os.PathLike[str], tokenizer: Any) -> list[Prompt]:
    """Prompts of a JSON Lines file.

    Parameters
    ----------
    path
        The file.
    tokenizer
        Tokenizer of the model, or None if every line has ``prompt_ids``.

    Returns
    -------
    list
        One `Prompt` a line.

    Raises
    ------
    ValueError
        If a line has no prompt, or text needs a tokenizer that is not there.
    """
    return [Prompt(encode_prompt(line, tokenizer), line.values, line.where) for line in read_lines(path)]


def encode_prompt(line: Line, tokenizer: Any) -> tuple[int, ...]:
    """Tokens of the prompt of one line.

    Parameters
    ----------
    line
        Holds ``prompt_ids``, or one of `PROMPT_NAMES` with text or chat messages.
    tokenizer
        Tokenizer of the model, or None.

    Returns
    -------
    tuple
        Token ids. Chat messages go through the tokenizer's chat template and end where the answer begins.

    Raises
    ------
    ValueError
        If there is no prompt, it is empty, or it cannot be turned into tokens.
    """
    ids = line.token_ids("prompt_ids")
    prompt = line.first(PROMPT_NAMES)
    if ids is None and prompt is None:
        raise ValueError(f"{line.where}: there is no prompt; give `prompt` (text) or `prompt_ids` (tokens)")
    if ids is None and tokenizer is None:
        raise ValueError(
            f"{line.where}: the prompt is text but the model has no tokenizer; give `prompt_ids` instead"
        )
    if ids is None:
        ids = _encoded(prompt, tokenizer, line.where)
    if not ids:
        raise ValueError(f"{line.where}: the prompt has no token; a response needs one before it")
    return ids


def _encoded(prompt: Any, tokenizer: Any, where: str) -> tuple[int, ...]:
    """Tokens of text or of chat messages."""
    if isinstance(prompt, str):
        # NOTE text that was logged after the chat template has its first token already.
        begun = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
        return tuple(tokenizer(prompt, add_special_tokens=not begun).input_ids)
    if not isinstance(prompt, list) or not all(isinstance(m, dict) and "content" in m for m in prompt):
        raise ValueError(
            f"{where}: the prompt must be text or a list of chat messages with `role` and `content`"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{where}: the prompt is a chat but the tokenizer has no chat template; give text")
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def reward_rule(rule: str) -> RewardRule:
    r"""Reward rule from its name.

    Parameters
    ----------
    rule
        ``exact``: 1 where the response, stripped of outer white space, equals the prompt's ``answer``.
        ``exact:TEXT``: 1 where it equals TEXT. ``regex:PATTERN``: 1 where the pattern is found in it.
        ``module:function``: ``function(response, line)``, where ``line`` is the object of the prompt file.

    Returns
    -------
    RewardRule
        The rule. It raises ValueError where it cannot judge.

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If there is no such rule, or its pattern or function cannot be used.

    Notes
    -----
    A rule must not depend on the model's parameters: the covariance identity (``thm-covariance``) needs that.
    """
    kind, _, argument = rule.partition(":")
    if kind == "exact":
        return _exact(argument if ":" in rule else None)
    if kind == "regex" and argument:
        try:
            pattern = re.compile(argument)
        except re.error as error:
            raise ValueError(f"{argument!r} is no regular expression: {error}") from None
        return lambda response, line: float(pattern.search(response) is not None)
    if argument and kind != "regex":
        return _from_module(kind, argument)
    raise ValueError(
        f"there is no reward rule {rule!r}; use exact, exact:TEXT, regex:PATTERN or module:function"
    )


def _exact(text: str | None) -> RewardRule:
    """Rule that compares with one text, or with the answer of the prompt."""

    def judge(response: str, line: Mapping[str, Any]) -> float:
        if text is None and line.get("answer") is None:
            raise ValueError("the rule `exact` needs an `answer`: add it to the line, or use exact:TEXT")
        return float(response.strip() == str(line.get("answer") if text is None else text).strip())

    return judge


def _from_module(module: str, name: str) -> RewardRule:
    """Rule that calls a function of the user."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m` looks there, a console script does not
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the reward rule {module}:{name} cannot be imported: {error}") from None

    def judge(response: str, line: Mapping[str, Any]) -> float:
        try:
            reward = float(function(response, line))
        except Exception as error:
            raise ValueError(
                f"the reward rule {module}:{name} failed: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(reward):
            raise ValueError(
                f"the reward rule {module}:{name} returned {reward}; it must return a finite number"
            )
        return reward

    return judge
