"""HTML pages of the file server: lists of runs and files, a table, a text."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from evidence.report_style import STYLE
from evidence.report_text import html_text, number, size

_LONGEST_CELL = 300
_LONGEST_TEXT = 1_000_000


def runs_page(run_ids: Sequence[str]) -> str:
    """The runs in the folder."""
    items = "".join(f"<li>{_anchor(f'/view/{name}/', name)}</li>" for name in run_ids)
    return _page("Runs", f"<section><h1>Runs</h1><ul>{items or '<li>none yet</li>'}</ul></section>")


def files_page(run_id: str, files: Mapping[str, int | None]) -> str:
    """The files of one run.

    Args:
        run_id: name of the run.
        files: path to size in bytes, where it is known.
    """
    rows = [
        f"<tr><td>{_anchor(f'/view/{run_id}/{path}', path)}</td>"
        f"<td>{'' if count is None else size(count)}</td>"
        f"<td>{_anchor(f'/raw/{run_id}/{path}', 'as it is')}</td></tr>"
        for path, count in files.items()
    ]
    head = "<tr><th>file</th><th>size</th><th></th></tr>"
    body = f"<h1>{html_text(run_id)}</h1>{_wide(head, rows)}"
    return _page(run_id, f"<section>{_anchor('/', 'all runs')}{body}</section>")


def table_page(
    run_id: str,
    path: str,
    *,
    columns: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[Any]],
    first: int,
    total: int,
    per_page: int,
) -> str:
    """A part of a Parquet table.

    Args:
        run_id: name of the run.
        path: path of the table in the run.
        columns: names and types.
        rows: the rows shown, values in the order of the columns.
        first: number of the first row shown, from 0.
        total: rows of the whole table.
        per_page: rows on a page.
    """
    head = "".join(
        f"<th>{html_text(name)}<br><small>{html_text(kind)}</small></th>" for name, kind in columns
    )
    lines = [f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows]
    here = f"/view/{run_id}/{path}"
    steps = []
    if first > 0:
        steps.append(_anchor(here, "earlier rows", query=f"first={max(0, first - per_page)}"))
    if first + len(lines) < total:
        steps.append(_anchor(here, "later rows", query=f"first={first + per_page}"))
    shown = f"rows {first + 1} to {first + len(lines)} of {total:,}" if lines else "no rows"
    body = (
        f"<h1>{html_text(path)}</h1><p>{shown} {' '.join(steps)} "
        f"{_anchor(f'/raw/{run_id}/{path}', 'the Parquet file')}</p>"
        f"{_wide(f'<tr>{head}</tr>', lines)}"
    )
    return _page(path, f"<section>{_anchor(f'/view/{run_id}/', run_id)}{body}</section>")


def text_page(run_id: str, path: str, data: bytes) -> str:
    """A file as text; JSON is laid out."""
    text = data[:_LONGEST_TEXT].decode("utf-8", errors="replace")
    if path.endswith(".json") and len(data) <= _LONGEST_TEXT:
        with contextlib.suppress(ValueError):
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    cut = "" if len(data) <= _LONGEST_TEXT else "<p>Cut: the whole file is behind the link.</p>"
    # `html_text` would escape line ends, which the element below shows.
    lines = "\n".join(html_text(line) for line in text.splitlines())
    body = (
        f"<h1>{html_text(path)}</h1><p>{_anchor(f'/raw/{run_id}/{path}', 'the file as it is')}</p>"
        f"{cut}<pre>{lines}</pre>"
    )
    return _page(path, f"<section>{_anchor(f'/view/{run_id}/', run_id)}{body}</section>")


def refusal_page(status: int, words: str) -> str:
    """Why there is nothing to see."""
    return _page(words, f"<section><h1>{status}</h1><p>{html_text(words)}</p></section>")


def _cell(value: Any) -> str:
    if value is None:
        return '<span class="muted">null</span>'
    if isinstance(value, float):
        return html_text(number(value, digits=7) if math.isfinite(value) else str(value))
    text = str(value)
    if len(text) > _LONGEST_CELL:
        text = f"{text[:_LONGEST_CELL]} ... ({len(text):,} characters)"
    return html_text(text)


def _wide(head: str, rows: Sequence[str]) -> str:
    table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _anchor(path: str, words: str, *, query: str = "") -> str:
    target = quote(path) + (f"?{query}" if query else "")
    return f'<a href="{html_text(target)}">{html_text(words)}</a>'


def _page(title: str, body: str) -> str:
    style = f"{STYLE}main{{max-width:none}}pre{{white-space:pre-wrap;overflow-wrap:anywhere}}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>"
    )
