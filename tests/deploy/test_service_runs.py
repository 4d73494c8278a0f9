"""The lasting record of runs and sessions."""

from datetime import UTC, datetime

import pytest

from deploy.local_service.errors import ApiError
from deploy.local_service.runs import RunBook, RunRecord, result_of
from deploy.local_service.sessions import SamplerSource, SessionBook


def fixed_clock():
    return datetime(2026, 1, 1, tzinfo=UTC)


def record(model_id="s:train:0"):
    return RunRecord(
        model_id=model_id,
        session_id="s",
        base_model="tiny",
        base_sha256="b" * 64,
        lora={"rank": 4},
        user_metadata={"renderer": "x"},
        created_at="2026-01-01T00:00:00+00:00",
        restored_from=None,
        restored_optimizer=False,
    )


def apply(book, seq_id, operation, steps, result=None):
    book.applied(
        "s:train:0",
        seq_id=seq_id,
        operation=operation,
        request_id=f"s:train:0:{seq_id}",
        fingerprint="f",
        optimizer_steps=steps,
        result=result,
    )


def test_applied_steps_are_known_after_a_restart(tmp_path):
    """A new process counts the same steps and requests, and has the answers of saves."""
    book = RunBook(tmp_path, clock=fixed_clock)
    book.create(record())
    apply(book, 0, "create_model", 0)
    apply(book, 1, "forward_backward", 0)
    apply(book, 2, "optim_step", 1)
    apply(book, 3, "save_weights", 1, result={"path": "tinker://s:train:0/weights/a"})

    book.close()

    again = RunBook(tmp_path)
    summary = again.summary("s:train:0")

    assert again.find("s:train:0") == record()
    assert summary.optimizer_steps == 1
    assert summary.last_seq_id == 3
    assert summary.requests["optim_step"] == 1
    assert result_of(again, "s:train:0:3") == {"path": "tinker://s:train:0/weights/a"}
    assert result_of(again, "s:train:0:2") is None
    assert result_of(again, "nobody:7") is None


def test_journal_can_be_written_after_release(tmp_path):
    """A job that ends after its session was released is still recorded."""
    book = RunBook(tmp_path, clock=fixed_clock)
    book.create(record())
    apply(book, 1, "optim_step", 1)
    book.release("s:train:0")
    apply(book, 2, "optim_step", 2)
    book.close()

    assert RunBook(tmp_path).summary("s:train:0").optimizer_steps == 2


def test_session_goes_on_after_a_restart(tmp_path):
    """An open session and its samplers are found again by a new process."""
    book = SessionBook(tmp_path)
    session = book.create({"sdk_version": "0.38.0"})
    source = SamplerSource(f"{session.session_id}:sample:0", "tiny", None, None)
    book.add_sampler(session, source)

    again = SessionBook(tmp_path).live(session.session_id)

    assert again.request == {"sdk_version": "0.38.0"}
    assert again.samplers == {source.sampler_id: source}


def test_first_end_of_a_session_stands(tmp_path):
    """An ended session answers 410 for good, also after a restart."""
    book = SessionBook(tmp_path)
    session = book.create({})
    assert book.finish(session.session_id, reason="success", detail=None) is session
    assert book.finish(session.session_id, reason="errored", detail="x") is None

    with pytest.raises(ApiError, match="success") as caught:
        SessionBook(tmp_path).live(session.session_id)
    assert caught.value.status == 410


def test_unknown_session_is_forbidden(tmp_path):
    """A session that never was gets 403, as the hosted service answers."""
    with pytest.raises(ApiError) as caught:
        SessionBook(tmp_path).live("nope")
    assert caught.value.status == 403


def test_silent_sessions_are_found_by_the_clock(tmp_path):
    """A session is silent once nothing was heard for the whole time."""
    now = [0.0]
    book = SessionBook(tmp_path, monotonic=lambda: now[0])
    quiet, heard = book.create({}), book.create({})
    now[0] = 299.0
    book.touch(heard.session_id)
    assert book.silent(seconds=300) == []
    now[0] = 300.0

    assert book.silent(seconds=300) == [quiet]
