"""The law of every response to every prompt of a puzzle, in one pass that can be differentiated."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from ceilings.prefix_tree import enumerate_responses
from ceilings.puzzles import END, Puzzle

__all__ = ["Laws"]


class Laws:
    """Log-probabilities of every response to every prompt of a puzzle, from one pass, differentiable.

    Parameters
    ----------
    model
        Any model of the puzzle; gives the responses.
    puzzle
        Whose prompts, all of one length.
    """

    def __init__(self, model: nn.Module, puzzle: Puzzle) -> None:
        longest, prompts = puzzle.max_new_tokens, puzzle.prompts
        self.responses = enumerate_responses(model, prompts[0], longest, END).responses
        tokens = sorted({y[0] for y in self.responses if y[0] != END})
        prefixes = list(itertools.product(tokens, repeat=longest - 1))
        row = {prefix: number for number, prefix in enumerate(prefixes)}
        # A response that ends early stands in every row that starts like it; take the one that goes on with one token.
        self.row = torch.tensor([row[(*y[:-1], *(tokens[:1] * (longest - len(y))))] for y in self.responses])
        self.tokens = torch.tensor([y + (0,) * (longest - len(y)) for y in self.responses])
        self.mask = torch.arange(longest) < torch.tensor([len(y) for y in self.responses])[:, None]
        self.rows = torch.tensor([prompt + prefix for prompt in prompts for prefix in prefixes])
        self.prompts, self.length = len(prompts), len(prompts[0])
        self.rewards = torch.tensor(
            [[puzzle.reward(number, y) for y in self.responses] for number in range(len(prompts))],
            dtype=torch.float64,
        )

    def __call__(self, model: nn.Module) -> Tensor:
        """Log-probabilities, a row a prompt."""
        tokens: Tensor = model(self.rows).log_softmax(-1)[:, self.length - 1 :]
        tokens = tokens.view(self.prompts, -1, *tokens.shape[1:])
        picked = tokens[:, self.row[:, None], torch.arange(tokens.shape[2]), self.tokens]
        return (picked * self.mask).sum(-1)
