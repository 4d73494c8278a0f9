"""Kills, restarts, lost answers and random failures, with the unmodified client."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import tinker
import torch
from tinker import types

from deploy.local_service import launch
from deploy.local_service.journal import StoreLock
from deploy.local_service.settings import ServiceSettings

ADAM = types.AdamParams(learning_rate=0.05, eps=1e-8)


def supervised():
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints([1, 70, 71]),
            loss_fn_inputs={
                "target_tokens": torch.tensor([70, 71, 72]),
                "weights": torch.tensor([0.0, 1.0, 1.0]),
            },
        )
    ]


def trainer(client):
    return client.create_lora_training_client("tiny", rank=4, seed=3).result(timeout=60)


def train(model, steps=1):
    for _ in range(steps):
        model.forward_backward(supervised(), "cross_entropy").result(timeout=60)
        model.optim_step(ADAM).result(timeout=60)


def control(service, method, path, **kwargs):
    with httpx.Client(trust_env=False, timeout=30) as http:
        answer = http.request(method, f"{service.url}/api/v1/local/{path}", **kwargs)
        answer.raise_for_status()
        return answer.json()


def digests(service, model):
    known = control(service, "GET", f"models/{model.model_id}")
    return known["adapter_sha256"], known["optimizer_sha256"]


@pytest.fixture
def undisturbed(local_service):
    """Digests of a model after three plain steps."""
    client = tinker.ServiceClient(base_url=local_service.url)
    model = trainer(client)
    train(model, steps=3)
    return digests(local_service, model)


def test_lost_answers_change_no_bit(faulty_service, undisturbed):
    """Answers of two submissions, two steps and two polls are lost after they were applied."""
    client = tinker.ServiceClient(base_url=faulty_service.url)
    model = trainer(client)
    rules = [
        {"path": path, "model": model.model_id, "count": 2, "actions": [{"kind": "drop_after"}]}
        for path in ("forward_backward", "optim_step", "retrieve_future")
    ]
    control(faulty_service, "POST", "faults", json={"rules": rules})
    train(model, steps=3)
    state = control(faulty_service, "GET", "faults")
    known = control(faulty_service, "GET", f"models/{model.model_id}")

    assert [rule["hits"] for rule in state["rules"]] == [2, 2, 2]
    assert known["applied"]["requests"]["optim_step"] == 3
    assert known["applied"]["requests"]["forward_backward"] == 3
    assert digests(faulty_service, model) == undisturbed


def test_one_call_in_ten_failing_changes_no_bit(faulty_service, undisturbed):
    """429, 503, 500, lost before, lost after and late, chosen by a seed."""
    client = tinker.ServiceClient(base_url=faulty_service.url)
    model = trainer(client)
    actions = [
        {"kind": "status", "status": 429},
        {"kind": "status", "status": 503, "headers": {"Retry-After": "0.2"}},
        {"kind": "status", "status": 500},
        {"kind": "drop_before"},
        {"kind": "drop_after"},
        {"kind": "delay", "seconds": 0.05},
    ]
    rule = {"model": model.model_id, "rate": 0.3, "seed": 11, "actions": actions}
    control(faulty_service, "POST", "faults", json={"rules": [rule]})
    train(model, steps=3)
    hits = control(faulty_service, "GET", "faults")["rules"][0]["hits"]

    assert hits >= 3
    assert digests(faulty_service, model) == undisturbed


def test_checkpoints_and_samplers_outlive_a_kill(start_service):
    """kill -9 between two steps: the model is lost, what was saved is not."""
    service = start_service()
    client = tinker.ServiceClient(base_url=service.url)
    model = trainer(client)
    train(model)
    saved = model.save_state("one").result(timeout=60).path
    named = model.save_weights_for_sampler("one").result(timeout=60).path
    published = model.save_weights_and_get_sampling_client().result(timeout=60)
    on_checkpoint = client.create_sampling_client(model_path=named).result(timeout=60)
    prompt = types.ModelInput.from_ints([1, 70, 71])
    before = published.compute_logprobs(prompt).result(timeout=60)
    train(model)
    expected = digests(service, model)
    service.kill()
    service = service.restart()
    try:
        with pytest.raises(tinker.APIStatusError, match="model_lost") as lost:
            model.optim_step(ADAM).result(timeout=60)
        known = control(service, "GET", f"models/{model.model_id}")

        assert lost.value.status_code == 410
        assert (known["state"], known["applied"]["optimizer_steps"]) == ("lost", 2)
        assert published.compute_logprobs(prompt).result(timeout=60) == before
        assert on_checkpoint.compute_logprobs(prompt).result(timeout=60) == before
        # The old session goes on, and so does its client.
        restored = client.create_training_client_from_state_with_optimizer(saved)
        again = restored.result(timeout=60)
        train(again)
        assert digests(service, again) == expected
    finally:
        service.kill()


@pytest.mark.slow
def test_save_killed_half_way_leaves_the_older_checkpoint(start_service):
    """Overwriting saves under kill -9: the name always stands for a whole checkpoint."""
    service = start_service()
    client = tinker.ServiceClient(base_url=service.url)
    model = trainer(client)
    train(model)
    uri = model.save_state("x").result(timeout=60).path
    for _ in range(5):
        train(model)
        model.save_state("x", overwrite=True)
    service.kill()
    service = service.restart()
    try:
        known = control(service, "GET", "checkpoints", params={"path": uri})
        fresh = tinker.ServiceClient(base_url=service.url)
        loaded = fresh.create_training_client_from_state_with_optimizer(uri).result(timeout=60)

        assert 1 <= known["optimizer_steps"] <= 6
        assert digests(service, loaded) == (known["adapter_sha256"], known["optimizer_sha256"])
    finally:
        service.kill()


def test_stop_is_clean_and_quick_with_work_and_polls_open(start_service):
    """SIGTERM in the middle of a long sampling batch, its poll held: exit code 0 in seconds."""
    service = start_service()
    api = f"{service.url}/api/v1"
    with httpx.Client(trust_env=False, timeout=60) as http:
        session = http.post(f"{api}/create_session", json={"tags": []}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = http.post(f"{api}/create_sampling_session", json=body).json()
        body = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": 0,
            "num_samples": 512,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 4000, "stop": []},
        }
        request = http.post(f"{api}/asample", json=body).json()
        polls = []
        poll = threading.Thread(
            target=lambda: polls.append(
                http.post(f"{api}/retrieve_future", json={"request_id": request["request_id"]})
            )
        )
        poll.start()
        poll.join(0.5)
        assert poll.is_alive()
        started = time.monotonic()

        assert service.stop() == 0
        assert time.monotonic() - started < 10
        poll.join(10)
        assert [answer.status_code for answer in polls] == [408]
    assert not launch.answers(service.url, seconds=1)


def test_second_service_on_one_store_is_refused(tmp_path):
    """The store belongs to one process; the message says so."""
    settings = ServiceSettings(store=tmp_path, models=("tiny",), lock_wait_seconds=0.1)
    with (
        StoreLock(tmp_path, wait_seconds=0),
        pytest.raises(launch.ServiceStartError, match="held by another service"),
    ):
        launch.start(settings)


def test_taken_port_is_refused(tmp_path):
    """The message names the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ServiceSettings(store=tmp_path / "other", models=("tiny",), port=port)
        with pytest.raises(launch.ServiceStartError, match=f"127.0.0.1:{port}"):
            launch.start(settings)


@pytest.mark.slow
def test_model_that_cannot_be_had_stops_the_start(tmp_path):
    """One line that names it, and no traceback."""
    settings = ServiceSettings(store=tmp_path / "s", models=("none",), preload=("none",))
    with pytest.raises(launch.ServiceStartError, match="base_model") as caught:
        launch.start(settings)

    assert "code 2" in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.slow
def test_service_leaves_with_the_process_that_started_it(tmp_path):
    """A killed parent does not leave a service behind."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from deploy.local_service import launch\n"
        "from deploy.local_service.settings import ServiceSettings\n"
        f"service = launch.start(ServiceSettings(store=Path({str(tmp_path / 's')!r}),"
        " models=('tiny',), exit_with_parent=True))\n"
        "print(service.url, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        url = parent.stdout.readline().strip()
        assert launch.answers(url)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 15
    while launch.answers(url, seconds=1) and time.monotonic() < deadline:
        time.sleep(0.1)  # the service looks for its parent twice a second

    assert not launch.answers(url, seconds=1)


def test_key_is_checked_for_the_real_client(serve):
    """The right key works, another is an authentication error at once."""
    with serve(api_key="tml-right-key") as raw:
        url = str(raw.http.base_url).rstrip("/")
        right = tinker.ServiceClient(base_url=url, api_key="tml-right-key")
        assert right.create_lora_training_client("tiny", rank=4).result(timeout=60).model_id
        right.close("success").result(timeout=30)

        with pytest.raises(tinker.AuthenticationError):
            tinker.RestClient(base_url=url, api_key="tml-wrong-key").get_server_capabilities()
