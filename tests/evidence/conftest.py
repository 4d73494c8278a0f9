"""Builders shared by the tests of the validators."""

import pytest

DROP = object()


def _copied(value):
    """Copy a value; parts that were one object become separate ones."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value


def _put(document, path, value=DROP):
    changed = _copied(document)
    node = changed
    for key in path[:-1]:
        node = node[key]
    if value is DROP:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return changed


@pytest.fixture
def put():
    """Return a copy of a document with one value changed, or dropped where none is given."""
    return _put


NO_NUMBERS = [
    True,
    False,
    "0.5",
    "",
    None,
    float("nan"),
    float("inf"),
    float("-inf"),
    [],
    {},
    10**400,
]


@pytest.fixture(
    params=NO_NUMBERS, ids=lambda value: f"{type(value).__name__}-{str(value)[:5] or 0}"
)
def no_number(request):
    """Everything a record may hold in place of a finite number."""
    return request.param


@pytest.fixture(params=[None, "", " \n", 0, True, [], {}], ids=repr)
def no_text(request):
    """Everything a record may hold in place of text."""
    return request.param
