"""What takes part in the score of a conversation: modules and partners, for an evaluator's identity."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from envs import (
    conversation,
    dialogue,
    outcomes,
    rendering,
    served,
    served_judge,
    served_user,
    strict_json,
    token_log,
    tool_calls,
    xml_calls,
)
from envs.provenance import code_sha256
from envs.served import Partner

_CONVERSATION = (
    conversation,
    dialogue,
    outcomes,
    rendering,
    strict_json,
    token_log,
    tool_calls,
    xml_calls,
)


def conversation_sha256(
    own: Iterable[ModuleType], *, simulator: Partner | None, judge: Partner | None
) -> str:
    """Return the digest of every module whose code takes part in a score.

    Args:
        own: the environment's modules, those of its own user and judge included.
        simulator: the served model that plays the user, if one does.
        judge: the served model that scores, if one does.
    """
    return code_sha256(grading_modules(own, simulator=simulator, judge=judge))


def grading_modules(
    own: Iterable[ModuleType], *, simulator: Partner | None, judge: Partner | None
) -> list[ModuleType]:
    """The environment's modules, those of every conversation, and those of served partners."""
    found = [*own, *_CONVERSATION]
    if simulator is not None:
        found += [served, served_user]
    if judge is not None:
        found += [served, served_judge]
    return list(dict.fromkeys(found))


def partner_records(
    *, simulator: Partner | None, judge: Partner | None
) -> dict[str, dict[str, Any] | None]:
    """What determines the answers of served partners by role; None where there is none."""
    roles = {"simulator": simulator, "judge": judge}
    return {role: None if one is None else one.provenance() for role, one in roles.items()}
