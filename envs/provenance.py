"""What code graded: SHA-256 over the source files of a grader."""

import hashlib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def code_sha256(modules: Iterable[ModuleType]) -> str:
    """Return one digest of the source files of several modules.

    It is the SHA-256 of the JSON object that maps each module's name to the SHA-256 of its file,
    keys sorted, no spaces; line endings count.
    """
    files = {
        module.__name__: hashlib.sha256(Path(inspect.getfile(module)).read_bytes()).hexdigest()
        for module in modules
    }
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def text_sha256(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()
