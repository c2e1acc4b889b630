"""Moments of the two halves of a sample, read one parameter at a time from memory or from their files."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ceilings.moments import ScoreMoments
from ceilings.uncertainty import halves

__all__ = ["Folds", "two_halves"]


class Folds:
    """Score moments of separate sets of responses, one set a fold.

    Parameters
    ----------
    parts
        Moments, or files of them. One part is a measurement that was not split.

    Attributes
    ----------
    names
        Parameter names.
    first
        Moments of the first parameter in the first fold: what does not depend on the parameter can be read off it.

    Raises
    ------
    ValueError
        If there is no part, or they differ in their parameters.

    Notes
    -----
    Files keep memory low: while one fold is measured the other lies on the disk, and a summary holds one tensor of
    each.
    """

    def __init__(self, parts: Sequence[ScoreMoments | str | os.PathLike[str]]) -> None:
        if not parts:
            raise ValueError("there are no moments: give one part or more")
        self._parts = tuple(parts)
        self.names = self._names(parts[0])
        if any(self._names(part) != self.names for part in parts[1:]):
            raise ValueError("the parts are of different models: their parameters differ")
        self.first = self.of(self.names[0])[0]
        self.count = sum(part.count for part in self.of(self.names[0]))

    def __len__(self) -> int:
        return len(self._parts)

    def of(self, name: str) -> tuple[ScoreMoments, ...]:
        """Moments of one parameter in every fold.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        tuple
            One a fold.
        """
        return tuple(
            part.alone(name) if isinstance(part, ScoreMoments) else ScoreMoments.load(part, name)
            for part in self._parts
        )

    def together(self, name: str) -> ScoreMoments:
        """Moments of one parameter over all responses.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        ScoreMoments
            The folds merged.
        """
        first, *others = self.of(name)
        for other in others:
            first = first.merge(other)
        return first

    @staticmethod
    def _names(part: ScoreMoments | str | os.PathLike[str]) -> tuple[str, ...]:
        """Parameter names of a part."""
        if isinstance(part, ScoreMoments):
            return part.names
        return tuple(ScoreMoments.stored_header(part)["names"])


def two_halves(groups: Sequence[int], generator: torch.Generator) -> tuple[list[int], list[int], str] | None:
    """Random halves of a sample that know nothing of one another.

    Parameters
    ----------
    groups
        Group of each response.
    generator
        Source of randomness.

    Returns
    -------
    tuple
        Rows of each half and what was kept whole, ``"groups"`` or ``"responses"``; None where there are too few
        responses for two halves of two.

    Notes
    -----
    Whole groups go to one half, because responses to one prompt have something in common. Where that is impossible
    (one group, or one that is all but the whole sample) responses are dealt out one by one: then the halves are
    independent given the prompts, and their disagreement says nothing of other prompts.
    """
    labels = torch.tensor(groups)
    if len(groups) < 4:
        return None
    if len(set(groups)) > 1:
        first, second = halves(len(groups), generator, labels)
        if min(len(first), len(second)) >= 2:
            return first.tolist(), second.tolist(), "groups"
    first, second = halves(len(groups), generator)
    return first.tolist(), second.tolist(), "responses"
