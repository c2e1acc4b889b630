"""Rollouts from files and back, groups, masks; each wrong line says what and where."""

import json
import math

import pytest
import torch

from ceilings.jsonl import read_lines
from ceilings.rollouts import Rollouts, centred_by_group, check_fits, read_rollouts, write_rollouts
from toys import rollout, write_jsonl


class Words:
    """A tokenizer of words w0, w1, …; the first word of every text it makes is w9 where asked for."""

    bos_token, eos_token_id, chat_template = "w9", 1, "a template"

    def __call__(self, text, add_special_tokens=True):
        ids = [int(word[1:]) for word in text.split()]
        return type("Encoded", (), {"input_ids": [9, *ids] if add_special_tokens else ids})

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return " ".join(["w9", *(m["content"] for m in messages), "w8"])


def three():
    return Rollouts(
        ((2,), (2,), (3, 4)), ((5,), (6, 7, 1), (8, 1)), torch.tensor([1.0, 2.0, 6.0]).double(), (0, 0, 1)
    )


def test_padded_rows_mark_the_response_and_nothing_else():
    ids, mask, attention = three().padded(pad_id=19)
    assert ids.tolist() == [[2, 5, 19, 19], [2, 6, 7, 1], [3, 4, 8, 1]]
    assert mask.int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert attention.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_taking_rows_keeps_them_together():
    part = three().take([2, 0])
    assert part.prompt_ids == ((3, 4), (2,)) and part.rewards.tolist() == [6, 1] and part.groups == (1, 0)


def test_centring_subtracts_the_mean_of_the_group():
    assert three().centred_rewards().tolist() == [-0.5, 0.5, 0.0]


def test_centring_takes_every_column_on_its_own_and_refuses_too_few_groups():
    rewards = torch.tensor([[1.0, 10.0], [2.0, 30.0], [6.0, 5.0]])
    found = centred_by_group(rewards, torch.tensor([7, 7, 3]))
    assert found.tolist() == [[-0.5, -10.0], [0.5, 10.0], [0.0, 0.0]] and found.dtype == torch.float64
    with pytest.raises(
        ValueError, match=r"groups have shape \(2,\) for 3 rewards: give one group a response"
    ):
        centred_by_group(rewards, torch.tensor([7, 7]))


def test_several_rewards_are_read_and_written_by_name(tmp_path):
    lines = [
        {"prompt_ids": [2], "response_ids": [3], "rewards": {"exact": 1, "length": 0.5}},
        {"prompt_ids": [2], "response_ids": [4], "rewards": {"length": 0.25, "exact": 0}},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_rollouts(tmp_path / "r.jsonl")
    assert found.reward_name == "exact" and found.rewards.tolist() == [1, 0]
    assert {n: r.tolist() for n, r in found.all_rewards.items()} == {"exact": [1, 0], "length": [0.5, 0.25]}
    assert found.take([1]).further_rewards["length"].tolist() == [0.25]
    write_rollouts(tmp_path / "again.jsonl", found)
    again = read_rollouts(tmp_path / "again.jsonl")
    assert {n: r.tolist() for n, r in again.all_rewards.items()} == {"exact": [1, 0], "length": [0.5, 0.25]}


@pytest.mark.parametrize(
    "second, message",
    [
        ({"rewards": {"exact": 1}}, "line 2: the reward 'length' is not in every line"),
        ({"rewards": {"exact": 1, "length": "x"}}, "line 2: the reward 'length' must be a number, it is 'x'"),
        ({"rewards": {"exact": 1, "length": math.inf}}, "line 2: the reward 'length' is inf"),
        ({"rewards": []}, "line 2: `rewards` must be an object of numbers by name"),
        ({}, "line 2: there is no reward; add `reward`, a number, or `rewards`"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(tmp_path, second, message):
    base = {"prompt_ids": [2], "response_ids": [3]}
    lines = [base | {"rewards": {"exact": 1, "length": 0.5}}, base | second]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError) as caught:
        read_rollouts(tmp_path / "r.jsonl")
    assert message in str(caught.value)


def test_what_is_written_is_read_again(tmp_path):
    rollouts = Rollouts(
        three().prompt_ids,
        three().response_ids,
        three().rewards,
        (0, 0, 1),
        log_probs=(torch.tensor([-0.5]), torch.tensor([-1.0, -2.0, -0.25]), torch.tensor([-3.0, -0.125])),
    )
    write_rollouts(tmp_path / "r.jsonl", rollouts, [{"response": "x"}] * 3)
    again = read_rollouts(tmp_path / "r.jsonl")
    for field in ("prompt_ids", "response_ids", "groups"):
        assert getattr(again, field) == getattr(rollouts, field)
    assert again.rewards.tolist() == [1, 2, 6] and not again.from_text
    assert [row.tolist() for row in again.log_probs] == [row.tolist() for row in rollouts.log_probs]
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_equal_prompts_are_a_group_where_none_is_given(tmp_path):
    lines = [rollout((2, 3)), rollout((2, 4)), rollout((2, 3)), rollout((2, 4), group="other")]
    assert read_rollouts(write_jsonl(tmp_path / "r.jsonl", lines)).groups == (0, 1, 0, 2)


def test_logs_of_trainers_are_understood(tmp_path):
    verl = {"input": "w9 w2", "output": "w4 w5", "score": 0.5, "step": 1, "gts": "x"}
    trl = {
        "prompt": [{"role": "user", "content": "w2"}],
        "completion": [{"role": "assistant", "content": "w4"}],
        "reward": 1,
    }
    ended = {"prompt": "w2", "response": "w4", "reward": 0, "ended": True}
    read = read_rollouts(write_jsonl(tmp_path / "r.jsonl", [verl, trl, ended]), Words())
    # A text that begins with the first token already, a chat through its template, and plain text.
    assert read.prompt_ids == ((9, 2), (9, 2, 8), (9, 2))
    assert read.response_ids == ((4, 5), (4,), (4, 1))
    assert read.rewards.tolist() == [0.5, 1, 0] and read.from_text


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt_ids": [2], "resp', r"line 3: not complete JSON .* delete it if the file was cut short"),
        ("[1, 2]", r"line 3: expected a JSON object"),
        (rollout(reward=float("nan")), r"line 3: the reward is nan; it must be finite"),
        (rollout(reward=float("inf")), r"line 3: the reward is inf"),
        (rollout(reward="good"), r"line 3: the reward must be a number, it is 'good'"),
        (rollout(reward=None), r"line 3: there is no reward; add `reward`"),
        (rollout(response=()), r"line 3: the response is empty; .* leave the line out"),
        (rollout(prompt=()), r"line 3: the prompt has no token"),
        ({"reward": 1.0, "response_ids": [2]}, r"line 3: there is no prompt; give `prompt`"),
        ({"reward": 1.0, "prompt_ids": [2]}, r"line 3: there is no response; give `response`"),
        (rollout(prompt=(2.5,)), r"line 3: prompt_ids must be a list of whole numbers"),
        (
            {"reward": 1.0, "prompt": "w2", "response_ids": [2]},
            r"line 3: the prompt is text but .* no tokenizer",
        ),
        (
            {"reward": 1.0, "prompt_ids": [2], "response": "w"},
            r"line 3: the response is text but .* no tokenizer",
        ),
    ],
)
def test_each_wrong_line_is_named(tmp_path, line, message):
    path = write_jsonl(tmp_path / "r.jsonl", [rollout(), "", line])
    with pytest.raises(ValueError, match=rf"r\.jsonl, {message}"):
        read_rollouts(path)


def test_chat_needs_a_template_and_messages(tmp_path):
    plain = Words()
    plain.chat_template = None
    chat = write_jsonl(tmp_path / "c.jsonl", [{"prompt": [{"role": "user", "content": "w2"}], "reward": 1}])
    with pytest.raises(
        ValueError, match=r"line 1: the prompt is a chat but the tokenizer has no chat template"
    ):
        read_rollouts(chat, plain)
    odd = write_jsonl(tmp_path / "o.jsonl", [{"prompt": [1, 2], "response": "w2", "reward": 1}])
    with pytest.raises(ValueError, match=r"line 1: the prompt must be text or a list of chat messages"):
        read_rollouts(odd, Words())
    long = write_jsonl(tmp_path / "l.jsonl", [{"prompt": "w2", "response": ["a", "b"], "reward": 1}])
    with pytest.raises(ValueError, match=r"line 1: the response must be text or one chat message"):
        read_rollouts(long, Words())


def test_files_that_cannot_be_read_say_so(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file '.*nowhere\.jsonl': check the name"):
        read_lines(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty: give one JSON object a line"):
        read_lines(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ValueError, match=r"binary\.jsonl cannot be read: it is not text in UTF-8"):
        read_lines(tmp_path / "binary.jsonl")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_lines(tmp_path)


def test_a_value_with_a_line_separator_is_no_line_break(tmp_path):
    # JSON allows U+2028 in a string; `splitlines` would cut the object there.
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"a": "x\u2028y"}, ensure_ascii=False), encoding="utf-8")
    assert read_lines(path)[0].values == {"a": "x\u2028y"}


def test_rewards_without_signal_are_refused():
    def build(rewards, groups):
        n = len(rewards)
        return Rollouts(((2,),) * n, ((3,),) * n, torch.tensor(rewards).double(), groups)

    with pytest.raises(ValueError, match="one response only"):
        build([1.0], (0,)).check_signal()
    with pytest.raises(ValueError, match="all 3 rewards equal 0.5: every gradient is then zero"):
        build([0.5] * 3, (0, 1, 2)).check_signal()
    with pytest.raises(ValueError, match="within each of the 2 groups all rewards are equal"):
        build([1.0, 1.0, 0.0, 0.0], (0, 0, 1, 1)).check_signal()
    build([1.0, 0.0], (0, 1)).check_signal()
    with pytest.raises(ValueError, match="within each of the 2 groups"):
        build([1.0, 0.0], (0, 1)).check_signal(centred=True)


def test_sequences_the_model_cannot_read_are_named():
    with pytest.raises(ValueError, match=r"b: token id 20 is out of range, the model has 20 tokens"):
        check_fits([(2, 3), (2, 20)], 20, None, ["a", "b"])
    with pytest.raises(ValueError, match=r"a: token id -1 is out of range"):
        check_fits([(-1,)], 20, None, ["a"])
    with pytest.raises(ValueError, match=r"a: 5 tokens are more than the model's context of 4"):
        check_fits([(2,) * 5], 20, 4, ["a"])
    with pytest.raises(
        ValueError, match=r"a: 3 tokens and 2 new ones are more than .* or lower --max-new-tokens"
    ):
        check_fits([(2,) * 3], 20, 4, ["a"], room=2)
    check_fits([(2,) * 4], 20, 4, ["a"])


def test_parts_that_disagree_are_refused():
    with pytest.raises(ValueError, match="2 rewards for 1 prompts"):
        Rollouts(((2,),), ((3,),), torch.zeros(2), (0,))
    with pytest.raises(ValueError, match="rollout 0 has an empty response"):
        Rollouts(((2,),), ((),), torch.zeros(1), (0,))
    with pytest.raises(ValueError, match="the reward of rollout 0 is not finite"):
        Rollouts(((2,),), ((3,),), torch.tensor([torch.nan]), (0,))
