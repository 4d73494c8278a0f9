"""A running service over a numeric core that counts instead of computing, for tests of the HTTP layer.

A model is one number. forward_backward adds the sum of all weights to its gradient and answers -1
for every target token; a step subtracts learning rate times momentum. Sampling answers with the
prompt's last token, repeated. Weights that sum to 666 run out of memory, to 777 give an infinite
loss; rank 13 cannot be made.
"""

import asyncio
import contextlib
import hashlib
import json
import threading
import time

import httpx
import numpy as np
import pytest
import tinker
import uvicorn
from tinker.proto.request_conv import forward_backward_request_to_proto

from deploy.local_service.address import bind
from deploy.local_service.app import build_app
from deploy.local_service.live import BaseFacts
from deploy.local_service.service import Service
from deploy.local_service.settings import ServiceSettings
from deploy.local_service.wire import SampleResult, SequenceResult


class FakeModel:
    def __init__(self, rank=4, value=0.0, steps=0, momentum=0.0):
        self.lora = {
            "rank": rank,
            "alpha": 32.0,
            "seed": 0,
            "train_attn": True,
            "train_mlp": True,
            "train_unembed": True,
        }
        self.value, self.steps, self.momentum, self.gradient = value, steps, momentum, 0.0
        self.applied = []

    @property
    def optimizer_steps(self):
        return self.steps

    def forward_backward(self, data_D, *, loss_fn, config, backward):
        total = sum(float(d.inputs.get("weights", np.zeros(1)).sum()) for d in data_D)
        if total == 666.0:
            raise MemoryError("out of memory")
        if backward:
            self.gradient += total
        self.applied.append("forward_backward" if backward else "forward")
        logprobs = [np.full(d.inputs["target_tokens"].shape, -1.0, np.float32) for d in data_D]
        return logprobs, {"loss:sum": float("inf") if total == 777.0 else total}

    def optim_step(self, params):
        self.momentum = 0.5 * self.momentum + self.gradient
        self.value -= params.learning_rate * self.momentum
        self.gradient = 0.0
        self.steps += 1
        self.applied.append("optim_step")
        return {"grad_norm": 1.0}

    def discard_gradient(self):
        self.gradient = 0.0

    def adapter_sha256(self):
        return hashlib.sha256(repr(self.value).encode()).hexdigest()

    def optimizer_sha256(self):
        return hashlib.sha256(repr((self.momentum, self.steps)).encode()).hexdigest()

    def sampling_weights(self):
        return self.value

    def save(self, folder, *, with_optimizer):
        state = {"value": self.value}
        if with_optimizer:
            state |= {"momentum": self.momentum, "steps": self.steps}
        (folder / "state.json").write_text(json.dumps(state))


class FakeSampling:
    """Repeats each prompt's last token, up to three times; all in one step."""

    def __init__(self, weights, hold):
        self._weights, self._hold = weights, hold
        self._tasks = []

    def add(self, tasks):
        self._tasks += tasks

    def step(self):
        self._hold.wait(30)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if task.cancelled():
                continue
            length = min(3, task.request.sampling_params.max_tokens)
            sequence = SequenceResult(
                [task.prompt[-1]] * length, [float(self._weights) - 1.0] * length, stopped=False
            )
            task.finish(SampleResult(sequences=[sequence] * task.request.num_samples))
        return False


class FakeNumerics:
    def __init__(self):
        self.models = []
        self.hold = threading.Event()
        self.hold.set()
        """Cleared by a test to keep the engine busy."""

    def load_base(self, name):
        return BaseFacts(
            name=name,
            base_sha256="b" * 64,
            source="fake",
            tokenizer_id="/nowhere",
            architecture="fake",
            dtype="float32",
            vocab_size=100,
            context_length=16,
        )

    def create(self, base_model, config):
        self.hold.wait(30)
        if config.rank == 13:
            raise RuntimeError("unlucky rank")
        model = FakeModel(rank=config.rank)
        self.models.append(model)
        return model

    def load(self, base_model, folder, *, with_optimizer):
        state = json.loads((folder / "state.json").read_text())
        if not with_optimizer:
            state = {"value": state["value"]}
        model = FakeModel(**state)
        self.models.append(model)
        return model

    def sampling_weights(self, base_model, folder):
        return 0.0 if folder is None else json.loads((folder / "state.json").read_text())["value"]

    def sampling(self, weights):
        return FakeSampling(weights, self.hold)

    def versions(self):
        return {"fake": "1"}


class Client:
    """Plain requests with the protocol's bodies."""

    def __init__(self, http, service, numerics):
        self.http, self.service, self.numerics = http, service, numerics

    def post(self, path, body=None, **kwargs):
        return self.http.post(f"/api/v1/{path}", json=body, **kwargs)

    def get(self, path):
        return self.http.get(f"/api/v1/{path}")

    def session(self):
        return self.post("create_session", {"tags": [], "sdk_version": "test"}).json()["session_id"]

    def poll(self, answer):
        """Poll once."""
        assert answer.status_code == 200, answer.text
        return self.post("retrieve_future", {"request_id": answer.json()["request_id"]})

    def result(self, answer):
        """Poll until there is an outcome, as clients do."""
        for _ in range(100):
            poll = self.poll(answer)
            if poll.status_code != 408:
                return poll
        raise TimeoutError(answer.text)

    def model(self, session=None, seq=0, **over):
        body = {"session_id": session or self.session(), "model_seq_id": seq, "base_model": "tiny"}
        answer = self.post("create_model", body | over)
        assert self.result(answer).status_code == 200
        return answer.json()["model_id"]

    def forward_backward(self, model, seq, weights=(1.0, 2.0), forward_only=False):
        request = tinker.types.ForwardBackwardRequest(
            model_id=model,
            seq_id=seq,
            forward_backward_input=tinker.types.ForwardBackwardInput(
                data=[
                    tinker.Datum(
                        model_input=tinker.ModelInput.from_ints([1] * len(weights)),
                        loss_fn_inputs={
                            "target_tokens": np.full(len(weights), 2),
                            "weights": np.array(weights, np.float32),
                        },
                    )
                ],
                loss_fn="cross_entropy",
            ),
        )
        message = forward_backward_request_to_proto(request)
        message.forward_only = forward_only
        return self.http.post(
            "/api/v1/forward_backward",
            content=message.SerializeToString(),
            headers={"content-type": "application/x-protobuf"},
        )

    def step(self, model, seq, **params):
        adam = {"learning_rate": 0.5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8} | params
        return self.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": adam})

    def look(self, model):
        return self.get(f"local/models/{model}").json()


@contextlib.contextmanager
def in_thread(service):
    """Serve over real HTTP from a thread of this process; yield the base URL."""
    listener = bind(service.settings)
    config = uvicorn.Config(build_app(service), log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    deadline = time.monotonic() + 30.0
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.started
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def serve(tmp_path):
    """Start services over one store: ``with serve(max_adapters=1) as client: ...``."""

    @contextlib.contextmanager
    def start(**settings):
        defaults = {
            "store": tmp_path / "store",
            "models": ("tiny",),
            "long_poll_seconds": 0.2,
            "allow_faults": True,
        }
        numerics = FakeNumerics()
        service = Service(ServiceSettings.model_validate(defaults | settings), numerics)
        with (
            in_thread(service) as url,
            httpx.Client(base_url=url, trust_env=False, timeout=30) as http,
        ):
            try:
                yield Client(http, service, numerics)
            finally:
                numerics.hold.set()

    return start
