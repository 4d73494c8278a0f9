"""Chosen episodes as one page that loads nothing: turns as they were said, tokens by advantage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evidence.report_style import STYLE, document
from evidence.report_text import html_text, number
from evidence.transcripts import RULE
from evidence.transcripts_held_out import RULE as HELD_OUT_RULE
from evidence.transcripts_shown import (
    MAX_ARMS,
    MAX_CHARS,
    MAX_TOKENS,
    Message,
    Piece,
    Transcript,
)
from evidence.values import as_mapping

BINS = 5
_SPEAKERS = {
    "prompt": "Prompt",
    "assistant": "Policy",
    "user": "User",
    "tool": "Tool",
    "system": "System",
}


def transcripts_page(transcripts: Sequence[Transcript], *, title: str, run_id: str) -> str:
    """Return the page.

    Args:
        transcripts: the episodes, in the order in which they are shown.
        title: of the experiment.
        run_id: of the run.
    """
    scales = _scales(transcripts)
    articles = "\n".join(
        _article(one, scales.get(one.key[0], 0.0), index=index)
        for index, one in enumerate(transcripts, start=1)
    )
    return document(
        title=f"Transcripts: {html_text(title)}",
        body=f"{_head(transcripts, scales, title=title, run_id=run_id)}\n{articles}",
        style=STYLE + _STYLE,
    )


def _scales(transcripts: Sequence[Transcript]) -> dict[str, float]:
    """Largest shown advantage of each sampled arm, in absolute value: the darkest colour."""
    found: dict[str, float] = {}
    for one in transcripts:
        if one.held_out:
            continue
        values = [
            abs(piece.advantage)
            for message in one.messages
            for piece in message.pieces
            if piece.advantage is not None and math.isfinite(piece.advantage)
        ]
        found[one.key[0]] = max([found.get(one.key[0], 0.0), *values])
    return found


def _head(
    transcripts: Sequence[Transcript], scales: Mapping[str, float], *, title: str, run_id: str
) -> str:
    sampled = [one for one in transcripts if not one.held_out]
    return (
        '<header class="verdict"><p class="eyebrow">Transcripts of run '
        f"{html_text(run_id)}</p><h1>{html_text(title)}</h1>"
        f"<p>{len(transcripts)} episodes, chosen by rule and not by hand. At most {MAX_ARMS} arms, "
        f"{number(MAX_TOKENS)} tokens an episode and {number(MAX_CHARS)} characters a message; "
        f"what is left out is counted.</p>{_sampled(sampled)}"
        + "".join(_legend(arm, scale) for arm, scale in scales.items())
        + _held_out(len(transcripts) - len(sampled))
        + "</header>"
    )


def _sampled(sampled: Sequence[Transcript]) -> str:
    """How the episodes that training sampled are chosen and read."""
    if not sampled:
        return ""
    phases = ", ".join(sorted({one.key[1] for one in sampled}))
    return (
        f"<p>{len(sampled)} are of phase {html_text(phases)}. {html_text(RULE)} Every token that "
        "the policy sampled is coloured by its advantage: what training raises is blue, what it "
        "lowers is orange and underlined. Point at a token for its numbers. They are read from "
        "the tables <code>rollouts</code>, <code>tokens</code>, <code>token_texts</code>, "
        "<code>turns</code>, <code>rescoring</code> and <code>teachers</code>.</p>"
    )


def _held_out(count: int) -> str:
    """How the episodes on held-out items are chosen and read."""
    if not count:
        return ""
    return (
        f"<p>{count} are on held-out items, on which the verdict rests. {html_text(HELD_OUT_RULE)} "
        "Nothing in them was trained on, so that they have no colours. They are read from the "
        "tables <code>evaluations</code> and <code>evaluation_turns</code>.</p>"
    )


def _legend(arm: str, scale: float) -> str:
    if scale == 0.0:
        return f"<p><strong>{html_text(arm)}</strong>: every shown advantage is 0.</p>"
    swatches = "".join(
        f'<span class="{name}">&nbsp;{number(sign * scale * bin_ / BINS, digits=2, signed=True)}'
        "&nbsp;</span>"
        for sign, name_of in ((-1, "n"), (1, "p"))
        for bin_ in (range(BINS, 0, -1) if sign < 0 else range(1, BINS + 1))
        for name in (f"{name_of}{bin_}",)
    )
    return f'<p class="tokens"><strong>{html_text(arm)}</strong>: {swatches}</p>'


def _article(one: Transcript, scale: float, *, index: int) -> str:
    arm, _, step = one.key
    if one.held_out:
        heading = arm if arm == step else f"{arm}, {step} evaluation"
    else:
        heading = f"{arm}, step {step}"
    return (
        f'<section aria-labelledby="episode-{index}"><h2 id="episode-{index}">'
        f"{html_text(heading)}: {html_text(one.rollout['item_id'])}</h2>"
        f'<p class="lead">{html_text(", ".join(one.why))}{_place(one)}</p>'
        f'<dl class="facts">{_facts(one)}</dl>{_words(one)}'
        + "".join(_message(message, scale) for message in one.messages)
        + "</section>"
    )


def _place(one: Transcript) -> str:
    if one.held_out:
        return ""
    return f" (group {one.rollout['group']}, sample {one.rollout['sample']})"


_FACTS = {
    "reward": "Reward",
    "native_reward": "Native reward",
    "advantage": "Group advantage",
    "turns": "Turns",
    "completion_tokens": "Sampled tokens",
    "stop_reason": "Ended by",
}


def _facts(one: Transcript) -> str:
    """The episode's numbers as definitions."""
    row = one.rollout
    pairs: dict[str, Any] = {words: row[name] for name, words in _FACTS.items() if name in row}
    metrics = as_mapping(one.info.get("metrics"))
    pairs |= {name.replace("_", " "): value for name, value in sorted(metrics.items())}
    outcomes = as_mapping(as_mapping(one.info.get("info")).get("outcomes"))
    pairs |= {name.replace("_", " "): value for name, value in sorted(outcomes.items())}
    return "".join(
        f"<div><dt>{html_text(name)}</dt><dd>{html_text(number(value))}</dd></div>"
        for name, value in list(pairs.items())[:40]
    )


def _words(one: Transcript) -> str:
    """The judge's words, and what the teacher was shown."""
    notes = []
    rationale = as_mapping(one.info.get("info")).get("rationale")
    if isinstance(rationale, str) and rationale:
        notes.append(f"Judge: {html_text(rationale[:MAX_CHARS])}")
    teacher = one.teacher
    if teacher:
        shown = []
        if teacher.get("solution_shown"):
            native = number(teacher.get("solution_native_reward"))
            shown.append(
                f"the conversation of sample {number(teacher.get('solution_sample'))} (reward "
                f"{number(teacher.get('solution_reward'))}, native reward {native})"
            )
        if teacher.get("feedback_shown"):
            shown.append("the judge's words")
        notes.append(f"The teacher was shown {html_text(' and '.join(shown) or 'nothing')}.")
    return "".join(f'<p class="note">{note}</p>' for note in notes)


def _message(message: Message, scale: float) -> str:
    speaker = _SPEAKERS.get(message.role, message.role)
    if message.role == "prompt":
        body = f"{html_text(message.content)}{_hidden(message.hidden, 'characters')}"
        return (
            f"<details><summary>Prompt as the policy read it</summary>"
            f'<div class="said prompt">{body}</div></details>'
        )
    notes = [f"turn {message.turn}"] if message.role == "assistant" else []
    notes += [f"{word} {text}" for word, text in _marks(message)]
    if message.pieces:
        body = "".join(_token(piece, scale) for piece in message.pieces)
        body += _hidden(message.hidden, "tokens")
    else:
        body = html_text(message.content) + _hidden(message.hidden, "characters")
    problem = " problem" if message.tool_error else ""
    return (
        f'<div class="message {html_text(message.role)}{problem}">'
        f'<p class="speaker">{html_text(speaker)} '
        f'<span class="muted">{html_text(", ".join(notes))}</span></p>'
        f'<div class="said tokens">{body}</div></div>'
    )


def _marks(message: Message) -> list[tuple[str, str]]:
    called = "calls" if message.role == "assistant" else "from"
    found = [(called, message.tool_name), ("problem:", message.tool_error)]
    found.append(("ended by", message.stop_reason))
    return [(word, text[:200]) for word, text in found if text]


def _hidden(count: int, what: str) -> str:
    return f' <em class="muted">[{number(count)} more {what}]</em>' if count else ""


def _token(piece: Piece, scale: float) -> str:
    shown = html_text(piece.text).replace("\n", "⏎\n").replace("\t", "⇥\t")
    return f'<span{_colour(piece.advantage, scale)} title="{_title(piece)}">{shown}</span>'


def _colour(advantage: float | None, scale: float) -> str:
    if advantage is None or not math.isfinite(advantage) or advantage == 0.0 or scale == 0.0:
        return ""
    strength = min(BINS, max(1, math.ceil(BINS * abs(advantage) / scale)))
    return f' class="{"p" if advantage > 0 else "n"}{strength}"'


def _title(piece: Piece) -> str:
    ids = ", ".join(str(token) for token in piece.token_ids)
    parts = [f"advantage {number(piece.advantage, signed=True)}"]
    if piece.sampling_logprob is not None:
        parts.append(f"log p {number(piece.sampling_logprob)}")
    if piece.teacher_logprob is not None:
        parts.append(f"teacher {number(piece.teacher_logprob)}")
    return html_text("; ".join([*parts, f"token {ids}"]))


def _strengths() -> str:
    alphas = (0.12, 0.24, 0.36, 0.48, 0.62)
    return "".join(
        f".p{n}{{background:rgba(37,99,235,{alpha})}}"
        f".n{n}{{background:rgba(217,119,6,{alpha});box-shadow:0 2px 0 rgba(180,83,9,.8)}}"
        for n, alpha in enumerate(alphas, start=1)
    )


_STYLE = """
.facts{display:flex;flex-wrap:wrap;gap:.35rem 1.5rem;margin:.5rem 0 1rem}
.facts dt{color:var(--soft);font-size:.78rem}
.facts dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.message{border-left:4px solid var(--line);padding:.15rem 0 .15rem .85rem;margin:.6rem 0}
.message.assistant{border-left-color:var(--s0)}
.message.user{border-left-color:var(--s2)}
.message.tool{border-left-color:var(--s3)}
.message.problem{border-left-style:dashed;border-left-color:var(--bad)}
.speaker{margin:0 0 .1rem;font-weight:600;font-size:.85rem}
.said{white-space:pre-wrap;overflow-wrap:anywhere;font:.9rem/1.7 ui-monospace,SFMono-Regular,Menlo,
Consolas,monospace}
.said.prompt{max-height:24rem;overflow:auto;border:1px solid var(--line);padding:.5rem}
.tokens span{border-radius:3px}
""" + _strengths()
