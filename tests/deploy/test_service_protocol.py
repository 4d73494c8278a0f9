"""The HTTP layer over a core that counts: order, duplicates, refusals, restarts."""

import errno

import numpy as np
import pytest

from deploy.local_service.wire_schema import ForwardBackwardOutput, SampleResponse


def test_a_training_step_end_to_end(serve):
    """Two requests of weights 1+2 give a gradient of 6; lr 0.5 moves the value to -3."""
    with serve() as client:
        model = client.model()
        for seq in (1, 2):
            poll = client.result(client.forward_backward(model, seq))
            output = ForwardBackwardOutput()
            output.ParseFromString(poll.content)
            assert poll.headers["content-type"] == "application/x-protobuf"
            assert [(m.key, m.value) for m in output.metrics] == [("loss:sum", 3.0)]
        assert client.result(client.step(model, 3)).json() == {"metrics": {"grad_norm": 1.0}}

        assert client.numerics.models[0].value == -3.0
        assert client.look(model)["optimizer"]["steps"] == 1


def test_request_sent_again_is_applied_once(serve):
    """The same number and content: one promise, one application, the same result."""
    with serve() as client:
        model = client.model()
        answers = [client.forward_backward(model, 1) for _ in range(3)]
        results = {client.result(answer).content for answer in answers}
        steps = [client.step(model, 2) for _ in range(3)]
        for answer in steps:
            client.result(answer)

        assert len({answer.json()["request_id"] for answer in answers}) == 1
        assert len(results) == 1
        assert client.numerics.models[0].applied == ["forward_backward", "optim_step"]
        assert client.look(model)["applied"]["requests"] == {
            "create_model": 1,
            "forward_backward": 1,
            "optim_step": 1,
        }


def test_creation_sent_again_makes_one_model(serve):
    """(session, model_seq_id) names one model."""
    with serve() as client:
        session = client.session()
        first, second = client.model(session), client.model(session)

        assert first == second == f"{session}:train:0"
        assert len(client.numerics.models) == 1


def test_used_number_with_other_content_is_a_conflict(serve):
    """One number, two contents: the second is refused with 409 and not applied."""
    with serve() as client:
        model = client.model()
        client.result(client.forward_backward(model, 1))
        answer = client.forward_backward(model, 1, weights=(5.0, 5.0))

        assert (answer.status_code, answer.json()["error"]) == (409, "conflict")
        assert client.numerics.models[0].applied == ["forward_backward"]


def test_passed_over_number_is_a_conflict_and_a_gap_is_not(serve):
    """Number 3 after 1 is taken at once; number 2 is too late then."""
    with serve() as client:
        model = client.model()
        client.result(client.forward_backward(model, 1))
        assert client.result(client.forward_backward(model, 3)).status_code == 200
        late = client.forward_backward(model, 2)

        assert (late.status_code, late.json()["error"]) == (409, "conflict")


def test_refused_request_holds_up_nothing(serve):
    """After a 400 the next number is taken."""
    with serve() as client:
        model = client.model()
        bad = client.forward_backward(model, 1, weights=(float("nan"), 1.0))
        assert bad.status_code == 400
        assert bad.json()["detail"] == (
            "data[0].weights: holds a NaN or an infinity, expected finite numbers"
        )

        assert client.result(client.forward_backward(model, 2)).status_code == 200


def test_unfinished_promise_is_held_and_then_asked_for_again(serve):
    """A poll of work in progress is a 408 that names the promise."""
    with serve() as client:
        client.numerics.hold.clear()
        body = {"session_id": client.session(), "model_seq_id": 0, "base_model": "tiny"}
        answer = client.post("create_model", body)
        poll = client.poll(answer)
        client.numerics.hold.set()

        assert poll.status_code == 408
        assert poll.json() == {
            "type": "try_again",
            "request_id": answer.json()["request_id"],
            "queue_state": "active",
        }
        assert client.result(answer).status_code == 200


def test_unknown_promise_is_gone(serve):
    """A poll for what was never promised is 410, never 404 or 5xx."""
    with serve() as client:
        poll = client.post("retrieve_future", {"request_id": "x:1"})

        assert (poll.status_code, poll.json()["error"]) == (410, "expired")


def test_models_are_lost_in_a_restart_and_their_record_is_not(serve):
    """After a restart: 410 model_lost for work, steps and checkpoints still known."""
    with serve() as client:
        model = client.model()
        client.result(client.forward_backward(model, 1))
        client.result(client.step(model, 2))
        saved = client.post("save_weights", {"model_id": model, "seq_id": 3, "path": "s1"})
        uri = client.result(saved).json()["path"]
    with serve() as client:
        work = client.step(model, 4)
        poll = client.post("retrieve_future", {"request_id": f"{model}:2"})
        saved_poll = client.post("retrieve_future", {"request_id": f"{model}:3"})
        look = client.look(model)
        run = client.get(f"training_runs/{model}").json()

        assert (work.status_code, work.json()["error"]) == (410, "model_lost")
        assert (poll.status_code, poll.json()["error"]) == (410, "model_lost")
        assert saved_poll.json() == {"path": uri, "type": "save_weights"}
        assert (look["state"], look["applied"]["optimizer_steps"]) == ("lost", 1)
        assert run["last_checkpoint"]["tinker_path"] == uri
        assert client.step("nobody", 1).status_code == 404

        body = {"session_id": client.session(), "model_seq_id": 0, "path": uri, "optimizer": True}
        restored = client.post("load_weights", body)
        assert client.result(restored).status_code == 200
        state = client.look(restored.json()["model_id"])
        assert state["optimizer"]["steps"] == 1
        assert state["restored_from"] == uri
        assert client.numerics.models[0].value == -1.5


def test_creation_sent_again_after_a_restart_is_told_that_the_model_is_lost(serve):
    """It is not made a second time under the same id."""
    with serve() as client:
        session = client.session()
        client.model(session)
    with serve() as client:
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        again = client.post("create_model", body)

        assert (again.status_code, again.json()["error"]) == (410, "model_lost")
        assert client.numerics.models == []
        assert client.model(session, seq=1) == f"{session}:train:1"


def test_sampling_sessions_outlive_a_restart(serve):
    """Base model, saved checkpoint and published weights are all sampled from afterwards."""

    def sample(client, sampler, seq):
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 2},
        }
        answer = client.post("asample", body)
        assert answer.json()["sample_sequence_ids"] == [f"{sampler}:{seq}:0"]
        response = SampleResponse()
        response.ParseFromString(client.result(answer).content)
        tokens = np.frombuffer(response.sequences[0].tokens, np.int32).tolist()
        return tokens, np.frombuffer(response.sequences[0].logprobs, np.float32).tolist()

    with serve() as client:
        session = client.session()
        model = client.model(session)
        client.result(client.forward_backward(model, 1))
        client.result(client.step(model, 2))
        named = client.post(
            "save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "a"}
        )
        uri = client.result(named).json()["path"]
        published = client.post(
            "save_weights_for_sampler",
            {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 7},
        )
        samplers = [client.result(published).json()["sampling_session_id"]]
        for seq, source in enumerate(({"base_model": "tiny"}, {"model_path": uri})):
            body = {"session_id": session, "sampling_session_seq_id": seq} | source
            samplers.append(
                client.post("create_sampling_session", body).json()["sampling_session_id"]
            )
        before = [sample(client, sampler, 0) for sampler in samplers]
    with serve() as client:
        after = [sample(client, sampler, 0) for sampler in samplers]

        assert samplers[0] == f"{session}:sample:7"
        assert (
            before
            == after
            == [
                ([6, 6], [-2.5, -2.5]),
                ([6, 6], [-1.0, -1.0]),
                ([6, 6], [-2.5, -2.5]),
            ]
        )


def test_full_initialization_is_provable_and_immutable(serve):
    """Scope, digests and refusals of a checkpoint saved before the first step."""
    with serve() as client:
        model = client.model()
        save = {"model_id": model, "seq_id": 1, "path": "init", "ttl_seconds": 60}
        uri = client.result(client.post("save_weights", save)).json()["path"]
        known = client.get(f"local/checkpoints?path={uri}").json()
        again = client.post("save_weights", {"model_id": model, "seq_id": 2, "path": "init"})
        overwrite = client.post(
            "save_weights", {"model_id": model, "seq_id": 3, "path": "init", "overwrite": True}
        )
        delete = client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/init")

        assert known["scope"] == "full_initialization"
        assert known["immutable"] is True
        assert known["expires_at"] is None
        assert known["kind"] == "training"
        assert known["adapter_sha256"] == client.look(model)["adapter_sha256"]
        for answer in (again, overwrite, delete):
            assert answer.status_code == 400
            assert "immutable" in answer.json()["message"]


def test_incomplete_gradient_takes_no_step(serve):
    """After a failed forward_backward its step is refused; the one after next works."""
    with serve() as client:
        model = client.model()
        client.result(client.forward_backward(model, 1))
        failed = client.result(client.forward_backward(model, 2, weights=(666.0,)))
        refused = client.result(client.step(model, 3)).json()
        assert failed.json()["category"] == "server"
        assert refused["category"] == "user"
        assert "gradient is incomplete" in refused["error"]
        assert client.numerics.models[0].steps == 0

        client.result(client.forward_backward(model, 4))
        assert client.result(client.step(model, 5)).json() == {"metrics": {"grad_norm": 1.0}}
        assert client.numerics.models[0].value == -1.5


def test_loss_that_is_not_finite_is_the_callers_fault(serve):
    """The poll says so; nothing is stepped on."""
    with serve() as client:
        model = client.model()
        answer = client.result(client.forward_backward(model, 1, weights=(777.0,))).json()

        assert answer == {
            "error": "loss: loss:sum not finite, expected finite numbers",
            "category": "user",
        }


def test_step_whose_journal_cannot_be_written_loses_the_model(serve, monkeypatch):
    """What cannot be recorded is void: 410 for the poll, and the model is gone."""
    with serve() as client:
        model = client.model()
        client.result(client.forward_backward(model, 1))

        def full(*_args, **_kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(client.service.context.runs, "applied", full)
            poll = client.result(client.step(model, 2))

        assert (poll.status_code, poll.json()["error"]) == (410, "model_lost")
        assert client.step(model, 3).status_code == 410
        assert client.look(model)["applied"]["optimizer_steps"] == 0


def test_store_that_cannot_be_written_refuses_and_accepts_nothing(serve, monkeypatch):
    """A full disk at submission is a 503 that clients repeat; the same number works later."""
    with serve() as client:
        session = client.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}

        def full(*_args, **_kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(client.service.context.runs, "create", full)
            refused = client.post("create_model", body)

        assert (refused.status_code, refused.json()["error"]) == (503, "engine_unreachable")
        assert "No space left" in refused.json()["message"]
        assert client.model(session) == f"{session}:train:0"


def test_taken_sampler_name_is_refused_at_once_and_its_own_repeat_is_not(serve):
    """Sampler checkpoints are immutable; the request that wrote one may be sent again."""
    with serve() as client:
        model = client.model()
        body = {"model_id": model, "seq_id": 1, "path": "a"}
        first = client.result(client.post("save_weights_for_sampler", body)).json()
        again = client.result(client.post("save_weights_for_sampler", body)).json()
        other = client.post("save_weights_for_sampler", body | {"seq_id": 2})

        assert (
            first
            == again
            == {
                "path": f"tinker://{model}/sampler_weights/a",
                "type": "save_weights_for_sampler",
            }
        )
        assert (other.status_code, other.json()["error"]) == (400, "invalid_request")


def test_defect_is_answered_without_its_details(serve, monkeypatch, caplog):
    """A 500 with an id that stands in the log, and nothing of the exception."""
    with serve() as client:

        def broken(*_args, **_kwargs):
            raise KeyError("secret detail")

        monkeypatch.setattr(client.service.context.sessions, "create", broken)
        answer = client.post("create_session", {"tags": []})

        assert (answer.status_code, answer.json()["error"]) == (500, "internal")
        assert "secret" not in answer.text
        assert answer.json()["error_id"] in caplog.text


def test_failed_creation_frees_its_slot(serve):
    """The poll tells why, and the only slot is free again."""
    with serve(max_adapters=1) as client:
        body = {
            "session_id": client.session(),
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 13},
        }
        poll = client.result(client.post("create_model", body)).json()

        assert poll == {"error": "create_model: RuntimeError: unlucky rank", "category": "server"}
        assert client.model()


@pytest.mark.parametrize(("status", "retry_after"), [(429, 5.0), (503, None)])
def test_capacity_answers_are_as_set(serve, status, retry_after):
    """One slot: the second model gets the capacity answer, until the first session ends."""
    with serve(max_adapters=1, capacity_status=status, retry_after_seconds=retry_after) as client:
        session = client.session()
        client.model(session)
        body = {"session_id": client.session(), "model_seq_id": 0, "base_model": "tiny"}
        refused = client.post("create_model", body)

        assert (refused.status_code, refused.json()["error"]) == (status, "saturated")
        assert refused.headers.get("retry-after") == (None if retry_after is None else "5")

        client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        assert client.result(client.post("create_model", body)).status_code == 200


def test_full_queue_is_a_capacity_answer_and_the_request_can_be_sent_again(serve):
    """Refused requests leave no promise behind: the same number works later."""
    with serve(max_queue=1) as client:
        model = client.model()
        client.numerics.hold.clear()
        other = {"session_id": client.session(), "model_seq_id": 0, "base_model": "tiny"}
        waiting = client.post("create_model", other)
        refused = client.forward_backward(model, 1)
        client.numerics.hold.set()
        client.result(waiting)

        assert (refused.status_code, refused.json()["error"]) == (429, "saturated")
        assert client.result(client.forward_backward(model, 1)).status_code == 200


def test_end_of_a_session_releases_what_is_its_own(serve):
    """Models, samplers and promises of an ended session answer 410; others go on."""
    with serve() as client:
        session, other = client.session(), client.session()
        model, kept = client.model(session), client.model(other)
        published = client.post(
            "save_weights_for_sampler",
            {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0},
        )
        sampler = client.result(published).json()["sampling_session_id"]
        finish = {"reason": {"type": "success"}, "detail": None}
        assert client.post(f"sessions/{session}/finish", finish).status_code == 204
        assert client.post(f"sessions/{session}/finish", finish).status_code == 204
        sample = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 1},
        }

        assert client.step(model, 2).status_code == 410
        assert client.post("asample", sample).status_code == 410
        assert client.post("session_heartbeat", {"session_id": session}).status_code == 410
        assert client.look(model)["state"] == "released"
        assert client.result(client.forward_backward(kept, 1)).status_code == 200


def test_silent_session_is_ended(serve):
    """A session that says nothing for its time is released by the upkeep."""
    with serve(session_timeout_seconds=300) as client:
        session = client.session()
        client.model(session)
        client.service.sweep()
        assert len(client.service.queue.models) == 1
        client.service.context.sessions.find(session).last_seen -= 301
        client.service.sweep()

        assert client.service.queue.models == {}
        assert client.service.context.sessions.find(session).finished["reason"] == "silence"


def test_wrong_key_is_refused_everywhere_but_at_the_health_check(serve):
    """401 without the key, 200 with it."""
    with serve(api_key="tml-right-key") as client:
        body = {"tags": [], "sdk_version": "x"}
        wrong = client.post("create_session", body, headers={"X-API-Key": "tml-wrong-key"})
        right = client.post("create_session", body, headers={"X-API-Key": "tml-right-key"})

        assert (wrong.status_code, wrong.json()["error"]) == (401, "unauthorized")
        assert right.status_code == 200
        assert client.get("healthz").json() == {"status": "ok"}
        assert client.get("local/info").status_code == 401


def test_oversized_body_is_refused(serve):
    """413 by announced and by real length."""
    with serve(max_body_bytes=1024) as client:
        announced = client.post("create_session", {"tags": ["x" * 2000]})

        def chunks():
            yield b'{"tags": ["'
            yield b"x" * 2000
            yield b'"]}'

        streamed = client.http.post("/api/v1/create_session", content=chunks())

        assert announced.status_code == 413
        assert streamed.status_code == 413


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("create_model", {"session_id": "x"}, "model_seq_id"),
        ("create_session", [], "body"),
        (
            "optim_step",
            {"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": "NaN"}},
            "adam_params.learning_rate: 'NaN'",
        ),
        ("asample", {"sampling_session_id": "a/b", "seq_id": 0}, "sampling_session_id"),
        ("retrieve_future", {"request_id": ""}, "request_id"),
    ],
)
def test_bodies_of_the_wrong_form_are_refused_by_field(serve, path, body, message):
    """A 400 with a body: field, value, expectation; never a 422 or a 500."""
    with serve() as client:
        answer = client.post(path, body)

        assert answer.status_code == 400
        assert answer.json()["error"] == "invalid_request"
        assert message in answer.json()["detail"]


def test_body_that_is_no_json_is_refused(serve):
    """Truncated JSON is a 400."""
    with serve() as client:
        answer = client.http.post(
            "/api/v1/create_session",
            content=b'{"tags": [',
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400


def test_model_that_is_not_served_is_refused_by_name(serve):
    """The answer lists what is served."""
    with serve() as client:
        body = {"session_id": client.session(), "model_seq_id": 0, "base_model": "other/model"}
        answer = client.post("create_model", body)

        assert answer.status_code == 400
        assert answer.json()["message"] == (
            "base_model 'other/model': not served here, expected one of ['tiny']"
        )


def test_fixed_hyperparameters_are_reported_before_the_first_step_and_enforced(serve):
    """A client that names them at creation has the server hold them."""
    with serve() as client:
        fixed = {"type": "adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
        model = client.model(optimizer_config=fixed)
        report = client.look(model)["optimizer"]
        info = client.post("get_info", {"model_id": model}).json()
        other = client.step(model, 1, eps=1e-6)

        assert {name: report[name] for name in fixed} == fixed
        assert (report["learning_rate"], report["steps"]) == (None, 0)
        assert info["optimizer_config"] == fixed
        assert other.status_code == 400
        assert "adam_params.eps: 1e-06, expected 1e-08" in other.json()["message"]
        assert client.result(client.step(model, 2)).status_code == 200


def test_cancelled_sampling_is_dropped_and_training_is_not(serve):
    """A cancel reaches samples alone."""
    with serve() as client:
        session = client.session()
        client.numerics.hold.clear()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        training = client.post("create_model", body)
        sampler = client.post(
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"},
        ).json()["sampling_session_id"]
        sample = client.post(
            "asample",
            {
                "sampling_session_id": sampler,
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                "sampling_params": {"max_tokens": 1},
            },
        )
        for answer in (training, sample):
            cancelled = client.post("cancel_future", {"request_id": answer.json()["request_id"]})
            assert cancelled.status_code == 204
        client.numerics.hold.set()

        assert client.result(training).json()["type"] == "create_model"
        assert client.service.context.futures.find(f"{sampler}:0").cancelled


def test_faults_cannot_be_reached_without_the_flag(serve):
    """No endpoint, and no switch."""
    with serve(allow_faults=False) as client:
        assert client.get("local/faults").status_code == 404
        assert client.post("local/faults", {"faults": ["ignored_seed"]}).status_code == 404
        with pytest.raises(Exception, match="expected a start with --allow-faults"):
            client.service.context.faults.switch(["ignored_seed"])
