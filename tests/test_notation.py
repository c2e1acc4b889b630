"""The page of notation, the code and the cells say the same words."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_code_name_of_the_notation_is_used() -> None:
    page = (ROOT / "book" / "notation.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\| `(\w+)` \|", page))
    assert len(names) > 15
    texts = [*(ROOT / "src" / "ceilings").rglob("*.py"), *(ROOT / "book").glob("*/*.md")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    assert {name for name in names if not re.search(rf"\b\w*{name}\b", source)} == set()
