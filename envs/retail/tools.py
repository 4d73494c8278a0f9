"""The shop's nine tools. Each checks its arguments and the policy's conditions on the database."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from envs.conversation import ToolResult
from envs.retail.data import CITIES, PRICES, Database

REASONS = ("mistake", "late", "unwanted")
"""Accepted reasons of a cancellation."""

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "find_user": ("email",),
    "get_order": ("order_id",),
    "get_product": ("item",),
    "cancel_order": ("order_id", "reason"),
    "change_city": ("order_id", "city"),
    "change_item": ("order_id", "old_item", "new_item"),
    "return_order": ("order_id",),
    "exchange_item": ("order_id", "old_item", "new_item"),
    "transfer": ("summary",),
}
"""Every tool with the names of its arguments, all of them texts."""

WRITES = ("cancel_order", "change_city", "change_item", "return_order", "exchange_item")
"""Tools that change an order."""

TRANSFER = "transfer"
"""The tool that hands over to a human and ends the conversation."""


class _ToolError(Exception):
    """Why a call was refused, in words for the agent."""


class Shop:
    """One episode's database and the tools over it.

    Args:
        database: changed in place; give each episode its own.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Execute one call; a wrong name or argument is an error result."""
        if name not in SIGNATURES:
            problem = f"unknown tool {name[:40]}"
            return ToolResult(text=f"Error: {problem}.", error=problem, unknown=True)
        try:
            checked = _check_arguments(name, arguments)
            answer = _TOOLS[name](self.database, **checked)
        except _ToolError as error:
            return ToolResult(text=f"Error: {error}.", error=str(error))
        return ToolResult(text=json.dumps(answer), ends=name == TRANSFER)


def _check_arguments(name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Refuse missing, unknown and non-text arguments."""
    wanted = SIGNATURES[name]
    for argument in wanted:
        if not isinstance(arguments.get(argument), str) or not arguments[argument]:
            raise _ToolError(f"{name} needs {argument}")
    for argument in arguments:
        if argument not in wanted:
            raise _ToolError(f"{name} takes no {argument[:40]}")
    return {argument: arguments[argument] for argument in wanted}


def _order(database: Database, order_id: str, *, status: str | None = None) -> dict[str, Any]:
    """The order of that id, which must have the given status."""
    found: dict[str, Any] | None = database["orders"].get(order_id)
    if found is None:
        raise _ToolError(f"no order {order_id[:40]}")
    if status is not None and found["status"] != status:
        raise _ToolError(f"order {order_id} is {found['status']}, not {status}")
    return found


def _swap(database: Database, order: dict[str, Any], old_item: str, new_item: str) -> None:
    """Replace one item of an order by another that is in stock."""
    if old_item not in order["items"]:
        raise _ToolError(f"no {old_item[:40]} in this order")
    if new_item not in PRICES:
        raise _ToolError(f"no product {new_item[:40]}")
    if new_item == old_item or database["products"][new_item]["stock"] < 1:
        raise _ToolError(f"{new_item} cannot be given")
    order["items"] = [new_item if item == old_item else item for item in order["items"]]


def _find_user(database: Database, email: str) -> dict[str, Any]:
    user: dict[str, Any] | None = database["users"].get(email)
    if user is None:
        raise _ToolError("no user with this email")
    return {order_id: database["orders"][order_id]["status"] for order_id in user["orders"]}


def _get_order(database: Database, order_id: str) -> dict[str, Any]:
    order = _order(database, order_id)
    return {"status": order["status"], "items": order["items"], "city": order["city"]}


def _get_product(database: Database, item: str) -> dict[str, Any]:
    if item not in database["products"]:
        raise _ToolError(f"no product {item[:40]}")
    return dict(database["products"][item])


def _cancel_order(database: Database, order_id: str, reason: str) -> dict[str, Any]:
    if reason not in REASONS:
        raise _ToolError(f"reason must be one of {', '.join(REASONS)}")
    order = _order(database, order_id, status="pending")
    order["status"], order["reason"] = "cancelled", reason
    return {"status": "cancelled"}


def _change_city(database: Database, order_id: str, city: str) -> dict[str, Any]:
    order = _order(database, order_id, status="pending")
    if city not in CITIES:
        raise _ToolError(f"city must be one of {', '.join(CITIES)}")
    order["city"] = city
    return {"city": city}


def _change_item(database: Database, order_id: str, old_item: str, new_item: str) -> dict[str, Any]:
    order = _order(database, order_id, status="pending")
    _swap(database, order, old_item, new_item)
    return {"items": order["items"]}


def _return_order(database: Database, order_id: str) -> dict[str, Any]:
    order = _order(database, order_id, status="delivered")
    order["status"] = "returned"
    return {"status": "returned"}


def _exchange_item(
    database: Database, order_id: str, old_item: str, new_item: str
) -> dict[str, Any]:
    order = _order(database, order_id, status="delivered")
    _swap(database, order, old_item, new_item)
    order["status"] = "exchanged"
    return {"items": order["items"]}


def _transfer(database: Database, summary: str) -> dict[str, Any]:
    database["transfers"] += 1
    return {"status": "transferred"}


_TOOLS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "find_user": _find_user,
    "get_order": _get_order,
    "get_product": _get_product,
    "cancel_order": _cancel_order,
    "change_city": _change_city,
    "change_item": _change_item,
    "return_order": _return_order,
    "exchange_item": _exchange_item,
    "transfer": _transfer,
}
