"""What a renderer's name says about the prompts it writes, before there is a tokenizer for it."""

import re

_EFFORT = re.compile(r"_(low|medium|high|xhigh|max)_(?:reasoning|thinking)$")
_DATED = re.compile(r"gpt_oss_(?:low|medium|high)_reasoning")


def reasoning_effort(renderer: str) -> str | None:
    """Return the effort that a tinker-cookbook renderer asks for; None where its name has none."""
    found = _EFFORT.search(renderer)
    return None if found is None else found[1]


def prints_date(renderer: str) -> bool:
    """Whether a tinker-cookbook renderer writes a date into every prompt."""
    return _DATED.fullmatch(renderer) is not None
