"""Answers inside text: `\\boxed{...}` and `#### ...`.

Parts: `extract_boxed_answer`, `extract_hash_answer`, and the system prompts that ask for such answers.
"""

from __future__ import annotations

BOXED_SYSTEM_PROMPT = "Think step by step, then give the final answer inside \\boxed{}."
THINK_BOXED_SYSTEM_PROMPT = (
    "Think step by step inside <think>...</think> tags, then give the final answer inside \\boxed{}."
)


def extract_boxed_answer(text: str, strict: bool = False) -> str:
    """The inside of the last balanced `\\boxed{}`; without one, the text itself, or "" when `strict`."""
    marker = "\\boxed{"
    start = text.rfind(marker)
    while start >= 0:
        depth = 1
        for index in range(start + len(marker), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len(marker) : index]
        start = text.rfind(marker, 0, start)
    return "" if strict else text


def extract_hash_answer(text: str) -> str:
    """What follows `####`, stripped; without it, the text itself."""
    return text.split("####")[1].strip() if "####" in text else text
