"""The steps of a run, each one Prefect task inside a flow and a plain call outside of one."""

from __future__ import annotations

from tasks import (
    conformance_gate,
    correctness,
    diagnostic_batch,
    diagnostic_initial,
    diagnostic_sentinels,
    evaluation,
    fallbacks,
    feasibility,
    forced_checks,
    initialization,
    paper_gates,
    pilot,
    probe,
    rescoring,
    restoration,
    rollout,
    training,
)
from tasks.run_task import RunTask

SPEC_PREFLIGHT = RunTask(paper_gates.check_spec, name="spec-preflight")
SERVICE_PROBE = RunTask(probe.probe_service, name="service-probe")
CONFORMANCE = RunTask(conformance_gate.check_conformance, name="conformance")
GENERATION_AUDIT = RunTask(paper_gates.check_generated_data, name="generation-audit")
CORRECTNESS = RunTask(correctness.check_correctness, name="correctness-preflight")
INITIALIZATION = RunTask(initialization.ensure_initialization, name="initialization-checkpoint")
RESTORATION = RunTask(restoration.check_restoration, name="restoration-preflight")
FORCED_CHECKS = RunTask(forced_checks.check_forced, name="forced-checks")
EVALUATOR = RunTask(evaluation.check_canaries, name="evaluator")
ACTIVATION = RunTask(pilot.check_activation, name="activation-pilot")
CALIBRATION = RunTask(fallbacks.try_fallback, name="activation-calibration")
FEASIBILITY = RunTask(feasibility.check_feasibility, name="feasibility")
ROLLOUT = RunTask(rollout.sample_rollout, name="rollout")
RESCORING = RunTask(rescoring.rescore_rollout, name="rescoring")
UPDATE = RunTask(training.train_update, name="update")
CHECKPOINT = RunTask(training.save_checkpoint, name="checkpoint")
EVALUATION = RunTask(evaluation.evaluate, name="evaluation")
DIAGNOSTIC_INITIAL = RunTask(diagnostic_initial.load_initial, name="diagnostic-initial-state")
DIAGNOSTIC_BATCH = RunTask(diagnostic_batch.sample_batch, name="diagnostic-batch")
DIAGNOSTIC_FREEZE = RunTask(diagnostic_batch.freeze_batch, name="diagnostic-freeze")
DIAGNOSTIC_SENTINELS = RunTask(diagnostic_sentinels.score_sentinels, name="diagnostic-sentinels")
