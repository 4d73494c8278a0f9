"""Which checks an experiment needs, from its declared features and explicit contracts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evidence.errors import InputError
from evidence.values import as_list, as_mapping, jsonable, spec_mapping

ApplicabilityStatus = Literal["required", "not_applicable", "unknown"]

COVERED_FEATURES: Mapping[str, tuple[str, ...]] = {
    "correctness_preflight": ("custom_loss", "custom_optimizer"),
    "restoration_preflight": ("paired_training_arms", "checkpoint_restore"),
    "generation_audit": ("generated_training_data",),
    "decision_rule": ("paired_comparison", "adaptive_selection"),
    "activation_gate": (),
}
"""Each check, and the experiment features that make it necessary."""

_SHORT_NAMES: Mapping[str, str] = {
    "correctness": "correctness_preflight",
    "restoration": "restoration_preflight",
    "activation": "activation_gate",
    "decision": "decision_rule",
}


@dataclass(frozen=True, slots=True)
class Applicability:
    """Whether one check applies.

    Attributes:
        check: name of the check, which is also the name of its block in the spec.
        status: ``unknown`` where a feature it depends on is not declared as true or false.
        enforce: whether the check must be carried out; also true while that is unknown.
        reasons: what the status rests on.
        features: the covered features, as declared (None where not declared).
    """

    check: str
    status: ApplicabilityStatus
    enforce: bool
    reasons: tuple[str, ...]
    features: Mapping[str, Any]

    def to_record(self) -> dict[str, Any]:
        """Return the contract's object, keys in its order."""
        return {
            "check": self.check,
            "status": self.status,
            "enforce": self.enforce,
            "reasons": list(self.reasons),
            "features": dict(self.features),
        }


def check_applicability(spec: object, check: str) -> Applicability:
    """Say whether a check is required by a spec.

    A covered feature that is true requires the check, whatever the check's own block says; so does
    a block that states ``required: true`` or ``applicable: true``, any decision rule, and an
    activation gate with diagnostics that does not opt out. Only features that are declared false
    let a check be skipped: a missing declaration leaves it unknown, and what is unknown is
    enforced.

    Args:
        spec: a spec, a triage document that holds one, or a parsed `Spec`; any JSON value.
        check: one of `COVERED_FEATURES`, or its gate's short name (``correctness``).

    Raises:
        InputError: if ``check`` is not a known check.
    """
    check = _SHORT_NAMES.get(check, check)
    if check not in COVERED_FEATURES:
        raise InputError("check", check, f"one of {', '.join(COVERED_FEATURES)}")
    document = spec_mapping(spec)
    declared = as_mapping(document.get("experiment_features"))
    features = {name: declared.get(name) for name in COVERED_FEATURES[check]}
    status, reasons = _judge(check, document.get(check), features)
    return Applicability(
        check=check,
        status=status,
        enforce=status != "not_applicable",
        reasons=reasons,
        features={name: jsonable(value) for name, value in features.items()},
    )


def _judge(
    check: str, block: object, features: Mapping[str, Any]
) -> tuple[ApplicabilityStatus, tuple[str, ...]]:
    wanted = [name for name, value in features.items() if value is True]
    if wanted:
        return "required", tuple(f"experiment_features: {name} is true" for name in wanted)
    flags = [as_mapping(block).get(flag) for flag in ("required", "applicable")]
    if True in [flag for flag in flags if isinstance(flag, bool)]:
        return "required", (f"spec.{check} requires it",)
    if check == "decision_rule" and block not in (None, {}, []):
        return "required", (f"spec.{check} is present",)
    opts_out = any(flag is False for flag in flags)
    if check == "activation_gate" and as_list(as_mapping(block).get("checks")) and not opts_out:
        return "required", (f"spec.{check} is present",)
    unclear = [name for name, value in features.items() if value is not False]
    if unclear:
        return "unknown", tuple(
            f"experiment_features: {name} is not declared as true or false" for name in unclear
        )
    if any(flag is not None and not isinstance(flag, bool) for flag in flags):
        return "unknown", (f"spec.{check}: required is neither true nor false",)
    if False in flags:
        return "not_applicable", (f"spec.{check} opts out and no feature it covers is true",)
    return "not_applicable", (f"spec.{check} does not ask for it and no feature it covers is true",)
