"""``gated-rl audit``: judge any record of a run by the contract's rules."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.exit_codes import ExitCode
from evidence.audit import audit as audit_record
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from flows.inputs import read_bytes, read_folder, read_json


def audit(args: argparse.Namespace) -> int:
    """Print every validation of a record; done is exit status 0 whatever they say."""
    spec = read_json(Path(args.spec), field="SPEC")
    record = read_json(Path(args.record), field="RECORD")
    for name, document in (("SPEC", spec), ("RECORD", record)):
        if not isinstance(document, Mapping):
            raise InputError(name, document, "a JSON object")
    answers = audit_record(
        spec,
        record,
        files=read_folder(Path(args.files), field="--files") if args.files else None,
        roles=_roles(args.execution),
    )
    if args.json:
        print(json.dumps(answers, indent=2, ensure_ascii=True, allow_nan=False))
    else:
        for field, answer in answers.items():
            print(_line(field, answer))
    return ExitCode.OK


def _roles(path: str | None) -> Mapping[str, str] | None:
    if path is None:
        return None
    data = read_bytes(Path(path), field="--execution")
    return ExecutionFile.parse(data, where=path).roles


def _line(field: str, answer: Any) -> str:
    if not isinstance(answer, Mapping):
        return f"{field:<32} {answer}"
    status = str(answer.get("status", "-"))
    return f"{field:<32} {status:<16} {_why(answer)}".rstrip()


def _why(answer: Mapping[str, Any]) -> str:
    keys = ("reason", "issues", "problems", "reasons", "findings")
    found = next((answer[key] for key in keys if answer.get(key)), ())
    why = [found] if isinstance(found, str) else [*map(str, found)]
    return "; ".join([*why, *answer.get("notes", ())])
