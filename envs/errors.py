"""Errors that an environment raises.

    EnvError
    ├── EnvInputError (ValueError)      settings, data or a caller's argument is wrong
    └── EnvServiceError (RuntimeError)  a simulator or judge did not answer usefully after retries

Neither is ever turned into a reward: a wrong *reply of the policy* has a defined score, while
these two stop the episode and are reported by whoever asked for it.
"""


class EnvError(Exception):
    """Base class of the errors raised in `envs`."""


class EnvInputError(EnvError, ValueError):
    """A setting, a data file or an argument is not what the environment needs.

    Args:
        field: what is wrong, as a dotted path where it is a setting.
        value: what was given (shortened in the message).
        expected: what would have been right.
        where: the file or object it was read from, if any.
    """

    def __init__(self, field: str, value: object, expected: str, where: str | None = None) -> None:
        self.field, self.value, self.expected, self.where = field, value, expected, where
        shown = repr(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        place = f" in {where}" if where else ""
        super().__init__(f"{field} is {shown}{place}; expected {expected}")


class EnvServiceError(EnvError, RuntimeError):
    """A served partner (user simulator or judge) failed after every retry.

    Args:
        partner: `simulator` or `judge`.
        reason: what went wrong the last time.
        attempts: how often it was asked.
        problems: what was wrong with each answer, by the names of `envs.outcomes`.
    """

    def __init__(
        self, partner: str, reason: str, attempts: int, problems: tuple[str, ...] = ()
    ) -> None:
        self.partner, self.reason, self.attempts = partner, reason, attempts
        self.problems = problems
        super().__init__(f"{partner} failed after {attempts} attempts: {reason}")
