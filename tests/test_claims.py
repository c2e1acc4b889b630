"""The ledger of claims is what the chapters say, and every claim in it is proved and checked."""

import ast
import subprocess
import sys

import pytest

import claims
from notebooks import BOOK, ROOT, chapters

# The claims that a chapter owes; a chapter that is not written yet owes nothing.
OWED = {
    "identity/small_is_not_sparse": ["prop-not-sparse"],
    "identity/gradient_is_a_covariance": ["thm-zero-mean", "thm-covariance"],
    "identity/ceiling": ["thm-ceiling", "thm-logits", "cor-bounded"],
    "identity/tokens": ["thm-tokens", "thm-nested", "thm-prompts"],
    "identity/assumptions": ["prop-assumptions"],
    "off_policy/whose_average": ["thm-behaviour", "prop-other-loss", "thm-importance"],
    "off_policy/supervised": ["thm-supervised", "thm-distillation"],
    "off_policy/algorithms": ["prop-algorithms"],
    "looseness/forced": ["thm-joint", "thm-energy"],
    "looseness/estimation": ["prop-vacuous"],
    "updates/optimisers": ["prop-sgd", "prop-adam"],
    "updates/precision": ["prop-ulp"],
    "updates/subnetwork": ["prop-subnetwork"],
    "updates/top_percent": ["prop-top-overlap"],
    "updates/rank": ["prop-rank"],
    "updates/leash": ["prop-leash"],
    "choices/patch": ["prop-patch"],
}
# Claims of chapters that are still to come, which tests of the library may back already.
PLANNED = "prop-where prop-reach".split()
LEDGER = claims.collect()
# A chapter on a real model can only measure; the claims that it proves are then decided by the tests of the library.
DECIDING = {"symbolic", "enumerated"}

every_claim = pytest.mark.parametrize("claim", LEDGER.values(), ids=lambda claim: claim.label)


def test_ledger_is_in_step_with_the_chapters():
    assert (BOOK / "claims.md").read_text(encoding="utf-8") == claims.page(), "run: make claims"


@every_claim
def test_claim_is_proved_in_its_chapter(claim):
    assert claim.proof is not None


@every_claim
def test_claim_is_asserted_by_a_cell_of_its_chapter(claim):
    here = {kind for kind, chapter in claim.checks if chapter == claim.chapter}
    assert here, f"no cell of {claim.chapter} checks {claim.label}"
    assert here & DECIDING or claim.tests, f"{claim.label} is only measured: let a unit test decide it"
    assert {kind for kind, _ in claim.checks} <= set(claims.KINDS)


@every_claim
def test_claim_stands_in_words(claim):
    assert claims.words().get(claim.label), f"add a sentence for {claim.label} to book/claims.yml"


def test_no_sentence_without_a_claim():
    assert set(claims.words()) == set(LEDGER)


@pytest.mark.parametrize("chapter", [chapter for chapter in OWED if chapter in chapters()])
def test_chapter_states_what_it_owes(chapter):
    assert set(OWED[chapter]) <= {claim.label for claim in claims.stated(chapter)}


def test_tests_back_claims_that_exist_or_are_planned():
    assert {label for label, _ in claims.tested()} <= {
        *LEDGER,
        *PLANNED,
        *(label for owed in OWED.values() for label in owed),
    }


def test_every_proof_belongs_to_a_claim():
    for chapter in chapters():
        proved = [claim for claim in claims.stated(chapter) if claim.proof]
        assert claims.proofs(chapter) == len(proved), chapter


def test_every_statement_has_a_label():
    for chapter in chapters():
        text = (BOOK / f"{chapter}.md").read_text(encoding="utf-8")
        statements = [
            opening for opening in claims.FENCE.finditer(text) if opening["kind"] in claims.STATES.split("|")
        ]
        assert len(statements) == len(claims.stated(chapter)), chapter


def test_every_report_of_others_has_a_verdict_and_every_verdict_a_report():
    assert {key for key, *_ in claims.verdicts()} == set(claims.reported())


@pytest.mark.parametrize(
    ("key", "verdict", "chapter", "source"),
    list(claims.verdicts()),
    ids=lambda part: part if len(part) < 40 and "\n" not in part else "",
)
def test_verdict_is_asserted_where_it_is_given(key, verdict, chapter, source):
    assert verdict in claims.VERDICTS, f"{chapter}: say one of {', '.join(claims.VERDICTS)} of {key}"
    run = [node for node in ast.parse(source).body if not isinstance(node, ast.FunctionDef)]
    asserted = [
        node
        for node in ast.walk(ast.Module(run, []))
        if isinstance(node, ast.Assert)
        or isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith("assert_")
    ]
    assert asserted, f"{chapter}: the cell with the verdict on {key} asserts nothing"


@pytest.fixture
def small_book(tmp_path, monkeypatch):
    """A book of one chapter whose text a test may choose."""

    def write(text):
        (tmp_path / "one.md").write_text(text, encoding="utf-8")
        return claims.collect()

    monkeypatch.setattr(claims, "chapters", lambda: ["one"])
    monkeypatch.setattr(claims, "paths", lambda name: (tmp_path / f"{name}.md", tmp_path / f"{name}.ipynb"))
    monkeypatch.setattr(claims, "tested", lambda: [])
    return write


STATEMENT = "# One\n\n```{prf:theorem} A title\n:label: thm-one\n\nA statement.\n```\n"
PROOF = "\n```{prf:proof}\nAn argument.\n```\n"
CHECK = "\n```{code-cell} ipython3\n---\nclaims: {thm-one: symbolic}\n---\nassert True\n```\n"


def test_statement_proof_and_check_are_found(small_book):
    (claim,) = small_book(STATEMENT + PROOF + CHECK).values()
    assert (claim.title, claim.proof, claim.checks) == ("A title", "proved", [("symbolic", "one")])


def test_missing_proof_and_sketch_are_told_apart(small_book):
    assert small_book(STATEMENT)["thm-one"].proof is None
    assert (
        small_book(STATEMENT + PROOF.replace("{prf:proof}", "{prf:proof} (Sketch)"))["thm-one"].proof
        == "sketch"
    )


def test_check_of_an_unknown_claim_is_refused(small_book):
    with pytest.raises(ValueError, match="a cell checks thm-two, which no chapter states"):
        small_book(STATEMENT + PROOF + CHECK.replace("thm-one", "thm-two"))


def test_verdict_stands_in_the_ledger_with_its_source_and_chapter(small_book, tmp_path, monkeypatch):
    small_book(
        STATEMENT + PROOF + CHECK.replace("claims: {thm-one: symbolic}", "reported: {dense: reversed}")
    )
    (tmp_path / "claims.yml").write_text("thm-one: A sentence.", encoding="utf-8")
    (tmp_path / "reported.yml").write_text(
        "dense: {says: Updates are dense., cite: someone2025}\nlost: {says: Nobody looked., cite: other2024}",
        encoding="utf-8",
    )
    monkeypatch.setattr(claims, "BOOK", tmp_path)
    assert list(claims.verdicts()) == [("dense", "reversed", "one", "assert True")]
    assert claims.page().endswith(
        "| Updates are dense. | {cite:t}`someone2025` | reversed in [One](one.md) |\n"
    )


def test_command_tells_when_the_ledger_is_stale():
    run = subprocess.run(
        [sys.executable, "tools/claims.py", "check"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
