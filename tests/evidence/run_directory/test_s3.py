"""The run directory on a real S3 interface: a local server that speaks it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from evidence.errors import ConflictError
from evidence.object_store import open_store
from evidence.run import Run

pytestmark = [
    pytest.mark.slow,
    # botocore and moto still call datetime.utcnow, and their sockets close with the interpreter.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def s3_options():
    """Settings of a file system on a local S3 server with one bucket."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 - a second; this file is slow

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": f"http://{host}:{port}"},
    }
    fsspec.filesystem("s3", **options).mkdir("bucket")
    yield options
    server.stop()


def test_run_on_s3_has_the_digests_of_a_local_one(run, make_run, rollout_row, s3_options):
    """Tables, parts, ledger and result work, with the same bytes as on a disk."""
    remote = make_run(root="s3://bucket/same", storage_options=s3_options)
    for each in (run, remote):
        for group in (0, 1):
            rows = [rollout_row(group=group, sample=sample) for sample in (1, 0)]
            each.write_part("grpo", "train", 0, group, {"rollouts": rows})
        each.assemble_parts("grpo", "train", 0, [0, 1])
        each.append("x")
        each.append("y")
        each.replace_result({"status": "running"})

    again = Run.open(remote.path, storage_options=s3_options)

    assert again.content_digests() == run.content_digests()
    assert again.parts("grpo", "train", 0) == [0, 1]
    assert [event["event"] for event in again.events()] == ["x", "y", "result"]
    assert again.result() == {"status": "running"}


def test_conflicts_on_s3_are_found(make_run, rollout_row, s3_options):
    remote = make_run(root="s3://bucket/conflict", storage_options=s3_options)
    remote.write_table("rollouts", [rollout_row()], key=("grpo", "train", 0))

    with pytest.raises(ConflictError, match="column reward"):
        remote.write_table("rollouts", [rollout_row(reward=0.0)], key=("grpo", "train", 0))
    with pytest.raises(ConflictError, match="spec_sha256"):
        make_run(root="s3://bucket/conflict", spec={}, storage_options=s3_options)


def test_one_of_many_claims_the_lease_on_s3(make_run, s3_options):
    """Eight claims at once: one holder, seven refusals that name it."""
    path = make_run(root="s3://bucket/lease", storage_options=s3_options).path
    barrier = threading.Barrier(8)

    def claim(number):
        store = open_store(path, skip_instance_cache=True, **s3_options)
        barrier.wait()
        try:
            return store.acquire_lock({"number": number})
        except ConflictError:
            return None

    with ThreadPoolExecutor(8) as pool:
        held = [lease for lease in pool.map(claim, range(8)) if lease is not None]

    assert len(held) == 1
    held[0].release()
