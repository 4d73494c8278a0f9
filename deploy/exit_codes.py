"""Exit codes of the command line, one per kind of ending."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process's exit status says.

    Attributes:
        OK: supported, or done where there is no verdict.
        DEFECT: the program or the machine failed.
        BAD_INPUT: a file, an option or a value is wrong; the message names it.
        REFUTED: the run ended with the verdict refuted.
        INCONCLUSIVE: the run ended with the verdict inconclusive.
        STOPPED_BY_GATE: a gate refused; nothing was spent after it.
        CAPACITY: the service had no capacity, or it or the run's object store is out of reach; the
            same command goes on later.
    """

    OK = 0
    DEFECT = 1
    BAD_INPUT = 2
    REFUTED = 10
    INCONCLUSIVE = 11
    STOPPED_BY_GATE = 20
    CAPACITY = 30
