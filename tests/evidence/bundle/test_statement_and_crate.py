"""The in-toto statement and the RO-Crate fit their schemas, and flawed ones do not."""

import copy
import json
from pathlib import Path

import pytest

from evidence.attestation import statement, statement_issues
from evidence.bundle import build_bundle
from evidence.rocrate import crate_issues


def _statement(**over):
    settings = {
        "run_id": "r1",
        "manifest_sha256": "a" * 64,
        "verdict": "supported",
        "criteria": [{"id": "primary", "status": "passed"}],
        "gates": {"correctness": "passed", "generation_audit": "not_applicable"},
        "configuration": {"spec.json": "b" * 64},
        **over,
    }
    return statement(**settings)


def test_statement_of_a_supported_run():
    """Each criterion and each gate that applies is a test; all passed."""
    assert _statement() == {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "r1/manifest.json", "digest": {"sha256": "a" * 64}}],
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": "PASSED",
            "configuration": [{"name": "spec.json", "digest": {"sha256": "b" * 64}}],
            "passedTests": ["criterion primary", "gate correctness"],
            "warnedTests": [],
            "failedTests": [],
            "gatedrl_verdict": "supported",
        },
    }
    assert statement_issues(_statement()) == []


@pytest.mark.parametrize(
    ("over", "result"),
    [
        ({}, "PASSED"),
        ({"verdict": "refuted", "criteria": [{"id": "p", "status": "failed"}]}, "FAILED"),
        ({"verdict": "inconclusive", "criteria": [{"id": "p", "status": "uncertain"}]}, "WARNED"),
        ({"verdict": "inconclusive", "criteria": []}, "WARNED"),
        ({"verdict": "inconclusive", "gates": {"activation": "failed"}}, "FAILED"),
        ({"verdict": "inconclusive", "gates": {"activation": "unverified"}}, "WARNED"),
        ({"verdict": "supported", "gates": {"activation": "failed"}}, "FAILED"),
    ],
)
def test_nothing_less_than_supported_reads_as_passed(over, result):
    made = _statement(**over)

    assert made["predicate"]["result"] == result
    assert statement_issues(made) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("_type",), "https://in-toto.io/Statement/v0.1"),
        (("predicateType",), "https://in-toto.io/attestation/other/v1"),
        (("subject",), []),
        (("subject", 0, "digest"), {}),
        (("subject", 0, "digest", "sha256"), "xyz"),
        (("predicate", "result"), "supported"),
        (("predicate", "configuration"), [{"name": "spec.json"}]),
        (("predicate", "failedTests"), ["gate x"]),
        (("predicate", "passedTests"), [1]),
        (("predicate",), {"result": "PASSED"}),
    ],
)
def test_flawed_statement_is_named(path, value):
    flawed = copy.deepcopy(_statement())
    place = flawed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value

    assert statement_issues(flawed) != []


@pytest.fixture(scope="module")
def crate(tmp_path_factory):
    return {}


@pytest.fixture
def sealed(make_finished_run, crate):
    """Metadata and file names of one sealed crate, built once."""
    if not crate:
        run = make_finished_run()
        folder = Path(run.path, build_bundle(run, environment={}).folder)
        crate["metadata"] = json.loads((folder / "ro-crate-metadata.json").read_text())
        crate["names"] = sorted(path.name for path in folder.iterdir())
    return copy.deepcopy(crate["metadata"]), crate["names"]


def _entity(metadata, wanted):
    return next(entity for entity in metadata["@graph"] if entity["@id"] == wanted)


def test_crate_of_a_sealed_bundle_fits_its_profile(sealed):
    metadata, names = sealed

    assert crate_issues(metadata, names) == []
    action = _entity(metadata, "#run-r1")
    assert action["actionStatus"] == "http://schema.org/CompletedActionStatus"
    assert {"@id": "spec.json"} in action["object"]
    assert {"@id": "scored-observations.jsonl"} in action["result"]
    assert action["startTime"] < action["endTime"]


@pytest.mark.parametrize(
    ("entity", "field", "value"),
    [
        ("./", "conformsTo", [{"@id": "https://w3id.org/ro/wfrun/process/0.5"}]),
        ("./", "datePublished", "yesterday"),
        ("./", "license", None),
        ("./", "mainEntity", {"@id": "spec.json"}),
        ("./", "hasPart", []),
        ("./", "mentions", [{"@id": "#nothing"}]),
        ("ro-crate-metadata.json", "about", {"@id": "elsewhere"}),
        ("script-flows.txt", "@type", ["File", "SoftwareSourceCode"]),
        ("script-flows.txt", "programmingLanguage", None),
        ("#run-r1", "instrument", None),
        ("#run-r1", "endTime", "2026-01-02 03:04:05"),
        ("#run-r1", "error", "but it succeeded"),
        ("spec.json", "sha256", "short"),
    ],
)
def test_flawed_crate_is_named(sealed, entity, field, value):
    metadata, names = sealed
    if value is None:
        del _entity(metadata, entity)[field]
    else:
        _entity(metadata, entity)[field] = value

    assert crate_issues(metadata, names) != []


def test_file_that_the_crate_does_not_describe_is_named(sealed):
    metadata, names = sealed

    assert crate_issues(metadata, [*names, "new file.txt"]) == [
        "hasPart: new file.txt is in the bundle but not in the crate"
    ]
