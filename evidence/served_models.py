"""Which served model stands in for one that is not served."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log
from typing import Self

_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z0-9])")
_UNIT = {"b": 1.0, "m": 0.001}


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model's name taken apart.

    Attributes:
        name: as served.
        family: what stands before the size, in lower case, without the organisation.
        stem: the family's leading letters (``qwen`` of ``qwen3.5``).
        billions: parameters in billions, None where the name does not say.
        variant: what stands after the size, e.g. ``instruct``.
    """

    name: str
    family: str
    stem: str
    billions: float | None
    variant: str

    @classmethod
    def of(cls, name: str) -> Self:
        """Take a name apart; a name without a size is a family of its own."""
        plain = name.rsplit("/", 1)[-1]
        size = _SIZE.search(plain)
        family = (plain[: size.start()] if size else plain).strip("-_ ").lower()
        stem = re.match(r"[a-z]*", family)
        return cls(
            name=name,
            family=family,
            stem=stem.group() if stem else "",
            billions=float(size[1]) * _UNIT[size[2].lower()] if size else None,
            variant=plain[size.end() :].strip("-_ ").lower() if size else "",
        )


def closest_served_model(requested: str, served: Iterable[str]) -> tuple[str | None, str]:
    """Return the served model that is closest to a requested one, and why it was chosen.

    Only models of the same family come into question: the same name before the size, or, where
    none is, the same leading letters. Among them the closest parameter count wins (as a ratio),
    then the same variant, then the smaller model, then the alphabet. The order of ``served`` does
    not matter.

    Args:
        requested: the spec's base model.
        served: names as the service lists them.

    Returns:
        (name, reason); the name is None where no model of the family is served.
    """
    names = sorted(set(served))
    if requested in names:
        return requested, f"{requested} is served"
    wanted = ModelName.of(requested)
    models = [ModelName.of(name) for name in names]
    relatives = [model for model in models if model.family == wanted.family]
    kind = f"family {wanted.family}"
    if not relatives and wanted.stem:
        relatives = [model for model in models if model.stem == wanted.stem]
        kind = f"family {wanted.stem}, no {wanted.family} being served"
    if not relatives:
        listed = ", ".join(names) or "no model"
        return None, f"{requested} is not served and no model of its family is (served: {listed})"
    chosen = min(relatives, key=lambda model: _distance(wanted, model))
    return chosen.name, (
        f"{requested} is not served; {chosen.name} is the closest served model by size ({kind})"
    )


def _distance(wanted: ModelName, model: ModelName) -> tuple[float, bool, float, str]:
    sizes = (wanted.billions, model.billions)
    ratio = abs(log(sizes[0] / sizes[1])) if sizes[0] and sizes[1] else inf
    return round(ratio, 9), model.variant != wanted.variant, model.billions or inf, model.name
