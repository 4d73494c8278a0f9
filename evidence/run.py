"""The run directory: tables in Parquet, written once, with bytes that depend on the rows alone.

This is the only module that reads and writes Parquet. Every table has a declared schema
(`evidence.tables`); rows are checked against it before anything is written, sorted by key, and
encoded with fixed settings, so that the same rows in any order give the same SHA-256.

Text is stored with the escape of `evidence.text`: `Run.read_table` undoes it, Arrow and pandas
readers see the escaped form, which differs for lone surrogates, NUL and U+241B alone.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import Any, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evidence.canonical import sha256_hex
from evidence.errors import ConflictError, InputError
from evidence.lease import Clock, utc_now
from evidence.object_store import open_store
from evidence.run_files import RunFiles, create_run_files
from evidence.store import decode_segment, encode_segment
from evidence.tables import TABLES, Column, TableSchema, table_schema
from evidence.text import escape_text, unescape_text

Key = tuple[str | int, ...]
Rows: TypeAlias = Sequence[Mapping[str, Any]] | Mapping[str, Any]  # or an Arrow table

_ARROW = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "float32": pa.float32(),
    "bool": pa.bool_(),
    "string": pa.large_string(),  # 32-bit offsets end at 2 GiB of text in a column
}
_ALLOWED: dict[str, tuple[type, ...]] = {
    "int64": (int,),
    "float64": (float, int),
    "float32": (float, int),
    "bool": (bool,),
    "string": (str,),
}
_INTEGERS = {
    "int64": (-(2**63), 2**63 - 1),
    "float64": (-(2**53), 2**53),  # beyond, a whole number would be rounded
    "float32": (-(2**24), 2**24),
}
_NUMPY_KINDS = {"int64": "iu", "float64": "fiu", "float32": "fiu", "bool": "b", "string": ""}
_ROW_GROUP_ROWS = 1 << 20
GROUPS = "parts"
"""Folder of finished groups, numbered by group."""
EPISODES = "episodes"
"""Folder of finished episodes of groups that may not be finished, numbered through the step."""
RESCORED = "rescored"
"""Folder of groups that a teacher has scored, numbered by group."""
COMPUTED = "computed"
"""Folder of losses that were computed, one part an update, numbered 0; its step is the update."""
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_MISSING = object()


@dataclass(frozen=True, slots=True)
class TableRef:
    """One file of a table: where it lies in the run directory, its SHA-256, and its rows."""

    path: str
    sha256: str
    rows: int

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return asdict(self)


class Run(RunFiles):
    """One run directory. Make it with `Run.create` or `Run.open`."""

    @classmethod
    def create(
        cls,
        root: str,
        *,
        run_id: str,
        spec: Mapping[str, Any],
        execution: Mapping[str, Any] | None = None,
        identity: Mapping[str, Any] | None = None,
        clock: Clock = utc_now,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Create ``<root>/<run_id>``, or open it if it is a directory of the same run.

        Args:
            root: local folder or fsspec URL under which runs lie.
            run_id: name of the run, used as the folder's name.
            spec: the spec as given.
            execution: the execution file as given.
            identity: whatever else makes this run itself: base model digest, service, threads.
            clock: current time with zone, for the ledger and leases.
            storage_options: settings of the fsspec file system.

        Raises:
            ConflictError: if the directory is of another spec, execution file or identity; the
                message names the field and both values.
        """
        store = create_run_files(
            str(root),
            run_id=run_id,
            spec=spec,
            execution=execution,
            identity=identity or {},
            **(storage_options or {}),
        )
        return cls(store, clock=clock)

    @classmethod
    def open(
        cls,
        path: str,
        *,
        spec_sha256: str | None = None,
        clock: Clock = utc_now,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Open a run directory that exists.

        Args:
            path: local folder or fsspec URL of the run.
            spec_sha256: digest of the spec it must belong to, if the caller knows it.
            clock: current time with zone, for the ledger and leases.
            storage_options: settings of the fsspec file system.

        Raises:
            ConflictError: if it belongs to another spec, or a sealed file was changed.
            InputError: if it is not a run directory.
        """
        run = cls(open_store(str(path), **(storage_options or {})), clock=clock)
        if spec_sha256 is not None and spec_sha256 != run.spec_sha256:
            expected = f"{spec_sha256!r}, as asked for; this directory is of another spec"
            raise ConflictError("spec_sha256", run.spec_sha256, expected, where=run.path)
        return run

    # ---- tables --------------------------------------------------------------------------------

    def write_table(self, table: str, rows: Rows, *, key: Key = ()) -> TableRef:
        """Write the rows of one key of a table, once.

        Args:
            table: name of the table.
            rows: mappings, one a row; or a mapping of column name to values (lists, numpy arrays,
                masked arrays, Arrow arrays), which is the fast form; or an Arrow table.
                Key columns that the rows lack are filled from ``key``; nullable columns that they
                lack are null.
            key: values of the table's partition columns, in order.

        Returns:
            Where the rows lie. The same rows again, in any order, change nothing.

        Raises:
            InputError: naming column and row, if the rows do not fit the schema; or naming the
                path, if the disk is full. Nothing is written then.
            ConflictError: if other rows were written under this key.
        """
        schema = table_schema(table)
        path = table_path(schema, key)
        data, count = _encode(schema, rows, key)
        self._guard()
        if self._store.write_new(path, data):
            return TableRef(path, sha256_hex(data), count)
        existing = self.read_bytes(path)
        if existing != data:
            # A newer Parquet library may write the same rows with other bytes.
            _refuse_other_rows(schema, existing, data, path=path, where=self.path)
        return TableRef(path, sha256_hex(existing), count)

    def has_table(self, table: str, *, key: Key = ()) -> bool:
        """Whether the rows of this key were written."""
        return self._store.exists(table_path(table_schema(table), key))

    def table_ref(self, table: str, *, key: Key = ()) -> TableRef:
        """Return path, SHA-256 and row count of what was written under this key."""
        path = table_path(table_schema(table), key)
        data = self.read_bytes(path)
        return TableRef(path, sha256_hex(data), self._decode(table, data, path).num_rows)

    def keys(self, table: str, *, prefix: Key = ()) -> list[Key]:
        """Return the keys under which rows of a table were written, sorted."""
        return [_key_of(path) for path in self._table_paths(table_schema(table), prefix)]

    def read_table(self, table: str, *, key: Key = ()) -> list[dict[str, Any]]:
        """Return the rows of one key as dicts, text as it was before the escape."""
        return _rows_of(table_schema(table), self.read_arrow(table, key=key))

    def read_arrow(self, table: str, *, key: Key = ()) -> pa.Table:
        """Return the rows of one key as an Arrow table, text in its escaped form."""
        path = table_path(table_schema(table), key)
        return self._decode(table, self.read_bytes(path), path)

    def read_arrow_at(self, path: str) -> pa.Table:
        """Return the rows of one file of a table by its path, text in its escaped form.

        Raises:
            InputError: if it is not the path of a table's file, or the file is not whole.
        """
        parts = path.split("/")
        if len(parts) < 3 or parts[0] != "tables":
            raise InputError("path", path, "a file below tables/", where=self.path)
        return self._decode(parts[1], self.read_bytes(path), path)

    def read_all(self, table: str, *, prefix: Key = ()) -> pa.Table:
        """Return all rows of a table as one Arrow table, sorted by file and key.

        Args:
            table: name of the table.
            prefix: only keys that start with these values.
        """
        schema = table_schema(table)
        parts = [
            self._decode(table, self.read_bytes(path), path)
            for path in self._table_paths(schema, prefix)
        ]
        return pa.concat_tables(parts) if parts else _arrow_schema(schema).empty_table()

    def content_digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file of every content table, by path.

        Equal for two runs of the same spec, execution file and base model on a service that
        repeats bit for bit, however often either was interrupted.
        """
        return {
            path: sha256_hex(self.read_bytes(path))
            for schema in TABLES.values()
            if schema.kind == "content"
            for path in self._table_paths(schema, ())
        }

    # ---- parts ---------------------------------------------------------------------------------

    def write_part(
        self,
        arm: str,
        phase: str,
        step: int | str,
        group: int,
        tables: Mapping[str, Rows],
        *,
        folder: str = GROUPS,
    ) -> str:
        """Keep the rows of one finished group, so that it is never sampled again.

        Args:
            arm: the arm.
            phase: the phase.
            step: rollout step, the label of an evaluation, or an update.
            group: index of the group in the step.
            tables: rows by table name, in the forms that `write_table` takes; key columns must be
                in the rows or follow from the arguments. A member that ``folder`` does not number
                by groups has its ``group`` in the rows.
            folder: kind of part: `GROUPS`, `EPISODES`, `RESCORED` or `COMPUTED`.

        Returns:
            The path of the part: a zip file with one Parquet member a table, all or nothing.

        Raises:
            InputError: if rows do not fit their table's schema.
            ConflictError: if another part was written for this group.
        """
        known = _known(arm, phase, step) | {"group": group}
        members = {
            name: _encode(table_schema(name), rows, _fill(table_schema(name), known))[0]
            for name, rows in sorted(tables.items())
        }
        return self.write_bytes(_part_path(arm, phase, step, group, folder), _zip(members))

    def read_part(
        self, arm: str, phase: str, step: int | str, group: int, *, folder: str = GROUPS
    ) -> dict[str, pa.Table]:
        """Return the tables of a finished group, as Arrow tables by name."""
        path = _part_path(arm, phase, step, group, folder)
        with zipfile.ZipFile(io.BytesIO(self.read_bytes(path))) as archive:
            return {
                name: self._decode(name, archive.read(name), f"{path}:{name}")
                for name in archive.namelist()
            }

    def read_part_rows(
        self, arm: str, phase: str, step: int | str, group: int, *, folder: str = GROUPS
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of a part by table, text as it was before the escape."""
        tables = self.read_part(arm, phase, step, group, folder=folder)
        return {name: _rows_of(table_schema(name), table) for name, table in tables.items()}

    def parts(self, arm: str, phase: str, step: int | str, *, folder: str = GROUPS) -> list[int]:
        """Return the groups of a step that are finished, sorted."""
        place = _part_path(arm, phase, step, 0, folder).rpartition("/")[0]
        names = [path.rpartition("/")[2] for path in self._store.paths(place)]
        return sorted(int(name.removesuffix(".zip")) for name in names)

    def unassembled(
        self, arm: str, phase: str, step: int | str, *, folder: str = GROUPS
    ) -> list[str]:
        """Return the tables that the parts of a step name and that were not written, sorted.

        Groups differ in what they name, so every part is looked into. Empty without parts.
        """
        known = _known(arm, phase, step)
        groups = self.parts(arm, phase, step, folder=folder)
        paths = [_part_path(arm, phase, step, group, folder) for group in groups]
        names = {name for path in paths for name in _members(self.read_bytes(path))}
        return [
            name
            for name in sorted(names)
            if not self.has_table(name, key=_fill(table_schema(name), known))
        ]

    def assemble_parts(
        self,
        arm: str,
        phase: str,
        step: int | str,
        groups: Sequence[int],
        *,
        folder: str = GROUPS,
    ) -> dict[str, TableRef]:
        """Write the tables of a rollout step, an evaluation or an update from its finished groups.

        They are written in the order of their names. What was written already stays, so that
        assembling goes on after an interruption wherever that was.

        Args:
            arm: the arm.
            phase: the phase.
            step: rollout step, the label of an evaluation, or an update.
            groups: the groups to take.
            folder: kind of part.

        Raises:
            InputError: if one of the groups has no part.
        """
        known = _known(arm, phase, step)
        read = [self.read_part(arm, phase, step, group, folder=folder) for group in groups]
        names = sorted({name for tables in read for name in tables})
        return {
            name: self.write_table(
                name,
                pa.concat_tables([tables[name] for tables in read if name in tables]),
                key=_fill(table_schema(name), known),
            )
            for name in names
        }

    # ---- inside --------------------------------------------------------------------------------

    def _decode(self, table: str, data: bytes, path: str) -> pa.Table:
        return _decode(table_schema(table), data, where=f"{self.path}/{path}")

    def _table_paths(self, schema: TableSchema, prefix: Key) -> list[str]:
        folder = f"tables/{schema.name}"
        if not prefix:
            return self._store.paths(folder)
        start = "/".join([folder, *_segments(schema, prefix)])
        found = self._store.paths(folder)
        return [path for path in found if path.startswith((f"{start}/", f"{start}.parquet"))]


def table_path(schema: TableSchema, key: Key) -> str:
    """Return the path of a table's file in the run directory.

    Raises:
        InputError: if the key has not one value of the right type for each partition column.
    """
    if len(key) != len(schema.partition):
        expected = f"one value for each of {', '.join(schema.partition) or 'no column'}"
        raise InputError(f"{schema.name} key", key, expected)
    if not key:
        return f"tables/{schema.name}/all.parquet"
    return f"tables/{schema.name}/{'/'.join(_segments(schema, key))}.parquet"


def _segments(schema: TableSchema, key: Key) -> list[str]:
    segments = []
    for name, value in zip(schema.partition, key, strict=False):
        _check_values(schema, schema.column(name), [value])
        segments.append(encode_segment(value, field=f"{schema.name}.{name}"))
    return segments


def _key_of(path: str) -> Key:
    parts = path.removesuffix(".parquet").split("/")[2:]
    return () if parts == ["all"] else tuple(decode_segment(part) for part in parts)


def _part_path(arm: str, phase: str, step: int | str, group: int, folder: str = GROUPS) -> str:
    names = ("arm", "phase", "step", "group")
    segments = [
        encode_segment(value, field=name)
        for name, value in zip(names, (arm, phase, step, group), strict=True)
    ]
    return f"{folder}/{'/'.join(segments)}.zip"


def _known(arm: str, phase: str, step: int | str) -> dict[str, Any]:
    """Values of key columns for a part; a table has one of the columns that its step stands for."""
    return {"arm": arm, "phase": phase, "step": step, "label": step, "update": step}


def _members(part: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(part)) as archive:
        return archive.namelist()


def _fill(schema: TableSchema, known: Mapping[str, Any]) -> Key:
    return tuple(known[name] for name in schema.partition)


# ---- encoding ----------------------------------------------------------------------------------


def _arrow_schema(schema: TableSchema) -> pa.Schema:
    fields = [
        pa.field(column.name, _ARROW[column.type], nullable=column.nullable)
        for column in schema.columns
    ]
    return pa.schema(fields, metadata={"table": schema.name, "version": str(schema.version)})


def _encode(schema: TableSchema, rows: Rows, key: Key) -> tuple[bytes, int]:
    """Return the Parquet bytes of checked and sorted rows, and how many rows there are."""
    columns, count = _columns_of(schema, rows, key)
    arrays = [_array(schema, column, columns[column.name], count) for column in schema.columns]
    table = _sorted(schema, pa.Table.from_arrays(arrays, schema=_arrow_schema(schema)))
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        version="2.6",
        compression="zstd",
        compression_level=1,
        row_group_size=_ROW_GROUP_ROWS,
        write_statistics=True,
    )
    return sink.getvalue(), count


def _decode(schema: TableSchema, data: bytes, *, where: str) -> pa.Table:
    try:
        table = pq.read_table(io.BytesIO(data))
    except (OSError, pa.ArrowException) as error:
        raise InputError(schema.name, str(error), "a whole Parquet file", where=where) from error
    expected = _arrow_schema(schema)
    version = (table.schema.metadata or {}).get(b"version")
    if version != str(schema.version).encode():
        wanted = f"version {schema.version} of table {schema.name}"
        raise InputError("version", version, wanted, where=where)
    if not table.schema.equals(expected):
        wanted = f"the columns of table {schema.name} version {schema.version}"
        raise InputError("columns", str(table.schema.names), wanted, where=where)
    return table


def _columns_of(schema: TableSchema, rows: Rows, key: Key) -> tuple[dict[str, Any], int]:
    """Return values by column name for any of the accepted forms, and the row count."""
    if isinstance(rows, pa.Table):
        columns = {name: rows.column(name) for name in rows.column_names}
        count = rows.num_rows
    elif isinstance(rows, Mapping):
        columns = dict(rows)
        lengths = {name: len(values) for name, values in columns.items()}
        count = max(lengths.values(), default=0)
        for name, length in lengths.items():
            if length != count:
                raise InputError(f"{schema.name}.{name}", length, f"{count} values")
    else:
        columns, count = _columns_of_dicts(schema, rows), len(rows)
    unknown = [name for name in columns if name not in schema.column_names]
    if unknown:
        expected = f"a column of table {schema.name}"
        raise InputError(f"{schema.name}.{unknown[0]}", "a column", expected)
    for name, value in zip(schema.partition, key, strict=True):
        columns[name] = _constant(schema, name, columns.get(name), value, count)
    for column in schema.columns:
        if column.name not in columns:
            if not column.nullable and count:
                raise InputError(f"{schema.name}.{column.name}", None, f"a {column.type}")
            columns[column.name] = pa.nulls(count, _ARROW[column.type])
    return columns, count


def _columns_of_dicts(
    schema: TableSchema, rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]]:
    allowed = set(schema.column_names)
    for index, row in enumerate(rows):
        if not row.keys() <= allowed:
            name = min(str(name) for name in row.keys() - allowed)
            expected = f"no column of that name in table {schema.name}"
            raise InputError(f"{schema.name}[{index}].{name}", row.get(name), expected)
    present = set().union(*(row.keys() for row in rows)) if rows else set()
    return {
        name: [row.get(name) for row in rows] for name in schema.column_names if name in present
    }


def _constant(
    schema: TableSchema, name: str, values: Any, value: str | int, count: int
) -> pa.Array:
    """Return ``count`` times the key's value, after checking that given values agree."""
    column = schema.column(name)
    stored = escape_text(value) if isinstance(value, str) else value
    constant = pa.scalar(stored, _ARROW[column.type])
    array = _repeat(stored, _ARROW[column.type], count)
    if values is None:
        return array
    given = _array(schema, column, values, count)
    if not given.equals(array):
        index = pc.index(pc.equal(given, constant), False).as_py()
        raise InputError(
            f"{schema.name}[{index}].{name}", given[index].as_py(), f"{stored!r}, as in the key"
        )
    return array


def _repeat(value: str | int, arrow_type: pa.DataType, count: int) -> pa.Array:
    """Return the value ``count`` times (`pa.repeat` copies texts one by one, 20 times slower)."""
    if isinstance(value, int):
        return pa.array(np.full(count, value), type=arrow_type)
    raw = value.encode()
    offsets = np.arange(count + 1, dtype=np.int64) * len(raw)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(raw * count)]
    return pa.Array.from_buffers(arrow_type, count, buffers)


def _array(schema: TableSchema, column: Column, values: Any, count: int) -> pa.Array:
    """Return one checked column."""
    arrow_type = _ARROW[column.type]
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        if values.type != arrow_type:
            name = f"{schema.name}.{column.name}"
            raise InputError(name, str(values.type), f"an Arrow column of type {arrow_type}")
        array = values
    elif isinstance(values, np.ndarray) and column.type != "string" and values.dtype != object:
        array = _from_numpy(schema, column, values)
    else:
        array = _from_list(schema, column, list(values))
    if len(array) != count:
        raise InputError(f"{schema.name}.{column.name}", len(array), f"{count} values")
    _check_array(schema, column, array)
    return array


def _from_numpy(schema: TableSchema, column: Column, values: np.ndarray) -> pa.Array:
    name = f"{schema.name}.{column.name}"
    if values.ndim != 1 or values.dtype.kind not in _NUMPY_KINDS[column.type]:
        raise InputError(name, f"{values.dtype} {values.shape}", f"one dimension of {column.type}")
    mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    plain = np.asarray(values)
    if values.dtype.kind == "u" and plain.size and int(plain.max()) >= 2**63:
        raise InputError(name, int(plain.max()), "a whole number below 2**63")
    if column.type == "float32" and plain.dtype != np.float32:
        plain = _narrow(schema, column, plain.astype(np.float64))
    return pa.array(plain, type=_ARROW[column.type], mask=mask, from_pandas=False)


def _from_list(schema: TableSchema, column: Column, values: list[Any]) -> pa.Array:
    if any(issubclass(kind, np.generic) for kind in set(map(type, values))):
        values = [value.item() if isinstance(value, np.generic) else value for value in values]
    _check_values(schema, column, values)
    if column.type == "string":
        values = [None if value is None else escape_text(value) for value in values]
    if column.type != "float32":
        return pa.array(values, type=_ARROW[column.type], from_pandas=False)
    mask = np.fromiter((value is None for value in values), dtype=bool, count=len(values))
    wide = np.fromiter((0.0 if value is None else value for value in values), dtype=np.float64)
    return pa.array(_narrow(schema, column, wide), mask=mask, from_pandas=False)


def _narrow(schema: TableSchema, column: Column, wide: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    overflow = np.isinf(narrow) & np.isfinite(wide)
    if overflow.any():
        index = int(overflow.argmax())
        name = f"{schema.name}[{index}].{column.name}"
        raise InputError(name, float(wide[index]), "a number that fits 32 bits")
    return narrow


def _check_values(schema: TableSchema, column: Column, values: Sequence[Any]) -> None:
    """Refuse Python values of the wrong type; types are compared exactly, so True is no int."""
    allowed = _ALLOWED[column.type] + ((type(None),) if column.nullable else ())
    kinds = set(map(type, values))
    if kinds <= set(allowed) and int not in kinds:
        return
    low, high = _INTEGERS.get(column.type, (0, 0))
    for index, value in enumerate(values):
        if type(value) in allowed and (type(value) is not int or low <= value <= high):
            continue
        expected = f"{column.type}, null allowed" if column.nullable else f"{column.type}, not null"
        raise InputError(f"{schema.name}[{index}].{column.name}", value, expected)


def _check_array(schema: TableSchema, column: Column, array: pa.Array) -> None:
    def refuse(index: int, expected: str) -> None:
        name = f"{schema.name}[{index}].{column.name}"
        raise InputError(name, array[index].as_py(), expected)

    if array.null_count and not column.nullable:
        refuse(pc.index(array.is_null(), True).as_py(), f"{column.type}, not null")
    if column.type in ("float64", "float32") and not column.nonfinite:
        bad = pc.invert(pc.is_finite(array))
        if pc.any(bad).as_py():
            refuse(pc.index(bad, True).as_py(), "a finite number")
    if column.one_of is not None:
        known = pc.is_in(array, value_set=pa.array(column.one_of, type=array.type))
        if not pc.all(known).as_py() and len(array):
            refuse(pc.index(known, False).as_py(), f"one of {', '.join(column.one_of)}")


def _sorted(schema: TableSchema, table: pa.Table) -> pa.Table:
    """Return the table sorted by key; refuses a key that occurs twice."""
    free = list(schema.key[len(schema.partition) :])
    if table.num_rows < 2:
        return table
    if not free:
        raise InputError(f"{schema.name} rows", table.num_rows, "one row for this key")
    if _ascending(table, free):
        return table
    order = _order(table.select(free))
    moved = [
        column if name in schema.partition else column.take(order)
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    table = pa.Table.from_arrays(moved, schema=table.schema).combine_chunks()
    if not _ascending(table, free):
        raise InputError(f"{schema.name} rows", _first_twice(table, free), "each key once")
    return table


def _order(keys: pa.Table) -> pa.Array:
    """Return the indices that sort rows by all columns of ``keys``.

    Keys that are whole numbers of small range are folded into one number, which sorts ten times
    faster than several columns do.
    """
    if all(field.type == pa.int64() for field in keys.schema):
        columns = [np.asarray(column.to_numpy()) for column in keys.columns]
        lows = [int(column.min()) for column in columns]
        spans = [int(column.max()) - low + 1 for column, low in zip(columns, lows, strict=True)]
        if prod(spans) < 2**62:
            folded = np.zeros(keys.num_rows, dtype=np.int64)
            for column, low, span in zip(columns, lows, spans, strict=True):
                folded = folded * span + (column - low)
            return pa.array(np.argsort(folded, kind="stable"))
    return pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names])


def _ascending(table: pa.Table, names: Sequence[str]) -> bool:
    """Whether each row's key is larger than the one before it."""
    larger = np.zeros(table.num_rows - 1, dtype=bool)
    undecided = ~larger
    for name in names:
        column = table.column(name)
        before, after = column.slice(0, len(column) - 1), column.slice(1)
        larger |= undecided & np.asarray(pc.less(before, after).to_numpy())
        undecided &= np.asarray(pc.equal(before, after).to_numpy())
    return bool(larger.all())


def _first_twice(table: pa.Table, names: Sequence[str]) -> str:
    keys = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
    twice = next(key for key, later in pairwise(keys) if key == later)
    return ", ".join(f"{name} {value}" for name, value in zip(names, twice, strict=True)) + " twice"


def _rows_of(schema: TableSchema, table: pa.Table) -> list[dict[str, Any]]:
    columns = []
    for column in schema.columns:
        values = table.column(column.name).to_pylist()
        if column.type == "string":
            values = [None if value is None else unescape_text(value) for value in values]
        columns.append(values)
    names = schema.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _refuse_other_rows(
    schema: TableSchema, existing: bytes, new: bytes, *, path: str, where: str
) -> None:
    old = _decode(schema, existing, where=f"{where}/{path}")
    fresh = _decode(schema, new, where=f"{where}/{path}")
    if _identical(old, fresh):
        return
    found = f"rows with SHA-256 {sha256_hex(new)[:12]} ({_first_difference(old, fresh)})"
    expected = f"the rows first written, SHA-256 {sha256_hex(existing)[:12]}"
    raise ConflictError(path, found, expected, where=where)


def _identical(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables hold the same values, NaN equal to NaN."""
    return one.num_rows == other.num_rows and all(
        one.column(name).combine_chunks().equals(other.column(name).combine_chunks())
        or repr(one.column(name).to_pylist()) == repr(other.column(name).to_pylist())
        for name in one.column_names
    )


def _first_difference(old: pa.Table, new: pa.Table) -> str:
    if old.num_rows != new.num_rows:
        return f"{new.num_rows} rows for {old.num_rows}"
    for name in old.column_names:
        pairs = zip(old.column(name).to_pylist(), new.column(name).to_pylist(), strict=True)
        for index, (before, after) in enumerate(pairs):
            if repr(before) != repr(after):
                return f"row {index} column {name}"
    return "the columns"


def _zip(members: Mapping[str, bytes]) -> bytes:
    """Return a zip file whose bytes depend on its members alone."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", compression=zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, date_time=_ZIP_TIME), data)
    return sink.getvalue()
