"""An evaluation on one page: its figures with their intervals, drawn as text.

Parts: `overview` (the page), `headline` (one line of it), `Paragraphs` (how such pages are put together).
Invariant: every text of an environment goes through `text.one_line`; a page fits the width that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from textual.content import Content

from mettle.evals.reader import EvaluationReader
from mettle.tui.text import cut, pad
from mettle.wording import (
    bar,
    bins,
    compact,
    count,
    duration,
    format_interval,
    format_reward,
    histogram,
    number,
    one_line,
    percent,
    usd,
    whole,
)

MUTED, STRONG = "$muted", "bold"
HEIGHT = 6
Part = str | tuple[str, str]


class Paragraphs:
    """A page under construction: headings, rows of a name and a value, lines."""

    def __init__(self, width: int) -> None:
        self.width = max(24, width)
        self.parts: list[Part] = []

    def head(self, title: str, note: str = "") -> None:
        """Begin a section."""
        if self.parts:
            self.parts.append("\n")
        self.parts.append((title, "bold $primary"))
        if note:
            self.parts.append((f"  {cut(note, self.width - len(title) - 2)}", MUTED))
        self.parts.append("\n")

    def line(self, *parts: Part) -> None:
        """A line of text."""
        self.parts += [*parts, "\n"]

    def row(self, name: str, value: str, note: str = "", tone: str = "") -> None:
        """A name, a value, and what more there is to say."""
        room = min(18, self.width // 3)
        value = cut(value, self.width - room - 1)
        left = self.width - room - 2 - len(value)
        self.parts += [(pad(name, room), MUTED), " ", (value, tone or "$foreground")]
        if note and left > 6:
            self.parts.append((f" {cut(note, left)}", MUTED))
        self.parts.append("\n")

    def bar_row(self, name: str, share: float, value: str, tone: str) -> None:
        """A name, a bar and a value."""
        room = min(18, self.width // 3)
        length = max(4, self.width - room - len(value) - 3)
        self.parts += [(pad(name, room), MUTED), " ", (bar(share, length), tone), " ", value, "\n"]

    def content(self) -> Content:
        """The page."""
        return Content.assemble(*self.parts)


def headline(reader: EvaluationReader, stats: Mapping[str, Any], *, is_short: bool = False) -> Content:
    """The evaluation in one line, or in half of one."""
    reward, errors = stats.get("reward"), stats["errors"]
    rewards = [facts.reward for facts in reader.facts if facts.reward is not None]
    parts: list[Part] = [("reward ", MUTED), (format_reward(reward["mean"]) if reward else "-", "bold")]
    if reward and reward["interval"] and not is_short:
        parts.append((f" {format_interval(reward['interval'])}", MUTED))
    if rewards and not is_short:
        parts += ["  ", (histogram(bins(rewards, 12)[2])[0], "$accent")]
    parts += [("   n ", MUTED), whole(stats["num_rollouts"])]
    if not is_short:
        parts.append((f" of {count(stats['num_tasks'], 'task')}", MUTED))
    if errors["num"]:
        parts += ["   ", (count(errors["num"], "error"), "$error"), (f" {percent(errors['rate'])}", MUTED)]
    if stats.get("cost"):
        parts += [("   cost ", MUTED), usd(number(stats["cost"].get("total_usd")))]
    return Content.assemble(*parts)


def overview(reader: EvaluationReader, stats: Mapping[str, Any], width: int) -> Content:
    """All of it."""
    page = Paragraphs(width)
    _reward(page, reader, stats)
    _passes(page, stats)
    _metrics(page, stats)
    _errors(page, stats)
    _stops(page, stats)
    _spreads(page, stats)
    _settings(page, reader)
    return page.content()


def _reward(page: Paragraphs, reader: EvaluationReader, stats: Mapping[str, Any]) -> None:
    reward = stats.get("reward")
    page.head("Reward", "95 % interval, clustered by task")
    if not reward:
        page.line(("no rollout has a reward yet", MUTED))
        return
    page.row("mean", format_reward(reward["mean"]), format_interval(reward["interval"]), tone=STRONG)
    if reward["std"] is not None:
        page.row(
            "spread", format_reward(reward["std"]), f"{format_reward(reward['min'])} to {format_reward(reward['max'])}"
        )
    groups = stats["groups"]
    if groups["num_groups"]:
        share = groups["share_without_variance"]
        page.row(
            "no signal",
            percent(share),
            "of tasks: all their rewards are the same",
            tone="$warning" if share > 0.5 else "",
        )
    rewards = [facts.reward for facts in reader.facts if facts.reward is not None]
    _histogram(page, rewards, reader.pass_rule.threshold)


def _histogram(page: Paragraphs, rewards: list[float], threshold: float) -> None:
    num_bins = min(20, (page.width - 7) // 2)
    wide = max(1, min(3, (page.width - 7) // num_bins))
    low, high, counts = bins(rewards, num_bins)
    passed = [low + (i + 0.5) * (high - low) / num_bins >= threshold for i in range(num_bins)]
    page.line("")
    for place, line in enumerate(histogram(counts, HEIGHT)):
        scale = compact(max(counts)) if place == 0 else "0" if place == HEIGHT - 1 else ""
        blocks: list[Part] = [
            (char * wide, "$success" if is_pass else "$warning") for char, is_pass in zip(line, passed, strict=True)
        ]
        page.line((pad(scale, 5, is_right=True), MUTED), ("▕", MUTED), *blocks)
    axis = f"{format_reward(low, 1)}{format_reward(high, 1).rjust(num_bins * wide - len(format_reward(low, 1)))}"
    page.line(" " * 6, (axis, MUTED))


def _passes(page: Paragraphs, stats: Mapping[str, Any]) -> None:
    if not stats["pass_at_k"]:
        return
    page.head(
        "pass@k", f"unbiased; {' + '.join(stats['pass_on'] or ['a reward'])} from {stats['pass_threshold']:g} passes"
    )
    for k, found in stats["pass_at_k"].items():
        page.row(f"pass@{k}", format_reward(found["mean"]), format_interval(found["interval"]))
    for k, found in stats["pass_all_k"].items():
        if k != "1":
            page.row(f"pass^{k}", format_reward(found["mean"]), format_interval(found["interval"]))


def _metrics(page: Paragraphs, stats: Mapping[str, Any]) -> None:
    if not stats["metrics"]:
        return
    page.head("Metrics")
    for name, found in stats["metrics"].items():
        if found:
            page.row(one_line(name, 60), format_reward(found["mean"]), format_interval(found["interval"]))


def _errors(page: Paragraphs, stats: Mapping[str, Any]) -> None:
    errors = stats["errors"]
    if not errors["num"]:
        return
    page.head("Errors", f"{count(errors['num'], 'rollout')}, {percent(errors['rate'])}; they count in no average")
    for cause, found in errors["by_cause"].items():
        page.bar_row(one_line(cause, 40), found["num"] / errors["num"], whole(found["num"]), "$error")
        if found["first_message"]:
            page.line((cut(f"  {one_line(found['first_message'], 200)}", page.width), MUTED))


def _stops(page: Paragraphs, stats: Mapping[str, Any]) -> None:
    stops = stats["stop_conditions"]
    if not stops:
        return
    page.head("Stopped by")
    total = sum(stops.values())
    for name, num in sorted(stops.items(), key=lambda pair: -pair[1]):
        page.bar_row(one_line(name, 40), num / total, whole(num), "$accent")
    if stats["truncation_rate"]:
        page.row("truncated", percent(stats["truncation_rate"]), "of rollouts", tone="$warning")


def _spreads(page: Paragraphs, stats: Mapping[str, Any]) -> None:
    tokens, timing = stats.get("tokens"), stats["timing"]
    rows: list[tuple[str, Any, Callable[[float], str]]] = [("turns", stats.get("turns"), "{:.1f}".format)]
    if tokens:
        rows += [
            ("tokens out", tokens["output_per_rollout"], compact),
            ("tokens in", tokens["input_per_rollout"], compact),
        ]
    names = (("total_s", "time"), ("model_s", "of the model"), ("env_s", "of the env"), ("scoring_s", "of scoring"))
    rows += [(title, timing.get(name), duration) for name, title in names]
    known = [(title, spread, show) for title, spread, show in rows if spread]
    if not known:
        return
    page.head("Per rollout")
    room = min(18, page.width // 3)
    each = max(6, (page.width - room) // 4)
    page.line((" " * room + "".join(pad(name, each, is_right=True) for name in ("mean", "p50", "p90", "max")), MUTED))
    for title, spread, show in known:
        values = "".join(pad(show(spread[name]), each, is_right=True) for name in ("mean", "p50", "p90", "max"))
        page.line((pad(title, room), MUTED), values)
    if tokens:
        page.row("tokens, all", f"{compact(tokens['output'])} out", f"{compact(tokens['input'])} in")
    if stats.get("cost"):
        page.row("cost", usd(number(stats["cost"].get("total_usd"))))


def _settings(page: Paragraphs, reader: EvaluationReader) -> None:
    metadata = reader.metadata
    versions = metadata.get("version_info")
    page.head("Settings")
    for name in ("num_examples", "rollouts_per_example", "base_url"):
        if metadata.get(name) is not None:
            page.row(name.replace("_", " "), one_line(metadata[name], 200))
    if metadata.get("time") is not None:
        page.row("took", duration(reader.entry.time_s))
    for title in ("sampling_args", "env_args"):
        values = metadata.get(title)
        for name, value in values.items() if isinstance(values, dict) else ():
            if value not in (None, {}, []):
                page.row(one_line(name, 40), one_line(json.dumps(value, ensure_ascii=False), 200))
    if isinstance(versions, dict) and versions.get("env_version"):
        page.row("version", one_line(versions["env_version"], 40))
    if reader.num_broken:
        page.row("broken lines", whole(reader.num_broken), "could not be read", tone="$error")
    page.line((one_line(reader.entry.name, 400), MUTED))
