"""The fallbacks of a failed activation gate: in their order, alone, recorded, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.local_service.launch import LocalService
from evidence.errors import InputError
from evidence.execution import ExecutionFile
from evidence.gate import CheckResult, GateResult, GateStatus
from evidence.result import StructuredResult
from evidence.run import Run
from evidence.spec import Spec
from flows import steps
from flows.activation import pass_activation
from flows.distillation import refuse_distillation
from flows.gates import Gatekeeper, GateStopped
from flows.run import run_comparison
from tasks.context import RunContext
from tasks.gate_answer import GateAnswer
from tasks.learner import Learner
from tasks.reachability import ServerInfo
from tests.flows import retail_spec
from tests.flows.conftest import make_plan
from tests.tasks.fake_runs import FakeService

FALLBACKS = [
    {"kind": "frozen_initial_teacher", "source": "As planned."},
    {"kind": "max_turns", "value": 4, "source": "As planned."},
]
CALIBRATION = {"max_steps": 4, "max_wall_minutes": 15}


def _execution(**changes: Any) -> ExecutionFile:
    document = retail_spec.spec()
    given = {"fallbacks": FALLBACKS, "calibration": CALIBRATION} | changes
    made = retail_spec.execution(document, **given)
    if "pilot" not in changes:
        made["pilot"]["steps"] = 2
    return ExecutionFile.parse(made)


def _context(folder: Path, **changes: Any) -> RunContext:
    document = retail_spec.spec()
    execution = _execution(**changes)
    run = Run.create(str(folder), run_id="fake", spec=document, execution=execution.raw)
    service: Any = FakeService()
    return RunContext(
        run=run,
        spec=Spec.parse(document),
        execution=execution,
        service=service,
        server=ServerInfo(models=("tiny",)),
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let the planned pilot and each fallback answer as said; returns which were asked.

    Every answer has one check for each of the metrics in ``missed``, with the answer's status.
    """

    def give(*statuses: GateStatus, missed: Sequence[str] = ()) -> list[int]:
        asked: list[int] = []

        async def answer(number: int) -> GateAnswer:
            asked.append(number)
            reasons = () if statuses[number] == "passed" else (f"try {number} did not pass",)
            checks = tuple(CheckResult(name, statuses[number]) for name in missed)
            return GateAnswer(GateResult("activation", statuses[number], reasons, checks))

        async def planned(*_: Any) -> GateAnswer:
            return await answer(0)

        async def fallback(ctx: RunContext, init_uri: str, number: int) -> GateAnswer:
            return await answer(number)

        monkeypatch.setattr(steps.ACTIVATION, "step", planned)
        monkeypatch.setattr(steps.CALIBRATION, "step", fallback)
        return asked

    return give


def _pass(ctx: RunContext) -> tuple[StructuredResult, Learner]:
    result = StructuredResult(ctx.run)
    result.start("Running.")
    learner = Learner(ctx, ctx.arm("sdpo"), phase="train", init_uri="tinker://init")
    asyncio.run(pass_activation(Gatekeeper(ctx, result), ctx, result, "tinker://init", [learner]))
    return result, learner


def test_gate_that_passes_as_planned_tries_nothing(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    asked = answers("passed", "passed", "passed")
    ctx = _context(tmp_path)

    result, learner = _pass(ctx)

    assert asked == [0]
    assert result.current["deviations"] == []
    assert learner.arm.advantage["teacher"] == "current"


def test_first_fallback_that_passes_is_the_deviation(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    asked = answers("failed", "passed", "passed")
    ctx = _context(tmp_path)

    result, learner = _pass(ctx)

    assert asked == [0, 1]
    (deviation,) = result.current["deviations"]
    assert (deviation["field"], deviation["effective"]) == (
        "objective",
        "the teacher is the frozen initial policy",
    )
    assert deviation["reason"] == (
        "The activation gate failed as planned (try 0 did not pass); fallback 1 is the first of "
        "the registered ones that did not, in attempt 2 of at most 3. As planned."
    )
    assert result.current["original_hypothesis_tested"] is False
    assert learner.arm.advantage["teacher"] == "initial"
    assert (ctx.pilot_phase, ctx.execution.rollout.max_turns) == ("calibration-1", 3)


def test_second_fallback_is_tried_alone_and_keeps_the_hypothesis(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    """Held-out items are still played with the planned number of turns."""
    asked = answers("failed", "failed", "passed")
    ctx = _context(tmp_path)

    result, learner = _pass(ctx)

    assert asked == [0, 1, 2]
    assert [one["field"] for one in result.current["deviations"]] == ["dataset"]
    assert result.current["original_hypothesis_tested"] is True
    assert learner.arm.advantage["teacher"] == "current"
    assert (ctx.rollout_settings.max_turns, ctx.evaluation_settings.max_turns) == (4, 3)


def test_run_stops_where_no_fallback_passes(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    asked = answers("failed", "failed", "failed")
    ctx = _context(tmp_path)

    with pytest.raises(GateStopped, match="activation: failed"):
        _pass(ctx)

    assert asked == [0, 1, 2]
    assert [one.reasons for one in ctx.run.gate_records("activation")] == [
        ("try 0 did not pass",),
        ("try 1 did not pass",),
        ("try 2 did not pass",),
    ]


def test_calibration_steps_bound_what_is_tried(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    """A pilot takes two steps, so that three allow for one fallback."""
    asked = answers("failed", "failed", "passed")
    ctx = _context(tmp_path, calibration=CALIBRATION | {"max_steps": 3})

    with pytest.raises(GateStopped):
        _pass(ctx)

    assert asked == [0, 1]
    (refused,) = ctx.run.events("calibration_refused")
    assert refused["reason"] == "2 of 3 calibration steps are used, one takes 2"


def test_calibration_minutes_bound_what_is_tried(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    asked = answers("failed", "passed", "passed")
    ctx = _context(tmp_path, calibration=CALIBRATION | {"max_wall_minutes": 1e-9})
    ctx.run.append("calibration_started", number=1, kind="frozen_initial_teacher")

    with pytest.raises(GateStopped):
        _pass(ctx)

    assert asked == [0]


def test_chosen_fallback_is_taken_up_again_after_a_restart(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    asked = answers("failed", "passed", "passed")
    _pass(_context(tmp_path))

    again = _context(tmp_path)
    result, learner = _pass(again)

    assert asked == [0, 1]
    assert len(result.current["deviations"]) == 1
    assert learner.arm.advantage["teacher"] == "initial"
    assert again.pilot_phase == "calibration-1"


def test_missing_evidence_is_no_reason_to_try_anything_else(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    asked = answers("unverified", "passed", "passed")

    with pytest.raises(GateStopped, match="unverified"):
        _pass(_context(tmp_path))

    assert asked == [0]


GROUPS = "grpo_frac_groups_nonzero_adv"
JUDGE = "judge_parse_success_rate"
GAP = "sdpo_mean_abs_token_adv"


def test_fallback_that_cannot_act_on_what_failed_is_not_tried(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    """Another teacher does not change rewards; more turns may, and are the second of two tries."""
    asked = answers("failed", "passed", "passed", missed=[GROUPS])
    ctx = _context(tmp_path)

    result, learner = _pass(ctx)

    assert asked == [0, 2]
    assert [one.reasons for one in ctx.run.gate_records("activation")] == [
        ("try 0 did not pass",),
        (
            "try 0 did not pass",
            f"fallback 1 (frozen_initial_teacher) cannot act on {GROUPS}: not tried",
        ),
        (),
    ]
    (deviation,) = result.current["deviations"]
    assert deviation["reason"] == (
        "The activation gate failed as planned (try 0 did not pass); fallback 2 is the first of "
        "the registered ones that did not, in attempt 2 of at most 2 (fallback 1 "
        f"(frozen_initial_teacher) cannot act on {GROUPS}: not tried). As planned."
    )
    assert learner.arm.advantage["teacher"] == "current"


def test_fallback_that_is_not_tried_uses_no_calibration_steps(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    """Two steps allow for one pilot of two steps: that of the second fallback."""
    asked = answers("failed", "passed", "passed", missed=[GROUPS])

    _pass(_context(tmp_path, calibration=CALIBRATION | {"max_steps": 2}))

    assert asked == [0, 2]


@pytest.mark.parametrize("missed", [[JUDGE], [GAP, JUDGE], ["executed_base_model"]])
def test_run_stops_where_every_fallback_would_only_draw_again(
    tmp_path: Path, answers: Callable[..., list[int]], missed: list[str]
) -> None:
    """One metric out of reach is enough: passing it the next time would be luck."""
    asked = answers("failed", "passed", "passed", missed=missed)
    ctx = _context(tmp_path)

    with pytest.raises(GateStopped, match="activation: failed"):
        _pass(ctx)

    assert asked == [0]
    last = ctx.run.gate_records("activation")[-1]
    assert last.reasons == (
        "try 0 did not pass",
        f"fallback 1 (frozen_initial_teacher) cannot act on {missed[-1]}: not tried",
        f"fallback 2 (max_turns) cannot act on {missed[-1]}: not tried",
    )
    assert [check.check for check in last.checks] == missed


def test_teachers_metric_is_left_to_both_fallbacks(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    asked = answers("failed", "failed", "passed", missed=[GAP])

    result, _ = _pass(_context(tmp_path))

    assert asked == [0, 1, 2]
    assert "in attempt 3 of at most 3. " in result.current["deviations"][0]["reason"]


def test_frozen_teacher_changes_nothing_in_a_pilot_of_one_step(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    """Before the first update the policy that sampled is the initial one."""
    asked = answers("failed", "passed", "passed", missed=[GAP])
    ctx = _context(tmp_path, pilot={"arm": "sdpo", "steps": 1, "other_arms": ["grpo"]})

    _pass(ctx)

    assert asked == [0, 2]


def test_unsuited_fallbacks_are_not_tried_after_a_restart_either(
    tmp_path: Path, answers: Callable[..., list[int]]
) -> None:
    asked = answers("failed", "passed", "passed", missed=[JUDGE])

    for _ in range(2):
        with pytest.raises(GateStopped):
            _pass(_context(tmp_path))

    assert asked == [0]
    assert len(_context(tmp_path).run.gate_records("activation")) == 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"calibration": None}, "calibration"),
        ({"fallbacks": [{"kind": "max_turns", "value": 3, "source": "x"}]}, "fallbacks[0].value"),
        ({"fallbacks": [*FALLBACKS, FALLBACKS[0]]}, "fallbacks"),
        ({"arms": "without a teacher"}, "fallbacks[0].kind"),
    ],
)
def test_fallback_that_cannot_be_tried_is_refused(changes: dict[str, Any], named: str) -> None:
    if "arms" in changes:
        arm = {"loss": retail_spec.IMPORTANCE}
        changes = {
            "arms": {"grpo": arm | {"role": "baseline"}, "sdpo": arm | {"role": "treatment"}}
        }

    with pytest.raises(InputError) as caught:
        refuse_distillation(_execution(**changes))

    assert caught.value.field == named


@pytest.mark.slow
def test_run_goes_on_with_the_frozen_initial_teacher(
    tmp_path: Path, local_service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planned gate is made to fail; the fallback is piloted, passes, and is trained with."""
    piloted = steps.ACTIVATION.step

    async def failing(ctx: RunContext, init_uri: str) -> GateAnswer:
        await piloted(ctx, init_uri)
        return GateAnswer(GateResult("activation", "failed", ("made to fail",)))

    monkeypatch.setattr(steps.ACTIVATION, "step", failing)
    document = retail_spec.spec()
    made = retail_spec.execution(document, fallbacks=FALLBACKS, calibration=CALIBRATION)
    plan = partial(make_plan, tmp_path, local_service.url, document=document, execution=made)

    outcome = run_comparison(plan())

    run = Run.open(f"{tmp_path}/run")
    assert outcome.verdict == "inconclusive"
    assert [one.status for one in run.gate_records("activation")] == ["failed", "passed"]
    assert {key[1] for key in run.keys("teachers")} == {"pilot", "calibration-1", "train"}
    versions = {
        (key[1], key[2]): {row["policy_version"] for row in run.read_table("teachers", key=key)}
        for key in run.keys("teachers")
    }
    assert versions["train", 1] == {0}
    result = run.result() or {}
    assert [one["field"] for one in result["deviations"]] == ["objective"]
    assert result["original_hypothesis_tested"] is False
    assert result["tested_instead"].endswith("the frozen initial policy as the teacher.")
    assert run_comparison(plan()) == outcome
