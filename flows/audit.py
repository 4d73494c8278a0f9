"""The audit as a flow: judge a record that lies on disk, and keep the answer as an artifact."""

from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import acreate_table_artifact
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from evidence.audit import audit as audit_record
from evidence.execution import ExecutionFile
from flows.inputs import read_bytes, read_folder, read_json


@task(name="judge record", cache_policy=NO_CACHE, persist_result=False)
def judge_record(
    spec: str, record: str, files: str | None = None, execution: str | None = None
) -> dict[str, Any]:
    """Answer every validation of a record.

    Reads the files it is given, calls no service, writes nothing; safe to repeat.

    Args:
        spec: path of a spec, or of a triage document that holds one.
        record: path of the record.
        files: folder of the run's evidence files.
        execution: path of the execution file, which says what role each arm has.

    Returns:
        Field name to answer.

    Raises:
        InputError: if a file cannot be read as what it should be.
    """
    roles = None
    if execution is not None:
        data = read_bytes(Path(execution), field="execution")
        roles = ExecutionFile.parse(data, where=execution).roles
    return audit_record(
        read_json(Path(spec), field="spec"),
        read_json(Path(record), field="record"),
        files=None if files is None else read_folder(Path(files), field="files"),
        roles=roles,
    )


@flow(name="audit", log_prints=False, retries=0)
async def audit(
    spec: str = Field(description="Path of a spec, or of a triage document that holds one"),
    record: str = Field(description="Path of the record of a run, from this program or another"),
    files: str | None = Field(default=None, description="Folder of the run's evidence files"),
    execution: str | None = Field(default=None, description="Path of the execution file"),
) -> dict[str, Any]:
    """Judge a record by the contract's rules and show the answers as a table.

    Args:
        spec: Path of a spec, or of a triage document that holds one.
        record: Path of the record of a run, from this program or from another.
        files: Folder of the run's evidence files.
        execution: Path of the execution file, which says what role each arm has.
    """
    answers = judge_record(spec, record, files, execution)
    rows = [
        {"field": field, "status": str(answer.get("status", "-"))}
        for field, answer in answers.items()
        if isinstance(answer, dict)
    ]
    await acreate_table_artifact(key="audit", table=rows, description=f"Audit of {record}")
    return answers
