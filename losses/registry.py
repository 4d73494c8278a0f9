"""From a configuration mapping to a token loss: the only place that knows their names."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from losses.anchors import ANCHORS, Anchor
from losses.cispo import Cispo
from losses.dppo import Dppo
from losses.dppo_rule import TOPK_DIVERGENCES, Divergence, DppoRule
from losses.errors import LossConfigError
from losses.grpo_clip import GrpoClip
from losses.importance_sampling import ImportanceSampling
from losses.inputs import TokenLoss
from losses.sdpo_logit import SdpoLogit, Support
from losses.sdpo_token_level import SdpoTokenLevel

Builder: TypeAlias = Callable[["LossFields"], TokenLoss]


class LossFields:
    """The fields of one configuration, each of which must be read exactly as it was written."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.kind = config.get("kind")

    def check_names(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
        """Refuse missing and unknown fields.

        Raises:
            LossConfigError: names every such field and the ones that are allowed.
        """
        allowed = ("kind", *required, *optional)
        missing = [name for name in required if name not in self.config]
        unknown = sorted(str(name) for name in self.config if name not in allowed)
        for label, names in (("missing", missing), ("unknown", unknown)):
            if names:
                message = (
                    f"loss {self.kind!r}: {label} {', '.join(names)}; "
                    f"expected {', '.join(required) or 'no settings'}"
                    + (f" (optional: {', '.join(optional)})" if optional else "")
                )
                raise LossConfigError(message)

    def number(self, name: str) -> float:
        """Return a field that must be a finite number.

        Raises:
            LossConfigError: names the field and its value.
        """
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            message = f"loss {self.kind!r}: {name}: {value!r}; expected a number"
            raise LossConfigError(message)
        if not math.isfinite(value):
            message = f"loss {self.kind!r}: {name}: {value!r}; expected a finite number"
            raise LossConfigError(message)
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """Return a field that may be null."""
        return None if self.config.get(name) is None else self.number(name)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a field that must be text.

        Raises:
            LossConfigError: names the field and its value.
        """
        value = self.config.get(name, default)
        if not isinstance(value, str):
            message = f"loss {self.kind!r}: {name}: {value!r}; expected text"
            raise LossConfigError(message)
        return value

    def anchor(self, default: str | None = None) -> Anchor:
        """Return the ``anchor`` field.

        Raises:
            LossConfigError: names the value and the allowed ones.
        """
        value = self.text("anchor", default)
        if value not in ANCHORS:
            message = f"loss {self.kind!r}: anchor: {value!r}; expected one of {list(ANCHORS)}"
            raise LossConfigError(message)
        return value


def build_importance_sampling(fields: LossFields) -> TokenLoss:
    """Build ``importance_sampling``, which has no settings."""
    fields.check_names(())
    return ImportanceSampling()


def build_grpo_clip(fields: LossFields) -> TokenLoss:
    """Build ``grpo_clip``."""
    fields.check_names(
        ("clip_low_threshold", "clip_high_threshold", "dual_clip"),
        ("anchor", "log_ratio_limit_nats"),
    )
    return GrpoClip(
        clip_low_threshold=fields.number("clip_low_threshold"),
        clip_high_threshold=fields.number("clip_high_threshold"),
        dual_clip=fields.number_or_none("dual_clip"),
        anchor=fields.anchor("sampling"),
        log_ratio_limit_nats=fields.number_or_none("log_ratio_limit_nats"),
    )


def build_dppo(fields: LossFields) -> TokenLoss:
    """Build ``dppo``; ``top_k`` is how many tokens the caller's divergence is taken over.

    Raises:
        LossConfigError: if ``top_k`` is missing for a top-K divergence or given for another.
    """
    fields.check_names(("divergence", "anchor", "delta_low", "delta_high", "ratio_cap"), ("top_k",))
    rule = DppoRule(
        divergence=cast("Divergence", fields.text("divergence")),
        anchor=fields.anchor(),
        delta_low=fields.number_or_none("delta_low"),
        delta_high=fields.number_or_none("delta_high"),
    )
    top_k = fields.config.get("top_k")
    if (rule.divergence in TOPK_DIVERGENCES) != (top_k is not None):
        wanted = "a whole number" if rule.divergence in TOPK_DIVERGENCES else "null"
        message = (
            f"loss 'dppo': top_k: {top_k!r} with divergence {rule.divergence!r}; expected {wanted}"
        )
        raise LossConfigError(message)
    return Dppo(rule=rule, ratio_cap=fields.number_or_none("ratio_cap"))


def build_cispo(fields: LossFields) -> TokenLoss:
    """Build ``cispo``."""
    fields.check_names(("clip_low_threshold", "clip_high_threshold"))
    return Cispo(
        clip_low_threshold=fields.number("clip_low_threshold"),
        clip_high_threshold=fields.number("clip_high_threshold"),
    )


def build_sdpo_token(fields: LossFields) -> TokenLoss:
    """Build ``sdpo_token``."""
    fields.check_names(("is_clip",), ("anchor",))
    return SdpoTokenLevel(
        is_clip=fields.number_or_none("is_clip"), anchor=fields.anchor("sampling")
    )


def build_sdpo_logit(fields: LossFields) -> TokenLoss:
    """Build ``sdpo_logit``; ``top_k`` null means that the K tokens are the whole vocabulary.

    Raises:
        LossConfigError: if ``add_tail`` is neither true nor false.
    """
    fields.check_names(("alpha", "top_k", "add_tail", "is_clip"), ("anchor",))
    add_tail = fields.config.get("add_tail")
    if not isinstance(add_tail, bool):
        message = f"loss 'sdpo_logit': add_tail: {add_tail!r}; expected true or false"
        raise LossConfigError(message)
    support: Support = "topk_tail" if add_tail else "topk_renormalised"
    return SdpoLogit(
        alpha=fields.number("alpha"),
        support="full" if fields.config.get("top_k") is None else support,
        is_clip=fields.number_or_none("is_clip"),
        anchor=fields.anchor("sampling"),
    )


BUILDERS: dict[str, Builder] = {
    "importance_sampling": build_importance_sampling,
    "grpo_clip": build_grpo_clip,
    "dppo": build_dppo,
    "cispo": build_cispo,
    "sdpo_token": build_sdpo_token,
    "sdpo_logit": build_sdpo_logit,
}
KINDS: tuple[str, ...] = tuple(BUILDERS)


def make_loss(config: Mapping[str, Any]) -> TokenLoss:
    """Build the token loss that a configuration names.

    Every setting that changes a gradient must be written out; there are no silent defaults. A
    setting that may be absent (a cap, a dual clip) is written as null.

    Args:
        config: ``{"kind": ..., settings}`` as in an execution file.

    Returns:
        A loss that treats every token by itself.

    Raises:
        LossConfigError: if the kind is unknown, a setting is missing, unknown, of the wrong type or
            out of range; the message names the allowed ones.
    """
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in BUILDERS:
        message = f"loss kind: {kind!r}; expected one of {list(KINDS)}"
        raise LossConfigError(message)
    return BUILDERS[kind](LossFields(config))
