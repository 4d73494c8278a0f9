import copy
import json

import pytest

from evidence.restoration import validate

CONFIG = {"learning_rate": 2e-05, "beta1": 0.9, "eps": 1e-08}
FEATURES = {"paired_training_arms": True, "checkpoint_restore": False}
H, H2, BATCH, OUT = "a" * 64, "b" * 64, "c" * 64, "d" * 64
URI = "tinker://t/weights/init"


def spec(*arms, features=FEATURES, fixed=True):
    planned = [{"name": arm, "optimizer": "trimuon", "optimizer_config": CONFIG} for arm in arms]
    return {
        "experiment_features": features,
        "restoration_preflight": {
            "applicable": True,
            "fixed_batch_required": fixed,
            "groups": [{"arms": planned}],
        },
    }


def check(after=0):
    return {
        "after_restore": after,
        "before_next_update": True,
        "requested": "trimuon",
        "actual": "trimuon",
        "actual_config": dict(CONFIG),
        "source": "server_response",
        "evidence_ref": "init.json",
    }


def by_hash(sha=H):
    return {
        "base_checkpoint": "Qwen/Qwen3.5-2B@abc",
        "adapter_sha256": sha,
        "source": "server_response",
        "evidence_ref": "init.json",
        "before_first_update": True,
    }


def by_uri(uri=URI, sha=None):
    return {
        **by_hash(sha),
        "checkpoint_uri": uri,
        "checkpoint_immutable": True,
        "checkpoint_scope": "full_initialization",
        "loaded_checkpoint_uri": uri,
        "load_succeeded": True,
    }


def arm(name, start=None, restores=0):
    return {
        "arm": name,
        "initialization": start or by_hash(),
        "restore_count": restores,
        "optimizer_checks": [check(after) for after in range(restores + 1)],
        "initial_output": {
            "available": True,
            "batch_sha256": BATCH,
            "output_sha256": OUT,
            "evidence_ref": "init.json",
            "before_first_update": True,
        },
    }


def report(*arms):
    return {"version": 1, "arms": list(arms)}


TWO = spec("a", "b")
GOOD = report(arm("a"), arm("b"))


def test_matched_hashes_pass():
    assert validate(TWO, GOOD).to_record() == {
        "status": "passed",
        "required": True,
        "checks": [
            {"check": "a", "status": "passed", "reason": None},
            {"check": "b", "status": "passed", "reason": None},
            {"check": "group 1: initialization", "status": "passed", "reason": None},
            {"check": "group 1: initial output", "status": "passed", "reason": None},
        ],
        "reason": None,
        "applicability": "required",
    }


@pytest.mark.parametrize(
    "arms",
    [
        [],
        [arm("b")],
        [arm("a"), arm("a"), arm("b")],
        [arm("diag")],
        {"a": arm("a")},
        None,
        "x",
        [1],
    ],
    ids=["none", "b", "twice", "other", "object", "null", "text", "number"],
)
def test_each_planned_arm_needs_exactly_one_entry(arms):
    """Records: an object keyed by name is not read, other arms are ignored without a row."""
    result = validate(TWO, {"version": 1, "arms": arms})
    assert result.status == "unverified"
    assert result.reason == "a: missing or duplicate arm evidence."
    assert [row.check for row in result.checks] == ["a", "b"]


def test_only_the_first_reason_is_given():
    result = validate(TWO, None)
    assert [row.reason for row in result.checks] == [
        "a: missing or duplicate arm evidence.",
        "b: missing or duplicate arm evidence.",
    ]
    assert result.reason == "a: missing or duplicate arm evidence."
    assert len(result.to_gate().reasons) == 2


def test_an_entry_for_another_arm_changes_nothing():
    result = validate(TWO, report(arm("a"), arm("b"), {"arm": "c"}, {}, 3))
    assert result.status == "passed"


def test_the_entry_is_named_by_arm_not_by_name(put):
    renamed = put(GOOD, ("arms", 0, "arm"))
    renamed["arms"][0]["name"] = "a"
    assert validate(TWO, renamed).reason == "a: missing or duplicate arm evidence."


def test_an_arm_planned_twice_cannot_be_matched():
    assert validate(spec("a", "a"), GOOD).reason == "a: missing or duplicate arm evidence."


@pytest.mark.parametrize("version", [None, 2, "1", True, 1.0, [1]])
def test_only_version_1_is_known(put, version):
    result = validate(TWO, put(GOOD, ("version",), version))
    assert result.reason == "a: initialization provenance version 1."
    assert result.status == "unverified"


INIT = ("arms", 1, "initialization")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("base_checkpoint", [None, "", 1, []]),
        ("evidence_ref", [None, "", 1]),
        ("before_first_update", [None, False, "true", 1]),
        ("source", [None, "declared", "server_response (get_info)", 1, []]),
        ("adapter_sha256", [None, "", "abc", "a" * 63, "g" * 64, 1]),
    ],
)
def test_a_hash_proof_needs_each_of_its_parts(put, field, values):
    for value in values:
        result = validate(TWO, put(GOOD, (*INIT, field), value))
        assert result.status == "unverified", value
        assert result.reason.startswith("b: ")
        assert {row.check: row.status for row in result.checks}["a"] == "passed"
    assert validate(TWO, put(GOOD, (*INIT, field))).status == "unverified"


def test_a_hash_may_be_measured_locally(put):
    assert validate(TWO, put(GOOD, (*INIT, "source"), "local_hash")).status == "passed"


def test_hashes_are_compared_without_regard_to_case(put):
    assert validate(TWO, put(GOOD, (*INIT, "adapter_sha256"), H.upper())).status == "passed"


URIS = report(arm("a", by_uri()), arm("b", by_uri()))


def test_matched_full_checkpoint_loads_pass():
    assert validate(TWO, URIS).status == "passed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", "local_hash"),
        ("checkpoint_uri", None),
        ("checkpoint_uri", ""),
        ("checkpoint_immutable", None),
        ("checkpoint_immutable", False),
        ("checkpoint_immutable", "true"),
        ("checkpoint_scope", "base_model"),
        ("checkpoint_scope", None),
        ("loaded_checkpoint_uri", None),
        ("loaded_checkpoint_uri", 1),
        ("load_succeeded", None),
        ("load_succeeded", 1),
    ],
)
def test_a_checkpoint_proof_needs_each_of_its_parts(put, field, value):
    """A declared URI or a base-model load does not prove the adapter."""
    result = validate(TWO, put(URIS, (*INIT, field), value))
    assert result.status == "unverified"
    assert result.reason.startswith("b: needs adapter_sha256, or a full checkpoint load: ")


def test_an_incomplete_load_beside_a_hash_is_no_obstacle(put):
    """SDPO: an arm names the checkpoint that it saved itself."""
    named = put(GOOD, (*INIT, "checkpoint_uri"), "tinker://b/own")
    assert validate(TWO, named).status == "passed"


@pytest.mark.parametrize(
    ("field", "value"),
    [("loaded_checkpoint_uri", "tinker://t/weights/other"), ("load_succeeded", False)],
)
def test_an_observed_difference_in_the_load_fails(put, field, value):
    assert validate(TWO, put(URIS, (*INIT, field), value)).status == "failed"
    both = report(arm("a", by_uri(sha=H)), arm("b", by_uri(sha=H)))
    assert validate(TWO, put(both, (*INIT, field), value)).status == "failed"


def identity(*starts):
    names = "abc"[: len(starts)]
    arms = [arm(name, start) for name, start in zip(names, starts, strict=True)]
    result = validate(spec(*names), report(*arms))
    row = next(row for row in result.checks if row.check == "group 1: initialization")
    assert result.status == row.status
    return row.status


@pytest.mark.parametrize(
    ("starts", "status"),
    [
        ((by_hash(H), by_hash(H2)), "failed"),
        ((by_uri("u"), by_uri("v")), "failed"),
        ((by_hash(H), by_uri("u")), "unverified"),
        ((by_uri("u"), by_uri("u", H)), "passed"),
        ((by_hash(H), by_uri("u", H)), "passed"),
        ((by_uri("u", H), by_uri("u", H2)), "failed"),
        ((by_uri("u", H), by_uri("v", H)), "passed"),
        ((by_hash(H), by_uri("u", H), by_uri("u")), "passed"),
        ((by_uri("u"), by_hash(H), by_uri("u", H)), "passed"),
        ((by_hash(H), by_uri("u", H), by_uri("v")), "failed"),
        ((by_hash(H), by_uri("u"), by_uri("u")), "unverified"),
        ((by_hash(H), by_uri("u"), by_hash(H2)), "failed"),
    ],
)
def test_proofs_are_connected_by_a_shared_hash_or_uri(starts, status):
    """A has h, B has h and u, C has u: connected. A hash and a URI alone share nothing."""
    assert identity(*starts) == status


def test_arms_from_different_bases_fail(put):
    result = validate(TWO, put(GOOD, (*INIT, "base_checkpoint"), "Qwen/Qwen3.5-4B"))
    assert result.status == "failed"
    assert result.reason == "group 1: initialization: the arms name different base checkpoints."


CHECK = ("arms", 1, "optimizer_checks", 0)


@pytest.mark.parametrize(
    ("restores", "after", "status"),
    [
        (0, [0], "passed"),
        (1, [0, 1], "passed"),
        (2, [2, 0, 1], "passed"),
        (0, [], "unverified"),
        (1, [0], "unverified"),
        (1, [1], "unverified"),
        (2, [0, 2], "unverified"),
        (2, [0, 1, 1], "unverified"),
        (1, [0, 0, 1], "unverified"),
        (0, [0, 1], "unverified"),
        (1, [0, "1"], "unverified"),
        (1, [0, True], "unverified"),
        (1, [0, 1.0], "unverified"),
        (1, [0, -1], "unverified"),
        (2**63, [0], "unverified"),
    ],
)
def test_the_optimizer_is_checked_at_creation_and_after_every_restore(restores, after, status):
    b = {**arm("b"), "restore_count": restores, "optimizer_checks": [check(n) for n in after]}
    assert validate(TWO, report(arm("a"), b)).status == status


@pytest.mark.parametrize("count", [None, -1, "0", True, 0.0, [], float("nan")])
def test_the_restore_count_is_a_whole_number(put, count):
    result = validate(TWO, put(GOOD, ("arms", 1, "restore_count"), count))
    assert result.reason == "b: restore_count must be a whole number of at least 0."


@pytest.mark.parametrize("checks", [None, {}, "x", [None], [[]], [1]])
def test_optimizer_checks_of_another_form_are_unverified(put, checks):
    assert validate(TWO, put(GOOD, ("arms", 1, "optimizer_checks"), checks)).status == "unverified"


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("source", "declared", "unverified"),
        ("source", None, "unverified"),
        ("source", "server_response (get_info)", "unverified"),
        ("actual", None, "unverified"),
        ("actual", "", "unverified"),
        ("actual", "adamw", "failed"),
        ("actual", "TriMuon", "passed"),
        ("actual_config", None, "unverified"),
        ("actual_config", {}, "unverified"),
        ("actual_config", {"type": "trimuon"}, "unverified"),
        ("actual_config", {**CONFIG, "extra": 1}, "passed"),
        ("actual_config", {**CONFIG, "learning_rate": 2e-04}, "failed"),
        ("actual_config", {**CONFIG, "learning_rate": "2e-05"}, "failed"),
        ("actual_config", {**CONFIG, "beta1": None}, "unverified"),
        ("actual_config", {"learning_rate": 2e-04}, "failed"),
        ("before_next_update", False, "unverified"),
        ("before_next_update", None, "unverified"),
        ("before_next_update", 1, "unverified"),
        ("evidence_ref", None, "unverified"),
        ("evidence_ref", "", "unverified"),
    ],
)
def test_every_optimizer_check_is_compared_with_the_plan(put, field, value, status):
    assert validate(TWO, put(GOOD, (*CHECK, field), value)).status == status


def test_what_was_only_declared_cannot_fail(put):
    declared = put(put(GOOD, (*CHECK, "source"), "declared"), (*CHECK, "actual"), "adamw")
    assert validate(TWO, declared).status == "unverified"


def test_a_later_check_is_compared_as_well(put):
    changed = put(report(arm("a"), arm("b", restores=1)), (*CHECK[:-1], 1, "actual"), "adamw")
    result = validate(TWO, changed)
    assert result.status == "failed"
    assert result.reason == (
        "b: optimizer check after_restore=1: adamw is active, trimuon is planned."
    )


@pytest.mark.parametrize(
    ("planned", "actual", "status"),
    [
        ("adam", "adamw", "passed"),
        ("AdamW", "adam", "passed"),
        ("adam", "sgd", "failed"),
        (None, "adam", "unverified"),
        ("", "adam", "unverified"),
        (1, "adam", "unverified"),
    ],
)
def test_adam_and_adamw_are_one_family(put, planned, actual, status):
    one = {"name": "a", "optimizer": planned, "optimizer_config": CONFIG}
    two = put(TWO, ("restoration_preflight", "groups", 0, "arms", 0), one)
    assert (
        validate(two, put(GOOD, ("arms", 0, "optimizer_checks", 0, "actual"), actual)).status
        == status
    )


def test_one_and_one_point_zero_are_equal_settings(put):
    keys = ("restoration_preflight", "groups", 0, "arms", 1, "optimizer_config")
    two = put(TWO, keys, {"beta1": 1, "amsgrad": False})
    for config, status in (
        ({"beta1": 1.0, "amsgrad": False}, "passed"),
        ({"beta1": True, "amsgrad": False}, "failed"),
        ({"beta1": 1.0, "amsgrad": 0}, "failed"),
    ):
        assert validate(two, put(GOOD, (*CHECK, "actual_config"), config)).status == status


OUTPUT = ("arms", 1, "initial_output")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("available", False),
        ("available", None),
        ("available", 1),
        ("batch_sha256", "abc"),
        ("batch_sha256", None),
        ("output_sha256", "g" * 64),
        ("output_sha256", None),
        ("evidence_ref", None),
        ("before_first_update", False),
    ],
)
def test_the_output_on_the_fixed_batch_must_be_recorded_if_the_spec_asks(put, field, value):
    changed = put(GOOD, (*OUTPUT, field), value)
    result = validate(TWO, changed)
    assert result.status == "unverified"
    assert result.reason == "b: initial_output on the fixed batch was not recorded."
    assert validate(spec("a", "b", fixed=False), changed).status == "passed"


def test_a_group_may_ask_for_the_fixed_batch_too(put):
    two = spec("a", "b", fixed=False)
    two["restoration_preflight"]["groups"][0]["fixed_batch_required"] = True
    assert validate(two, put(GOOD, OUTPUT)).status == "unverified"


def test_different_outputs_on_one_batch_fail_whether_asked_for_or_not(put):
    changed = put(GOOD, (*OUTPUT, "output_sha256"), H)
    for fixed in (True, False):
        result = validate(spec("a", "b", fixed=fixed), changed)
        assert result.status == "failed"
        assert result.reason == (
            "group 1: initial output: the arms give different outputs on the same batch."
        )


def test_outputs_on_different_batches_cannot_be_compared(put):
    assert validate(TWO, put(GOOD, (*OUTPUT, "batch_sha256"), H)).status == "unverified"


LONE = {"paired_training_arms": False, "checkpoint_restore": True}


@pytest.mark.parametrize(
    ("features", "restores", "status"),
    [
        (LONE, 1, "passed"),
        (LONE, 2, "passed"),
        (LONE, 0, "unverified"),
        ({**LONE, "checkpoint_restore": False}, 1, "unverified"),
        ({**LONE, "paired_training_arms": True}, 1, "unverified"),
        ({"checkpoint_restore": True}, 1, "unverified"),
        ({"paired_training_arms": False}, 1, "unverified"),
    ],
)
def test_a_lone_arm_is_allowed_only_if_it_was_resumed(features, restores, status):
    result = validate(spec("a", features=features), report(arm("a", restores=restores)))
    assert result.status == status


def test_groups_are_judged_each_by_itself():
    """Two pairs that start from different checkpoints: each pair matches."""
    planned = spec("a", "b")
    planned["restoration_preflight"]["groups"].append(
        {
            "arms": [
                dict(arm, name=arm["name"] + "2")
                for arm in planned["restoration_preflight"]["groups"][0]["arms"]
            ]
        }
    )
    arms = [arm("a"), arm("b"), arm("a2", by_hash(H2)), arm("b2", by_hash(H2))]
    assert validate(planned, report(*arms)).status == "passed"
    assert validate(planned, report(*arms[:3], arm("b2", by_hash(H)))).status == "failed"


@pytest.mark.parametrize("groups", [[], None, "x", [{}], [{"arms": []}], [None], [{"arms": [{}]}]])
def test_a_required_check_without_a_plan_is_unverified(put, groups):
    result = validate(put(TWO, ("restoration_preflight", "groups"), groups), GOOD)
    assert (result.status, result.required) == ("unverified", True)
    assert result.reason


def test_a_failure_is_named_before_a_gap():
    """Arm a lacks a proof, arm b has another optimizer: the reason explains the status."""
    a, b = arm("a"), arm("b")
    del a["initialization"]["evidence_ref"]
    b["optimizer_checks"][0]["actual"] = "sgd"
    result = validate(TWO, report(a, b))
    assert result.status == "failed"
    assert result.reason.startswith("b: optimizer check after_restore=0: sgd is active")


def test_a_spec_that_opts_out_needs_no_comparison():
    out = {
        "experiment_features": {"paired_training_arms": False, "checkpoint_restore": False},
        "restoration_preflight": {"applicable": False, "groups": []},
    }
    assert validate(out, None).to_record() == {
        "status": "not_applicable",
        "required": False,
        "checks": [],
        "reason": "spec.restoration_preflight opts out and no feature it covers is true",
        "applicability": "not_applicable",
    }


@pytest.mark.parametrize("value", [None, [], "x", 1, {}, float("nan")])
def test_a_malformed_entry_is_unverified(put, value):
    for field in ("initialization", "optimizer_checks", "restore_count"):
        result = validate(TWO, put(GOOD, ("arms", 1, field), value))
        assert result.status == "unverified"
        json.dumps(result.to_record())


def test_judging_changes_nothing():
    before = copy.deepcopy(GOOD)
    validate(TWO, GOOD)
    assert before == GOOD


def row(result, check):
    return next(entry for entry in result.checks if entry.check == check)


def test_a_group_whose_arms_prove_nothing_is_unverified(put):
    """The row of the group says so too, not only the rows of the arms."""
    for start in (by_hash(None), put(by_hash(), ("evidence_ref",))):
        for arms in ((arm("a", start), arm("b")), (arm("a"), arm("b", start))):
            found = row(validate(TWO, report(*arms)), "group 1: initialization")
            assert found.status == "unverified"
            assert found.reason == (
                "group 1: initialization: not every arm proves which checkpoint it started from."
            )


def test_a_malformed_hash_is_no_hash_beside_a_full_load(put):
    """What is stated must be well formed, although the load alone would do."""
    both = put(URIS, (*INIT, "adapter_sha256"), "abc")
    assert validate(TWO, both).reason == "b: adapter_sha256 must be 64 hexadecimal digits."


def test_the_group_says_whose_output_is_missing_or_on_another_batch(put):
    name = "group 1: initial output"
    missing = row(validate(TWO, put(GOOD, OUTPUT)), name)
    assert (missing.status, missing.reason) == (
        "unverified",
        f"{name}: not every arm recorded its output on the fixed batch.",
    )
    other = row(validate(TWO, put(GOOD, (*OUTPUT, "batch_sha256"), H)), name)
    assert (other.status, other.reason) == (
        "unverified",
        f"{name}: the arms recorded outputs on different batches.",
    )
    lone = validate(spec("a", "b", fixed=False), put(GOOD, OUTPUT))
    assert name not in [entry.check for entry in lone.checks]


def test_what_a_plan_lacks_is_named(put):
    nothing = put(TWO, ("restoration_preflight", "groups", 0, "arms"), [])
    assert validate(nothing, GOOD).reason == "group 1: the spec names no arm."
    unnamed = put(TWO, ("restoration_preflight", "groups", 0, "arms", 0, "name"), None)
    assert validate(unnamed, GOOD).reason == "(unnamed arm): the spec's arm has no name."


def test_the_version_is_named_before_other_gaps(put):
    changed = put(put(GOOD, ("version",), 2), ("arms", 0, "initialization", "evidence_ref"))
    assert validate(TWO, changed).reason == "a: initialization provenance version 1."


def test_outputs_are_compared_batch_by_batch(put):
    """Arms a and b differ on one batch; c alone recorded another."""
    arms = [
        arm("a"),
        put(arm("b"), ("initial_output", "output_sha256"), H),
        put(arm("c"), ("initial_output", "batch_sha256"), H),
    ]
    assert validate(spec("a", "b", "c"), report(*arms)).status == "failed"
