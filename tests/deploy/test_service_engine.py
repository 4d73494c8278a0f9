"""The engine's loop: order, batches, and fairness between training and sampling."""

import threading
from dataclasses import dataclass

import pytest

from deploy.local_service.engine_loop import EngineLoop, EngineStoppedError, FairShare


@dataclass(frozen=True)
class Job:
    name: str
    weights_key: str = "w"


@pytest.fixture
def loops():
    """Make loops that are stopped afterwards."""
    made = []

    def make(run_batch=lambda jobs, admit: None):
        loop = EngineLoop(run_batch)
        made.append(loop)
        return loop

    yield make
    for loop in made:
        if loop._thread.is_alive():
            assert loop.stop(seconds=10)


def test_one_models_jobs_run_in_order_of_arrival(loops):
    """Four jobs queued before the start run 0, 1, 2, 3."""
    loop, done, seen = loops(), threading.Event(), []
    for number in range(4):
        loop.submit_train("m", lambda number=number: seen.append(number))
    loop.submit_train("m", done.set)
    loop.start()

    assert done.wait(10)
    assert seen == [0, 1, 2, 3]


def test_models_take_turns(loops):
    """Two models with three jobs each alternate."""
    loop, done, seen = loops(), threading.Event(), []
    for name in ("a", "b"):
        for number in range(3):
            loop.submit_train(name, lambda name=name, number=number: seen.append((name, number)))
    loop.submit_train("b", done.set)
    loop.start()

    assert done.wait(10)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_samples_of_equal_weights_share_a_batch_and_others_do_not(loops):
    """Jobs are grouped by weights, the weights that waited longest first."""
    batches, done = [], threading.Event()

    def run_batch(jobs, admit):
        batches.append(sorted(job.name for job in jobs))
        if len(batches) == 2:
            done.set()

    loop = loops(run_batch)
    for job in (Job("a1", "a"), Job("b1", "b"), Job("a2", "a")):
        loop.submit_sample(job)
    loop.start()

    assert done.wait(10)
    assert batches == [["a1", "a2"], ["b1"]]


def test_later_samples_join_a_running_batch(loops):
    """A job that arrives between two tokens is admitted."""
    joined, done = [], threading.Event()

    def run_batch(jobs, admit):
        assert admit() == []
        loop.submit_sample(Job("late"))
        joined.extend(job.name for job in admit())
        done.set()

    loop = loops(run_batch)
    loop.submit_sample(Job("early"))
    loop.start()

    assert done.wait(10)
    assert joined == ["late"]


def test_training_runs_inside_a_long_batch(loops):
    """A batch that never ends by itself does not hold up a training job."""
    trained, done = threading.Event(), threading.Event()

    def run_batch(jobs, admit):
        loop.submit_train("m", trained.set)
        while not trained.is_set():
            admit()
        done.set()

    loop = loops(run_batch)
    loop.submit_sample(Job("long"))
    loop.start()

    assert done.wait(10)


def test_share_of_time_is_split_evenly_when_both_wait():
    """Training jobs of 3 s and sampling turns of 1 s: one training job per three turns."""
    share, turns = FairShare(), []
    for _ in range(8):
        kind = share.next_kind(("train", "sample"))
        turns.append(kind)
        share.charge(kind, 3.0 if kind == "train" else 1.0)

    assert turns == ["train", "sample", "sample", "sample", "train", "sample", "sample", "sample"]


def test_idle_kind_saves_up_no_time():
    """After an hour of sampling alone, training does not get an hour to itself."""
    share = FairShare()
    share.charge("sample", 3600.0)
    share.level("train")
    share.charge(share.next_kind(("train", "sample")), 3.0)

    assert share.next_kind(("train", "sample")) == "sample"


def test_look_at_the_engine_runs_between_two_tokens(loops):
    """A call is answered while a batch runs, with its result or its error."""
    answers, done = [], threading.Event()

    def run_batch(jobs, admit):
        good = loop.call(lambda: 7)
        bad = loop.call(lambda: 1 / 0)
        admit()
        answers.append(good.result(timeout=0))
        answers.append(type(bad.exception(timeout=0)))
        done.set()

    loop = loops(run_batch)
    loop.submit_sample(Job("a"))
    loop.start()

    assert done.wait(10)
    assert answers == [7, ZeroDivisionError]


def test_stop_ends_a_running_batch(loops):
    """A stop is noticed between two tokens, and later calls are refused."""
    started = threading.Event()

    def run_batch(jobs, admit):
        started.set()
        while True:
            admit()

    loop = loops(run_batch)
    loop.submit_sample(Job("endless"))
    loop.start()
    assert started.wait(10)

    assert loop.stop(seconds=10)
    assert isinstance(loop.call(lambda: 1).exception(timeout=1), EngineStoppedError)


def test_job_that_lets_an_error_out_does_not_stop_the_loop(loops, caplog):
    """A defect in one job is logged, the next job runs."""
    loop, done = loops(), threading.Event()
    loop.submit_train("m", lambda: 1 / 0)
    loop.submit_train("m", done.set)
    loop.start()

    assert done.wait(10)
    assert "let an error out" in caplog.text
