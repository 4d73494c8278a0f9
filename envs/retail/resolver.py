"""Solve a retail wish again from its words and the database, without looking at its label.

It shares nothing with the code that made the tasks: it reads the order number, products, city and
reason out of the message and the order's status out of the database.
"""

import json
import re
from typing import NamedTuple

from envs.retail.data import Database

RESOLVER_ID = "envs.retail.resolver version 1"

_ORDER = re.compile(r"\bW\d+\b")
_REASON = re.compile(r"[Rr]eason:? (\w+)")
_CITY = re.compile(r"(?:send order W\d+ to|should go to) (\w+)")
_SWAPS = (
    re.compile(r"I want a (?P<new>\w+), not the (?P<old>\w+)"),
    re.compile(r"change the (?P<old>\w+) in order W\d+ to a (?P<new>\w+)"),
    re.compile(r"exchange the (?P<old>\w+) in order W\d+ for a (?P<new>\w+)"),
    re.compile(r"swap the (?P<old>\w+) for a (?P<new>\w+)"),
)


class Resolution(NamedTuple):
    """The right call as JSON text, and why it is right."""

    answer: str
    reasoning: str


def resolve(message: str, database: Database) -> Resolution:
    """Return the call that fulfils a wish, or the transfer if it is not allowed.

    Raises:
        ValueError: if the message names no order or no wish that can be recognised.
    """
    found = _ORDER.search(message)
    if found is None or found.group() not in database["orders"]:
        raise ValueError(f"no order in {message!r}")
    order_id = found.group()
    status = database["orders"][order_id]["status"]
    name, needed, arguments = _wish(message, order_id)
    if status != needed:
        answer = ["transfer", {"summary": "not allowed"}]
        why = f"{order_id} is {status}, and {name} needs {needed}"
    else:
        answer = [name, arguments]
        why = f"{order_id} is {status}, as {name} needs"
    return Resolution(answer=json.dumps(answer, sort_keys=True), reasoning=why)


def _wish(message: str, order_id: str) -> tuple[str, str, dict[str, str]]:
    """The tool that a message asks for, the status it needs, and its arguments."""
    lower = message.lower()
    if "cancel" in lower and (reason := _REASON.search(message)):
        return "cancel_order", "pending", {"order_id": order_id, "reason": reason.group(1)}
    if city := _CITY.search(message):
        return "change_city", "pending", {"order_id": order_id, "city": city.group(1)}
    for pattern in _SWAPS:
        if swap := pattern.search(message):
            items = {"old_item": swap.group("old"), "new_item": swap.group("new")}
            delivered = "exchange" in lower or "swap" in lower
            name = "exchange_item" if delivered else "change_item"
            needed = "delivered" if delivered else "pending"
            return name, needed, {"order_id": order_id, **items}
    if "return" in lower or "take back" in lower:
        return "return_order", "delivered", {"order_id": order_id}
    raise ValueError(f"no wish recognised in {message!r}")
