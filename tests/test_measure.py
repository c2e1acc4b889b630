"""The command: its numbers against the loop, its files against the schema, its manners against every bad input."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import jsonschema
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ceilings import cli, console, expected_cost, measure_command, measure_tasks, measurement, report
from ceilings.measurement import measure_rollouts, reward_columns
from ceilings.moments import ScoreMoments, flatten
from ceilings.pretrained import built_in_model_path, load_pretrained
from ceilings.reference import loop_score_moments
from ceilings.rollouts import read_rollouts
from ceilings.scores import ScoreAccumulator, score_moments
from ceilings.testing import assert_equal
from toys import CONTEXT, VOCABULARY, rollout, save_toy, some_rollouts, write_jsonl

FILES = {
    "run.json",
    "report.json",
    "report.html",
    "moments-1.safetensors",
    "moments-2.safetensors",
    "gradient.safetensors",
    "fisher.safetensors",
    "tightness.safetensors",
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, with rollouts and prompts in it."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rollouts.jsonl", some_rollouts())
    prompts = [{"prompt": f"w{k} w{k + 1}", "answer": "w5"} for k in range(2, 6)]
    write_jsonl(tmp_path / "prompts.jsonl", prompts)
    return tmp_path


def measure(*arguments):
    return cli.main(["measure", *map(str, arguments)])


def spawn(*arguments, **settings):
    """The command as a process of its own, both streams in pipes."""
    command = [sys.executable, "-m", "ceilings", "measure", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def both_halves(run):
    return [ScoreMoments.load(run / f"moments-{k}.safetensors") for k in (1, 2)]


def loop(toy, path, dtype=torch.float64):
    model, tokenizer = load_pretrained(toy, dtype=dtype)
    rollouts = read_rollouts(path, tokenizer)
    ids, mask, attention = rollouts.padded()
    return loop_score_moments(model, ids, mask, rollouts.rewards, attention_mask=attention), rollouts


# Numbers


def test_report_and_files_are_those_of_the_loop(toy, here):
    arguments = ("--rollouts", "rollouts.jsonl", "--out", "run", "--dtype", "float64", "--batch-size", 5)
    assert measure(toy, *arguments) == 0
    assert {p.name for p in (here / "run").iterdir()} == FILES
    expected, rollouts = loop(toy, "rollouts.jsonl")
    found = json.loads((here / "run/report.json").read_text())
    # Hugging Face's norms are float32 even here, and the batch changes their rounding.
    tolerance = 1e-5
    gradient, fisher, tightness = expected.gradient(), expected.diagonal_fisher(), expected.tightness()
    for name, values in (("gradient", gradient), ("fisher", fisher)):
        stored = load_file(here / f"run/{name}.safetensors")
        assert set(stored) == set(values)
        for key in values:
            assert_equal(stored[key], values[key], rtol=tolerance)
    every = torch.cat([f.flatten() for f in fisher.values()])
    rho = torch.cat([t.flatten() for t in tightness.values()])
    rho = rho[~rho.isnan()]
    assert found["model"]["parameters"] == len(every) and found["tightness"]["defined"] == len(rho)
    assert found["uncertainty"]["in_sample_mean"] == pytest.approx(float(rho.mean()), abs=1e-4)
    assert found["fisher"]["total"] == pytest.approx(float(every.sum()), rel=tolerance)
    ranked = every.sort(descending=True).values
    for share, carried in found["fisher"]["share_in_top"].items():
        top = float(share) * len(every)
        exact = float(ranked[: int(top)].sum() + (top - int(top)) * ranked[min(int(top), len(ranked) - 1)])
        assert carried == pytest.approx(exact / float(every.sum()), abs=0.01)
    assert found["gradient"]["norm"] == pytest.approx(
        float(torch.cat([g.flatten() for g in gradient.values()]).norm()), rel=tolerance
    )
    std = float(rollouts.rewards.std(correction=0))
    assert found["rewards"][0]["mean"] == pytest.approx(float(rollouts.rewards.mean()))
    assert found["rewards"][0]["std"] == pytest.approx(std)
    assert found["ceiling"]["norm"] == pytest.approx(std * float(every.sum()) ** 0.5, rel=tolerance)
    positive = std * every.sqrt()
    for q, value in found["ceiling"]["quantiles"].items():
        assert value == pytest.approx(float(positive.quantile(float(q))), rel=0.04, abs=1e-30)
    assert found["uncertainty"]["noise_floor"] == pytest.approx((2 / (torch.pi * 12)) ** 0.5)
    mean = torch.cat([s.flatten() for s in expected.mean_score().values()])
    second = torch.cat([s.flatten() for s in expected.diagonal_fisher(centred=False).values()])
    ratio = 12 * float(mean.square().sum() / second.sum())
    assert found["uncertainty"]["mean_score_ratio"] == pytest.approx(ratio, rel=tolerance)
    room = torch.cat([(std * fisher[n].sqrt() - gradient[n].abs()).flatten() for n in fisher])
    listed = [p["ceiling"] - abs(p["gradient"]) for p in found["top_parameters"]]
    assert torch.allclose(torch.tensor(listed).double(), room.sort(descending=True).values[:12], rtol=1e-4)
    rows = torch.cat(
        [
            std * fisher[n].sum(1).sqrt() - gradient[n].square().sum(1).sqrt()
            for n in fisher
            if fisher[n].dim() == 2
        ]
    )
    listed = [r["ceiling"] - r["gradient_norm"] for r in found["top_rows"]]
    assert torch.allclose(torch.tensor(listed).double(), rows.sort(descending=True).values[:12], rtol=1e-4)
    row = next(r for r in found["top_rows"] if r["name"] == "model.embed_tokens.weight")
    assert row["label"] == ("</s>" if row["row"] == 1 else f"w{row['row']}")


def test_centring_by_group_measures_the_centred_reward(toy, here):
    common = ("--rollouts", "rollouts.jsonl", "--dtype", "float64")
    assert measure(toy, *common, "--centre-by-group", "--out", "run") == 0
    model, _ = load_pretrained(toy, dtype=torch.float64)
    rollouts = read_rollouts("rollouts.jsonl")
    ids, mask, attention = rollouts.padded()
    centred = loop_score_moments(model, ids, mask, rollouts.centred_rewards(), attention_mask=attention)
    stored = load_file(here / "run/gradient.safetensors")
    for name, gradient in centred.gradient().items():
        assert_equal(stored[name], gradient, rtol=1e-5)


def test_permuted_columns_keep_the_values_of_every_group_in_each_half(here):
    g = torch.Generator().manual_seed(1)
    groups = [0] * 6 + [1] * 6 + [2, 3, 4, 5, 6, 7, 8, 9]
    rewards = torch.stack([torch.arange(20.0), torch.arange(20.0) ** 2], 1)
    folds = (list(range(0, 20, 2)), list(range(1, 20, 2)))
    columns, names = reward_columns(rewards, ("a", "b"), groups, folds, 2, g)
    assert names == ("a", "b", "permuted-0", "permuted-1") and torch.equal(columns[:, :2], rewards.double())
    labels = torch.tensor([min(group, 2) for group in groups])  # groups of one are one pool
    for rows in folds:
        for label in (0, 1, 2):
            some = [row for row in rows if labels[row] == label]
            for k in (2, 3):
                assert columns[some, k].sort().values.tolist() == rewards[some, 0].tolist()
    assert not torch.equal(columns[:, 2], columns[:, 0]) and not torch.equal(columns[:, 2], columns[:, 3])
    alone = columns[12:]
    assert not torch.equal(alone[:, 2], alone[:, 0])


def test_tightness_is_cross_fitted_between_the_halves_of_the_loop(toy, here):
    """From scores of single responses, by the definition: no code of the engine or of the summary."""
    write_jsonl(here / "rollouts.jsonl", some_rollouts(24))
    arguments = ("--rollouts", "rollouts.jsonl", "--out", "run", "--dtype", "float64", "--permutations", 3)
    assert measure(toy, *arguments) == 0
    found = json.loads((here / "run/report.json").read_text())
    model, _ = load_pretrained(toy, dtype=torch.float64)
    rollouts = read_rollouts("rollouts.jsonl")
    one = [rollouts.take([n]) for n in range(24)]
    scores = torch.stack(
        [flatten(loop_score_moments(model, *r.padded()[:2], torch.zeros(1)).scores) for r in one]
    )
    first, second = both_halves(here / "run")
    assert found["uncertainty"]["halves"] == "groups" and found["uncertainty"]["half_sizes"] == [12, 12]
    # Which groups are in the first half: those whose scores add up to its sum.
    groups = torch.tensor(rollouts.groups)
    halves = [
        (a, b)
        for a, b in itertools.combinations(range(4), 2)
        if torch.allclose(scores[(groups == a) | (groups == b)].sum(0), flatten(first.scores), atol=1e-4)
    ]
    assert len(halves) == 1
    here_ = (groups == halves[0][0]) | (groups == halves[0][1])
    std = rollouts.rewards.std() * scores.std(0)
    g = []
    for some in (here_, ~here_):
        r, s = rollouts.rewards[some], scores[some]
        g.append((r - r.mean()) @ (s - s.mean(0)) / 11)
    rho = (g[0].sign() * g[1] + g[1].sign() * g[0]) / 2 / std
    varies = scores.std(0) > 1e-9
    assert found["tightness"]["estimate"] == "cross-fitted"
    assert found["tightness"]["defined"] == int(varies.sum())
    assert found["tightness"]["mean"] == pytest.approx(float(rho[varies].mean()), abs=1e-4)
    squares = (g[0] * g[1] / std**2)[varies]
    assert found["tightness"]["mean_square"] == pytest.approx(float(squares.mean()), abs=1e-4)
    assert found["tightness"]["energy"] == pytest.approx(float((g[0] * g[1]).sum()), rel=1e-3)
    stored = load_file(here / "run/tightness.safetensors")
    stored = flatten({name: stored[name] for name in first.names})
    assert bool(stored[~varies].isnan().all())
    # A covariance of almost zero has whichever sign rounding gives it.
    assert float(((stored - rho)[varies].abs() < 1e-3).double().mean()) > 0.99
    for q, value in found["tightness"]["quantiles"].items():
        assert value == pytest.approx(float(rho[varies].quantile(float(q))), abs=0.004)
    assert found["tightness"]["degrees_of_freedom"] == 21
    disagreement = (((g[0] - g[1]) / std)[varies]).square().mean() * 6
    assert found["tightness"]["effective_size"] == pytest.approx(24 / float(disagreement), rel=1e-3)


def test_too_few_responses_say_so_instead_of_giving_a_number(toy, here):
    lines = [rollout(response=(4,)), rollout(response=(5,), reward=0.0), rollout(response=(6,), reward=0.5)]
    write_jsonl(here / "few.jsonl", lines)
    assert measure(toy, "--rollouts", "few.jsonl", "--out", "run") == 0
    found = json.loads((here / "run/report.json").read_text())
    jsonschema.validate(found, report.schema())
    assert found["tightness"]["estimate"] == "none" and found["tightness"]["mean"] is None
    assert found["uncertainty"]["halves"] is None and (here / "run/moments.safetensors").exists()
    assert "cannot be said from 3 responses" in found["conclusions"][1]
    with safe_open(here / "run/tightness.safetensors", "pt") as file:
        assert json.loads(file.metadata()["ceilings"])["estimate"] == "in-sample"


def test_one_prompt_is_split_by_responses(toy, here):
    g = torch.Generator().manual_seed(0)
    lines = [
        rollout(response=torch.randint(2, 20, (3,), generator=g).tolist(), reward=float(k % 3))
        for k in range(9)
    ]
    write_jsonl(here / "one.jsonl", lines)
    assert measure(toy, "--rollouts", "one.jsonl", "--out", "run") == 0
    found = json.loads((here / "run/report.json").read_text())
    assert found["uncertainty"]["halves"] == "responses" and found["uncertainty"]["half_sizes"] == [4, 5]
    assert "other responses to these prompts only" in " ".join(found["caveats"])


def test_sampled_rollouts_are_kept_and_give_the_same_report_again(toy, here):
    arguments = ("--reward", "regex:w5|w7", "--samples", 6, "--max-new-tokens", 5)
    assert measure(toy, "--prompts", "prompts.jsonl", *arguments, "--out", "sampled") == 0
    lines = [json.loads(line) for line in (here / "sampled/rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 24 and [line["group"] for line in lines] == [k // 6 for k in range(24)]
    for line in lines:
        assert line["reward"] == float(bool(re.search("w5|w7", line["response"])))
        assert len(line["log_probs"]) == len(line["response_ids"]) <= 5
    assert measure(toy, "--rollouts", "sampled/rollouts.jsonl", "--out", "again") == 0
    for first, second in zip(*(both_halves(here / run) for run in ("sampled", "again")), strict=True):
        for name in first.names:
            assert torch.equal(first.squares[name], second.squares[name])
            assert torch.equal(first.reward_scores[name][0], second.reward_scores[name][0])
    kinds = [
        json.loads((here / f"{run}/report.json").read_text())["fisher"]["kind"]
        for run in ("sampled", "again")
    ]
    assert kinds == ["monte-carlo", "as the rollouts"]


def test_next_token_is_exact_and_compares_the_options(toy, here):
    assert measure(toy, "--next-token", "w2 w3", "--options", "w5", "w7", "--out", "run") == 0
    found = json.loads((here / "run/report.json").read_text())
    jsonschema.validate(found, report.schema())
    model, _ = load_pretrained(toy)
    with torch.no_grad():
        probs = model(torch.tensor([[2, 3]])).logits[0, -1].softmax(-1)
    assert [r["name"] for r in found["rewards"]] == ["w5", "w7"]
    for reward, word in zip(found["rewards"], (5, 7), strict=True):
        p = float(probs[word])
        assert reward["mean"] == pytest.approx(p, rel=1e-5)
        assert reward["std"] == pytest.approx((p * (1 - p)) ** 0.5, rel=1e-5)
    # A binary reward's gradient is that of the probability itself.
    model.requires_grad_(True)
    model(torch.tensor([[2, 3]])).logits[0, -1].softmax(-1)[5].backward()
    stored = load_file(here / "run/gradient.safetensors")
    for name, parameter in model.named_parameters():
        assert_equal(stored[name], parameter.grad, rtol=1e-3)
    assert found["uncertainty"]["kind"] == "exact" and found["fisher"]["kind"] == "exact"
    assert "The options compared" in (here / "run/report.html").read_text()


# Levels and rewards


@pytest.mark.parametrize("level, draws", [("token", ()), ("token", ("--sign-draws", 3)), ("next-token", ())])
def test_every_level_has_the_squares_of_the_engine_and_the_gradient_of_the_sequences(toy, here, level, draws):
    base = (toy, "--rollouts", "rollouts.jsonl", "--dtype", "float64", "--batch-size", 5)
    assert measure(*base, "--out", "plain") == 0
    assert measure(*base, "--level", level, *draws, "--out", "run") == 0
    found = json.loads((here / "run/report.json").read_text())
    jsonschema.validate(found, report.schema())
    plain, other = both_halves(here / "plain"), both_halves(here / "run")
    model, _ = load_pretrained(toy, dtype=torch.float64)
    ids, mask, attention = read_rollouts("rollouts.jsonl").padded()
    exact = score_moments(model, ids, mask, torch.zeros(12), attention_mask=attention, level=level)
    whole, reference = other[0].merge(other[1]), plain[0].merge(plain[1])
    for name in whole.names:
        assert_equal(whole.gradient("reward")[name], reference.gradient("reward")[name], rtol=1e-4)
        if not draws:
            assert_equal(whole.squares[name], exact.squares[name], rtol=1e-4)
    total = sum(float(s.sum()) for s in whole.squares.values())
    assert total == pytest.approx(
        sum(float(s.sum()) for s in exact.squares.values()), rel=0.3 if draws else 1e-4
    )
    ratio = flatten(whole.gradient("reward")).abs() / flatten(whole.ceiling("reward"))
    assert found["uncertainty"]["above_one"] == int((ratio > 1).sum())
    assert (
        found["config"]["level"] == level and "only their expectations obey the bound" in found["caveats"][0]
    )
    words = (
        "that of every token that could stand there"
        if level == "next-token"
        else "that of the sampled tokens"
    )
    assert words in (here / "run/report.html").read_text()


def test_signs_do_not_depend_on_where_a_run_was_stopped(toy, here, monkeypatch):
    arguments = (
        toy,
        "--rollouts",
        "rollouts.jsonl",
        "--level",
        "token",
        "--sign-draws",
        2,
        "--batch-size",
        2,
    )
    assert measure(*arguments, "--out", "whole") == 0
    for _ in range(3):
        monkeypatch.setattr(console.Terminal, "stopping", lambda self: True)
        assert measure(*arguments, "--out", "parts") == 3
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert measure(*arguments, "--out", "parts") == 0
    for one, two in zip(both_halves(here / "whole"), both_halves(here / "parts"), strict=True):
        for name in one.names:
            assert_equal(one.squares[name], two.squares[name], rtol=1e-5)


def test_levels_that_take_hours_ask_first(toy, here, capsys, monkeypatch):
    monkeypatch.setattr(measure_command, "_LONG", 0.0)
    base = (toy, "--rollouts", "rollouts.jsonl", "--out", "run", "--level")
    for level in ("token", "next-token"):
        assert "add --yes to start it" in complaint(capsys, 2, *base, level)
    assert not (here / "run").exists() and measure(*base, "token", "--sign-draws", 1) == 0


def test_several_rewards_have_an_estimate_each(toy, here):
    rules = ("--reward", "regex:w5|w7", "--reward", "regex:w9")
    common = (toy, "--prompts", "prompts.jsonl", "--samples", 6, "--max-new-tokens", 5)
    assert measure(*common, *rules, "--out", "two") == 0
    found = json.loads((here / "two/report.json").read_text())
    jsonschema.validate(found, report.schema())
    assert [r["name"] for r in found["rewards"]] == ["regex:w5|w7", "regex:w9"]
    lines = [json.loads(line) for line in (here / "two/rollouts.jsonl").read_text().splitlines()]
    for k, pattern in enumerate(("w5|w7", "w9")):
        values = [float(bool(re.search(pattern, line["response"]))) for line in lines]
        assert [line["rewards"][f"regex:{pattern}"] for line in lines] == values
        assert found["rewards"][k]["mean"] == pytest.approx(sum(values) / 24)
    assert measure(toy, "--rollouts", "two/rollouts.jsonl", "--out", "again") == 0
    again = json.loads((here / "again/report.json").read_text())
    for one, two in zip(found["rewards"], again["rewards"], strict=True):
        assert one["tightness"]["mean"] == pytest.approx(two["tightness"]["mean"], abs=1e-6)
    assert measure(*common, *rules[:2], "--out", "one") == 0
    alone = json.loads((here / "one/report.json").read_text())
    assert alone["tightness"]["mean"] == pytest.approx(found["tightness"]["mean"], abs=1e-6)
    text = (here / "two/report.html").read_text()
    assert "The rewards in numbers" in text and "regex:w9" in text
    assert any(sentence.startswith("The reward regex:w9: ") for sentence in found["conclusions"])


def test_logs_of_trainers_go_straight_in(toy, here):
    """The same responses as this project, TRL and verl write them."""
    logs = {"own": [], "trl": [], "verl": []}
    for line in some_rollouts():
        prompt, response = (" ".join(f"w{k}" for k in line[part]) for part in ("prompt_ids", "response_ids"))
        logs["own"].append(line)
        logs["trl"].append({"prompt": prompt, "completion": response, "reward": line["reward"], "step": 3})
        logs["verl"].append({"input": prompt, "output": response, "score": line["reward"], "gts": "x"})
    means = []
    for name, lines in logs.items():
        write_jsonl(here / f"{name}.jsonl", lines)
        assert measure(toy, "--rollouts", f"{name}.jsonl", "--out", name) == 0
        means.append([part.squares["model.norm.weight"] for part in both_halves(here / name)])
    for other in means[1:]:
        for one, two in zip(means[0], other, strict=True):
            assert torch.equal(one, two)


def test_a_gguf_file_is_a_model(here, capsys):
    path = built_in_model_path()
    write_jsonl(here / "rollouts.jsonl", [rollout(), rollout(reward=0.0)])
    assert measure(path, "--rollouts", "rollouts.jsonl", "--out", "run", "--dry-run") == 0
    assert "134,515,008 parameters" in capsys.readouterr().out


def test_parameters_without_a_rule_and_their_price_are_reported(toy, here, monkeypatch):
    from ceilings import score_rules

    kind = next(k for k in score_rules.RULES if k is torch.nn.Linear)
    monkeypatch.delitem(score_rules.RULES, kind)
    assert measure(toy, "--rollouts", "rollouts.jsonl", "--out", "run") == 0
    model = json.loads((here / "run/report.json").read_text())["model"]
    slow = {name for name, _ in load_pretrained(toy)[0].named_parameters() if "proj" in name}
    assert slow <= set(model["slow_parameters"])
    assert model["slow_seconds"] >= 0 and 0 < model["slow_share"] <= 1
    assert "had no fast rule" in (here / "run/report.html").read_text()


# Files


def test_report_follows_its_schema_and_every_field_of_it_is_described(toy, here):
    measure(toy, "--rollouts", "rollouts.jsonl", "--out", "run")
    found = json.loads((here / "run/report.json").read_text())
    jsonschema.validate(found, report.schema())
    for wrong in ({"version": 1}, {"surprise": 1}, {"tightness": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found | wrong, report.schema())
    assert str(here) not in json.dumps(found) + (here / "run/report.html").read_text()
    assert os.uname().nodename not in (here / "run/report.json").read_text()


def test_page_asks_nothing_of_anyone(toy, here):
    measure(toy, "--rollouts", "rollouts.jsonl", "--out", "run")
    text = (here / "run/report.html").read_text()
    assert text.count("<svg") == 5
    for outside in ("http:", "https:", "<script", "<link", "@import", "url(", "src="):
        assert outside not in text
    found = json.loads((here / "run/report.json").read_text())
    for name in (t["name"] for t in found["tensors"]):
        assert name in text
    # A long name over a column is cut, so that it stays inside the picture.
    assert ">post_attentio…</text>" in text and ">post_attention_layernorm</text>" not in text


def test_page_escapes_what_it_shows(toy, here):
    measure(toy, "--rollouts", "rollouts.jsonl", "--out", "run")
    found = json.loads((here / "run/report.json").read_text())
    found["config"]["model"] = found["top_rows"][0]["label"] = found["tensors"][0]["matrix"] = "<b>&"
    from ceilings.report_page import page

    assert "<b>&" not in page(found) and "&lt;b&gt;&amp;" in page(found)


def test_words_do_not_take_noise_for_a_finding(toy, here):
    measure(
        toy, "--rollouts", "rollouts.jsonl", "--out", "run"
    )  # rewards drawn without looking at the response
    found = json.loads((here / "run/report.json").read_text())
    assert "cannot be told from noise" in found["conclusions"][1]
    assert "is no evidence" in found["caveats"][0]
    strong = json.loads(json.dumps(found))
    strong["tightness"] |= {"mean": 0.3, "standard_error": 0.1, "degrees_of_freedom": 10}
    assert "more than chance gives in 39 samples of 40" in report.conclusions(strong)[1]
    strong["top_rows"][0]["energy_share"] = 0.04
    assert "this reward uses 20\u00a0% of that" in " ".join(report.conclusions(strong))
    weak = json.loads(json.dumps(strong))
    weak["tightness"]["mean"] = 0.1  # a row of many is known no better than all of them
    assert "shows no use beyond noise" in " ".join(report.conclusions(weak))
    strong["tightness"]["degrees_of_freedom"] = 3  # three draws say little of the error
    assert "cannot be told from noise" in report.conclusions(strong)[1]
    strong["uncertainty"]["mean_score_ratio"] = 50
    assert "do not look like samples of this model" in " ".join(report.caveats(strong))


# Going on after a stop


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_measurement_that_was_stopped_goes_on_to_the_same_moments(toy, here, stop_after):
    model, _ = load_pretrained(toy, dtype=torch.float64)
    rollouts = read_rollouts("rollouts.jsonl")
    rewards, names = torch.stack([rollouts.rewards, rollouts.rewards.square()], 1), ("reward", "other")
    whole = measure_rollouts(model, rollouts, rewards, names, batch_size=3)
    checkpoint = measurement.Checkpoint(here / "moments.safetensors", seconds=0)
    calls = iter(range(1, 99))
    with pytest.raises(measurement.Interrupted):
        measure_rollouts(
            model,
            rollouts,
            rewards,
            names,
            batch_size=3,
            checkpoint=checkpoint,
            stop=lambda: next(calls) == stop_after,
        )
    assert ScoreMoments.load(checkpoint.path).count == 3 * stop_after
    seen = []
    again = measure_rollouts(
        model,
        rollouts,
        rewards,
        names,
        batch_size=4,
        checkpoint=checkpoint,
        progress=lambda *p: seen.append(p),
    )
    assert seen[0][0] == min(12, 3 * stop_after + 4) and again.count == whole.count == 12
    for name in whole.names:
        assert_equal(again.squares[name], whole.squares[name], rtol=1e-5)
        assert_equal(again.gradient("reward")[name], whole.gradient("reward")[name], rtol=1e-5)
    assert again.reward_std("reward") == pytest.approx(whole.reward_std("reward"), rel=1e-12)
    assert again.slow_parameters == whole.slow_parameters == ()


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(toy, here):
    write_jsonl(here / "rollouts.jsonl", some_rollouts(1200))
    arguments = (toy, "--rollouts", "rollouts.jsonl", "--out", "run")
    process = spawn(*arguments, "--batch-size", 2, cwd=here)
    deadline = time.monotonic() + 120
    while not (here / "run/run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3, (out, err)
    assert "finishing this batch" in err and "the same command goes on" in err and "Traceback" not in err
    left = {p.name for p in (here / "run").iterdir()}
    assert left - {"moments-2.safetensors"} == {"run.json", "moments-1.safetensors"}
    kept = sum(ScoreMoments.stored_header(here / "run" / name)["count"] for name in left - {"run.json"})
    assert 0 < kept < 1200
    assert measure(*arguments, "--batch-size", 128) == 0
    assert [part.count for part in both_halves(here / "run")] == [600, 600]


def test_sampling_that_was_stopped_goes_on_with_the_same_draws(toy, here, monkeypatch, capsys):
    arguments = ("--reward", "regex:w5|w7", "--samples", 3, "--max-new-tokens", 5)
    monkeypatch.setattr(measure_tasks, "_ROWS", 3)  # one prompt at a time
    assert measure(toy, "--prompts", "prompts.jsonl", *arguments, "--out", "whole") == 0
    monkeypatch.setattr(console.Terminal, "stopping", lambda self: True)
    assert measure(toy, "--prompts", "prompts.jsonl", *arguments, "--out", "parts") == 3
    assert len((here / "parts/rollouts.jsonl").read_text().splitlines()) == 3
    assert "the same command goes on from there" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(measure_tasks, "_ROWS", 3)
    assert measure(toy, "--prompts", "prompts.jsonl", *arguments, "--out", "parts") == 0
    assert (here / "parts/rollouts.jsonl").read_text() == (here / "whole/rollouts.jsonl").read_text()


def test_what_is_sampled_does_not_depend_on_how_many_prompts_go_at_once(toy, here, monkeypatch):
    write_jsonl(here / "same.jsonl", [{"prompt": "w2"}] * 4)
    drawn = []
    for rows in (3, 32):
        monkeypatch.setattr(measure_tasks, "_ROWS", rows)
        common = ("--reward", "regex:w5|w7", "--samples", 3, "--max-new-tokens", 5, "--out", f"run{rows}")
        assert measure(toy, "--prompts", "same.jsonl", *common) == 0
        lines = (here / f"run{rows}/rollouts.jsonl").read_text().splitlines()
        drawn.append([tuple(json.loads(line)["response_ids"]) for line in lines])
    assert drawn[0] == drawn[1]
    # The same prompt twice is asked twice, not answered once.
    assert len({tuple(drawn[0][k : k + 3]) for k in range(0, 12, 3)}) == 4


def test_what_a_killed_process_left_is_swept_up(toy, here, monkeypatch):
    arguments = (toy, "--rollouts", "rollouts.jsonl", "--out", "run", "--batch-size", 4)
    monkeypatch.setattr(console.Terminal, "stopping", lambda self: True)
    assert measure(*arguments) == 3
    for name in (".tmp726IHK", ".moments.safetensors.123.part"):
        (here / "run" / name).write_text("half of it")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert measure(*arguments) == 0
    assert {p.name for p in (here / "run").iterdir()} == FILES


def test_a_finished_run_is_left_alone(toy, here, capsys):
    assert measure(toy, "--rollouts", "rollouts.jsonl", "--out", "run") == 0
    before = (here / "run/report.json").stat().st_mtime_ns
    capsys.readouterr()
    assert measure(toy, "--rollouts", "rollouts.jsonl", "--out", "run", "--batch-size", 3) == 0
    assert "holds this measurement already" in capsys.readouterr().out
    assert (here / "run/report.json").stat().st_mtime_ns == before


# Manners


def test_in_a_pipe_there_is_no_progress(toy, here):
    process = spawn(toy, "--rollouts", "rollouts.jsonl", "--out", "run", "--batch-size", 1, cwd=here)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == ""
    assert "\r" not in out and "parameters; memory about" in out and out.rstrip().endswith("run/report.html")


def test_on_a_terminal_progress_says_how_long_it_will_take(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    terminal = console.Terminal()
    clock = iter((0.0, 30.0, 60.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    for done in (10, 20, 40):
        terminal.progress("measuring", done, 40)
    err = capsys.readouterr().err
    assert "measuring 10 of 40" in err and "measuring 20 of 40 · about 60 s left" in err
    assert "40 of 40" not in err and err.endswith("\r\x1b[K")


def test_dry_run_writes_nothing(toy, here, capsys):
    assert measure(toy, "--rollouts", "rollouts.jsonl", "--out", "run", "--dry-run") == 0
    parameters = sum(p.numel() for p in load_pretrained(toy)[0].parameters())
    assert f"{parameters:,} parameters; memory about" in capsys.readouterr().out
    assert not (here / "run").exists()


def test_help_is_a_manual_with_examples(capsys):
    assert measure("--help") == 0
    text = capsys.readouterr().out
    for word in (
        "examples:",
        "--rollouts rollouts.jsonl",
        "--next-token",
        "exit codes:",
        "Ctrl-C",
        "--dry-run",
    ):
        assert word in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "the following arguments are required: MODEL, --out"),
        (("m", "--out", "o"), "one of the arguments --rollouts --prompts --next-token is required"),
        (("m", "--out", "o", "--rollouts", "r", "--prompts", "p"), "not allowed with"),
        (("m", "--out", "o", "--prompts", "p"), "--prompts needs a --reward"),
        (("m", "--out", "o", "--rollouts", "r", "--samples", "3"), "--samples goes with --prompts only"),
        (("m", "--out", "o", "--rollouts", "r", "--reward", "exact"), "--reward goes with --prompts only"),
        (("m", "--out", "o", "--next-token", "a"), "--next-token and --options go together"),
        (
            ("m", "--out", "o", "--next-token", "a", "--options", "b", "--level", "token"),
            "--level does not go with --next-token",
        ),
        (
            ("m", "--out", "o", "--rollouts", "r", "--sign-draws", "2"),
            "--sign-draws goes with --level token only",
        ),
        (
            ("m", "--out", "o", "--prompts", "p", "--reward", "exact", "--reward", "exact"),
            "two of the --reward are the same",
        ),
        (
            ("m", "--out", "o", "--rollouts", "r", "--batch-size", "0"),
            "'0' is not a whole number of at least 1",
        ),
        (("m", "--out", "o", "--rollouts", "r", "--samples", "x"), "'x' is not a whole number of at least 1"),
    ],
)
def test_wrong_usage_is_one_line(capsys, arguments, message):
    assert measure(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and "--help" in err and err.count("\n") == 1


def complaint(capsys, code, *arguments):
    """The one sentence that a wrong input gets; nothing may be left behind."""
    capsys.readouterr()
    assert measure(*arguments) == code
    out, err = capsys.readouterr()
    assert err.startswith("ceilings: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    "lines, message",
    [
        ([rollout(), '{"prompt_ids": [2'], "bad.jsonl, line 2: not complete JSON"),
        ([rollout(), rollout(reward=float("nan"))], "bad.jsonl, line 2: the reward is nan"),
        ([rollout(), rollout(response=())], "bad.jsonl, line 2: the response is empty"),
        ([rollout()], "one response only"),
        ([rollout()] * 3, "all 3 rewards equal 1"),
        (
            [rollout(), rollout((2, VOCABULARY), reward=0.0)],
            f"rollout 2: token id {VOCABULARY} is out of range",
        ),
        (
            [rollout(), rollout(response=[2] * CONTEXT, reward=0.0)],
            f"more than the model's context of {CONTEXT}",
        ),
        ([rollout((2,)), rollout((2,)), rollout((3,), reward=0.0)], "within each of the 2 groups"),
        (
            [{"prompt_ids": [2], "response_ids": [3], "rewards": {"permuted-0": k}} for k in (0, 1)],
            "a permuted reward is called 'permuted-0' here",
        ),
        ([rollout(), "[" * 100_000], "bad.jsonl: a line is nested too deeply"),
        ([rollout(), rollout(reward=10**400)], "bad.jsonl: a value cannot be used"),
        ([rollout(log_probs="abc"), rollout(reward=0.0, log_probs="abc")], "`log_probs` a list of numbers"),
        ([rollout(), rollout(reward=None)], "bad.jsonl, line 2: there is no reward"),
        ([rollout(), rollout(reward="1")], "bad.jsonl, line 2: the reward must be a number, it is '1'"),
        ([rollout(), rollout((2, -1), reward=0.0)], "rollout 2: token id -1 is out of range"),
        ([rollout(), {"reward": 1.0, "prompt": "", "response": "w3"}], "line 2: the prompt has no token"),
        ([rollout(), {"reward": 1.0, "prompt": "w2", "response": " "}], "line 2: the response is empty"),
        ([], "bad.jsonl is empty"),
    ],
)
def test_bad_rollouts_leave_nothing_behind(toy, here, capsys, lines, message):
    write_jsonl(here / "bad.jsonl", lines)
    assert message in complaint(capsys, 2, toy, "--rollouts", "bad.jsonl", "--out", "run")
    assert not (here / "run").exists()


def test_missing_things_are_named(toy, here, capsys):
    out = ("--out", "run")
    assert "there is no file 'none.jsonl'" in complaint(capsys, 2, toy, "--rollouts", "none.jsonl", *out)
    assert "there is no model 'none'" in complaint(capsys, 2, "none", "--rollouts", "rollouts.jsonl", *out)
    (here / "no_model").mkdir()
    assert "'no_model' is not a readable" in complaint(
        capsys, 2, "no_model", "--rollouts", "rollouts.jsonl", *out
    )
    wrong = ("--rollouts", "rollouts.jsonl", "--device", "abacus")
    assert "the device 'abacus' cannot be used" in complaint(capsys, 2, toy, *wrong, *out)
    rule = ("--prompts", "prompts.jsonl", "--reward", "none")
    assert "there is no reward rule 'none'" in complaint(capsys, 2, toy, *rule, *out)
    assert not (here / "run").exists()


def test_a_refusal_is_one_line_on_stderr_of_the_program_itself(toy, here):
    process = spawn(toy, "--rollouts", "none.jsonl", "--out", "run", cwd=here)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "") and not (here / "run").exists()
    assert err == "ceilings: there is no file 'none.jsonl': check the name and the folder\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("def score(:", "the reward rule broken:score cannot be imported: SyntaxError"),
        ("1 / 0", "the reward rule broken:score cannot be imported: ZeroDivisionError"),
        ("x = 1", "the reward rule broken:score cannot be imported"),
        ("def score(text, line): return {}[text]", "the reward rule broken:score failed: KeyError"),
        ("def score(text, line): return float('nan')", "returned nan; it must return a finite number"),
    ],
)
def test_a_rule_of_the_user_that_does_not_work_is_one_sentence(toy, here, capsys, monkeypatch, text, message):
    (here / "broken.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    base = ("--prompts", "prompts.jsonl", "--reward", "broken:score", "--max-new-tokens", 5, "--out", "run")
    assert message in complaint(capsys, 2, toy, *base)
    assert not (here / "run").exists()
    sys.modules.pop("broken", None)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("model.safetensors", None, "is not a readable causal language model"),
        ("model.safetensors", b"", "is not a readable causal language model"),
        ("config.json", b"{", "is not a readable causal language model"),
        ("config.json", b'{"model_type": "abacus"}', "is not a readable causal language model"),
        ("tokenizer.json", b"{", "is not a readable causal language model"),
    ],
)
def test_a_broken_model_is_one_sentence(tmp_path, here, capsys, file, content, message):
    model = save_toy(tmp_path / "model")
    whole = (model / file).read_bytes()
    (model / file).write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert message in complaint(capsys, 2, model, "--rollouts", "rollouts.jsonl", "--out", "run")
    assert not (here / "run").exists()


def test_a_gguf_file_that_is_none_or_cut_short_is_one_sentence(here, capsys):
    with built_in_model_path().open("rb") as file:
        (here / "cut.gguf").write_bytes(file.read(1 << 20))
    (here / "other.gguf").write_bytes(b"not a model")
    (here / "model.bin").write_bytes(b"neither")
    for name in ("cut.gguf", "other.gguf", "model.bin"):
        said = complaint(capsys, 2, name, "--rollouts", "rollouts.jsonl", "--out", "run")
        assert name in said and not (here / "run").exists()


def test_weights_that_are_not_numbers_are_named(tmp_path, here, capsys):
    model = save_toy(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    said = complaint(capsys, 2, model, "--rollouts", "rollouts.jsonl", "--out", "run")
    assert "model.layers.1.mlp.up_proj.weight of the model holds NaN or infinity" in said
    assert not (here / "run").exists()


def test_scores_that_overflow_leave_nothing_behind(tmp_path, here, capsys):
    model = save_toy(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].fill_(1e30)
    weights["model.layers.1.mlp.gate_proj.weight"].fill_(1e30)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    on = {"NaN or infinite": ("--rollouts", "rollouts.jsonl"), "": ("--next-token", "w2", "--options", "w5")}
    for message, arguments in on.items():
        assert message in complaint(capsys, 2, model, *arguments, "--out", "run")
        assert not (here / "run").exists()


@pytest.mark.parametrize("seed", [-3, 2**40])
def test_any_whole_number_is_a_seed(toy, here, seed):
    arguments = ("--level", "token", "--sign-draws", 1, "--seed", seed, "--out", "run")
    assert measure(toy, "--rollouts", "rollouts.jsonl", *arguments) == 0


def test_rule_that_cannot_judge_names_the_prompt_and_leaves_nothing(toy, here, capsys):
    write_jsonl(here / "p.jsonl", [{"prompt": "w2", "answer": "w3"}, {"prompt": "w3"}])
    base = (toy, "--prompts", "p.jsonl", "--out", "run", "--max-new-tokens", 5, "--reward")
    said = complaint(capsys, 2, *base, "exact")
    assert "p.jsonl, line 2: the rule `exact` needs an `answer`" in said and not (here / "run").exists()
    said = complaint(capsys, 2, *base, "regex:nothing")
    assert "rewards equal 0" in said and not (here / "run").exists()


def test_words_of_next_token_are_checked(toy, here, capsys):
    base = (toy, "--next-token", "w2", "--out", "run", "--options")
    assert "'w5 w6' is 2 tokens after this prompt" in complaint(capsys, 2, *base, "w5 w6")
    assert "two of the --options are the same token" in complaint(capsys, 2, *base, "w5", " w5")


def test_exact_run_of_hours_asks_first(toy, here, capsys, monkeypatch):
    monkeypatch.setattr(measure_command, "_LONG", 0.0)
    base = (toy, "--next-token", "w2", "--options", "w5", "--out", "run")
    assert "add --yes to start it" in complaint(capsys, 2, *base)
    assert not (here / "run").exists() and measure(*base, "--yes") == 0


def test_model_without_a_tokenizer_takes_ids_and_refuses_text(tmp_path, here, capsys):
    bare = save_toy(tmp_path / "bare", tokenizer=False)
    assert measure(bare, "--rollouts", "rollouts.jsonl", "--out", "run") == 0
    write_jsonl(here / "text.jsonl", [{"prompt": "w2", "response": "w3", "reward": 1}])
    for arguments in (
        ("--rollouts", "text.jsonl"),
        ("--prompts", "prompts.jsonl", "--reward", "exact"),
        ("--next-token", "w2", "--options", "w3"),
    ):
        assert "no tokenizer" in complaint(capsys, 2, bare, *arguments, "--out", "text")
    assert not (here / "text").exists()


def test_folder_of_another_run_is_refused(toy, here, capsys):
    arguments = (toy, "--rollouts", "rollouts.jsonl")
    assert measure(*arguments, "--out", "run") == 0
    said = complaint(capsys, 2, *arguments, "--seed", 1, "--out", "run")
    assert "run holds another run (it differs in seed): choose another --out" in said
    write_jsonl(here / "rollouts.jsonl", some_rollouts(seed=1))
    assert "it differs in input_digest" in complaint(capsys, 2, *arguments, "--out", "run")
    (here / "full").mkdir()
    (here / "full/thesis.tex").write_text("x")
    assert "holds more than a run of this command ('thesis.tex')" in complaint(
        capsys, 2, *arguments, "--out", "full"
    )
    assert (here / "full/thesis.tex").read_text() == "x"
    (here / "file").write_text("x")
    for out in ("file", "file/run"):
        assert f"{out} cannot be written to" in complaint(capsys, 2, *arguments, "--out", out)


def test_changed_weights_are_another_run(tmp_path, here, capsys):
    model = save_toy(tmp_path / "model")
    assert measure(model, "--rollouts", "rollouts.jsonl", "--out", "run") == 0
    save_toy(model, initializer_range=0.3)
    said = complaint(capsys, 2, model, "--rollouts", "rollouts.jsonl", "--out", "run")
    assert "it differs in model_fingerprint" in said


def test_what_does_not_fit_is_refused_before_it_starts(toy, here, capsys, monkeypatch):
    monkeypatch.setattr(measure_command, "available_memory", lambda device: 1000.0)
    said = complaint(capsys, 4, toy, "--rollouts", "rollouts.jsonl", "--out", "run")
    assert "are free: lower --batch-size" in said and not (here / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
def test_memory_that_runs_out_on_the_way_keeps_the_checkpoint(toy, here, capsys, monkeypatch, error):
    calls = iter(range(99))
    real = ScoreAccumulator.add

    def add(self, *args, **kwargs):
        if next(calls) == 3:
            raise error
        real(self, *args, **kwargs)

    monkeypatch.setattr(expected_cost, "_SMALL", 0)  # nothing is tried before
    monkeypatch.setattr(ScoreAccumulator, "add", add)
    arguments = (
        toy,
        "--rollouts",
        "rollouts.jsonl",
        "--out",
        "run",
        "--checkpoint-seconds",
        0,
        "--batch-size",
        4,
    )
    assert "memory ran out" in complaint(capsys, 4, *arguments)
    assert [part.count for part in both_halves(here / "run")] == [6, 4]
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert measure(*arguments) == 0


def test_free_memory_is_known_here():
    assert expected_cost.available_memory(torch.device("cpu")) > 1e8
