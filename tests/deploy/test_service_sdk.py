"""Every call of the unmodified Tinker client, against a running service with the tiny model."""

import math
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

LORA = {"base_model": "tiny", "rank": 4, "seed": 3}
ADAM = types.AdamParams(learning_rate=0.05, beta1=0.9, beta2=0.95, eps=1e-8)
PROMPT = types.ModelInput.from_ints([1, 60, 61, 62, 63, 64])


@pytest.fixture
def client(local_service):
    """A client with a session of its own."""
    made = tinker.ServiceClient(base_url=local_service.url)
    yield made
    made.close("success").result(timeout=30)


@pytest.fixture
def look(local_service):
    """Read the service's own view: ``look("models/...")``."""
    with httpx.Client(base_url=f"{local_service.url}/api/v1/local", trust_env=False) as http:

        def get(path, /, **params):
            answer = http.get(path, params=params)
            answer.raise_for_status()
            return answer.json()

        yield get


def trainer(client, **over):
    return client.create_lora_training_client(**(LORA | over)).result(timeout=60)


def datum(tokens, **inputs):
    """A next-token datum; the inputs are given per target token."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor(tokens[1:]),
            **{name: torch.tensor(value, dtype=torch.float32) for name, value in inputs.items()},
        },
    )


def supervised():
    return [
        datum([1, 70, 71, 72], weights=[0.0, 1.0, 1.0]),
        datum([1, 80, 81], weights=[0.5, 1.0]),
    ]


def policy(sampling_logprobs=((-5.0, -5.5, -6.0), (-5.2, -5.4))):
    first, second = sampling_logprobs
    return [
        datum([1, 70, 71, 72], logprobs=list(first), advantages=[0.0, 1.0, -0.5]),
        datum([1, 80, 81], logprobs=list(second), advantages=[-1.0, 0.75]),
    ]


def train(model, data=None, loss="cross_entropy", steps=1):
    for _ in range(steps):
        model.forward_backward(data or supervised(), loss).result(timeout=60)
        model.optim_step(ADAM).result(timeout=60)


def logprobs_of(output):
    return [np.asarray(item["logprobs"].tolist(), np.float32) for item in output.loss_fn_outputs]


# ---- making and describing models


def test_model_is_created_and_described(client, look):
    """get_info names base model, rank, family and where the tokenizer is."""
    model = trainer(client)
    info = model.get_info()

    assert info.model_data.model_name == "tiny"
    assert (info.is_lora, info.lora_rank) == (True, 4)
    assert info.optimizer_config.type == "adamw"
    assert Path(info.model_data.tokenizer_id, "tokenizer.json").is_file()
    known = look(f"models/{model.model_id}")
    assert known["state"] == "live"
    assert known["lora"]["rank"] == 4
    assert known["lora"]["seed"] == 3
    assert known["optimizer"]["steps"] == 0
    assert len(known["base_sha256"]) == len(known["adapter_sha256"]) == 64


def test_equal_seeds_make_equal_adapters(client, look):
    """The adapter depends on seed and shape alone."""
    digests = [
        look(f"models/{trainer(client, seed=seed).model_id}")["adapter_sha256"]
        for seed in (3, 3, 4)
    ]

    assert digests[0] == digests[1] != digests[2]


def test_hyperparameters_fixed_at_creation_reach_the_client_again(client):
    """A configuration with more than the family is held by the server and reported by get_info."""
    fixed = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    config = tinker.types.optimizer.OptimizerConfigBase(type="adamw", **fixed)
    model = trainer(client, optimizer=config)

    assert model.get_info().optimizer_config.model_dump() == {"type": "adamw", **fixed}
    model.forward_backward(supervised(), "cross_entropy").result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match=r"expected 1e-08"):
        model.optim_step(types.AdamParams(eps=1e-6)).result(timeout=60)


def test_unknown_base_model_is_refused(client):
    """The error names the model and what is served."""
    with pytest.raises(tinker.BadRequestError, match="expected one of"):
        trainer(client, base_model="no/such-model")


def test_capabilities_list_the_served_model(local_service):
    """The session-less client reads them."""
    rest = tinker.RestClient(base_url=local_service.url)
    models = rest.get_server_capabilities().result(timeout=30).supported_models

    assert [(m.model_name, m.trainable, m.sampleable) for m in models] == [("tiny", True, True)]
    assert models[0].max_context_length >= 1024


# ---- training


def test_cross_entropy_is_a_weighted_sum(client):
    """loss = sum of -logprob * weight, over tokens and data."""
    model = trainer(client)
    output = model.forward(supervised(), "cross_entropy").result(timeout=60)
    first, second = logprobs_of(output)

    assert (first.shape, second.shape) == ((3,), (2,))
    expected = -(first[1] + first[2] + 0.5 * second[0] + second[1])
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_forward_gives_logprobs_whatever_the_weights(client):
    """Zero weights change the loss, not the log-probabilities."""
    model = trainer(client)
    weighted = model.forward(supervised(), "cross_entropy").result(timeout=60)
    unweighted = model.forward(
        [datum([1, 70, 71, 72], weights=[0.0] * 3), datum([1, 80, 81], weights=[0.0] * 2)],
        "cross_entropy",
    ).result(timeout=60)

    for one, other in zip(logprobs_of(weighted), logprobs_of(unweighted), strict=True):
        assert np.array_equal(one, other)
    assert unweighted.metrics["loss:sum"] == 0.0


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_policy_losses_are_sums_by_their_formulas(client, loss):
    """Each built-in loss, recomputed from the returned log-probabilities."""
    model = trainer(client)
    data = policy()
    output = model.forward_backward(data, loss).result(timeout=60)
    total = 0.0
    for item, target in zip(data, logprobs_of(output), strict=True):
        sampling = np.asarray(item.loss_fn_inputs["logprobs"].tolist())
        advantage = np.asarray(item.loss_fn_inputs["advantages"].tolist())
        ratio = np.exp(target.astype(np.float64) - sampling)
        terms = {
            "importance_sampling": -ratio * advantage,
            "ppo": -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage),
            "cispo": -np.clip(ratio, 0.0, 4.0) * target * advantage,
        }[loss]
        total += float(terms.sum())

    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)


def test_step_lowers_the_loss(client):
    """Five steps on the same data."""
    model = trainer(client)
    before = model.forward(supervised(), "cross_entropy").result(timeout=60).metrics["loss:sum"]
    train(model, steps=5)
    after = model.forward(supervised(), "cross_entropy").result(timeout=60).metrics["loss:sum"]

    assert after < before - 0.5


def test_gradients_of_chunks_add_up(client, look):
    """Two requests before one step are one batch of both."""
    split, whole = trainer(client), trainer(client)
    for item in supervised():
        split.forward_backward([item], "cross_entropy")
    whole.forward_backward(supervised(), "cross_entropy")
    norms = [m.optim_step(ADAM).result(timeout=60).metrics for m in (split, whole)]

    key = next(name for name in norms[0] if "norm" in name)
    assert norms[0][key] == pytest.approx(norms[1][key], rel=1e-5)


def test_custom_loss_equals_the_built_in_one_bit_for_bit(client, look):
    """The importance-sampling formula through forward_backward_custom gives the same adapter."""
    built_in, custom = trainer(client), trainer(client)
    data = policy()

    def importance_sampling(data, logprobs):
        total = torch.zeros(())
        for item, target in zip(data, logprobs, strict=True):
            sampling = item.loss_fn_inputs["logprobs"].to_torch()
            advantage = item.loss_fn_inputs["advantages"].to_torch()
            total = total - (torch.exp(target - sampling) * advantage).sum()
        return total, {"mine": 1.0}

    built_in.forward_backward(data, "importance_sampling").result(timeout=60)
    output = custom.forward_backward_custom(data, importance_sampling).result(timeout=60)
    for model in (built_in, custom):
        model.optim_step(ADAM).result(timeout=60)
    states = [look(f"models/{model.model_id}") for model in (built_in, custom)]

    assert output.metrics["mine"] == 1.0
    assert states[0]["adapter_sha256"] == states[1]["adapter_sha256"]
    assert states[0]["optimizer_sha256"] == states[1]["optimizer_sha256"]


def test_targets_may_have_several_candidates(client):
    """[T, K] target tokens give [T, K] log-probabilities that agree with the [T] ones."""
    model = trainer(client)
    many = types.Datum(
        model_input=types.ModelInput.from_ints([1, 70]),
        loss_fn_inputs={
            "target_tokens": torch.tensor([[70, 71], [71, 5]]),
            "weights": torch.zeros(2, 2),
        },
    )
    wide = logprobs_of(model.forward([many], "cross_entropy").result(timeout=60))[0]
    plain = logprobs_of(
        model.forward([datum([1, 70, 71], weights=[1.0, 1.0])], "cross_entropy").result(timeout=60)
    )[0]

    assert wide.shape == (2, 2)
    assert wide[:, 0] == pytest.approx(plain, abs=1e-5)


def test_large_batch_in_several_requests(client):
    """1 030 data are sent as two chunks and come back in order."""
    model = trainer(client)
    data = [datum([1, 60 + n % 100, 61], weights=[0.0, 1.0]) for n in range(1030)]
    output = model.forward(data, "cross_entropy").result(timeout=120)
    single = model.forward([data[1029]], "cross_entropy").result(timeout=60)

    assert len(output.loss_fn_outputs) == 1030
    assert logprobs_of(output)[1029] == pytest.approx(logprobs_of(single)[0], abs=1e-5)


def test_pipelined_requests_run_in_order(client, look):
    """Four pairs submitted without waiting equal four pairs awaited one by one."""
    piped, serial = trainer(client), trainer(client)
    futures = []
    for _ in range(4):
        futures.append(piped.forward_backward(supervised(), "cross_entropy"))
        futures.append(piped.optim_step(ADAM))
    for future in futures:
        future.result(timeout=60)
    train(serial, steps=4)

    digests = [look(f"models/{model.model_id}")["adapter_sha256"] for model in (piped, serial)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        (lambda: [datum([1, 70], weights=[1.0])], "gspo", "loss_fn"),
        (lambda: [datum([1, 70], weights=[1.0])], "ppo", "logprobs, advantages missing"),
        (lambda: [datum([1, 70], weights=[math.inf])], "cross_entropy", "NaN or an infinity"),
        (lambda: [datum([1, 999_999], weights=[1.0])], "cross_entropy", "token 999999"),
    ],
)
def test_bad_training_data_are_refused_and_hold_up_nothing(client, data, loss, message):
    """A typed error with a status; the client goes on with its next request."""
    model = trainer(client)
    with pytest.raises(tinker.BadRequestError, match=message):
        model.forward_backward(data(), loss).result(timeout=60)

    train(model)


# ---- checkpoints


def test_resume_with_optimizer_is_bit_identical_and_without_is_not(client, look):
    """After three steps and a save: one more step live, resumed, and with a cold optimizer."""
    live = trainer(client)
    train(live, steps=3)
    saved = live.save_state("after-3").result(timeout=60).path
    resumed = client.create_training_client_from_state_with_optimizer(saved).result(timeout=60)
    cold = client.create_training_client_from_state(saved).result(timeout=60)
    reports = [look(f"models/{model.model_id}") for model in (live, resumed, cold)]
    for model in (live, resumed, cold):
        train(model)
    digests = [
        look(f"models/{model.model_id}")["adapter_sha256"] for model in (live, resumed, cold)
    ]

    assert [report["optimizer"]["steps"] for report in reports] == [3, 3, 0]
    assert [report["restored_from"] for report in reports] == [None, saved, saved]
    assert len({report["adapter_sha256"] for report in reports}) == 1
    assert reports[1]["optimizer_sha256"] == reports[0]["optimizer_sha256"]
    assert reports[1]["optimizer"]["eps"] == 1e-8
    assert digests[0] == digests[1] != digests[2]


def test_state_can_be_loaded_into_a_live_model(client, look):
    """The deprecated load_state is still sent by older programs."""
    model = trainer(client)
    saved = model.save_state("start").result(timeout=60).path
    before = look(f"models/{model.model_id}")["adapter_sha256"]
    train(model)
    with pytest.warns(FutureWarning):
        model.load_state_with_optimizer(saved).result(timeout=60)

    known = look(f"models/{model.model_id}")
    assert known["adapter_sha256"] == before
    assert (known["optimizer"]["steps"], known["restores"]) == (0, 1)


def test_both_arms_can_start_from_one_immutable_checkpoint(client, look, local_service):
    """Saved at step 0: a full initialization that cannot be overwritten or deleted."""
    model = trainer(client)
    uri = model.save_state("init").result(timeout=60).path
    arms = [
        client.create_training_client_from_state_with_optimizer(uri).result(timeout=60)
        for _ in range(2)
    ]
    known = look("checkpoints", path=uri)
    digests = {look(f"models/{arm.model_id}")["adapter_sha256"] for arm in arms}

    assert (known["scope"], known["immutable"]) == ("full_initialization", True)
    assert digests == {known["adapter_sha256"]}
    with pytest.raises(tinker.BadRequestError, match="immutable"):
        model.save_state("init", overwrite=True).result(timeout=60)
    rest = tinker.RestClient(base_url=local_service.url)
    with pytest.raises(tinker.BadRequestError, match="immutable"):
        rest.delete_checkpoint_from_tinker_path(uri).result(timeout=60)


def test_checkpoints_are_listed_given_a_time_and_deleted(client, local_service):
    """List by run and by user, TTL, weights info, delete."""
    model = trainer(client, user_metadata={"renderer": "mine"})
    train(model)
    state = model.save_state("s", ttl_seconds=7200, user_metadata={"a": "b"}).result(timeout=60)
    sampler = model.save_weights_for_sampler("s").result(timeout=60)
    rest = tinker.RestClient(base_url=local_service.url)
    listed = rest.list_checkpoints(model.model_id).result(timeout=60).checkpoints
    everything = rest.list_user_checkpoints(limit=1000).result(timeout=60)
    info = rest.get_weights_info_by_tinker_path(state.path).result(timeout=60)
    run = rest.get_training_run(model.model_id).result(timeout=60)
    rest.set_checkpoint_ttl_from_tinker_path(state.path, None).result(timeout=60)
    rest.delete_checkpoint_from_tinker_path(sampler.path).result(timeout=60)
    left = rest.list_checkpoints(model.model_id).result(timeout=60).checkpoints

    assert {c.tinker_path: c.checkpoint_type for c in listed} == {
        state.path: "training",
        sampler.path: "sampler",
    }
    assert {state.path, sampler.path} <= {c.tinker_path for c in everything.checkpoints}
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("tiny", 4, True)
    assert run.user_metadata == {"renderer": "mine"}
    assert run.last_checkpoint.tinker_path == state.path
    assert run.last_checkpoint.user_metadata == {"a": "b"}
    assert run.last_checkpoint.expires_at is not None
    assert [(c.tinker_path, c.expires_at) for c in left] == [(state.path, None)]


def test_taken_checkpoint_name_is_refused(client):
    """A second save of one name needs overwrite."""
    model = trainer(client)
    train(model)
    model.save_state("x").result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="exists already"):
        model.save_state("x").result(timeout=60)

    train(model)
    model.save_state("x", overwrite=True).result(timeout=60)


def test_sessions_and_runs_are_listed(client, local_service):
    """The REST client finds the session, its runs and its samplers."""
    model = trainer(client)
    sampler = client.create_sampling_client(base_model="tiny").result(timeout=60)
    session_id = model.model_id.split(":")[0]
    rest = tinker.RestClient(base_url=local_service.url)
    session = rest.get_session(session_id).result(timeout=60)

    assert session.training_run_ids == [model.model_id]
    assert session.sampler_ids == [sampler._sampling_session_id]
    assert session_id in rest.list_sessions(limit=1000).result(timeout=60).sessions
    runs = rest.list_training_runs(limit=1000).result(timeout=60)
    assert model.model_id in {run.training_run_id for run in runs.training_runs}


# ---- sampling


def sample(sampler, *, prompt=PROMPT, num_samples=1, timeout=60, options=None, **params):
    asked = types.SamplingParams(**({"max_tokens": 8, "temperature": 1.0, "seed": 5} | params))
    return sampler.sample(prompt, num_samples, asked, **(options or {})).result(timeout=timeout)


@pytest.fixture
def base(client):
    """A sampler on the base model."""
    return client.create_sampling_client(base_model="tiny").result(timeout=60)


def test_seeds_repeat_and_samples_of_one_request_differ(base):
    """Same seed: same tokens and log-probabilities. Four samples of one seed: not all equal."""
    first = sample(base, num_samples=4)
    again = sample(base, num_samples=4)
    other = sample(base, num_samples=4, seed=6)

    assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
    assert [s.logprobs for s in first.sequences] == [s.logprobs for s in again.sequences]
    assert [s.tokens for s in first.sequences] != [s.tokens for s in other.sequences]
    assert len({tuple(s.tokens) for s in first.sequences}) > 1


def test_tokens_and_bits_do_not_depend_on_what_else_is_in_flight(base):
    """Twenty requests at once give each what it gets alone."""
    alone = [sample(base, seed=seed) for seed in range(20)]
    futures = [
        base.sample(PROMPT, 1, types.SamplingParams(max_tokens=8, temperature=1.0, seed=seed))
        for seed in reversed(range(20))
    ]
    together = [future.result(timeout=60) for future in reversed(futures)]

    for one, other in zip(alone, together, strict=True):
        assert one.sequences[0].tokens == other.sequences[0].tokens
        assert one.sequences[0].logprobs == other.sequences[0].logprobs


def test_sampled_logprobs_are_the_models_own(base):
    """They agree with compute_logprobs of the same tokens, also at another temperature."""
    for temperature in (1.0, 0.5):
        sequence = sample(base, temperature=temperature, stop=[]).sequences[0]
        tokens = [*PROMPT.to_ints(), *sequence.tokens]
        scored = base.compute_logprobs(types.ModelInput.from_ints(tokens)).result(timeout=60)

        assert scored[0] is None
        assert sequence.logprobs == pytest.approx(scored[len(PROMPT.to_ints()) :], abs=2e-5)


def test_sampler_and_trainer_agree(client):
    """After training, the published weights score tokens as the trainer's forward does."""
    model = trainer(client)
    train(model, steps=3)
    sampler = model.save_weights_and_get_sampling_client().result(timeout=60)
    sequence = sample(sampler, stop=[]).sequences[0]
    tokens = [*PROMPT.to_ints(), *sequence.tokens]
    forward = model.forward([datum(tokens, weights=[1.0] * (len(tokens) - 1))], "cross_entropy")
    trained = logprobs_of(forward.result(timeout=60))[0][len(PROMPT.to_ints()) - 1 :]

    assert sequence.logprobs == pytest.approx(trained.tolist(), abs=5e-5)


def test_named_sampler_checkpoint_is_sampled_from(client):
    """A saved sampler and a training checkpoint give the same tokens as the published weights."""
    model = trainer(client)
    train(model, steps=3)
    published = model.save_weights_and_get_sampling_client().result(timeout=60)
    paths = [
        model.save_weights_for_sampler("named").result(timeout=60).path,
        model.save_state("named").result(timeout=60).path,
    ]
    expected = sample(published).sequences[0]
    for path in paths:
        sampler = client.create_sampling_client(model_path=path).result(timeout=60)
        found = sample(sampler).sequences[0]

        assert found.tokens == expected.tokens
        assert found.logprobs == expected.logprobs


def test_published_weights_do_not_move_with_the_model(client):
    """A sampler keeps the weights it was published with; a new one has the new weights."""
    model = trainer(client)
    old = model.save_weights_and_get_sampling_client().result(timeout=60)
    before = old.compute_logprobs(PROMPT).result(timeout=60)
    train(model, steps=3)
    new = model.save_weights_and_get_sampling_client().result(timeout=60)

    assert old.compute_logprobs(PROMPT).result(timeout=60) == before
    assert new.compute_logprobs(PROMPT).result(timeout=60) != before


def test_inflight_samplers_follow_the_model(client):
    """All samplers of the inflight kind move to the newest publication."""
    model = trainer(client)
    first = model.save_weights_and_get_sampling_client(kind="inflight").result(timeout=60)
    before = first.compute_logprobs(PROMPT).result(timeout=60)
    train(model, steps=3)
    assert first.compute_logprobs(PROMPT).result(timeout=60) == before
    second = model.save_weights_and_get_sampling_client(kind="inflight").result(timeout=60)

    after = first.compute_logprobs(PROMPT).result(timeout=60)
    assert after != before
    assert after == second.compute_logprobs(PROMPT).result(timeout=60)


def test_greedy_sampling_takes_the_likeliest_token(base):
    """Temperature 0: each token is the first of its top-k."""
    answer = sample(base, temperature=0.0, options={"topk_sample_logprobs": 3})
    sequence = answer.sequences[0]

    assert [row[0][0] for row in sequence.topk_logprobs] == list(sequence.tokens)
    assert [row[0][1] for row in sequence.topk_logprobs] == pytest.approx(sequence.logprobs)


def test_stop_tokens_end_a_sequence_and_are_part_of_it(base):
    """By id and by string: the sequence ends with the first occurrence; [] never stops."""
    free = sample(base, max_tokens=40, stop=[]).sequences[0]
    assert (len(free.tokens), free.stop_reason) == (40, "length")
    # A token that the free run drew as its fourth, and not before.
    stop = next(t for n, t in enumerate(free.tokens) if t not in free.tokens[:n] and n >= 3)
    at = list(free.tokens).index(stop)
    by_id = sample(base, max_tokens=40, stop=[stop]).sequences[0]

    assert list(by_id.tokens) == list(free.tokens[: at + 1])
    assert by_id.stop_reason == "stop"

    letters = [n for n, t in enumerate(free.tokens) if 3 + 33 <= t < 3 + 127]
    first = letters[0]
    text = chr(free.tokens[first] - 3)
    by_text = sample(base, max_tokens=40, stop=[text]).sequences[0]
    assert list(by_text.tokens) == list(free.tokens[: first + 1])
    assert by_text.stop_reason == "stop"


def test_prompt_may_come_in_chunks(base):
    """Seven chunks are one prompt."""
    pieces = types.ModelInput(
        chunks=[types.EncodedTextChunk(tokens=[token]) for token in PROMPT.to_ints()]
    )

    assert sample(base, prompt=pieces).sequences[0].tokens == sample(base).sequences[0].tokens


def test_prompt_scores_top_k_and_targets_agree(base):
    """Prompt log-probabilities, top-k rows and named targets are one distribution."""
    prompt = PROMPT.to_ints()
    ids = torch.tensor([[token, 7] for token in prompt[1:]])
    ids[0, 1] = -1
    answer = sample(
        base,
        max_tokens=1,
        options={
            "include_prompt_logprobs": True,
            "topk_prompt_logprobs": 259,
            "target_prompt_logprobs": types.TensorData.from_torch(ids),
        },
    )
    targets = answer.target_prompt_logprobs.to_torch()
    rows = answer.topk_prompt_logprobs

    assert answer.prompt_logprobs[0] is None
    assert rows[0] is None
    assert targets[:, 0].tolist() == pytest.approx(answer.prompt_logprobs[1:], abs=1e-6)
    assert targets[0, 1] == 0.0
    for position in range(1, len(prompt)):
        row = dict(rows[position])
        assert row[prompt[position]] == pytest.approx(answer.prompt_logprobs[position], abs=1e-6)
        assert sum(math.exp(value) for value in row.values()) == pytest.approx(1.0, abs=1e-4)


def test_only_the_last_prompt_tokens_are_scored_when_asked(base):
    """prompt_logprobs_last_n=2: two numbers at the end, nothing before."""
    whole = sample(base, max_tokens=1, options={"include_prompt_logprobs": True})
    last = sample(
        base,
        max_tokens=1,
        options={"include_prompt_logprobs": True, "prompt_logprobs_last_n": 2},
    )

    assert last.prompt_logprobs[:-2] == [None] * 4
    assert last.prompt_logprobs[-2:] == pytest.approx(whole.prompt_logprobs[-2:], abs=1e-6)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt: empty"),
        ([5, 100_000], {}, "token 100000"),
        ([5], {"max_tokens": 10_000_000}, "context window"),
    ],
)
def test_bad_sampling_requests_are_refused_at_once(base, prompt, params, message):
    """A typed error with a status, not an endless retry."""
    with pytest.raises(tinker.BadRequestError, match=message):
        sample(base, prompt=types.ModelInput.from_ints(prompt), **params)


def test_samplers_can_be_passed_to_another_process(base):
    """A pickled client numbers its requests from a block of its own."""
    import pickle  # noqa: PLC0415 - used here alone

    clone = pickle.loads(pickle.dumps(base))

    assert sample(clone).sequences[0].tokens == sample(base).sequences[0].tokens


def test_training_beside_sampling_changes_no_bit(client, look):
    """Training jobs run between the tokens of a long batch; both end as they do alone."""
    alone, beside = trainer(client), trainer(client)
    train(alone, steps=4)
    sampler = client.create_sampling_client(base_model="tiny").result(timeout=60)
    asked = types.SamplingParams(max_tokens=400, temperature=1.0, seed=1, stop=[])
    quiet = sampler.sample(PROMPT, 16, asked).result(timeout=120)
    busy = sampler.sample(PROMPT, 16, asked)
    for _ in range(4):
        beside.forward_backward(supervised(), "cross_entropy")
        last = beside.optim_step(ADAM)
    last.result(timeout=120)
    trained_first = not busy.future().done()
    loud = busy.result(timeout=120)

    assert trained_first, "the batch was over before training: it was not long enough to tell"
    assert [s.tokens for s in loud.sequences] == [s.tokens for s in quiet.sequences]
    assert [s.logprobs for s in loud.sequences] == [s.logprobs for s in quiet.sequences]
    digests = {look(f"models/{m.model_id}")["adapter_sha256"] for m in (alone, beside)}
    assert len(digests) == 1


# ---- endings


def test_closed_client_leaves_nothing_behind(local_service, look):
    """After close its model is released; its checkpoints stay."""
    client = tinker.ServiceClient(base_url=local_service.url)
    model = trainer(client)
    uri = model.save_state("kept").result(timeout=60).path
    client.close("success").result(timeout=30)

    assert look(f"models/{model.model_id}")["state"] == "released"
    assert look("checkpoints", path=uri)["path"] == uri


def test_info_names_the_base_and_the_software(look):
    """What a run records about the service."""
    info = look("info")

    assert info["models"][0]["name"] == "tiny"
    assert len(info["models"][0]["base_sha256"]) == 64
    assert info["models"][0]["source"]
    assert (info["dtype"], info["threads"]) == ("float32", 1)
    assert {"gated-rl", "python", "torch"} <= info["versions"].keys()
    assert "api_key" not in info["settings"]
