"""Numbers of the literature, printed from one file and never typed.

The role ``{quoted}`key``` prints the value and the unit that ``book/quoted.yml`` gives for the key, with what
we know of it in a tooltip, and links to its row in the table that the directive ``{quoted-numbers}`` makes.
A key that is not there, or a number that nobody here has read at its source, is a warning (so an error of the
build), unless its entry says ``second_hand: true``: then the words "(second-hand)" follow the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.nodes import make_refnode

__all__ = ["CONFIDENCE", "Quoted", "read_quoted", "setup"]

logger = logging.getLogger(__name__)

CONFIDENCE = {
    "V": "read in the source",
    "A": "read in its abstract",
    "M": "general knowledge, not looked up",
    "D": "our own computation from what the source says",
    "S": "second-hand: read in another's notes on the source",
    "X": "second-hand: the source was looked for and not found",
}
UNREAD = {"S", "X"}
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Quoted:
    """One number of the literature: what it is, whose, and how well we know it."""

    value: str
    unit: str
    cite: str
    confidence: str
    note: str
    second_hand: bool = False

    @property
    def text(self) -> str:
        """The number as it is printed."""
        number = f"{self.value}{NO_BREAK_SPACE}{self.unit}" if self.unit else self.value
        return f"{number} (second-hand)" if self.second_hand else number

    @property
    def tooltip(self) -> str:
        """What a reader should know before repeating the number."""
        return f"{CONFIDENCE[self.confidence]}; {self.note}"

    @property
    def fault(self) -> str | None:
        """Why the number must not be printed, or None."""
        if self.confidence not in CONFIDENCE:
            return f"has confidence {self.confidence!r}, which is none of {', '.join(CONFIDENCE)}"
        if self.confidence in UNREAD and not self.second_hand:
            return f"has confidence {self.confidence} and does not say second_hand: true"
        return None


def read_quoted(path: Path) -> dict[str, Quoted]:
    """All entries of the file; an entry with a missing, an unknown or a badly typed field is a ValueError."""
    entries = {}
    for key, fields in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        # NOTE: an unquoted 47.40 would be read as the number 47.4 and lose a digit.
        if not isinstance(fields.get("value"), str):
            raise ValueError(f"{path.name}: put the value of {key} in quotes")
        try:
            entries[key] = Quoted(**fields)
        except TypeError as error:
            raise ValueError(f"{path.name}: {key}: {str(error).removeprefix('Quoted.__init__() ')}") from None
    return entries


class QuotedRole(SphinxRole):
    """``{quoted}`key```: the number, its unit, and how well it is known."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Make the nodes of one number."""
        self.env.note_dependency(str(quoted_path(self.env.app)))
        entry = self.env.app.quoted_numbers.get(self.text)  # type: ignore[attr-defined]
        fault = "is not in the file of quoted numbers" if entry is None else entry.fault
        if entry is None or fault:
            logger.warning("quoted number %r %s", self.text, fault, location=self.get_location())
            return [nodes.problematic(self.rawtext, self.text)], []
        # NOTE: a plain std:ref would keep only the text of its content, and lose the tooltip.
        xref = pending_xref("", refdomain="", reftype="quoted", reftarget=anchor(self.text))
        xref["refdoc"] = self.env.docname
        xref += nodes.abbreviation("", entry.text, explanation=entry.tooltip, classes=["quoted"])
        return [xref], []


class QuotedNumbers(SphinxDirective):
    """``{quoted-numbers}``: the table of all entries, each with an anchor that the role links to."""

    def run(self) -> list[nodes.Node]:
        """Make the table."""
        self.env.note_dependency(str(quoted_path(self.env.app)))
        table = nodes.table(classes=["quoted-numbers"])
        group = nodes.tgroup(cols=3)
        table += group
        group += [nodes.colspec(colwidth=width) for width in (20, 30, 50)]
        head = nodes.thead()
        head += self.row(
            [[nodes.Text(title)] for title in ("Number", "Source", "What it is, and how we know")]
        )
        body = nodes.tbody()
        for key, entry in self.env.app.quoted_numbers.items():  # type: ignore[attr-defined]
            body += self.entry_row(key, entry)
        group += [head, body]
        return [table]

    def entry_row(self, key: str, entry: Quoted) -> nodes.row:
        """The row of one number."""
        if entry.fault:
            logger.warning("quoted number %r %s", key, entry.fault, location=self.get_location())
        cited, _ = self.state.inline_text(f"{{cite:t}}`{entry.cite}`", self.lineno)
        known = CONFIDENCE.get(entry.confidence, "unknown")
        row = self.row([[nodes.Text(entry.text)], cited, [nodes.Text(f"{entry.note} — {known}")]])
        row["names"].append(anchor(key))
        self.state.document.note_explicit_target(row)
        return row

    @staticmethod
    def row(cells: list[list[nodes.Node]]) -> nodes.row:
        """A table row of inline contents."""
        row = nodes.row()
        for content in cells:
            entry = nodes.entry()
            entry += nodes.paragraph("", "", *content)
            row += entry
        return row


def anchor(key: str) -> str:
    """The label of a number's row."""
    return f"quoted-{key}"


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Node | None:
    """Link a number to its row in the table, if the book has the table."""
    if node["reftype"] != "quoted":
        return None
    found = env.domaindata["std"]["anonlabels"].get(node["reftarget"])
    if found is None:
        return content
    document, identifier = found
    return make_refnode(app.builder, node["refdoc"], document, identifier, content)


def quoted_path(app: Sphinx) -> Path:
    """The file of quoted numbers."""
    return Path(app.srcdir) / app.config.quoted_file


def load(app: Sphinx) -> None:
    """Read the file once a build."""
    app.quoted_numbers = read_quoted(quoted_path(app))  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role and the directive."""
    app.add_config_value("quoted_file", "book/quoted.yml", "env")
    app.add_role("quoted", QuotedRole())
    app.add_directive("quoted-numbers", QuotedNumbers)
    app.connect("builder-inited", load)
    app.connect("missing-reference", resolve)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
