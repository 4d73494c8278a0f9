"""Keep the texts of a step's tokens beside their ids."""

from __future__ import annotations

from envs.token_texts import token_texts
from tasks.context import RunContext


def write_token_texts(ctx: RunContext, key: tuple[str, str, int]) -> None:
    """Write `token_texts` of one rollout step, unless it is there or no tokenizer is known.

    Reads: `tokens` of the step. Calls nothing. Safe to repeat.

    Args:
        ctx: the run.
        key: arm, phase and step.
    """
    if ctx.tokenizer is None or ctx.run.has_table("token_texts", key=key):
        return
    ids = sorted(set(ctx.run.read_arrow("tokens", key=key).column("token_id").to_pylist()))
    rows = [
        {
            "arm": key[0],
            "phase": key[1],
            "step": key[2],
            "token_id": token,
            "text": found.text,
            "partial_hex": None if found.partial is None else found.partial.hex(),
        }
        for token, found in zip(ids, token_texts(ctx.tokenizer, ids), strict=True)
    ]
    ctx.run.write_table("token_texts", rows, key=key)
