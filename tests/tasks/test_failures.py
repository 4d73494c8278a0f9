"""Errors of the service are sorted by what they ask for, whatever they are dressed up as."""

import asyncio
from datetime import UTC, datetime

import httpx
import pytest
import tinker
from tinker.lib.retryable_exception import RetryableException

from tasks.failures import (
    Failure,
    FailureKind,
    checkpoint_gone,
    classify,
    retry_after_seconds,
    session_forgotten,
)
from tests.tasks.fakes import failed_future, poll_error, status_error


def _retryable(body: object) -> RetryableException:
    error = RetryableException("Promise expired/broken for request m:4")
    error.__cause__ = status_error(410, body)
    return error


def _poisoned(cause: BaseException) -> RuntimeError:
    error = RuntimeError("A previous request failed; this TrainingClient is poisoned")
    error.__cause__ = cause
    return error


REQUEST = httpx.Request("POST", "http://127.0.0.1:1/")

CASES = [
    (status_error(429, {"error": "saturated"}), FailureKind.CAPACITY),
    (status_error(503), FailureKind.CAPACITY),
    (
        status_error(400, {"detail": "Maximum number of LoRA adapters (4) reached"}),
        FailureKind.CAPACITY,
    ),
    (
        poll_error(400, {"detail": "Maximum number of LoRA adapters (4) reached"}),
        FailureKind.CAPACITY,
    ),
    (failed_future("engine refused work: trainer capacity exhausted"), FailureKind.CAPACITY),
    (
        failed_future("engine refused work: trainer capacity exhausted", "user"),
        FailureKind.CAPACITY,
    ),
    (status_error(410, {"error": "model_lost"}), FailureKind.LOST_MODEL),
    (_retryable({"error": "model_lost"}), FailureKind.LOST_MODEL),
    (RuntimeError("Internal client holder is closed"), FailureKind.LOST_MODEL),
    (_poisoned(status_error(410, {"error": "model_lost"})), FailureKind.LOST_MODEL),
    (status_error(400, {"detail": "unsupported loss"}), FailureKind.PERMANENT),
    (status_error(401), FailureKind.PERMANENT),
    (status_error(402, {"error": "no capacity left on this plan"}), FailureKind.PERMANENT),
    (status_error(409, {"error": "conflict"}), FailureKind.PERMANENT),
    (status_error(422), FailureKind.PERMANENT),
    (failed_future("bad loss input", "user"), FailureKind.PERMANENT),
    (AssertionError("asample promises always carry sample_sequence_ids"), FailureKind.PERMANENT),
    (status_error(500), FailureKind.OUTAGE),
    (status_error(502), FailureKind.OUTAGE),
    (tinker.APIConnectionError(request=REQUEST), FailureKind.OUTAGE),
    (failed_future("worker died"), FailureKind.OUTAGE),
    (TimeoutError("no answer"), FailureKind.UNKNOWN),
    (RetryableException("promise gone"), FailureKind.UNKNOWN),
    (_retryable({"error": "expired", "message": "request m:4: unknown"}), FailureKind.UNKNOWN),
    (_poisoned(TimeoutError("x")), FailureKind.UNKNOWN),
]


@pytest.mark.parametrize(("error", "kind"), CASES, ids=range(len(CASES)))
def test_classify_sorts_by_what_has_to_be_done(error: Exception, kind: FailureKind) -> None:
    failure = classify(error)

    assert failure is not None
    assert failure.kind is kind


FORGOTTEN = [
    status_error(403, {"error": "invalid_session", "message": "session_id 's': no such session"}),
    status_error(404, {"detail": "Session not found"}),
    poll_error(404, {"detail": "Future not found"}),
    failed_future("unknown request", "user"),
]


@pytest.mark.parametrize("error", FORGOTTEN, ids=["403", "404", "poll", "future"])
def test_session_that_is_forgotten_while_a_client_is_made_is_lost(error: Exception) -> None:
    """A service without durable sessions was restarted between two requests of the creation."""
    failure = classify(error, established=False)

    assert failure is not None
    assert failure.kind is FailureKind.LOST_MODEL
    assert session_forgotten(failure)
    assert not checkpoint_gone(failure)


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (status_error(404), True),
        (status_error(410, {"error": "model_lost"}), True),
        (status_error(404, {"message": "path tinker://m/weights/a: no such checkpoint"}), True),
        (status_error(400, {"detail": "checkpoint tinker://m/weights/a has expired"}), True),
        (failed_future("Checkpoint a does not exist"), True),
        (failed_future("Checkpoint a was deleted", "user"), True),
        (status_error(403), False),
        (status_error(500), False),
        (status_error(502), False),
        (failed_future("trainer capacity exhausted; checkpoint not found in cache"), False),
        (RetryableException("promise gone"), False),
        (status_error(400, {"detail": "Checkpoint model configuration is incompatible"}), False),
    ],
)
def test_load_that_failed_tells_whether_the_checkpoint_is_kept(
    error: Exception, gone: bool
) -> None:
    failure = classify(error, established=False)

    assert failure is not None
    assert checkpoint_gone(failure) is gone


def test_refused_state_of_a_checkpoint_does_not_mean_that_it_is_gone() -> None:
    text = "the optimizer that was loaded has done 0 steps, the checkpoint holds 2"

    assert not checkpoint_gone(Failure(FailureKind.PERMANENT, text))


@pytest.mark.parametrize("status", [403, 404])
def test_classify_takes_forgotten_sessions_for_lost_models(status: int) -> None:
    """A restarted server answers 403 or 404 for what it had given out; at creation they refuse."""
    error = status_error(status)

    known = classify(error, established=True)
    new = classify(error, established=False)

    assert known is not None
    assert new is not None
    assert (known.kind, new.kind) == (FailureKind.LOST_MODEL, FailureKind.PERMANENT)


@pytest.mark.parametrize(
    "error",
    [ValueError("ratio is NaN"), KeyError("x"), asyncio.CancelledError(), ZeroDivisionError()],
)
def test_classify_leaves_our_own_errors_alone(error: BaseException) -> None:
    assert classify(error) is None


def test_classify_keeps_the_exact_words_and_the_wait() -> None:
    failure = classify(status_error(429, {"error": "saturated"}, {"Retry-After": "90"}))

    assert failure is not None
    assert failure.text == "Error code: 429 - {'error': 'saturated'}"
    assert failure.retry_after == 90.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "2.5"}, 2.5),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "Sat, 29 Nov 2025 12:01:00 GMT"}, 60.0),
        ({"retry-after": "Sat, 29 Nov 2025 11:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({}, None),
    ],
)
def test_retry_after_reads_seconds_and_dates(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after_seconds(headers, datetime(2025, 11, 29, 12, 0, tzinfo=UTC)) == seconds


def test_retry_after_takes_a_date_without_a_zone_for_utc() -> None:
    """``-0000`` is UTC by RFC 5322; Python reads it as a time without a zone."""
    noon = datetime(2025, 11, 29, 12, 0, tzinfo=UTC)

    seconds = retry_after_seconds({"Retry-After": "Sat, 29 Nov 2025 12:00:30 -0000"}, noon)

    assert seconds == 30.0
