"""Errors of the loss package: a bad input array, or a bad loss configuration."""


class LossInputError(ValueError):
    """The arrays given to a loss do not fit together or hold a value that no loss can use.

    The message names the field, the value found and what was expected.
    """


class LossConfigError(ValueError):
    """A loss, advantage or aggregation setting is missing, unknown or out of range.

    The message names the field, the value found and the allowed ones.
    """
