"""The pages of ``report.json`` and of the numbers of ``ceilings diff``: every field, from the schemas.

    python tools/report_fields.py build    write book/tool/report.md and book/tool/diff_report.md
    python tools/report_fields.py check    are they what the schemas say?

Nothing is written here by hand but the introductions; a field is explained where it is defined, in the schema that the
tests hold reports to.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ceilings.report import schema

__all__ = ["FOLDER", "PAGES", "fields", "page"]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "book" / "tool"

REPORT = """# The report, field by field

`ceilings measure … --out DIR` writes all its numbers to `DIR/report.json`. [The manual](measure.ipynb) says how to
read them; this page is the reference, made from the schema that the library carries: `ceilings.report.schema()`. It
describes version {version} of the layout. A field that changes its meaning or goes away makes a new
version; one that is added does not.

Beside it lie `gradient.safetensors`, `fisher.safetensors` and `tightness.safetensors`, each with a tensor for every
parameter under the model's own name. They are of the first reward. The metadata of each holds, as JSON under
`ceilings`, what it is, of which reward, at which level and from how many responses.

Three words recur. *In-sample* numbers use each response twice, to suggest and to confirm; they are no evidence.
*Cross-fitted* ones try on one half of the responses what the other half suggests. *Permuted* rewards are the same
numbers dealt out anew. R is the reward, $\\sigma(R)$ its standard deviation, F the diagonal Fisher information;
units and shapes are those of [the notation](../notation.md).
"""
DIFF = """# The numbers of `ceilings diff`, field by field

`ceilings diff BASE TUNED --json FILE` writes all its numbers to one file. [The manual](diff.ipynb) says how to read
them; this page is the reference, made from the schema that the library carries: `ceilings.report.schema("diff")`. It
describes version {version} of the layout. A field that changes its meaning or goes away makes a new
version; one that is added does not.

The change is $\\tau = \\theta' - \\theta$, from the base to the fine-tune as they are stored, both rounded to one
number format. It spans the whole training and not a step of it. The *squared change* is $\\|\\tau\\|^2$.
"""
#: Introduction and schema of each page, by the name of its file.
PAGES = {"report.md": (REPORT, schema("report")), "diff_report.md": (DIFF, schema("diff"))}
TYPES = {
    "number": "number",
    "integer": "integer",
    "string": "text",
    "boolean": "true or false",
    "object": "object",
    "null": "null",
}


def fields(node: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields of an object and their schemas, those of the definitions that it refers to first."""
    for part in node.get("allOf", []):
        yield from fields(resolved(part, whole), whole)
    yield from node.get("properties", {}).items()


def resolved(node: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with the definition that it refers to filled in; what it says itself has precedence."""
    name = node.get("$ref", "").rpartition("/")[2]
    return {**whole["$defs"][name], **node} if name else node


def kind(node: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """What a field holds, in words."""
    node = resolved(node, whole)
    if "const" in node:
        return f"always `{node['const']}`"
    if "enum" in node:
        return " or ".join("null" if value is None else f"`{value}`" for value in node["enum"])
    if "anyOf" in node:
        found = [kind(part, whole) for part in node["anyOf"]]
        return " or ".join(sorted(found, key=lambda text: text == "null"))
    if "title" in node:
        return f"object: [{node['title']}](#{anchor(node['title'])})"
    if "allOf" in node:
        return "object"
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    if types == ["array"]:
        return plural(kind(node["items"], whole))
    if types == ["number"] and node.get("maximum") == 1:
        return "number from 0 to 1"
    if types == ["object"] and isinstance(node.get("additionalProperties"), dict):
        return f"{kind(node['additionalProperties'], whole)}, by name"
    return " or ".join(TYPES[name] for name in types)


def anchor(title: str) -> str:
    """Label of the section of that title."""
    return "field-" + title.replace(" ", "-")


def plural(one: str) -> str:
    """A list of something, in words."""
    return "list of " + re.sub(r"^(number|integer|text|object)", r"\1s", one)


def meaning(node: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """What a field means; options of the command are set as code, or their dashes would become one."""
    return re.sub(r"--[a-z-]+", r"`\g<0>`", resolved(node, whole)["description"])


def entry(name: str, node: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """One field: its name and kind, and below them what it means."""
    return f"`{name}` — {kind(node, whole)}\n: {meaning(node, whole)}\n"


def inner(node: Mapping[str, Any], whole: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The fields within a field: those of the object that it holds, or of the objects in its list."""
    node = resolved(node, whole)
    return list(fields(resolved(node.get("items", node), whole), whole))


def page(name: str) -> str:
    """The text of a page."""
    head, whole = PAGES[name]
    parts = [head.format(version=whole["properties"]["version"]["const"])]
    titled = {key: node for key, node in whole["$defs"].items() if "title" in node}

    def alone(node: Mapping[str, Any]) -> bool:
        """Whether all that a field holds is said in its own entry, or in a section that the entry leads to."""
        shown = resolved(node, whole)
        return (
            not inner(node, whole) or "title" in shown or "title" in resolved(shown.get("items", {}), whole)
        )

    plain = [(field, node) for field, node in fields(whole, whole) if alone(node)]
    parts.append("## Single fields\n")
    parts += [entry(field, node, whole) for field, node in plain]
    for field, node in fields(whole, whole):
        if not alone(node):
            parts.append(f"## `{field}`\n\n{kind(node, whole).capitalize()}. {meaning(node, whole)}\n")
            parts += [entry(within, found, whole) for within, found in inner(node, whole)]
    for node in titled.values():
        parts.append(
            f"({anchor(node['title'])})=\n## {node['title'].capitalize()}\n\n{meaning(node, whole)}\n"
        )
        parts += [entry(within, found, whole) for within, found in inner(node, whole)]
    return "\n".join(parts)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the pages of the reports.")
    parser.add_argument("command", choices=["build", "check"])
    command, stale = parser.parse_args().command, []
    for name in PAGES:
        if command == "build":
            (FOLDER / name).write_text(page(name), encoding="utf-8")
            print(f"{name} written")
        elif (FOLDER / name).read_text(encoding="utf-8") != page(name):
            stale.append(name)
    if stale:
        print(f"{', '.join(stale)}: not what the schema says; run: make report")
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
