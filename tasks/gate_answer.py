"""What a gate's task returns: the gate's answer, and the blocks it adds to the structured result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evidence.gate import GateResult


@dataclass(frozen=True, slots=True)
class GateAnswer:
    """A gate's answer with what was measured for it.

    Attributes:
        result: status, reasons, checks, what was read.
        blocks: blocks of the structured result, by name, as the contract has them.
    """

    result: GateResult
    blocks: Mapping[str, Any] = field(default_factory=dict)
