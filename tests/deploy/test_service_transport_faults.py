"""Misbehaviour on the wire: which calls it hits, and whether the request was applied."""

import time

import httpx
import pytest

from deploy.local_service.transport_faults import CAPACITY_EXHAUSTED, FaultRule, identity_of


def told(client, **rule):
    """Set one rule."""
    answer = client.post("local/faults", {"rules": [rule]})
    assert answer.status_code == 200, answer.text


def hits(client):
    return [rule["hits"] for rule in client.get("local/faults").json()["rules"]]


def decisions(calls, /, **rule):
    made = FaultRule.model_validate({"actions": [{"kind": "status"}]} | rule)
    return [made.decide() is not None for _ in range(calls)]


def test_nth_calls_are_chosen_by_number():
    """Skip two, act twice, on each second call: the 3rd and the 5th."""
    assert decisions(8, skip=2, count=2, every=2) == [
        False, False, True, False, True, False, False, False,
    ]  # fmt: skip


def test_rate_is_met_and_repeatable():
    """About one call in ten, the same ones for the same seed."""
    first = decisions(2000, rate=0.1, seed=7)

    assert decisions(2000, rate=0.1, seed=7) == first
    assert decisions(2000, rate=0.1, seed=8) != first
    assert 150 < sum(first) < 250


def test_rule_is_about_paths_and_models():
    """A rule for one model's steps leaves other calls alone; control endpoints are exempt."""
    rule = FaultRule.model_validate(
        {"path": "optim", "model": "s:train:0", "actions": [{"kind": "status"}]}
    )
    everything = FaultRule.model_validate({"actions": [{"kind": "status"}]})

    assert rule.matches("optim_step", "optim_step s:train:0")
    assert not rule.matches("optim_step", "optim_step s:train:1")
    assert not rule.matches("save_weights", "save_weights s:train:0")
    assert everything.matches("save_weights", "save_weights x")
    assert not everything.matches("local/faults", "local/faults")


def test_identity_names_what_a_call_is_about():
    """Ids are read from JSON; a broken body has none."""
    body = b'{"model_id": "s:train:0", "seq_id": 3, "path": "a"}'

    assert identity_of("save_weights", body, "application/json") == "save_weights s:train:0 a"
    assert identity_of("save_weights", b"{", "application/json") == "save_weights"


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {}), (503, {"Retry-After": "7"}), (500, {}), (402, {}), (410, {})]
)
def test_refusal_comes_before_anything_is_applied(serve, status, headers):
    """The status and headers are as told, once; the request sent again is applied."""
    with serve() as client:
        model = client.model()
        told(
            client,
            path="optim_step",
            actions=[{"kind": "status", "status": status, "headers": headers}],
        )
        refused = client.step(model, 1)

        assert refused.status_code == status
        assert refused.headers.get("retry-after") == headers.get("Retry-After")
        assert client.numerics.models[0].applied == []
        assert client.result(client.step(model, 1)).status_code == 200
        assert hits(client) == [1]


@pytest.mark.parametrize(("kind", "applied"), [("drop_before", 0), ("drop_after", 1)])
def test_dropped_connection_before_and_after(serve, kind, applied):
    """Without an answer the client cannot tell; the service can, and applies it once."""
    with serve() as client:
        model = client.model()
        told(client, path="optim_step", actions=[{"kind": kind}])
        with pytest.raises(httpx.TransportError):
            client.step(model, 1)
        deadline = time.monotonic() + 20.0
        state = client.look(model)
        while state["waiting_requests"] and time.monotonic() < deadline:
            state = client.look(model)

        assert state["waiting_requests"] == 0
        assert state["applied"]["optimizer_steps"] == applied
        client.result(client.step(model, 1))
        assert client.numerics.models[0].steps == 1


def test_answer_lost_at_the_poll_is_given_again(serve):
    """The result is kept: the second poll has it."""
    with serve() as client:
        model = client.model()
        answer = client.step(model, 1)
        told(client, path="retrieve_future", actions=[{"kind": "drop_after"}])
        with pytest.raises(httpx.TransportError):
            client.result(answer)

        assert client.result(answer).json() == {"metrics": {"grad_norm": 1.0}}


def test_hanging_call_is_cut_off_in_the_end(serve):
    """No answer for the told time, then the connection closes; nothing was applied."""
    with serve() as client:
        model = client.model()
        told(client, path="optim_step", actions=[{"kind": "hang", "seconds": 0.05}])
        with pytest.raises(httpx.TransportError):
            client.step(model, 1)

        assert client.look(model)["applied"]["optimizer_steps"] == 0


def test_delayed_call_is_applied(serve):
    """Late, but once and whole."""
    with serve() as client:
        model = client.model()
        told(client, path="optim_step", actions=[{"kind": "delay", "seconds": 0.01}])

        assert client.result(client.step(model, 1)).status_code == 200


def test_capacity_answer_in_disguise(serve):
    """Creation is accepted, and its promise fails without any status."""
    with serve() as client:
        told(
            client,
            path="create_model",
            actions=[{"kind": "fail_future", "error": CAPACITY_EXHAUSTED, "category": "server"}],
        )
        body = {"session_id": client.session(), "model_seq_id": 0, "base_model": "tiny"}
        poll = client.result(client.post("create_model", body))

        assert poll.status_code == 200
        assert poll.json() == {"error": CAPACITY_EXHAUSTED, "category": "server"}
        assert client.numerics.models == []


def test_taken_adapter_slots_in_disguise(serve):
    """Creation is accepted, and its poll is a 400 each time."""
    with serve() as client:
        message = "Maximum number of LoRA adapters (4) reached"
        told(
            client,
            path="create_model",
            actions=[{"kind": "poll_status", "status": 400, "message": message}],
        )
        body = {"session_id": client.session(), "model_seq_id": 0, "base_model": "tiny"}
        answer = client.post("create_model", body)
        polls = [client.result(answer) for _ in range(2)]

        assert [poll.status_code for poll in polls] == [400, 400]
        assert polls[0].json()["detail"] == message


def test_sampling_that_will_fail_still_names_its_sequences(serve):
    """Clients insist on one sequence id per sample before they poll."""
    with serve() as client:
        told(client, path="asample", actions=[{"kind": "fail_future", "error": "x"}])
        body = {"sampling_session_id": "s", "seq_id": 0, "num_samples": 3}
        answer = client.post("asample", body).json()

        assert len(answer["sample_sequence_ids"]) == 3


def test_rules_are_replaced_and_cleared(serve):
    """POST replaces, DELETE clears; a malformed rule changes nothing."""
    with serve() as client:
        told(client, name="one", count=None, path="nothing", actions=[{"kind": "status"}])
        bad = client.post("local/faults", {"rules": [{"actions": []}]})
        assert bad.status_code == 400
        assert [rule["name"] for rule in client.get("local/faults").json()["rules"]] == ["one"]

        client.http.delete("/api/v1/local/faults")
        assert client.get("local/faults").json()["rules"] == []
