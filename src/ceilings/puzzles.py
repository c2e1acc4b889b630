r"""Small verifiable puzzles for small decoders: addition with carry, sorting, brackets, tea or coffee.

Each has every prompt listed, one right answer a prompt, a binary and a graded reward, and a corpus from which a decoder
learns to answer well some of the time: what a policy never does, no reward can teach it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ceilings.rollouts import Rollouts

__all__ = ["END", "Puzzle", "addition", "brackets", "puzzle_names", "puzzle_of", "sorting", "tea_or_coffee"]

#: The token that ends a response, in every puzzle.
END: Final = 0

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Puzzle:
    r"""Prompts with their right answers, and how near a response comes.

    Parameters
    ----------
    name
        What it is called.
    words
        The vocabulary; token 0 ends a response.
    prompts
        Every prompt.
    answers
        The right answer to each, the end token included.
    grade
        From the right answer and a response to a number in [0, 1]; 1 for the right answer.

    Raises
    ------
    ValueError
        If there is not one answer a prompt, each ending with the end token.
    """

    name: str
    words: tuple[str, ...]
    prompts: tuple[Tokens, ...]
    answers: tuple[Tokens, ...]
    grade: Callable[[Tokens, Tokens], float]

    def __post_init__(self) -> None:
        """Check that every prompt has an answer that ends."""
        if len(self.answers) != len(self.prompts) or any(a[-1:] != (END,) for a in self.answers):
            raise ValueError(
                f"{self.name}: {len(self.answers)} answers for {len(self.prompts)} prompts; give one each, ending "
                "with the end token"
            )

    @property
    def max_new_tokens(self) -> int:
        """Length of the longest answer, the end token included."""
        return max(len(answer) for answer in self.answers)

    def reward(self, prompt: int, response: Tokens, *, graded: bool = False) -> float:
        """Reward of a response to one of the prompts.

        Parameters
        ----------
        prompt
            Number of the prompt.
        response
            Its tokens, the end token included.
        graded
            True for a number between 0 and 1; False for 1 if the grade is 1, else 0.

        Returns
        -------
        float
            The reward.

        Units
        -----
        [R].
        """
        grade = self.grade(self.answers[prompt], response)
        return grade if graded else float(grade == 1)

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as they read.

        Parameters
        ----------
        tokens
            Token ids.

        Returns
        -------
        str
            Words with a space between them; the end token is written out.
        """
        return " ".join(self.words[token] for token in tokens)

    def corpus(
        self, size: int, generator: torch.Generator, *, noise: float = 0.5, graded: bool = False
    ) -> Rollouts:
        r"""Prompts with answers of which a part is wrong.

        Parameters
        ----------
        size
            Number of answers, to prompts drawn uniformly.
        generator
            Source of randomness.
        noise
            Probability with which a token of the answer, the end apart, is replaced by one drawn uniformly from those
            that occur in any answer. 0 gives right answers only.
        graded
            Which reward to record.

        Returns
        -------
        Rollouts
            One group a response. The rewards are those of the noisy answers.

        Raises
        ------
        ValueError
            If ``size`` is not positive or ``noise`` is no probability.
        """
        if size < 1 or not 0 <= noise <= 1:
            raise ValueError(f"a corpus of {size} answers with noise {noise}: use 1 or more, and 0 to 1")
        letters = torch.tensor(sorted({token for a in self.answers for token in a[:-1]}))
        rows = torch.randint(len(self.prompts), (size,), generator=generator).tolist()
        responses = []
        for row in rows:
            answer = torch.tensor(self.answers[row])
            other = letters[torch.randint(len(letters), answer.shape, generator=generator)]
            wrong = torch.rand(answer.shape, generator=generator, dtype=torch.float32) < noise
            wrong[-1] = False
            responses.append(tuple(torch.where(wrong, other, answer).tolist()))
        rewards = [self.reward(row, y, graded=graded) for row, y in zip(rows, responses, strict=True)]
        return Rollouts(
            tuple(self.prompts[row] for row in rows),
            tuple(responses),
            torch.tensor(rewards, dtype=torch.float64),
            tuple(range(size)),
        )


def addition(digits: int = 1) -> Puzzle:
    """Sums of two numbers, the last digit first, so that a carry goes the way a decoder writes.

    Parameters
    ----------
    digits
        Digits of each number; 1 or 2.

    Returns
    -------
    Puzzle
        ``7 + 5 =`` wants ``2 1``. The grade is the share of positions that are right.

    Raises
    ------
    ValueError
        If ``digits`` is neither 1 nor 2.
    """
    if digits not in (1, 2):
        raise ValueError(f"digits is {digits}: use 1 or 2, which are 100 or 10,000 prompts")
    words = ("end", *map(str, range(10)), "+", "=")

    def written(number: int, width: int) -> Tokens:
        return tuple(1 + number // 10**place % 10 for place in range(width))

    pairs = list(itertools.product(range(10**digits), repeat=2))
    plus, equals = words.index("+"), words.index("=")
    prompts = tuple((*written(a, digits)[::-1], plus, *written(b, digits)[::-1], equals) for a, b in pairs)
    answers = tuple((*written(a + b, digits + 1), END) for a, b in pairs)
    return Puzzle("addition", words, prompts, answers, _share_of_positions)


def sorting(length: int = 3, letters: int = 5) -> Puzzle:
    """Letters to be put in alphabetical order.

    Parameters
    ----------
    length
        Letters in a prompt.
    letters
        Letters of the alphabet, 2 to 26.

    Returns
    -------
    Puzzle
        ``c a b >`` wants ``a b c``. The grade is the share of positions that are right.

    Raises
    ------
    ValueError
        If there are fewer than 1 letter a prompt, or 2 in the alphabet, or more than 10,000 prompts.
    """
    if length < 1 or not 2 <= letters <= 26 or letters**length > 10_000:
        raise ValueError(
            f"{length} of {letters} letters: use 1 or more, of 2 to 26, with at most 10,000 prompts together"
        )
    words = ("end", *"abcdefghijklmnopqrstuvwxyz"[:letters], ">")
    rows = list(itertools.product(range(1, letters + 1), repeat=length))
    prompts = tuple((*row, letters + 1) for row in rows)
    return Puzzle("sorting", words, prompts, tuple((*sorted(row), END) for row in rows), _share_of_positions)


def brackets(depth: int = 4) -> Puzzle:
    """Open brackets of two kinds, to be closed.

    Parameters
    ----------
    depth
        Most brackets in a prompt, 1 to 10.

    Returns
    -------
    Puzzle
        ``( [ (`` wants ``) ] )``: responses of unequal length. The grade is the share of the answer, or of the
        response if that is longer, that is right up to the first mistake.

    Raises
    ------
    ValueError
        If ``depth`` is out of range.
    """
    if not 1 <= depth <= 10:
        raise ValueError(f"depth is {depth}: use 1 to 10")
    prompts = tuple(row for d in range(1, depth + 1) for row in itertools.product((1, 2), repeat=d))
    answers = tuple((*(token + 2 for token in reversed(row)), END) for row in prompts)
    return Puzzle("brackets", ("end", "(", "[", ")", "]"), prompts, answers, _share_before_a_mistake)


def tea_or_coffee() -> Puzzle:
    """A preference: what to drink, with or without an adjective before it.

    Returns
    -------
    Puzzle
        ``she drank a cup of`` wants ``tea``; ``hot tea`` is right too. Grade: 1 for tea, ½ for coffee, 0 for another
        drink or none.
    """
    words = tuple("end she he they we drank ordered a cup of tea coffee water milk hot cold".split())
    at = words.index
    prompts = tuple(
        tuple(map(at, (who, verb, "a", "cup", "of")))
        for who in ("she", "he", "they", "we")
        for verb in ("drank", "ordered")
    )
    drinks, adjectives = tuple(map(at, ("tea", "coffee", "water", "milk"))), (at("hot"), at("cold"))

    def grade(_: Tokens, response: Tokens) -> float:
        drink = response[1:] if response[0] in adjectives else response
        if len(drink) != 2 or drink[0] not in drinks or drink[1] != END:
            return 0.0
        return {at("tea"): 1.0, at("coffee"): 0.5}.get(drink[0], 0.0)

    # The right answers are of both kinds, so that a corpus has both.
    answers = tuple((at("hot"), at("tea"), END) if row % 2 else (at("tea"), END) for row in range(8))
    return Puzzle("tea_or_coffee", words, prompts, answers, grade)


def puzzle_names() -> tuple[str, ...]:
    """Names that `puzzle_of` knows.

    Returns
    -------
    tuple
        The names.
    """
    return ("addition", "sorting", "brackets", "tea_or_coffee")


def puzzle_of(name: str) -> Puzzle:
    """Puzzle of a name, at its default size.

    Parameters
    ----------
    name
        One of `puzzle_names`.

    Returns
    -------
    Puzzle
        The puzzle.

    Raises
    ------
    ValueError
        If there is no such puzzle.
    """
    functions: tuple[Callable[[], Puzzle], ...] = (addition, sorting, brackets, tea_or_coffee)
    makers = dict(zip(puzzle_names(), functions, strict=True))
    if name not in makers:
        raise ValueError(f"there is no puzzle {name!r}: use one of {', '.join(makers)}")
    return makers[name]()


def _share_of_positions(answer: Tokens, response: Tokens) -> float:
    """Positions that agree, over the length of the longer."""
    return sum(a == b for a, b in zip(answer, response, strict=False)) / max(len(answer), len(response))


def _share_before_a_mistake(answer: Tokens, response: Tokens) -> float:
    """Positions before the first that disagrees, over the length of the longer."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer, response, strict=False))
    return len(list(same)) / max(len(answer), len(response))
