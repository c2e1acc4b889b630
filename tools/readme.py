"""What the README shows of the book: one figure, drawn from the library, and the table of chapters and claims.

python tools/readme.py    draw book/_static/readme.png and write the table into README.md
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch

import claims
from ceilings.ceiling import gradient_ceiling, score_reward_covariance
from ceilings.figures import COLOURS, STYLE, house_plot
from ceilings.policies import AutoregressivePolicy, Enumeration
from ceilings.testing import assert_at_most
from notebooks import BOOK, ROOT, chapters

__all__ = ["FIGURE", "README", "draw", "drawn_policy", "table", "with_table"]

FIGURE = BOOK / "_static" / "readme.png"
README = ROOT / "README.md"
PARAMETERS = 300
MARKED = re.compile(r"(<!-- chapters: make readme -->\n).*?(<!-- end of chapters -->)", re.DOTALL)


def drawn_policy() -> tuple[Enumeration, torch.Tensor]:
    """The policy of the figure, all of its responses, and a binary reward."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.logspace(-1, 1, PARAMETERS, dtype=torch.float64)
    policy = AutoregressivePolicy.random(4, 3, PARAMETERS, generator, eos=0)
    start = torch.randn(PARAMETERS, generator=generator, dtype=torch.float64) / scales / 20
    law = AutoregressivePolicy(policy.features * scales, 3, eos=0).enumerate(start)
    return law, law.rewards(lambda response: 3 in response)


def draw(path: Path) -> None:
    """Every parameter of a small policy beneath its ceiling."""
    matplotlib.use("Agg")
    law, rewards = drawn_policy()
    gradient, ceiling = (
        f(law.scores, rewards, law.probs) for f in (score_reward_covariance, gradient_ceiling)
    )
    assert_at_most(gradient.abs(), ceiling)
    with plt.style.context(STYLE):
        figure, ax = plt.subplots(figsize=(6.4, 3.8))
        house_plot(ax, ceiling, gradient)
        ax.text(
            0.05, 0.9, "no reward of this spread gets here", transform=ax.transAxes, color=COLOURS["ceiling"]
        )
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)


def table() -> str:
    """The chapters in reading order, each with the claims that it proves."""
    ledger = claims.collect().values()
    rows = ["| Chapter | Claims it proves |", "|---|---|"]
    for chapter in chapters():
        titles = [claim.title for claim in ledger if claim.chapter == chapter]
        if "/" in chapter:
            title = claims.heading(chapter).replace("|", r"\|")
            rows.append(
                f"| [{title}](book/{chapter}.md) | {'; '.join(titles).replace('|', chr(92) + '|') or '–'} |"
            )
    return "\n".join(rows)


def with_table(text: str) -> str:
    """The README with the table as it is now."""
    return MARKED.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", text)


if __name__ == "__main__":
    draw(FIGURE)
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    print("README.md and its figure are made")
