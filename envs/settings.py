"""Read an environment's settings: known names, right types, and an error that names the field."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from envs.errors import EnvInputError


class SettingsReader:
    """Takes settings out of a mapping and refuses what is left over.

    Args:
        settings: the mapping, from an execution file's `environment.settings`.
        environment: its name, for messages.
    """

    def __init__(self, settings: Mapping[str, Any], *, environment: str) -> None:
        self._settings = dict(settings)
        self._environment = environment

    def take_int(self, name: str, *, default: int, low: int, high: int) -> int:
        """Return a whole number within inclusive bounds.

        Raises:
            EnvInputError: if it is not one.
        """
        value = self._settings.pop(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._error(name, value, f"a whole number from {low} to {high}")
        return value

    def take_float(self, name: str, *, default: float, low: float, high: float) -> float:
        """Return a finite number within inclusive bounds.

        Raises:
            EnvInputError: if it is not one.
        """
        value = self._settings.pop(name, default)
        if type(value) not in (int, float) or not isfinite(value) or not low <= value <= high:
            raise self._error(name, value, f"a number from {low} to {high}")
        return float(value)

    def take_bool(self, name: str, *, default: bool) -> bool:
        """Return true or false.

        Raises:
            EnvInputError: if it is something else.
        """
        value = self._settings.pop(name, default)
        if type(value) is not bool:
            raise self._error(name, value, "true or false")
        return value

    def take_text(self, name: str, *, default: str | None) -> str | None:
        """Return a text, or None where it is missing or null.

        Raises:
            EnvInputError: if it is something else.
        """
        value = self._settings.pop(name, default)
        if value is not None and type(value) is not str:
            raise self._error(name, value, "a text or null")
        return value

    def take_texts(self, name: str) -> dict[str, str]:
        """Return a mapping of text to text, empty where it is missing or null.

        Raises:
            EnvInputError: if it is something else.
        """
        value = self._settings.pop(name, None)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(
            isinstance(key, str) and isinstance(text, str) for key, text in value.items()
        ):
            raise self._error(name, value, "a mapping of text to text")
        return dict(value)

    def finish(self) -> None:
        """Refuse settings that nothing took.

        Raises:
            EnvInputError: naming the first of them.
        """
        if self._settings:
            name = sorted(self._settings)[0]
            raise self._error(name, self._settings[name], f"no such setting of {self._environment}")

    def _error(self, name: str, value: object, expected: str) -> EnvInputError:
        return EnvInputError(f"environment.settings.{name}", value, expected)
