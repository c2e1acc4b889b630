"""The page of ``report.json`` is what the schema says, and the schema says something about every field."""

import pytest

import report_fields
from ceilings.report import schema
from report_fields import fields, inner, kind, page, resolved

WHOLE = schema()


def every_field(node=WHOLE, path=""):
    for name, found in fields(node, WHOLE):
        yield f"{path}{name}", found
        yield from every_field({"properties": dict(inner(found, WHOLE))}, f"{path}{name}.")


def required(node):
    """Names that a report must have, read off the raw schema and not through the generator."""
    if isinstance(node, dict):
        yield from node.get("required", [])
        for value in node.values():
            yield from required(value)
    elif isinstance(node, list):
        for value in node:
            yield from required(value)


def test_page_is_what_the_schema_says():
    assert report_fields.TARGET.read_text(encoding="utf-8") == page(), "run: make report"


def test_every_field_is_described():
    bare = [
        path for path, node in every_field() if not resolved(node, WHOLE).get("description", "").endswith(".")
    ]
    assert bare == []


def test_no_report_may_hold_a_field_that_is_not_described():
    def lax(node, path=""):
        if isinstance(node, list):
            node = dict(enumerate(node))
        if not isinstance(node, dict):
            return
        closed = {"additionalProperties", "unevaluatedProperties"} & {
            k for k, v in node.items() if v is False
        }
        if ("properties" in node or "$ref" in node and "properties" in resolved(node, WHOLE)) and not closed:
            yield path
        for key, value in node.items():
            # What a field is put together from is closed where it is put together.
            yield from () if key in ("$defs", "allOf") else lax(value, f"{path}/{key}")

    assert WHOLE["additionalProperties"] is False and list(lax(WHOLE)) == []


def test_every_required_field_is_on_the_page():
    text = page()
    assert [
        name
        for name in sorted(set(required(WHOLE)))
        if f"`{name}` — " not in text and f"## `{name}`" not in text
    ] == []


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
    assert "`--next-token`" in page()


def test_command_tells_when_the_page_is_stale(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report_fields, "TARGET", tmp_path / "report.md")
    (tmp_path / "report.md").write_text("an older page", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["report_fields.py", "check"])
    assert report_fields.main() == 1
    assert "make report" in capsys.readouterr().out
