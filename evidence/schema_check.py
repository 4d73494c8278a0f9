"""Check JSON values against the schemas that are shipped with this package."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

_FOLDER = Path(__file__).with_name("schemas")
_MAX_ISSUES = 10


def schema_issues(value: Any, schema: str) -> list[str]:
    """List what in a value does not fit a shipped schema, at most 10 issues.

    Args:
        value: a JSON value.
        schema: name of a file in ``evidence/schemas`` without ``.schema.json``.
    """
    issues = []
    for error in _validator(schema).iter_errors(value):
        issues.append(f"{error.json_path}: {error.message[:200]}")
        if len(issues) == _MAX_ISSUES:
            break
    return issues


@functools.cache
def _validator(schema: str) -> Draft202012Validator:
    document = json.loads((_FOLDER / f"{schema}.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)
