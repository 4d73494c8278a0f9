"""How a moving teacher is restrained: parameter averaging, or logits between two models."""

import torch
from torch import Tensor

from losses.errors import LossConfigError
from losses.inputs import require_shape


def require_share(name: str, value: float) -> None:
    """Refuse a mixing share outside [0, 1].

    Raises:
        LossConfigError: names the share and its value.
    """
    if not 0.0 <= value <= 1.0:
        message = f"{name}: {value}; expected a number in [0, 1]"
        raise LossConfigError(message)


def ema_update(teacher: Tensor, student: Tensor, *, update_rate: float) -> Tensor:
    """Return ``(1 - rate) * teacher + rate * student``: the rate is the student's share.

    Args:
        teacher: one parameter of the teacher; not changed.
        student: the same parameter of the student.
        update_rate: 0 leaves the teacher as it is, 1 copies the student.

    Raises:
        LossConfigError: if the rate is outside [0, 1].
        LossInputError: if the shapes differ.

    Sources:
        arXiv:2601.20802, exponential moving average teacher, and its released code.
    """
    require_share("update_rate", update_rate)
    require_shape("student", student, tuple(teacher.shape))
    return teacher * (1.0 - update_rate) + student * update_rate


def trust_region_logits(reference: Tensor, current: Tensor, *, mix: float) -> Tensor:
    """Return logits on the line from the reference model to the current one.

    Args:
        reference: logits of the frozen reference.
        current: logits of the current student on the same input.
        mix: the current model's share, in [0, 1].

    Raises:
        LossConfigError: if the share is outside [0, 1].
        LossInputError: if the shapes differ.

    Sources:
        arXiv:2601.20802, eq. 10.
    """
    require_share("mix", mix)
    require_shape("current", current, tuple(reference.shape))
    return torch.lerp(reference, current, mix)
