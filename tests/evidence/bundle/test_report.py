"""The report says what the bundle says, safely, to everyone, and loads nothing."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from evidence import manifest
from evidence.bundle import build_bundle, read_bundle
from evidence.errors import InputError
from evidence.manifest import Candidate, fit
from evidence.report import render_html, render_markdown, write_reports
from evidence.report_data import ReportData
from evidence.report_text import duration, html_text, markdown_text, number, printable, size
from evidence.verify import verify_bundle


class Page(HTMLParser):
    """Collects elements, attributes and text; an unbalanced page is an error."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})
    SHAPES = frozenset({"rect", "line", "circle", "path"})

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.stack = []
        self.text = ""
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] != "style":
            self.text += data + " "

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def _report(run):
    build_bundle(run, environment={})
    report = write_reports(run)
    page = Path(run.path, report.html).read_text(encoding="utf-8")
    return Page(page), Path(run.path, report.markdown).read_text(encoding="utf-8"), page


def test_report_of_a_supported_run(finished_run):
    """Verdict, effect, interval, margin, scores and files are all there, in both forms."""
    page, markdown, _ = _report(finished_run)

    for text in (page.text, markdown):
        for expected in (
            *("supported", "dppo minus grpo", "+0.75", "+0.3205", "A treatment against a baseline"),
            *("scored-observations.jsonl", "gated-rl verify", "None: the spec was executed"),
        ):
            assert expected in text
    digest = re.search(r"\| spec\.json \| spec \|  \| [\d.]+ \w+ \| ([0-9a-f]{64}) \|", markdown)
    assert digest is not None
    assert digest[1] in page.text


def test_report_says_what_would_change_the_verdict(make_finished_run):
    """Effect 0.1 at 40 items: the half width 0.4295 falls to 0.1 at 40 * 4.295**2 = 738 items."""
    page, markdown, _ = _report(make_finished_run(treatment=14))

    for text in (page.text, markdown):
        assert "about 738 items would support it (40 were used)" in text
        assert "above +0.4295 to support it, or below -0.4295" in text
    assert "inconclusive" in page.text


def test_report_of_a_run_whose_effect_is_the_margin(make_finished_run):
    page, _, _ = _report(make_finished_run(treatment=10))

    assert "The effect equals the margin: no number of items would settle it." in page.text


def test_report_of_a_withheld_verdict_gives_the_reasons(make_finished_run):
    deviation = {
        "field": "dataset",
        "original": "40 | items",
        "effective": "<b>8</b>",
        "reason": "`x`",
    }
    run = make_finished_run(gates={"activation": "failed"}, deviations=[deviation])

    page, markdown, raw = _report(run)

    assert "the verdict is withheld" in page.text
    assert "activation is failed." in page.text
    assert "<b>8</b>" not in raw
    assert "<b>8</b>" in page.text
    assert r"| dataset | 40 \| items | \<b\>8\</b\> | \`x\` |" in markdown


def test_report_of_a_stopped_run(stopped_run):
    """No scores, no curves, no decision: the gate's reason stands in their place."""
    page, markdown, _ = _report(stopped_run)

    for text in (page.text, markdown):
        assert "baseline_loss is too far off" in text.replace("\\", "")
        assert "Something that the comparison needs was not carried out." in text
    assert "Decision evidence was not recorded." in page.text
    assert page.named("figure") == []
    assert verify_bundle(stopped_run.path).problems == ()


def test_page_loads_nothing(finished_run):
    """No script, link, image, font or style address; the policy forbids them as well."""
    page, _, raw = _report(finished_run)

    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    attributes = {name for _, found in page.elements for name in found}
    assert not attributes & {"src", "href", "srcset", "action", "data", "style"}
    assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in raw
    assert "@import" not in raw
    policy = next(m for m in page.named("meta") if "http-equiv" in m)
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_page_is_accessible(finished_run):
    """Language, one h1, no skipped heading, named pictures, captioned tables with header cells."""
    page, _, raw = _report(finished_run)

    assert page.named("html") == [{"lang": "en"}]
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings.count(1) == 1
    assert headings[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(headings))
    pictures = [svg for svg in page.named("svg") if svg.get("role") == "img"]
    assert len(pictures) == 5
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert all(set(svg["aria-labelledby"].split()) <= ids for svg in pictures)
    assert len(page.named("table")) == len(page.named("caption"))
    assert all("scope" in head for head in page.named("th"))
    named = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(named) == len(set(named))
    assert "prefers-color-scheme:dark" in raw


def test_numbers_that_are_none_are_words(finished_run):
    """NaN and infinity leave a gap in the curve and stand beside it in words."""
    page, markdown, raw = _report(finished_run)

    for text in (page.text, markdown):
        assert "dppo at update 3: not a number" in text
        assert "grpo at update 2: infinite" in text
    assert not re.search(r"\bnan\b|\binf\b", raw, re.IGNORECASE)


def test_report_without_a_bundle_is_refused(stopped_run):
    with pytest.raises(InputError, match="a sealed bundle"):
        write_reports(stopped_run)


def test_report_is_the_same_for_the_same_bundle(finished_run):
    _, markdown, raw = _report(finished_run)
    files = {path.name: path.read_bytes() for path in Path(finished_run.path, "bundle").iterdir()}
    folder = f"{finished_run.path}/bundle"

    assert render_html(files, folder=folder) == raw
    assert render_markdown(files, folder=folder) == markdown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "not measured"),
        (float("nan"), "not a number"),
        (float("-inf"), "minus infinite"),
        ("Infinity", "infinite"),
        (True, "yes"),
        (12345678, "12,345,678"),
        (0.123456, "0.1235"),
        (-0.0, "0"),
        (1e-9, "1e-9"),
    ],
)
def test_numbers_for_people(value, shown):
    assert number(value) == shown


def test_texts_hide_nothing():
    """Control characters, direction marks and lone surrogates become visible escapes."""
    assert printable("a\x1b[0m\u202eb\x00") == "a\\u001b[0m\\u202eb\u241b0000"
    assert html_text('<a href="x">\ud83d') == "&lt;a href=&quot;x&quot;&gt;\u241bd83d"
    assert markdown_text("a|b\n`c` <d>") == r"a\|b \`c\` \<d\>"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "not measured"), (9.4, "9 s"), (61.0, "1 min 1 s"), (7260.0, "2 h 1 min")],
)
def test_durations_for_people(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (10485760, "10.0 MiB")]
)
def test_sizes_for_people(count, shown):
    assert size(count) == shown


def test_report_reads_files_in_parts(finished_run, monkeypatch):
    """Ledger and curves are cut into parts; the report shows what the whole files say."""
    build_bundle(finished_run, environment={})
    files = dict(read_bundle(finished_run).data)
    whole = ReportData(dict(files), folder="b")
    cut = []
    for name in ("ledger.jsonl", "metrics-updates.jsonl"):
        monkeypatch.setattr(manifest, "MAX_FILE_BYTES", len(files[name]) - 1)
        cut += fit([Candidate(name, "metrics", files.pop(name))]).files
    record = json.loads(files["manifest.json"])
    record["files"] = [one for one in record["files"] if one["name"] in files]
    record["files"] += [entry.to_record() for entry, _ in cut]
    files |= {entry.name: data for entry, data in cut}
    files["manifest.json"] = json.dumps(record).encode()

    parts = ReportData(files, folder="b")

    assert [entry.name for entry, _ in cut] == [
        *("ledger.part-01-of-02.jsonl", "ledger.part-02-of-02.jsonl"),
        *("metrics-updates.part-01-of-02.jsonl", "metrics-updates.part-02-of-02.jsonl"),
    ]
    assert (parts.attempts, parts.restores) == (whole.attempts, whole.restores) == (1, 0)
    assert parts.charts == whole.charts
    assert len(parts.charts) == 4


def test_report_without_a_ledger_does_not_count_attempts(make_finished_run, monkeypatch):
    run = make_finished_run()
    run.append("note", text="x" * 60_000)
    monkeypatch.setattr(manifest, "MAX_FILE_BYTES", 50_000)
    build_bundle(run, environment={})
    files = {k: v for k, v in read_bundle(run).data.items() if k != "restores.jsonl"}

    markdown = render_markdown(files, folder="b")

    assert "| Attempts | not in the bundle |" in markdown
    assert "| Restores from a checkpoint | not in the bundle |" in markdown
