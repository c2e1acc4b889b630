"""The built book: every link resolves, nothing is loaded from elsewhere, quoted numbers are cited where they stand."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

import api
import sphinx_quoted
from notebooks import BOOK, ROOT

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
LOADING_LINKS = {
    "stylesheet",
    "icon",
    "shortcut",
    "preload",
    "modulepreload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
}
CITATION = re.compile(r"\{cite[^}]*\}`([^`]+)`")
QUOTED = re.compile(r"\{quoted\}`([^`]+)`")
KEYS = sphinx_quoted.read_quoted(BOOK / "quoted.yml")


@cache
def parsed(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def pages(book: Path) -> list[Path]:
    return [page for page in sorted(book.rglob("*.html")) if "_static" not in page.parts]


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc) or address.startswith("//")


@cache
def anchors(page: Path) -> set[str]:
    tree = parsed(page)
    return {tag["id"] for tag in tree.find_all(id=True)} | {
        tag["name"] for tag in tree.find_all("a", attrs={"name": True})
    }


def test_internal_links_and_their_anchors_resolve(built_book):
    broken = []
    for page in pages(built_book):
        for tag in parsed(page).find_all(["a", "link"], href=True):
            address = urlsplit(tag["href"])
            if address.scheme or address.netloc or tag["href"] in {"", "#"}:
                continue
            target = (page.parent / unquote(address.path)).resolve() if address.path else page
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                broken.append(f"{page.relative_to(built_book)}: {tag['href']}")
            elif (
                address.fragment
                and target.suffix == ".html"
                and unquote(address.fragment) not in anchors(target)
            ):
                broken.append(f"{page.relative_to(built_book)}: {tag['href']} (no such anchor)")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(built_book):
    foreign = []
    for page in pages(built_book):
        for tag in parsed(page).find_all([*LOADED, "link"]):
            loading = tag.name != "link" or LOADING_LINKS & set(tag.get("rel", []))
            address = tag.get(LOADED.get(tag.name, "href"), "")
            if loading and is_elsewhere(address):
                foreign.append(f"{page.relative_to(built_book)}: {address}")
    styles = [built_book / "_static" / "custom.css", *built_book.glob("_static/*.css")]
    foreign += [
        f"{style.name}: {hit}"
        for style in styles
        for hit in re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", style.read_text(encoding="utf-8"))
    ]
    assert foreign == []


def test_loaded_files_exist(built_book):
    missing = []
    for page in pages(built_book):
        for tag in parsed(page).find_all(LOADED):
            address = urlsplit(tag.get(LOADED[tag.name], ""))
            if (
                address.path
                and not address.scheme
                and not address.netloc
                and not (page.parent / unquote(address.path)).is_file()
            ):
                missing.append(f"{page.relative_to(built_book)}: {address.path}")
    assert missing == []


def test_every_picture_has_alternative_text(built_book):
    bare = []
    for page in pages(built_book / "book"):
        article = parsed(page).find("article")
        for image in article.find_all("img") if article else []:
            if len(image.get("alt", "").split()) < 4 or image["alt"].startswith(".."):
                bare.append(f"{page.relative_to(built_book)}: {image.get('src')}")
    assert bare == []


def test_every_figure_has_a_caption(built_book):
    for page in pages(built_book):
        article = parsed(page).find("article")
        for figure in article.find_all("figure") if article else []:
            assert figure.find("figcaption"), f"{page.relative_to(built_book)}: {figure.get('id')}"


def test_pages_have_their_own_titles(built_book):
    titles = [parsed(page).title.text for page in pages(built_book / "book")]
    assert len(titles) == len(set(titles))
    assert all("Small Is Not Sparse" in title for title in titles)


def test_no_page_shows_a_machine(built_book):
    pattern = re.compile(r"/(?:home|root|tmp|work)/[\w.-]+|ipykernel_\d+|\bat 0x[0-9a-f]{6,}")
    for page in pages(built_book):
        assert not (hit := pattern.search(parsed(page).get_text())), (
            f"{page.relative_to(built_book)}: {hit[0]}"
        )


def test_the_page_of_the_library_lists_every_module():
    assert (BOOK / "api.md").read_text(encoding="utf-8") == api.page(), "run: make api"


def test_headings_of_docstrings_stand_on_their_own_lines():
    run_in = re.compile(r"^ *(?:Parameters|Returns|Shapes|Units|Raises|Notes|References) -{3,}", re.MULTILINE)
    sources = sorted((ROOT / "src").rglob("*.py"))
    assert [path.name for path in sources if run_in.search(path.read_text(encoding="utf-8"))] == []


def texts() -> list[Path]:
    return sorted(BOOK.rglob("*.md"))


@pytest.mark.parametrize("page", texts(), ids=lambda page: page.relative_to(BOOK).as_posix())
def test_a_quoted_number_is_cited_on_its_page(page):
    text = page.read_text(encoding="utf-8")
    cited = {key.strip() for keys in CITATION.findall(text) for key in keys.split(",")}
    for key in QUOTED.findall(text):
        assert key in KEYS, f"{key} is not in quoted.yml"
        assert KEYS[key].cite in cited, f"{key} is printed here, but {KEYS[key].cite} is not cited"


def test_quoted_numbers_may_be_printed():
    assert [f"{key} {entry.fault}" for key, entry in KEYS.items() if entry.fault] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value": 47.4}, "in quotes"),
        ({"value": "47.4", "colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"value": "47.4"}, "missing"),
    ],
)
def test_badly_written_entry_is_refused(tmp_path, fields, message):
    path = tmp_path / "quoted.yml"
    path.write_text(yaml.safe_dump({"one": fields}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        sphinx_quoted.read_quoted(path)


@pytest.mark.parametrize(
    ("confidence", "printed"), [("V", True), ("A", True), ("S", False), ("X", False), ("Q", False)]
)
def test_what_nobody_read_is_printed_only_as_second_hand(confidence, printed):
    entry = sphinx_quoted.Quoted("47.40", "%", "someone", confidence, "a note")
    assert (entry.fault is None) == printed
    if confidence in sphinx_quoted.UNREAD:
        entry = sphinx_quoted.Quoted("47.40", "%", "someone", confidence, "a note", second_hand=True)
        assert entry.fault is None
        assert entry.text.endswith("(second-hand)")


def test_a_quoted_number_shows_how_well_it_is_known(built_book):
    shown = [tag for page in pages(built_book) for tag in parsed(page).find_all("abbr", class_="quoted")]
    listed = [page for page in texts() if (built_book / page.relative_to(ROOT)).with_suffix(".html").exists()]
    used = [key for page in listed for key in QUOTED.findall(page.read_text(encoding="utf-8"))]
    assert len(shown) == len(used)
    for tag in shown:
        assert any(tag["title"].startswith(meaning) for meaning in sphinx_quoted.CONFIDENCE.values())
        assert tag.find_parent("a")["href"].partition("#")[2].startswith("quoted-")


def test_every_source_of_the_bibliography_is_used():
    used = {
        key.strip()
        for page in texts()
        for keys in CITATION.findall(page.read_text(encoding="utf-8"))
        for key in keys.split(",")
    }
    used |= {entry.cite for entry in KEYS.values()}
    entries = set(
        re.findall(r"^@\w+\{([^,]+),", (BOOK / "references.bib").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert entries - used == set()


def test_only_stated_files_may_stand_in_the_book():
    allowed = {".md", ".ipynb", ".bib", ".yml", ".css", ".svg", ".woff2", ".txt", ".png"}
    strays = [
        path.relative_to(ROOT) for path in BOOK.rglob("*") if path.is_file() and path.suffix not in allowed
    ]
    assert [path for path in strays if ".ipynb_checkpoints" not in path.parts] == []


def test_pieces_of_a_report_look_as_they_do_in_it():
    """The book's style knows every class of the charts and tables, and gives them the report's own colours."""
    report = (ROOT / "src" / "ceilings" / "report.css").read_text(encoding="utf-8")
    book = (BOOK / "_static" / "custom.css").read_text(encoding="utf-8")
    sources = "".join(
        (ROOT / "src" / "ceilings" / f"{name}.py").read_text("utf-8") for name in ("charts", "report_page")
    )
    used = {word for found in re.findall(r'class="([\w ]+)"', sources) for word in found.split()}
    styled = set(re.findall(r"\.report-part[^{,]*?\.([a-z]+)", book)) | set(
        re.findall(r"\.series\.(\w+)", book)
    )
    framed = {"tile", "tiles", "pair", "small", "tick"}  # the report's layout, and a class without a style
    assert used - styled - framed == set()
    colours = re.compile(r"--(series|null|cell): (#\w+)")
    light, dark = (set(colours.findall(part)) for part in report.split("prefers-color-scheme: dark")[:2])
    for theme, expected in (("light", light), ("dark", dark)):
        rule = re.search(rf'data-theme="{theme}"\] \.report-part {{([^}}]*)}}', book)
        assert rule and set(colours.findall(rule[1])) == expected
