"""`mettle env test` and `mettle env check`: the reward tried without a model, and the whole quality card."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.arguments import json_object
from mettle.cli.checks import print_checks
from mettle.cli.options import ConfigCommand, one_word
from mettle.cli.terminal import json_option, print_json, print_next, print_table
from mettle.errors import StorageError
from mettle.wording import figure, printable

if TYPE_CHECKING:
    from mettle.config.options import Given
    from mettle.quality.card import QualityCard
    from mettle.quality.lint.rules import LintFinding
    from mettle.quality.rewards.reward_test import RewardReport

REPORT_FILE = "QUALITY.md"


@click.command(cls=ConfigCommand, model="mettle.quality.settings:RewardTestOptions", metavar="NAME")
@click.option(
    "--custom",
    type=click.Path(path_type=Path),
    help="JSON file with tests of your own: question or example_id, completion, expected, min or max.",
)
@click.option("-a", "--env-args", help="Arguments of the environment, as JSON.")
@json_option
def test(words: list[str], given: Given, custom: Path | None, env_args: str | None, is_json: bool) -> None:
    """Test the reward without a model. Answers are made from the data: right, wrong, malformed, empty.

    Exits with 1 when a check fails, or when no right answer could be made.
    """
    from mettle.envs import load_environment
    from mettle.envs.packages.loading import resolve_environment
    from mettle.quality.rewards.custom import read_custom_tests
    from mettle.quality.rewards.reward_test import members_of, run_reward_test
    from mettle.quality.settings import read_settings

    name = one_word(words, "NAME")
    settings = read_settings(resolve_environment(name).folder, given)
    env = load_environment(name, **json_object(env_args, "--env-args"))
    tests = read_custom_tests(custom, env) if custom is not None else []
    members = members_of(env)
    reports = [run_reward_test(member, settings, tests if len(members) == 1 else []) for member in members]
    if is_json:
        print_json([report.to_dict() for report in reports] if len(reports) > 1 else reports[0].to_dict())
    else:
        for report in reports:
            _print_report(report)
    if any(report.status in ("fail", "untested") for report in reports):
        raise click.exceptions.Exit(1)
    if not is_json:
        print_next(f"mettle env check {name}{_given(env_args)}")


@click.command()
@click.argument("name")
@click.option("--write", is_flag=True, help="Write the card to QUALITY.md in the environment's folder.")
@click.option("--tests/--no-tests", "is_testing", default=True, help="Run the package's own tests.")
@click.option(
    "--test-timeout", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds for these tests."
)
@click.option("-a", "--env-args", help="Arguments of the environment, as JSON.")
@json_option
def check(name: str, write: bool, is_testing: bool, test_timeout: float, env_args: str | None, is_json: bool) -> None:
    """Check everything about an environment: package, data, reward, lint for reward hacking, baseline.

    Exits with 1 when a check fails, or when one that applies could not be tried.
    """
    from mettle.quality.card import make_card

    card = make_card(
        name,
        json_object(env_args, "--env-args"),
        is_testing=is_testing,
        test_timeout_s=test_timeout,
        on_step=_progress(is_json),
    )
    if is_json:
        print_json(card.to_dict())
    else:
        _print_card(card)
    if write:
        _write(card, is_json)
    if not card.has_passed:
        raise click.exceptions.Exit(1)
    if not is_json:
        print_next(f"mettle eval run {card.name} -m MODEL -n 20 -r 4{_given(env_args)}")


def _given(env_args: str | None) -> str:
    """The arguments of the environment as they were given, for the next command."""
    return f" -a {shlex.quote(env_args)}" if env_args else ""


def _print_report(report: RewardReport) -> None:
    layout = f", written as {report.layout}" if report.layout else ""
    title = f"{report.env_id} ({report.kind}): {report.num_rows} rows, right answers from {report.source}{layout}"
    click.echo(click.style(title, bold=True))
    if report.tried:
        rows = [
            (row["kind"], row["family"], row["num"], row["mean"], row["min"], row["max"], row["errors"], row["meaning"])
            for row in report.table()
        ]
        print_table(("answer", "", "tried", "mean", "least", "most", "errors", "what it is"), rows)
        click.echo()
    print_checks(report.checks)
    for note in report.notes:
        click.echo(f"note: {note}")


def _print_card(card: QualityCard) -> None:
    for section, checks in card.sections.items():
        click.echo(click.style(section, bold=True))
        print_checks(checks)
        if section == "lint":
            for finding in card.lint.findings:
                _print_finding(finding)
        click.echo()
    click.echo(f"{card.name} {card.version}: {figure(card.status)}")


def _print_finding(finding: LintFinding) -> None:
    rule = finding.rule
    head = f"{finding.file}:{finding.line}: {rule.id} ({rule.severity}): {printable(finding.what)}"
    if finding.allowed:
        click.echo(f"  {head}; allowed: {printable(finding.allowed)}")
        return
    click.echo(f"  {click.style(head, fg='red' if rule.severity == 'error' else 'yellow')}")
    click.echo(f"    why: {rule.why}")
    click.echo(f"    fix: {rule.fix}")


def _progress(is_json: bool) -> Any:
    """Say what is being done, on a terminal and nowhere else."""
    import sys

    if is_json or not sys.stderr.isatty():
        return lambda step: None
    return lambda step: click.echo(f"checking: {step}", err=True)


def _write(card: QualityCard, is_json: bool) -> None:
    from mettle.quality.markdown import card_markdown

    path = (card.folder or Path()) / REPORT_FILE
    try:
        path.write_text(card_markdown(card), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    if not is_json:
        click.echo(f"wrote {path}")
