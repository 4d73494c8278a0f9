"""Counts of episodes: endings, outcomes, partners' answers and scores, and how the report shows them."""

import json

import pytest

from evidence.episode_metrics import episode_metrics, evaluation_metrics, headline, unusable_turns
from evidence.report_episodes import episode_tables
from evidence.run import Run
from tests.evidence.bundle.test_transcripts import episode, write
from tests.evidence.finished_run import Ticking, execution, spec


def info(**over):
    facts = {"outcomes": {"no_call": 2}, "judge_attempts": 1, "simulator_attempts": 3}
    return facts | over


def evaluation(item_id, metric, value, **facts):
    return {
        "arm": "grpo",
        "label": "final",
        "policy_version": 4,
        "item_id": item_id,
        "metric": metric,
        "seed": 0,
        "value": value,
        "prediction": "x",
        "stop_reason": "user_stop",
        "evaluator_id": "e",
        "info_json": json.dumps(facts),
    }


@pytest.fixture
def run(tmp_path):
    return Run.create(
        str(tmp_path), run_id="r", spec=spec(), execution=execution(), clock=Ticking()
    )


def test_phase_is_counted_over_its_steps(run):
    """Three judgements of five answers: two of the first episode's three were unusable."""
    bad = info(outcomes={"judge_prose": 2, "second_call": 1}, judge_attempts=3)
    facts = [{"info": bad, "metrics": {"score": 1.0}}, {"info": info(), "metrics": {"score": 0.0}}]
    write(run, [episode(0, sample, 1.0, info=one) for sample, one in enumerate(facts)], step=0)
    write(run, [episode(0, 0, 1.0, info=facts[1])], step=1)

    (row,) = episode_metrics(run)

    assert (row["arm"], row["phase"], row["label"], row["episodes"]) == ("grpo", "train", None, 3)
    assert row["outcomes"] == {"judge_prose": 2, "no_call": 4, "second_call": 1}
    assert (row["judge_answers"], row["judge_unusable"], row["judge_parse_rate"]) == (5, 2, 0.6)
    assert (row["simulator_answers"], row["simulator_parse_rate"]) == (9, 1.0)
    assert row["scores"] == {"score": pytest.approx(1 / 3)}
    assert row["ended_by"] == {"user_stop": 3}


def test_evaluation_counts_an_item_once_whatever_its_metrics(run):
    rows = [
        evaluation(item, metric, value, **info(outcomes={"bad_json": 1}))
        for item, value in (("a", 1.0), ("b", 0.5))
        for metric in ("one", "two")
    ]
    run.write_table("evaluations", rows, key=("grpo", "final"))

    row = evaluation_metrics(run, "grpo", "final")

    assert (row["episodes"], row["outcomes"]) == (2, {"bad_json": 2})
    assert row["scores"] == {"one": 0.75, "two": 0.75}
    assert headline(row) == {
        "judge_parse_rate_of_kept_episodes": 1.0,
        "simulator_parse_rate_of_kept_episodes": 1.0,
        "unusable_turns": 2.0,
    }


def test_scores_are_also_given_without_tasks_of_known_trouble(run):
    rows = [
        evaluation("a", "one", 1.0, solved_by_nothing=True, questionable_reference=False),
        evaluation("b", "one", 0.0, solved_by_nothing=False, questionable_reference=True),
        evaluation("c", "one", 0.5, solved_by_nothing=False, questionable_reference=False),
        evaluation("d", "one", 0.0),
    ]
    run.write_table("evaluations", rows, key=("grpo", "final"))

    row = evaluation_metrics(run, "grpo", "final")

    assert row["flagged_tasks"] == 2
    assert row["scores"] == {"one": 0.375, "one_without_flagged_tasks": 0.25}


def test_single_turns_have_no_partners_and_no_tables(run):
    write(run, [episode(0, 0, 1.0)])

    (row,) = episode_metrics(run)

    assert row["judge_parse_rate"] is None
    assert headline(row) == {}
    assert episode_tables([row], {}) == []


def test_turns_that_were_used_are_not_unusable():
    counts = {"no_call": 5, "tag_in_text": 2, "judge_cut": 1, "simulator_empty": 1, "cut": 3}

    assert unusable_turns(counts) == 3


def test_tables_put_the_base_model_first_and_name_failures(run):
    for arm, label in (("grpo", "final"), ("base", "base")):
        rows = [evaluation("a", "one", 1.0, **info()) | {"arm": arm, "label": label}]
        run.write_table("evaluations", rows, key=(arm, label))
    write(run, [episode(0, 0, 1.0, info={"info": info()})])

    tables = episode_tables(episode_metrics(run), {"judge": 2})

    assert {table.heads for table in tables} == {("base", "grpo, final", "grpo, train")}
    assert tables[0].rows == (("one", "1", "1", ""),)
    assert "judge 2 times" in tables[-1].reading
    assert tables[-1].rows[2] == ("Judge: share of usable answers", "1", "1", "1")


def test_posted_share_of_answers_says_that_failed_judgements_are_not_in_it(run):
    """A judge that failed three times over is in the ledger, without an arm, and in no share."""
    rows = [evaluation("a", "one", 1.0, **info(outcomes={"judge_prose": 1}, judge_attempts=2))]
    run.write_table("evaluations", rows, key=("grpo", "final"))
    run.append("partner_failed", partner="judge", attempts=3, problems=["judge_prose"] * 3)

    posted = headline(evaluation_metrics(run, "grpo", "final"))

    assert posted["judge_parse_rate_of_kept_episodes"] == 0.5
    assert "judge_parse_rate" not in posted
