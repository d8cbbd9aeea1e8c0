"""`mettle rl`: start, continue, watch and stop runs. The running itself is in `mettle.runs.launch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.groups import NounGroup
from mettle.cli.outside import invite, work, workers
from mettle.cli.replay import replay
from mettle.cli.rl_hosted import checkpoints, restart, submit_hosted
from mettle.cli.rollouts import rollouts
from mettle.cli.shares import go_on, share
from mettle.cli.terminal import (
    beginning_run,
    check_free,
    find_run,
    going_on,
    going_on_from_any_stop,
    json_option,
    print_json,
    print_next,
    print_table,
)
from mettle.errors import UserError
from mettle.wording import duration

if TYPE_CHECKING:
    from mettle.runs.launch import RunOutcome

RUNS = Path("runs")
STOPPED = 130


@click.group(cls=NounGroup)
def rl() -> None:
    """Train a model with reinforcement learning: run, resume, watch, stop."""


@rl.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="FILES... [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print the resolved config with the source of each value, and stop.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Run directory.  [default: new, under runs/]")
@click.option("--hosted", is_flag=True, help="Submit it to the Hub in use, whose machine runs it.")
@click.option(
    "--override-card", is_flag=True, help="With --hosted: also where the quality card of an environment has failed."
)
@click.option(
    "--share", "share_dir", type=click.Path(path_type=Path), help="Train beside the runs of a share that is running."
)
@json_option
def run(
    arguments: Sequence[str],
    dry_run: bool,
    directory: Path | None,
    hosted: bool,
    override_card: bool,
    share_dir: Path | None,
    is_json: bool,
) -> int:
    """Train from config files, composed left to right, then overrides.

    \b
    mettle rl run base.toml mine.toml --trainer.optim.lr 3e-6 --no-deployment.hub
    mettle rl run --trainer t.toml --orchestrator o.toml --inference i.toml
    mettle rl run mine.toml --hosted
    """
    files, overrides = split_arguments(arguments)
    if not files and not _names_a_file(overrides):
        raise UserError("name a config file, as in `mettle rl run configs/reverse-text.toml`")
    if hosted:
        if overrides or dry_run or directory is not None or share_dir is not None or len(files) != 1:
            raise UserError("--hosted takes one file as it stands, and no overrides, --dry-run, --dir or --share")
        submit_hosted(files[0], is_json=is_json, is_overridden=override_card)
        return 0
    if override_card:
        raise UserError("--override-card is for --hosted runs; nothing here looks at a card")
    if share_dir is not None:
        overrides = [*overrides, "--deployment.share", str(share_dir.resolve())]
    if dry_run:
        _show_config(files, overrides, is_json=is_json)
        return 0
    with beginning_run("`mettle rl list` shows the run, and `mettle rl resume RUN` continues it") as begun:
        from mettle.runs import launch

        loaded = launch.load_run_config(files, overrides)
        return _end(launch.run(loaded, directory, is_quiet=is_json, begun=begun), is_json=is_json)


@rl.command()
@click.argument("env")
@click.option(
    "--model", required=True, type=click.Path(path_type=Path), help="Model directory in the Hugging Face layout."
)
@click.option("--to", "path", type=click.Path(path_type=Path), help="The file.  [default: ENV-MODEL.toml]")
@click.option("--full", "is_full", is_flag=True, help="Train all weights instead of adapters.")
def init(env: str, model: Path, path: Path | None, is_full: bool) -> None:
    """Write a config that trains your own model on an environment."""
    from mettle.runs.first_config import write_first_config

    name = env.split("/")[-1].split("@")[0]
    path = write_first_config(env, model, path or Path(f"{name}-{model.resolve().name}.toml"), is_full=is_full)
    click.echo(f"wrote {path}")
    print_next(f"mettle rl plan {path}")


@rl.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="FILES... [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@json_option
def plan(arguments: Sequence[str], is_json: bool) -> None:
    """Say beforehand what a run takes: seconds a step and memory, from two rollouts and one micro step."""
    from mettle.runs import launch
    from mettle.runs.plan import plan, plan_lines

    files, overrides = split_arguments(arguments)
    if not files and not _names_a_file(overrides):
        raise UserError("name a config file, as in `mettle rl plan configs/reverse-text.toml`")
    found = plan(launch.load_run_config(files, overrides))
    if is_json:
        print_json(found)
        return
    click.echo("\n".join(plan_lines(found)))
    print_next(f"mettle rl run {' '.join(arguments)}")


@rl.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="FILES... [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--from", "measured", required=True, metavar="RUN", help="The run whose measured times are taken.")
@click.option("--gpus", "num_gpus", type=click.IntRange(1), default=1, show_default=True, help="Devices.")
@click.option("--trainer-ranks", type=click.IntRange(1), help="Devices that train.  [default: the best]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the simulated schedule.")
@json_option
def simulate(
    arguments: Sequence[str], measured: str, num_gpus: int, trainer_ranks: int | None, seed: int, is_json: bool
) -> None:
    """Predict throughput, idle shares and staleness on other numbers of devices, from an earlier run's times."""
    from dataclasses import asdict

    from mettle.runs import launch
    from mettle.runs.simulate import layouts, measure, predict, prediction_lines

    files, overrides = split_arguments(arguments)
    if not files:
        raise UserError("name a config file, as in `mettle rl simulate configs/reverse-text.toml --from RUN`")
    config = launch.load_run_config(files, overrides).config.orchestrator
    seen = measure(find_run(measured))
    tried = [
        predict(config, seen, num_engines=engines, num_ranks=ranks, seed=seed)
        for engines, ranks in layouts(num_gpus, num_ranks=trainer_ranks)
    ]
    best = min(tried, key=lambda found: (found["step_s"], found["num_ranks"]))
    if is_json:
        times = {name: value for name, value in asdict(seen).items() if not isinstance(value, tuple)}
        print_json({"measured": times, "predicted": best, "tried": tried})
        return
    click.echo("\n".join(prediction_lines(best, seen)))


@rl.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="FILES... [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Run directory.  [default: new, under runs/]")
def create(arguments: Sequence[str], directory: Path | None) -> None:
    """Make a run from config files and start none of its processes."""
    from mettle.runs import launch
    from mettle.runs.alone import processes_of

    files, overrides = split_arguments(arguments)
    made = launch.create(launch.load_run_config(files, overrides), directory)
    names = [spec.name for spec in processes_of(made).values()]
    click.echo(f"made {made.path}; it needs {', '.join(names)}")
    print_next(f"mettle rl start {directory or Path('runs') / made.name} {names[0]}")


@rl.command()
@click.argument("run")
@click.argument("process")
def start(run: str, process: str) -> None:
    """Run one process of a run in this terminal, unwatched; the others are started alike.

    \b
    mettle rl create mine.toml --dir RUN
    mettle rl start RUN sft              # then each of these in a terminal of its own:
    mettle rl start RUN inference
    mettle rl start RUN trainer
    mettle rl start RUN orchestrator
    """
    from mettle.runs.alone import start_alone
    from mettle.storage.run_dir import RunDir

    start_alone(RunDir.existing(find_run(run)), process)


@rl.command()
@click.argument("run")
@json_option
def resume(run: str, is_json: bool) -> int:
    """Continue a run, or a share with its runs, that was stopped or killed."""
    if (Path(run) / "share.json").exists():
        return go_on(Path(run), is_json=is_json)
    path = find_run(run)
    with beginning_run(f"`mettle rl resume {run}` continues the run") as begun:
        from mettle.runs import launch

        return _end(launch.resume(path, is_quiet=is_json, begun=begun), is_json=is_json)


@rl.command(context_settings={"ignore_unknown_options": True})
@click.argument("run")
@click.argument("overrides", metavar="[--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--step", type=click.IntRange(0), help="Of the checkpoint; 0 is the initial policy.  [default: newest]")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Run directory.  [default: runs/RUN-vSTEP]")
@click.option("--no-start", is_flag=True, help="Make the run, and leave its start to `mettle rl resume`.")
@json_option
def branch(
    run: str, overrides: Sequence[str], step: int | None, directory: Path | None, no_start: bool, is_json: bool
) -> int:
    """Train on from a checkpoint in a new run, for longer or with other settings.

    \b
    mettle rl branch RUN --max_steps 800
    mettle rl branch RUN --step 100 --trainer.optim.lr 1e-4

    The new run begins with the weights, the optimiser, the tasks and the figures of RUN's first STEP steps; RUN stays
    as it is, and may be running.
    """
    files, overrides = split_arguments(overrides)
    if files:
        raise UserError(f"{files[0]}: a branch takes its settings from RUN; change some with --KEY VALUE")
    how = "`mettle rl list` shows the branch if it was made already, and `mettle rl resume RUN` continues it"
    with going_on_from_any_stop(how):
        from mettle.runs import launch
        from mettle.runs.branch import branch as make_branch
        from mettle.storage.run_dir import RunDir

        made = make_branch(RunDir.existing(find_run(run)), step, overrides, directory, RUNS)
        if not no_start:
            with going_on(f"`mettle rl resume {made.path}` continues the run"):
                return _end(launch.drive(made, is_quiet=is_json), is_json=is_json)
    if is_json:
        print_json({"run": made.name, "run_dir": str(made.path)})
    else:
        click.echo(f"made {made.path}")
        print_next(f"mettle rl resume {made.path}")
    return 0


@rl.command()
@click.argument("run")
def stop(run: str) -> None:
    """End a run cleanly; it can be continued."""
    from mettle.runs import launch

    path = find_run(run)
    click.echo(f"stopped {run}" if launch.stop(path) else f"{run} was not running")
    print_next(f"mettle rl {'metrics' if launch.is_finished(path) else 'resume'} {run}")


@rl.command("list")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=RUNS, help="Folder of runs.  [default: runs]"
)
@json_option
def list_runs(directory: Path, is_json: bool) -> None:
    """List the runs in a folder, newest first."""
    from mettle.runs import launch

    runs = launch.list_runs(directory)
    if is_json:
        print_json(runs)
        return
    if not runs:
        click.echo(f"no runs in {directory}")
        print_next("mettle quickstart")
        return
    rows = [
        (
            row["run"],
            row.get("state"),
            f"{row.get('steps', '-')}/{row.get('max_steps', '-')}",
            _mean(row.get("baseline")),
            _mean(row.get("final")),
            duration(row.get("wall_s")),
            row.get("error") or "",
        )
        for row in runs
    ]
    print_table(("run", "state", "step", "baseline", "final", "time", ""), rows)
    print_next(f"mettle rl metrics {runs[0]['run_dir']}")


@rl.command()
@click.argument("run")
@click.option("--name", "names", multiple=True, help="Show this metric step by step; `reward/*` shows several.")
@json_option
def metrics(run: str, names: Sequence[str], is_json: bool) -> None:
    """Show the figures of a run. The newest of each, or with --name some of them step by step."""
    import fnmatch

    from mettle.storage.ledger import Ledger
    from mettle.storage.run_dir import RunDir

    ledger = Ledger(RunDir.existing(find_run(run)).ledger, is_read_only=True)
    try:
        known = ledger.journal.metric_names()
        wanted = [name for name in known if not names or any(fnmatch.fnmatchcase(name, n) for n in names)]
        if names and not wanted:
            raise UserError(f"run {run} has no metric {', '.join(names)}; it has {', '.join(known) or 'none yet'}")
        series = {name: ledger.journal.metric(name) for name in wanted}
    finally:
        ledger.close()
    if is_json:
        print_json(
            {"run": run, "metrics": {name: [list(point) for point in points] for name, points in series.items()}}
        )
    elif names:
        _print_series(series)
    else:
        rows = [(name, points[-1][0], points[-1][1], len(points)) for name, points in series.items()]
        print_table(("metric", "step", "newest", "points"), rows)
        print_next(f"mettle rl metrics {run} --name 'reward/*'")


@rl.command()
@click.argument("run")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--version", type=int, help="This one of the run's versions.  [default: the newest]")
def export(run: str, folder: Path, version: int | None) -> None:
    """Write a version of the policy as a model directory that transformers and other engines load."""
    from mettle.runs.export import find_version, write_model
    from mettle.storage.run_dir import RunDir

    check_free(folder)
    run_dir = RunDir.existing(find_run(run))
    chosen = find_version(run_dir, version)
    write_model(run_dir, chosen, folder)
    click.echo(f"wrote v{chosen.version} of {run_dir.name} to {folder}")
    print_next(f'mettle inference chat {folder} -q "..."')


rl.add_command(replay)
rl.add_command(rollouts)
rl.add_command(share)
for command in (invite, work, workers, restart, checkpoints):
    rl.add_command(command)


@rl.command()
@click.argument("run")
@click.argument("process", required=False)
@click.option("-n", "--lines", "num_lines", default=50, show_default=True, help="How many of the newest lines.")
@click.option("-f", "--follow", is_flag=True, help="Go on as lines are written, until Ctrl-C.")
@click.option("--raw", is_flag=True, help="What the process printed, rather than its log.")
@json_option
def logs(run: str, process: str | None, num_lines: int, follow: bool, raw: bool, is_json: bool) -> None:
    """Show the log of a run, of all its processes or of one."""
    from mettle.cli.logs import show_logs
    from mettle.storage.run_dir import RunDir

    folder = RunDir.existing(find_run(run)).logs
    with going_on("the run itself goes on"):
        show_logs(folder, process, num_lines=num_lines, is_following=follow, is_raw=raw, is_json=is_json)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files first, then overrides. `@` before a file is allowed, as elsewhere in this field."""
    first = next((at for at, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    files = [word.removeprefix("@") for word in arguments[:first]]
    return [Path(file) for file in files if file], list(arguments[first:])


def _show_config(files: Sequence[Path], overrides: Sequence[str], *, is_json: bool) -> None:
    from mettle.runs.launch import load_run_config

    loaded = load_run_config(files, overrides)
    if loaded.config.deployment.engine == "ray":
        from mettle.runs.cluster.placement import placement_of

        wanted = ", ".join(map(str, placement_of(loaded.config).bundles))
        click.echo(f"note: on the cluster it takes {wanted}; `mettle rl plan` says on which nodes", err=True)
    if is_json:
        print_json({"config": loaded.config.model_dump(mode="json"), "sources": loaded.sources})
    else:
        click.echo(loaded.render(), nl=False)


def _names_a_file(overrides: Sequence[str]) -> bool:
    """Whether a table comes from a file, as in `--orchestrator orchestrator.toml`."""
    return any(word.startswith("@") or word.endswith(".toml") for word in overrides)


def _end(outcome: RunOutcome, *, is_json: bool) -> int:
    from mettle.runs.summary import summary_lines
    from mettle.storage.ledger import Ledger

    path = outcome.run_dir.path
    if is_json:
        print_json(outcome.summary)
    else:
        ledger = Ledger(outcome.run_dir.ledger, is_read_only=True)
        try:
            lines = summary_lines(outcome.summary, ledger)
        finally:
            ledger.close()
        click.echo("\n".join(lines))
    if outcome.is_stopped:
        click.echo(f"stopped; `mettle rl resume {path}` continues the run", err=True)
        return STOPPED
    if not is_json:
        print_next(f"mettle rl metrics {path}")
    return 0


def _mean(evaluation: dict[str, Any] | None) -> float | None:
    return None if not evaluation or evaluation.get("mean") is None else float(evaluation["mean"])


def _print_series(series: dict[str, list[tuple[int, float]]]) -> None:
    steps = sorted({step for points in series.values() for step, _ in points})
    columns = {name: dict(points) for name, points in series.items()}
    print_table(("step", *columns), [(step, *(points.get(step) for points in columns.values())) for step in steps])
