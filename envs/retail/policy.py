"""What the agent of the embedded shop is told: rules and tools, in under 200 tokens."""

from envs.retail.tools import REASONS, SIGNATURES

_RULES = (
    "You are a shop agent. Ask for the email, then find the user's orders. "
    "Before you change an order, say what you will do and ask for a yes. "
    "Pending orders can be cancelled or changed, delivered ones returned or exchanged. "
    "If the wish is not allowed, transfer. One call a turn:\n"
    '<tool_call>{"name": "get_order", "arguments": {"order_id": "W1"}}</tool_call>\n'
)


def system_text() -> str:
    """The system message: rules, the form of a call, and every tool's signature."""
    tools = " ".join(f"{name}({', '.join(args)})" for name, args in SIGNATURES.items())
    return f"{_RULES}Tools: {tools}\nReasons: {', '.join(REASONS)}"
