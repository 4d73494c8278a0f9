"""An agent that solves every task by the book; its conversations are the demonstrations."""

import json
from collections.abc import Sequence

import numpy as np

from envs.protocols import SampledSequence
from envs.rendering import ChatRenderer
from envs.retail.tasks import RetailTask

_ASK_EMAIL = ("What is your email?", "Please tell me your email.")
_ASK_YES = ("I will {what}. Do you confirm?", "I will {what}. Shall I?")
_DONE = ("It is done.",)

_WHAT = {
    "cancel_order": "cancel order {order_id}, reason {reason}",
    "change_city": "send order {order_id} to {city}",
    "change_item": "change the {old_item} in order {order_id} to a {new_item}",
    "return_order": "return order {order_id}",
    "exchange_item": "exchange the {old_item} in order {order_id} for a {new_item}",
}


def ideal_turns(task: RetailTask, *, seed: int) -> list[str]:
    """Return what a careful agent writes, turn by turn, for one task.

    Asks for the email, looks up the user's orders, then either asks for a yes, acts and says so,
    or transfers a wish that the order's status does not allow. `seed` chooses among phrasings.
    """
    rng = np.random.default_rng(seed)
    (name, arguments) = task.actions[0]
    opening = [_pick(_ASK_EMAIL, rng), call_text("find_user", {"email": task.email})]
    if name == "transfer":
        return [*opening, call_text(name, arguments)]
    what = _WHAT[name].format(**arguments)
    ask = _pick(_ASK_YES, rng).format(what=what)
    return [*opening, ask, call_text(name, arguments), _pick(_DONE, rng)]


def call_text(name: str, arguments: dict[str, str]) -> str:
    """Return a tool call as the policy asks for it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _pick(choices: tuple[str, ...], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(0, len(choices)))]


class ScriptedPolicy:
    """A sampler that says prepared texts turn by turn; log-probabilities are 0.

    Args:
        texts: what it says, in order.
        renderer: encodes the texts.
    """

    def __init__(self, texts: Sequence[str], renderer: ChatRenderer) -> None:
        self._texts = list(texts)
        self._renderer = renderer

    async def sample(
        self,
        prompt_tokens: Sequence[int],
        *,
        num_samples: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        stop: Sequence[int] | Sequence[str],
    ) -> list[SampledSequence]:
        """Return the next text with the stop token; see `envs.protocols.Sampler`."""
        text = self._texts.pop(0) if self._texts else "Goodbye."
        tokens = [*self._renderer.encode(text), *self._renderer.stop_tokens()[:1]]
        return [SampledSequence(tokens=tokens, logprobs=[0.0] * len(tokens), stop_reason="stop")]
