"""Transcripts: a stated choice of episodes, shown whole and safely, from the tables alone."""

import json
from html.parser import HTMLParser

import pytest

from evidence.bundle import build_bundle
from evidence.report import TRANSCRIPTS, write_reports
from evidence.run import Run
from evidence.transcripts import MAX_CHARS, MAX_TOKENS, read_transcripts
from evidence.transcripts_html import transcripts_page
from tests.evidence.finished_run import Ticking, execution, spec

TEXTS = {1: "Sys.", 2: "Hi", 3: "<b>", 4: "call\n", 5: "\x1b[31m", 6: "\ufffd", 7: "\ufffd"}
PARTIAL = {6: "c3", 7: "a9"}


def episode(group, sample, reward, *, tokens=(1, 2, 3, 4), sampled=2, advantage=0.5, info=None):
    """Rows of `rollouts` and `tokens` of one episode whose last tokens were sampled."""
    first = len(tokens) - sampled
    place = {"group": group, "sample": sample}
    rollout = place | {
        "item_id": f"task-{group}",
        "policy_version": 0,
        "seed": 7,
        "prompt_tokens": first,
        "completion_tokens": sampled,
        "turns": 1,
        "stop_reason": "user_stop",
        "truncated": False,
        "reward": reward,
        "native_reward": 1.0,
        "parse_failures": 0,
        "tool_calls": 0,
        "tool_errors": 0,
        "advantage": advantage,
        "completion_text": "x",
        "prompt_sha256": "a" * 64,
        "info_json": json.dumps(info or {}),
    }
    rows = [
        place
        | {
            "position": position,
            "turn": 0,
            "token_id": token,
            "loss_mask": position >= first,
            "sampling_logprob": -0.5 if position >= first else None,
            "advantage": advantage if position >= first else None,
            "teacher_logprob": None,
        }
        for position, token in enumerate(tokens)
    ]
    return rollout, rows


def turn(group, sample, message, role, content, start, end, **over):
    return {
        "group": group,
        "sample": sample,
        "message": message,
        "turn": 0,
        "role": role,
        "content": content,
        "token_start": start,
        "token_end": end,
    } | over


def write(run, episodes, *, arm="grpo", phase="train", step=0, texts=True, turns=()):
    key = (arm, phase, step)
    place = dict(zip(("arm", "phase", "step"), key, strict=True))

    def placed(rows):
        return [place | row for row in rows]

    run.write_table("rollouts", placed([one[0] for one in episodes]), key=key)
    run.write_table("tokens", placed([row for one in episodes for row in one[1]]), key=key)
    if turns:
        run.write_table("turns", placed(turns), key=key)
    if texts:
        rows = [{"token_id": t, "text": s, "partial_hex": PARTIAL.get(t)} for t, s in TEXTS.items()]
        run.write_table("token_texts", placed(rows), key=key)


@pytest.fixture
def run(tmp_path):
    return Run.create(
        str(tmp_path), run_id="r", spec=spec(), execution=execution(), clock=Ticking()
    )


def page_of(run):
    return transcripts_page(read_transcripts(run), title="<T>", run_id="r")


def tokens_of(page):
    """Text, class and title of every coloured token."""

    class Tokens(HTMLParser):
        def __init__(self):
            super().__init__()
            self.found, self.open = [], None

        def handle_starttag(self, tag, attrs):
            attributes = dict(attrs)
            self.open = (
                [attributes.get("class"), attributes["title"], ""]
                if (tag == "span" and "title" in attributes)
                else None
            )

        def handle_data(self, data):
            if self.open is not None:
                self.open[2] += data

        def handle_endtag(self, tag):
            if tag == "span" and self.open is not None:
                self.found.append((self.open[2], self.open[0], self.open[1]))
                self.open = None

    parser = Tokens()
    parser.feed(page)
    return parser.found


def chosen(run):
    return [
        (one.key[0], one.key[2], one.rollout["group"], one.rollout["sample"], one.why)
        for one in read_transcripts(run)
    ]


def test_first_best_and_worst_of_first_and_last_step_are_chosen(run):
    """Two episodes share the highest reward: the earlier group is taken. Step 1 is not shown."""
    rewards = {(0, 0): 0.5, (0, 1): 0.1, (1, 0): 0.9, (1, 1): 0.9}
    for step in range(3):
        write(run, [episode(*place, reward) for place, reward in rewards.items()], step=step)
    write(run, [episode(0, 0, 1.0)], arm="sdpo", step=0)
    write(run, [episode(0, 0, 1.0)], arm="sdpo", phase="pilot", step=0)

    assert chosen(run) == [
        *(
            ("grpo", step, group, sample, why)
            for step in (0, 2)
            for group, sample, why in (
                (0, 0, ("first",)),
                (0, 1, ("lowest reward",)),
                (1, 0, ("highest reward",)),
            )
        ),
        ("sdpo", 0, 0, 0, ("first", "highest reward", "lowest reward")),
    ]


def test_pilot_is_shown_where_nothing_was_trained(run):
    write(run, [episode(0, 0, 1.0)], phase="pilot")

    assert [one.key for one in read_transcripts(run)] == [("grpo", "pilot", 0)]


def test_run_without_episodes_has_no_transcripts(run):
    assert read_transcripts(run) == []


def test_messages_are_in_order_with_the_policys_tokens(run):
    turns = [
        turn(0, 0, 0, "user", "Hi", 0, 2),
        turn(0, 0, 1, "assistant", "<b>call", 2, 4, tool_name="look", stop_reason="stop"),
        turn(0, 0, 2, "tool", "seen", 4, 4, tool_error="no such order"),
    ]
    write(run, [episode(0, 0, 1.0)], turns=turns)

    (found,) = read_transcripts(run)

    assert [(message.role, message.content) for message in found.messages] == [
        ("prompt", "Sys.Hi"),
        ("user", "Hi"),
        ("assistant", "<b>call"),
        ("tool", "seen"),
    ]
    policy = found.messages[2]
    assert [(piece.text, piece.advantage) for piece in policy.pieces] == [
        ("<b>", 0.5),
        ("call\n", 0.5),
    ]
    page = page_of(run)
    assert "turn 0, calls look, ended by stop" in page
    assert "from" not in page.split("no such order")[0].rsplit("muted", 1)[1]


def test_rescored_advantages_and_teacher_replace_those_of_the_group(run):
    """The strongest token gets the darkest colour, half of it gets the third of five."""
    write(run, [episode(0, 0, 1.0, advantage=0.0)], arm="sdpo")
    key = ("sdpo", "train", 0)
    place = {"arm": "sdpo", "phase": "train", "step": 0, "group": 0, "sample": 0}
    rows = [
        place
        | {
            "position": position,
            "teacher_logprob": -0.25,
            "sampling_logprob": -0.5,
            "advantage": advantage,
            "teacher_prefix_tokens": 5,
        }
        for position, advantage in ((2, -2.0), (3, 1.0))
    ]
    run.write_table("rescoring", rows, key=key)

    assert tokens_of(page_of(run)) == [
        ("<b>", "n5", "advantage -2; log p -0.5; teacher -0.25; token 3"),
        ("call⏎\n", "p3", "advantage +1; log p -0.5; teacher -0.25; token 4"),
    ]


def test_missing_tables_and_facts_leave_ids_and_the_whole_reply(run):
    """Single-turn episodes without `turns`, no token texts, and facts that are no JSON."""
    rollout, tokens = episode(0, 0, 1.0)
    write(run, [(rollout | {"info_json": "{"}, tokens)], texts=False)

    (found,) = read_transcripts(run)

    assert [message.role for message in found.messages] == ["prompt", "assistant"]
    assert [piece.text for piece in found.messages[1].pieces] == ["[3]", "[4]"]


def test_parts_of_one_character_stand_together(run):
    """Bytes c3 and a9 are one e with an acute accent; alone, neither is a character."""
    write(run, [episode(0, 0, 1.0, tokens=(1, 6, 7, 3, 6), sampled=4)])

    (found,) = read_transcripts(run)

    pieces = found.messages[1].pieces
    assert [(piece.text, piece.token_ids) for piece in pieces] == [
        ("é", (6, 7)),
        ("<b>", (3,)),
        ("\ufffd", (6,)),
    ]


def test_hostile_text_is_only_text(run):
    """Markup, terminal escapes, direction marks and lone surrogates from model, tool and judge."""
    evil = "</div><script>alert(1)</script><img src=x onerror=y>\x1b[31m\u202e\ud83d\"'"
    turns = [
        turn(0, 0, 0, "user", evil, 0, 2),
        turn(0, 0, 1, "assistant", evil, 2, 4, tool_name=evil, tool_error=evil),
    ]
    info = {"info": {"rationale": evil, "outcomes": {evil: 1}}, "metrics": {evil: 1.0}}
    write(run, [episode(0, 0, 1.0, tokens=(1, 2, 3, 5), info=info)], turns=turns)

    page = page_of(run)

    for text in ("<script", "<img", "\x1b", "\u202e", "\ud83d", "<b>"):
        assert text not in page
    assert "&lt;script&gt;" in page
    assert tokens_of(page)[1][0] == "\\u001b[31m"
    page.encode("utf-8")


def test_sizes_are_bounded_and_what_is_hidden_is_counted(run):
    """10 MB from a tool, and more sampled tokens than are shown."""
    length = MAX_TOKENS + 50
    turns = [
        turn(0, 0, 0, "user", "x" * 10_000_000, 0, 1),
        turn(0, 0, 1, "assistant", "y", 1, 1 + length),
    ]
    write(run, [episode(0, 0, 1.0, tokens=(1, *[3] * length), sampled=length)], turns=turns)

    page = page_of(run)

    assert len(page) < 600_000
    assert f"[{10_000_000 - MAX_CHARS:,} more characters]" in page
    assert "[50 more tokens]" in page


def test_page_loads_nothing(run):
    write(run, [episode(0, 0, 1.0)])

    page = page_of(run)

    for text in ("<script", "<link", "src=", "href=", "url(", "@import", " style="):
        assert text not in page
    assert "default-src 'none'" in page


def test_reports_link_the_page_where_there_is_one(finished_run):
    without = write_reports_of(finished_run)
    write(finished_run, [episode(0, 0, 1.0)], arm="late", step=0)
    linked = write_reports_of(finished_run)

    assert without == (None, False, False)
    assert linked == (TRANSCRIPTS, True, True)


def write_reports_of(run):
    build_bundle(run, environment={})
    written = write_reports(run)
    html, markdown = (run.read_bytes(name).decode() for name in (written.html, written.markdown))
    return (
        written.transcripts,
        f'<a href="{TRANSCRIPTS}">' in html,
        f"({TRANSCRIPTS})" in markdown,
    )
