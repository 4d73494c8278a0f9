"""The engine's loop: order, batches, and fairness between training and sampling."""

import threading
from dataclasses import dataclass

import pytest

from deploy.local_service.engine_loop import EngineLoop, EngineStoppedError, FairShare
from tests.deploy.scripted_batch import ScriptedBatch


@dataclass(frozen=True)
class Job:
    name: str
    weights_key: str = "w"


@pytest.fixture
def loops():
    """Make loops that are stopped afterwards."""
    made = []

    def make(step=lambda jobs: False, **options):
        loop = EngineLoop(lambda: ScriptedBatch(step), **options)
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

    def step(jobs):
        batches.append([job.name for job in jobs])
        if len(batches) == 2:
            done.set()
        return False

    loop = loops(step)
    for job in (Job("a1", "a"), Job("b1", "b"), Job("a2", "a")):
        loop.submit_sample(job)
    loop.start()

    assert done.wait(10)
    assert batches == [["a1", "a2"], ["b1"]]


def test_later_samples_join_a_running_batch(loops):
    """A job that arrives between two tokens is taken on before the next."""
    seen, done = [], threading.Event()

    def step(jobs):
        seen.append([job.name for job in jobs])
        if len(seen) == 1:
            loop.submit_sample(Job("late"))
            return True
        done.set()
        return False

    loop = loops(step)
    loop.submit_sample(Job("early"))
    loop.start()

    assert done.wait(10)
    assert seen == [["early"], ["early", "late"]]


def sampled(loops, lengths, *, max_batches):
    """Sample one job per weights, each of so many tokens; return whose token came when."""
    seen, left, done = [], dict(lengths), threading.Event()

    def step(jobs):
        name = jobs[0].name
        seen.append(name)
        left[name] -= 1
        if not any(left.values()):
            done.set()
        return left[name] > 0

    loop = loops(step, max_batches=max_batches)
    for name in lengths:
        loop.submit_sample(Job(name, name))
    loop.start()
    assert done.wait(10)
    return "".join(seen)


def test_batches_of_different_weights_take_turns_token_by_token(loops):
    """With one token b is done before a's second; with two, a's second comes between them."""
    assert sampled(loops, {"a": 3, "b": 1}, max_batches=2) == "abaa"
    assert sampled(loops, {"a": 3, "b": 2}, max_batches=2) == "ababa"


def test_no_more_batches_than_places_are_open(loops):
    """With two places, the third weights begin when the first are done, and then take turns."""
    assert sampled(loops, {"a": 2, "b": 3, "c": 2}, max_batches=2) == "abacbcb"


@pytest.mark.parametrize(("step_seconds", "taken_on"), [(0.1, 6), (0.6, 2)])
def test_batch_takes_no_more_jobs_while_others_wait_too_long_for_its_place(
    loops, step_seconds, taken_on
):
    """Six jobs of a, one per token, and b, for which there is no place while a runs.

    At 0.1 s a token all join before b has waited a second; at 0.6 s the third comes too late.
    """
    now, seen, done = [0.0], [], threading.Event()

    def step(jobs):
        now[0] += step_seconds
        seen.append(jobs[0].weights_key + str(len(jobs)))
        if jobs[0].weights_key == "b":
            done.set()
            return False
        if len(jobs) < 6 and len(seen) < 6:
            loop.submit_sample(Job("a", "a"))
        return len(seen) < 6

    loop = loops(step, max_batches=1, clock=lambda: now[0])
    loop.submit_sample(Job("a", "a"))
    loop.submit_sample(Job("b", "b"))
    loop.start()

    assert done.wait(10)
    assert max(int(name[1:]) for name in seen[: seen.index("b1")]) == taken_on


def test_training_runs_inside_a_long_batch(loops):
    """A batch that never ends by itself does not hold up a training job."""
    trained = threading.Event()

    def step(jobs):
        if not trained.is_set():
            loop.submit_train("m", trained.set)
        return not trained.is_set()

    loop = loops(step)
    loop.submit_sample(Job("long"))
    loop.start()

    assert trained.wait(10)


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
    answers, asked, done = [], [], threading.Event()

    def step(jobs):
        if not asked:
            asked.extend([loop.call(lambda: 7), loop.call(lambda: 1 / 0)])
            return True
        answers.append(asked[0].result(timeout=0))
        answers.append(type(asked[1].exception(timeout=0)))
        done.set()
        return False

    loop = loops(step)
    loop.submit_sample(Job("a"))
    loop.start()

    assert done.wait(10)
    assert answers == [7, ZeroDivisionError]


def test_stop_ends_a_running_batch(loops):
    """A stop is noticed between two tokens, and later calls are refused."""
    started = threading.Event()

    def step(jobs):
        started.set()
        return True

    loop = loops(step)
    loop.submit_sample(Job("endless"))
    loop.start()
    assert started.wait(10)

    assert loop.stop(seconds=10)
    assert isinstance(loop.call(lambda: 1).exception(timeout=1), EngineStoppedError)


def test_batch_that_lets_an_error_out_is_given_up(loops, caplog):
    """The error is logged, and the next job of those weights gets a batch of its own."""
    seen, done = [], threading.Event()

    def step(jobs):
        seen.append([job.name for job in jobs])
        if len(seen) == 1:
            loop.submit_sample(Job("second"))
            raise RuntimeError("defect")
        done.set()
        return False

    loop = loops(step)
    loop.submit_sample(Job("first"))
    loop.start()

    assert done.wait(10)
    assert seen == [["first"], ["second"]]
    assert "let an error out" in caplog.text


def test_job_that_lets_an_error_out_does_not_stop_the_loop(loops, caplog):
    """A defect in one job is logged, the next job runs."""
    loop, done = loops(), threading.Event()
    loop.submit_train("m", lambda: 1 / 0)
    loop.submit_train("m", done.set)
    loop.start()

    assert done.wait(10)
    assert "let an error out" in caplog.text
