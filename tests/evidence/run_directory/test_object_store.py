"""A run on an object store: the same files, a log of numbered objects, a lease for a lock."""

import threading
from datetime import UTC, datetime, timedelta

import pytest

from evidence.errors import ConflictError, InputError, StoreError
from evidence.lease import acquire_lease, lease_holder
from evidence.object_store import ObjectStore, open_store
from evidence.run import Run

KEY = ("grpo", "train", 0)


@pytest.fixture
def store(memory_root):
    return open_store(f"{memory_root}/r1")


class HandClock:
    """Wall clock and monotonic clock that a test moves by hand; one stands still during sleep."""

    def __init__(self):
        self.seconds = 0.0
        self.asleep = 0.0

    def wall(self):
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds + self.asleep)

    def monotonic(self):
        return self.seconds


@pytest.fixture
def time():
    return HandClock()


@pytest.fixture
def lease(store, time):
    def take(name="a"):
        return acquire_lease(
            store,
            holder={"host": name},
            clock=time.wall,
            seconds=60,
            monotonic=time.monotonic,
        )

    return take


def test_run_has_the_same_digests_on_every_store(run, make_run, memory_root, rollout_row):
    """Tables, parts, gates and ledger work as on a disk, with equal bytes."""
    remote = make_run(root=memory_root)
    rows = [rollout_row(sample=1), rollout_row(sample=0)]

    for each in (run, remote):
        each.write_part("grpo", "train", 0, 0, {"rollouts": rows})
        each.assemble_parts("grpo", "train", 0, [0])
        each.append("x", value=1)
        each.replace_result({"status": "running"})

    assert remote.content_digests() == run.content_digests()
    assert remote.parts("grpo", "train", 0) == [0]
    assert [event["event"] for event in Run.open(remote.path).events()] == ["x", "result"]
    assert Run.open(remote.path).result() == {"status": "running"}


def test_other_spec_is_refused_on_an_object_store(make_run, memory_root):
    make_run(root=memory_root)

    with pytest.raises(ConflictError, match="spec_sha256"):
        make_run(root=memory_root, spec={"title": "other"})


def test_ledger_is_read_once_under_a_lock_and_misses_no_line_of_this_process(
    make_run, memory_root, monkeypatch
):
    """Two views of one run: each sees the other's lines, and neither lists the store for its own."""
    one = make_run(root=memory_root)
    with one.lock():
        other = Run.open(one.path)
        one.append("a")
        other.append("b")
        seen = [event["event"] for event in one.events()]
        listed = []
        paths = ObjectStore.paths
        monkeypatch.setattr(
            ObjectStore,
            "paths",
            lambda self, prefix="": listed.append(prefix) or paths(self, prefix),
        )
        one.append("c")
        again = [event["event"] for event in one.events()]
    after = [event["event"] for event in other.events()]

    assert (seen, again, after) == (["a", "b"], ["a", "b", "c"], ["a", "b", "c"])
    assert listed == ["ledger"]


def test_line_is_added_once(store):
    """Two writers of one line: the first wins, the second learns that it is not alone."""
    store.append_line("ledger.jsonl", b"mine", number=1)
    store.append_line("ledger.jsonl", b"mine", number=1)

    with pytest.raises(ConflictError, match="no other process"):
        store.append_line("ledger.jsonl", b"theirs", number=1)

    assert store.read_lines("ledger.jsonl") == [b"mine"]
    assert store.read_lines("ledger.jsonl", after=1) == []


def test_missing_line_is_an_error(store):
    store.append_line("ledger.jsonl", b"one", number=1)
    store.append_line("ledger.jsonl", b"three", number=3)

    with pytest.raises(ConflictError, match="line 2 of the log"):
        store.read_lines("ledger.jsonl")


def test_lease_is_held_by_one(lease, store, time):
    first = lease("a")

    with pytest.raises(ConflictError, match="host a, token 1"):
        lease("b")

    assert lease_holder(store, clock=time.wall) == {"host": "a", "token": 1}
    first.release()
    first.release()
    assert lease_holder(store, clock=time.wall) is None
    assert lease("b").token == 2


def test_lease_lives_on_with_signs_of_life(lease, time):
    """A beat every 40 s keeps a lease of 60 s; the holder stops before others may start."""
    first = lease("a")
    for _ in range(3):
        time.seconds += 40
        first.beat()
    time.seconds += 59.9
    first.check()
    with pytest.raises(ConflictError):
        lease("b")

    time.seconds += 0.2
    with pytest.raises(StoreError, match="token 1 ran out"):
        first.check()
    with pytest.raises(ConflictError, match="host a"):
        lease("b")

    time.seconds += 5.0
    assert lease("b").token == 2
    with pytest.raises(ConflictError, match="another process took it, found 'token 1 ran out'"):
        first.check()


def test_lease_runs_out_while_the_machine_sleeps(lease, time):
    """The monotonic clock stands still meanwhile; a wall clock that is put back gives no time."""
    first = lease("a")
    time.asleep += 59.9
    first.check()
    time.asleep += 0.1
    with pytest.raises(StoreError, match="token 1 ran out"):
        first.check()
    with pytest.raises(StoreError, match="token 1 ran out"):
        first.beat()

    time.asleep, time.seconds = -3600.0, 60.0
    with pytest.raises(StoreError, match="token 1 ran out"):
        first.check()


def test_lease_that_was_given_back_is_not_held(lease):
    first = lease("a")
    first.release()

    with pytest.raises(ConflictError, match="token 1, released"):
        first.check()


def test_claim_that_comes_between_look_and_claim_wins(lease, store, time):
    """A saw that token 1 was given back; B claims token 2; A must not go on to token 3."""
    lease("old").release()
    claimed = []

    class Overtaken:
        url = store.url
        paths = staticmethod(store.paths)
        write_new = staticmethod(store.write_new)

        @staticmethod
        def read_if_exists(path):
            found = store.read_if_exists(path)
            if path == "lease/000000001/released.json":
                claimed.append(lease("b"))
            return found

    with pytest.raises(ConflictError, match="token 2"):
        acquire_lease(Overtaken, holder={"host": "a"}, clock=time.wall, monotonic=time.monotonic)

    assert [one.token for one in claimed] == [2]
    assert lease_holder(store, clock=time.wall) == {"host": "b", "token": 2}
    claimed[0].check()


def test_claim_of_the_same_moment_is_won_by_one(lease, store, time):
    """Both saw no holder; one of the two claims is refused by the store."""

    class Late:
        url = store.url
        paths = staticmethod(lambda _: [])
        read_if_exists = staticmethod(store.read_if_exists)
        write_new = staticmethod(store.write_new)
        replace = staticmethod(store.replace)

    lease("a")

    with pytest.raises(ConflictError, match="token 1"):
        acquire_lease(Late, holder={"host": "b"}, clock=time.wall, monotonic=time.monotonic)


def test_writer_that_was_passed_over_is_stopped(make_run, memory_root):
    """A process that lost its lease cannot add to the ledger after the new holder wrote."""
    run = make_run(root=memory_root)
    with run.lock():
        run.append("a")
        later = {"n": 2, "at": "t", "event": "b", "token": 2}
        run.store.append_line("ledger.jsonl", b'{"n":2,"at":"t","event":"b","token":2}', number=2)

        with pytest.raises(ConflictError, match="a line of lock 2"):
            run._ledger.append("c", {})

        assert run.events("b") == [later]


def test_lock_on_an_object_store_is_a_lease(make_run, memory_root):
    run = make_run(root=memory_root)
    with run.lock() as lock:
        assert lock.token == 1
        assert run.lock_holder()["run_id"] == "r1"
        with pytest.raises(ConflictError, match="lease"):
            run.store.acquire_lock({})
    assert run.lock_holder() is None


@pytest.mark.parametrize("url", ["http://x/y", "ftp://x/y", "nothing://x"])
def test_store_that_cannot_create_exclusively_is_refused(url):
    with pytest.raises(InputError, match="a local path or one of memory://, s3://"):
        open_store(url)


def test_driver_error_is_one_line():
    """Whatever class a driver raises, the caller gets path and reason."""

    class Broken:
        def cat_file(self, path):
            raise RuntimeError("no credentials")

    store = ObjectStore(Broken(), "b", url="s3://b")

    with pytest.raises(InputError, match=r"s3://b: a: .* answers, found 'RuntimeError: no cred"):
        store.read_if_exists("a")


def test_lease_gives_signs_of_life_by_itself(store):
    """The background thread beats three times per lease time; the beat is an event here."""
    beaten = threading.Event()

    class Watched:
        url = store.url
        paths = staticmethod(store.paths)
        read_if_exists = staticmethod(store.read_if_exists)
        write_new = staticmethod(store.write_new)

        @staticmethod
        def replace(path, data):
            store.replace(path, data)
            beaten.set()

    lease = acquire_lease(Watched, holder={"host": "a"}, seconds=0.3)
    lease.start()

    assert beaten.wait(timeout=20)
    lease.release()
    assert store.exists("lease/000000001/alive.json")
    assert store.exists("lease/000000001/released.json")


def test_lease_outlives_a_store_that_is_out_of_reach(store):
    """A beat that fails is tried again until the deadline; then the holder knows."""
    tries = []
    second = threading.Event()

    class Away:
        url = store.url
        paths = staticmethod(store.paths)
        read_if_exists = staticmethod(store.read_if_exists)
        write_new = staticmethod(store.write_new)

        @staticmethod
        def replace(path, data):
            tries.append(path)
            if len(tries) == 2:
                second.set()
            raise OSError("out of reach")

    lease = acquire_lease(Away, holder={"host": "a"}, seconds=0.3)
    lease.start()

    assert second.wait(timeout=20)
    lease.release()


def test_flawed_lease_is_an_error(store, time):
    store.write_new("lease/000000001/claim.json", b"{}")

    with pytest.raises(InputError, match="a time with zone"):
        lease_holder(store, clock=time.wall)


def test_driver_that_words_a_conflict_its_own_way():
    """A precondition that failed means that the key exists, whatever class the driver raises."""

    class Wordy:
        def pipe_file(self, path, data, mode):
            raise OSError("An error occurred (ConditionalRequestConflict)")

    assert ObjectStore(Wordy(), "b", url="s3://b").write_new("a", b"x") is False


def test_missing_driver_is_one_line(monkeypatch):
    def missing(url, **options):
        raise ImportError("Install gcsfs")

    monkeypatch.setattr("evidence.object_store.url_to_fs", missing)

    with pytest.raises(InputError, match="a store that can be opened \\(Install gcsfs\\)"):
        open_store("gs://bucket/run")
