"""A judge made of rules: the rubric's three scores and a rationale that names what was wrong."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from envs.conversation import Judgement, Transcript
from envs.protocols import Turn

_CLAIMS = re.compile(r"\bW\d+\b|(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,255}\.\w{1,63}|\$\d+(?:\.\d+)?")
"""What can be checked: order numbers, emails and dollar amounts. An email is only looked for where
a word begins, in bounded parts: else a long turn without spaces takes hours."""
_ASKS_EMAIL = re.compile(r"e-?mail", re.IGNORECASE)
_ASKS_YES = re.compile(
    r"confirm|\byes\b|shall i|should i|is that (ok|right)|go ahead", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class RuleJudge:
    """Scores a transcript by counting.

    - `invalid_tool_use`: 1 - failed calls / calls; malformed calls count as failed; 0 if none was
      made.
    - `ungrounded_claims`: 1 - unseen / claims, over the order numbers, emails and amounts that the
      agent wrote (in words or as an argument) without having seen them before; 1 if it made none.
    - `upfront_clarification`: half for asking for the email and half for asking for a yes before
      the first changing call; a transfer to a human needs no yes.

    Attributes:
        writes: names of the tools that change something.
        transfer: name of the tool that hands over to a human.
    """

    writes: tuple[str, ...]
    transfer: str

    async def judge(self, transcript: Transcript) -> Judgement:
        """Score one conversation."""
        tools, tool_notes = _tool_use(transcript.turns)
        claims, claim_notes = _grounding(transcript)
        asked, ask_notes = self._clarification(transcript.turns)
        notes = [*tool_notes, *claim_notes, *ask_notes] or ["Nothing to improve."]
        return Judgement(
            scores={
                "invalid_tool_use": tools,
                "ungrounded_claims": claims,
                "upfront_clarification": asked,
            },
            rationale=" ".join(notes),
        )

    def _clarification(self, turns: tuple[Turn, ...]) -> tuple[float, list[str]]:
        """Score what was asked before the first changing call."""
        before: list[str] = []
        settled = False
        for turn in turns:
            if turn.role != "assistant":
                continue
            settled = settled or turn.tool_name in (*self.writes, self.transfer)
            if settled:
                break
            if turn.tool_name is None and turn.tool_error is None:  # the user saw nothing else
                before.append(turn.content)
        transferred = any(turn.tool_name == self.transfer for turn in turns)
        email = any(_ASKS_EMAIL.search(text) for text in before)
        yes = any(_ASKS_YES.search(text) for text in before) or transferred
        notes = [] if email else ["Ask for the email before you look anything up."]
        notes += [] if yes else ["Ask for a yes before you change anything."]
        return (email + yes) / 2, notes


def _tool_use(turns: Iterable[Turn]) -> tuple[float, list[str]]:
    """Score the share of calls that worked."""
    calls, notes = 0, []
    for turn in turns:
        if turn.role == "assistant" and turn.tool_name is not None:
            calls += 1
        elif turn.role == "assistant" and turn.tool_error is not None:
            calls += 1
            notes.append(f"A turn could not be read ({turn.tool_error}).")
        elif turn.role == "tool" and turn.tool_name is not None and turn.tool_error is not None:
            notes.append(f"The call of {turn.tool_name} failed: {turn.tool_error}.")
    if not calls:
        return 0.0, ["No tool was used."]
    return 1.0 - len(notes) / calls, notes


def _grounding(transcript: Transcript) -> tuple[float, list[str]]:
    """Score the share of claims that rest on something seen before."""
    seen = set(_CLAIMS.findall(transcript.policy))
    claims, notes = 0, []
    for turn in transcript.turns:
        found = _CLAIMS.findall(turn.content)
        if turn.role == "assistant":
            claims += len(found)
            notes += [f"Nobody had named {claim}." for claim in found if claim not in seen]
        else:
            seen.update(found)
    return (1.0 - len(notes) / claims if claims else 1.0), notes
