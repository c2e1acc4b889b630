"""Every page in a real browser, wide and narrow, light and dark: no error, no outside request, no sideways scroll."""

import os
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from ceilings import cli
from notebooks import ROOT, chapters
from toys import save_toy, some_rollouts, write_jsonl

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync""".split()
WIDTHS = {"wide": 1280, "narrow": 390}
LEAST_TEXT = 10  # px, in a drawing on a phone
SCHEMES = ["light", "dark"]

# axe rules whose violations inside the article come from the theme or from docutils, with the reason.
THEME_NOISE = {
    "label-content-name-mismatch": "icon buttons of the theme",
    "region": "an article alone has no landmarks",
    "landmark-one-main": "an article alone has no landmarks",
}

# Parts of the article that are made by others: docutils' references, autodoc's signatures.
NOT_OURS = ["div.citation-list", "dt.sig"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site(built_book):
    """The address of a server for the built book."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built_book)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; without one the tests say what to install."""
    found = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None
    )
    if not found:
        pytest.skip(
            "no browser: install the package chromium (apt-get install chromium), or set CHROMIUM to its path"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


def page_names() -> list[str]:
    """The pages of the table of contents, and those that Sphinx adds."""

    def files(node):
        return [node[key] for key in ("root", "file") if key in node] + [
            name
            for branch in ("parts", "chapters", "sections")
            for child in node.get(branch, [])
            for name in files(child)
        ]

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return [Path(name).with_suffix(".html").as_posix() for name in files(toc)] + [
        "search.html",
        "genindex.html",
    ]


def first_chapter() -> str:
    """A page with code and mathematics."""
    return next(name for name in chapters() if "/" in name)


class Visit:
    """One page, opened, with everything it complained about and asked for."""

    def __init__(self, browser, site, name, width=1280):
        self.context = browser.new_context(viewport={"width": width, "height": 900})
        self.page = self.context.new_page()
        self.errors, self.foreign = [], []
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("requestfailed", lambda request: self.errors.append(f"not loaded: {request.url}"))
        self.page.on("request", lambda request: self.note(request.url, site))
        self.page.goto(f"{site}/{name}", wait_until="load")
        self.page.evaluate(
            "() => window.MathJax && MathJax.startup ? MathJax.startup.promise.then(() => 0) : 0"
        )
        self.page.evaluate("() => document.fonts.ready.then(() => 0)")  # widths change when fonts arrive

    def note(self, url, site):
        if not url.startswith((site, "data:", "blob:")):
            self.foreign.append(url)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.context.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", page_names())
def test_page(browser, site, name, width):
    with Visit(browser, site, name, WIDTHS[width]) as visit:
        broken = visit.page.eval_on_selector_all(
            "mjx-merror",
            "nodes => nodes.map(node => (node.getAttribute('data-mjx-error') || '') + ': ' + node.textContent)",
        )
        assert broken == []
        raw = visit.page.eval_on_selector_all(
            "article .math", "nodes => nodes.filter(n => !n.querySelector('mjx-container')).length"
        )
        assert raw == 0, "mathematics that was not set"
        for scheme in SCHEMES:
            in_scheme(visit.page, scheme)
            excess = visit.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert excess <= 0, f"the page is {excess} px too wide: {widest(visit.page)}"
            for _ in range(20):  # the page may still be settling into its fonts
                if not cut_formulas(visit.page):
                    break
                visit.page.wait_for_timeout(250)
            assert cut_formulas(visit.page) == []
            if width == "narrow":
                assert unreadable(visit.page) == []
        assert visit.errors == []
        assert visit.foreign == []
        if width == "wide":
            # Most elements of a page are MathJax's, which are not judged: axe need not walk through them.
            visit.page.evaluate("document.querySelectorAll('mjx-container').forEach(node => node.remove())")
            for scheme in SCHEMES:
                in_scheme(visit.page, scheme)
                assert violations(visit.page, scheme) == []


def in_scheme(page, scheme):
    """Light or dark, as the reader's system asks for it: the page follows without being loaded again."""
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)


def unreadable(page):
    """Words in drawings that are too small to read, or that reach out of the drawing and are cut."""
    return page.evaluate(
        """least => [...document.querySelectorAll('svg[role=img] text')].flatMap(text => {
            const to = text.getScreenCTM(), said = text.textContent, problems = [];
            if (!to) return [];  // folded away
            const size = parseFloat(getComputedStyle(text).fontSize) * Math.hypot(to.a, to.b);
            if (size < least) problems.push(said + ': ' + size.toFixed(1) + ' px');
            const a = text.getBoundingClientRect(), b = text.ownerSVGElement.getBoundingClientRect();
            const excess = Math.max(b.left - a.left, a.right - b.right, b.top - a.top, a.bottom - b.bottom);
            if (excess > 1) problems.push(said + ': ' + excess.toFixed(1) + ' px outside');
            return problems;
        })""",
        LEAST_TEXT,
    )


@pytest.mark.parametrize("what", ["sample", "word"])
def test_a_report_can_be_read_on_a_phone(browser, tmp_path, monkeypatch, what):
    """`report.html` has a style of its own; the real models have more layers than the toy, and as many matrices."""
    monkeypatch.chdir(tmp_path)
    save_toy(tmp_path / "toy", num_hidden_layers=14)
    write_jsonl(tmp_path / "rollouts.jsonl", some_rollouts(24))
    on = {
        "sample": ["--rollouts", "rollouts.jsonl"],
        "word": ["--next-token", "w2", "--options", "w5"],
    }
    assert cli.main(["measure", "toy", *on[what], "--out", "run"]) == 0
    with Visit(browser, (tmp_path / "run").as_uri(), "report.html", width=WIDTHS["narrow"]) as visit:
        assert visit.errors == [] and visit.foreign == []
        assert visit.page.locator("svg[role=img] text").count() > 50
        assert unreadable(visit.page) == []
        excess = visit.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert excess <= 0, widest(visit.page)


def cut_formulas(page):
    """Formulas that are wider than their column: within a line they would lose their end, alone they would hide it."""
    return page.evaluate(
        """() => [...document.querySelectorAll('article mjx-container')].flatMap(formula => {
            let block = formula.parentElement;
            while (getComputedStyle(block).display.startsWith('inline')) block = block.parentElement;
            const shown = formula.hasAttribute('display') ? formula.querySelector('mjx-math') : formula;
            const excess = shown.getBoundingClientRect().right - block.getBoundingClientRect().right;
            return excess > 1 ? [block.innerText.slice(0, 60) + ': ' + Math.round(excess) + ' px'] : [];
        })"""
    )


def widest(page):
    """What sticks out on the right."""
    return page.evaluate(
        """() => [...document.querySelectorAll('article *')]
            .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
            .slice(0, 3).map(e => e.tagName + '.' + e.className)"""
    )


def violations(page, scheme):
    """What axe finds in our own content; in the dark only the colours are different."""
    from axe_playwright_python.sync_playwright import Axe

    if page.locator("article").count() == 0:
        return []
    options = {"resultTypes": ["violations"], "rules": {rule: {"enabled": False} for rule in THEME_NOISE}}
    if scheme == "dark":
        options = {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}
    context = {"include": [["article"]], "exclude": [[selector] for selector in NOT_OURS]}
    found = Axe().run(page, context=context, options=options)
    return [
        f"{violation['id']}: {node['html'][:120]}"
        for violation in found.response["violations"]
        for node in violation["nodes"][:3]
    ]


def test_words_in_the_charts_of_a_report_can_be_read_on_a_phone(browser, tmp_path, capsys):
    import torch
    from safetensors.torch import save_file

    from ceilings.cli import main

    draw = torch.Generator().manual_seed(0)
    names = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
        "post_attention_layernorm",
    ]
    base = {
        f"model.layers.{k}.{n}.weight": torch.randn(96, 96, generator=draw) for k in range(14) for n in names
    }
    tuned = {name: weight + 1e-3 * torch.randn(96, 96, generator=draw) for name, weight in base.items()}
    for word, weights in (("base", base), ("tuned", tuned)):
        save_file({n: w.bfloat16() for n, w in weights.items()}, tmp_path / f"{word}.safetensors")
    paths = [str(tmp_path / f"{word}.safetensors") for word in ("base", "tuned")]
    assert main(["diff", *paths, "--no-rank", "--html", str(tmp_path / "page.html")]) == 0
    context = browser.new_context(viewport={"width": WIDTHS["narrow"], "height": 900})
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    charts = page.evaluate(
        """() => [...document.querySelectorAll('svg')].map(chart => {
            const words = [...chart.querySelectorAll('text')].filter(w => !w.hasAttribute('transform'));
            const scale = chart.getBoundingClientRect().width / chart.viewBox.baseVal.width;
            const boxes = words.map(w => w.getBoundingClientRect());
            const hit = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
                && a.top < b.bottom - 4 && b.top < a.bottom - 4;
            const clashes = words.flatMap((w, i) => words.slice(i + 1).filter((_, j) => hit(boxes[i], boxes[i + 1 + j]))
                .map(other => w.textContent + ' on ' + other.textContent));
            const card = chart.closest('section').getBoundingClientRect();
            const outside = boxes.filter(b => b.left < card.left || b.right > card.right).length;
            return {size: scale * parseFloat(getComputedStyle(words[0]).fontSize), clashes, outside};
        })"""
    )
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    context.close()
    assert len(charts) == 3 and wide <= 0
    for chart in charts:
        assert chart["size"] > 9.5
        assert (chart["clashes"], chart["outside"]) == ([], 0)


def test_search_finds_a_theorem(browser, site):
    with Visit(browser, site, "search.html?q=covariance") as visit:
        visit.page.wait_for_selector("#search-results ul.search li a", timeout=15000)
        links = visit.page.eval_on_selector_all(
            "#search-results li a", "nodes => nodes.map(node => node.href)"
        )
        assert any("gradient_is_a_covariance" in link for link in links), links
        assert visit.errors == []
        assert visit.foreign == []


def test_a_wrong_macro_is_seen(browser, site):
    """The page that test_page inspects for mjx-merror would show one: an unknown macro is not printed in red text."""
    with Visit(browser, site, f"book/{first_chapter()}.html") as visit:
        visit.page.wait_for_function("() => Boolean(window.MathJax && MathJax.tex2chtml)")
        html = visit.page.evaluate("MathJax.tex2chtml('\\\\nosuchmacro').outerHTML")
        assert "merror" in html


def test_code_opens_and_closes(browser, site):
    with Visit(browser, site, f"book/{first_chapter()}.html") as visit:
        details = visit.page.locator("div.tag_hide-input details").first
        assert details.get_attribute("open") is None
        details.locator("summary").click()
        assert details.locator("div.highlight").is_visible()
