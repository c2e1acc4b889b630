"""The pages of the reports are what the schemas say, and the schemas say something about every field."""

import re

import pytest

import report_fields
from ceilings.report import schema
from report_fields import PAGES, inner, kind, page, resolved

WHOLE = schema()
SCHEMAS = {"report.md": WHOLE, "diff_report.md": schema("diff")}
each_page = pytest.mark.parametrize("name", SCHEMAS)


def described(node, path=""):
    """Every field of a raw schema and of its definitions, not through the generator."""
    if isinstance(node, dict):
        for name, found in node.get("properties", {}).items():
            yield f"{path}.{name}", found
        for key, value in node.items():
            yield from described(value, f"{path}.{key}")


def required(node):
    """Names that a report must have, read off the raw schema and not through the generator."""
    if isinstance(node, dict):
        yield from node.get("required", [])
        for value in node.values():
            yield from required(value)
    elif isinstance(node, list):
        for value in node:
            yield from required(value)


def test_each_schema_has_its_page():
    assert {name: found for name, (_, found) in PAGES.items()} == SCHEMAS


@each_page
def test_page_is_what_the_schema_says(name):
    assert (report_fields.FOLDER / name).read_text(encoding="utf-8") == page(name), "run: make report"


@each_page
def test_every_field_is_described(name):
    whole = SCHEMAS[name]
    bare = [
        path
        for path, node in described(whole)
        if not resolved(node, whole).get("description", "").endswith(".")
    ]
    assert bare == []


@each_page
def test_no_report_may_hold_a_field_that_is_not_described(name):
    whole = SCHEMAS[name]

    def lax(node, path=""):
        if isinstance(node, list):
            node = dict(enumerate(node))
        if not isinstance(node, dict):
            return
        whole_node = resolved(node, whole) | node if "$ref" in node else node
        closed = any(
            whole_node.get(key) is False for key in ("additionalProperties", "unevaluatedProperties")
        )
        if ("properties" in node or "$ref" in node and "properties" in resolved(node, whole)) and not closed:
            yield path
        for key, value in node.items():
            # What a field is put together from is closed where it is put together.
            yield from () if key in ("$defs", "allOf") else lax(value, f"{path}/{key}")

    assert whole["additionalProperties"] is False and list(lax(whole)) == []


@each_page
def test_every_required_field_is_on_the_page(name):
    text = page(name)
    assert [
        field
        for field in sorted(set(required(SCHEMAS[name])))
        if f"`{field}` — " not in text
        and f"## `{field}`" not in text
        and not field.isdigit()
        and "." not in field
    ] == []


def test_every_link_to_a_section_leads_to_one():
    text = page("diff_report.md")
    linked = set(re.findall(r"\]\(#([a-z-]+)\)", text))
    assert len(linked) > 10
    assert linked == set(re.findall(r"^\(([a-z-]+)\)=$", text, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "number"}, "number"),
        ({"type": ["integer", "null"]}, "integer or null"),
        ({"enum": ["groups", None]}, "`groups` or null"),
        ({"const": 2}, "always `2`"),
        ({"type": "array", "items": {"type": "string"}}, "list of texts"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "number, by name"),
        (
            {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]},
            "list of integers or null",
        ),
        (
            {"type": "object", "title": "a cut", "additionalProperties": False},
            "object: [a cut](#field-a-cut)",
        ),
        ({"$ref": "#/$defs/share"}, "number from 0 to 1"),
        ({"type": "array", "items": {"$ref": "#/$defs/share"}}, "list of numbers from 0 to 1"),
    ],
)
def test_kind_of_a_field_in_words(node, words):
    assert kind(node, WHOLE) == words


def test_fields_of_definitions_are_found_where_they_are_used():
    names = [name for name, _ in inner(WHOLE["properties"]["tightness"], WHOLE)]
    assert {"mean", "standard_error", "quantiles", "histogram", "estimate"} <= set(names)
    assert {"mean", "quantiles"} & {
        name for name, _ in inner(WHOLE["properties"]["versions"], WHOLE)
    } == set()


def test_options_of_the_command_are_set_as_code():
    assert "`--next-token`" in page("report.md") and "`--no-rank`" in page("diff_report.md")


def test_command_tells_which_page_is_stale(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report_fields, "FOLDER", tmp_path)
    (tmp_path / "report.md").write_text("an older page", encoding="utf-8")
    (tmp_path / "diff_report.md").write_text(page("diff_report.md"), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["report_fields.py", "check"])
    assert report_fields.main() == 1
    assert capsys.readouterr().out.startswith("report.md: not what the schema says; run: make report")
