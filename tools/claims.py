"""The ledger of claims: what the book states, where it is proved, and what checks it.

    python tools/claims.py build    write book/claims.md
    python tools/claims.py check    is it what the chapters and the tests say?

A claim is a ``prf:`` directive with a label. A cell says by its metadata ``claims: {label: kind}`` that it checks
one, and a unit test by ``@pytest.mark.claim("label")``. The claim in words stands in ``book/claims.yml``.

What others report is no claim of the book. It stands in ``book/reported.yml``, and a cell that asserts what was found
here gives its verdict by the metadata ``reported: {key: verdict}``.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from notebooks import BOOK, ROOT, chapters, paths, read_text

__all__ = [
    "KINDS",
    "VERDICTS",
    "Claim",
    "collect",
    "page",
    "proofs",
    "reported",
    "stated",
    "tested",
    "verdicts",
    "words",
]

TARGET = BOOK / "claims.md"
KINDS = ("symbolic", "enumerated", "counterexample", "measured")
#: What a cell may find on a claim of others, at the scale of this book.
VERDICTS = ("confirmed", "not confirmed", "reversed")
STATES = "theorem|proposition|corollary|lemma|conjecture"
FENCE = re.compile(r"^(?P<fence>`{3,}|:{3,})\{prf:(?P<kind>\w+)\}[ \t]*(?P<title>.*)$", re.MULTILINE)
LABEL = re.compile(r"\A(?:\s*:\w+:.*\n)*?\s*:label:\s*(\S+)")

HEAD = """# The ledger of claims

Everything that this book claims, with what stands behind it. The page is written by a program from the chapters
themselves; a claim without a proof, or without a check that runs with the book, fails the tests.

**Proved**
: a complete proof in the chapter; *sketch* where it says so.

**Symbolic**
: a computer algebra system decides the identity on the smallest policy that has every mechanism.

**Enumerated**
: both sides computed in double precision over *every* response of a policy, and compared.

**Counterexample**
: an exact example of what happens without an assumption, or of why no more is claimed.

**Measured**
: seen on a real model, a sample or a stored run, with its uncertainty. This supports a claim and proves nothing.

**In the tests**
: checked once more by the tests of the library, each by a derivation of its own.
"""

REPORTED = """
## What others report, tried again at this scale

These are findings of others, on models of billions of parameters. Here they meet policies that fit into a page, and
one model of 135 million parameters. A verdict says what a cell of the chapter asserts about *these*, and nothing
about the models that the report is on: *confirmed*, the same was found; *not confirmed*, it was not found, or what
was found does not need the explanation; *reversed*, the opposite was found.

| Reported | By | Found here |
|---|---|---|
"""


@dataclass
class Claim:
    """One labelled statement and what stands behind it."""

    label: str
    kind: str
    title: str
    chapter: str
    proof: str | None
    checks: list[tuple[str, str]] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)


def directives(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Every ``prf:`` directive of a text: its opening line, and what stands between its fences."""
    for opening in FENCE.finditer(text):
        closing = re.compile(rf"^{re.escape(opening['fence'])}\s*$", re.MULTILINE).search(text, opening.end())
        yield opening, text[opening.end() + 1 : closing.start() if closing else len(text)]


def stated(chapter: str) -> list[Claim]:
    """The claims of a chapter, each with the way in which it is proved there."""
    claims: list[Claim] = []
    for opening, body in directives(paths(chapter)[0].read_text(encoding="utf-8")):
        label = LABEL.match(body)
        if opening["kind"] == "proof":
            if claims and claims[-1].proof is None and body.strip():
                claims[-1].proof = "sketch" if "sketch" in opening["title"].lower() else "proved"
        elif re.fullmatch(STATES, opening["kind"]) and label:
            claims.append(Claim(label[1], opening["kind"], opening["title"].strip(), chapter, None))
    return claims


def proofs(chapter: str) -> int:
    """The number of proofs of a chapter."""
    text = paths(chapter)[0].read_text(encoding="utf-8")
    return sum(opening["kind"] == "proof" for opening, _ in directives(text))


def checked(chapter: str) -> Iterator[tuple[str, str]]:
    """The label and the kind of every check that a cell of a chapter declares."""
    for cell in read_text(paths(chapter)[0]).cells:
        yield from cell.metadata.get("claims", {}).items()


def tested() -> Iterator[tuple[str, str]]:
    """The label and the test of every ``@pytest.mark.claim`` of the unit tests."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.claim":
                    for label in decorator.args:
                        yield ast.literal_eval(label), f"{path.stem}.{getattr(node, 'name', '')}"


def collect() -> dict[str, Claim]:
    """All claims of the book by label, in reading order; a label used twice is a ValueError."""
    claims: dict[str, Claim] = {}
    for chapter in chapters():
        for claim in stated(chapter):
            if claim.label in claims:
                raise ValueError(f"{claim.label} is stated in {claims[claim.label].chapter} and in {chapter}")
            claims[claim.label] = claim
    for chapter in chapters():
        for label, kind in checked(chapter):
            if label not in claims:
                raise ValueError(f"book/{chapter}.md: a cell checks {label}, which no chapter states")
            claims[label].checks.append((kind, chapter))
    for label, test in tested():
        # A test may run ahead of its chapter; that its label is a planned one is checked by the tests of the ledger.
        if label in claims:
            claims[label].tests.append(test)
    return claims


def words() -> dict[str, str]:
    """Each claim in words, by label."""
    loaded = yaml.safe_load((BOOK / "claims.yml").read_text(encoding="utf-8"))
    return {label: " ".join(text.split()) for label, text in loaded.items()}


def reported() -> dict[str, dict[str, str]]:
    """What others report, by key: ``says``, a sentence, and ``cite``, a key of the bibliography."""
    loaded: dict[str, dict[str, str]] = yaml.safe_load((BOOK / "reported.yml").read_text(encoding="utf-8"))
    return {
        key: {name: " ".join(text.split()) for name, text in entry.items()} for key, entry in loaded.items()
    }


def verdicts() -> Iterator[tuple[str, str, str, str]]:
    """Key, verdict, chapter and source of every cell that gives a verdict on a claim of others."""
    for chapter in chapters():
        for cell in read_text(paths(chapter)[0]).cells:
            for key, verdict in cell.metadata.get("reported", {}).items():
                yield key, verdict, chapter, cell.source


def others() -> list[str]:
    """The claims of others as rows of a table; those on which no cell has a verdict are left out."""
    found: dict[str, dict[str, str]] = {}
    for key, verdict, chapter, _ in verdicts():
        found.setdefault(key, {})[f"{verdict} in [{heading(chapter)}]({chapter}.md)"] = verdict
    return [
        f"| {entry['says']} | {{cite:t}}`{entry['cite']}` | {'; '.join(found[key])} |"
        for key, entry in reported().items()
        if key in found
    ]


def heading(chapter: str) -> str:
    """The title of a chapter."""
    text = paths(chapter)[0].read_text(encoding="utf-8")
    return next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def behind(claim: Claim) -> str:
    """What stands behind a claim: its proof, the checks by kind and chapter, the unit tests."""
    parts = [claim.proof or "not proved"]
    for kind in KINDS:
        where = [chapter for found, chapter in claim.checks if found == kind]
        for chapter in dict.fromkeys(where):
            elsewhere = f" in [{heading(chapter)}]({chapter}.md)" if chapter != claim.chapter else ""
            plural = "s" if kind == "counterexample" and where.count(chapter) > 1 else ""
            parts.append(f"{where.count(chapter)}\u00a0{kind}{plural}{elsewhere}")
    if claim.tests:
        parts.append(f"{len(claim.tests)}\u00a0in\u00a0the\u00a0tests")
    return ", ".join(parts)


def row(claim: Claim, in_words: str) -> str:
    """One claim as a row of the table."""
    cells = [f"{claim.title} ({{prf:ref}}`{claim.label}`)", in_words, behind(claim)]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def page() -> str:
    """The text of the ledger."""
    claims, sentences = collect(), words()
    parts = [HEAD]
    for chapter in dict.fromkeys(claim.chapter for claim in claims.values()):
        rows = [
            row(claim, sentences.get(label, ""))
            for label, claim in claims.items()
            if claim.chapter == chapter
        ]
        parts.append(f"\n## [{heading(chapter)}]({chapter}.md)\n")
        parts.append("| Claim | In words | What stands behind it |")
        parts.append("|---|---|---|")
        parts += rows
    total = sum(len(claim.checks) for claim in claims.values())
    parts.append(
        f"\n{len(claims)} claims, {total} checks in the chapters. A number in the table links to its chapter."
    )
    return "\n".join(parts) + "\n" + REPORTED + "".join(f"{line}\n" for line in others())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the ledger of claims.")
    parser.add_argument("command", choices=["build", "check"])
    command = parser.parse_args().command
    if command == "build":
        TARGET.write_text(page(), encoding="utf-8")
        print(f"{TARGET.relative_to(ROOT)}: {len(collect())} claims")
        return 0
    if not Path(TARGET).is_file() or TARGET.read_text(encoding="utf-8") != page():
        print("book/claims.md is not what the chapters and the tests say; run: make claims")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
