"""The one form in which the embedded service says no.

Status and code follow what deployed Tinker-compatible services answer: 400 ``invalid_request``,
401 ``unauthorized``, 404 ``not_found``, 409 ``conflict``, 410 ``model_lost``, 413 ``too_large``,
429 ``saturated``, 503 ``saturated`` or ``engine_unreachable``, 500 ``internal``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An answer other than success, decided anywhere in the service.

    The body never is empty: clients take an empty 400 for the fault of a proxy and retry it.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status."""
        self.code = code
        """Short machine-readable reason, the body's ``error``."""
        self.message = message
        """One sentence for people: field, value, expectation."""
        self.headers = dict(headers or {})
        """Response headers, for instance ``Retry-After``."""
        self.fields = dict(fields or {})
        """Further fields of the body."""

    def body(self) -> dict[str, Any]:
        """Return the JSON body: ``error``, ``message`` and, for older clients, ``detail``."""
        return {
            "error": self.code,
            "message": self.message,
            "detail": self.message,
            **self.fields,
        }


def invalid_request(message: str) -> ApiError:
    """Return a 400: the request itself is wrong and must not be repeated."""
    return ApiError(400, "invalid_request", message)


def not_found(message: str) -> ApiError:
    """Return a 404: nothing of that name was ever here."""
    return ApiError(404, "not_found", message)


def conflict(message: str) -> ApiError:
    """Return a 409 for a reused record; ``x-should-retry`` tells clients not to repeat it."""
    return ApiError(409, "conflict", message, headers={"x-should-retry": "false"})


def model_lost(message: str) -> ApiError:
    """Return a 410: the weights lived in memory that is gone; restore from a checkpoint."""
    return ApiError(410, "model_lost", message)


def saturated(message: str, *, status: int, retry_after_seconds: float | None) -> ApiError:
    """Return a capacity answer, with ``Retry-After`` where a wait is known.

    Args:
        message: which limit is reached.
        status: 429 or 503.
        retry_after_seconds: seconds to wait; clients obey values above 0 and up to 60.
    """
    headers = {} if retry_after_seconds is None else {"Retry-After": f"{retry_after_seconds:g}"}
    return ApiError(status, "saturated", message, headers=headers)
