"""What can go wrong with the service, sorted by what has to be done about it.

    ServiceError
    ├── CapacityBlocked        refused for too long; the same run may go on later
    ├── ServiceOutage          not reachable (for too long)
    ├── ModelLost              the service no longer has the model: restore it from a checkpoint
    ├── UnknownOutcome         the reply was lost after the request may have gone out
    └── PermanentServiceError  asking again cannot help (credentials, billing, a refused value)

The status code alone does not tell them apart. A refusal for capacity also comes as a failed
future without any status, and as a 400 that says that the adapter slots are taken; a lost model
also comes as a 404 from a restarted server. `classify` is the only place that reads SDK errors;
`session_forgotten` and `checkpoint_gone` say more about what has been classified.
"""

from __future__ import annotations

import email.utils
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import tinker
from tinker.lib.retryable_exception import RetryableException


class FailureKind(Enum):
    """What a failure asks for."""

    CAPACITY = "capacity"
    OUTAGE = "outage"
    LOST_MODEL = "lost_model"
    UNKNOWN = "unknown_outcome"
    PERMANENT = "permanent"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed call, classified.

    Attributes:
        kind: what has to be done.
        text: the exact words of the error.
        status: HTTP status, where there was one.
        retry_after: seconds that the service asked to wait, if it said.
        may_have_happened: whether the request may have been carried out all the same.
        spent: seconds from the request to the failure, with the SDK's own retries in them.
    """

    kind: FailureKind
    text: str
    status: int | None = None
    retry_after: float | None = None
    may_have_happened: bool = False
    spent: float = 0.0

    def as_error(self, what: str) -> ServiceError:
        """The exception of this kind, for a caller that still may try again."""
        return _ERRORS[self.kind](self.text, what=what, failure=self)


class ServiceError(RuntimeError):
    """The service did not do what was asked. The message holds its exact words.

    Attributes:
        error: the exact words.
        what: what was asked for.
        failure: the classified failure behind it, if there is one.
        final: whether the retry policy has given up: nobody below the flow tries again.
    """

    def __init__(
        self,
        error: str,
        *,
        what: str = "request",
        failure: Failure | None = None,
        final: bool = False,
    ) -> None:
        self.error, self.what, self.failure, self.final = error, what, failure, final
        super().__init__(f"{what}: {error}")


class CapacityBlocked(ServiceError):
    """The service refused for lack of capacity.

    Attributes:
        retry_after: seconds after which the service wants to be asked again, if it said.
        waited_seconds: how long the run waited for this request.
        steps_completed: comparison steps that were completed when the waiting ended.
    """

    def __init__(
        self,
        error: str,
        *,
        what: str = "request",
        failure: Failure | None = None,
        final: bool = False,
        waited_seconds: float = 0.0,
        steps_completed: int = 0,
    ) -> None:
        super().__init__(error, what=what, failure=failure, final=final)
        self.retry_after = failure.retry_after if failure else None
        self.waited_seconds = waited_seconds
        self.steps_completed = steps_completed


class ServiceOutage(ServiceError):
    """The service cannot be reached, or answers only with internal errors."""


class ModelLost(ServiceError):
    """The service no longer knows the model or session that it gave out."""


class UnknownOutcome(ServiceError):
    """Whether the request was carried out is not known."""


class PermanentServiceError(ServiceError):
    """The service refused for a reason that does not go away."""


_ERRORS: dict[FailureKind, type[ServiceError]] = {
    FailureKind.CAPACITY: CapacityBlocked,
    FailureKind.OUTAGE: ServiceOutage,
    FailureKind.LOST_MODEL: ModelLost,
    FailureKind.UNKNOWN: UnknownOutcome,
    FailureKind.PERMANENT: PermanentServiceError,
}

_CAPACITY_WORDS = re.compile(
    r"capacity exhausted|at capacity|out of capacity|no capacity|saturated|too many requests"
    r"|maximum number of lora adapters|adapter slots? (?:are|is) taken|no free (?:adapter )?slot"
    r"|overloaded|queue is full",
    re.IGNORECASE,
)
_LOST_SESSION = (
    r"unknown session|no such session|invalid_session|session (?:not found|has ended|is closed"
    r"|expired|does not exist)|holder is closed|serviceclient is closed"
)
_LOST_MODEL = rf"model_lost|model lost|unknown model|unknown sampl|model not found|{_LOST_SESSION}"
_LOST_ANSWER = r"unknown request|promise (?:has )?expired|future not found|no such future"
_LOST_MODEL_WORDS = re.compile(_LOST_MODEL, re.IGNORECASE)
_LOST_WORDS = re.compile(rf"{_LOST_MODEL}|{_LOST_ANSWER}", re.IGNORECASE)
_LOST_SESSION_WORDS = re.compile(rf"{_LOST_SESSION}|{_LOST_ANSWER}", re.IGNORECASE)
_GONE = r"not found|no longer|expired|deleted|does not exist"
_LOST_CHECKPOINT_WORDS = re.compile(
    rf"no such checkpoint|checkpoint\b.{{0,200}}\b(?:{_GONE})", re.IGNORECASE
)
GATEWAY_STATUS = frozenset({408, 502, 504, *range(520, 530)})
"""What a proxy answers for a service that it cannot reach, or that was too slow for it: an outage
of the way there, and nothing that the service has said."""
_CAPACITY_STATUS = frozenset({425, 429, 503})
_PERMANENT_STATUS = frozenset({400, 401, 402, 405, 409, 411, 413, 415, 422, 501})


def classify(error: BaseException, *, established: bool = False) -> Failure | None:
    """Sort an exception of the SDK by what it asks for.

    Args:
        error: what the call raised.
        established: whether the call was made on a session that had worked before. There, 403
            and 404 mean that the server has forgotten it.

    Returns:
        The failure, or None if the exception does not come from the service (a defect of ours).
    """
    if isinstance(error, ServiceError):
        return error.failure
    if isinstance(error, TimeoutError):
        return Failure(FailureKind.UNKNOWN, _words(error), may_have_happened=True)
    if isinstance(error, tinker.APIResponseValidationError):
        return Failure(FailureKind.PERMANENT, _words(error), error.status_code)
    if isinstance(error, tinker.APIStatusError):
        return _by_status(error, established=established)
    if isinstance(error, tinker.APIConnectionError):
        return Failure(FailureKind.OUTAGE, _words(error), may_have_happened=True)
    if isinstance(error, tinker.RequestFailedError):
        return _failed_future(error)
    if isinstance(error, tinker.TinkerError):
        return Failure(FailureKind.PERMANENT, _words(error))
    return _outside_the_tree(error, established=established)


def _outside_the_tree(error: BaseException, *, established: bool) -> Failure | None:
    """Errors that the SDK raises as plain Python exceptions; the cause says what they are."""
    cause = error.__cause__
    if isinstance(error, RetryableException):
        # The SDK's own words, "Promise expired/broken", stand for any 410 to a poll: the answer is
        # gone, and the request may have been carried out on a model that is still there.
        lost = _says(_LOST_MODEL_WORDS, cause)
        kind = FailureKind.LOST_MODEL if lost else FailureKind.UNKNOWN
        return Failure(kind, _words(error), 410, may_have_happened=True)
    if isinstance(error, RuntimeError) and _says(_LOST_WORDS, error):
        return Failure(FailureKind.LOST_MODEL, _words(error))
    if isinstance(error, RuntimeError) and "poisoned" in str(error):
        known = None if cause is None else classify(cause, established=established)
        return known or Failure(FailureKind.UNKNOWN, _words(error), may_have_happened=True)
    if isinstance(error, ValueError) and isinstance(cause, tinker.APIStatusError):
        return _by_status(cause, established=established)
    if isinstance(error, AssertionError) and "sample_sequence_ids" in str(error):
        return Failure(FailureKind.PERMANENT, _words(error))
    if isinstance(error, KeyError) and error.args == ("loss:sum",):
        return Failure(FailureKind.PERMANENT, "the service returned no metric loss:sum")
    return None


def _by_status(error: tinker.APIStatusError, *, established: bool) -> Failure:
    status, wait = error.status_code, retry_after_seconds(dict(error.response.headers))
    text = _words(error)
    if _says(_CAPACITY_WORDS, error) and status != 402:
        return Failure(FailureKind.CAPACITY, text, status, wait)
    if _says(_LOST_WORDS, error) or status == 410:
        return Failure(FailureKind.LOST_MODEL, text, status, may_have_happened=True)
    if status in (403, 404):
        kind = FailureKind.LOST_MODEL if established else FailureKind.PERMANENT
        return Failure(kind, text, status)
    if status in _CAPACITY_STATUS:
        return Failure(FailureKind.CAPACITY, text, status, wait)
    if status in _PERMANENT_STATUS:
        return Failure(FailureKind.PERMANENT, text, status)
    return Failure(FailureKind.OUTAGE, text, status, wait, may_have_happened=True)


def _failed_future(error: tinker.RequestFailedError) -> Failure:
    text = _words(error)
    if _says(_CAPACITY_WORDS, error):
        return Failure(FailureKind.CAPACITY, text)
    if _says(_LOST_WORDS, error):
        return Failure(FailureKind.LOST_MODEL, text)
    if str(getattr(error.category, "value", error.category)).lower() == "user":
        return Failure(FailureKind.PERMANENT, text)
    return Failure(FailureKind.OUTAGE, text, 500, may_have_happened=True)


def session_forgotten(failure: Failure) -> bool:
    """Whether the service has forgotten the session, or the answer, that was asked about.

    Whoever opens a session of their own with every try may simply try again.
    """
    return failure.kind is FailureKind.LOST_MODEL and bool(_LOST_SESSION_WORDS.search(failure.text))


def checkpoint_gone(failure: Failure) -> bool:
    """Whether the loading of a checkpoint failed in a way that means that it is no longer kept.

    One answer alone does not prove it: a service that is going down may answer 410 to everything.

    Args:
        failure: of the load, on a session of its own.
    """
    if failure.kind is FailureKind.CAPACITY or session_forgotten(failure):
        return False
    if checkpoint_named_gone(failure):
        return True
    final = failure.kind in (FailureKind.LOST_MODEL, FailureKind.PERMANENT)
    return final and failure.status in (404, 410)


def checkpoint_named_gone(failure: Failure) -> bool:
    """Whether the words of a failure themselves say that a checkpoint is not there."""
    return bool(_LOST_CHECKPOINT_WORDS.search(failure.text))


def retry_after_seconds(headers: dict[str, str], now: datetime | None = None) -> float | None:
    """Read ``Retry-After`` (seconds or an HTTP date) or ``retry-after-ms``.

    Args:
        headers: response headers, names in any case.
        now: for a date; the current time by default.

    Returns:
        Seconds from now, at least 0; None where there is no readable header.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    if (milliseconds := _number(lower.get("retry-after-ms"))) is not None:
        return milliseconds / 1000.0
    raw = lower.get("retry-after")
    if raw is None:
        return None
    if (seconds := _number(raw)) is not None:
        return seconds
    try:
        moment = email.utils.parsedate_to_datetime(raw)
    except ValueError:
        return None
    if moment.tzinfo is None:  # "-0000": UTC, of a sender that does not name its zone
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0.0 <= value < 1e7 else None


def _says(words: re.Pattern[str], *errors: BaseException | None) -> bool:
    return any(error is not None and words.search(_everything(error)) for error in errors)


def _everything(error: BaseException) -> str:
    body: Any = getattr(error, "body", None)
    return f"{error} {body}"


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
