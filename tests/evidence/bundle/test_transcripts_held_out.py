"""Transcripts of held-out episodes: the base model's and every arm's, chosen by score, as text."""

import json

import pytest

from evidence.run import Run
from evidence.transcripts import read_transcripts
from evidence.transcripts_html import transcripts_page
from evidence.transcripts_shown import MAX_CHARS
from tests.evidence.bundle.test_transcripts import episode, write
from tests.evidence.finished_run import Ticking, execution, spec

METRIC = spec()["decision_rule"]["criteria"][0]["metric"]


@pytest.fixture
def run(tmp_path):
    return Run.create(
        str(tmp_path), run_id="r", spec=spec(), execution=execution(), clock=Ticking()
    )


def evaluated(run, arm, label, scores, *, said="Sure.", info=None):
    """Write an evaluation of the items by score; each is a question, a call and its failure."""
    place = {"arm": arm, "label": label, "policy_version": 4, "seed": 0}
    rows = [
        place
        | {
            "item_id": item,
            "metric": metric,
            "value": value,
            "prediction": said,
            "stop_reason": "user_stop",
            "evaluator_id": "e",
            "info_json": json.dumps(info or {}),
        }
        for item, score in scores.items()
        for metric, value in ((METRIC, score), ("another", 1.0 - score))
    ]
    turns = [
        place
        | {"item_id": item, "message": message, "turn": 0, "role": role, "content": content}
        | more
        for item in scores
        for message, (role, content, more) in enumerate(
            (
                ("user", f"About {item}?", {}),
                ("assistant", said, {"tool_name": "look", "stop_reason": "stop"}),
                ("tool", "no", {"tool_name": "look", "tool_error": "unknown order"}),
            )
        )
    ]
    run.write_table("evaluations", rows, key=(arm, label))
    run.write_table("evaluation_turns", turns, key=(arm, label))


def page_of(run):
    return transcripts_page(read_transcripts(run), title="T", run_id="r")


def test_first_best_and_worst_items_of_base_and_final_evaluations_are_chosen(run):
    """Two items share the highest score: the first id is taken. Step 2 is not shown."""
    scores = {"a": 0.5, "b": 0.1, "c": 0.9, "d": 0.9}
    for arm, label in (("sdpo", "final"), ("grpo", "final"), ("grpo", "step-2"), ("base", "base")):
        evaluated(run, arm, label, scores)

    assert [(one.key, one.rollout["item_id"], one.why) for one in read_transcripts(run)] == [
        ((arm, "eval", label), item, why)
        for arm, label in (("base", "base"), ("grpo", "final"), ("sdpo", "final"))
        for item, why in (
            ("a", ("first",)),
            ("b", (f"lowest {METRIC}",)),
            ("c", (f"highest {METRIC}",)),
        )
    ]


def test_held_out_episode_is_shown_turn_by_turn_without_colours(run):
    info = {"rationale": "Ask first.", "outcomes": {"unknown_tool": 1}}
    evaluated(run, "grpo", "final", {"a": 0.25}, said="<b>call", info=info)

    (found,) = read_transcripts(run)
    page = page_of(run)

    assert [(message.role, message.content, message.pieces) for message in found.messages] == [
        ("user", "About a?", ()),
        ("assistant", "<b>call", ()),
        ("tool", "no", ()),
    ]
    for text in (
        "grpo, final evaluation: a",
        f"first, highest {METRIC}, lowest {METRIC}</p>",
        "turn 0, calls look, ended by stop",
        "&lt;b&gt;call</div>",
        "problem: unknown order",
        "Judge: Ask first.",
        "<dt>unknown tool</dt><dd>1</dd>",
        "1 are on held-out items",
    ):
        assert text in page
    assert "every shown advantage is 0" not in page
    assert "are of phase" not in page


def test_page_tells_sampled_and_held_out_episodes_apart(run):
    write(run, [episode(0, 0, 1.0)])
    evaluated(run, "base", "base", {"a": 0.25, "b": 0.5})

    page = page_of(run)

    assert "3 episodes, chosen by rule" in page
    assert "1 are of phase train." in page
    assert "2 are on held-out items" in page
    assert "base: b" in page


def test_long_messages_of_held_out_episodes_are_cut_and_counted(run):
    evaluated(run, "base", "base", {"a": 0.5}, said="x" * (MAX_CHARS + 70))

    assert "[70 more characters]" in page_of(run)


def test_scores_without_messages_are_no_transcripts(run):
    evaluated(run, "base", "base", {"a": 0.5})
    row = run.read_table("evaluations", key=("base", "base"))[0]
    run.write_table("evaluations", [row | {"arm": "grpo", "label": "final"}], key=("grpo", "final"))

    assert [one.key[0] for one in read_transcripts(run)] == ["base"]
