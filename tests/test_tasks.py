"""Reward rules: what they judge, and what each mistake says."""

import pytest

from ceilings.tasks import read_prompts, reward_rule
from toys import write_jsonl


def test_exact_compares_without_outer_white_space():
    rule = reward_rule("exact")
    assert (
        rule(" 4\n", {"answer": "4"}) == 1
        and rule("4 4", {"answer": "4"}) == 0
        and rule("4", {"answer": 4}) == 1
    )
    assert reward_rule("exact:a:b")(" a:b ", {}) == 1
    with pytest.raises(ValueError, match="the rule `exact` needs an `answer`"):
        rule("4", {})


def test_pattern_is_searched_for_anywhere():
    rule = reward_rule(r"regex:\b(tea|coffee)\b")
    assert rule("hot tea!", {}) == 1 and rule("teapot", {}) == 0
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        reward_rule("regex:(")


def test_function_of_the_user_judges(tmp_path, monkeypatch):
    (tmp_path / "my_rules_of_a_test.py").write_text(
        "def good(response, line):\n    return len(response) + line['bonus']\n"
        "def bad(response, line):\n    return 1 / 0\n"
        "def undefined(response, line):\n    return float('nan')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert reward_rule("my_rules_of_a_test:good")("abc", {"bonus": 0.5}) == 3.5
    with pytest.raises(ValueError, match="my_rules_of_a_test:bad failed: ZeroDivisionError"):
        reward_rule("my_rules_of_a_test:bad")("abc", {})
    with pytest.raises(ValueError, match="my_rules_of_a_test:undefined returned nan"):
        reward_rule("my_rules_of_a_test:undefined")("abc", {})
    with pytest.raises(ValueError, match="my_rules_of_a_test:missing cannot be imported"):
        reward_rule("my_rules_of_a_test:missing")
    with pytest.raises(ValueError, match="no_such_module:f cannot be imported"):
        reward_rule("no_such_module:f")


@pytest.mark.parametrize("rule", ["", "exactly", "regex", "regex:"])
def test_unknown_rule_lists_the_known_ones(rule):
    with pytest.raises(ValueError, match=r"there is no reward rule .*use exact, exact:TEXT, regex:PATTERN"):
        reward_rule(rule)


def test_prompts_keep_their_line(tmp_path):
    lines = [{"prompt_ids": [2, 3], "answer": "w4"}, {"prompt_ids": [4]}]
    first, second = read_prompts(write_jsonl(tmp_path / "p.jsonl", lines), None)
    assert first.ids == (2, 3) and first.line["answer"] == "w4" and second.where.endswith("p.jsonl, line 2")
