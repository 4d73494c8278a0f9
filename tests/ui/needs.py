"""What a test needs beside Python: skipped without it on a laptop, failed without it in CI."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")


def need(found: T | None, what: str) -> T:
    """Return what was found; without it skip the test, or fail it where CI is set."""
    if found is not None:
        return found
    if os.environ.get("CI"):
        pytest.fail(f"CI needs {what}")
    pytest.skip(f"needs {what}")
