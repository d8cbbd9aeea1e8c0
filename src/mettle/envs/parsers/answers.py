"""Answers inside text: `\\boxed{...}` and `#### ...`.

Parts: `extract_boxed_answer`, `extract_hash_answer`, and the system prompts that ask for such answers.
"""

from __future__ import annotations

from mettle.records.spans import last_balanced

BOXED_SYSTEM_PROMPT = "Think step by step, then give the final answer inside \\boxed{}."
THINK_BOXED_SYSTEM_PROMPT = (
    "Think step by step inside <think>...</think> tags, then give the final answer inside \\boxed{}."
)


def extract_boxed_answer(text: str, strict: bool = False) -> str:
    """The inside of the last balanced `\\boxed{}`; without one, the text itself, or "" when `strict`."""
    inside = last_balanced(text, "\\boxed{")
    if inside is not None:
        return inside
    return "" if strict else text


def extract_hash_answer(text: str) -> str:
    """What follows `####`, stripped; without it, the text itself."""
    return text.split("####")[1].strip() if "####" in text else text
