"""The journal's tables, written from the ledger when an attempt ends.

The ledger holds every timing, every load of a training state and every name that the service gave
as it happened; the tables are the same facts in a form that is easy to query. They are written
once, so a second closing of the same attempt changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from evidence.canonical import canonical_bytes
from evidence.run import Run

Row = dict[str, Any]


def write_journal(run: Run, *, attempt: int | None = None) -> None:
    """Write `timings` and `service_ids` of an attempt, the current one unless another is named.

    Also `restores` of every attempt, where a process ended before it had written them.
    """
    write_restores(run)
    attempt = run.attempt if attempt is None else attempt
    timings: dict[tuple[str, str, int], dict[str, Row]] = defaultdict(dict)
    for event in run.events("timing"):
        if event["attempt"] == attempt:
            rows = timings[event["arm"], event["phase"], event["step"]]
            rows[event["what"]] = _added(rows.get(event["what"]), event)
    for place, rows in timings.items():
        _write_once(run, "timings", (attempt, *place), list(rows.values()))
    names: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for arm, what, name, service_id in _service_ids(run):
        names[arm, what][name] = {"name": name, "service_id": service_id}
    for key, found in names.items():
        _write_once(run, "service_ids", (attempt, *key), list(found.values()))


def write_restores(run: Run) -> None:
    """Write the row of every load in the ledger that has none, with the attempt that it was in."""
    attempt = 1
    for event in run.events():
        if event["event"] == "attempt_closed":
            attempt += 1
        elif event["event"] == "client_opened":
            key = (event["arm"], event["phase"], event["restore"])
            _write_once(run, "restores", key, [_restore_row(event, attempt)])


def _restore_row(event: Row, attempt: int) -> Row:
    optimizer = (event["observed"] or {}).get("optimizer")
    return {
        "attempt": attempt,
        "policy_version": event["policy_version"],
        "checkpoint": event["requested_uri"],
        "with_optimizer": True,
        "replayed_updates": event["replayed_updates"],
        "optimizer_check": None if optimizer is None else canonical_bytes(optimizer).decode(),
        "info_json": canonical_bytes(event["info"]).decode(),
    }


def _added(row: Row | None, event: Row) -> Row:
    """A step that was interrupted and finished later was timed in two parts."""
    parts = {name: event[name] for name in ("what", "seconds", "units", "samples")}
    if row is None:
        return parts
    return {
        "what": row["what"],
        "seconds": row["seconds"] + parts["seconds"],
        "units": row["units"] + parts["units"],
        "samples": row["samples"] + parts["samples"],
    }


def _write_once(run: Run, table: str, key: tuple[Any, ...], rows: list[Row]) -> None:
    if not run.has_table(table, key=key):
        run.write_table(table, rows, key=key)


def _service_ids(run: Run) -> Iterator[tuple[str, str, str, str]]:
    for event in run.events():
        if event["event"] == "initialization":
            yield "all", "checkpoint", "initialization", event["uri"]
        elif event["event"] == "client_opened":
            name = f"{event['phase']}-{event['restore']:03d}"
            yield event["arm"], "training_client", name, event["info"]["model_id"]
        elif event["event"] == "checkpoint":
            name = f"{event['phase']}-{event['policy_version']:06d}"
            yield event["arm"], "checkpoint", name, event["uri"]
        elif event["event"] == "published":
            yield event["arm"], "sampler", f"{event['policy_version']:06d}", event["uri"]
