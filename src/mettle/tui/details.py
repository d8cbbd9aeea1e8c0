"""What is known of one rollout besides its conversation: reward, metrics, timing, tokens, error, info.

Parts: `details` (the page beside a conversation), `facts_line` (one line of it), `tone_of`. Invariant: as in
`overview`, whose `Paragraphs` it is made of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from textual.content import Content

from mettle.evals.facts import RolloutFacts
from mettle.evals.passing import PassRule
from mettle.tui.overview import MUTED, Paragraphs, Part
from mettle.wording import bar, duration, format_reward, number, one_line, printable, whole

VALUE_CHARS = 4_000
SHOWN = frozenset((
    "example_id", "prompt", "completion", "answer", "info", "reward", "error", "error_chain", "long_error_chain",
    "timing", "is_completed", "is_truncated", "stop_condition", "metrics", "tool_defs", "token_usage", "task_key",
    "generation_ms", "scoring_ms", "total_ms",
))  # fmt: skip


def tone_of(facts: RolloutFacts, rule: PassRule) -> str:
    """The tone of a reward: `good` where it passes, `middling` above nothing, `bad` at nothing, `dim` without one."""
    if facts.reward is None:
        return "dim"
    return "good" if rule.holds(facts) else "middling" if facts.reward > 0 else "bad"


def facts_line(facts: RolloutFacts, rule: PassRule) -> Content:
    """The rollout in one line."""
    colour = {"good": "$success", "middling": "$warning", "bad": "$error", "dim": MUTED}[tone_of(facts, rule)]
    parts: list[Part] = [("reward ", MUTED), (format_reward(facts.reward), f"bold {colour}")]
    if facts.reward is not None:
        parts += [" ", (bar(max(0.0, min(1.0, facts.reward)), 8), colour)]
    if facts.cause is not None:
        parts += ["  ", (f"{one_line(facts.error_type, 40)} ({one_line(facts.cause, 20)})", "bold $error")]
    parts += [("   task ", MUTED), one_line(facts.example_id, 40), ("   turns ", MUTED), str(facts.num_turns)]
    parts += [("   tokens ", MUTED), whole(facts.output_tokens), ("   time ", MUTED), duration(facts.total_s)]
    if facts.stop_condition:
        parts += [("   stop ", MUTED), one_line(facts.stop_condition, 60)]
    if facts.is_truncated:
        parts.append(("  truncated", "$warning"))
    return Content.assemble(*parts)


def details(row: Mapping[str, Any], facts: RolloutFacts, rule: PassRule, width: int) -> Content:
    """The page."""
    page = Paragraphs(width)
    colour = {"good": "$success", "middling": "$warning", "bad": "$error", "dim": MUTED}[tone_of(facts, rule)]
    page.head("Reward", f"passes with {rule.what} from {rule.threshold:g}")
    if facts.reward is None:
        page.line(("none: the rollout failed", MUTED))
    else:
        page.bar_row(format_reward(facts.reward), max(0.0, min(1.0, facts.reward)), "", colour)
    if facts.metrics:
        page.head("Metrics")
        for name, value in facts.metrics.items():
            page.row(one_line(name, 60), format_reward(value))
    if row.get("answer"):
        page.head("Expected")
        _value(page, row["answer"])
    if facts.cause is not None:
        page.head("Error", one_line(facts.cause, 30))
        page.line((one_line(facts.error_type, 80), "bold $error"))
        page.line(one_line(facts.error_message or "no message was saved", 600))
    _timing(page, facts)
    _tokens(page, row, facts)
    page.head("Ended")
    page.row("stopped by", one_line(facts.stop_condition or "-", 80))
    page.row("truncated", "yes" if facts.is_truncated else "no")
    _rest(page, row)
    return page.content()


def _timing(page: Paragraphs, facts: RolloutFacts) -> None:
    if facts.total_s is None:
        return
    page.head("Time", duration(facts.total_s))
    for title, value in (("model", facts.model_s), ("environment", facts.env_s), ("scoring", facts.scoring_s)):
        if value is not None:
            share = value / facts.total_s if facts.total_s > 0 else 0.0
            page.bar_row(title, min(1.0, share), duration(value).rjust(8), "$accent")


def _tokens(page: Paragraphs, row: Mapping[str, Any], facts: RolloutFacts) -> None:
    usage = row.get("token_usage")
    if not isinstance(usage, Mapping) or not usage:
        return
    page.head("Tokens")
    for name, value in usage.items():
        page.row(one_line(str(name).replace("_tokens", "").replace("_", " "), 40), whole(number(value)))


def _rest(page: Paragraphs, row: Mapping[str, Any]) -> None:
    """Info, and the columns that the evaluation was asked to save."""
    if row.get("info"):
        page.head("Info")
        _value(page, row["info"])
    metrics = row.get("metrics")
    known = SHOWN | set(metrics if isinstance(metrics, Mapping) else ())
    for name, value in row.items():
        if name not in known and value not in (None, "", [], {}):
            page.head(one_line(name, 60))
            _value(page, value)
    tools = row.get("tool_defs")
    if isinstance(tools, list) and tools:
        page.head("Tools")
        page.line(one_line(", ".join(_tool_name(tool) for tool in tools), 1000))


def _value(page: Paragraphs, value: Any) -> None:
    if isinstance(value, Mapping) and all(_is_short(item, page.width) for item in value.values()):
        for name, item in value.items():
            page.row(one_line(name, 60), one_line(item, 200))
        return
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
    page.line(printable(text[:VALUE_CHARS]))
    if len(text) > VALUE_CHARS:
        page.line((f"{whole(len(text) - VALUE_CHARS)} more characters; r shows the row", MUTED))


def _is_short(value: Any, width: int) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < width // 2)


def _tool_name(tool: Any) -> str:
    inner = tool.get("function") if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) else tool
    return str(inner.get("name") or "?") if isinstance(inner, Mapping) else str(tool)[:40]
