"""The errors that evidence code raises for input that cannot be used at all."""

from __future__ import annotations

_SHOWN = 120


def shorten(value: object, limit: int = _SHOWN) -> str:
    """Return a printable one-line form of any value, at most ``limit`` characters.

    Lone surrogates, line breaks and control characters are escaped, so that the text can be
    written to any terminal or log. Containers are shown by type and length only: printing a value
    nested ten thousand deep would itself fail.

    Args:
        value: anything.
        limit: longest text returned; longer texts end with an ellipsis.
    """
    if isinstance(value, str | bytes):
        text = ascii(value[: limit + 1])
    elif isinstance(value, dict | list | tuple | set | frozenset):
        text = f"{type(value).__name__} of {len(value)}"
    elif value is None or isinstance(value, bool | float):
        text = repr(value)
    elif isinstance(value, int):
        bits = value.bit_length()
        text = repr(value) if bits <= 4 * limit else f"integer of {bits} bits"
    else:
        text = type(value).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


class InputError(ValueError):
    """A value that came from outside cannot be used.

    Attributes:
        field: the JSON path or name of the field.
        value: what was found, as given.
        expected: what would have been right, in words.
        where: the file or document it was found in, if known.
    """

    def __init__(
        self, field: str, value: object, expected: str, *, where: str | None = None
    ) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        self.where = where
        super().__init__(field, value, expected)

    def __str__(self) -> str:
        place = f"{shorten(self.where)[1:-1]}: " if self.where else ""
        return f"{place}{self.field}: expected {self.expected}, found {shorten(self.value)}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.field, self.value, self.expected, self.where)


class ConflictError(InputError):
    """Something that may be written once exists already with other content."""


class StoreError(InputError):
    """An object store does not answer, or refuses. What it holds is not known, and not lost."""


def _rebuild(
    cls: type[InputError], field: str, value: object, expected: str, where: str | None
) -> InputError:
    """Recreate an error from its parts: worker processes send errors as pickles."""
    return cls(field, value, expected, where=where)
