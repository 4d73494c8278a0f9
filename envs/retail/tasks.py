"""The shop's tasks: one wish per order, its right outcome, and the split by user."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from envs.errors import EnvInputError
from envs.retail.data import (
    CITIES,
    NAMES,
    ORDERS_PER_USER,
    PRICES,
    SOLD_OUT,
    build_database,
    database_sha256,
    fresh_database,
)
from envs.retail.tools import REASONS, Shop

Kind = Literal["cancel", "city", "change", "return", "exchange", "refused"]

TRAIN_USERS = 34
"""The first users' orders are for training, the others' for evaluation."""

_SEED = 20260102

_OPENINGS: dict[Kind, tuple[str, ...]] = {
    "cancel": (
        "I want to cancel order {order_id}. Reason: {reason}.",
        "Please cancel my order {order_id}, reason {reason}.",
    ),
    "city": (
        "Please send order {order_id} to {city}.",
        "I moved. Order {order_id} should go to {city}.",
    ),
    "change": (
        "In order {order_id} I want a {new_item}, not the {old_item}.",
        "Please change the {old_item} in order {order_id} to a {new_item}.",
    ),
    "return": ("I want to return order {order_id}.", "Please take back order {order_id}."),
    "exchange": (
        "I want to exchange the {old_item} in order {order_id} for a {new_item}.",
        "Order {order_id}: please swap the {old_item} for a {new_item}.",
    ),
    "refused": (),
}

Action = tuple[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class RetailTask:
    """One wish of one user about one order.

    Attributes:
        task_id: `retail-W123`.
        kind: what is wished; `refused` is a wish that the order's status does not allow.
        email: of the user, told when asked.
        opening: the user's first message.
        actions: the calls that change the database as it should be changed.
        goal_sha256: digest of the database after them.
    """

    task_id: str
    kind: Kind
    email: str
    opening: str
    actions: tuple[Action, ...]
    goal_sha256: str


def build_tasks() -> tuple[tuple[RetailTask, ...], tuple[RetailTask, ...]]:
    """Return (training tasks, held-out tasks): one per order, users disjoint.

    Kinds and details are drawn with `numpy.random.default_rng`; one wish in eight is one that the
    order's status does not allow.
    """
    rng = np.random.default_rng(_SEED)
    database = build_database()
    tasks = [
        _task(order_id, order, rng=rng) for order_id, order in sorted(database["orders"].items())
    ]
    trained = {f"{name}@mail.com" for name in NAMES[:TRAIN_USERS]}
    train = tuple(task for task in tasks if task.email in trained)
    held_out = tuple(task for task in tasks if task.email not in trained)
    if len(train) != TRAIN_USERS * ORDERS_PER_USER:
        raise EnvInputError("retail tasks", len(train), f"{TRAIN_USERS * ORDERS_PER_USER}")
    return train, held_out


def _task(order_id: str, order: dict[str, Any], *, rng: np.random.Generator) -> RetailTask:
    """Draw one wish about an order."""
    allowed: tuple[Kind, ...] = (
        ("cancel", "city", "change") if order["status"] == "pending" else ("return", "exchange")
    )
    barred: tuple[Kind, ...] = (
        ("return", "exchange") if order["status"] == "pending" else ("cancel", "city", "change")
    )
    refused = int(rng.integers(0, 8)) == 0
    choices = barred if refused else allowed
    wish = choices[int(rng.integers(0, len(choices)))]
    details = _details(order_id, order, rng=rng)
    openings = _OPENINGS[wish]
    opening = openings[int(rng.integers(0, len(openings)))].format(**details)
    action: Action = ("transfer", {"summary": "not allowed"}) if refused else _action(wish, details)
    return RetailTask(
        task_id=f"retail-{order_id}",
        kind="refused" if refused else wish,
        email=order["email"],
        opening=opening,
        actions=(action,),
        goal_sha256=_goal(action),
    )


def _details(order_id: str, order: dict[str, Any], *, rng: np.random.Generator) -> dict[str, str]:
    """Everything a wish about this order may name."""
    cities = [city for city in CITIES if city != order["city"]]
    items = [item for item in PRICES if item not in (*order["items"], *SOLD_OUT)]
    return {
        "order_id": order_id,
        "reason": REASONS[int(rng.integers(0, len(REASONS)))],
        "city": cities[int(rng.integers(0, len(cities)))],
        "old_item": order["items"][0],
        "new_item": items[int(rng.integers(0, len(items)))],
    }


_ACTIONS: dict[Kind, tuple[str, tuple[str, ...]]] = {
    "cancel": ("cancel_order", ("order_id", "reason")),
    "city": ("change_city", ("order_id", "city")),
    "change": ("change_item", ("order_id", "old_item", "new_item")),
    "return": ("return_order", ("order_id",)),
    "exchange": ("exchange_item", ("order_id", "old_item", "new_item")),
}


def _action(wish: Kind, details: dict[str, str]) -> Action:
    name, arguments = _ACTIONS[wish]
    return name, {argument: details[argument] for argument in arguments}


def _goal(action: Action) -> str:
    """Digest of the database after the right call."""
    shop = Shop(fresh_database())
    result = shop.call(*action)
    if result.error is not None:
        raise EnvInputError(
            "right action of a retail task", action, f"a call that works: {result.error}"
        )
    return database_sha256(shop.database)
