"""The README: its figure is what the library draws, its table what the book holds, its example runs."""

import re

import numpy as np
import torch
from PIL import Image

import readme
from notebooks import ROOT, chapters

TEXT = readme.README.read_text(encoding="utf-8")


def test_figure_is_what_the_library_draws(tmp_path):
    readme.draw(tmp_path / "fresh.png")
    stored, fresh = (
        np.asarray(Image.open(path).convert("RGB"), dtype=float)
        for path in (readme.FIGURE, tmp_path / "fresh.png")
    )
    assert stored.shape == fresh.shape
    assert np.sqrt(((stored - fresh) ** 2).mean()) < 4, "run: make readme"


def test_caption_counts_right():
    law, rewards = readme.drawn_policy()
    parameters, responses = re.search(
        r"\*(\d+) parameters of a small policy, all (\d+) of its responses", TEXT
    ).groups()
    assert law.scores.shape == (int(responses), int(parameters))
    assert set(rewards.tolist()) == {0.0, 1.0}


def test_table_lists_every_chapter_with_its_claims():
    assert readme.with_table(TEXT) == TEXT, "run: make readme"
    for chapter in chapters():
        if "/" in chapter:
            assert f"(book/{chapter}.md)" in TEXT


def test_example_runs_and_holds():
    scope = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1], scope)
    law, rewards = scope["law"], scope["rewards"]
    gradient = scope["score_reward_covariance"](law.scores, rewards, law.probs)
    bound = scope["gradient_ceiling"](law.scores, rewards, law.probs)
    tightness = scope["tightness"](law.scores, rewards, law.probs)
    assert torch.allclose(gradient.abs(), tightness * bound, rtol=1e-12, atol=0)


def test_commands_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for page in ("README.md", "CONTRIBUTING.md"):
        for command in re.findall(r"`make (\w+)", (ROOT / page).read_text(encoding="utf-8")):
            assert command in targets, f"{page}: make {command}"
