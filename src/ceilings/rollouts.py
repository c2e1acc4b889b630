r"""Rollouts: prompts, responses and rewards, read from a file or sampled, and laid out for the score engine.

A file of rollouts holds one JSON object a line: ``prompt_ids`` and ``response_ids``, or ``prompt`` and
``response`` as text; ``reward``, or several as ``rewards``, an object of numbers by name; and, where wanted, ``group``
(by default: equal prompts) and ``log_probs``. The names that TRL (``completion``) and verl (``input``, ``output``,
``score``) write are understood too.

NOTE text is a second best: decoding and encoding again need not give the tokens that were sampled, and the token
that ended the response is lost (``"ended": true`` appends it).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ceilings.jsonl import Line, read_lines
from ceilings.tasks import encode_prompt

__all__ = ["Padded", "Rollouts", "centred_by_group", "check_fits", "read_rollouts", "write_rollouts"]

_RESPONSE_NAMES: Final = ("response", "completion", "output")
_REWARD_NAMES: Final = ("reward", "score")
_GROUP_NAMES: Final = ("group", "uid")


class Padded(NamedTuple):
    """Token rows for `ceilings.scores`, padded on the right.

    Parameters
    ----------
    input_ids
        Prompt, response, padding.
    response_mask
        True at the tokens of the response.
    attention_mask
        1 at real tokens.

    Shapes
    ------
    All (N, T).
    """

    input_ids: Tensor
    response_mask: Tensor
    attention_mask: Tensor


@dataclass(frozen=True, eq=False)
class Rollouts:
    r"""Responses to prompts with their rewards.

    Parameters
    ----------
    prompt_ids, response_ids
        Tokens; a response that ended includes the token that ended it.
    rewards
        One number a response.
    groups
        Responses with the same number belong together: they answer the same prompt.
    log_probs
        :math:`\log \mu(y_t \mid y_{<t})` of the chosen tokens under the policy that sampled them, if it was logged.
    laws
        Whole next-token laws of that policy, as log-probabilities, if they were kept.
    from_text
        Whether any response was given as text and encoded here.
    reward_name, further_rewards
        What the reward is called, and other rewards of the same responses by name.

    Shapes
    ------
    rewards and each further one (N,); log_probs: N tensors (T,); laws: N tensors (T, V).

    Units
    -----
    rewards [R].

    Raises
    ------
    ValueError
        If the parts disagree in length, a response is empty, or a reward is not finite.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    rewards: Tensor
    groups: tuple[int, ...]
    log_probs: tuple[Tensor, ...] | None = None
    laws: tuple[Tensor, ...] | None = None
    from_text: bool = False
    reward_name: str = "reward"
    further_rewards: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what has no score."""
        n = len(self.prompt_ids)
        for name in ("response_ids", "rewards", "groups", "log_probs", "laws"):
            part = getattr(self, name)
            if part is not None and len(part) != n:
                raise ValueError(f"{len(part)} {name} for {n} prompts: give one each")
        for row, (prompt, response) in enumerate(zip(self.prompt_ids, self.response_ids, strict=True)):
            if not prompt or not response:
                raise ValueError(
                    f"rollout {row} has an empty {'response' if prompt else 'prompt'}: leave it out"
                )
        for name, column in self.all_rewards.items():
            if len(column) != n:
                raise ValueError(f"{len(column)} rewards {name!r} for {n} prompts: give one each")
            if not bool(column.isfinite().all()):
                row = int((~column.isfinite()).nonzero()[0])
                raise ValueError(f"the reward of rollout {row} is not finite: every response needs a number")

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def all_rewards(self) -> dict[str, Tensor]:
        """Rewards by name, the main one first."""
        return {self.reward_name: self.rewards, **self.further_rewards}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of prompt and response together."""
        return tuple(len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids, strict=True))

    def take(self, rows: Sequence[int]) -> Rollouts:
        """Some of the rollouts.

        Parameters
        ----------
        rows
            Which, in the order wanted.

        Returns
        -------
        Rollouts
            They.
        """

        def of(part: Sequence[Any] | None) -> Any:
            return None if part is None else tuple(part[row] for row in rows)

        return Rollouts(
            of(self.prompt_ids),
            of(self.response_ids),
            self.rewards[list(rows)],
            of(self.groups),
            of(self.log_probs),
            of(self.laws),
            self.from_text,
            self.reward_name,
            {name: column[list(rows)] for name, column in self.further_rewards.items()},
        )

    def padded(self, pad_id: int = 0) -> Padded:
        """Lay the tokens out as the score engine takes them.

        Parameters
        ----------
        pad_id
            Token to fill up with; it is masked and cannot matter.

        Returns
        -------
        Padded
            Rows and masks.

        Shapes
        ------
        (N, T) each, T the longest length.
        """
        shape = (len(self), max(self.lengths))
        ids = torch.full(shape, pad_id, dtype=torch.long)
        mask, attention = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
        for row, (prompt, response) in enumerate(zip(self.prompt_ids, self.response_ids, strict=True)):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.tensor(prompt + response)
            mask[row, len(prompt) : end] = True
            attention[row, :end] = 1
        return Padded(ids, mask, attention)

    def centred_rewards(self) -> Tensor:
        r"""Rewards minus the mean of their group.

        Returns
        -------
        Tensor
            :math:`R_n - \bar R_{g(n)}`.

        Shapes
        ------
        (N,).

        Units
        -----
        [R].

        Notes
        -----
        The mean contains the response itself, which shrinks the gradient by (G − 1)/G for groups of G
        (``thm-covariance``); tightness is not affected where all groups have one size.
        """
        return centred_by_group(self.rewards, torch.tensor(self.groups))

    def check_signal(self, centred: bool = False) -> None:
        """Refuse rollouts in which no reward distinguishes a response from another.

        Parameters
        ----------
        centred
            Whether the rewards will be centred by group.

        Raises
        ------
        ValueError
            If there is one response only, or all rewards are equal, everywhere or within every group.
        """
        if len(self) < 2:
            raise ValueError("there is one response only: a covariance needs at least two; add rollouts")
        if bool((self.rewards == self.rewards[0]).all()):
            raise ValueError(
                f"all {len(self)} rewards equal {float(self.rewards[0]):g}: every gradient is then zero; "
                "use a reward that tells responses apart, or more of them"
            )
        groups = len(set(self.groups))
        if (groups < len(self) or centred) and not bool(self.centred_rewards().abs().max() > 0):
            raise ValueError(
                f"within each of the {groups} groups all rewards are equal: nothing tells the responses to one "
                "prompt apart; use harder or easier prompts, or more samples each"
            )


def centred_by_group(rewards: Tensor, groups: Tensor) -> Tensor:
    r"""Rewards minus the mean of their group.

    Parameters
    ----------
    rewards
        One reward a response, or K of them.
    groups
        Group of each response, as whole numbers.

    Returns
    -------
    Tensor
        :math:`R_n - \bar R_{g(n)}`, in float64.

    Shapes
    ------
    rewards (N,) or (N, K), groups (N,) -> as the rewards.

    Units
    -----
    [R].

    Raises
    ------
    ValueError
        If there is not one group a response.

    Notes
    -----
    A mean needs its whole group: centre before the responses are dealt out to batches, files or workers, and any
    such division gives the same moments. Rewards are known before the first backward pass, so that costs nothing.
    The mean contains the response itself, which shrinks the gradient by (G − 1)/G for groups of G
    (``thm-covariance``).
    """
    if groups.shape != rewards.shape[:1]:
        raise ValueError(
            f"groups have shape {tuple(groups.shape)} for {len(rewards)} rewards: give one group a response"
        )
    wide = rewards.double()
    index = groups.to(wide.device).unique(return_inverse=True)[1]
    count = torch.bincount(index).double()
    total = wide.new_zeros(len(count), *wide.shape[1:]).index_add_(0, index, wide)
    return wide - (total / count.view(-1, *[1] * (wide.dim() - 1)))[index]


def read_rollouts(path: str | os.PathLike[str], tokenizer: Any = None) -> Rollouts:
    """Rollouts of a JSON Lines file.

    Parameters
    ----------
    path
        The file.
    tokenizer
        Tokenizer of the model; None will do where every line holds token ids.

    Returns
    -------
    Rollouts
        In the order of the file.

    Raises
    ------
    ValueError
        If a line is no rollout; the message names the line.
    """
    lines = read_lines(path)
    prompts = [encode_prompt(line, tokenizer) for line in lines]
    responses = [_response(line, tokenizer) for line in lines]
    name, columns = _rewards(lines)
    logged = [line.values.get("log_probs") for line in lines]
    return Rollouts(
        tuple(prompts),
        tuple(responses),
        columns.pop(name),
        _groups(lines, prompts),
        tuple(torch.tensor(row, dtype=torch.float32) for row in logged) if None not in logged else None,
        from_text=any(line.values.get("response_ids") is None for line in lines),
        reward_name=name,
        further_rewards=columns,
    )


def write_rollouts(
    path: str | os.PathLike[str], rollouts: Rollouts, extra: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Write rollouts so that `read_rollouts` gives them back; the whole file or none of it.

    Parameters
    ----------
    path
        Where to; an existing file is replaced.
    rollouts
        What to write.
    extra
        Further values for each line, such as the text of the response.
    """
    further = list(extra) or [{}] * len(rollouts)
    rows = []
    for row in range(len(rollouts)):
        line: dict[str, Any] = {
            "prompt_ids": rollouts.prompt_ids[row],
            "response_ids": rollouts.response_ids[row],
            "reward": float(rollouts.rewards[row]),
            "group": rollouts.groups[row],
        }
        if rollouts.further_rewards:
            del line["reward"]
            line["rewards"] = {name: float(column[row]) for name, column in rollouts.all_rewards.items()}
        if rollouts.log_probs is not None:
            line["log_probs"] = [round(value, 6) for value in rollouts.log_probs[row].tolist()]
        rows.append(json.dumps(line | dict(further[row]), ensure_ascii=False))
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.write_text("\n".join(rows) + "\n", encoding="utf-8")
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_fits(
    sequences: Iterable[tuple[int, ...]],
    vocabulary: int,
    context: int | None,
    where: Sequence[str],
    room: int = 0,
) -> None:
    """Refuse sequences that the model cannot read.

    Parameters
    ----------
    sequences
        Token ids.
    vocabulary
        Number of tokens the model knows, V.
    context
        Longest sequence it can read; None if there is no limit.
    where
        What to call each sequence in a message.
    room
        Tokens that will be appended.

    Raises
    ------
    ValueError
        If a token id is out of range or a sequence too long.
    """
    for ids, name in zip(sequences, where, strict=True):
        bad = next((i for i in ids if not 0 <= i < vocabulary), None)
        if bad is not None:
            raise ValueError(
                f"{name}: token id {bad} is out of range, the model has {vocabulary} tokens; "
                "were these made with another tokenizer?"
            )
        if context is not None and len(ids) + room > context:
            more, way = (
                (f" and {room} new ones", "shorten it, or lower --max-new-tokens")
                if room
                else ("", "shorten it")
            )
            raise ValueError(
                f"{name}: {len(ids)} tokens{more} are more than the model's context of {context}; {way}"
            )


def _response(line: Line, tokenizer: Any) -> tuple[int, ...]:
    """Tokens of a response."""
    ids, text = line.token_ids("response_ids"), line.first(_RESPONSE_NAMES)
    if ids is None and text is None:
        raise ValueError(
            f"{line.where}: there is no response; give `response` (text) or `response_ids` (tokens)"
        )
    if ids is None:
        if isinstance(text, list) and len(text) == 1 and isinstance(text[0], dict):
            text = text[0].get("content")  # a chat message, as trainers log it
        if not isinstance(text, str):
            raise ValueError(f"{line.where}: the response must be text or one chat message")
        if tokenizer is None:
            raise ValueError(
                f"{line.where}: the response is text but the model has no tokenizer; give `response_ids` instead"
            )
        ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        if line.values.get("ended") and tokenizer.eos_token_id is not None:
            ids = (*ids, tokenizer.eos_token_id)
    if not ids:
        raise ValueError(f"{line.where}: the response is empty; its score is zero, so leave the line out")
    return ids


def _rewards(lines: list[Line]) -> tuple[str, dict[str, Tensor]]:
    """Name of the first reward, and all rewards by name."""
    names: list[str] | None = None
    rows = []
    for line in lines:
        found = _line_rewards(line)
        names = list(found) if names is None else names
        if set(found) != set(names):
            odd = sorted(set(found) ^ set(names))[0]
            raise ValueError(
                f"{line.where}: the reward {odd!r} is not in every line; give all of them each time"
            )
        rows.append([found[name] for name in names])
    assert names
    columns = torch.tensor(rows, dtype=torch.float64)
    return names[0], {name: columns[:, k] for k, name in enumerate(names)}


def _line_rewards(line: Line) -> dict[str, float]:
    """Rewards of a line by name."""
    one, several = line.first(_REWARD_NAMES), line.values.get("rewards")
    if several is not None and (not isinstance(several, dict) or not several):
        raise ValueError(
            f'{line.where}: `rewards` must be an object of numbers by name, such as {{"exact": 1}}'
        )
    found = ({} if one is None else {"reward": one}) | (several or {})
    if not found:
        raise ValueError(
            f"{line.where}: there is no reward; add `reward`, a number, or `rewards`, numbers by name"
        )
    for name, reward in found.items():
        called = "the reward" if name == "reward" else f"the reward {name!r}"
        if not isinstance(reward, int | float):
            raise ValueError(f"{line.where}: {called} must be a number, it is {reward!r}")
        if not math.isfinite(reward):
            raise ValueError(
                f"{line.where}: {called} is {reward}; it must be finite, correct or delete the line"
            )
    return {name: float(reward) for name, reward in found.items()}


def _groups(lines: list[Line], prompts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Number of each line's group, counted in the order of appearance; equal prompts where none is given."""
    keys = [
        ("prompt", prompt) if (group := line.first(_GROUP_NAMES)) is None else ("group", json.dumps(group))
        for line, prompt in zip(lines, prompts, strict=True)
    ]
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)
