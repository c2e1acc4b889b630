"""Puzzles against their rules written once more, from the words that they read as."""

import pytest
import torch

from ceilings.puzzles import END, Puzzle, addition, brackets, puzzle_names, puzzle_of, sorting, tea_or_coffee

ALL = [*map(puzzle_of, puzzle_names()), addition(2), sorting(4, 3), brackets(6)]


def words(puzzle, tokens):
    return puzzle.text(tokens).split()


def right_by_the_words(puzzle, prompt, answer):
    """Whether an answer is right, from the words alone."""
    prompt, answer = words(puzzle, prompt), words(puzzle, answer)
    if answer[-1] != "end" or "end" in answer[:-1]:
        return False
    answer = answer[:-1]
    if puzzle.name == "addition":
        a, b = "".join(prompt[:-1]).split("+")
        return int(a) + int(b) == int("".join(reversed(answer)))
    if puzzle.name == "sorting":
        return answer == sorted(prompt[:-1])
    if puzzle.name == "tea_or_coffee":
        return answer in (["tea"], ["hot", "tea"], ["cold", "tea"])
    text = "".join(prompt + answer)
    while (shorter := text.replace("()", "").replace("[]", "")) != text:
        text = shorter
    return text == ""


@pytest.mark.parametrize("puzzle", ALL, ids=lambda p: f"{p.name}{len(p.prompts)}")
def test_answers_are_right_and_earn_everything(puzzle):
    assert len(set(puzzle.prompts)) == len(puzzle.prompts)
    for row, (prompt, answer) in enumerate(zip(puzzle.prompts, puzzle.answers, strict=True)):
        assert right_by_the_words(puzzle, prompt, answer)
        assert puzzle.reward(row, answer) == puzzle.reward(row, answer, graded=True) == 1
    assert puzzle.max_new_tokens == max(map(len, puzzle.answers))
    assert END not in {token for prompt in puzzle.prompts for token in prompt}


@pytest.mark.parametrize("puzzle", ALL[:4], ids=lambda p: p.name)
def test_the_binary_reward_is_one_for_right_answers_only(puzzle):
    corpus = puzzle.corpus(400, torch.Generator().manual_seed(0), noise=0.4)
    rows = [puzzle.prompts.index(p) for p in corpus.prompt_ids]
    for row, response, reward in zip(rows, corpus.response_ids, corpus.rewards, strict=True):
        assert (reward == 1) == right_by_the_words(puzzle, puzzle.prompts[row], response)
        graded = puzzle.reward(row, response, graded=True)
        assert 0 <= graded <= 1 and (graded == 1) == (reward == 1)
        # A response that was cut short, or goes on, is not right.
        assert puzzle.reward(row, response[:-1]) == 0 and puzzle.reward(row, (*response, 1)) == 0
    assert 0 < float(corpus.rewards.mean()) < 1 and corpus.groups == tuple(range(400))


def test_grades_count_positions_or_stop_at_the_first_mistake():
    sums, pairs, drinks = addition(), brackets(), tea_or_coffee()
    row = sums.prompts.index((8, sums.words.index("+"), 6, sums.words.index("=")))  # 7 + 5
    assert sums.text(sums.answers[row]) == "2 1 end"
    assert sums.reward(row, (3, 3, 0), graded=True) == pytest.approx(2 / 3)
    assert sums.reward(row, (3, 0), graded=True) == pytest.approx(1 / 3)
    assert sums.reward(row, (3, 2, 0, 0), graded=True) == pytest.approx(3 / 4)
    row = pairs.prompts.index((1, 2, 1))  # ( [ ( wants ) ] ) end
    assert pairs.answers[row] == (3, 4, 3, 0)
    assert pairs.reward(row, (3, 3, 3, 0), graded=True) == pytest.approx(1 / 4)
    assert pairs.reward(row, (3, 4, 3, 3, 0), graded=True) == pytest.approx(3 / 5)
    at = drinks.words.index
    grades = {"coffee": 0.5, "water": 0.0, "tea": 1.0}
    for drink, grade in grades.items():
        assert drinks.reward(0, (at(drink), 0), graded=True) == grade
        assert drinks.reward(1, (at("cold"), at(drink), 0), graded=True) == grade
    assert drinks.reward(0, (at("hot"), at("hot"), at("tea"), 0), graded=True) == 0
    assert drinks.reward(0, (at("hot"),), graded=True) == 0


def test_noise_is_the_share_of_tokens_drawn_anew():
    puzzle, n = sorting(), 4000
    corpus = puzzle.corpus(n, torch.Generator().manual_seed(1), noise=0.3)
    rows = [puzzle.prompts.index(p) for p in corpus.prompt_ids]
    wrong = [
        a != b
        for r, y in zip(rows, corpus.response_ids, strict=True)
        for a, b in zip(puzzle.answers[r][:-1], y[:-1], strict=True)
    ]
    expected = 0.3 * 4 / 5  # one in five draws gives the right letter again
    error = (expected * (1 - expected) / len(wrong)) ** 0.5
    assert abs(sum(wrong) / len(wrong) - expected) < 4 * error
    assert all(y[-1] == END and END not in y[:-1] for y in corpus.response_ids)
    clean = puzzle.corpus(50, torch.Generator().manual_seed(1), noise=0.0)
    assert clean.rewards.tolist() == [1] * 50


def test_a_corpus_is_repeatable():
    puzzle = brackets()
    first, second = (puzzle.corpus(50, torch.Generator().manual_seed(5)) for _ in range(2))
    assert first.response_ids == second.response_ids and first.prompt_ids == second.prompt_ids


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: addition(3), "digits is 3: use 1 or 2"),
        (lambda: sorting(5, 26), "at most 10,000 prompts"),
        (lambda: brackets(0), "depth is 0: use 1 to 10"),
        (lambda: puzzle_of("chess"), "there is no puzzle 'chess': use one of addition, sorting"),
        (lambda: brackets().corpus(0, torch.Generator()), "a corpus of 0 answers"),
        (lambda: brackets().corpus(1, torch.Generator(), noise=2), "with noise 2"),
        (lambda: Puzzle("odd", ("end", "a"), ((1,),), (), lambda a, b: 0.0), "odd: 0 answers for 1 prompts"),
        (
            lambda: Puzzle("odd", ("end", "a"), ((1,),), ((1,),), lambda a, b: 0.0),
            "ending with the end token",
        ),
    ],
)
def test_what_makes_no_puzzle_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
