"""Do the links of the repository's own pages resolve? The book's are checked where it is built.

python tools/links.py     every relative link of README.md, CONTRIBUTING.md and CHANGELOG.md
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["broken", "headings"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|<img[^>]*src=\"([^\"]+)\"")


def headings(text: str) -> set[str]:
    """The anchors of a page, as they are made from its headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def broken() -> list[str]:
    """The links that lead nowhere."""
    findings = []
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for match in LINK.finditer(text):
            target, _, anchor = (match[1] or match[2]).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            path = ROOT / target if target else ROOT / name
            if not path.exists():
                findings.append(f"{name}: {target} does not exist")
            elif anchor and path.suffix == ".md" and anchor not in headings(path.read_text(encoding="utf-8")):
                findings.append(f"{name}: {target}#{anchor} has no such heading")
    return findings


if __name__ == "__main__":
    complaints = broken()
    print("\n".join(complaints) or f"the links of {', '.join(PAGES)} resolve")
    raise SystemExit(bool(complaints))
