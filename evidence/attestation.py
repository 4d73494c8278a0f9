"""The verdict as an in-toto statement with the test-result predicate.

The subject is the bundle's manifest, by hash, and through it every file of the bundle. The
configuration is the spec and the execution file. Each criterion of the decision rule and each gate
is one test. ``supported`` is PASSED, ``refuted`` is FAILED, and ``inconclusive`` is WARNED, unless
a test failed, which makes it FAILED too: nothing less than ``supported`` ever reads as passed.

Sources: in-toto/attestation, spec/v1/statement.md and spec/predicates/test-result.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from evidence.manifest import MANIFEST
from evidence.schema_check import schema_issues
from evidence.values import as_list, as_mapping

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
_PASSED = frozenset({"passed"})
_FAILED = frozenset({"failed"})
_SKIPPED = frozenset({"not_applicable"})


def statement(
    *,
    run_id: str,
    manifest_sha256: str,
    verdict: str,
    criteria: Iterable[Mapping[str, Any]],
    gates: Mapping[str, str],
    configuration: Mapping[str, str],
) -> dict[str, Any]:
    """Return the statement about a run's verdict.

    Args:
        run_id: name of the run.
        manifest_sha256: hash of the bundle's manifest.
        verdict: ``supported``, ``refuted`` or ``inconclusive``.
        criteria: the recomputed criteria: ``id`` and ``status`` of each.
        gates: status by name of gate; gates that do not apply are no tests.
        configuration: SHA-256 by name of the files that configured the run.
    """
    tests = {f"criterion {one.get('id')}": str(one.get("status")) for one in criteria}
    tests |= {f"gate {name}": status for name, status in gates.items() if status not in _SKIPPED}
    passed = sorted(name for name, status in tests.items() if status in _PASSED)
    failed = sorted(name for name, status in tests.items() if status in _FAILED)
    warned = sorted(name for name in tests if name not in {*passed, *failed})
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": f"{run_id}/{MANIFEST}", "digest": {"sha256": manifest_sha256}},
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": _result(verdict, has_failed=bool(failed)),
            "configuration": [
                {"name": name, "digest": {"sha256": sha256}}
                for name, sha256 in sorted(configuration.items())
            ],
            "passedTests": passed,
            "warnedTests": warned,
            "failedTests": failed,
            "gatedrl_verdict": verdict,
        },
    }


def statement_issues(value: Any) -> list[str]:
    """List what in a statement does not fit the specifications."""
    return schema_issues(value, "in-toto-test-result")


def subject_digests(value: Any) -> list[str]:
    """Return the SHA-256 of every subject of a statement."""
    subjects = [as_mapping(subject) for subject in as_list(as_mapping(value).get("subject"))]
    return [str(as_mapping(subject.get("digest")).get("sha256")) for subject in subjects]


def _result(verdict: str, *, has_failed: bool) -> str:
    if verdict == "supported" and not has_failed:
        return "PASSED"
    return "FAILED" if has_failed or verdict == "refuted" else "WARNED"
