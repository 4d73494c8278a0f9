"""The tables' columns are frozen: a change here is a deliberate, reviewed edit."""

import json
from pathlib import Path

from evidence.tables import TABLES

GOLDEN = Path(__file__).with_name("schemas.json")


def _frozen():
    return {
        schema.name: {
            "version": schema.version,
            "kind": schema.kind,
            "partition": list(schema.partition),
            "key": list(schema.key),
            "columns": [
                f"{column.name} {column.type}"
                f"{' null' if column.nullable else ''}{' nonfinite' if column.nonfinite else ''}"
                for column in schema.columns
            ],
        }
        for schema in TABLES.values()
    }


def test_schemas_are_as_frozen():
    """Names, types, keys and versions equal the golden list beside this file."""
    assert json.loads(json.dumps(_frozen())) == json.loads(GOLDEN.read_text())


def test_every_column_is_documented():
    """A reader finds the meaning of every column in the schema itself."""
    bare = [
        f"{schema.name}.{column.name}"
        for schema in TABLES.values()
        for column in schema.columns
        if not column.doc.endswith((".", "...")) or len(column.doc) < 10
    ]

    assert bare == []


def test_content_tables_hold_no_attempt_or_time():
    """Content depends on what was computed, not on when, where or how often."""
    for schema in TABLES.values():
        if schema.kind == "content":
            assert not {"attempt", "seconds", "at", "service_id", "checkpoint"} & set(
                schema.column_names
            )
