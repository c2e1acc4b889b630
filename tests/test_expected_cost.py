"""What a measurement is expected to cost: the arithmetic by hand, and small models against the clock."""

import time

import pytest
import torch

from ceilings import cli, expected_cost, measure_tasks
from ceilings.expected_cost import sample_cost
from ceilings.pretrained import load_pretrained
from ceilings.rollouts import Rollouts
from ceilings.scores import score_moments
from toys import save_toy, some_rollouts, write_jsonl

LEVELS = [("sequence", None), ("token", None), ("token", 2), ("next-token", None)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_pretrained(save_toy(tmp_path_factory.mktemp("toy")))[0]


def rollouts(*shapes):
    """Rollouts of given lengths of prompt and response, every token another."""
    fresh = iter(range(10_000))
    rows = [
        (tuple(next(fresh) % 20 for _ in range(p)), tuple(next(fresh) % 20 for _ in range(r)))
        for p, r in shapes
    ]
    prompts, responses = zip(*rows, strict=True)
    return Rollouts(prompts, responses, torch.zeros(len(rows)), tuple(range(len(rows))))


@pytest.fixture
def clockwork(monkeypatch):
    """A machine on which a token takes a millisecond, and nothing is tried."""
    monkeypatch.setattr(expected_cost, "_seconds", lambda model, rows, length: 1e-3)
    monkeypatch.setattr(expected_cost, "_SMALL", 0)
    monkeypatch.setattr(expected_cost, "_SUMMARY", 0.0)


def test_a_response_costs_its_tokens_once_forward_and_at_token_level_each_prefix(model, clockwork):
    some = rollouts((3, 2), (1, 4))  # ten tokens; prefixes of 4, 5 and of 2, 3, 4, 5
    backward = expected_cost._BACKWARD
    assert sample_cost(model, some, 1, 8).seconds == pytest.approx(backward * 10e-3)
    assert sample_cost(model, some, 1, 8, level="token").seconds == pytest.approx(backward * 23e-3)
    signs = sample_cost(model, some, 1, 8, level="token", sign_draws=3).seconds
    assert signs == pytest.approx((1 + 4 * (backward - 1)) * 10e-3)


@pytest.mark.parametrize("processes, share", [(1, 5), (2, 3), (3, 2), (5, 1), (9, 1)])
@pytest.mark.parametrize("level", ["sequence", "token", "next-token"])
def test_processes_share_the_responses(model, clockwork, monkeypatch, level, processes, share):
    monkeypatch.setattr(expected_cost, "_next_tokens", lambda model, some, size: 0.7 * len(some))
    some = rollouts(*[(3, 2)] * 5)
    alone = sample_cost(model, some, 1, 8, level=level).seconds
    found = sample_cost(model, some, 1, 8, level=level, processes=processes).seconds
    assert found == pytest.approx(alone * share / 5)


def test_sampling_and_the_summary_are_not_shared(model, clockwork, monkeypatch):
    some = rollouts((3, 2), (3, 2))
    plain = sample_cost(model, some, 1, 8, processes=2).seconds
    sampled = sample_cost(model, some, 1, 8, processes=2, new_tokens=10, rows=4).seconds
    assert sampled - plain == pytest.approx(1.3 * 10 * 4e-3)  # of the rows of one process
    monkeypatch.setattr(expected_cost, "_SUMMARY", 1e-6)
    count = sum(p.numel() for p in model.parameters())
    assert sample_cost(model, some, 1, 8, processes=2).seconds - plain == pytest.approx(3e-6 * count)


def test_a_small_model_is_tried_and_a_large_one_is_not(model, clockwork, monkeypatch):
    some = rollouts((3, 2), (3, 2), (3, 2))
    computed = sample_cost(model, some, 1, 2).seconds
    monkeypatch.setattr(expected_cost, "_tried", lambda model, part, *rest: 5e-3 * len(part))
    assert sample_cost(model, some, 1, 2).seconds == computed
    monkeypatch.setattr(expected_cost, "_SMALL", 1e7)
    assert sample_cost(model, some, 1, 2).seconds == pytest.approx(3 * 5e-3)
    monkeypatch.setattr(expected_cost, "_TRIAL", 1e-3)  # by arithmetic a batch takes longer than that
    assert sample_cost(model, some, 1, 2).seconds == computed


def test_prefixes_are_counted_once_a_batch(model, clockwork, monkeypatch):
    found = []
    real = expected_cost.next_token_cost
    monkeypatch.setattr(
        expected_cost, "next_token_cost", lambda *args: found.append(real(*args).prefixes) or real(*args)
    )
    same = rollouts((3, 2)).take([0, 0, 0, 0])
    sample_cost(model, same, 1, 4, level="next-token")
    assert set(found) == {2}
    found.clear()
    sample_cost(model, same, 1, 2, level="next-token")
    assert found.count(2) >= 2


@pytest.mark.parametrize("level, draws", LEVELS)
def test_expected_time_of_a_toy_is_near_the_time_it_takes(model, level, draws):
    """Python takes the time here; arithmetic alone says a hundredth."""
    some = rollouts(*[(2 + k % 3, 1 + k % 5) for k in range(24)])
    ids, mask, attention = some.padded()
    expected = sample_cost(model, some, 1, 8, level=level, sign_draws=draws).seconds
    signs = None if draws is None else torch.Generator()
    started = time.perf_counter()
    score_moments(
        model,
        ids,
        mask,
        torch.zeros(24),
        attention_mask=attention,
        batch_size=8,
        level=level,
        sign_draws=draws,
        generator=signs,
    )
    taken = time.perf_counter() - started
    assert taken / 4 < expected < 4 * taken


def test_the_command_says_how_many_processes_share_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_toy(tmp_path / "toy")
    write_jsonl(tmp_path / "rollouts.jsonl", some_rollouts())
    asked = []
    real = measure_tasks.sample_cost
    monkeypatch.setattr(
        measure_tasks, "sample_cost", lambda *args, **kw: asked.append(kw["processes"]) or real(*args, **kw)
    )
    common = ["measure", "toy", "--rollouts", "rollouts.jsonl", "--out", "run", "--dry-run"]
    assert cli.main(common) == 0
    assert "processes" not in capsys.readouterr().out
    monkeypatch.setattr(measure_tasks.team(), "size", 3)
    assert cli.main(common) == 0
    assert "in each of 3 processes (weights" in capsys.readouterr().out and asked == [1, 3]
