"""Episodes, settings and sampled sequences refuse what does not fit together."""

import pytest

from envs.errors import EnvInputError
from envs.protocols import CanaryResult, Episode, EpisodeSettings, SampledSequence


def episode(**changes):
    """A two-turn episode: prompt of 2, reply of 2, a message of 1, reply of 1."""
    fields = {
        "item_id": "a",
        "tokens": (10, 11, 20, 21, 12, 22),
        "loss_mask": (False, False, True, True, False, True),
        "sampling_logprobs": (None, None, -0.5, -0.25, None, -1.0),
        "turn_of_token": (0, 0, 0, 0, 1, 1),
        "reward": 1.0,
        "stop_reason": "stop",
        "truncated": False,
        "text": "hi",
    }
    return Episode(**(fields | changes))


def test_episode_counts_prompt_completion_and_turns():
    """2 tokens before the first sampled one, 3 sampled, in turns 0 and 1."""
    found = episode()

    assert (found.prompt_tokens, found.completion_tokens, found.agent_turns) == (2, 3, 2)


def test_episode_without_sampled_tokens_is_all_prompt():
    found = episode(loss_mask=(False,) * 6, sampling_logprobs=(None,) * 6)

    assert (found.prompt_tokens, found.completion_tokens, found.agent_turns) == (6, 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": (True,) * 5}, "loss_mask is '5 values'; expected 6, one per token"),
        ({"turn_of_token": ()}, "turn_of_token is '0 values'; expected 6, one per token"),
        (
            {"sampling_logprobs": (None, None, None, -0.25, None, -1.0)},
            "sampling_logprobs[2] is None; expected a number exactly where loss_mask is true",
        ),
        (
            {"sampling_logprobs": (None, 0.0, -0.5, -0.25, None, -1.0)},
            "sampling_logprobs[1] is 0.0; expected a number exactly where loss_mask is true",
        ),
    ],
)
def test_episode_refuses_columns_that_do_not_match(changes, message):
    with pytest.raises(EnvInputError) as caught:
        episode(**changes)

    assert str(caught.value) == message


def test_sampled_sequence_refuses_missing_logprobs():
    with pytest.raises(EnvInputError, match="logprobs is '1 values'; expected 2"):
        SampledSequence(tokens=[1, 2], logprobs=[-0.1], stop_reason="stop")


def test_sampled_sequence_refuses_unknown_stop_reason():
    with pytest.raises(EnvInputError, match="stop_reason is 'eos'"):
        SampledSequence(tokens=[1], logprobs=[-0.1], stop_reason="eos")


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"max_turns": 0},
    ],
)
def test_settings_refuse_values_out_of_range(changes):
    with pytest.raises(EnvInputError, match=f"{next(iter(changes))} is"):
        EpisodeSettings(**({"max_tokens": 8} | changes))


def test_canary_is_ok_only_where_value_and_expectation_agree():
    right = CanaryResult(item_id="a", reply="9", metric="accuracy", expected=1.0, value=1.0)
    wrong = CanaryResult(item_id="a", reply="9", metric="accuracy", expected=1.0, value=0.0)

    assert (right.ok, wrong.ok) == (True, False)
