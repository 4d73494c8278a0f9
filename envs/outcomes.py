"""What models write that cannot be used as it is: one name, one outcome and one count each.

Nothing of it raises, is scored by guesswork or ends a run. Episodes carry the counts in
`Episode.info["outcomes"]`, from where they reach the stored tables and the report.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "no_call": "a turn without a tool call: words for the user",
        "second_call": "a further call in one turn: not executed, and the model is told",
        "tag_in_text": "a call tag inside an argument: text, and the call is executed",
        "empty": "an empty turn: the model is told",
        "too_long": "a turn beyond the limit of characters: not read, and the model is told",
        "bad_json": "a call that is not valid JSON: not executed, and the model is told",
        "bad_xml": "an incomplete call in XML form: not executed, and the model is told",
        "bad_shape": "a call without name and arguments: not executed, and the model is told",
        "bad_text": "an argument with half a character pair: not executed, and the model is told",
        "too_deep": "arguments nested too deep: not executed, and the model is told",
        "unclosed": "a call without its end tag: not executed, and the model is told",
        "unknown_form": "another form of call: not executed, and the model is told",
        "cut": "a turn cut at the token limit: not acted on, and the episode ends",
        "lone_surrogate": "half a character pair in a turn: written as an escape everywhere",
        "special_token": "a special token's name in a message: written with a space inside",
        "unknown_tool": "a call of a tool that does not exist: an error result",
        "failed_call": "a call that the tool refused: an error result",
        "simulator_unreadable": "a user's message in unreadable tokens: asked again",
        "simulator_cut": "a user's message cut at the token limit: asked again",
        "simulator_empty": "an empty message of the user: asked again",
        "simulator_too_long": "a user's message beyond the limit of characters: asked again",
        "simulator_stopped_first": "a user that leaves with the first message: asked again",
        "judge_unreadable": "a judgement in unreadable tokens: asked again",
        "judge_cut": "a judgement cut at the token limit: asked again",
        "judge_too_long": "a judgement beyond the limit of characters: asked again",
        "judge_prose": "a judgement that is not one JSON object: asked again",
        "judge_missing_dimension": "a judgement without one of the dimensions: asked again",
        "judge_unknown_dimension": "a score for a dimension that does not exist: asked again",
        "judge_not_a_number": "a score that is no number: asked again",
        "judge_out_of_range": "a score outside [0, 1]: asked again",
        "judge_no_rationale": "a judgement without reasons: asked again",
    }
)
"""Every outcome and what happens. `asked again`: after the last attempt it is an outage."""


def counted(kinds: Iterable[str]) -> dict[str, int]:
    """Return how often each outcome came, sorted by name; outcomes that did not come are absent.

    Raises:
        KeyError: if a name is none of `OUTCOMES`.
    """
    counts = Counter(kinds)
    for kind in counts:
        OUTCOMES[kind]
    return dict(sorted(counts.items()))
