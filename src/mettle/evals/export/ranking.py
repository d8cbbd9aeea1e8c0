"""A comparison as one file to hand over: a page for a browser, Markdown, or JSON.

Parts: `write_ranking`, `ranking_markdown`, `ranking_page`. Invariants: the file asks nobody for anything; names of
models and environments are text in it, never markup.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mettle.errors import StorageError, UserError
from mettle.evals.estimator import Estimate
from mettle.evals.export.theme import document
from mettle.evals.ranking import Ranking
from mettle.wording import between, format_reward, printable

HEADS = ("", "model", "environment", "reward", "95 % interval", "passed", "scored", "evaluation")
PAIR_HEADS = ("pair", "difference", "95 % interval", "p", "p of all pairs", "tasks")
_SIGNS = str.maketrans({sign: f"\\{sign}" for sign in "\\|`*_<>[]"})


def write_ranking(found: Ranking, path: Path) -> None:
    """Write `path`, by its ending. Raises: UserError for another ending, StorageError when it cannot be written."""
    write = WRITERS.get(path.suffix.lower())
    if write is None:
        raise UserError(f"{path} ends in none of {', '.join(WRITERS)}, which say what to write")
    try:
        path.write_text(write(found), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def standing_rows(found: Ranking) -> list[tuple[str, ...]]:
    """The evaluations as they were given, one row each, under `HEADS`."""
    return [
        (
            each.word, printable(each.model), printable(each.environment), format_reward(each.reward.mean),
            between(each.reward.interval), format_reward(each.passed.mean), f"{each.num_scored} of {each.num_rollouts}",
            printable(each.name),
        )
        for each in found.standings
    ]  # fmt: skip


def pair_rows(found: Ranking) -> list[tuple[str, ...]]:
    """The pairs, one row each, under `PAIR_HEADS`."""
    return [
        (
            f"{pair.after} - {pair.before}", f"{pair.difference.mean:+.3f}", between(pair.difference.interval),
            _p(pair.difference.p_value), _p(pair.p_holm), str(pair.num_tasks),
        )
        for pair in found.pairs
    ]  # fmt: skip


def ranking_markdown(found: Ranking) -> str:
    """The comparison as Markdown."""
    parts = [
        f"# {len(found.standings)} evaluations on {found.num_tasks} tasks",
        found.verdict[0].upper() + found.verdict[1:] + ".",
        _markdown_table(HEADS, standing_rows(found)),
        "Differences are paired by task. `p of all pairs` is Holm's, which allows for their number.",
        _markdown_table(PAIR_HEADS, pair_rows(found)),
        "\n".join(f"- {printable(told).translate(_SIGNS)}" for told in found.warnings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def ranking_page(found: Ranking) -> str:
    """The comparison as a page."""
    title = f"{len(found.standings)} evaluations on {found.num_tasks} tasks"
    notes = "".join(f"<li>{html.escape(printable(told))}</li>" for told in found.warnings)
    body = (
        f"<h1>{html.escape(title)}</h1>\n<p class='muted'>{html.escape(found.verdict)}</p>\n"
        f"<section class='card'><h2>Reward, with 95 % intervals</h2>\n{_chart(found)}</section>\n"
        f"<section class='card'><h2>Evaluations</h2>\n{_table(HEADS, standing_rows(found))}</section>\n"
        "<section class='card'><h2>Differences, paired by task</h2>\n"
        f"{_table(PAIR_HEADS, pair_rows(found))}"
        "<p class='small muted'>p of all pairs is Holm's, which allows for their number.</p></section>\n"
    )
    if notes:
        body += f"<section class='card'><h2>Notes</h2><ul>{notes}</ul></section>\n"
    return document(title, body)


def _ranking_json(found: Ranking) -> str:
    return json.dumps(found.to_dict(), indent=2) + "\n"


WRITERS: Mapping[str, Callable[[Ranking], str]] = {
    ".html": ranking_page,
    ".md": ranking_markdown,
    ".json": _ranking_json,
}


def _chart(found: Ranking) -> str:
    """A line for each evaluation, best first: its interval, and a dot at its mean."""
    ends = [end for each in found.standings for end in (*(each.reward.interval or ()), each.reward.mean)]
    low, high = float(min(0.0, *ends)), float(max(1.0, *ends))

    def at(value: float) -> float:
        return 70 + 560 * (value - low) / (high - low)

    lines = []
    for place, each in enumerate(found.by_reward):
        y = 18 + 26 * place
        left, right = map(at, _ends(each.reward))
        label = f"{each.word}: {each.model}, {format_reward(each.reward.mean)} {between(each.reward.interval)}"
        lines.append(
            f"<g><title>{html.escape(printable(label))}</title><text x='8' y='{y + 4}'>{each.word}</text>"
            f"<text x='640' y='{y + 4}'>{format_reward(each.reward.mean)}</text>"
            f"<line x1='{left:.1f}' x2='{right:.1f}' y1='{y}' y2='{y}'/>"
            f"<circle cx='{at(each.reward.mean):.1f}' cy='{y}' r='5'/></g>"
        )
    height = 40 + 26 * len(lines)
    axis = f"<text x='70' y='{height - 6}'>{low:g}</text><text x='620' y='{height - 6}'>{high:g}</text>"
    return f"<svg class='chart' viewBox='0 0 700 {height}' role='img' aria-label='rewards'>{''.join(lines)}{axis}</svg>"


def _ends(estimate: Estimate) -> tuple[float, float]:
    return (estimate.mean, estimate.mean) if estimate.interval is None else (estimate.interval[0], estimate.interval[1])


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.translate(_SIGNS) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
