"""The shop's database: a catalogue written by hand, and users with orders made from a fixed seed.

Everything is a function of this file: the same users, orders and prices on every machine.
"""

import hashlib
import json
import pickle
from typing import Any

import numpy as np

PRICES = {
    "mug": 8,
    "lamp": 35,
    "chair": 60,
    "kettle": 27,
    "radio": 44,
    "clock": 19,
    "vase": 23,
    "rug": 75,
    "tent": 120,
    "fan": 31,
    "bag": 52,
    "book": 12,
}
"""Price of every product in whole dollars."""

SOLD_OUT = ("tent", "rug")
"""Products nobody can exchange for."""

CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi")

NAMES = (
    *("amy", "ben", "cara", "dan", "eve", "finn", "gina", "hugo", "iris", "jack", "kate", "leo"),
    *("mia", "noah", "olga", "paul", "rosa", "sam", "tina", "vera", "walt", "yara", "zoe", "adam"),
    *("beth", "carl", "dora", "emil", "fred", "greta", "hank", "ivy", "jane", "kurt", "lena"),
    *("mark", "nina", "otto", "pia", "rick", "sara", "tom", "ulla", "vic", "wendy", "ann", "bob"),
    *("clara", "dave", "ella", "frank", "gwen", "henry", "ida"),
)
"""First names; every user has another one."""

ORDERS_PER_USER = 3
_SEED = 20260101

Database = dict[str, Any]


def build_database() -> Database:
    """Return users, orders and products, and an empty list of transfers.

    Every user has three orders of one or two different items. Orders are numbered from W100;
    about half of them are pending and half delivered.
    """
    rng = np.random.default_rng(_SEED)
    products = {
        name: {"price": price, "stock": 0 if name in SOLD_OUT else 9}
        for name, price in PRICES.items()
    }
    users: dict[str, Any] = {}
    orders: dict[str, Any] = {}
    for number, name in enumerate(NAMES):
        email = f"{name}@mail.com"
        mine = []
        for slot in range(ORDERS_PER_USER):
            order_id = f"W{100 + number * ORDERS_PER_USER + slot}"
            chosen = rng.permutation(len(PRICES))[: int(rng.integers(1, 3))]
            items = [list(PRICES)[int(index)] for index in chosen]
            orders[order_id] = {
                "email": email,
                "items": items,
                "status": ("pending", "delivered")[int(rng.integers(0, 2))],
                "city": CITIES[int(rng.integers(0, len(CITIES)))],
            }
            mine.append(order_id)
        users[email] = {"name": name.capitalize(), "orders": mine}
    return {"users": users, "orders": orders, "products": products, "transfers": 0}


_PACKED = pickle.dumps(build_database())


def fresh_database() -> Database:
    """Return a private copy of the database as it is at the start of every episode."""
    # Unpickling our own bytes is ten times faster than a deep copy.
    copy: Database = pickle.loads(_PACKED)
    return copy


def database_sha256(database: Database) -> str:
    """Return the SHA-256 of a database as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(database, sort_keys=True).encode()).hexdigest()
