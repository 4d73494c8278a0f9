"""A shorter form of `make chaos`, and that its judge can see what it looks for."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evidence.run import Run
from tests.chaos.campaign import Story, schedule
from tests.chaos.judge import judge
from tests.chaos.phases import PHASES, Progress
from tests.chaos.runner import campaign, killed, table
from tests.chaos.world import World, world

FEW = {"probe": 1, "pilot": 1, "training": 4, "evaluation": 1, "bundle": 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["local", "s3"])
def test_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    store: str, tmp_path: Path
) -> None:
    """Two minibatches and two epochs; one call in ten goes wrong."""
    with world(tmp_path, store=store, seed=4) as place:
        cases = campaign(place, at_least=1, seed=4, kills=FEW)
        shown = "\n".join(table(place, cases, seconds=0.0))

    assert sum(killed(cases).values()) >= 5
    assert place.calls > 200
    assert sum(place.faults.values()) > 10
    assert [case.judgement.equal for case in cases] == [True], shown


def test_schedule_repeats_itself_by_seed_and_names_every_phase() -> None:
    wanted = dict.fromkeys(PHASES, 2)

    one, again, other = (schedule(random.Random(seed), wanted) for seed in (1, 1, 2))

    assert one == again
    assert one != other
    assert [kill.phase for kill in one] == sorted([*range(len(PHASES)), *range(len(PHASES))])
    assert all(0.0 <= kill.share <= 0.7 for kill in one)


def test_phase_is_read_from_what_a_run_writes_and_never_goes_back() -> None:
    progress = Progress()
    seen = []
    for event in (
        {"event": "started"},
        {"event": "gate", "gate": "service_probe"},
        {"event": "gate", "gate": "feasibility"},
        {"event": "gate", "gate": "service_probe"},
        {"event": "published"},
        {"event": "ending", "final": False},
    ):
        progress.event(event)
        seen.append(PHASES[progress.phase])
    progress.path("tables/decision/all.parquet")

    assert seen == ["probe", "gates", "training", "training", "evaluation", "evaluation"]
    assert PHASES[progress.phase] == "decision"


ROW: dict[str, Any] = {
    "group": 0,
    "sample": 0,
    "item_id": "a",
    "policy_version": 0,
    "seed": 77,
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "turns": 1,
    "stop_reason": "stop",
    "truncated": False,
    "reward": 1.0,
    "parse_failures": 0,
    "tool_calls": 0,
    "tool_errors": 0,
    "advantage": 0.0,
    "completion_text": "4",
    "prompt_sha256": "0",
    "info_json": "{}",
}
PART = "parts/grpo/train/000000/000000.zip"


def _run(folder: Path, **changes: Any) -> str:
    run = Run.create(str(folder), run_id="run", spec={"title": "t"})
    run.write_table("rollouts", [ROW | changes], key=("grpo", "train", 0))
    run.append("checkpoint", arm="grpo", phase="train", uri=f"tinker://{folder.name}")
    return str(folder)


def _world(requests: list[dict[str, Any]], **states: str) -> World:
    def checkpoint(uri: str) -> dict[str, str]:
        state = states.get(uri.rpartition("/")[2], "same")
        return {"adapter_sha256": state, "optimizer_sha256": state}

    fake = SimpleNamespace(environment={}, requests=lambda: requests, checkpoint=checkpoint)
    return cast(World, fake)


def test_judge_sees_another_table_another_state_and_a_group_that_was_sampled_again(
    tmp_path: Path,
) -> None:
    """The group was kept at second 100; the request of second 99 is fine, that of 101 is not."""
    asked = [{"path": "asample", "seed": 77, "at": at} for at in (99.0, 101.0)]
    same, other = _run(tmp_path / "a"), _run(tmp_path / "b", reward=0.0)
    expected = (Story(outcome={"exit_kind": "x"}), _run(tmp_path / "c"))

    fine = judge(_world(asked[:1]), (Story(finished={PART: 100.0}), same), expected)
    wrong = judge(
        _world(asked, b="another"),
        (Story(outcome={"exit_kind": "y"}, finished={PART: 100.0}), other),
        expected,
    )

    assert (fine.differing, fine.states_differ, fine.sampled_again) == ((), (), ())
    assert wrong.differing == ("tables/rollouts/grpo/train/000000.parquet",)
    assert wrong.states_differ == ("grpo",)
    assert wrong.sampled_again == (PART,)
    assert "exit_kind" in wrong.result_differs
    assert not wrong.equal
