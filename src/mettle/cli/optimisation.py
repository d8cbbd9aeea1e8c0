"""A prompt optimisation from the command line: read what was asked, run, show, summarise."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.local_server import serving
from mettle.cli.options import print_config, split_words, with_words
from mettle.cli.terminal import going_on, print_json, print_next, print_table
from mettle.errors import UserError
from mettle.gepa.config import load_spec, read_file
from mettle.runs.program import program
from mettle.wording import between, duration, figure, format_reward, printable, usd

if TYPE_CHECKING:
    from mettle.config.options import Given
    from mettle.evals.estimator import Estimate
    from mettle.gepa.held_out import HeldOutComparison
    from mettle.gepa.progress import SearchProgress
    from mettle.gepa.run import SearchOutcome

LINE_EVERY_S = 5.0
DRAW_EVERY_S = 0.25
EXCERPT_LINES = 12
STAGES = {"before": "measuring the start", "search": "searching", "after": "measuring the best"}


def optimise(
    words: Sequence[str], resume: Path | None, given: Given, *, is_json: bool, is_plain: bool, is_dry_run: bool = False
) -> None:
    """Run or resume an optimisation and print what came of it.

    Raises: UserError for a request that cannot be met, ServiceError when the models cannot be reached.
    """
    from mettle.gepa.run import prepare, resumed

    files, names = split_words(words)
    given = with_words(given, "env_id", names)
    loaded = resumed(resume, files, given) if resume is not None else load_spec([*map(read_file, files)], given, files)
    if is_dry_run:
        print_config(loaded, is_json=is_json)
        return
    spec = loaded.config
    with ExitStack() as servers:
        plan = prepare(spec, serving(servers))
        servers.enter_context(going_on(_how_to_go_on(plan.path)))
        if not is_json:
            sizes = plan.split
            click.echo(
                f"{spec.env_id} with {plan.prepared.target.model}, rewritten by {plan.reflection.model}: "
                f"{len(sizes.train)} rows to learn from, {len(sizes.val)} to choose by, {len(sizes.test)} held out",
                err=True,
            )
        display = Display(is_quiet=is_json, is_live=not is_plain and sys.stderr.isatty())
        try:
            outcome = plan.run(display.show, display.say)
        finally:
            display.close()
    if is_json:
        print_json(_document(outcome))
    else:
        _print(outcome, env_id=spec.env_id, title=f"{spec.env_id} with {spec.model}")


def _how_to_go_on(path: Path | None) -> str:
    if path is None:
        return "nothing was saved"
    return f"the best prompt so far is in {path}; `{program()} gepa run --resume {path}` goes on"


class Display:
    """A search as it runs: one line that changes on a terminal, a line now and then elsewhere, events as they come."""

    def __init__(self, *, is_quiet: bool, is_live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_quiet, self._is_live, self._clock = is_quiet, is_live and not is_quiet, clock
        self._shown = clock()
        self._has_line = False

    def show(self, progress: SearchProgress) -> None:
        """Figures have changed."""
        now = self._clock()
        if self._is_quiet or now - self._shown < (DRAW_EVERY_S if self._is_live else LINE_EVERY_S):
            return
        self._shown = now
        line = _line_of(progress)
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            click.echo(f"\r\x1b[2K{printable(line)[:width]}", nl=False, err=True)
            self._has_line = True
        else:
            click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)

    def say(self, text: str) -> None:
        """Something worth a line of its own."""
        if not self._is_quiet:
            self.close()
            click.echo(printable(text), err=True)

    def close(self) -> None:
        """Leave the changing line behind."""
        if self._has_line:
            click.echo("\r\x1b[2K", nl=False, err=True)
            self._has_line = False


def _line_of(progress: SearchProgress) -> str:
    parts = [STAGES[progress.stage], f"{progress.num_rollouts} rollouts"]
    if progress.stage == "search":
        parts += [f"{progress.num_calls}/{progress.max_calls} calls", f"{progress.num_candidates} candidates"]
        if progress.best_score is not None:
            parts.append(f"best {figure(progress.best_score)} on the validation rows")
    if progress.num_errors:
        parts.append(f"{progress.num_errors} failed")
    return ", ".join(parts)


def _document(outcome: SearchOutcome) -> dict[str, Any]:
    search = outcome.search
    return {
        "path": str(outcome.path) if outcome.path else None,
        "best_prompt": outcome.best_prompt,
        "best_candidate": outcome.best,
        "start_prompt": outcome.start_prompt,
        "num_candidates": len(search.candidates),
        "best_idx": search.best,
        "start_score": search.averages[0],
        "best_score": search.averages[search.best],
        "total_metric_calls": search.num_calls,
        "num_iterations": search.num_iterations,
        "num_reflections": outcome.num_reflections,
        "num_failed_rollouts": outcome.num_errors,
        "held_out": outcome.comparison.to_dict() if outcome.comparison else None,
        "cost_usd": outcome.cost_usd,
        "time_s": outcome.time_s,
    }


def _print(outcome: SearchOutcome, *, env_id: str, title: str) -> None:
    search = outcome.search
    rows = [
        (
            "validation rows",
            f"{figure(search.averages[0])} at the start, {figure(search.averages[search.best])} at best",
        ),
        *_held_out_rows(outcome),
        ("candidates", f"{len(search.candidates)}, from {outcome.num_reflections} reflections"),
        ("calls", f"{search.num_calls} in {search.num_iterations} rounds"),
    ]
    if outcome.num_errors:
        rows.append(("failed rollouts", f"{outcome.num_errors}, which count neither way"))
    if outcome.cost_usd is not None:
        rows.append(("cost of the model", usd(outcome.cost_usd)))
    rows.append(("time", duration(outcome.time_s)))
    if outcome.path is not None:
        rows.append(("saved in", str(outcome.path)))
    print_table(("", ""), rows, title=title)
    click.echo()
    if search.best == 0:
        click.echo("no candidate was better than the prompt at the start")
    lines = printable(outcome.best_prompt).splitlines() or ["(no system prompt)"]
    for line in lines[:EXCERPT_LINES]:
        click.echo(f"  {line}")
    if len(lines) > EXCERPT_LINES:
        click.echo(f"  ... {len(lines) - EXCERPT_LINES} more lines")
    if outcome.evaluate is not None and search.best:
        print_next(f"mettle eval run {outcome.evaluate}")
    elif outcome.path is not None:
        print_next(f"mettle gepa run --resume {outcome.path} --max-calls {2 * search.num_calls}")
    else:
        print_next(f"mettle eval run {env_id}")


def _held_out_rows(outcome: SearchOutcome) -> list[tuple[str, str]]:
    found = outcome.comparison
    if found is None or found.before is None or found.after is None:
        return [("held-out rows", "none to measure on")]
    rows = [
        (f"before, {found.num_rows} held-out rows", _with_interval(found.before)),
        ("after, the same rows", _with_interval(found.after)),
    ]
    return [*rows, ("difference", _difference(found))]


def _with_interval(found: Estimate) -> str:
    bounds = f" (95 % interval {between(found.interval)})" if found.interval else ""
    return f"{format_reward(found.mean)}{bounds}"


def _difference(found: HeldOutComparison) -> str:
    difference = found.difference
    if difference is None:
        raise UserError("there is no row with a reward both before and after")
    if difference.interval is None:
        return f"{difference.mean:+.3f} (one row gives no interval)"
    low, high = difference.interval
    return f"{difference.mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f}, p = {difference.p_value:.2g})"
