"""Versions of what a run or a check was carried out with."""

from __future__ import annotations

import importlib.metadata
import platform

_NAMES = ("gated-rl", "tinker", "tinker-cookbook", "torch", "transformers", "pyarrow")


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that what is measured may depend on."""
    found = {"python": platform.python_version()}
    for name in _NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
