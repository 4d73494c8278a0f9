"""The structured result of a run, posted step by step as the run goes.

The order is part of the contract: deviations are posted before the training they concern, the base
model's evaluation before any arm is finished, arms one by one, and a verdict with the last post
alone. What was posted stays. Every post is kept in the run's ledger, so that this can be shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from evidence import output
from evidence.errors import InputError

BASE_ARM = "base"
_FINAL_FIELDS = ("verdict", "outcome_reason", "capacity_block")
_RESERVED = frozenset({*output.KEY_ORDER, "metrics"})


class PostedResults(Protocol):
    """What a structured result needs of a run directory."""

    @property
    def path(self) -> str:
        """The run directory."""
        ...

    @property
    def spec(self) -> Mapping[str, Any]:
        """The spec, to know which arms a verdict needs."""
        ...

    @property
    def attempt(self) -> int:
        """Number of the current attempt."""
        ...

    def result(self) -> dict[str, Any] | None:
        """Return the result as last posted, or None."""
        ...

    def replace_result(self, record: Mapping[str, Any]) -> None:
        """Post a result."""
        ...

    def close_attempt(self, record: Mapping[str, Any]) -> int:
        """Keep the final record of the current attempt."""
        ...


class StructuredResult:
    """Posts the structured result of one run.

    Args:
        run: the run directory.
    """

    def __init__(self, run: PostedResults) -> None:
        self._run = run

    @property
    def current(self) -> dict[str, Any]:
        """The result as last posted; ``{}`` before the first post."""
        return self._run.result() or {}

    def start(self, summary: str) -> None:
        """Post that the run is running, or goes on after an earlier attempt was closed.

        Numbers, finished arms and deviations of earlier attempts stay; their verdict and capacity
        block go, since they stand in ``attempts/``.
        """
        previous = {
            name: value for name, value in self.current.items() if name not in _FINAL_FIELDS
        }
        patch = {"status": "running", "summary": summary}
        self._run.replace_result(output.apply_update(previous, {"deviations": [], **patch}))

    def say(self, summary: str) -> None:
        """Post what is going on, in at most two plain sentences."""
        self._post({"summary": summary})

    def deviate(
        self,
        deviations: Sequence[Mapping[str, Any]],
        *,
        original_hypothesis_tested: bool,
        tested_instead: str | None = None,
    ) -> None:
        """Post deviations, before the training that they concern.

        Args:
            deviations: entries ``{field, original, effective, reason}``, all texts.
            original_hypothesis_tested: whether the run still tests the spec's hypothesis.
            tested_instead: the claim it tests otherwise.

        Raises:
            InputError: if an entry has another form, or the claim is missing.
        """
        patch: dict[str, Any] = {
            "deviations": [dict(entry) for entry in deviations],
            "original_hypothesis_tested": original_hypothesis_tested,
        }
        if tested_instead is not None:
            patch["tested_instead"] = tested_instead
        self._post(patch)

    def post_base(self, metrics: Mapping[str, float]) -> None:
        """Post the base model's evaluation, as soon as it is there."""
        self._post({"metrics": {"arms": {BASE_ARM: dict(metrics)}}})

    def post_metrics(self, metrics: Mapping[str, float], *, arm: str | None = None) -> None:
        """Post numbers of the run, or of one arm. A name once posted may change its value only."""
        numbers = dict(metrics)
        self._post({"metrics": numbers if arm is None else {"arms": {arm: numbers}}})

    def complete_arm(self, arm: str, metrics: Mapping[str, float]) -> None:
        """Post the numbers of an arm that is finished.

        Raises:
            InputError: if the base model's evaluation was not posted before.
        """
        posted = self.current.get("metrics", {}).get("arms", {})
        if not posted.get(BASE_ARM):
            expected = f"the evaluation of {BASE_ARM} before an arm completes"
            raise InputError(f"metrics.arms.{BASE_ARM}", None, expected, where=self._run.path)
        self._post({"metrics": {"arms": {arm: dict(metrics)}}, "completed_arms": [arm]})

    def post_block(self, name: str, value: Any) -> None:
        """Post a further block of the contract: ``feasibility``, ``evaluation``, ``decision``, ...

        Raises:
            InputError: if the name is a field that has a method of its own.
        """
        if name in _RESERVED:
            raise InputError("block", name, "a block that has no method of its own")
        self._post({name: value})

    def post_usage(
        self, *, wall_seconds: float | None = None, gpu_hours: float | None = None
    ) -> None:
        """Post what was used as observed; what was projected stays in ``feasibility``.

        Args:
            wall_seconds: observed wall time, or None if unknown.
            gpu_hours: observed GPU-hours from an allocation record, or None if unknown.
        """
        self._post({"observed_usage": {"wall_seconds": wall_seconds, "gpu_hours": gpu_hours}})

    def finish(
        self,
        *,
        status: str,
        verdict: str,
        outcome_reason: str,
        summary: str,
        capacity_block: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Post the final result and keep it as the record of this attempt.

        Safe to repeat with the same values after a crash.

        Args:
            status: ``succeeded`` or ``failed``.
            verdict: ``supported``, ``refuted`` or ``inconclusive``.
            outcome_reason: one of `evidence.output.OUTCOME_REASONS`.
            summary: at most two plain sentences.
            capacity_block: only when the service's capacity stopped the run.

        Returns:
            The final record.

        Raises:
            InputError: if status, verdict, reason and arms do not go together.
        """
        patch: dict[str, Any] = {
            "status": status,
            "summary": summary,
            "verdict": verdict,
            "outcome_reason": outcome_reason,
        }
        if capacity_block is not None:
            patch["capacity_block"] = dict(capacity_block)
        if status == "running":
            raise InputError("status", status, "succeeded or failed", where=self._run.path)
        record = self._next(patch, closing=True)
        issues = output.validate(record, spec=self._run.spec).issues
        if issues:
            raise InputError("structured output", record, issues[0], where=self._run.path)
        self._run.replace_result(record)
        self._run.close_attempt(record)
        return record

    def _post(self, patch: Mapping[str, Any]) -> None:
        self._run.replace_result(self._next(patch))

    def _next(self, patch: Mapping[str, Any], *, closing: bool = False) -> dict[str, Any]:
        current = self.current
        status = current.get("status")
        if status is None:
            raise InputError("status", None, "a started result", where=self._run.path)
        record = output.apply_update(current, patch)
        if status != "running" and not (closing and record == current):
            expected = "running: a final result is not changed, start another attempt"
            raise InputError("status", status, expected, where=self._run.path)
        return record
