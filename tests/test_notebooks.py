"""The chapters as they are stored: made from their text, run in order, and fit to be read anywhere."""

import ast
import re
import statistics

import nbformat
import pytest
import yaml
from nbformat import NotebookNode

import claims
import notebooks
from notebooks import BOOK, chapters, paths

MOST_LINES = 20
MOST_MEDIAN_LINES = 8
MOST_CODE_CELLS = 25
FEWEST_CAPTION_WORDS = 8
KINDS = {"symbolic", "enumerated", "counterexample", "measured"}
CLOSING_SECTIONS = ["How loose", "What this does not show", "Exercises", "References"]

every_chapter = pytest.mark.parametrize("name", chapters())
# The front page has cells too, but neither the sections nor the rhythm of a chapter.
every_full_chapter = pytest.mark.parametrize("name", [name for name in chapters() if "/" in name])


def stored(name: str) -> NotebookNode:
    return nbformat.read(paths(name)[1], as_version=4)


def code_cells(name: str) -> list[NotebookNode]:
    return [cell for cell in stored(name).cells if cell.cell_type == "code"]


def asserts(source: str) -> bool:
    """Does the cell check something when it runs: an assertion, outside any function and any class?"""
    waiting = list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            named = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if named.startswith("assert_"):
                return True
        if isinstance(node, ast.For | ast.With | ast.If | ast.Try):
            waiting += [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            waiting += [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
    return False


@every_chapter
def test_notebook_holds_its_text(name):
    assert notebooks.check(name) is None


def test_every_text_with_code_is_in_the_table_of_contents():
    texts = {
        path.relative_to(BOOK).with_suffix("").as_posix() for path in BOOK.rglob("*.md") if is_chapter(path)
    }
    stored_ones = {path.relative_to(BOOK).with_suffix("").as_posix() for path in BOOK.rglob("*.ipynb")}
    assert texts == set(chapters())
    assert stored_ones == set(chapters())


def is_chapter(path) -> bool:
    return "```{code-cell}" in path.read_text(encoding="utf-8") or path.with_suffix(".ipynb").exists()


@every_chapter
def test_every_cell_ran_once_and_in_order(name):
    counts = [cell.execution_count for cell in code_cells(name) if cell.source.strip()]
    assert counts == list(range(1, len(counts) + 1))


@every_chapter
def test_nothing_went_to_stderr(name):
    for cell in code_cells(name):
        assert not [output for output in cell.outputs if output.get("name") == "stderr"], cell.source


@every_chapter
def test_outputs_would_be_the_same_elsewhere(name):
    assert notebooks.unstable_outputs(stored(name)) == []


@every_chapter
def test_every_picture_is_a_figure_with_caption_and_alternative_text(name):
    for cell in code_cells(name):
        shapes = [output.get("data", {}) for output in cell.outputs]
        drawings = re.findall(r"<svg[^>]*>", "".join(shape.get("text/html", "") for shape in shapes))
        raster = any("image/png" in shape for shape in shapes)
        if raster or drawings:
            shown = cell.metadata.get("mystnb", {})
            figure, image = shown.get("figure", {}), shown.get("image", {})
            assert figure.get("name", "").startswith("fig-"), cell.source
            assert len(figure.get("caption", "").split()) >= FEWEST_CAPTION_WORDS, figure
            texts = [image.get("alt", "")] * raster + [said(drawing) for drawing in drawings]
            assert all(len(text.split()) >= 4 for text in texts), figure
            assert "set_title" not in cell.source, (
                f"{figure['name']}: what the title says belongs in the caption"
            )


def said(drawing: str) -> str:
    """What an SVG says to who cannot see it."""
    found = re.search(r'aria-label="([^"]*)"', drawing)
    return found[1] if found and 'role="img"' in drawing else ""


def test_figure_names_are_unique():
    names = [
        cell.metadata["mystnb"]["figure"]["name"]
        for name in chapters()
        for cell in code_cells(name)
        if "figure" in cell.metadata.get("mystnb", {})
    ]
    assert len(names) == len(set(names))


@every_full_chapter
def test_cells_are_short(name):
    cells = code_cells(name)
    assert max((len(cell.source.splitlines()) for cell in cells), default=0) <= MOST_LINES
    open_ones = [cell.source for cell in cells if "hide-input" not in cell.metadata.get("tags", [])]
    lengths = [sum(bool(line.strip()) for line in source.splitlines()) for source in open_ones]
    assert statistics.median(lengths or [0]) <= MOST_MEDIAN_LINES, (
        f"lines of the cells that a reader sees: {lengths}"
    )
    assert len(cells) <= MOST_CODE_CELLS


@every_chapter
def test_a_cell_that_claims_asserts(name):
    for cell in code_cells(name):
        claims = cell.metadata.get("claims", {})
        assert set(claims.values()) <= KINDS, claims
        if claims:
            assert asserts(cell.source), f"shows {', '.join(claims)} but asserts nothing:\n{cell.source}"


@every_chapter
def test_first_cell_sets_up(name):
    cells = code_cells(name)
    if cells:
        assert "setup(" in cells[0].source
        assert {"hide-input", "remove-cell"} & set(cells[0].metadata.get("tags", []))


@every_full_chapter
def test_chapter_closes_as_all_do(name):
    lines = paths(name)[0].read_text(encoding="utf-8").splitlines()
    headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    found = [heading for heading in headings if any(heading.startswith(title) for title in CLOSING_SECTIONS)]
    titles = [next(title for title in CLOSING_SECTIONS if heading.startswith(title)) for heading in found]
    wanted = closing_sections(name)
    assert [title for title in titles if title in wanted] == wanted, f"sections at the end: {headings}"


def closing_sections(name: str) -> list[str]:
    """The sections that a chapter ends with. A page of the manual states no claim: nothing of it can be loose."""
    manual = name.startswith("tool/") and not claims.stated(name)
    return CLOSING_SECTIONS[1:] if manual else CLOSING_SECTIONS


def test_only_pages_of_the_manual_do_without_how_loose(monkeypatch):
    monkeypatch.setattr(claims, "stated", lambda name: [])
    assert "How loose" in closing_sections("looseness/new")
    assert closing_sections("tool/new") == ["What this does not show", "Exercises", "References"]
    monkeypatch.setattr(claims, "stated", lambda name: ["a claim"])
    assert "How loose" in closing_sections("tool/new")


def test_assertion_is_seen_where_it_runs_and_only_there():
    assert asserts("for x in y:\n    assert x")
    assert asserts("with z:\n    assert_equal(a, b)")
    assert asserts("testing.assert_equal(a, b)")
    assert not asserts("def check():\n    assert x")
    assert not asserts("print(a == b)")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("saved to /home/someone/x.txt", "a path"),
        ("<Line2D object at 0x7f0fc146f360>", "an address"),
        ("File ipykernel_1234/1.py", "a temporary name"),
        ("took 3.2 ms", "a timing"),
        (" 40%|####  ", "a progress bar"),
        ("largest difference 1.1e-16", "a raw residual"),
        ("tightness 0.1234567", "more than 6 digits"),
        ("norm 123.4567", "more than 6 digits"),
    ],
)
def test_unstable_output_is_refused(text, what):
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)])
    findings = notebooks.unstable_outputs(nbformat.v4.new_notebook(cells=[cell]))
    assert any(what in finding for finding in findings), findings


@pytest.mark.parametrize(
    "text", ["0.123456", "tensor([0.1000, 0.2000])", "12 of 49152", "1e-10", "p/(1 - p)", "1.5e-06"]
)
def test_plain_output_is_accepted(text):
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)])
    assert notebooks.unstable_outputs(nbformat.v4.new_notebook(cells=[cell])) == []


def test_stale_notebook_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "BOOK", tmp_path)
    header = (
        "---\n" + yaml.safe_dump({"kernelspec": {"name": "python3", "display_name": "Python 3"}}) + "---\n"
    )
    source = tmp_path / "one.md"
    source.write_text(f"{header}\n# One\n\n```{{code-cell}} ipython3\nx = 1\n```\n", encoding="utf-8")
    assert "has not been made" in notebooks.check("one")
    nbformat.write(notebooks.read_text(source), tmp_path / "one.ipynb")
    assert notebooks.check("one") is None
    source.write_text(source.read_text(encoding="utf-8").replace("x = 1", "x = 2"), encoding="utf-8")
    assert "cell 1 differs in its source" in notebooks.check("one")
