"""The checkpoint store: kinds, immutability, expiry, and what a kill leaves behind."""

from datetime import UTC, datetime, timedelta

import pytest

from deploy.local_service.checkpoint_store import (
    SAMPLER,
    TRAINING,
    CheckpointContent,
    CheckpointPath,
    CheckpointStore,
)
from deploy.local_service.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def content(**over):
    values = {
        "base_model": "tiny",
        "base_sha256": "b" * 64,
        "lora": {"rank": 4},
        "with_optimizer": True,
        "optimizer_steps": 3,
        "adapter_sha256": "a" * 64,
        "optimizer_sha256": "0" * 64,
        "optimizer": {"type": "adamw", "fixed": {}, "last_step": None},
        "restored_from": None,
    }
    return CheckpointContent(**(values | over))


def writing(text):
    return lambda folder: (folder / "weights").write_text(text)


def path(name="a", kind=TRAINING):
    return CheckpointPath("s:train:0", kind, name)


def text_of(store, record):
    return (store.folder(record) / "weights").read_text()


def test_kinds_of_one_name_do_not_collide(tmp_path):
    """A training and a sampler checkpoint of one name are two checkpoints."""
    store = CheckpointStore(tmp_path)
    store.save(path(), content(), writing("training"))
    store.save(path(kind=SAMPLER), content(with_optimizer=False), writing("sampler"))

    assert text_of(store, store.get("tinker://s:train:0/weights/a")) == "training"
    assert text_of(store, store.get("tinker://s:train:0/sampler_weights/a")) == "sampler"
    assert len(store.all("s:train:0")) == 2


def test_overwrite_replaces_and_nothing_else_does(tmp_path):
    """A taken name is refused with 400 unless overwrite is asked for."""
    store = CheckpointStore(tmp_path)
    store.save(path(), content(), writing("one"))
    with pytest.raises(ApiError, match="exists already") as caught:
        store.save(path(), content(), writing("two"))
    assert caught.value.status == 400

    store.save(path(), content(), writing("three"), overwrite=True)

    assert text_of(store, store.get(path().uri)) == "three"
    assert len(list((tmp_path / "blobs").iterdir())) == 1


@pytest.mark.parametrize(
    ("steps", "with_optimizer", "kind", "scope"),
    [
        (0, True, TRAINING, "full_initialization"),
        (1, True, TRAINING, "training_state"),
        (0, False, SAMPLER, "sampler_weights"),
    ],
)
def test_only_an_unstepped_training_checkpoint_is_a_full_initialization(
    tmp_path, steps, with_optimizer, kind, scope
):
    """Scope and immutability follow from the kind and the steps in the optimizer's state."""
    store = CheckpointStore(tmp_path)
    held = content(optimizer_steps=steps, with_optimizer=with_optimizer)
    record = store.save(path(kind=kind), held, writing("x"))

    assert record.scope == scope
    assert record.immutable is (scope == "full_initialization")


def test_full_initialization_is_never_overwritten_deleted_or_expired(tmp_path):
    """Every way to lose it is refused with a 400 that says why."""
    clock = Clock()
    store = CheckpointStore(tmp_path, clock=clock)
    store.save(path(), content(optimizer_steps=0), writing("init"), ttl_seconds=60)
    for attempt in (
        lambda: store.save(path(), content(), writing("other"), overwrite=True),
        lambda: store.delete(path()),
        lambda: store.set_ttl(path(), 60),
    ):
        with pytest.raises(ApiError, match="immutable") as caught:
            attempt()
        assert caught.value.status == 400
    clock.now += timedelta(days=400)
    store.sweep()

    assert text_of(store, store.get(path().uri)) == "init"


def test_expired_checkpoint_is_gone(tmp_path):
    """After its time a checkpoint is not found, and a sweep removes its files."""
    clock = Clock()
    store = CheckpointStore(tmp_path, clock=clock)
    store.save(path(), content(), writing("x"), ttl_seconds=60)
    clock.now += timedelta(seconds=59)
    assert store.find(path()) is not None
    clock.now += timedelta(seconds=1)

    assert store.find(path()) is None
    assert store.sweep() == 1
    assert list((tmp_path / "blobs").iterdir()) == []


def test_time_to_live_can_be_changed_and_removed(tmp_path):
    """A new time to live counts from now; None keeps the checkpoint."""
    clock = Clock()
    store = CheckpointStore(tmp_path, clock=clock)
    store.save(path(), content(), writing("x"), ttl_seconds=60)
    record = store.set_ttl(path(), 3600)
    assert record.expires_at == "2026-01-01T01:00:00+00:00"

    assert store.set_ttl(path(), None).expires_at is None


def test_failed_write_keeps_the_older_checkpoint(tmp_path):
    """A full disk half-way costs the new checkpoint alone."""
    store = CheckpointStore(tmp_path)
    store.save(path(), content(), writing("old"))

    def full(folder):
        (folder / "weights").write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.save(path(), content(), full, overwrite=True)

    assert text_of(store, store.get(path().uri)) == "old"
    assert len(list((tmp_path / "blobs").iterdir())) == 1


def test_start_after_a_kill_removes_what_no_record_points_to(tmp_path):
    """Half-written and orphaned folders go, whole checkpoints stay."""
    store = CheckpointStore(tmp_path)
    record = store.save(path(), content(), writing("kept"))
    (tmp_path / "blobs" / ".half.tmp").mkdir()
    (tmp_path / "blobs" / "orphan").mkdir()
    again = CheckpointStore(tmp_path)

    assert again.clean() == 2
    assert text_of(again, again.get(path().uri)) == "kept"
    assert again.get(path().uri) == record


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a b", "x" * 129, "a\n"])
def test_unusable_names_are_refused(name):
    """Names that are no file name or break an address get a 400."""
    with pytest.raises(ApiError) as caught:
        CheckpointPath.parse(f"tinker://m/weights/{name}")
    assert caught.value.status == 400
